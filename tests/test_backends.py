"""Every backend gives the oracle's numbers, and the tiled one does no more work than it must."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native import has_native
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import mla_ops
from mla_ops import reference
from mla_ops.dims import MLADims
from mla_ops.dispatch import AttentionOptions, Call
from mla_ops.kernels import tiled
from mla_ops.kernels.tiling import Plan, plan_tiles
from mla_ops.testing import (
    DIMS,
    AttentionInputs,
    ConformanceCase,
    attention_inputs,
    conformance_cases,
)
from mla_ops.validation import FLOAT_DTYPES

INF = float("inf")
CPU = torch.device("cpu")
HALVES = (torch.bfloat16, torch.float16)
# The Triton backend has files of its own: on a CPU it needs a process with the interpreter.
EVERYWHERE = (*(["cpu"] if has_native() else []), "tiled", "reference")
every_backend = pytest.mark.parametrize("backend", EVERYWHERE)
every_case = pytest.mark.parametrize("case", conformance_cases(), ids=str)
either_form = pytest.mark.parametrize("expand", [False, True], ids=["absorbed", "expanded"])
forward_or_backward = pytest.mark.parametrize("backward", [False, True])


def takes(backend: str, dtype: torch.dtype, device: str = "cpu") -> bool:
    call = Call("mla_attention", device, dtype)
    return not mla_ops.get_backend(backend).not_supported_reasons(call)


def finest(backend: str) -> tuple[torch.dtype, float]:
    """The best dtype that a backend takes, and the error of some sums in it."""
    return (torch.float64, 1e-12) if takes(backend, torch.float64) else (torch.float32, 1e-5)


@every_case
def test_backends_conform(case: ConformanceCase) -> None:
    for backend in EVERYWHERE:
        for dtype in FLOAT_DTYPES:
            if takes(backend, dtype):
                case.check(backend, dtype)


@pytest.mark.gpu
@every_case
def test_backends_conform_on_a_gpu(case: ConformanceCase) -> None:
    for backend in mla_ops.available_backends():
        for dtype in FLOAT_DTYPES:
            if takes(backend, dtype, "cuda"):
                case.check(backend, dtype, device="cuda")


def test_no_dtype_is_left_out() -> None:
    for backend in ("tiled", "reference"):
        assert all(takes(backend, dtype) for dtype in FLOAT_DTYPES)


@every_case
def test_16_bit_inputs_are_right_in_either_compute_dtype(
    case: ConformanceCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU computes them in fp32 or as they are, depending on what it has; both must hold."""
    for compute in (None, torch.float32):
        monkeypatch.setattr(tiled, "compute_dtype", lambda dtype, device, c=compute: c or dtype)
        for dtype in HALVES:
            case.check("tiled", dtype)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Plan]]:
    """The plans that the tiled backend makes during the test."""
    made = []

    def spy(*args, **kwargs):
        made.append(plan_tiles(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(tiled, "plan_tiles", spy)
    with mla_ops.use_backend("tiled"):
        yield made


def test_each_form_is_taken_where_it_costs_less(plans: list[Plan]) -> None:
    odd, wide = DIMS["odd"], DIMS["wide-values"]
    few, many = int(odd.expand_threshold), int(odd.expand_threshold) + 1
    forms = {
        (odd, 1, 9): False,
        (odd, 4, 4): False,  # a handful
        (odd, 5, 5): True,  # without a context a prompt of any other length
        (odd, 5, 30): False,
        (odd, few, 4000): False,
        (odd, many, 4000): True,
        (wide, 300, 300): False,
    }
    for dims, queries, keys in forms:
        inputs = attention_inputs(dims, (1, queries, keys))
        mla_ops.mla_attention(*inputs[:4], **inputs.options)
    assert [plan.expand for plan in plans] == list(forms.values())


@pytest.mark.parametrize("name", sorted(DIMS))
def test_the_rule_of_the_forms_counts_flops(name: str) -> None:
    """Against a count pair by pair; the compiled kernels have the rule once more."""
    dims = DIMS[name]
    pair_of_up = dims.kv_lora_rank * (dims.qk_nope_head_dim + dims.v_head_dim)
    absorbed_pair = 2 * dims.kv_lora_rank + dims.qk_rope_head_dim
    expanded_pair = dims.qk_head_dim + dims.v_head_dim
    for queries in (1, 4, 5, 6, 20, 60):
        for keys in (0, 1, 5, 19, 20, 21, 40, 90, 1000):
            pairs = sum(max(0, keys - queries + i + 1) for i in range(queries))
            absorbed = queries * pair_of_up + pairs * absorbed_pair
            expanded = keys * pair_of_up + pairs * expanded_pair
            assert dims.should_expand(queries, keys) == (queries > 4 and expanded < absorbed)


def test_the_suite_takes_both_forms_in_tiles(plans: list[Plan]) -> None:
    """Both forms occur with more than one tile and with one."""
    seen = set()
    for case in conformance_cases():
        if 0 not in case.sizes:
            inputs = attention_inputs(case.dims, case.sizes, **case.options)
            mla_ops.mla_attention(*inputs[:4], **inputs.options)
            seen.add((plans[-1].expand, plans[-1].keys < case.sizes[2]))
    assert seen == {(expand, tiles) for expand in (False, True) for tiles in (False, True)}


def compare(inputs: AttentionInputs, backend: str = "tiled") -> None:
    """Results and gradients in fp64 equal those of the oracle."""

    def run(function: Callable[..., Any], options: dict[str, Any]) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in inputs[:4]]
        if options["sinks"] is not None:
            leaves.append(options["sinks"].detach().requires_grad_())
            options["sinks"] = leaves[4]
        out, lse = function(*leaves[:4], **options)
        total = out.square().sum() + lse.masked_fill(lse == -INF, 0.0).square().sum()
        grads = torch.autograd.grad(total, leaves, materialize_grads=True)
        return [out.detach(), lse.detach(), *grads]

    options = dict(inputs.options)
    tokens = options.pop("workspace_tokens")
    right = run(reference.mla_attention, dict(options))
    with mla_ops.use_backend(backend):
        ours = run(mla_ops.mla_attention, {**options, "workspace_tokens": tokens})
    for a, b in zip(ours, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


inputs_of_any_kind = st.builds(
    functools.partial(attention_inputs, dtype=torch.float64),
    st.sampled_from(list(DIMS.values())),
    st.tuples(st.integers(1, 4), st.integers(1, 30), st.integers(0, 40)),
    is_causal=st.booleans(),
    mask=st.sampled_from(
        [None, None, "bool:b1st", "float:1hst", "bool:b11t", "float:s1", "bool:1"]
    ),
    bounds=st.booleans(),
    sinks=st.booleans(),
    workspace_tokens=st.none() | st.integers(1, 45),
    layout=st.sampled_from(["contiguous", "strided", "shared"]),
    seed=st.integers(0, 2**31),
)


@given(inputs=inputs_of_any_kind)
def test_any_workspace_gives_the_same_result(inputs: AttentionInputs) -> None:
    compare(inputs)


@given(
    inputs=inputs_of_any_kind,
    plan=st.builds(Plan, st.booleans(), st.integers(1, 7), st.integers(1, 9), st.integers(1, 9)),
)
def test_any_plan_gives_the_same_result(inputs: AttentionInputs, plan: Plan) -> None:
    """Blocks of heads, queries and keys of any size, and either form."""

    def chosen(dims: MLADims, *args: Any, expand: bool | None = None, **kwargs: Any) -> Plan:
        heads = min(plan.heads, dims.num_heads)
        wanted = plan.expand if expand is None else expand
        return dataclasses.replace(plan, heads=heads, expand=wanted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled, "plan_tiles", chosen)
        compare(inputs)


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("name", ["odd", "wide-values"])
def test_sizes_around_the_real_tiles(name: str, extra: int, plans: list[Plan]) -> None:
    """As many queries and keys as a block holds, one less and one more."""
    dims = DIMS[name]
    plan = plan_tiles(dims, 10**6, 10**6, workspace_tokens=256, device=CPU, converts=False)
    sizes = (1, plan.queries + extra, 2 * plan.keys + extra)
    options = {"is_causal": True, "workspace_tokens": 256, "dtype": torch.float64}
    compare(attention_inputs(dims, sizes, **options))
    assert plans[0].expand is (name == "odd")
    assert plans[0].queries == min(plan.queries, sizes[1])


@every_backend
@pytest.mark.parametrize("num_queries", [1, 3, 40])
def test_a_request_does_not_see_its_neighbours(backend: str, num_queries: int) -> None:
    dtype, error = finest(backend)
    options = {"bounds": True, "is_causal": True, "dtype": dtype, "workspace_tokens": 7}
    inputs = attention_inputs(DIMS["odd"], (4, num_queries, 23), **options)
    with mla_ops.use_backend(backend):
        together = mla_ops.mla_attention(*inputs[:4], **inputs.options)
        for b in range(4):
            tensors = [t[b : b + 1] for t in inputs[:3]]
            bounds = inputs.options["kv_bounds"][b : b + 1]
            own = {**inputs.options, "kv_bounds": bounds}
            alone = mla_ops.mla_attention(*tensors, inputs.w_kv_b, **own)
            torch.testing.assert_close(alone.out[0], together.out[b], rtol=error, atol=error)
            torch.testing.assert_close(alone.lse[0], together.lse[b], rtol=error, atol=error)


@every_backend
@given(data=st.data())
def test_parts_merge_by_their_lse(backend: str, data: st.DataObject) -> None:
    """Attention to any partition of the keys, merged by the natural log-sum-exp, is the whole."""
    queries, keys = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 30))
    cuts = sorted(data.draw(st.lists(st.integers(0, keys), max_size=4)))
    dtype, error = finest(backend)
    inputs = attention_inputs(DIMS["odd"], (1, queries, keys), dtype=dtype)

    def attend(first: int, end: int) -> mla_ops.MLAOutput:
        bounds = torch.tensor([[first, end]], dtype=torch.int32)
        options = {**inputs.options, "kv_bounds": bounds}
        return mla_ops.mla_attention(*inputs[:4], **options)

    with mla_ops.use_backend(backend):
        whole = attend(0, keys)
        parts = [attend(*pair) for pair in zip([0, *cuts], [*cuts, keys], strict=True)]
    lse = torch.logsumexp(torch.stack([part.lse for part in parts]), dim=0)
    torch.testing.assert_close(lse, whole.lse, rtol=error, atol=error)
    out = sum(part.out * (part.lse - lse).exp()[..., None] for part in parts)
    torch.testing.assert_close(out, whole.out, rtol=error, atol=error)


