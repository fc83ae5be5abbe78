"""Merging partial results by their log-sum-exp: exact, in any order, and blind to empty sides.

Case numbers are those of the project's list of public bug reports in this field.
"""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native import either_backend, one_thread

import mla_ops
from mla_ops import merge_attn_states

pytestmark = [either_backend, one_thread]

INF, NAN = float("inf"), float("nan")
HALVES = [torch.float16, torch.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES], ids=str)


def attention(scores, values):
    """Attention over scores `[H, T, K]` and values `[K, H, V]`; no key: 0 and -inf."""
    lse = scores.new_full(scores.shape[:2], -INF)
    if scores.shape[-1]:
        lse = torch.logsumexp(scores, -1)
    weights = (scores - lse.masked_fill(lse == -INF, 0.0)[..., None]).exp()
    return torch.einsum("htk,khv->thv", weights, values), lse


def random_side(tokens=5, heads=3, width=4, dtype=torch.float32):
    stats = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.randn(tokens, heads, width).to(dtype), torch.randn(heads, tokens, dtype=stats) * 3


def empty_side(out, lse, *, content=0.0, sign=-1.0):
    return torch.full_like(out, content), torch.full_like(lse, sign * INF)


def merge(one, other, **options):
    return merge_attn_states(*one, *other, **options)


# --- merging equals attending --------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), max_size=12), st.permutations(range(4)), st.integers(0, 999))
def test_any_partition_in_any_order_equals_attention_over_all_keys(parts, order, seed):
    """Case 2: chunked results got worse the smaller the chunks; some chunks are empty here."""
    generator = torch.Generator().manual_seed(seed)
    keys, part = len(parts), torch.tensor(parts, dtype=torch.int64)
    scores = torch.randn(2, 3, keys, generator=generator, dtype=torch.float64) * 4
    scores[:, 0, keys // 2 :] = -INF  # a query that sees no key in some chunks, or in none
    values = torch.randn(keys, 2, 5, generator=generator, dtype=torch.float64)
    sides = [attention(scores[..., part == i], values[part == i]) for i in order]
    out, lse = functools.reduce(merge, sides)
    whole_out, whole_lse = attention(scores, values)
    torch.testing.assert_close(out, whole_out, atol=1e-13, rtol=1e-13)
    torch.testing.assert_close(lse, whole_lse, atol=1e-13, rtol=1e-13)


def test_merging_is_associative_and_commutative():
    a, b, c = (random_side(dtype=torch.float64) for _ in range(3))
    expected = merge(merge(a, b), c)
    for result in (merge(a, merge(b, c)), merge(merge(b, a), c), merge(merge(c, b), a)):
        torch.testing.assert_close(result, expected, atol=1e-13, rtol=0)


@pytest.mark.parametrize(("prefix", "suffix"), [(64, 16), (512, 64), (4096, 128)])
@pytest.mark.parametrize("scale", [0.0721688, 0.1352338])
def test_lse_is_the_natural_logarithm_of_the_scaled_scores(prefix, suffix, scale):
    """Cases 9 and 11: base 2, or an lse without the softmax's factor, is off by 0.03 to 1.3."""
    scores = torch.randn(2, 3, prefix + suffix) * scale * 192**0.5
    values = torch.randn(prefix + suffix, 2, 8)
    out, lse = merge(
        attention(scores[..., :prefix], values[:prefix]),
        attention(scores[..., prefix:], values[prefix:]),
    )
    exact, _ = attention(scores.double(), values.double())
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=0)
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1), atol=1e-5, rtol=0)


def test_weights_by_hand():
    one, three = torch.full((1, 1, 1), 1.0), torch.full((1, 1, 1), 3.0)
    out, lse = merge_attn_states(one, torch.zeros(1, 1), three, torch.full((1, 1), math.log(3)))
    assert out.item() == pytest.approx(0.25 * 1 + 0.75 * 3)
    assert lse.item() == pytest.approx(math.log(4))


def test_each_row_has_its_own_weight():
    """T, H and V differ, so an exchanged dimension shows."""
    (a, la), (b, lb) = random_side(dtype=torch.float64), random_side(dtype=torch.float64)
    out, lse = merge_attn_states(a, la, b, lb)
    for t, h in itertools.product(range(5), range(3)):
        x, y = math.exp(la[h, t]), math.exp(lb[h, t])
        torch.testing.assert_close(out[t, h], (x * a[t, h] + y * b[t, h]) / (x + y))
        assert lse[h, t].item() == pytest.approx(math.log(x + y), abs=1e-12)


