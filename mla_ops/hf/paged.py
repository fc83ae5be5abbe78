"""A transformers model over a paged latent cache: one forward for a whole mixed batch.

The new tokens of all requests form one row of `input_ids` `[1, T]`, each with its own position; the
forward runs without a transformers cache, and every MLA layer writes its new latents into its own
paged cache and attends through it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mla_ops.errors import InvalidInputError
from mla_ops.metadata import MLAMetadata
from mla_ops.paged import mla_paged_attention, update_kv_cache

__all__ = ["PagedModelCache", "in_paged_batch", "paged", "paged_forward"]


@dataclass(frozen=True)
class PagedModelCache:
    """The paged caches of a model's MLA layers.

    Attributes:
        layers: `[num_blocks, block_size, L+R]` of each layer, by its `layer_idx`.
        block_size: tokens per block.
        num_blocks: blocks of each layer.
        kv_scale: one element for an fp8 cache, else None.
    """

    layers: Mapping[int, Tensor]
    block_size: int
    num_blocks: int
    kv_scale: Tensor | None = None

    @classmethod
    def allocate(
        cls,
        model: nn.Module,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype | None = None,
        kv_scale: Tensor | None = None,
    ) -> PagedModelCache:
        """Allocate the caches of a model.

        Args:
            model: a transformers model with MLA layers.
            num_blocks: blocks of each layer.
            block_size: tokens per block.
            dtype: of the cache; None for the model's.
            kv_scale: one element, for fp8.

        Raises:
            InvalidInputError: the model has no MLA layer, one would run stock code, or the cache
                cannot serve a kind of layer that it has.
        """
        from mla_ops.hf.attention import IMPLEMENTATION, is_mla, refusal

        layers: dict[int, Tensor] = {}
        for module in model.modules():
            if is_mla(module):
                attention: Any = module
                why = refusal(attention) or _other_layers(attention.config)
                if why is None and attention.config._attn_implementation != IMPLEMENTATION:
                    why = "the model is not patched"
                if why is not None:
                    raise InvalidInputError(
                        f"layer {attention.layer_idx} cannot use a paged cache: {why}"
                    )
                weight = attention.kv_b_proj.weight
                width = attention.kv_lora_rank + attention.qk_rope_head_dim
                layers[attention.layer_idx] = torch.zeros(
                    num_blocks, block_size, width, dtype=dtype or weight.dtype, device=weight.device
                )
        if not layers:
            raise InvalidInputError(f"{type(model).__name__} has no MLA layer to allocate for")
        return cls(layers, block_size, num_blocks, kv_scale)

    def nbytes(self) -> int:
        """Return the size of all layers in bytes."""
        return sum(layer.nbytes for layer in self.layers.values())


def _other_layers(config: Any) -> str | None:
    """Return which layers of a model need more than a paged cache of latents, None for no such.

    Linear attention keeps a state for each request: it would take the batch for one sequence.
    """
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    return f"the model has layers of {', '.join(sorted(kinds))}" if kinds else None


_batch: ContextVar[tuple[PagedModelCache, MLAMetadata] | None] = ContextVar(
    "mla_ops_paged_batch", default=None
)


class _Eager:
    """Has compiled code run eagerly while a block is open, in whichever thread.

    A graph cannot read the variable of the batch: a compiled layer would attend to the new tokens
    alone, and nothing would say so. torch keeps its stance for the process, so blocks are counted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._stance: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if self._open == 0:
                self._stance = torch.compiler.set_stance("force_eager")
            self._open += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._open -= 1
            if self._open == 0:
                self._stance.__exit__(*error)


_eager = _Eager()


@contextmanager
def paged(cache: PagedModelCache, metadata: MLAMetadata) -> Iterator[None]:
    """Let every MLA layer that runs in the block use the paged cache.

    The model runs `attn_implementation="mla_ops"`, on `input_ids` and `position_ids` `[1, T]` in
    the order of the batch, with `use_cache=False`. What `torch.compile` compiled runs eagerly in
    the block; the block itself cannot be compiled.

    Args:
        cache: the model's caches.
        metadata: the batch.
    """
    token = _batch.set((cache, metadata))
    try:
        with _eager:
            yield
    finally:
        _batch.reset(token)


def in_paged_batch() -> bool:
    """Whether a `paged` block is active; never in a graph: Dynamo cannot read the variable."""
    return not torch.compiler.is_compiling() and _batch.get() is not None


def paged_forward(
    module: Any, query: Tensor, latent: Tensor, rope: Tensor, scaling: float
) -> Tensor:
    """Write and attend for one layer inside of a `paged` block.

    Args:
        module: the attention module.
        query: `[1, H, T, P+R]`.
        latent: `[1, 1, T, L]`, the new tokens'.
        rope: `[1, 1, T, R]`.
        scaling: factor on the scores.

    Returns:
        `[1, T, H, V]`.

    Raises:
        InvalidInputError: there is no block, the batch is not one row, or the layer has no cache.
    """
    state = _batch.get()
    if state is None:
        raise InvalidInputError("a paged forward needs an active `paged` block")
    cache, metadata = state
    if query.shape[0] != 1 or latent.shape[2] != query.shape[2]:
        raise InvalidInputError(
            "a paged forward needs input_ids of shape [1, T] and use_cache=False, got queries of "
            f"shape {tuple(query.shape)} and {latent.shape[2]} keys"
        )
    if module.layer_idx not in cache.layers:
        raise InvalidInputError(
            f"layer {module.layer_idx} has no paged cache; there are {sorted(cache.layers)}"
        )
    kv_cache = cache.layers[module.layer_idx]
    kv_c, k_pe = latent[0, 0], rope[0, 0]
    update_kv_cache(kv_c, k_pe, kv_cache, metadata.slot_mapping, kv_scale=cache.kv_scale)
    out, _ = mla_paged_attention(
        query[0].transpose(0, 1),
        kv_c,
        k_pe,
        module.kv_b_proj.weight,
        kv_cache,
        metadata,
        softmax_scale=scaling,
        kv_scale=cache.kv_scale,
    )
    return out[None]
