"""The absorbed form on the host: which keys, how many splits, what is launched."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mla_ops.kernels.triton.configs import (
    Arch,
    Config,
    absorbed_configs,
    arch_of,
    block_ids,
    padded,
    run_chosen,
)
from mla_ops.kernels.triton.decode import CACHED, CONTEXT, DENSE, NEW, mla_absorbed_kernel
from mla_ops.kernels.triton.launch import cdiv, launch, pow2
from mla_ops.kernels.triton.merge import launch_merge_splits
from mla_ops.kernels.triton.primitives import ADDITIVE_MASK, BOOL_MASK, NO_MASK

__all__ = [
    "CACHED",
    "CONTEXT",
    "DENSE",
    "FIXED_TOKENS",
    "NEW",
    "Keys",
    "Queries",
    "Rules",
    "attend_absorbed",
]

_LEAST_TOKENS = 256  # a split shorter than this costs more than it saves
FIXED_TOKENS = 1024  # of a split whose place must not depend on the batch
_MOST_SPLITS = 64


class Queries(NamedTuple):
    """The queries of a call.

    Attributes:
        latent: `[H, T, L]`, contiguous.
        rope: `[B, H, S, R]`, or ragged `[T, H, R]`.
        requests: how many there are.
        most: query tokens of a request, the most of them if ragged.
        cu: `[requests + 1]` int32 where ragged, else None.
        first_token: what to subtract from `cu`.
    """

    latent: Tensor
    rope: Tensor
    requests: int
    most: int
    cu: Tensor | None
    first_token: int


class Keys(NamedTuple):
    """One source of keys.

    Attributes:
        kind: DENSE, CACHED, CONTEXT or NEW.
        latent: `[B, T, L]`, pages `[num_blocks, block_size, L]`, or `[T, L]`.
        rope: the same with R.
        most: keys of a request at most, known from shapes.
        table: `[requests, max_blocks]` int32, or None.
        lens: `[requests]` int32, or None.
        kv_scale: one fp32 element where `latent` holds e4m3 codes as uint8, else None.
    """

    kind: int
    latent: Tensor
    rope: Tensor
    most: int
    table: Tensor | None
    lens: Tensor | None
    kv_scale: Tensor | None


class Rules(NamedTuple):
    """Who sees whom, and the scale.

    Attributes:
        softmax_scale: factor on the scores.
        mask: `[B or 1, H or 1, S or 1, T or 1]` uint8 or float, or None.
        bounds: `[B, 2]` int32, contiguous, or None.
        sinks: `[H]`, or None.
        is_causal: of DENSE keys; CACHED and NEW ones are causal, CONTEXT is seen by every query.
        invariant: whether splits must not depend on the batch.
    """

    softmax_scale: float
    mask: Tensor | None
    bounds: Tensor | None
    sinks: Tensor | None
    is_causal: bool
    invariant: bool = False

    @property
    def mask_kind(self) -> int:
        """Which of the kernels' kinds of masks it is."""
        if self.mask is None:
            return int(NO_MASK)
        return int(BOOL_MASK if self.mask.dtype == torch.uint8 else ADDITIVE_MASK)

    @property
    def scale(self) -> float:
        """The factor in the kernels, whose exponents are binary unless a mask is added to them.

        The product is rounded once, when it becomes fp32 on the way into the kernel.
        """
        natural = self.mask_kind == ADDITIVE_MASK.value
        return self.softmax_scale * (1.0 if natural else math.log2(math.e))

    def mask_strides(self) -> tuple[int, ...]:
        """Return the strides of the mask, 0 along broadcast dimensions."""
        if self.mask is None:
            return 0, 0, 0, 0
        sizes = zip(self.mask.shape, self.mask.stride(), strict=True)
        return tuple(0 if size == 1 else stride for size, stride in sizes)


def _plan_splits(
    queries: Queries, keys: Keys, rules: Rules, config: Config, arch: Arch
) -> tuple[int, int]:
    """Return the number of splits, and their length if it is fixed: both from shapes alone."""
    if rules.invariant:
        return max(1, cdiv(keys.most, FIXED_TOKENS)), FIXED_TOKENS
    heads = queries.latent.shape[0]
    programs = cdiv(queries.most * heads, config.block_m)
    programs *= pow2(max(1, queries.requests))
    wanted = 2 * arch.processors // max(1, programs)
    return max(1, min(wanted, _MOST_SPLITS, cdiv(keys.most, _LEAST_TOKENS))), 0