@pytest.mark.parametrize(
    ("backend", "dtype"), [(b, d) for b in EVERYWHERE for d in FLOAT_DTYPES if takes(b, d)], ids=str
)
@pytest.mark.parametrize("tokens", [None, 1, 2])
def test_causal_is_bottom_right_aligned(
    backend: str, dtype: torch.dtype, tokens: int | None
) -> None:
    """Equal scores and one-hot values: the averages are 1/4 and 1/5."""
    query, k_pe = torch.zeros(1, 1, 2, 2 + 3, dtype=dtype), torch.zeros(1, 5, 3, dtype=dtype)
    w_kv_b = torch.cat([torch.ones(2, 5), torch.eye(5)]).to(dtype)
    kv_c = torch.eye(5, dtype=dtype)[None]
    options = {"softmax_scale": 0.7, "is_causal": True, "workspace_tokens": tokens}
    with mla_ops.use_backend(backend):
        out, lse = mla_ops.mla_attention(query, kv_c, k_pe, w_kv_b, **options)
    rows = torch.tensor([[0.25, 0.25, 0.25, 0.25, 0.0], [0.2] * 5], dtype=dtype)
    torch.testing.assert_close(out[0, 0], rows, rtol=8 * torch.finfo(dtype).eps, atol=0)
    torch.testing.assert_close(lse[0, 0], torch.tensor([4.0, 5.0], dtype=lse.dtype).log())


