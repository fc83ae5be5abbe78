"""The tools of `mla_ops.testing`: the budget accepts what is right, and the suite finds faults."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import mla_ops
from mla_ops import dispatch, testing
from mla_ops.dispatch import AttentionOptions, Call
from mla_ops.reference_backend import ReferenceBackend
from mla_ops.testing import DIMS, assert_within_budget, attention_inputs, conformance_cases

pytestmark = pytest.mark.usefixtures("with_one_thread")

Tensors = tuple[Tensor, Tensor, Tensor, Tensor]
Results = tuple[Tensor, Tensor]
Forward = Callable[[Tensors, AttentionOptions], Results]
Fault = Callable[[Tensors, AttentionOptions, Forward], Results]

EXACT = torch.tensor([1.0, -3.0, 100.0], dtype=torch.float64)
INF = float("inf")


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Backends that a test registers are gone afterwards."""
    monkeypatch.setattr(dispatch, "_registry", dict(dispatch._registry))
    dispatch._select.cache_clear()
    yield
    dispatch._select.cache_clear()


def test_budget_is_twice_the_ordinary_error_and_a_rounding_step() -> None:
    ordinary = EXACT + torch.tensor([0.0, 0.01, 0.0], dtype=torch.float64)
    step = torch.finfo(torch.float32).eps
    assert_within_budget((EXACT + 0.02).float(), EXACT, ordinary)
    assert_within_budget(EXACT + 0.02 + 0.99 * step, EXACT, ordinary, dtype=torch.float32)
    with pytest.raises(AssertionError, match=r"in 3 of 3 elements"):
        assert_within_budget((EXACT + 0.0201).float(), EXACT, ordinary)


def test_budget_grows_with_the_magnitude_of_the_element() -> None:
    step = torch.finfo(torch.bfloat16).eps
    assert_within_budget(EXACT * (1 + step), EXACT, EXACT, dtype=torch.bfloat16)
    ours = EXACT + torch.tensor([2 * step, 0, 0], dtype=torch.float64)
    with pytest.raises(AssertionError, match="in 1 of 3 elements, worst at"):
        assert_within_budget(ours, EXACT, EXACT, dtype=torch.bfloat16)


def test_budget_failure_names_the_worst_element_and_all_values() -> None:
    ours = torch.tensor([[0.0, 1.0], [2.0, 7.5]])
    fp64 = torch.tensor([[0.0, 1.5], [2.0, 3.0]], dtype=torch.float64)
    ordinary = fp64 + 0.125
    message = (
        r"^out is out of budget in 2 of 4 elements, worst at \[1, 1\]: "
        r"ours 7\.5, fp64 3, ordinary 3\.125, error 4\.5, budget 0\.2500003\d*$"
    )
    with pytest.raises(AssertionError, match=message):
        assert_within_budget(ours, fp64, ordinary, name="out")


@pytest.mark.parametrize(
    ("ours", "fp64"),
    [(0.0, -INF), (-INF, 0.0), (INF, -INF), (math.nan, 0.0), (math.nan, -INF), (0.0, math.nan)],
)
def test_budget_wants_infinities_and_nan_in_the_same_places(ours: float, fp64: float) -> None:
    exact = torch.tensor([fp64, 1.0], dtype=torch.float64)
    assert_within_budget(exact, exact, exact)
    with pytest.raises(AssertionError, match=r"in 1 of 2 elements, worst at \[0\]"):
        assert_within_budget(torch.tensor([ours, 1.0]), exact, exact)


def test_budget_refuses_other_shapes_and_a_yardstick_that_overflows() -> None:
    with pytest.raises(AssertionError, match=r"lse: .* shapes \[\(2,\), \(3,\), \(3,\)\]"):
        assert_within_budget(EXACT[:2], EXACT, EXACT, name="lse")
    with pytest.raises(AssertionError, match="ordinary result overflows"):
        assert_within_budget(EXACT, EXACT, EXACT.half() * 1e4)


