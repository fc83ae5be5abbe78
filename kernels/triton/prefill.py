"""Attention over expanded keys and values, one block of query tokens and one head at a time.

The rotary key is shared by the heads and is an argument of its own: no key is concatenated, and a
score is the sum of two products. Tiles that every query of the block sees whole come first and are
not masked; the diagonal and the tail are a second loop. Where keys come in chunks, the running
maximum, sum and unnormalised result are carried in fp32 from one launch to the next, so that the
chunks are one softmax.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_ops.kernels.triton.absorbed import Rules
from mla_ops.kernels.triton.configs import Config, arch_of, expanded_configs, padded, run_chosen
from mla_ops.kernels.triton.launch import cdiv, launch
from mla_ops.kernels.triton.primitives import (
    ADDITIVE_MASK,
    dot,
    find_block,
    finish,
    key_bounds,
    key_span,
    load_tile,
    online_softmax,
    score_keys,
    visible_tile,
)

__all__ = ["Expanded", "State", "attend_expanded", "mla_expanded_kernel"]


@triton.jit
def _attend_tile(
    acc,
    top,
    total,
    q,
    q_rope,
    k_ptr,
    rope_ptr,
    v_ptr,
    k_at,
    rope_at,
    v_at,
    scale,
    visible,
    used,
    bias,
    P: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    NATURAL: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add one tile of keys to the running softmax."""
    scores, _, _ = score_keys(q, q_rope, k_ptr, rope_ptr, k_at, rope_at, used, P, R, MASKED)
    scores *= scale
    if MASKED:
        scores = tl.where(visible, scores + bias, float("-inf"))
    weights, factor, top, total = online_softmax(scores, top, total, NATURAL)
    value_width: tl.constexpr = acc.shape[1]
    v = load_tile(v_ptr, v_at, tl.arange(0, value_width), used, V, value_width, MASKED)
    acc = dot(weights.to(v.dtype), v, acc * factor[:, None])
    return acc, top, total


