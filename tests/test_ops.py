"""The ops keep torch's rules: schema, fake results, no aliases, autograd, autocast."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import mla_ops
from mla_ops import dispatch, reference, validation
from mla_ops.ops import library
from mla_ops.ops.library import admission
from mla_ops.testing import DIMS, AttentionInputs, attention_inputs
from mla_ops.validation import FLOAT_DTYPES

forward_op = torch.ops.mla_ops.mla_attention.default
backward_op = torch.ops.mla_ops.mla_attention_backward.default
OPS = (forward_op, backward_op)
INF = float("inf")

# Named combinations of optional arguments.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True, "workspace_tokens": 3},
    "bool-mask": {"mask": "bool:b1st"},
    "everything": {
        "is_causal": True,
        "mask": "float:hst",
        "bounds": True,
        "sinks": True,
        "workspace_tokens": 2,
    },
}


def op_args(inputs: AttentionInputs) -> tuple[Any, ...]:
    """The arguments in the order of the op's schema."""
    names = ("attn_mask", "kv_bounds", "sinks", "softmax_scale", "is_causal", "workspace_tokens")
    return (*inputs[:4], *(inputs.options[name] for name in names))


def backward_args(inputs: AttentionInputs) -> tuple[Any, ...]:
    args = op_args(inputs)
    out, lse = forward_op(*args)
    grad_out = torch.randn_like(out)
    return (grad_out, torch.randn_like(lse), *args[:4], out, lse, *args[4:])


def require_grad(inputs: AttentionInputs) -> AttentionInputs:
    """Make a leaf of every tensor that can have a gradient; keeps the strides."""
    mask = inputs.options["attn_mask"]

    def leaf(tensor: Tensor) -> Tensor:
        wanted = tensor.is_floating_point() and tensor is not mask
        return tensor.detach().requires_grad_(wanted)

    return inputs.map(leaf)


def clean(inputs: AttentionInputs) -> AttentionInputs:
    """Without NaN, which no two runs of a check would agree on."""
    return inputs._replace(
        kv_c=inputs.kv_c.nan_to_num(nan=1.0), k_pe=inputs.k_pe.nan_to_num(posinf=1.0)
    )


def run_opcheck(op: Any, args: tuple[Any, ...]) -> None:
    results = opcheck(op, args)
    assert set(results.values()) == {"SUCCESS"}
    assert len(results) == 4


@pytest.mark.parametrize("requires_grad", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_opcheck(options: dict[str, Any], dtype: torch.dtype, requires_grad: bool) -> None:
    inputs = clean(attention_inputs(DIMS["odd"], (2, 3, 7), dtype=dtype, **options))
    run_opcheck(forward_op, op_args(require_grad(inputs) if requires_grad else inputs))


@pytest.mark.parametrize("layout", ["strided", "shared"])
@pytest.mark.parametrize("requires_grad", [False, True], ids=["plain", "grad"])
def test_opcheck_of_strided_inputs(layout: Any, requires_grad: bool) -> None:
    inputs = attention_inputs(DIMS["no-rope"], (2, 3, 7), layout=layout, is_causal=True)
    run_opcheck(forward_op, op_args(require_grad(inputs) if requires_grad else inputs))


@pytest.mark.parametrize("sizes", [(2, 0, 5), (2, 3, 0), (0, 3, 5), (1, 1, 1)], ids=str)
def test_opcheck_of_empty_inputs(sizes: tuple[int, int, int]) -> None:
    run_opcheck(forward_op, op_args(attention_inputs(DIMS["odd"], sizes, sinks=True)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["everything"]], ids=["-", "all"])
def test_opcheck_of_the_backward(options: dict[str, Any], dtype: torch.dtype) -> None:
    inputs = clean(attention_inputs(DIMS["odd"], (2, 3, 7), dtype=dtype, **options))
    run_opcheck(backward_op, backward_args(inputs))


def metadata(results: tuple[Tensor, ...]) -> list[tuple[Any, ...]]:
    return [(tuple(t.shape), t.stride(), t.dtype) for t in results]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "strided", "shared"])
