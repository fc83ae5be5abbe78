"""Ragged attention over expanded keys and values equals a plain softmax in fp64.

Tokens between the requests and behind the last one are NaN. Case numbers are those of the project's
list of public bug reports in this field.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native import either_backend, one_thread

import mla_ops
from mla_ops.dims import split_kv_b

pytestmark = [either_backend, one_thread]

INF, NAN = float("inf"), float("nan")
SCALE = 0.31  # not 1 / sqrt(P + R)
HEADS, NOPE, ROPE, VALUE = 3, 10, 6, 14


def cu(lens):
    return torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def make(query_lens, key_lens, *, heads=HEADS, padding=0, dtype=torch.float64, value=VALUE, seed=0):
    """Query, k_nope, k_pe and value of a ragged batch; `padding` rows of NaN follow."""
    generator = torch.Generator().manual_seed(seed)

    def randn(tokens, *shape):
        rows = torch.randn(tokens, *shape, generator=generator).to(dtype)
        return torch.cat([rows, rows.new_full((padding, *shape), NAN)])

    keys = sum(key_lens)
    query = randn(sum(query_lens), heads, NOPE + ROPE)
    return query, randn(keys, heads, NOPE), randn(keys, ROPE), randn(keys, heads, value)


def prefill(tensors, query_lens, key_lens, *, is_causal=True, softmax_scale=SCALE):
    return mla_ops.mla_prefill(
        *tensors,
        cu_seqlens_q=cu(query_lens),
        cu_seqlens_k=cu(key_lens),
        max_seqlen_q=max(query_lens, default=0),
        max_seqlen_k=max(key_lens, default=0),
        softmax_scale=softmax_scale,
        is_causal=is_causal,
    )


def expected(tensors, query_lens, key_lens, *, is_causal=True):
    """A plain softmax in fp64; rows of no request are 0 and -inf."""
    query, k_nope, k_pe, value = (t.double() for t in tensors)
    tokens, heads, _ = query.shape
    out = query.new_zeros(tokens, heads, value.shape[2])
    lse = query.new_full((heads, tokens), -INF)
    spans = (pairwise(cu(lens).tolist()) for lens in (query_lens, key_lens))
    for (q, q_end), (k, k_end) in zip(*spans, strict=True):
        shared = k_pe[k:k_end, None].expand(-1, heads, -1)
        key = torch.cat([k_nope[k:k_end], shared], dim=2)
        scores = torch.einsum("qhd,khd->hqk", query[q:q_end], key) * SCALE
        if is_causal:
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool)
            scores.masked_fill_(hidden.triu(k_end - k - (q_end - q) + 1), -INF)
        if k_end > k:
            lse[:, q:q_end] = torch.logsumexp(scores, -1)
        base = lse[:, q:q_end, None].masked_fill(lse[:, q:q_end, None] == -INF, 0.0)
        out[q:q_end] = torch.einsum("hqk,khv->qhv", (scores - base).exp(), value[k:k_end])
    return out, lse


def check(result, exact, atol=1e-12, rtol=0.0):
    for ours, right in zip(result, exact, strict=True):
        assert ours.is_contiguous()
        torch.testing.assert_close(ours.double(), right, atol=atol, rtol=rtol)


@settings(max_examples=80)
@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9)), max_size=5),
    st.booleans(),
    st.integers(0, 3),
    st.integers(0, 99),
)
def test_any_ragged_batch(lens, is_causal, padding, seed):
    """More queries than keys, more keys than queries, empty requests, cu that ends before T."""
    query_lens, key_lens = [q for q, _ in lens], [k for _, k in lens]
    tensors = make(query_lens, key_lens, padding=padding, seed=seed)
    result = prefill(tensors, query_lens, key_lens, is_causal=is_causal)
    check(result, expected(tensors, query_lens, key_lens, is_causal=is_causal))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads", [1, 3, 20, 128])
def test_blocks_of_queries_keys_and_heads(heads, is_causal):
    """Case 32: head counts; and lengths on both sides of the tile sizes."""
    query_lens, key_lens = [300, 1, 257, 256], [513, 1025, 257, 40]
    tensors = make(query_lens, key_lens, heads=heads)
    result = prefill(tensors, query_lens, key_lens, is_causal=is_causal)
    check(result, expected(tensors, query_lens, key_lens, is_causal=is_causal))


@pytest.mark.parametrize("value", [6, 16, 30])
def test_values_narrower_as_wide_and_wider_than_keys(value):
    """Case 13."""
    tensors = make([4, 9], [9, 9], value=value)
    check(prefill(tensors, [4, 9], [9, 9]), expected(tensors, [4, 9], [9, 9]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_error_is_that_of_an_ordinary_implementation(dtype):
    query_lens, key_lens = [40, 3, 1], [60, 600, 7]
    tensors = make(query_lens, key_lens, dtype=dtype)
    out, lse = prefill(tensors, query_lens, key_lens)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    exact_out, exact_lse = expected(tensors, query_lens, key_lens)
    step = max(torch.finfo(dtype).eps, 2e-6)
    # Probabilities and values are rounded before they meet: one step each, of values below 4.
    torch.testing.assert_close(out.double(), exact_out, atol=4 * step, rtol=step)
    lse_step = 1e-5 if dtype == torch.float32 else 4 * step
    torch.testing.assert_close(lse.double(), exact_lse, atol=lse_step, rtol=0)


def test_causal_is_aligned_to_the_last_key():
    """Case 17: two queries, five keys, one-hot values, uniform scores: exact averages."""
    value = torch.eye(5, dtype=torch.float64)[:, None].expand(5, 2, 5)
    query, k_nope, k_pe = (torch.ones(s).double() for s in [(2, 2, 4), (5, 2, 3), (5, 1)])
    out, lse = prefill((query, k_nope, k_pe, value), [2], [5])
    averages = torch.tensor([[1 / 4] * 4 + [0], [1 / 5] * 5], dtype=torch.float64)
    torch.testing.assert_close(out, averages[:, None].expand(2, 2, 5), atol=1e-15, rtol=0)
    numbers = torch.tensor([[4.0, 5.0]] * 2).double()
    torch.testing.assert_close(lse, numbers.log() + 4 * SCALE, atol=1e-14, rtol=0)


def test_queries_in_front_of_the_first_key_are_empty():
    """Case 7: five queries, two keys."""
    tensors = make([5], [2])
    out, lse = prefill(tensors, [5], [2])
    assert (out[:3] == 0).all()
    assert (lse[:, :3] == -INF).all()
    torch.testing.assert_close(out[3], tensors[3][0], atol=1e-15, rtol=0)
    assert lse[:, 3:].isfinite().all()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("query_lens", "key_lens", "padding"),
    [([], [], 0), ([], [], 4), ([0, 0], [0, 0], 0), ([0], [5], 0), ([3, 2], [0, 0], 1)],
)
def test_nothing_to_see_is_zero_and_minus_infinity(query_lens, key_lens, padding, is_causal):
    """Case 16: no keys at all; the shapes are right all the same, and nothing is aliased."""
    tensors = make(query_lens, key_lens, padding=padding)
    out, lse = prefill(tensors, query_lens, key_lens, is_causal=is_causal)
    assert out.shape == (sum(query_lens) + padding, HEADS, VALUE)
    assert lse.shape == (HEADS, sum(query_lens) + padding)
    assert (out == 0).all()
    assert (lse == -INF).all()
    results = {t.untyped_storage().data_ptr() for t in (out, lse) if t.numel()}
    assert not results & {t.untyped_storage().data_ptr() for t in tensors if t.numel()}


def test_other_requests_are_not_seen():
    """Keys of the neighbours are huge: one of them in a softmax would take it over."""
    query_lens, key_lens = [2, 3, 2], [4, 5, 3]
    tensors = make(query_lens, key_lens)
    right = prefill(tensors, query_lens, key_lens)
    query, k_nope, k_pe, value = tensors
    for rows in (slice(0, 4), slice(9, 12)):
        k_nope[rows], k_pe[rows], value[rows] = 1e6, 1e6, NAN
    middle = prefill((query, k_nope, k_pe, value), query_lens, key_lens)
    torch.testing.assert_close(middle.out[2:5], right.out[2:5], atol=0, rtol=0)
    torch.testing.assert_close(middle.lse[:, 2:5], right.lse[:, 2:5], atol=0, rtol=0)


@pytest.mark.parametrize("name", ["query", "k_nope", "k_pe", "value", "pair"])
def test_strided_views(name):
    """Case 31; `pair` is how `kv_b_proj` leaves them: k_nope and value, two slices of its rows."""
    query, k_nope, k_pe, value = make([5, 3], [9, 4])
    exact = expected((query, k_nope, k_pe, value), [5, 3], [9, 4])
    views = {"query": query, "k_nope": k_nope, "k_pe": k_pe, "value": value}
    if name == "pair":
        both = torch.cat([k_nope, value], dim=2)
        views["k_nope"], views["value"] = both.split([NOPE, VALUE], dim=2)
    else:
        buffer = torch.full([2 * size + 1 for size in views[name].shape], NAN).double()
        buffer = buffer.transpose(0, -1).contiguous().transpose(0, -1)
        view = buffer[tuple(slice(1, None, 2) for _ in views[name].shape)]
        views[name] = view.copy_(views[name])
        assert not view.is_contiguous()
    check(prefill(tuple(views.values()), [5, 3], [9, 4]), exact)


def test_maxima_may_be_larger_than_any_length():
    tensors = make([5, 3], [9, 4])
    result = mla_ops.mla_prefill(
        *tensors,
        cu_seqlens_q=cu([5, 3]),
        cu_seqlens_k=cu([9, 4]),
        max_seqlen_q=1000,
        max_seqlen_k=2000,
        softmax_scale=SCALE,
        is_causal=True,
    )
    check(result, expected(tensors, [5, 3], [9, 4]))


# --- one scale, one lse, whatever the op ---------------------------------------------------------


@pytest.mark.parametrize("softmax_scale", [0.05, 0.204124, 0.382499])
@pytest.mark.parametrize("new", [1, 4, 40])
def test_expanded_prefill_absorbed_decode_and_dense_agree(new, softmax_scale):
    """Cases 10, 11, 40 and 41: the scale is that of the full head, not of the absorbed width.

    The lse has the same base and the same scale in every op.
    """
    rank, length, block = 20, 50, 8
    generator = torch.Generator().manual_seed(0)
    query, rows, weight = (
        torch.randn(shape, generator=generator).double()
        for shape in [(new, HEADS, NOPE + ROPE), (length, rank + ROPE), (HEADS * 24, rank)]
    )
    kv_c, k_pe = rows.split([rank, ROPE], dim=1)
    w_uk, w_uv = split_kv_b(weight, HEADS, NOPE)
    expanded = (torch.einsum("tl,hdl->thd", kv_c, w) for w in (w_uk, w_uv))
    k_nope, value = expanded
    prefilled = prefill((query, k_nope, k_pe, value), [new], [length], softmax_scale=softmax_scale)

    table = torch.randperm(9, generator=generator, dtype=torch.int32)[None]
    cache = torch.full((9, block, rank + ROPE), NAN)
    position = torch.arange(length)
    slots = table[0].long()[position // block] * block + position % block
    mla_ops.update_kv_cache(kv_c, k_pe, cache, slots)
    decoded = mla_ops.mla_decode(
        query,
        weight,
        cache,
        table,
        torch.tensor([length], dtype=torch.int32),
        softmax_scale=softmax_scale,
    )
    dense = mla_ops.mla_attention(
        query.transpose(0, 1)[None],
        kv_c[None],
        k_pe[None],
        weight,
        softmax_scale=softmax_scale,
        is_causal=True,
    )
    scores = torch.einsum("qhd,khd->hqk", query[..., :NOPE], k_nope)
    scores = softmax_scale * (scores + torch.einsum("qhd,kd->hqk", query[..., NOPE:], k_pe))
    scores += torch.full_like(scores[0], -INF).triu(length - new + 1)
    for out, lse in (prefilled, decoded, (dense.out[0].transpose(0, 1), dense.lse[0])):
        torch.testing.assert_close(lse, torch.logsumexp(scores, -1), atol=1e-11, rtol=0)
        torch.testing.assert_close(out, prefilled.out, atol=1e-11, rtol=0)