@triton.jit
def _span(cu_ptr, request):
    begin = tl.load(cu_ptr + request)
    return begin, tl.load(cu_ptr + request + 1) - begin


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "num_requests",
        "num_queries",
        "num_keys",
        "key_begin",
        "key_end",
        "first_token",
        "stride_lse_b",
        "stride_lse_h",
        "stride_mask_b",
        "stride_mask_h",
        "stride_mask_s",
        "stride_mask_t",
    ]
)
def mla_expanded_kernel(
    q_ptr,
    k_ptr,
    rope_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    acc_ptr,
    stats_ptr,
    cu_q_ptr,
    cu_k_ptr,
    mask_ptr,
    bounds_ptr,
    sinks_ptr,
    scale,
    num_tokens,
    num_requests,
    num_queries,
    num_keys,
    key_begin,
    key_end,
    first_token,
    stride_q_b,
    stride_q_h,
    stride_q_t,
    stride_k_b,
    stride_k_h,
    stride_k_t,
    stride_rope_b,
    stride_rope_t,
    stride_v_b,
    stride_v_h,
    stride_v_t,
    stride_out_b,
    stride_out_h,
    stride_out_t,
    stride_lse_b,
    stride_lse_h,
    stride_mask_b,
    stride_mask_h,
    stride_mask_s,
    stride_mask_t,
    H: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    RAGGED: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    BOUNDS: tl.constexpr,
    SINKS: tl.constexpr,
    CONTINUES: tl.constexpr,
    FINAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Attend for some query tokens of one request and one head."""
    NATURAL: tl.constexpr = MASK == ADDITIVE_MASK
    index = tl.num_programs(0) - 1 - tl.program_id(0)  # late blocks have the most keys
    head = tl.program_id(1).to(tl.int64)
    low, high, last, begin_k = key_begin, num_keys, key_end, 0
    queries = num_queries
    if RAGGED:
        request, block = find_block(index, cu_q_ptr, first_token, num_requests, BLOCK_M)
        begin, queries = _span(cu_q_ptr, request)
        token0, batch = (begin - first_token).to(tl.int64), tl.zeros((), tl.int64)
        begin_k, high = _span(cu_k_ptr, request)
        last = high
    else:
        blocks = tl.cdiv(num_queries, BLOCK_M)
        request, block = index // blocks, index % blocks
        token0, batch = tl.zeros((), tl.int64), request.to(tl.int64)
    first = block * BLOCK_M
    if first >= queries:
        return
    if BOUNDS:
        low, high = key_bounds(bounds_ptr, request, low, num_keys)
    reach = high - queries
    end = tl.minimum(high, last)
    whole, stop = key_span(low, end, reach, first, queries, CAUSAL, MASK, BLOCK_M, BLOCK_N)
    if (CONTINUES and not FINAL) and low >= stop:
        return

    query = first + tl.arange(0, BLOCK_M)
    row_ok = query < queries
    at = batch * stride_q_b + head * stride_q_h + (token0 + query) * stride_q_t
    q = tl.zeros([BLOCK_M, 16], q_ptr.dtype.element_ty)
    q_rope = q
    if P > 0:
        q = load_tile(q_ptr, at, tl.arange(0, BLOCK_P), row_ok, P, BLOCK_P, True)
    if R > 0:
        q_rope = load_tile(q_ptr + P, at, tl.arange(0, BLOCK_R), row_ok, R, BLOCK_R, True)
    k_ptr += batch * stride_k_b + head * stride_k_h
    rope_ptr += batch * stride_rope_b
    v_ptr += batch * stride_v_b + head * stride_v_h
    mask_ptr += batch * stride_mask_b + head * stride_mask_h
    mask_row = query.to(tl.int64) * stride_mask_s

    offs_n, cols_v = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_V)
    row = head * num_tokens + batch * num_queries + token0 + query
    state = acc_ptr + (row * V)[:, None] + cols_v[None, :]
    inside = row_ok[:, None] & (cols_v < V)[None, :]
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if CONTINUES:
        top = tl.load(stats_ptr + row, mask=row_ok, other=float("-inf"))
        total = tl.load(stats_ptr + H * num_tokens + row, mask=row_ok, other=0.0)
        acc = tl.load(state, mask=inside, other=0.0)
    for start in range(low, whole, BLOCK_N):
        place = (begin_k + start - key_begin + offs_n).to(tl.int64)
        acc, top, total = _attend_tile(
            acc, top, total, q, q_rope, k_ptr, rope_ptr, v_ptr,
            place * stride_k_t, place * stride_rope_t, place * stride_v_t,
            scale, row_ok, offs_n >= 0, 0.0, P, R, V, NATURAL, False,
        )  # fmt: skip
    for start in range(whole, stop, BLOCK_N):
        keys = start + offs_n
        place = (begin_k + keys - key_begin).to(tl.int64)
        visible, used, bias, live = visible_tile(
            keys, stop, reach, query, row_ok, mask_ptr, mask_row, stride_mask_t, CAUSAL, MASK
        )
        if live:
            acc, top, total = _attend_tile(
                acc, top, total, q, q_rope, k_ptr, rope_ptr, v_ptr,
                place * stride_k_t, place * stride_rope_t, place * stride_v_t,
                scale, visible, used, bias, P, R, V, NATURAL, True,
            )  # fmt: skip

    if FINAL:
        sink = tl.zeros([BLOCK_M], tl.float32)
        if SINKS:
            sink += tl.load(sinks_ptr + head).to(tl.float32)
        acc, lse = finish(acc, top, total, sink, SINKS, NATURAL)
        at = batch * stride_lse_b + head * stride_lse_h + token0 + query
        tl.store(lse_ptr + at, lse, mask=row_ok)
        at = batch * stride_out_b + head * stride_out_h + (token0 + query) * stride_out_t
        target = out_ptr + at[:, None] + cols_v[None, :]
        tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(stats_ptr + row, top, mask=row_ok)
        tl.store(stats_ptr + H * num_tokens + row, total, mask=row_ok)
        tl.store(state, acc, mask=inside)


class Expanded(NamedTuple):
    """Queries, keys and values of a call: dense with a batch dimension, or ragged without.

    Attributes:
        query: `[B, H, S, P+R]`, or ragged `[T, H, P+R]`.
        key: `[B, K, H, P]`, or `[K, H, P]`: some of the keys.
        rope: `[B, K, R]`, or `[K, R]`.
        value: `[B, K, H, V]`, or `[K, H, V]`.
        cu_q: `[requests + 1]` int32 where ragged.
        cu_k: `[requests + 1]` int32 where ragged.
        first_token: what to subtract from `cu_q`.
        key_begin: place of the first of the keys, where dense.
        num_keys: how many keys there are in all, where dense.
    """

    query: Tensor
    key: Tensor
    rope: Tensor
    value: Tensor
    cu_q: Tensor | None
    cu_k: Tensor | None
    first_token: int = 0
    key_begin: int = 0
    num_keys: int = 0

    def key_strides(self) -> tuple[int, ...]:
        """Return the strides of keys, rotary keys and values: batch, head, token."""
        key, rope, value = self[1:4]
        batches = (0, 0, 0) if self.cu_q is not None else (t.stride(0) for t in (key, rope, value))
        of_key, of_rope, of_value = batches
        return (
            *(of_key, key.stride(-2), key.stride(-3)),
            *(of_rope, rope.stride(-2)),
            *(of_value, value.stride(-2), value.stride(-3)),
        )

    def widths(self) -> dict[str, int]:
        """Return the constants of a kernel that follow from shapes."""
        sizes = {"P": self.key.shape[-1], "R": self.rope.shape[-1], "V": self.value.shape[-1]}
        blocks = {f"BLOCK_{name}": padded(size) for name, size in sizes.items()}
        return {"H": self.value.shape[-2], **sizes, **blocks}


class State(NamedTuple):
    """A softmax between two launches.

    Attributes:
        acc: `[H, T, V]` fp32, unnormalised.
        stats: `[2, H, T]` fp32: maximum and sum.
    """

    acc: Tensor
    stats: Tensor

    @classmethod
    def empty(cls, heads: int, tokens: int, width: int, like: Tensor) -> State:
        """Return the state of rows that have seen no key."""
        acc = torch.zeros((heads, tokens, width), dtype=torch.float32, device=like.device)
        stats = torch.zeros((2, heads, tokens), dtype=torch.float32, device=like.device)
        stats[0].fill_(float("-inf"))
        return cls(acc, stats)


def attend_expanded(
    given: Expanded,
    rules: Rules,
    out: Tensor | None,
    lse: Tensor | None,
    state: State | None,
) -> None:
    """Attend to keys and values that are expanded.

    Args:
        given: queries, keys and values.
        rules: who sees whom.
        out: laid out like the query, written; None: more keys will follow, `state` is written.
        lse: `[B, H, S]`, or ragged `[H, T]`; written with `out`.
        state: what earlier launches have left, or None.
    """
    query, key, value = given.query, given.key, given.value
    nope, rope, width = key.shape[-1], given.rope.shape[-1], value.shape[-1]
    heads, arch = value.shape[-2], arch_of(query)
    masked = rules.mask is not None
    offered = expanded_configs(nope, rope, width, query.element_size(), masked, arch)

    def run(config: Config) -> None:
        _launch_expanded(given, rules, config, out, lse, state)

    name = (nope, rope, width, heads, query.dtype, arch, rules.is_causal, rules.mask_kind)
    run_chosen("expanded", name, offered, run, state is None)


def _launch_expanded(
    given: Expanded,
    rules: Rules,
    config: Config,
    out: Tensor | None,
    lse: Tensor | None,
    state: State | None,
) -> None:
    query, key, rope, value, cu_q, cu_k = given[:6]
    ragged = cu_q is not None
    if ragged:
        tokens, heads, most = query.shape[0], query.shape[1], 0
        requests = given.cu_q.shape[0] - 1 if given.cu_q is not None else 0
        blocks = tokens // config.block_m + requests if requests else 0
        q_strides: tuple[int, ...] = (0, query.stride(1), query.stride(0))
        out_strides: tuple[int, ...] = (0, 0, 0)
        if out is not None:
            out_strides = (0, out.stride(1), out.stride(0))
    else:
        requests, heads, most, _ = query.shape
        tokens = requests * most
        blocks = requests * cdiv(most, config.block_m)
        q_strides = query.stride()[:3]
        out_strides = (0, 0, 0) if out is None else out.stride()[:3]
    launch(
        mla_expanded_kernel,
        (blocks, heads),
        query,
        query,
        key,
        rope,
        value,
        query if out is None else out,
        query if lse is None else lse,
        query if state is None else state.acc,
        query if state is None else state.stats,
        query if cu_q is None else cu_q,
        query if cu_k is None else cu_k,
        query if rules.mask is None else rules.mask,
        query if rules.bounds is None else rules.bounds,
        query if rules.sinks is None else rules.sinks,
        rules.scale,
        tokens,
        requests,
        most,
        given.num_keys,
        given.key_begin,
        given.key_begin + key.shape[-3],
        given.first_token,
        *q_strides,
        *given.key_strides(),
        *out_strides,
        0 if ragged or lse is None else lse.stride(0),
        0 if lse is None else lse.stride(-2),
        *rules.mask_strides(),
        **given.widths(),
        RAGGED=ragged,
        CAUSAL=rules.is_causal,
        MASK=rules.mask_kind,
        BOUNDS=rules.bounds is not None,
        SINKS=rules.sinks is not None and out is not None,
        CONTINUES=state is not None,
        FINAL=out is not None,
        **config.options(),
    )