@pytest.mark.parametrize("sinks", [False, True], ids=["-", "sinks"])
def test_fake_results_look_like_real_ones(dtype: torch.dtype, layout: Any, sinks: bool) -> None:
    """Shape, strides and dtype; for fake and for meta tensors, and for every small size."""
    for sizes in itertools.product((0, 1, 2), (0, 1, 2, 7), (0, 1, 7)):
        options = {"dtype": dtype, "layout": layout, "sinks": sinks, "mask": "bool:1"}
        inputs = attention_inputs(DIMS["odd"], sizes, **options)
        for op, args in ((forward_op, op_args(inputs)), (backward_op, backward_args(inputs))):
            real = metadata(op(*args))
            with FakeTensorMode() as mode:
                fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
                assert metadata(op(*fakes)) == real
            metas = [a.to("meta") if isinstance(a, Tensor) else a for a in args]
            found = op(*metas)
            assert metadata(found) == real
            assert {t.device.type for t in found} == {"meta"}


def test_the_public_function_takes_meta_tensors() -> None:
    inputs = attention_inputs(DIMS["odd"], (2, 3, 7)).map(lambda t: t.to("meta"))
    for given in (inputs, require_grad(inputs)):
        out, lse = mla_ops.mla_attention(*given[:4], **given.options)
        assert (out.device.type, tuple(out.shape), tuple(lse.shape)) == (
            "meta",
            (2, 3, 3, 12),
            (2, 3, 3),
        )


@pytest.mark.parametrize("op", OPS, ids=["forward", "backward"])
def test_schema(op: Any) -> None:
    """Tensors and scalars in, a fixed number of tensors out, nothing mutated, nothing aliased."""
    schema = op._schema
    allowed = {"Tensor", "Optional[Tensor]", "float", "bool", "Optional[int]"}
    assert {str(argument.type) for argument in schema.arguments} <= allowed
    assert {str(result.type) for result in schema.returns} == {"Tensor"}
    assert len(schema.returns) == (2 if op is forward_op else 5)
    assert not schema.is_mutable
    assert all(a.alias_info is None for a in [*schema.arguments, *schema.returns])


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 3, 7), (2, 3, 0), (2, 40, 3)], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_results_are_fresh(backend: str, options: dict[str, Any], sizes: Any) -> None:
    """No result shares memory with an input or with another result."""
    inputs = attention_inputs(DIMS["odd"], sizes, dtype=torch.float64, **options)
    with mla_ops.use_backend(backend):
        for op, args in ((forward_op, op_args(inputs)), (backward_op, backward_args(inputs))):
            results = op(*args)
            tensors = [t for t in (*args, *results) if isinstance(t, Tensor) and t.numel()]
            memory = [t.untyped_storage().data_ptr() for t in tensors]
            filled = [t for t in results if t.numel()]
            own = [t.untyped_storage().data_ptr() for t in filled]
            assert all(memory.count(address) == 1 for address in own)
            assert all(t.is_contiguous() for t in results)


def run_op(*args: Any) -> tuple[Tensor, Tensor]:
    return forward_op(*args)


def run_public(*args: Any) -> tuple[Tensor, Tensor]:
    names = ("attn_mask", "kv_bounds", "sinks", "softmax_scale", "is_causal", "workspace_tokens")
    return mla_ops.mla_attention(*args[:4], **dict(zip(names, args[4:], strict=True)))


either_entry = pytest.mark.parametrize("entry", [run_public, run_op], ids=["public", "op"])
Entry = Callable[..., tuple[Tensor, Tensor]]


def gradients(entry: Entry, inputs: AttentionInputs) -> dict[str, Tensor]:
    inputs = require_grad(inputs)
    out, lse = entry(*op_args(inputs))
    total = out.square().sum() + lse.masked_fill(lse == -INF, 0.0).square().sum()
    total.backward()
    named = {**inputs._asdict(), "sinks": inputs.options["sinks"]}
    return {k: t.grad for k, t in named.items() if isinstance(t, Tensor) and t.requires_grad}