@pytest.mark.parametrize("case", conformance_cases(), ids=str)
def test_inputs_are_hostile(case: testing.ConformanceCase) -> None:
    """Keys that no query sees hold NaN and infinity, all others are finite; the scale is odd."""
    inputs = attention_inputs(case.dims, case.sizes, **case.options)
    seen = inputs.visible().any(dim=1).any(dim=1)
    assert inputs.kv_c[~seen].isnan().all()
    assert inputs.k_pe[~seen].isinf().all()
    assert inputs.kv_c[seen].isfinite().all()
    assert inputs.k_pe[seen].isfinite().all()
    natural = {case.dims.qk_head_dim**-0.5, case.dims.latent_dim**-0.5}
    assert all(abs(inputs.options["softmax_scale"] / scale - 1) > 0.1 for scale in natural)
    assert case.dims.v_head_dim != case.dims.qk_head_dim


def test_the_suite_covers_what_it_promises() -> None:
    """Every option, blind queries, unseen keys, both forms, and every layout occur."""
    cases = [(case, attention_inputs(case.dims, case.sizes, **case.options)) for case in
             conformance_cases()]  # fmt: skip
    assert len({case.name for case, _ in cases}) == len(cases)
    for option in ("attn_mask", "kv_bounds", "sinks", "workspace_tokens"):
        assert {inputs.options[option] is None for _, inputs in cases} == {True, False}
    masks = [inputs.options["attn_mask"] for _, inputs in cases]
    assert {mask.dtype for mask in masks if mask is not None} == {torch.bool, torch.float32}
    assert {case.options.get("layout") for case, _ in cases} == {None, "strided", "shared"}
    assert {case.sizes[1] > case.dims.expand_threshold for case, _ in cases} == {True, False}
    visible = [inputs.visible() for _, inputs in cases]
    assert any((~v.any(dim=-1)).any() and v.any() for v in visible)
    assert any((~v.any(dim=1).any(dim=1)).any() and v.any() for v in visible)
    assert {0 in case.sizes for case, _ in cases} == {True, False}


def test_strided_inputs_lie_in_nan() -> None:
    """A backend that ignores the strides reads NaN."""
    inputs = attention_inputs(DIMS["odd"], (2, 3, 5), layout="strided")
    buffers = [torch.empty(0).set_(tensor.untyped_storage()) for tensor in inputs[:4]]
    assert buffers[1].data_ptr() == buffers[2].data_ptr()
    cache = inputs.kv_c.numel() + inputs.k_pe.numel()
    used = (inputs.query.numel(), cache, cache, inputs.w_kv_b.numel())
    for tensor, buffer, count in zip(inputs[:4], buffers, used, strict=True):
        assert not tensor.is_contiguous()
        assert tensor.isfinite().all()
        assert int(buffer.isnan().sum()) == buffer.numel() - count > 0


class Faulty(ReferenceBackend):
    """The oracle with one fault in its forward; its gradient is that of the faulty forward."""

    name = "faulty"

    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def _forward(self, tensors, options):
        return self._fault(tuple(tensors), options, super()._forward)


def options_fault(change: Callable[[AttentionOptions], AttentionOptions]) -> Fault:
    return lambda tensors, options, forward: forward(tensors, change(options))


def results_fault(change: Callable[[Tensor, Tensor], Results]) -> Fault:
    return lambda tensors, options, forward: change(*forward(tensors, options))


def no_scale_in_the_mask(tensors: Tensors, options: AttentionOptions, forward: Forward) -> Results:
    """An additive mask that is scaled with the scores."""
    mask = options.attn_mask
    if mask is not None and mask.dtype != torch.bool:
        options = options._replace(attn_mask=mask * options.softmax_scale)
    return forward(tensors, options)


def top_left(tensors: Tensors, options: AttentionOptions, forward: Forward) -> Results:
    """The causal rule counted from the first key, as in scaled_dot_product_attention."""
    sizes = (tensors[0].shape[2], tensors[1].shape[1])
    if options.is_causal and options.attn_mask is None:
        options = options._replace(is_causal=False, attn_mask=torch.ones(sizes).tril().bool())
    return forward(tensors, options)


def unseen_times_zero(tensors: Tensors, options: AttentionOptions, forward: Forward) -> Results:
    """Unseen keys are multiplied by a probability of 0."""
    out, lse = forward(tensors, options)
    return out + (0 * tensors[1]).sum().to(out.dtype), lse


