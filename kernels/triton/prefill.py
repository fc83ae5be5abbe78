"""Attention over expanded keys and values, one block of query tokens and one head at a time.

The rotary key is shared by the heads and is an argument of its own: no key is concatenated, and a
score is the sum of two products. Tiles that every query of the block sees whole come first and are
not masked; the diagonal and the tail are a second loop. Where keys come in chunks, the running
maximum, sum and unnormalised result are carried in fp32 from one launch to the next, so that the
chunks are one softmax.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_ops.kernels.triton.primitives import (
    ADDITIVE_MASK,
    dot,
    find_block,
    finish,
    key_bounds,
    key_span,
    load_keys,
    load_pair,
    online_softmax,
    score_keys,
    visible_tile,
)

__all__ = ["mla_expanded_kernel"]


@triton.jit
def _attend_tile(
    sums,
    q,
    q_rope,
    sources,
    at,
    place,
    scale,
    visible,
    used,
    bias,
    P: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    NATURAL: tl.constexpr,
    TMA: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add one tile of keys to the running softmax."""
    acc, top, total = sums
    scores, _, _ = score_keys(q, q_rope, sources, at, place, used, P, R, TMA, MASKED)
    scores *= scale
    if MASKED:
        scores = tl.where(visible, scores + bias, float("-inf"))
    weights, factor, top, total = online_softmax(scores, top, total, NATURAL)
    batch, head, row = place
    v = load_keys(sources[2], at[2], [batch, head, row, 0], used, V, acc.shape[1], TMA, MASKED)
    acc = dot(weights.to(v.dtype), v, acc * factor[:, None])
    return acc, top, total


@triton.jit
def _span(cu_ptr, request, requests, end):
    """Return where a request begins and its length; behind the last one a span goes to `end`."""
    begin = tl.load(cu_ptr + request)
    return begin, tl.load(cu_ptr + request + 1, mask=request < requests, other=end) - begin


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
    k_desc,
    rope_desc,
    v_desc,
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
    TMA: tl.constexpr,
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
        # Tokens behind the last request are one more, without keys.
        request, block = find_block(index, cu_q_ptr, first_token, num_requests + 1, BLOCK_M)
        begin, queries = _span(cu_q_ptr, request, num_requests, first_token + num_tokens)
        token0, batch = (begin - first_token).to(tl.int64), tl.zeros((), tl.int64)
        begin_k, high = _span(cu_k_ptr, request, num_requests, 0)
        high = tl.where(request < num_requests, high, 0)
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
    q, q_rope = load_pair(q_ptr, q_ptr + P, at, at, row_ok, P, R, BLOCK_P, BLOCK_R)
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
    sources = ((k_desc, k_ptr), (rope_desc, rope_ptr), (v_desc, v_ptr))
    which = request if not RAGGED else 0
    sums = (acc, top, total)
    for start in range(low, whole, BLOCK_N):
        first_key = begin_k + start - key_begin
        keys = (first_key + offs_n).to(tl.int64)
        places = (keys * stride_k_t, keys * stride_rope_t, keys * stride_v_t)
        sums = _attend_tile(
            sums, q, q_rope, sources, places, (which, tl.program_id(1), first_key), scale,
            row_ok, offs_n >= 0, 0.0, P, R, V, NATURAL, TMA, False,
        )  # fmt: skip
    for start in range(whole, stop, BLOCK_N):
        first_key = begin_k + start - key_begin
        keys = (first_key + offs_n).to(tl.int64)
        places = (keys * stride_k_t, keys * stride_rope_t, keys * stride_v_t)
        visible, used, bias, live = visible_tile(
            start + offs_n, stop, reach, query, row_ok, mask_ptr, mask_row, stride_mask_t,
            CAUSAL, MASK,
        )  # fmt: skip
        if live:
            sums = _attend_tile(
                sums, q, q_rope, sources, places, (which, tl.program_id(1), first_key), scale,
                visible, used, bias, P, R, V, NATURAL, TMA, True,
            )  # fmt: skip
    acc, top, total = sums

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