@every_backend
@either_form
@pytest.mark.parametrize("tokens", [None, 2])
def test_additive_mask_of_the_smallest_number(
    backend: str, expand: bool, tokens: int | None
) -> None:
    """Where a mask hides all keys by `finfo.min`, as transformers does, they share the row."""
    inputs = attention_inputs(DIMS["odd"], (2, 30 if expand else 2, 9), workspace_tokens=tokens)
    mask = torch.zeros(inputs.query.shape[2], 9)
    mask[0] = torch.finfo(torch.float32).min
    with mla_ops.use_backend(backend):
        plain = mla_ops.mla_attention(*inputs[:4], **inputs.options)
        options = {**inputs.options, "attn_mask": mask}
        masked = mla_ops.mla_attention(*inputs[:4], **options)
    w_uv = reference.split_kv_b(inputs.w_kv_b, 3, DIMS["odd"].qk_nope_head_dim)[1]
    mean = torch.einsum("btl,hvl->bhv", inputs.kv_c, w_uv) / 9
    torch.testing.assert_close(masked.out[:, :, 0], mean)
    torch.testing.assert_close(masked.out[:, :, 1:], plain.out[:, :, 1:])


@every_backend
@pytest.mark.parametrize("num_queries", [7, 40])
def test_a_sink_of_minus_infinity_is_no_sink(backend: str, num_queries: int) -> None:
    options = {"is_causal": True, "workspace_tokens": 2, "mask": "bool:b1st"}
    inputs = attention_inputs(DIMS["odd"], (2, num_queries, 5), **options)
    with mla_ops.use_backend(backend):
        plain = mla_ops.mla_attention(*inputs[:4], **inputs.options)
        changed = {**inputs.options, "sinks": torch.full((3,), -INF)}
        result = mla_ops.mla_attention(*inputs[:4], **changed)
    torch.testing.assert_close(result, plain)


