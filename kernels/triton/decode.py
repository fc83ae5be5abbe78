"""Absorbed attention: queries moved into the latent space, whose rows are key and value at once.

A program holds some rows, that is (query token, head) pairs of one request, and walks a part of
the request's keys, so that a tile is read once for all of its rows. Where a cache is paged, the
block ids of the next tile are loaded while this one is worked on; without that the loads of a tile
would wait for its ids, and nothing would be prefetched. Tiles that every row sees whole are neither
masked nor compared; the rest is a second loop.

With more than one split, each writes its unnormalised sum, maximum and total; `merge.py` joins
them in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_ops.kernels.triton.primitives import (
    ADDITIVE_MASK,
    NO_MASK,
    dot,
    finish,
    from_e4m3,
    key_bounds,
    load_tile,
    online_softmax,
    visible_tile,
)

__all__ = ["CACHED", "CONTEXT", "DENSE", "NEW", "mla_absorbed_kernel"]

# Which keys a request has: `num_keys` rows of its own; the first `seq_lens` rows behind its block
# ids; those less the new tokens; or the new tokens, ragged like the queries.
DENSE = tl.constexpr(0)
CACHED = tl.constexpr(1)
CONTEXT = tl.constexpr(2)
NEW = tl.constexpr(3)


@triton.jit
def _block_ids(table_ptr, start, stop, BLOCK_SIZE: tl.constexpr, IDS: tl.constexpr):
    """Load the block ids of the tile at `start`; those at or behind `stop` are never read."""
    a = tl.zeros((), tl.int64)
    b, c, d = a, a, a
    if IDS >= 1:
        at = table_ptr + start // BLOCK_SIZE
        a = tl.load(at, mask=start < stop, other=0).to(tl.int64)
        if IDS >= 2:
            b = tl.load(at + 1, mask=start + BLOCK_SIZE < stop, other=0).to(tl.int64)
        if IDS >= 4:
            c = tl.load(at + 2, mask=start + 2 * BLOCK_SIZE < stop, other=0).to(tl.int64)
            d = tl.load(at + 3, mask=start + 3 * BLOCK_SIZE < stop, other=0).to(tl.int64)
    return a, b, c, d


@triton.jit
def _offsets(
    ids,
    table_ptr,
    start,
    offs,
    stop,
    strides,
    BLOCK_SIZE: tl.constexpr,
    IDS: tl.constexpr,
):
    """Return where the rows of a tile are: what they have in common, and the rest, int64."""
    a, b, c, d = ids
    stride_page, stride_row = strides
    common = tl.zeros((), tl.int64)
    if IDS == 0:
        common = (common + start) * stride_row
        rows = offs.to(tl.int64) * stride_row
    elif IDS == 1:
        common = a * stride_page + (common + start % BLOCK_SIZE) * stride_row
        rows = offs.to(tl.int64) * stride_row
    elif IDS == 2:
        block = tl.where(offs < BLOCK_SIZE, a, b)
        rows = block * stride_page + (offs % BLOCK_SIZE).to(tl.int64) * stride_row
    elif IDS == 4:
        front = tl.where(offs < BLOCK_SIZE, a, b)
        back = tl.where(offs < 3 * BLOCK_SIZE, c, d)
        block = tl.where(offs < 2 * BLOCK_SIZE, front, back)
        rows = block * stride_page + (offs % BLOCK_SIZE).to(tl.int64) * stride_row
    else:
        keys = start + offs
        block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < stop, other=0).to(tl.int64)
        rows = block * stride_page + (keys % BLOCK_SIZE).to(tl.int64) * stride_row
    return common, rows


@triton.jit
def _load_latents(
    base,
    rows,
    cols,
    ok,
    DTYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,
    MASKED: tl.constexpr,
):
    tile = load_tile(base, rows, cols, ok, WIDTH, BLOCK, MASKED)
    if FP8:
        tile = from_e4m3(tile, DTYPE)
    return tile.to(DTYPE)


@triton.jit
def _attend_tile(
    acc,
    top,
    total,
    q,
    q_rope,
    latent_ptr,
    rope_ptr,
    latent_at,
    rope_at,
    offs_l,
    offs_r,
    scale,
    visible,
    used,
    bias,
    L: tl.constexpr,
    R: tl.constexpr,
    FP8: tl.constexpr,
    NATURAL: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add one tile of keys to the running softmax."""
    DTYPE: tl.constexpr = q.dtype
    base, rows = latent_at
    k = _load_latents(latent_ptr + base, rows, offs_l, used, DTYPE, L, q.shape[1], FP8, MASKED)
    scores = tl.zeros([q.shape[0], k.shape[0]], tl.float32)
    scores = dot(q, tl.trans(k), scores)
    if R > 0:
        width: tl.constexpr = q_rope.shape[1]
        base, rows = rope_at
        k_rope = _load_latents(rope_ptr + base, rows, offs_r, used, DTYPE, R, width, FP8, MASKED)
        scores = dot(q_rope, tl.trans(k_rope), scores)
    scores *= scale
    if MASKED:
        scores = tl.where(visible, scores + bias, float("-inf"))
    weights, factor, top, total = online_softmax(scores, top, total, NATURAL)
    acc = dot(weights.to(DTYPE), k, acc * factor[:, None])
    return acc, top, total