def swapped_halves(tensors: Tensors, options: AttentionOptions, forward: Forward) -> Results:
    """The weight is read as values first."""
    query, kv_c, k_pe, w_kv_b = tensors
    rows = w_kv_b.shape[0] // query.shape[1]
    nope = query.shape[3] - k_pe.shape[2]
    w_kv_b = w_kv_b.unflatten(0, (-1, rows)).roll(nope, 1).flatten(0, 1)
    return forward((query, kv_c, k_pe, w_kv_b), options)


def scribble(tensors: Tensors, options: AttentionOptions, forward: Forward) -> Results:
    """Unseen keys are cleaned in place."""
    for tensor in tensors[1:3]:
        tensor.detach().nan_to_num_(posinf=0.0)
    return forward(tensors, options)


FORWARD_FAULTS: dict[str, tuple[Fault, str]] = {
    "natural scale": (
        lambda tensors, options, forward: forward(
            tensors, options._replace(softmax_scale=tensors[0].shape[3] ** -0.5)
        ),
        "out is out of budget",
    ),
    "no causal rule": (options_fault(lambda o: o._replace(is_causal=False)), "out is out"),
    "top-left causal rule": (top_left, "out is out of budget"),
    "no mask": (options_fault(lambda o: o._replace(attn_mask=None)), "out is out of budget"),
    "scaled mask": (no_scale_in_the_mask, "out is out of budget"),
    "no bounds": (options_fault(lambda o: o._replace(kv_bounds=None)), "out is out of budget"),
    "no sinks": (options_fault(lambda o: o._replace(sinks=None)), "out is out of budget"),
    "swapped halves": (swapped_halves, "out is out of budget"),
    "0 times NaN": (unseen_times_zero, "ours nan"),
    "base-2 lse": (results_fault(lambda out, lse: (out, lse / math.log(2))), "lse is out"),
    "finite lse": (results_fault(lambda out, lse: (out, lse.clamp(min=-5e4))), "ours -50000"),
    "bf16 lse": (results_fault(lambda out, lse: (out, lse.bfloat16().float())), "lse is out"),
    "lse in the input dtype": (
        results_fault(lambda out, lse: (out, lse.to(out.dtype))),
        "lse must have dtype",
    ),
    "noise within the budget": (
        results_fault(lambda out, lse: (out + 1e-14 * torch.rand(()), lse)),
        "two runs of the same call differ",
    ),
    "tiny output of blind queries": (
        results_fault(lambda out, lse: (out + 1e-30 * (out == 0), lse)),
        "out is not exactly 0 where nothing is seen",
    ),
    "scribble": (scribble, "kv_c was written to"),
}


def first_failure(backend: ReferenceBackend, dtypes: tuple[torch.dtype, ...]) -> str:
    """Register the backend and return the first thing that the suite finds."""
    mla_ops.register_backend(backend)
    for dtype in dtypes:
        for case in conformance_cases():
            try:
                case.check(backend.name, dtype)
            except AssertionError as error:
                return str(error)
    pytest.fail("the suite found nothing")


@pytest.mark.parametrize("name", FORWARD_FAULTS)
def test_the_suite_finds_a_fault_of_the_forward(name: str) -> None:
    fault, message = FORWARD_FAULTS[name]
    special = {
        "lse in the input dtype": torch.bfloat16,
        "noise within the budget": torch.float64,
    }
    found = first_failure(Faulty(fault), (special.get(name, torch.float32),))
    assert message in found


class FaultyResult(ReferenceBackend):
    """The oracle with results that break the contract."""

    name = "faulty"

    def __init__(self, change: Callable[[Tensor, Tensor, Tensor], Results]) -> None:
        self._change = change

    def mla_attention(self, query, kv_c, k_pe, w_kv_b, options):
        results = super().mla_attention(query, kv_c, k_pe, w_kv_b, options)
        return self._change(query, *results)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, out, lse: (out.mT.contiguous().mT, lse), "out is not contiguous"),
        (lambda q, out, lse: (out, lse.mT.contiguous().mT), "lse is not contiguous"),
        (lambda q, out, lse: (q.view(-1)[: out.numel()].view(out.shape).copy_(out), lse), "memory"),
        (lambda q, out, lse: (out.double(), lse), "out must have dtype and device"),
        (lambda q, out, lse: (out[..., 1:].contiguous(), lse), "have the shapes"),
    ],
    ids=["strided out", "strided lse", "alias", "dtype", "shape"],
)
def test_the_suite_finds_a_broken_contract(change: Callable[..., Results], message: str) -> None:
    found = first_failure(FaultyResult(change), (torch.float32,))
    assert message in found or (message == "memory" and "query was written to" in found)