class Work(TorchDispatchMode):
    """Counts scalar products in matrix multiplications, and bytes that live at the same time."""

    def __init__(self, given: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.products = 0
        self.peak = 0
        self.largest = 0
        self._given = {tensor.untyped_storage().data_ptr() for tensor in given}
        self._alive: dict[int, tuple[int, int]] = {}  # address -> bytes, tensors that hold it

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        operands = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
        first = operands.get(func._schema.name.removeprefix("aten::").rstrip("_"))
        if first is not None:
            a, b = args[first : first + 2]
            self.products += a.numel() * b.shape[-1]
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self._hold(tensor)
        return result

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address in self._given:
            return
        self._alive[address] = (size, self._alive.get(address, (0, 0))[1] + 1)
        weakref.finalize(tensor, self._drop, address)
        self.largest = max(self.largest, size)
        self.peak = max(self.peak, sum(size for size, _ in self._alive.values()))

    def _drop(self, address: int) -> None:
        size, count = self._alive[address]
        if count > 1:
            self._alive[address] = (size, count - 1)
        else:
            del self._alive[address]


def work(inputs: AttentionInputs, backward: bool = False) -> Work:
    """Run the tiled backend on the inputs, without the op around it."""
    backend = mla_ops.get_backend("tiled")
    options = AttentionOptions(**inputs.options)
    results = backend.mla_attention(*inputs[:4], options) if backward else None
    grad = None if results is None else torch.ones_like(results[0])
    mask = options.attn_mask
    with Work([*inputs[:4], *(results or ()), *([] if mask is None else [mask])]) as mode:
        if results is None:
            backend.mla_attention(*inputs[:4], options)
        else:
            backend.mla_attention_backward(grad, None, *inputs[:4], *results, options)
    return mode


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch, expand: bool) -> None:
    """Blocks of eight queries and eight keys, in the wanted form."""

    def chosen(dims, *args, **kwargs):
        wanted = kwargs.get("expand")
        return Plan(expand if wanted is None else wanted, dims.num_heads, 8, 8)

    monkeypatch.setattr(tiled, "plan_tiles", chosen)


def fixed_products(expand: bool, backward: bool, tokens: int) -> int:
    """What as many queries and keys cost whoever sees whom: the up projections.

    Absorbed, they act on query and output; expanded, on the keys, and twice more for gradients.
    """
    dims = DIMS["odd"]
    return tokens * dims.expanded_dim * dims.kv_lora_rank * (3 if backward else 1)


def with_bounds(inputs: AttentionInputs, first: int, end: int) -> AttentionInputs:
    bounds = torch.tensor([[first, end]], dtype=torch.int32)
    return inputs._replace(options={**inputs.options, "kv_bounds": bounds})


@pytest.mark.parametrize("num_queries", [1, 40])
@forward_or_backward
def test_work_follows_the_bounds_and_not_the_cache(num_queries: int, backward: bool) -> None:
    """500 valid slots of a cache of 32768 cost what a cache of 500 costs."""
    full = attention_inputs(DIMS["odd"], (1, num_queries, 500), is_causal=True)
    first = 20_000
    cache = {}
    for name in ("kv_c", "k_pe"):
        rows = getattr(full, name)
        cache[name] = rows.new_full((1, 32_768, rows.shape[2]), float("nan"))
        cache[name][:, first : first + 500] = rows
    sparse = with_bounds(full._replace(**cache), first, first + 500)
    assert work(sparse, backward).products == work(full, backward).products > 0
    out, lse = mla_ops.mla_attention(*full[:4], **full.options)
    torch.testing.assert_close(mla_ops.mla_attention(*sparse[:4], **sparse.options), (out, lse))