def _launch_absorbed(
    queries: Queries,
    keys: Keys,
    rules: Rules,
    config: Config,
    out: Tensor,
    lse: Tensor,
    stats: Tensor | None,
    splits: tuple[int, int, int],
) -> None:
    """Launch one source of keys; `splits` are their number, length (0: even) and the first one."""
    heads, tokens, latent = queries.latent.shape
    q_rope, cu = queries.rope, queries.cu
    rope = q_rope.shape[-1]
    block_size = keys.latent.shape[-2] if keys.table is not None else 1
    dense = q_rope.dim() == 4
    like = queries.latent
    strides = q_rope.stride() if dense else (0, q_rope.stride(1), q_rope.stride(0), 1)
    paged = keys.latent.dim() == 3
    launch(
        mla_absorbed_kernel,
        (queries.requests * cdiv(queries.most * heads, config.block_m), splits[0]),
        like,
        like,
        q_rope,
        keys.latent,
        keys.rope,
        out,
        lse,
        lse if stats is None else stats,
        like if keys.table is None else keys.table,
        like if keys.lens is None else keys.lens,
        like if cu is None else cu,
        like if keys.kv_scale is None else keys.kv_scale,
        like if rules.mask is None else rules.mask,
        like if rules.bounds is None else rules.bounds,
        like if rules.sinks is None else rules.sinks,
        rules.scale,
        tokens,
        queries.most,
        keys.latent.shape[1] if keys.kind == DENSE.value else 0,
        queries.first_token,
        splits[1],
        splits[2],
        *strides[:3],
        keys.latent.stride(0) if paged else 0,
        keys.latent.stride(-2),
        keys.rope.stride(0) if paged else 0,
        keys.rope.stride(-2),
        0 if keys.table is None else keys.table.stride(0),
        lse.stride(0) if dense else 0,
        lse.stride(-2),
        *rules.mask_strides(),
        H=heads,
        L=latent,
        R=rope,
        BLOCK_SIZE=block_size,
        IDS=0 if keys.table is None else block_ids(block_size, config.block_n),
        KEYS=keys.kind,
        RAGGED=cu is not None,
        CAUSAL=rules.is_causal if keys.kind == DENSE.value else keys.kind != CONTEXT.value,
        MASK=rules.mask_kind,
        BOUNDS=rules.bounds is not None,
        SINKS=rules.sinks is not None,
        FP8=keys.kv_scale is not None,
        SPLIT=stats is not None,
        BLOCK_L=padded(latent),
        BLOCK_R=padded(rope),
        **config.options(),
    )


def attend_absorbed(
    queries: Queries, sources: list[Keys], rules: Rules, out: Tensor, lse: Tensor
) -> None:
    """Attend to latents.

    Args:
        queries: the queries.
        sources: their keys, one set after the other.
        rules: who sees whom.
        out: `[H, T, L]`, contiguous, written.
        lse: `[B, H, S]`, or ragged `[H, T]`; written.
    """
    like, arch = queries.latent, arch_of(queries.latent)
    heads, tokens, latent = like.shape
    rows, rope = queries.most * heads, queries.rope.shape[-1]
    fp8 = any(keys.kv_scale is not None for keys in sources)
    masked = rules.mask is not None
    offered = absorbed_configs(rows, latent, rope, like.element_size(), fp8, masked, arch)

    def run(config: Config) -> None:
        plans = [_plan_splits(queries, keys, rules, config, arch) for keys in sources]
        total = sum(count for count, _ in plans)
        if total == 1:
            _launch_absorbed(
                queries, sources[0], rules, config, out, lse, None, (1, plans[0][1], 0)
            )
            return
        # Tokens of no request are in no program: zeros say that they have seen nothing.
        stats = torch.zeros((total, 2, heads, tokens), dtype=torch.float32, device=like.device)
        parts = torch.empty((total, heads, tokens, latent), dtype=torch.float32, device=like.device)
        first = 0
        for keys, (count, length) in zip(sources, plans, strict=True):
            splits = (count, length, first)
            _launch_absorbed(queries, keys, rules, config, parts, lse, stats, splits)
            first += count
        launch_merge_splits(
            parts,
            stats,
            rules.sinks,
            out,
            lse,
            tokens if queries.cu is not None else queries.most,
            rules.mask_kind == ADDITIVE_MASK.value,
        )

    key = (rows, latent, rope, like.dtype, fp8, masked, arch, tuple(k.kind for k in sources))
    run_chosen("absorbed", key, offered, run, True)
