"""The gradient of the queries, with every probability computed again.

A program holds a block of queries and walks its keys. Keys may come in chunks: the running
gradient goes on in fp32 from one launch to the next. See `backward_keys.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_ops.kernels.triton.primitives import (
    ADDITIVE_MASK,
    dot,
    key_bounds,
    key_span,
    load_keys,
    load_pair,
    load_tile,
    probabilities,
    score_keys,
    visible_tile,
)

__all__ = ["mla_backward_queries_kernel"]


@triton.jit
def _queries_tile(
    sums,
    rows,
    sources,
    at,
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
    """Add what one tile of keys gives to the gradient of the queries; scores are `[M, N]`."""
    grad_q, grad_q_rope = sums
    q, q_rope, grad_out, lse, delta = rows
    place = (0, 0, 0)  # for descriptors, of which there are none
    scores, k, k_rope = score_keys(q, q_rope, sources, at, place, used, P, R, False, MASKED)
    weights = probabilities(scores * scale, lse[:, None], bias, visible, NATURAL, MASKED)
    v = load_keys(sources[2], at[2], place, used, V, grad_out.shape[1], False, MASKED)
    products = tl.zeros([grad_out.shape[0], used.shape[0]], tl.float32)
    grad_scores = weights * (dot(grad_out, tl.trans(v), products) - delta[:, None])
    grad_scores = grad_scores.to(grad_out.dtype)
    if P > 0:
        grad_q = dot(grad_scores, k, grad_q)
    if R > 0:
        grad_q_rope = dot(grad_scores, k_rope, grad_q_rope)
    return grad_q, grad_q_rope


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_queries",
        "num_keys",
        "key_begin",
        "key_end",
        "stride_mask_b",
        "stride_mask_h",
        "stride_mask_s",
        "stride_mask_t",
    ]
)
def mla_backward_queries_kernel(
    q_ptr,
    k_ptr,
    rope_ptr,
    v_ptr,
    grad_out_ptr,
    stats_ptr,
    grad_q_ptr,
    acc_ptr,
    mask_ptr,
    bounds_ptr,
    scale,
    softmax_scale,
    num_rows,
    num_queries,
    num_keys,
    key_begin,
    key_end,
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
    stride_do_b,
    stride_do_h,
    stride_do_t,
    stride_mask_b,
    stride_mask_h,
    stride_mask_s,
    stride_mask_t,
    H: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    BOUNDS: tl.constexpr,
    CONTINUES: tl.constexpr,
    FINAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Write the gradient of one block of one head's queries, or what the keys so far give."""
    NATURAL: tl.constexpr = MASK == ADDITIVE_MASK
    index = tl.num_programs(0) - 1 - tl.program_id(0)  # late blocks have the most keys
    blocks = tl.cdiv(num_queries, BLOCK_M)
    batch, head = index // blocks, tl.program_id(1).to(tl.int64)
    first = index % blocks * BLOCK_M
    low, high = key_begin, num_keys
    if BOUNDS:
        low, high = key_bounds(bounds_ptr, batch, low, num_keys)
    reach = high - num_queries
    end = tl.minimum(high, key_end)
    whole, stop = key_span(low, end, reach, first, num_queries, CAUSAL, MASK, BLOCK_M, BLOCK_N)
    if (CONTINUES and not FINAL) and low >= stop:
        return

    wide = batch.to(tl.int64)
    query = first + tl.arange(0, BLOCK_M)
    row_ok = query < num_queries
    offs_n = tl.arange(0, BLOCK_N)
    cols, cols_r, cols_v = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_V)
    row = (wide * H + head) * num_queries + query
    at = wide * stride_q_b + head * stride_q_h + query.to(tl.int64) * stride_q_t
    q, q_rope = load_pair(q_ptr, q_ptr + P, at, at, row_ok, P, R, BLOCK_P, BLOCK_R)
    at = wide * stride_do_b + head * stride_do_h + query.to(tl.int64) * stride_do_t
    grad_out = load_tile(grad_out_ptr, at, cols_v, row_ok, V, BLOCK_V, True)
    lse = tl.load(stats_ptr + row, mask=row_ok, other=float("inf"))
    delta = tl.load(stats_ptr + num_rows + row, mask=row_ok, other=0.0)
    rows = (q, q_rope, grad_out, lse, delta)
    k_ptr += wide * stride_k_b + head * stride_k_h
    rope_ptr += wide * stride_rope_b
    v_ptr += wide * stride_v_b + head * stride_v_h
    mask_ptr += wide * stride_mask_b + head * stride_mask_h
    mask_row = query.to(tl.int64) * stride_mask_s

    grad_at = (row * (P + R))[:, None]
    inside, inside_r = (
        row_ok[:, None] & (cols < P)[None, :],
        row_ok[:, None] & (cols_r < R)[None, :],
    )
    grad_q = tl.zeros([BLOCK_M, q.shape[1]], tl.float32)
    grad_q_rope = tl.zeros([BLOCK_M, q_rope.shape[1]], tl.float32)
    if CONTINUES and P > 0:
        grad_q = tl.load(acc_ptr + grad_at + cols[None, :], mask=inside, other=0.0)
    if CONTINUES and R > 0:
        grad_q_rope = tl.load(acc_ptr + grad_at + P + cols_r[None, :], mask=inside_r, other=0.0)
    sources = ((None, k_ptr), (None, rope_ptr), (None, v_ptr))
    sums = (grad_q, grad_q_rope)
    for start in range(low, whole, BLOCK_N):
        keys = (start - key_begin + offs_n).to(tl.int64)
        places = (keys * stride_k_t, keys * stride_rope_t, keys * stride_v_t)
        sums = _queries_tile(
            sums, rows, sources, places, scale, row_ok, offs_n >= 0, 0.0, P, R, V, NATURAL, False
        )
    for start in range(whole, stop, BLOCK_N):
        keys = (start - key_begin + offs_n).to(tl.int64)
        places = (keys * stride_k_t, keys * stride_rope_t, keys * stride_v_t)
        visible, used, bias, live = visible_tile(
            start + offs_n, stop, reach, query, row_ok, mask_ptr, mask_row, stride_mask_t,
            CAUSAL, MASK,
        )  # fmt: skip
        if live:
            sums = _queries_tile(
                sums, rows, sources, places, scale, visible, used, bias, P, R, V, NATURAL, True
            )
    grad_q, grad_q_rope = sums

    target_ptr = acc_ptr
    if FINAL:
        target_ptr = grad_q_ptr
        grad_q *= softmax_scale
        grad_q_rope *= softmax_scale
    dtype = target_ptr.dtype.element_ty
    if P > 0:
        tl.store(target_ptr + grad_at + cols[None, :], grad_q.to(dtype), mask=inside)
    if R > 0:
        target = target_ptr + grad_at + P + cols_r[None, :]
        tl.store(target, grad_q_rope.to(dtype), mask=inside_r)
