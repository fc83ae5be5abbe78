"""What all kernels share: products, the running softmax, the e4m3 codes, the search for a tile."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "ADDITIVE_MASK",
    "BOOL_MASK",
    "INTERPRETED",
    "LN2",
    "LOG2E",
    "NO_MASK",
    "dot",
    "find_block",
    "finish",
    "from_e4m3",
    "key_bounds",
    "key_span",
    "load_tile",
    "online_softmax",
    "probabilities",
    "score_keys",
    "to_e4m3",
    "visibility",
    "visible_tile",
]

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LN2_HIGH = tl.constexpr(0.693145751953125)  # 15 bits
LN2_LOW = tl.constexpr(1.4286068203094173e-06)
NO_MASK = tl.constexpr(0)
BOOL_MASK = tl.constexpr(1)
ADDITIVE_MASK = tl.constexpr(2)


@triton.jit
def dot(a, b, acc):
    """Add `a @ b` to an fp32 accumulator; fp32 operands are multiplied as they are, not as tf32."""
    if INTERPRETED:  # its product of bf16 multiplies the bit patterns
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    if a.dtype == tl.float32:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def from_e4m3(code, DTYPE: tl.constexpr):
    """Decode e4m3 codes, given as uint8: exact, NaN stays NaN.

    Sign and magnitude bits are put where the wider format has them; a power of two then moves the
    exponent's bias. Works where the hardware knows no fp8.
    """
    if DTYPE == tl.float16:
        bits = ((code & 0x80).to(tl.uint16) << 8) | ((code & 0x7F).to(tl.uint16) << 7)
        value = bits.to(tl.float16, bitcast=True) * 256.0
    elif DTYPE == tl.bfloat16 and not INTERPRETED:
        bits = ((code & 0x80).to(tl.uint16) << 8) | ((code & 0x7F).to(tl.uint16) << 4)
        value = bits.to(tl.bfloat16, bitcast=True) * 1.329227995784916e36
    else:
        bits = ((code & 0x80).to(tl.uint32) << 24) | ((code & 0x7F).to(tl.uint32) << 20)
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    value = tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    return value.to(DTYPE)


@triton.jit
def to_e4m3(value):
    """Encode fp32 as e4m3 codes in uint8: round to nearest even, saturate, NaN stays NaN."""
    bits = value.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.where(value != value, 0.0, tl.minimum(tl.abs(value), 448.0))
    bits = size.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 codes are multiples of 2**-9: adding 1.5 * 2**23 rounds to whole ones.
    whole = (size * 512.0 + 12582912.0) - 12582912.0
    code = tl.where(size < 0.015625, whole.to(tl.int32).to(tl.uint32), normal)
    code = tl.where(value != value, 0x7F, code)
    return (code | sign).to(tl.uint8)


@triton.jit
def load_tile(
    base, rows, cols, row_ok, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
    """Load `[N, BLOCK]` at `base + rows + cols`; what is masked or padding is 0."""
    pointers = base + rows[:, None] + cols[None, :]
    if MASKED and WIDTH < BLOCK:
        tile = tl.load(pointers, mask=row_ok[:, None] & (cols[None, :] < WIDTH), other=0)
    elif MASKED:
        tile = tl.load(pointers, mask=row_ok[:, None], other=0)
    elif WIDTH < BLOCK:
        tile = tl.load(pointers, mask=cols[None, :] < WIDTH, other=0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def key_bounds(bounds_ptr, request, low, num_keys):
    """Return the first key of a request, not below `low`, and the end of its keys."""
    high = tl.minimum(tl.maximum(tl.load(bounds_ptr + request * 2 + 1), 0), num_keys)
    return tl.maximum(low, tl.minimum(tl.load(bounds_ptr + request * 2), high)), high


@triton.jit
def key_span(
    low,
    end,
    reach,
    first,
    queries,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return where the tiles end that all queries from `first` on see whole, and where keys end.

    Query `i` sees keys from `low` up to `end`, and with the causal rule up to `reach + i`.
    """
    whole, stop = end, end
    if CAUSAL:
        stop = tl.minimum(stop, reach + tl.minimum(first + BLOCK_M, queries))
        whole = tl.minimum(whole, reach + first + 1)
    whole = low + tl.maximum(whole - low, 0) // BLOCK_N * BLOCK_N
    if MASK != NO_MASK:
        whole = low
    return whole, stop


@triton.jit
def visibility(visible, pointers, stop_ok, MASK: tl.constexpr):
    """Join an attention mask `[M, N]` to `visible`.

    Returns what is visible, the keys that some row sees, and what an additive mask adds.
    """
    bias = 0.0
    used = stop_ok
    if MASK == BOOL_MASK:
        visible = visible & (tl.load(pointers, mask=visible, other=0) != 0)
    elif MASK == ADDITIVE_MASK:
        bias = tl.load(pointers, mask=visible, other=float("-inf")).to(tl.float32)
        visible = visible & (bias != float("-inf"))
    if MASK != NO_MASK:
        # What no row sees may be NaN, and 0 * NaN is NaN.
        used = tl.max(visible.to(tl.int32), 0) > 0
    return visible, used, bias


