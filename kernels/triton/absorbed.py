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
_LOG2E = math.log2(math.e)
# The constants of the kernels as plain ints, which are cheaper to compare on every call.
_NO_MASK, _BOOL_MASK, _ADDITIVE_MASK = (
    int(kind.value) for kind in (NO_MASK, BOOL_MASK, ADDITIVE_MASK)
)
_DENSE, _CONTEXT = int(DENSE.value), int(CONTEXT.value)


class Queries(NamedTuple):
    """The queries of a call.

    Attributes:
        latent: `[H, T, L]`, contiguous: what is not rotary, moved into the latent space.
        whole: `[B, H, S, P+R]`, or ragged `[T, H, P+R]`: of it, the last R columns are read.
        nope: P.
        strides: of `whole` by request (0 where ragged), head and token.
        requests: how many there are.
        most: query tokens of a request, the most of them if ragged.
        cu: `[requests + 1]` int32 where ragged, else None.
        first_token: what to subtract from `cu`.
    """

    latent: Tensor
    whole: Tensor
    nope: int
    strides: tuple[int, int, int]
    requests: int
    most: int
    cu: Tensor | None = None
    first_token: int = 0


class Keys(NamedTuple):
    """One source of keys.

    Attributes:
        kind: DENSE, CACHED, CONTEXT or NEW.
        latent: `[B, T, L]`, `[T, L]`, or pages `[num_blocks, block_size, L+R]`.
        rope: the same with R; of pages, the same tensor.
        most: keys of a request at most, known from shapes.
        table: `[requests, max_blocks]` int32 where there are pages, else None.
        lens: `[requests]` int32, or None.
        kv_scale: one fp32 element where `latent` holds e4m3 codes as uint8, else None.
    """

    kind: int
    latent: Tensor
    rope: Tensor
    most: int
    table: Tensor | None = None
    lens: Tensor | None = None
    kv_scale: Tensor | None = None


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
    mask: Tensor | None = None
    bounds: Tensor | None = None
    sinks: Tensor | None = None
    is_causal: bool = False
    invariant: bool = False

    @property
    def mask_kind(self) -> int:
        """Which of the kernels' kinds of masks it is."""
        if self.mask is None:
            return _NO_MASK
        return _BOOL_MASK if self.mask.dtype == torch.uint8 else _ADDITIVE_MASK

    @property
    def is_natural(self) -> bool:
        """Whether exponents are natural, not binary: with a mask that is added to scores."""
        return self.mask_kind == _ADDITIVE_MASK

    @property
    def scale(self) -> float:
        """The factor in the kernels.

        The product is rounded once, when it becomes fp32 on the way into the kernel.
        """
        return self.softmax_scale * (1.0 if self.is_natural else _LOG2E)

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
    like, whole, cu = queries.latent, queries.whole, queries.cu
    heads, tokens, latent = like.shape
    rope, most = whole.shape[-1] - queries.nope, queries.most
    of_latent, of_rope = keys.latent.stride(), keys.rope.stride()
    table = keys.table
    block_size = 1 if table is None else keys.latent.shape[1]
    # Dense results are [B, H, S]; of decodes, which are not ragged either, [H, T].
    of_lse = lse.stride()
    if cu is not None:
        of_request = 0
    else:
        of_request = of_lse[0] if lse.dim() == 3 else most
    launch(
        mla_absorbed_kernel,
        (queries.requests * cdiv(most * heads, config.block_m), splits[0]),
        like,
        like,
        whole,
        keys.latent,
        keys.rope,
        out,
        lse,
        lse if stats is None else stats,
        like if table is None else table,
        like if keys.lens is None else keys.lens,
        like if cu is None else cu,
        like if keys.kv_scale is None else keys.kv_scale,
        like if rules.mask is None else rules.mask,
        like if rules.bounds is None else rules.bounds,
        like if rules.sinks is None else rules.sinks,
        rules.scale,
        tokens,
        most,
        keys.latent.shape[1] if keys.kind == _DENSE else 0,
        queries.first_token,
        splits[1],
        splits[2],
        *queries.strides,
        of_latent[0] if len(of_latent) == 3 else 0,
        of_latent[-2],
        of_rope[0] if len(of_rope) == 3 else 0,
        of_rope[-2],
        0 if table is None else table.stride(0),
        of_request,
        of_lse[-2],
        *rules.mask_strides(),
        H=heads,
        L=latent,
        R=rope,
        Q_ROPE=queries.nope,
        K_ROPE=0 if table is None else latent,
        BLOCK_SIZE=block_size,
        IDS=0 if table is None else block_ids(block_size, config.block_n),
        KEYS=keys.kind,
        RAGGED=cu is not None,
        CAUSAL=rules.is_causal if keys.kind == _DENSE else keys.kind != _CONTEXT,
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
        out: `[H, T, L]`, contiguous, written: 0 for tokens of no request.
        lse: `[B, H, S]` or `[H, T]`, written: -inf for tokens of no request.
    """
    like, arch = queries.latent, arch_of(queries.latent)
    heads, tokens, latent = like.shape
    rows, rope = queries.most * heads, queries.whole.shape[-1] - queries.nope
    fp8 = any(keys.kv_scale is not None for keys in sources)
    masked = rules.mask is not None
    offered = absorbed_configs(rows, latent, rope, like.element_size(), fp8, masked, arch)

    def run(config: Config) -> None:
        plans = [_plan_splits(queries, keys, rules, config, arch) for keys in sources]
        total = sum([count for count, _ in plans])
        if total == 1:
            if queries.cu is not None:  # tokens of no request are in no program
                out.zero_()
                lse.fill_(float("-inf"))
            splits = (1, plans[0][1], 0)
            _launch_absorbed(queries, sources[0], rules, config, out, lse, None, splits)
            return
        # Zeros say that a token has seen nothing.
        stats = like.new_zeros((total, 2, heads, tokens), dtype=torch.float32)
        parts = like.new_empty((total, heads, tokens, latent), dtype=torch.float32)
        first = 0
        for keys, (count, length) in zip(sources, plans, strict=True):
            splits = (count, length, first)
            _launch_absorbed(queries, keys, rules, config, parts, lse, stats, splits)
            first += count
        per_request = queries.most if lse.dim() == 3 else tokens
        launch_merge_splits(parts, stats, rules.sinks, out, lse, per_request, rules.is_natural)

    def key() -> object:
        kinds = tuple(keys.kind for keys in sources)
        return rows, latent, rope, like.dtype, fp8, masked, arch, kinds

    run_chosen("absorbed", key, offered, run, True)
