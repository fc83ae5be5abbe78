"""Named cases, from the widths of public models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_ops.dims import MLADims

__all__ = ["CASES", "QUICK", "Case"]


@dataclass(frozen=True)
class Case:
    """One attention layer with some tokens cached and some new.

    Attributes:
        model: a preset of `MLADims`.
        batch: requests.
        new: new tokens per request.
        cached: tokens per request that are in the cache before.
        dtype: of all tensors.
    """

    model: str
    batch: int
    new: int
    cached: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def dims(self) -> MLADims:
        """Widths of the layer."""
        return MLADims.preset(self.model)

    @property
    def context(self) -> int:
        """Keys per request, the new ones included."""
        return self.cached + self.new

    def __str__(self) -> str:
        """Name the case: model, then `batch x new on cached`."""
        return f"{self.model} {self.batch} x {self.new} on {self.cached}"

    @property
    def flops(self) -> float:
        """Least FLOPs of the two forms, causal rule included, projections of the layer excluded."""
        dims, pairs = self.dims, self.new * (self.cached + (self.new + 1) / 2)
        pair_width = dims.qk_nope_head_dim + dims.v_head_dim
        expanded = 2 * pairs * (dims.qk_head_dim + dims.v_head_dim)
        expanded += 2 * self.context * dims.kv_lora_rank * pair_width
        absorbed = 2 * pairs * (dims.latent_dim + dims.kv_lora_rank)
        absorbed += 2 * self.new * dims.kv_lora_rank * pair_width
        return self.batch * dims.num_heads * min(expanded, absorbed)

    @property
    def bytes(self) -> int:
        """Least bytes read: the latents once, and the weight."""
        dims = self.dims
        rows = self.batch * self.context * dims.latent_dim
        return (rows + dims.expanded_dim * dims.kv_lora_rank) * self.dtype.itemsize

    def tensors(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw query, kv_c, k_pe and w_kv_b, scaled so that the softmax is neither flat nor sharp.

        Args:
            seed: of the generator.
        """
        dims, generator = self.dims, torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        return (
            draw(self.batch, dims.num_heads, self.new, dims.qk_head_dim),
            draw(self.batch, self.context, dims.kv_lora_rank),
            draw(self.batch, self.context, dims.qk_rope_head_dim),
            draw(dims.expanded_dim, dims.kv_lora_rank).mul_(dims.kv_lora_rank**-0.5),
        )


_LITE, _V3 = "deepseek-v2-lite", "deepseek-v3"

QUICK: tuple[Case, ...] = (
    Case(_LITE, 1, 1, 512),
    Case(_LITE, 1, 1, 8192),
    Case(_LITE, 1, 512, 8192),
    Case(_LITE, 1, 2048, 0),
)
"""What `mla-ops bench --quick` runs."""

CASES: tuple[Case, ...] = (
    *QUICK,
    Case(_LITE, 1, 1, 2048),
    Case(_LITE, 1, 1, 32768),
    Case(_LITE, 4, 1, 8192),
    Case(_LITE, 32, 1, 512),
    Case(_LITE, 1, 128, 8192),
    Case(_LITE, 1, 2048, 8192),
    Case(_V3, 1, 1, 8192),
    Case("glm-4.7-flash", 1, 1, 8192),
    Case("minicpm3", 1, 1, 8192),
)
"""All cases."""