def run_reference(*args: Any) -> tuple[Tensor, Tensor]:
    names = ("attn_mask", "kv_bounds", "sinks", "softmax_scale", "is_causal")
    return reference.mla_attention(*args[:4], **dict(zip(names, args[4:9], strict=True)))


@either_entry
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_equal_those_of_the_oracle(entry: Entry, options: dict[str, Any]) -> None:
    inputs = attention_inputs(DIMS["odd"], (4, 5, 7), dtype=torch.float64, **options)
    ours, right = gradients(entry, inputs), gradients(run_reference, inputs)
    assert set(ours) >= {"query", "kv_c", "k_pe", "w_kv_b"}
    torch.testing.assert_close(ours, right, rtol=1e-11, atol=1e-11)


@either_entry
def test_only_what_needs_a_gradient_gets_one(entry: Entry) -> None:
    inputs = attention_inputs(DIMS["odd"], (2, 3, 7), dtype=torch.float64, sinks=True)
    args = list(op_args(inputs))
    out, lse = entry(*args)
    assert not out.requires_grad
    assert not lse.requires_grad
    right = gradients(run_reference, inputs)
    for index, name in ((0, "query"), (1, "kv_c"), (2, "k_pe"), (3, "w_kv_b"), (6, "sinks")):
        given = list(args)
        given[index] = args[index].clone().requires_grad_()
        out, lse = entry(*given)
        (out.square().sum() + lse.square().sum()).backward()
        torch.testing.assert_close(given[index].grad, right[name], rtol=1e-11, atol=1e-11)
        with torch.no_grad():
            assert not any(result.requires_grad for result in entry(*given))
        with torch.inference_mode():
            assert all(result.is_inference() for result in entry(*given))


