"""The oracle is what the paper says: both forms equal a loop that is written without torch."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from mla_ops.dims import MLADims
from mla_ops.reference import MLAOutput, mla_attention, split_kv_b, visible_keys
from mla_ops.testing import DIMS, AttentionInputs, ConformanceCase, attention_inputs
from mla_ops.testing import conformance_cases as all_cases

INF = float("inf")
FORMS = ("expanded", "absorbed")
every_form = pytest.mark.parametrize("form", FORMS)


def call(inputs: AttentionInputs, form: str = "expanded") -> MLAOutput:
    options = {k: v for k, v in inputs.options.items() if k != "workspace_tokens"}
    return mla_attention(*inputs[:4], form=form, **options)


def numpy_inputs(inputs: AttentionInputs) -> tuple[list[np.ndarray], dict]:
    def convert(value):
        return value.numpy() if isinstance(value, Tensor) else value

    return [t.numpy() for t in inputs[:4]], {k: convert(v) for k, v in inputs.options.items()}


def naive(inputs: AttentionInputs) -> tuple[np.ndarray, np.ndarray]:
    """Attention one query, head and key at a time; an unseen key is never read."""
    (query, kv_c, k_pe, w_kv_b), options = numpy_inputs(inputs)
    batch, heads, queries, width = query.shape
    keys, rope = k_pe.shape[1:]
    nope, rows = width - rope, w_kv_b.shape[0] // heads
    mask = options["attn_mask"]
    if mask is not None:
        mask = np.broadcast_to(mask, (batch, heads, queries, keys))
    out = np.zeros((batch, heads, queries, rows - nope))
    lse = np.full((batch, heads, queries), -np.inf)
    for b, h, s in np.ndindex(batch, heads, queries):
        first, end = (0, keys) if options["kv_bounds"] is None else options["kv_bounds"][b]
        first, end = max(first, 0), min(max(end, 0), keys)
        w_uk, w_uv = np.split(w_kv_b[h * rows : (h + 1) * rows], [nope])
        scores, values = [], []
        for t in range(first, end):
            new_token = t - (end - queries)  # the query that the key belongs to
            if options["is_causal"] and new_token > s:
                continue
            bias = 0.0 if mask is None else mask[b, h, s, t]
            if mask is not None and mask.dtype == bool:
                bias = 0.0 if bias else -np.inf
            if bias == -np.inf:
                continue
            key = np.concatenate([w_uk @ kv_c[b, t], k_pe[b, t]])
            scores.append(options["softmax_scale"] * (query[b, h, s] @ key) + bias)
            values.append(w_uv @ kv_c[b, t])
        if options["sinks"] is not None:
            scores.append(options["sinks"][h])
            values.append(np.zeros(rows - nope))
        if scores:
            top = max(scores)
            weights = np.exp(np.array(scores) - top)
            out[b, h, s] = weights @ np.array(values) / weights.sum()
            lse[b, h, s] = top + math.log(weights.sum())
    return out, lse


@every_form
@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_equals_a_naive_loop(case: ConformanceCase, form: str) -> None:
    inputs = attention_inputs(case.dims, case.sizes, dtype=torch.float64, **case.options)
    out, lse = naive(inputs)
    result = call(inputs, form)
    np.testing.assert_allclose(result.out.numpy(), out, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(result.lse.numpy(), lse, rtol=1e-12, atol=1e-12)


@every_form
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "sinks": True},
        {"bounds": True, "sinks": True},
        {"mask": "float:b1st", "is_causal": True},
        {"mask": "bool:hst", "sinks": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_gradients(form: str, options: dict) -> None:
    """Against finite differences, of both results; no gradient reaches an unseen key."""
    dims = MLADims(2, 5, 3, 2, 4)
    inputs = attention_inputs(dims, (4, 3, 5), dtype=torch.float64, **options)
    unseen = ~inputs.visible().any(dim=1).any(dim=1)[..., None]
    blind = ~inputs.visible().any(dim=-1)
    inputs = inputs._replace(kv_c=inputs.kv_c.masked_fill(unseen, 0.5))  # differences of NaN
    inputs = inputs._replace(k_pe=inputs.k_pe.masked_fill(unseen, 0.5))

    def function(query, kv_c, k_pe, w_kv_b, sinks):
        changed = {**inputs.options, "sinks": sinks}
        out, lse = call(AttentionInputs(query, kv_c, k_pe, w_kv_b, changed), form)
        return out, lse if sinks is not None else lse.masked_fill(blind, 0.0)

    leaves = [t.detach().requires_grad_() for t in inputs[:4]]
    sinks = inputs.options["sinks"]
    leaves.append(None if sinks is None else sinks.requires_grad_())
    assert torch.autograd.gradcheck(function, leaves)


@every_form
def test_unseen_keys_may_hold_anything(form: str) -> None:
    """NaN and infinity in them change no bit of the results and reach no gradient."""
    case = next(case for case in all_cases() if case.name == "extend-causal-mask")
    inputs = attention_inputs(case.dims, case.sizes, **case.options)
    clean = inputs._replace(
        kv_c=inputs.kv_c.nan_to_num(nan=1.0), k_pe=inputs.k_pe.nan_to_num(posinf=1.0)
    )
    results = []
    for variant in (inputs, clean):
        leaves = [t.detach().requires_grad_() for t in variant[:4]]
        out, lse = call(variant._replace(**dict(zip(variant._fields, leaves, strict=False))), form)
        (out.sum() + lse.masked_fill(lse == -INF, 0.0).sum()).backward()
        results.append([out, lse, *(leaf.grad for leaf in leaves)])
    for poisoned, right in zip(*results, strict=True):
        assert poisoned.isnan().sum() == 0
        assert torch.equal(poisoned, right)


def one_hot_inputs(num_queries: int, num_keys: int) -> tuple[Tensor, ...]:
    """Every score is 0, and the value of key `t` is the `t`-th unit vector."""
    query = torch.zeros(1, 1, num_queries, 2 + 3, dtype=torch.float64)
    kv_c = torch.eye(num_keys, dtype=torch.float64)[None]
    k_pe = torch.zeros(1, num_keys, 3, dtype=torch.float64)
    w_kv_b = torch.cat([torch.ones(2, num_keys), torch.eye(num_keys)]).double()
    return query, kv_c, k_pe, w_kv_b


@every_form
@pytest.mark.parametrize(
    ("num_queries", "num_keys", "bounds", "seen"),
    [
        (2, 5, None, ["11110", "11111"]),
        (5, 2, None, ["00", "00", "00", "10", "11"]),
        (3, 3, None, ["100", "110", "111"]),
        (2, 5, (1, 4), ["01100", "01110"]),
        (3, 5, (3, 5), ["00000", "00010", "00011"]),
        (2, 3, (0, 9), ["110", "111"]),
        (1, 3, (2, 1), ["000"]),
    ],
)
def test_causal_is_bottom_right_aligned(
    form: str, num_queries: int, num_keys: int, bounds: tuple[int, int] | None, seen: list[str]
) -> None:
    """With equal scores and one-hot values, a row of the output counts the keys that it sees."""
    tensors = one_hot_inputs(num_queries, num_keys)
    kv_bounds = None if bounds is None else torch.tensor([bounds], dtype=torch.int32)
    rule = {"is_causal": True, "kv_bounds": kv_bounds}
    out, lse = mla_attention(*tensors, softmax_scale=0.7, form=form, **rule)
    rows = torch.tensor([[int(bit) for bit in row] for row in seen], dtype=torch.float64)
    count = rows.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(out[0, 0], rows / count.clamp(min=1), rtol=1e-15, atol=0)
    torch.testing.assert_close(lse[0, 0], count[:, 0].log(), rtol=1e-15, atol=0)
    device = torch.device("cpu")
    visible = visible_keys(num_queries, num_keys, attn_mask=None, device=device, **rule)
    assert torch.equal(visible[0, 0], rows.bool())


@every_form
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(2, 3, 0), (2, 3, 5), (0, 3, 5), (2, 0, 5)], ids=str)
def test_law_of_empty_sets(
    form: str, sinks: bool, dtype: torch.dtype, sizes: tuple[int, int, int]
) -> None:
    """A query without keys: output exactly 0, lse exactly -inf, or the sink's logit."""
    inputs = attention_inputs(DIMS["odd"], sizes, dtype=dtype, mask="hidden:b1st", sinks=sinks)
    out, lse = call(inputs, form)
    stats = torch.float64 if dtype == torch.float64 else torch.float32
    assert (out.dtype, lse.dtype) == (dtype, stats)
    assert out.shape == (sizes[0], 3, sizes[1], 12)
    assert torch.equal(out, torch.zeros_like(out))
    expected = torch.full_like(lse, -INF)
    if sinks:
        expected = inputs.options["sinks"].to(stats)[:, None].expand_as(lse)
    torch.testing.assert_close(lse, expected, rtol=1e-6, atol=0)