@triton.jit
def _key_range(
    lens_ptr,
    bounds_ptr,
    request,
    queries,
    num_keys,
    KEYS: tl.constexpr,
    BOUNDS: tl.constexpr,
):
    """Return the first key of a request and the end of its keys."""
    low = num_keys * 0
    high = num_keys
    if KEYS == CACHED:
        high = tl.load(lens_ptr + request)
    elif KEYS == CONTEXT:
        high = tl.load(lens_ptr + request) - queries
    elif KEYS == NEW:
        high = queries
    if BOUNDS:
        low, high = key_bounds(bounds_ptr, request, low, num_keys)
    return low, high


@triton.jit
def _split_range(low, high, whole, stop, split, split_tokens, BLOCK_N: tl.constexpr):
    """Cut the keys of one split: where it begins, ends, and where its unmasked tiles end."""
    length = split_tokens
    if split_tokens == 0:
        length = tl.cdiv(tl.cdiv(high - low, BLOCK_N), tl.num_programs(1)) * BLOCK_N
    begin = low + split * length
    stop = tl.minimum(stop, begin + length)
    whole = begin + tl.maximum(tl.minimum(whole, stop) - begin, 0) // BLOCK_N * BLOCK_N
    return begin, whole, stop


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "num_queries",
        "num_keys",
        "first_token",
        "split_tokens",
        "first_split",
        "stride_table",
        "stride_lse_b",
        "stride_lse_h",
        "stride_mask_b",
        "stride_mask_h",
        "stride_mask_s",
        "stride_mask_t",
    ]
)
def mla_absorbed_kernel(
    q_latent_ptr,
    q_rope_ptr,
    latent_ptr,
    rope_ptr,
    out_ptr,
    lse_ptr,
    stats_ptr,
    table_ptr,
    lens_ptr,
    cu_ptr,
    kv_scale_ptr,
    mask_ptr,
    bounds_ptr,
    sinks_ptr,
    scale,
    num_tokens,
    num_queries,
    num_keys,
    first_token,
    split_tokens,
    first_split,
    stride_qr_b,
    stride_qr_h,
    stride_qr_t,
    stride_latent_p,
    stride_latent_t,
    stride_rope_p,
    stride_rope_t,
    stride_table,
    stride_lse_b,
    stride_lse_h,
    stride_mask_b,
    stride_mask_h,
    stride_mask_s,
    stride_mask_t,
    H: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    Q_ROPE: tl.constexpr,
    K_ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IDS: tl.constexpr,
    KEYS: tl.constexpr,
    RAGGED: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    BOUNDS: tl.constexpr,
    SINKS: tl.constexpr,
    FP8: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Attend for some rows of one request to one split of its keys.

    Rotary parts begin at column `Q_ROPE` of a query's row and `K_ROPE` of a key's.
    """
    blocks = tl.cdiv(num_queries * H, BLOCK_M)
    request = tl.program_id(0) // blocks
    first_row = (tl.program_id(0) % blocks) * BLOCK_M
    split = tl.program_id(1)
    NATURAL: tl.constexpr = MASK == ADDITIVE_MASK
    PAGED: tl.constexpr = IDS != 0  # both parts of a row lie in one cache
    queries = num_queries
    token0 = request.to(tl.int64) * num_queries
    if RAGGED:
        begin = tl.load(cu_ptr + request)
        queries = tl.load(cu_ptr + request + 1) - begin
        token0 = (begin - first_token).to(tl.int64)
    if first_row >= queries * H:
        return

    offs_m = first_row + tl.arange(0, BLOCK_M)
    offs_n, offs_l, offs_r = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
    row_ok = offs_m < queries * H
    query, head = offs_m // H, (offs_m % H).to(tl.int64)
    row = head * num_tokens + token0 + query
    q = load_tile(q_latent_ptr, row * L, offs_l, row_ok, L, BLOCK_L, True)
    q_rope = q
    if R > 0:
        q_at = request.to(tl.int64) * stride_qr_b + head * stride_qr_h
        q_at += (query + (token0 if RAGGED else 0)).to(tl.int64) * stride_qr_t
        q_rope = load_tile(q_rope_ptr + Q_ROPE, q_at, offs_r, row_ok, R, BLOCK_R, True)
    kv_scale = 1.0
    if FP8:
        kv_scale = tl.load(kv_scale_ptr).to(tl.float32)
        scale *= kv_scale

    low, high = _key_range(lens_ptr, bounds_ptr, request, queries, num_keys, KEYS, BOUNDS)
    reach = high - queries  # query i sees keys up to reach + i
    stop, whole = high, high
    if CAUSAL:
        stop = tl.minimum(high, reach + (tl.minimum(first_row + BLOCK_M, queries * H) - 1) // H + 1)
        whole = tl.minimum(high, reach + first_row // H + 1)
    begin, whole, stop = _split_range(low, high, whole, stop, split, split_tokens, BLOCK_N)
    if MASK != NO_MASK:
        whole = begin

    rope_ptr += K_ROPE
    if KEYS == DENSE:
        latent_ptr += request.to(tl.int64) * stride_latent_p
        rope_ptr += request.to(tl.int64) * stride_rope_p
    elif KEYS == NEW:
        latent_ptr += token0 * stride_latent_t
        rope_ptr += token0 * stride_rope_t
    else:
        table_ptr += request.to(tl.int64) * stride_table
    mask_ptr += request.to(tl.int64) * stride_mask_b
    mask_row = head * stride_mask_h + query.to(tl.int64) * stride_mask_s

    latent_strides = (stride_latent_p, stride_latent_t)
    rope_strides = (stride_rope_p, stride_rope_t)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
    ids = _block_ids(table_ptr, begin, stop, BLOCK_SIZE, IDS)
    for start in range(begin, whole, BLOCK_N):
        at = _offsets(ids, table_ptr, start, offs_n, stop, latent_strides, BLOCK_SIZE, IDS)
        rope_at = at
        if not PAGED:
            rope_at = _offsets(ids, table_ptr, start, offs_n, stop, rope_strides, BLOCK_SIZE, IDS)
        ids = _block_ids(table_ptr, start + BLOCK_N, stop, BLOCK_SIZE, IDS)
        acc, top, total = _attend_tile(
            acc, top, total, q, q_rope, latent_ptr, rope_ptr, at, rope_at, offs_l, offs_r,
            scale, row_ok, row_ok, 0.0, L, R, FP8, NATURAL, False,
        )  # fmt: skip
    for start in range(whole, stop, BLOCK_N):
        keys = start + offs_n
        at = _offsets(ids, table_ptr, start, offs_n, stop, latent_strides, BLOCK_SIZE, IDS)
        rope_at = at
        if not PAGED:
            rope_at = _offsets(ids, table_ptr, start, offs_n, stop, rope_strides, BLOCK_SIZE, IDS)
        ids = _block_ids(table_ptr, start + BLOCK_N, stop, BLOCK_SIZE, IDS)
        visible, used, bias, live = visible_tile(
            keys, stop, reach, query, row_ok, mask_ptr, mask_row, stride_mask_t, CAUSAL, MASK
        )
        if live:
            acc, top, total = _attend_tile(
                acc, top, total, q, q_rope, latent_ptr, rope_ptr, at, rope_at, offs_l, offs_r,
                scale, visible, used, bias, L, R, FP8, NATURAL, True,
            )  # fmt: skip

    acc *= kv_scale
    cols = (offs_l < L)[None, :] & row_ok[:, None]
    if SPLIT:
        part = (first_split + split).to(tl.int64) * 2 * H * num_tokens + row
        tl.store(stats_ptr + part, top, mask=row_ok)
        tl.store(stats_ptr + part + H * num_tokens, total, mask=row_ok)
        cols = cols & (total != 0.0)[:, None]  # the merge does not read the others
        row += (first_split + split).to(tl.int64) * H * num_tokens
    else:
        sink = tl.zeros([BLOCK_M], tl.float32)
        if SINKS:
            sink = tl.load(sinks_ptr + head, mask=row_ok, other=0).to(tl.float32)
        acc, lse = finish(acc, top, total, sink, SINKS, NATURAL)
        lse_at = request.to(tl.int64) * stride_lse_b + head * stride_lse_h + query
        tl.store(lse_ptr + lse_at + (token0 if RAGGED else 0), lse, mask=row_ok)
    out_at = (row * L)[:, None] + offs_l[None, :]
    tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=cols)
