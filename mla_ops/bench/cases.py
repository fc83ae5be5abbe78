"""Named cases, from the widths of public models: what is computed, and the least that it costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import product

import torch

from mla_ops.dims import MLADims
from mla_ops.errors import InvalidInputError

__all__ = [
    "CPU_CASES",
    "CUDA_CASES",
    "DTYPES",
    "LITE",
    "QUICK",
    "V3",
    "AttentionCase",
    "CacheCase",
    "Case",
    "choose",
]

LITE, V3 = "deepseek-v2-lite", "deepseek-v3"

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Dtypes under the names that the command takes."""


def _dims(model: str, shards: int) -> MLADims:
    dims = MLADims.preset(model)
    if dims.num_heads % shards:
        raise InvalidInputError(
            f"shards must divide the {dims.num_heads} heads of {model}, got {shards}"
        )
    return replace(dims, num_heads=dims.num_heads // shards)


def _label(model: str, shards: int) -> str:
    return model if shards == 1 else f"{model}:{shards}"


@dataclass(frozen=True)
class AttentionCase:
    """One attention layer, from queries and latent cache to the values, for equal requests.

    Attributes:
        model: a preset of `MLADims`.
        batch: requests.
        new: new tokens per request.
        cached: tokens per request that are in the cache before.
        dtype: of all tensors.
        shards: devices that share the heads by tensor parallelism; one of them is measured.
    """

    model: str
    batch: int
    new: int
    cached: int
    dtype: torch.dtype = torch.bfloat16
    shards: int = 1

    @property
    def dims(self) -> MLADims:
        """Widths of the layer, heads of one shard."""
        return _dims(self.model, self.shards)

    @property
    def group(self) -> str:
        """`decode` below 16 new tokens per request, `prefill` from there on."""
        return "decode" if self.new < 16 else "prefill"

    @property
    def context(self) -> int:
        """Keys per request, the new ones included."""
        return self.cached + self.new

    @property
    def name(self) -> str:
        """`group/model/batchxnew@cached`; `model:4` has its heads on 4 devices."""
        model = _label(self.model, self.shards)
        return f"{self.group}/{model}/{self.batch}x{self.new}@{self.cached}"

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


@dataclass(frozen=True)
class CacheCase:
    """An op that moves rows and computes next to nothing.

    Attributes:
        group: `gather` (pages to a workspace), `write` (new rows to pages) or `merge` (two partial
            results).
        model: a preset of `MLADims`.
        tokens: how many rows, or query tokens of a merge.
        dtype: of all tensors.
    """

    group: str
    model: str
    tokens: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def dims(self) -> MLADims:
        """Widths of the layer."""
        return MLADims.preset(self.model)

    @property
    def name(self) -> str:
        """`group/model/tokens`."""
        return f"{self.group}/{self.model}/{self.tokens}"

    @property
    def flops(self) -> float:
        """None that count."""
        return 0.0

    @property
    def bytes(self) -> int:
        """Bytes read and written once: rows, or two results with their lse to one."""
        dims, item = self.dims, self.dtype.itemsize
        if self.group == "merge":
            return 3 * self.tokens * dims.num_heads * (dims.v_head_dim * item + 4)
        return 2 * self.tokens * dims.latent_dim * item


Case = AttentionCase | CacheCase
"""What one line of a table measures: `name`, `group`, `dims`, `dtype`, `flops` and `bytes`."""


def _attention(
    models: Sequence[tuple[str, int]],
    batches: Sequence[int],
    new: Sequence[int],
    cached: Sequence[int],
) -> Iterator[AttentionCase]:
    for (model, shards), c, b, n in product(models, cached, batches, new):
        yield AttentionCase(model, b, n, c, shards=shards)


QUICK: tuple[Case, ...] = (
    AttentionCase(LITE, 1, 1, 512),
    AttentionCase(LITE, 1, 1, 8192),
    AttentionCase(LITE, 1, 512, 8192),
    AttentionCase(LITE, 1, 2048, 0),
)
"""What `mla-ops bench --quick` runs."""

CPU_CASES: tuple[Case, ...] = (
    *_attention([(LITE, 1), (V3, 1)], (1, 4, 8, 32), (1,), (512, 2048, 8192, 32768)),
    *_attention([("glm-4.7-flash", 1), ("minicpm3", 1)], (1,), (1,), (8192,)),
    *_attention([(LITE, 1)], (1,), (128, 512, 2048), (0, 4096, 8192, 32768)),
    *_attention([(V3, 1)], (1,), (512,), (0, 8192)),
    CacheCase("gather", LITE, 65536),
    CacheCase("write", LITE, 8192),
    CacheCase("merge", LITE, 8192),
)
"""What `mla-ops bench` runs on a CPU."""

_ROWS = ((LITE, 1), (V3, 4), (V3, 2), (V3, 1))  # 16, 32, 64 and 128 heads

# The most important first: a run whose time is up keeps what it has.
CUDA_CASES: tuple[Case, ...] = tuple(
    dict.fromkeys(
        (
            *_attention([_ROWS[0], _ROWS[3]], (32, 128), (1,), (8192,)),
            *_attention([(LITE, 1), (V3, 1)], (1,), (8192,), (0,)),
            *_attention([_ROWS[0], _ROWS[3]], (1,), (1,), (8192,)),
            CacheCase("gather", LITE, 65536),
            CacheCase("merge", LITE, 8192),
            CacheCase("write", LITE, 8192),
            *_attention([_ROWS[1], _ROWS[2]], (32, 128), (1,), (8192,)),
            *_attention([(LITE, 1)], (1,), (2048, 4096, 16384), (0,)),
            *_attention([(LITE, 1)], (1,), (2048,), (8192, 32768)),
            *_attention(_ROWS, (1, 8, 32, 128), (1,), (8192, 1024, 32768)),
            *_attention([(LITE, 1)], (32,), (2,), (8192,)),
            *_attention([(V3, 1)], (1,), (2048, 4096, 16384), (0,)),
            CacheCase("merge", V3, 8192),
        )
    )
)
"""What `mla-ops bench --device cuda` runs."""


def choose(
    cases: Iterable[Case],
    *,
    patterns: Sequence[str] = (),
    heads: Sequence[int] = (),
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Case, ...]:
    """Return the cases that were asked for, in `dtype`.

    Args:
        cases: to choose from.
        patterns: shell patterns on their names, any of which is enough; none: all.
        heads: head counts, any of which is enough; none: all.
        dtype: of the result.

    Raises:
        InvalidInputError: nothing is left.

    Example:
        >>> from mla_ops.bench.cases import CPU_CASES, choose
        >>> [case.name for case in choose(CPU_CASES, patterns=["decode/*/1x1@512"], heads=[16])]
        ['decode/deepseek-v2-lite/1x1@512']
    """
    offered = tuple(cases)
    chosen = tuple(
        replace(case, dtype=dtype)
        for case in offered
        if (not patterns or any(fnmatchcase(case.name, pattern) for pattern in patterns))
        and (not heads or case.dims.num_heads in heads)
    )
    if not chosen:
        asked = [*patterns, *(f"{count} heads" for count in heads)]
        raise InvalidInputError(
            f"no case is {' or '.join(asked)}; expected one of {len(offered)}, "
            "mla-ops bench --list names them"
        )
    return chosen