class FaultyGradient(ReferenceBackend):
    """The oracle with one wrong gradient."""

    name = "faulty"

    def __init__(self, index: int, change: Callable[[Tensor], Tensor]) -> None:
        self._index, self._change = index, change

    def mla_attention_backward(self, *args):
        grads = list(super().mla_attention_backward(*args))
        grads[self._index] = self._change(grads[self._index])
        return tuple(grads)


@pytest.mark.parametrize("index", range(5), ids=["query", "kv_c", "k_pe", "w_kv_b", "sinks"])
@pytest.mark.parametrize("change", [torch.neg, lambda g: g * (1 + 5e-6)], ids=["sign", "scale"])
def test_the_suite_finds_a_wrong_gradient(index: int, change: Callable[..., Tensor]) -> None:
    found = first_failure(FaultyGradient(index, change), (torch.float32,))
    name = ("query", "kv_c", "k_pe", "w_kv_b", "sinks")[index]
    assert found.startswith(f"gradient of {name} under autograd is out of budget")


class NoLseGradient(ReferenceBackend):
    """The oracle whose backward forgets the second result."""

    name = "faulty"

    def mla_attention_backward(self, grad_out, grad_lse, *args):
        return super().mla_attention_backward(grad_out, None, *args)


def test_the_suite_finds_a_forgotten_gradient_of_lse() -> None:
    assert "gradient of" in first_failure(NoLseGradient(), (torch.float32,))


class ForwardOnly(ReferenceBackend):
    """A backend for inference in one dtype."""

    name = "forward-only"

    def not_supported_reasons(self, call: Call) -> list[str]:
        fits = call.op == "mla_attention" and call.dtype == torch.float32
        return [] if fits else ["only mla_attention in float32"]

    def mla_attention_backward(self, *args):
        raise AssertionError("must not be called")


def test_check_backend_returns_what_it_checked() -> None:
    mla_ops.register_backend(ForwardOnly(), automatic=False)
    checked = testing.check_backend("forward-only")
    assert checked == tuple(f"{case} in float32" for case in conformance_cases())


def test_check_backend_lists_every_failure() -> None:
    class Blind(ForwardOnly):
        name = "blind"

        def mla_attention(self, query, kv_c, k_pe, w_kv_b, options):
            blind = options._replace(sinks=None)
            return super().mla_attention(query, kv_c, k_pe, w_kv_b, blind)

    mla_ops.register_backend(Blind(), automatic=False)
    sinks = [case for case in conformance_cases() if case.options.get("sinks") and case.sizes[0]]
    with pytest.raises(AssertionError) as caught:
        testing.check_backend("blind")
    first, *lines = str(caught.value).splitlines()
    assert first == f"backend blind fails {len(sinks)} of {len(conformance_cases())} checks:"
    assert [line.split(" in ")[0].strip() for line in lines] == [str(case) for case in sinks]


def test_check_backend_says_where_a_backend_crashes() -> None:
    class Crash(ForwardOnly):
        name = "crash"

        def mla_attention(self, *args):
            raise IndexError("out of range")

    mla_ops.register_backend(Crash(), automatic=False)
    with pytest.raises(IndexError) as caught:
        testing.check_backend("crash")
    assert caught.value.__notes__ == ["backend crash, case decode in float32"]


def test_check_backend_wants_something_to_check() -> None:
    class Nothing(ForwardOnly):
        name = "nothing"

        def not_supported_reasons(self, call: Call) -> list[str]:
            return ["never"]

    mla_ops.register_backend(Nothing(), automatic=False)
    with pytest.raises(AssertionError, match="backend nothing takes no dtype on cpu"):
        testing.check_backend("nothing")
    with pytest.raises(mla_ops.BackendUnavailableError, match="got 'unheard-of'"):
        testing.check_backend("unheard-of")