@either_form
@forward_or_backward
@pytest.mark.usefixtures("small_tiles")
def test_keys_beyond_the_diagonal_cost_nothing(expand: bool, backward: bool) -> None:
    """Of 8 x 8 tiles, the causal rule leaves the 36 on and below the diagonal."""
    whole, causal = (
        work(attention_inputs(DIMS["odd"], (1, 64, 64), is_causal=rule), backward).products
        for rule in (False, True)
    )
    fixed = fixed_products(expand, backward, 64)
    assert (causal - fixed) * 64 == (whole - fixed) * 36


@either_form
@pytest.mark.usefixtures("small_tiles")
def test_tiles_that_a_mask_hides_cost_nothing(expand: bool) -> None:
    """Four documents in one sequence: a quarter of the products."""
    inputs = attention_inputs(DIMS["odd"], (1, 64, 64))
    document = torch.arange(64) // 16
    mask = document[:, None] == document
    masked = inputs._replace(options={**inputs.options, "attn_mask": mask})
    fixed = fixed_products(expand, False, 64)
    assert (work(masked).products - fixed) * 4 == work(inputs).products - fixed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_queries", [1, 64])
@pytest.mark.parametrize("tokens", [None, 256])
def test_scratch_does_not_grow_with_the_context(
    dtype: torch.dtype, num_queries: int, tokens: int | None
) -> None:
    """The same new tokens take the same memory on 4096 keys, or four full tiles, and on 32768."""
    dims = MLADims(6, 16, 8, 4, 12)
    converts = tiled.compute_dtype(dtype, CPU) != dtype
    plan = plan_tiles(
        dims, num_queries, 10**9, workspace_tokens=tokens, device=CPU, converts=converts
    )
    short = max(4096, 4 * plan.keys)
    peaks = []
    for num_keys in (short, max(32_768, 2 * short)):
        sizes = (1, num_queries, num_keys)
        options = {"dtype": dtype, "is_causal": True, "workspace_tokens": tokens}
        peaks.append(work(attention_inputs(dims, sizes, **options)).peak)
    assert peaks[0] == peaks[1] > 0


def test_bytes_are_counted() -> None:
    """The counter itself: views share memory, and what is freed is not counted."""
    with Work() as mode:
        a = torch.zeros(1000)
        b = a[:10].view(2, 5)
        del a
        c = torch.zeros(500)
        assert mode.peak == 4 * 1500
        del b, c
        d = torch.zeros(1200)
    assert mode.peak == 4 * 1500
    assert d.shape == (1200,)


@pytest.mark.parametrize("tokens", [None, 100])
def test_backward_holds_no_matrix_of_scores(tokens: int | None) -> None:
    """Beyond the gradients, which are as long as the context, its memory is that of a tile."""
    dims = MLADims(6, 16, 8, 4, 12)
    peaks = []
    for num_keys in (4096, 32_768):
        inputs = attention_inputs(dims, (1, 64, num_keys), workspace_tokens=tokens)
        mode = work(inputs, backward=True)
        gradients = 4 * num_keys * dims.latent_dim
        peaks.append(mode.peak - gradients)
    assert peaks[0] == peaks[1] > 0
    assert mode.largest < 4 * 64 * 32_768


@pytest.mark.parametrize("num_queries", [1, 40])
def test_nothing_is_saved_but_inputs_and_results(num_queries: int) -> None:
    inputs = attention_inputs(DIMS["odd"], (2, num_queries, 64), bounds=True, sinks=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        query = inputs.query.requires_grad_()
        out, lse = mla_ops.mla_attention(query, *inputs[1:4], **inputs.options)
    kept = [*inputs[:4], inputs.options["kv_bounds"], inputs.options["sinks"], out, lse]
    assert {t.data_ptr() for t in saved} <= {t.data_ptr() for t in kept}


def test_a_broadcast_mask_takes_no_scores_sized_memory() -> None:
    """A mask of padded keys stays a row."""
    inputs = attention_inputs(DIMS["odd"], (1, 256, 32_768), mask="bool:b11t", is_causal=True)
    assert work(inputs).largest < 256 * 32_768