@every_form
def test_a_sink_of_minus_infinity_is_no_sink(form: str) -> None:
    case = next(case for case in all_cases() if case.name == "extend-causal-more-queries")
    inputs = attention_inputs(case.dims, case.sizes, dtype=torch.float64, **case.options)
    plain = call(inputs, form)
    sinks = torch.full((case.dims.num_heads,), -INF, dtype=torch.float64)
    result = call(inputs._replace(options={**inputs.options, "sinks": sinks}), form)
    torch.testing.assert_close(result, plain, rtol=1e-14, atol=1e-14)


@every_form
def test_additive_mask_of_the_smallest_number_is_no_infinity(form: str) -> None:
    """Where a mask hides all keys by `finfo.min`, as transformers does, they share the row."""
    inputs = attention_inputs(DIMS["odd"], (2, 2, 9))
    lowest = torch.finfo(torch.float32).min
    mask = torch.tensor([lowest, 0.0])[:, None].expand(2, 9)
    out, _ = call(inputs._replace(options={**inputs.options, "attn_mask": mask}), form)
    w_uv = split_kv_b(inputs.w_kv_b, 3, DIMS["odd"].qk_nope_head_dim)[1]
    mean = torch.einsum("btl,hvl->bhv", inputs.kv_c, w_uv) / 9
    torch.testing.assert_close(out[:, :, 0], mean)
    torch.testing.assert_close(out[:, :, 1], call(inputs, form).out[:, :, 1])


