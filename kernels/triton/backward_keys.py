"""Gradients of keys and values, with every probability computed again, and what that needs.

One kernel gathers what a query row needs, its lse and `delta`; one holds a block of keys and walks
the queries that see it. The third, of the queries, is in `backward_queries.py`. So every sum is
made by one program, in a fixed order, and nothing is added atomically.

Source: FlashAttention-2 (arXiv:2307.08691), algorithm 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_ops.kernels.triton.primitives import (
    ADDITIVE_MASK,
    LOG2E,
    NO_MASK,
    dot,
    key_bounds,
    load_pair,
    load_tile,
    probabilities,
    visibility,
)

__all__ = ["mla_backward_keys_kernel", "mla_backward_rows_kernel"]


@triton.jit(do_not_specialize=["num_rows", "num_queries"])
def mla_backward_rows_kernel(
    out_ptr,
    grad_out_ptr,
    lse_ptr,
    grad_lse_ptr,
    stats_ptr,
    num_rows,
    num_queries,
    stride_out_b,
    stride_out_h,
    stride_out_t,
    stride_do_b,
    stride_do_h,
    stride_do_t,
    H: tl.constexpr,
    V: tl.constexpr,
    NATURAL: tl.constexpr,
    GRAD_LSE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Write the lse of some rows in the unit of the exponents, and `delta`.

    `delta` is `sum(grad_out * out) - grad_lse`. The lse of a row without keys becomes +inf, so that
    its probabilities are 0.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    ok = row < num_rows
    cols = tl.arange(0, BLOCK_V)
    query, head, batch = row % num_queries, row // num_queries % H, row // num_queries // H
    at = batch * stride_out_b + head * stride_out_h + query * stride_out_t
    out = load_tile(out_ptr, at, cols, ok, V, BLOCK_V, True).to(tl.float32)
    at = batch * stride_do_b + head * stride_do_h + query * stride_do_t
    grad = load_tile(grad_out_ptr, at, cols, ok, V, BLOCK_V, True).to(tl.float32)
    delta = tl.sum(out * grad, 1)
    if GRAD_LSE:
        delta -= tl.load(grad_lse_ptr + row, mask=ok, other=0.0)
    lse = tl.load(lse_ptr + row, mask=ok, other=0.0)
    lse = tl.where(lse == float("-inf"), float("inf"), lse * (1.0 if NATURAL else LOG2E))
    tl.store(stats_ptr + row, lse, mask=ok)
    tl.store(stats_ptr + num_rows + row, delta, mask=ok)


@triton.jit
def _keys_tile(
    sums,
    keys,
    q_ptr,
    grad_out_ptr,
    stats_ptr,
    q_at,
    grad_out_at,
    row,
    num_rows,
    row_ok,
    scale,
    visible,
    bias,
    P: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    NATURAL: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add what one tile of queries gives to the gradients of the keys; scores are `[N, M]`."""
    grad_k, grad_rope, grad_v = sums
    k, k_rope, v = keys
    scores = tl.zeros([k.shape[0], row.shape[0]], tl.float32)
    cols, cols_r = tl.arange(0, k.shape[1]), tl.arange(0, k_rope.shape[1])
    cols_v = tl.arange(0, v.shape[1])
    if P > 0:
        q = load_tile(q_ptr, q_at, cols, row_ok, P, k.shape[1], MASKED)
        scores = dot(k, tl.trans(q), scores)
    if R > 0:
        q_rope = load_tile(q_ptr + P, q_at, cols_r, row_ok, R, k_rope.shape[1], MASKED)
        scores = dot(k_rope, tl.trans(q_rope), scores)
    scores *= scale
    if MASKED:
        lse = tl.load(stats_ptr + row, mask=row_ok, other=float("inf"))
        delta = tl.load(stats_ptr + num_rows + row, mask=row_ok, other=0.0)
    else:
        lse = tl.load(stats_ptr + row)
        delta = tl.load(stats_ptr + num_rows + row)
    weights = probabilities(scores, lse[None, :], bias, visible, NATURAL, MASKED)
    grad_out = load_tile(grad_out_ptr, grad_out_at, cols_v, row_ok, V, v.shape[1], MASKED)
    grad_v = dot(weights.to(v.dtype), grad_out, grad_v)
    products = tl.zeros([k.shape[0], row.shape[0]], tl.float32)
    grad_scores = weights * (dot(v, tl.trans(grad_out), products) - delta[None, :])
    grad_scores = grad_scores.to(v.dtype)
    if P > 0:
        grad_k = dot(grad_scores, q, grad_k)
    if R > 0:
        grad_rope = dot(grad_scores, q_rope, grad_rope)
    return grad_k, grad_rope, grad_v


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
def mla_backward_keys_kernel(
    q_ptr,
    k_ptr,
    rope_ptr,
    v_ptr,
    grad_out_ptr,
    stats_ptr,
    grad_pair_ptr,
    grad_rope_ptr,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Write the gradients of one head's keys and values for one block of keys.

    What is computed for a key that nobody sees stays in its own row, which is written as 0.
    """
    NATURAL: tl.constexpr = MASK == ADDITIVE_MASK
    blocks = tl.cdiv(key_end - key_begin, BLOCK_N)
    batch, head = tl.program_id(0) // blocks, tl.program_id(1).to(tl.int64)
    first = key_begin + tl.program_id(0) % blocks * BLOCK_N
    low, high = key_begin, num_keys
    if BOUNDS:
        low, high = key_bounds(bounds_ptr, batch, low, num_keys)
    last = tl.minimum(high, key_end)
    keys = first + tl.arange(0, BLOCK_N)
    seen = (keys >= low) & (keys < last)
    place = (keys - key_begin).to(tl.int64)
    wide = batch.to(tl.int64)

    # Queries from `begin` on see one of the keys; those from `whole` to `tail`, by tiles, see all.
    reach = high - num_queries  # query i sees keys up to reach + i
    begin, whole = num_keys * 0, num_keys * 0
    if CAUSAL:
        begin = tl.minimum(tl.maximum(tl.maximum(first, low) - reach, 0), num_queries)
        whole = tl.maximum(tl.minimum(first + BLOCK_N, last) - 1 - reach, begin)
        whole = tl.minimum(begin + tl.cdiv(whole - begin, BLOCK_M) * BLOCK_M, num_queries)
    if tl.maximum(first, low) >= tl.minimum(first + BLOCK_N, last):
        begin, whole = num_queries, num_queries
    if MASK != NO_MASK:
        whole = num_queries
    tail = whole + (num_queries - whole) // BLOCK_M * BLOCK_M

    offs_m = tl.arange(0, BLOCK_M)
    cols, cols_r, cols_v = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_V)
    k_ptr += wide * stride_k_b + head * stride_k_h
    rope_ptr += wide * stride_rope_b
    k, k_rope = load_pair(
        k_ptr, rope_ptr, place * stride_k_t, place * stride_rope_t, seen, P, R, BLOCK_P, BLOCK_R
    )
    v_ptr += wide * stride_v_b + head * stride_v_h
    v = load_tile(v_ptr, place * stride_v_t, cols_v, seen, V, BLOCK_V, True)
    q_ptr += wide * stride_q_b + head * stride_q_h
    grad_out_ptr += wide * stride_do_b + head * stride_do_h
    stats_ptr += (wide * H + head) * num_queries
    mask_ptr += wide * stride_mask_b + head * stride_mask_h
    mask_key = keys.to(tl.int64) * stride_mask_t

    sums = (
        tl.zeros([BLOCK_N, k.shape[1]], tl.float32),
        tl.zeros([BLOCK_N, k_rope.shape[1]], tl.float32),
        tl.zeros([BLOCK_N, BLOCK_V], tl.float32),
    )
    for start in range(whole, tail, BLOCK_M):
        row = (start + offs_m).to(tl.int64)
        sums = _keys_tile(
            sums, (k, k_rope, v), q_ptr, grad_out_ptr, stats_ptr,
            row * stride_q_t, row * stride_do_t, row, num_rows, offs_m >= 0,
            scale, seen, 0.0, P, R, V, NATURAL, False,
        )  # fmt: skip
    for step in range(begin, num_queries - (tail - whole), BLOCK_M):
        query = tl.where(step < whole, step, step + tail - whole) + offs_m
        row = query.to(tl.int64)
        row_ok = query < num_queries
        visible = seen[:, None] & row_ok[None, :]
        if CAUSAL:
            visible = visible & (keys[:, None] <= reach + query[None, :])
        mask_at = mask_ptr + mask_key[:, None] + row[None, :] * stride_mask_s
        visible, used, bias = visibility(visible, mask_at, row_ok, MASK)
        live = True if MASK == NO_MASK else tl.max(used.to(tl.int32), 0) > 0
        if live:
            sums = _keys_tile(
                sums, (k, k_rope, v), q_ptr, grad_out_ptr, stats_ptr,
                row * stride_q_t, row * stride_do_t, row, num_rows, row_ok,
                scale, visible, bias, P, R, V, NATURAL, True,
            )  # fmt: skip

    grad_k, grad_rope, grad_v = sums
    at = (wide * (key_end - key_begin) + place) * H + head
    inside = (keys < key_end)[:, None]
    pair = grad_pair_ptr + (at * (P + V))[:, None]
    if P > 0:
        grad_k = tl.where(seen[:, None], grad_k * softmax_scale, 0.0)
        grad_k = grad_k.to(grad_pair_ptr.dtype.element_ty)
        tl.store(pair + cols[None, :], grad_k, mask=inside & (cols < P)[None, :])
    if R > 0:
        grad_rope = tl.where(seen[:, None], grad_rope * softmax_scale, 0.0)
        target = grad_rope_ptr + (at * R)[:, None] + cols_r[None, :]
        tl.store(target, grad_rope, mask=inside & (cols_r < R)[None, :])
    grad_v = tl.where(seen[:, None], grad_v, 0.0).to(grad_pair_ptr.dtype.element_ty)
    tl.store(pair + P + cols_v[None, :], grad_v, mask=inside & (cols_v < V)[None, :])