@pytest.mark.parametrize("size", [-1e4, 1e-30, 1.0, 300.0, 1e30])
def test_weights_add_up_to_one_for_an_lse_of_any_size(size):
    """Weights from the rounded total would be off by its rounding, which grows with its size."""
    (a, _), (b, _) = random_side(), random_side()
    lse = torch.full((3, 5), size)
    out, total = merge_attn_states(a, lse, b, lse)
    torch.testing.assert_close(out, (a + b) / 2, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(total, lse + math.log(2))


@every_dtype
def test_result_is_rounded_once(dtype):
    a, b = random_side(64, dtype=dtype), random_side(64, dtype=dtype)
    out, lse = merge(a, b)
    exact = merge(*((side[0].double(), side[1].double()) for side in (a, b)))
    assert (out.dtype, lse.dtype) == (dtype, a[1].dtype)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(
        out.double(), exact.out, atol=4e-7 if eps > 1e-10 else 1e-15, rtol=eps
    )
    torch.testing.assert_close(lse.double(), exact.lse, atol=1e-6, rtol=0)


def test_a_running_partial_may_be_fp32_beside_a_bf16_chunk():
    a, (b, lb) = random_side(), random_side(dtype=torch.bfloat16)
    assert torch.equal(merge(a, (b, lb)).out, merge(a, (b.float(), lb)).out)


# --- empty sides ---------------------------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("content", [0.0, NAN, INF, -INF, 6e4])
def test_an_empty_side_contributes_nothing(dtype, sign, content):
    """Case 4: both infinities mean "no key"; what lies beside them is never looked at."""
    side = random_side(dtype=dtype)
    empty = empty_side(*side, content=content, sign=sign)
    for result in (merge(side, empty), merge(empty, side)):
        assert torch.equal(result.out, side[0])
        assert torch.equal(result.lse, side[1])


@every_dtype
@pytest.mark.parametrize("signs", list(itertools.product([-1.0, 1.0], repeat=2)))
@pytest.mark.parametrize("content", [0.0, NAN])
def test_two_empty_sides_are_empty(dtype, signs, content):
    """Cases 5 and 6: merge(empty, empty) = empty."""
    side = random_side(dtype=dtype)
    out, lse = merge(*(empty_side(*side, content=content, sign=sign) for sign in signs))
    assert (out == 0).all()
    assert (lse == -INF).all()


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "width"), [(1, 1, 16), (8, 16, 128), (64, 16, 16), (64, 1, 128)]
)
def test_some_rows_empty_on_one_side_some_on_both(tokens, heads, width, dtype):
    """Case 5."""
    sides = [random_side(tokens, heads, width, dtype) for _ in range(2)]
    kind = torch.rand(heads, tokens)
    both, plus = kind < 0.35, kind < 0.1
    left, right = (kind >= 0.35) & (kind < 0.5), (kind >= 0.5) & (kind < 0.65)
    for (out, lse), hidden in zip(sides, (both | left, both | right), strict=True):
        lse[hidden] = -INF
        lse[plus] = INF
        out.transpose(0, 1)[hidden] = NAN
    out, lse = merge(*sides)
    by_head = out.transpose(0, 1)
    assert not out.isnan().any()
    assert (by_head[both] == 0).all()
    assert (lse[both] == -INF).all()
    assert lse[~both].isfinite().all()
    assert torch.equal(by_head[left], sides[1][0].transpose(0, 1)[left])
    assert torch.equal(by_head[right], sides[0][0].transpose(0, 1)[right])


def test_reducing_many_empty_ones_and_one_result_returns_it_bitwise():
    """Case 6."""
    side = random_side(dtype=torch.bfloat16)
    empty = empty_side(*side)
    out, lse = functools.reduce(merge, [empty, empty, side, empty])
    assert torch.equal(out, side[0])
    assert torch.equal(lse, side[1])


def test_rows_that_the_causal_rule_leaves_without_keys_stay_empty():
    """Case 7: a large negative number in the place of -inf looks right until it is merged."""
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (5, 2))
    query, k_nope, k_pe, value = (torch.randn(s) for s in [(5, 3, 6), (2, 3, 4), (2, 2), (2, 3, 7)])
    side = mla_ops.mla_prefill(
        query,
        k_nope,
        k_pe,
        value,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        max_seqlen_q=5,
        max_seqlen_k=2,
        softmax_scale=0.7,
        is_causal=True,
    )
    assert (side.out[:3] == 0).all()
    assert (side.lse[:, :3] == -INF).all()
    assert torch.equal(side.out[3], value[0])  # sees key 0 only
    out, lse = merge(side, empty_side(*side, content=NAN))
    assert torch.equal(out, side.out)
    assert torch.equal(lse, side.lse)