@either_entry
def test_gradients_of_one_result(entry: Entry) -> None:
    """A result that the loss does not use counts as zero."""
    inputs = attention_inputs(DIMS["odd"], (2, 3, 7), dtype=torch.float64, sinks=True)

    def gradient(function: Entry, index: int) -> Tensor:
        leaves = require_grad(inputs)
        result = function(*op_args(leaves))[index]
        return torch.autograd.grad(result.square().sum(), leaves.w_kv_b)[0]

    for index in (0, 1):
        ours, right = gradient(entry, index), gradient(run_reference, index)
        torch.testing.assert_close(ours, right, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_backward_without_a_gradient_of_lse(backend: str) -> None:
    args = backward_args(attention_inputs(DIMS["odd"], (2, 3, 7), dtype=torch.float64, sinks=True))
    with mla_ops.use_backend(backend):
        without = backward_op(args[0], None, *args[2:])
        zero = backward_op(args[0], torch.zeros_like(args[1]), *args[2:])
    torch.testing.assert_close(without, zero, rtol=0, atol=0)


@either_entry
def test_second_derivatives_are_refused(entry: Entry) -> None:
    leaves = require_grad(attention_inputs(DIMS["odd"], (2, 3, 7), dtype=torch.float64))
    out, _ = entry(*op_args(leaves))
    (first,) = torch.autograd.grad(out.square().sum(), leaves.query, create_graph=True)
    with pytest.raises(mla_ops.UnsupportedInputError, match="only first derivatives"):
        torch.autograd.grad(first.sum(), leaves.query)


def test_forward_mode_derivatives_are_refused() -> None:
    inputs = attention_inputs(DIMS["odd"], (2, 3, 7), dtype=torch.float64)
    with forward_ad.dual_level():
        query = forward_ad.make_dual(inputs.query, torch.ones_like(inputs.query))
        with pytest.raises(NotImplementedError, match="jvp"):
            mla_ops.mla_attention(query, *inputs[1:4], **inputs.options)


@either_entry
def test_a_mask_gets_no_gradient(entry: Entry) -> None:
    inputs = attention_inputs(DIMS["odd"], (2, 3, 7), mask="float:st")
    args = list(op_args(inputs))
    args[4] = args[4].clone().requires_grad_()
    with pytest.raises(mla_ops.InvalidInputError, match=r"attn_mask must not require grad.*detach"):
        entry(*args)
    with torch.no_grad():
        torch.testing.assert_close(entry(*args), entry(*op_args(inputs)), rtol=0, atol=0)


@either_entry
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(entry: Entry, dtype: torch.dtype) -> None:
    """Everything that `linear` would cast is cast; gradients come back in the inputs' dtype."""
    inputs = attention_inputs(DIMS["odd"], (2, 3, 7), mask="float:st", sinks=True)
    leaves = require_grad(inputs)
    with torch.autocast("cpu", dtype):
        out, lse = entry(*op_args(leaves))
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    cast = [t.to(dtype) for t in inputs[:4]]
    expected = entry(*cast, *op_args(inputs)[4:])
    torch.testing.assert_close((out.detach(), lse.detach()), expected, rtol=0, atol=0)
    (out.float().square().sum() + lse.sum()).backward()
    by_hand = require_grad(inputs)
    out, lse = entry(*(t.to(dtype) for t in by_hand[:4]), *op_args(by_hand)[4:])
    (out.float().square().sum() + lse.sum()).backward()
    for ours, right in zip(leaves[:4], by_hand[:4], strict=True):
        assert ours.grad.dtype == torch.float32
        assert torch.equal(ours.grad, right.grad)
    assert torch.equal(leaves.options["sinks"].grad, by_hand.options["sinks"].grad)


@either_entry
def test_autocast_mixes_and_leaves_alone(entry: Entry) -> None:
    """Mixed dtypes are legal under autocast, fp64 stays, and a disabled region does nothing."""
    inputs = attention_inputs(DIMS["odd"], (2, 3, 7))
    args = op_args(inputs)
    mixed = (args[0].bfloat16(), args[1], args[2].half(), *args[3:])
    with torch.autocast("cpu", torch.bfloat16):
        assert entry(*mixed)[0].dtype == torch.bfloat16
        assert entry(*op_args(inputs.to(torch.float64)))[0].dtype == torch.float64
        with torch.autocast("cpu", enabled=False):
            assert entry(*args)[0].dtype == torch.float32
    with pytest.raises(mla_ops.InvalidInputError, match="must be of the query's dtype"):
        entry(*mixed)


class OpsCalled(TorchDispatchMode):
    """Records the ops of this package that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "mla_ops":
            self.names.append(func._schema.name.removeprefix("mla_ops::"))
        return func(*args, **(kwargs or {}))


@either_entry
def test_one_boundary_a_call(entry: Entry) -> None:
    """A call is one op, its backward another; nothing is nested."""
    inputs = attention_inputs(DIMS["odd"], (2, 3, 7))
    with OpsCalled() as plain:
        entry(*op_args(inputs))
    assert plain.names == ["mla_attention"]
    leaves = require_grad(inputs)
    with OpsCalled() as pulled:
        entry(*op_args(leaves))[0].sum().backward()
    assert pulled.names == ["mla_attention", "mla_attention_backward"]
    with OpsCalled() as cast, torch.autocast("cpu", torch.bfloat16):
        entry(*op_args(inputs))
    assert cast.names == ["mla_attention"]


def test_a_tensor_that_is_trained_twice() -> None:
    """Two calls that share the weight add up their gradients."""
    inputs = attention_inputs(DIMS["odd"], (2, 3, 7), dtype=torch.float64)
    leaves = require_grad(inputs)
    total = sum(run_public(*op_args(leaves))[0].sum() for _ in range(2))
    total.backward()
    once = require_grad(inputs)
    run_public(*op_args(once))[0].sum().backward()
    torch.testing.assert_close(leaves.w_kv_b.grad, 2 * once.w_kv_b.grad)


def test_a_kind_of_call_is_checked_once() -> None:
    """Shapes, dtypes, devices and scalars make a kind; what is refused is refused every time."""
    checked = []

    def check(query: Tensor, mask: Tensor | None, scale: float) -> None:
        checked.append((tuple(query.shape), query.dtype, query.device.type, mask, scale))
        if scale > 1:
            raise mla_ops.InvalidInputError("too large")

    admit = admission("mla_attention", check)
    query = torch.zeros(2, 3)
    kinds = [
        (query, None, 0.5),
        (query.view(3, 2), None, 0.5),
        (query[None], None, 0.5),
        (query.double(), None, 0.5),
        (query.to("meta"), None, 0.5),
        (query, query, 0.5),
        (query, None, 0.25),
    ]
    for count, kind in enumerate(kinds, 1):
        for _ in range(3):
            admit(*(torch.ones_like(a) if isinstance(a, Tensor) else a for a in kind))
            assert len(checked) == count
    for _ in range(2):
        with pytest.raises(mla_ops.InvalidInputError, match="too large"):
            admit(query, None, 2.0)
    assert len(checked) == len(kinds) + 2


def test_the_backend_of_a_known_kind_is_chosen_anew() -> None:
    admit = admission("mla_attention", lambda *args: None)
    names = []
    for backend in ("reference", "tiled", "reference"):
        with mla_ops.use_backend(backend):
            names.append(admit(torch.zeros(1)).name)
    assert names == ["reference", "tiled", "reference"]
    with pytest.raises(mla_ops.UnsupportedInputError, match="mla_attention of int8 on cpu"):
        admit(torch.zeros(1, dtype=torch.int8))


def test_the_backend_is_chosen_by_the_argument_that_is_computed_with() -> None:
    admit = admission("mla_attention", lambda *args: None, like=1)
    args = (torch.zeros(1), torch.zeros(1, dtype=torch.int8))
    with pytest.raises(mla_ops.UnsupportedInputError, match="mla_attention of int8 on cpu"):
        admit(*args)
    call = dispatch.Call("mla_attention", "cpu", torch.float32)
    assert admit(*reversed(args)) is dispatch.select(call)


def test_kinds_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_MOST_KINDS", 3)
    sizes = []
    admit = admission("mla_attention", lambda query: sizes.append(len(query)))
    for size in (0, 1, 2, 0, 1, 2, 3, 3, 0):
        admit(torch.zeros(size))
    assert sizes == [0, 1, 2, 3, 0]  # the fourth kind made room


@either_entry
def test_a_call_that_was_checked_is_not_checked_again(
    entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = attention_inputs(DIMS["odd"], (2, 3, 7), bounds=True)
    expected = entry(*op_args(inputs))
    monkeypatch.setattr(validation, "check_rank", lambda *args: pytest.fail("checked again"))
    torch.testing.assert_close(entry(*op_args(inputs)), expected, rtol=0, atol=0)


@pytest.mark.parametrize("decodes", [0, 2])
def test_the_prefills_of_a_batch_are_sliced_once(decodes: int) -> None:
    """They follow an update in place, at the addresses that a graph was captured with."""

    def build(lens: list[int], seqs: list[int], blocks: Tensor) -> mla_ops.MLAMetadata:
        options = {"block_size": 4, "workspace_tokens": 32}
        return mla_ops.build_metadata(lens, seqs, blocks.view(-1, 4), **options)

    first = build([1] * decodes + [5, 2], [7] * decodes + [9, 2], torch.arange(8 + 4 * decodes))
    other = build([1] * decodes + [3, 4], [9] * decodes + [5, 7], torch.arange(8 + 4 * decodes) + 1)
    places = [t.data_ptr() for t in first.prefills]
    for metadata in (first, other):
        starts = metadata.cu_seqlens_q[decodes:] - decodes
        assert metadata.prefills.block_table.equal(metadata.block_table[decodes:])
        assert metadata.prefills.seq_lens.equal(metadata.seq_lens[decodes:])
        assert metadata.prefills.cu_seqlens_q.equal(starts)
        lengths = [*metadata.seq_lens[decodes:].tolist(), 0]
        assert metadata.prefills.host.tolist() == [starts.tolist(), lengths]
    first.update_(other)
    assert places == [t.data_ptr() for t in first.prefills]
    assert all(mine.equal(new) for mine, new in zip(first.prefills, other.prefills, strict=True))