@triton.jit
def visible_tile(
    keys,
    stop,
    reach,
    query,
    row_ok,
    mask_ptr,
    mask_row,
    stride_mask_t,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
):
    """Return what `visibility` does for a tile of keys, and whether any of them is seen.

    Keys end at `stop`; with the causal rule query `i` sees those up to `reach + i`.
    """
    visible = row_ok[:, None] & (keys < stop)[None, :]
    if CAUSAL:
        visible = visible & (keys[None, :] <= reach + query[:, None])
    mask_at = mask_ptr + mask_row[:, None] + keys[None, :].to(tl.int64) * stride_mask_t
    visible, used, bias = visibility(visible, mask_at, keys < stop, MASK)
    live = True if MASK == NO_MASK else tl.max(used.to(tl.int32), 0) > 0
    return visible, used, bias, live


@triton.jit
def load_pair(
    ptr,
    rope_ptr,
    at,
    rope_at,
    ok,
    P: tl.constexpr,
    R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Load the two parts of some queries or keys; a part of no width is not used by anybody."""
    part = tl.zeros([ok.shape[0], 16], ptr.dtype.element_ty)
    rope = part
    if P > 0:
        part = load_tile(ptr, at, tl.arange(0, BLOCK_P), ok, P, BLOCK_P, True)
    if R > 0:
        rope = load_tile(rope_ptr, rope_at, tl.arange(0, BLOCK_R), ok, R, BLOCK_R, True)
    return part, rope


@triton.jit
def load_keys(
    source,
    at,
    place,
    used,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TMA: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load a tile of one of the parts of expanded keys or values.

    A descriptor serves tiles of which every row is read: it cannot leave one out.
    """
    desc, ptr = source
    if TMA and not MASKED:
        tile = desc.load(place).reshape(used.shape[0], BLOCK)
    else:
        tile = load_tile(ptr, at, tl.arange(0, BLOCK), used, WIDTH, BLOCK, MASKED)
    return tile


@triton.jit
def score_keys(
    q,
    q_rope,
    sources,
    at,
    place,
    used,
    P: tl.constexpr,
    R: tl.constexpr,
    TMA: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load a tile of expanded keys; return its products with queries `[M, N]`, and both parts."""
    scores = tl.zeros([q.shape[0], used.shape[0]], tl.float32)
    k, k_rope = q, q_rope  # of no width: not used
    batch, head, row = place
    if P > 0:
        k = load_keys(sources[0], at[0], [batch, head, row, 0], used, P, q.shape[1], TMA, MASKED)
        scores = dot(q, tl.trans(k), scores)
    if R > 0:
        k_rope = load_keys(
            sources[1], at[1], [batch, 0, row, 0], used, R, q_rope.shape[1], TMA, MASKED
        )
        scores = dot(q_rope, tl.trans(k_rope), scores)
    return scores, k, k_rope


@triton.jit
def online_softmax(scores, top, total, NATURAL: tl.constexpr):
    """Return weights `[M, N]`, the factor for earlier results, and the new top and sum.

    The top is the largest score rounded up to a whole number: weights stay at or below 1, factors
    of binary exponents are powers of two, which round nothing, and so does the lse's largest part.
    """
    new_top = tl.maximum(top, tl.ceil(tl.max(scores, 1)))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    if NATURAL:
        weights = tl.exp2((scores - base[:, None]) * LOG2E)
        factor = tl.exp2((top - base) * LOG2E)
    else:
        weights = tl.exp2(scores - base[:, None])
        factor = tl.exp2(top - base)
    return weights, factor, new_top, total * factor + tl.sum(weights, 1)


@triton.jit
def probabilities(scores, lse, bias, visible, NATURAL: tl.constexpr, MASKED: tl.constexpr):
    """Turn scaled scores into probabilities; those of hidden keys are 0."""
    if MASKED:
        scores = tl.where(visible, scores + bias, float("-inf"))
    return tl.exp2((scores - lse) * LOG2E if NATURAL else scores - lse)


@triton.jit
def _log_sum(top, total, NATURAL: tl.constexpr):
    """Return the natural logarithm of `total` times the power `top`, with one rounding.

    The exponent of `total` joins the whole number `top`; with few bits of ln 2 their product is
    exact, and what is left is small.
    """
    bits = total.to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) - 127).to(tl.float32)
    rest = tl.log(((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True))
    if NATURAL:
        high = top + exponent * LN2_HIGH
    else:
        exponent += top
        high = exponent * LN2_HIGH
    lse = high + (exponent * LN2_LOW + rest)
    return tl.where(total < float("inf"), lse, total)  # NaN stays NaN


@triton.jit
def finish(acc, top, total, sink, SINKS: tl.constexpr, NATURAL: tl.constexpr):
    """Return the normalised result and its natural lse: 0 and -inf for a row without keys."""
    unit = LOG2E if NATURAL else 1.0
    if SINKS:
        sink = sink * (1.0 if NATURAL else LOG2E)
        new_top = tl.maximum(top, tl.ceil(sink))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        factor = tl.exp2((top - base) * unit)
        total = total * factor + tl.exp2((sink - base) * unit)
        acc = acc * factor[:, None]
        top = new_top
    empty = total == 0.0
    safe = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), _log_sum(top, safe, NATURAL))
    return acc / safe[:, None], lse


@triton.jit
def find_block(index, cu_ptr, first, requests, BLOCK: tl.constexpr):
    """Return the request that block `index` of a ragged batch belongs to, and its place there.

    Request `i` owns the indices from `cu[i] // BLOCK + i` on: at least as many as it has blocks.
    """
    low = 0
    high = requests - 1
    while low < high:
        middle = (low + high + 1) // 2
        begins = (tl.load(cu_ptr + middle) - first) // BLOCK + middle
        if begins <= index:
            low = middle
        else:
            high = middle - 1
    begins = (tl.load(cu_ptr + low) - first) // BLOCK + low
    return low, index - begins