# --- memory --------------------------------------------------------------------------------------


def padded(values):
    """The values as the first columns of a wider buffer, as a kernel that pads V leaves them."""
    buffer = torch.full((*values.shape[:-1], values.shape[-1] + 3), NAN, dtype=values.dtype)
    buffer[..., : values.shape[-1]] = values
    return buffer[..., : values.shape[-1]]


def transposed(values):
    return values.transpose(0, 1).contiguous().transpose(0, 1)


LAYOUTS = (torch.clone, padded, transposed)


@every_dtype
def test_strides_do_not_matter(dtype):
    """Case 12: a kernel that read the suffix with the prefix's strides."""
    (a, la), (b, lb) = random_side(dtype=dtype), random_side(dtype=dtype)
    expected = merge_attn_states(a, la, b, lb)
    for one, other, target in itertools.product(LAYOUTS, LAYOUTS, (None, *LAYOUTS)):
        out = None if target is None else target(torch.full_like(a, NAN))
        result = merge_attn_states(one(a), la, other(b), lb, out=out)
        assert torch.equal(result.out, expected.out)
        assert torch.equal(result.lse, expected.lse)


@pytest.mark.parametrize("into", [False, True])
def test_strides_of_the_lse_do_not_matter_and_the_result_is_contiguous(into):
    """Case 18: lse comes as `[H, T]` or as a view of `[T, H]`."""
    (a, la), (b, lb) = random_side(), random_side()
    expected = merge_attn_states(a, la, b, lb)
    for one, other in itertools.product((torch.clone, transposed, padded), repeat=2):
        options = {"out": torch.empty_like(a)} if into else {}
        result = merge_attn_states(a, one(la), b, other(lb), **options)
        assert torch.equal(result.out, expected.out)
        assert torch.equal(result.lse, expected.lse)
        assert result.lse.is_contiguous()


@pytest.mark.parametrize("lse_dtype", [torch.float32, torch.float64], ids=str)
@every_dtype
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_lse_is_fp32_and_fp64_for_fp64(dtype, lse_dtype, device):
    """The fake rule (on meta tensors) and the op agree."""
    (a, la), (b, lb) = random_side(dtype=dtype), random_side(dtype=dtype)
    args = [t.to(device) for t in (a, la.to(lse_dtype), b, lb.to(lse_dtype))]
    if (dtype == torch.float64) == (lse_dtype == torch.float64):
        assert merge_attn_states(*args).lse.dtype == lse_dtype
        assert merge_attn_states(*args, out=args[0]).lse.dtype == lse_dtype
        return
    for out in (None, args[0]):
        with pytest.raises(mla_ops.InvalidInputError, match=r"prefix_lse must be \[H, T\]"):
            merge_attn_states(*args, out=out)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", [0, 1])
def test_out_may_be_one_of_the_inputs(layout, which):
    sides = [random_side(), random_side()]
    sides = [(layout(out), lse) for out, lse in sides]
    expected = merge(*((out.clone(), lse) for out, lse in sides))
    kept = sides[1 - which][0].clone()
    target = sides[which][0]
    result = merge(*sides, out=target)
    assert result.out is target
    assert torch.equal(target, expected.out)
    assert torch.equal(result.lse, expected.lse)
    assert torch.equal(sides[1 - which][0], kept)


def test_out_in_another_dtype_is_the_rounded_result():
    a, b = random_side(), random_side()
    target = torch.empty(a[0].shape, dtype=torch.bfloat16)
    assert torch.equal(merge(a, b, out=target).out, merge(a, b).out.bfloat16())


@pytest.mark.parametrize("tokens", [0, 5])
def test_results_are_fresh_and_inputs_untouched(tokens):
    """Case 48: returning an input where the other side is empty."""
    side = random_side(tokens)
    for other in (random_side(tokens), empty_side(*side)):
        inputs = (*side, *other)
        before = [t.clone() for t in inputs]
        out, lse = merge(side, other)
        assert (out.shape, lse.shape) == (side[0].shape, side[1].shape)
        assert all(torch.equal(t, b) for t, b in zip(inputs, before, strict=True))
        pointers = {t.untyped_storage().data_ptr() for t in inputs if t.numel()}
        assert not {t.untyped_storage().data_ptr() for t in (out, lse) if t.numel()} & pointers
        assert out.is_contiguous()