def test_large_scores_do_not_overflow() -> None:
    inputs = attention_inputs(DIMS["odd"], (2, 2, 9), softmax_scale=1e4)
    for form in FORMS:
        out, lse = call(inputs, form)
        exact = call(inputs.to(torch.float64), form)
        torch.testing.assert_close(out.double(), exact.out, rtol=0, atol=2e-2)
        torch.testing.assert_close(lse.double(), exact.lse, rtol=1e-6, atol=0)


def test_split_kv_b_makes_views() -> None:
    w_kv_b = torch.arange(3 * 7 * 2.0).view(21, 2)
    w_uk, w_uv = split_kv_b(w_kv_b, 3, 4)
    assert (w_uk.shape, w_uv.shape) == ((3, 4, 2), (3, 3, 2))
    assert torch.equal(torch.cat([w_uk, w_uv], dim=1).flatten(0, 1), w_kv_b)
    assert w_uk.data_ptr() == w_kv_b.data_ptr()
    assert w_uv.data_ptr() == w_kv_b.data_ptr() + 4 * 2 * w_kv_b.element_size()


def test_runs_under_functional_transforms() -> None:
    """The oracle is plain torch: a per-sample gradient is one sample's gradient."""
    inputs = attention_inputs(DIMS["odd"], (3, 2, 5), dtype=torch.float64)
    scale = inputs.options["softmax_scale"]

    def loss(w_kv_b: Tensor, *sample: Tensor) -> Tensor:
        tensors = [t[None] for t in sample]
        return mla_attention(*tensors, w_kv_b, softmax_scale=scale).out.square().sum()

    gradient = torch.func.grad(loss)
    mapped = torch.func.vmap(gradient, in_dims=(None, 0, 0, 0))(inputs.w_kv_b, *inputs[:3])
    rows = zip(*inputs[:3], strict=True)
    looped = torch.stack([functools.partial(gradient, inputs.w_kv_b)(*row) for row in rows])
    torch.testing.assert_close(mapped, looped)
