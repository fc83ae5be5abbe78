"""Widths of one MLA layer, and what follows from them for its weight and its dtypes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

import torch
from torch import Tensor

from mla_ops.errors import InvalidInputError

__all__ = ["PRESETS", "MLADims", "split_kv_b", "stat_dtype"]

_FEW_TOKENS = 4  # for which a weight is read, not multiplied


@dataclass(frozen=True)
class MLADims:
    """Head count and widths of one MLA layer, under their names in transformers' configs.

    Attributes:
        num_heads: query heads (H).
        kv_lora_rank: width of the cached latent (L).
        qk_nope_head_dim: per-head width without rotary position (P).
        qk_rope_head_dim: width of the shared rotary key (R); 0 where a model has none.
        v_head_dim: per-head width of the values (V).

    Example:
        >>> from mla_ops import MLADims
        >>> dims = MLADims.preset("deepseek-v3")
        >>> dims.qk_head_dim, dims.latent_dim, round(dims.expand_threshold)
        (192, 576, 171)
    """

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        """Refuse widths that no layer can have."""
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("qk_rope_head_dim", "qk_nope_head_dim") else 1
            if not isinstance(value, int) or value < least:
                raise InvalidInputError(
                    f"{field.name} must be an int >= {least}, got {value!r} in {self}"
                )
        if self.qk_head_dim == 0:
            raise InvalidInputError(
                f"qk_nope_head_dim and qk_rope_head_dim must not both be 0, got {self}"
            )

    @property
    def qk_head_dim(self) -> int:
        """Width of one query head, P + R."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Width of one cached row, L + R."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def expanded_dim(self) -> int:
        """Width of one token after `kv_b_proj`, H * (P + V)."""
        return self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)

    @property
    def expand_threshold(self) -> float:
        """New tokens above which expanding the latent costs fewer FLOPs than absorbing.

        Per context token and head, absorbed attention costs 2(2L + R) FLOPs a query token, expanded
        attention 2(P + R + V) and once 2L(P + V) for the expansion. Infinite where absorbing always
        wins.
        """
        absorbed = 2 * self.kv_lora_rank + self.qk_rope_head_dim
        expanded = self.qk_head_dim + self.v_head_dim
        if absorbed <= expanded:
            return math.inf
        once = self.kv_lora_rank * (self.qk_nope_head_dim + self.v_head_dim)
        return once / (absorbed - expanded)

    def should_expand(self, num_queries: int, num_keys: int) -> bool:
        """Whether expanding costs fewer FLOPs than absorbing for one causal request.

        The up projections act on the queries and results in one form, on the keys in the other. So
        a prompt without a context is always expanded, where a pair costs less so; behind a long
        context the turn is at `expand_threshold`. For a handful of tokens the projections cost the
        reading of their weight in both forms, and in the absorbed one requests can share it.

        Args:
            num_queries: new tokens.
            num_keys: keys, those of the new tokens included.

        Example:
            >>> dims = MLADims.preset("deepseek-v3")
            >>> [dims.should_expand(100, keys) for keys in (100, 300, 8192)]
            [True, False, False]
        """
        once = self.kv_lora_rank * (self.qk_nope_head_dim + self.v_head_dim)
        gain = 2 * self.kv_lora_rank - self.qk_nope_head_dim - self.v_head_dim
        context = num_keys - num_queries
        first = max(0, -context)  # queries that see nothing
        pairs = (num_queries - first) * (num_keys + context + first + 1) // 2
        return num_queries > _FEW_TOKENS and context * once < pairs * gain

    @classmethod
    def preset(cls, name: str) -> MLADims:
        """Return the widths of a public model.

        Args:
            name: one of `mla_ops.dims.PRESETS`.

        Raises:
            InvalidInputError: there is no such preset; the message lists them.
        """
        if name not in PRESETS:
            raise InvalidInputError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}")
        return PRESETS[name]

    @classmethod
    def from_config(cls, config: object) -> MLADims:
        """Read the widths from a transformers config, or from anything with its attributes.

        A composite config (a vision-language model's, say) is read through its text config.

        Args:
            config: object with `num_attention_heads`, `kv_lora_rank`, `qk_nope_head_dim`,
                `qk_rope_head_dim` and `v_head_dim`.

        Raises:
            InvalidInputError: one of them is missing or no int; the message names them.
        """
        get_text_config = getattr(config, "get_text_config", None)
        text = get_text_config() if callable(get_text_config) else config
        names = {
            "num_heads": "num_attention_heads",
            **{f.name: f.name for f in fields(cls) if f.name != "num_heads"},
        }
        found = {field: getattr(text, name, None) for field, name in names.items()}
        missing = [names[field] for field, value in found.items() if not isinstance(value, int)]
        if missing:
            raise InvalidInputError(
                f"an MLA config needs the ints {', '.join(names.values())}; "
                f"{type(text).__name__} has no {', '.join(missing)}"
            )
        return cls(**{field: int(value) for field, value in found.items() if value is not None})


PRESETS: Mapping[str, MLADims] = MappingProxyType(
    {
        "deepseek-v2-lite": MLADims(16, 512, 128, 64, 128),
        "deepseek-v2": MLADims(128, 512, 128, 64, 128),
        "deepseek-v3": MLADims(128, 512, 128, 64, 128),
        "kimi-k2": MLADims(64, 512, 128, 64, 128),
        "glm-4.7-flash": MLADims(20, 512, 192, 64, 256),
        "minicpm3": MLADims(40, 256, 64, 32, 64),
        "mistral4": MLADims(32, 256, 64, 64, 128),
        "longcat-flash": MLADims(64, 512, 128, 64, 128),
    }
)
"""Widths of public models, from the defaults of their transformers configs."""


def stat_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of softmax statistics: fp64 for fp64 inputs, fp32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def split_kv_b(w_kv_b: Tensor, num_heads: int, qk_nope_head_dim: int) -> tuple[Tensor, Tensor]:
    """View the weight of `kv_b_proj` as its two per-head halves.

    Args:
        w_kv_b: `[H*(P+V), L]`.
        num_heads: H.
        qk_nope_head_dim: P.

    Returns:
        `w_uk` `[H, P, L]` and `w_uv` `[H, V, L]`, both views.

    Example:
        >>> import torch
        >>> from mla_ops.dims import split_kv_b
        >>> w_uk, w_uv = split_kv_b(torch.zeros(4 * (16 + 12), 32), 4, 16)
        >>> tuple(w_uk.shape), tuple(w_uv.shape)
        ((4, 16, 32), (4, 12, 32))
    """
    w = w_kv_b.unflatten(0, (num_heads, -1))
    return w[:, :qk_nope_head_dim], w[:, qk_nope_head_dim:]
