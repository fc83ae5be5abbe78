"""The public function inside of compiled code: whole graphs, few graphs, the same numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import mla_ops
from mla_ops import dispatch
from mla_ops.reference_backend import ReferenceBackend
from mla_ops.testing import DIMS, AttentionInputs, attention_inputs, conformance_cases

DIM = DIMS["odd"]
every_compiler = pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Backends that a test registers are gone afterwards."""
    monkeypatch.setattr(dispatch, "_registry", dict(dispatch._registry))
    dispatch._select.cache_clear()
    yield
    dispatch._select.cache_clear()


def compiled(compiler: Any = "eager", **options: Any) -> Any:
    def function(*tensors: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
        out, lse = mla_ops.mla_attention(*tensors, **named)
        return out, lse

    return torch.compile(function, backend=compiler, fullgraph=True, **options)


def graphs(counter: CompileCounterWithBackend) -> int:
    """How many graphs with the op in them were compiled; Dynamo may add empty ones."""
    targets = [{str(node.target) for node in graph.graph.nodes} for graph in counter.graphs]
    return sum("mla_ops.mla_attention.default" in found for found in targets)


def pulled(function: Any, inputs: AttentionInputs) -> list[Tensor]:
    """Both results and every gradient, with work around the op that a compiler may fuse."""
    leaves = [t.detach().requires_grad_() for t in inputs[:4]]
    sinks = inputs.options["sinks"].detach().requires_grad_()
    options = {**inputs.options, "sinks": sinks}
    out, lse = function(*leaves, **options)
    total = (out * 2 + 1).square().mean() + lse.masked_fill(lse == -torch.inf, 0.0).sum()
    return [out, lse, *torch.autograd.grad(total, [*leaves, sinks])]


@every_compiler
def test_results_and_gradients(compiler: str) -> None:
    options = {"is_causal": True, "bounds": True, "sinks": True, "mask": "float:b1st"}
    inputs = attention_inputs(DIM, (4, 5, 9), dtype=torch.float64, **options)
    ours, right = pulled(compiled(compiler), inputs), pulled(mla_ops.mla_attention, inputs)
    torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", conformance_cases(), ids=str)
def test_compiled_code_conforms(case: Any) -> None:
    """The suite that every backend passes, with the graph in between."""
    case.check("tiled", torch.float32, function=compiled("aot_eager"))


def test_a_training_step_around_the_op() -> None:
    """A module whose projections are compiled together with the op, over a few steps."""
    torch.manual_seed(0)
    projection = torch.nn.Linear(10, DIM.num_heads * DIM.qk_head_dim).double()
    inputs = attention_inputs(DIM, (2, 5, 5), dtype=torch.float64, is_causal=True)
    hidden = torch.randn(2, 5, 10, dtype=torch.float64)

    def step(w_kv_b: Tensor) -> Tensor:
        query = projection(hidden).unflatten(-1, (DIM.num_heads, -1)).transpose(1, 2)
        rows = (inputs.kv_c.relu(), inputs.k_pe * 2)  # the compiler makes these
        out, lse = mla_ops.mla_attention(query, *rows, w_kv_b, **inputs.options)
        return out.square().mean() + lse.mean()

    losses = []
    for function in (step, torch.compile(step, backend="inductor", fullgraph=True)):
        torch.manual_seed(1)
        projection.reset_parameters()
        weight = inputs.w_kv_b.clone().requires_grad_()
        optimizer = torch.optim.SGD([*projection.parameters(), weight], lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            loss = function(weight)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    torch.testing.assert_close(losses[:3], losses[3:], rtol=1e-10, atol=1e-10)
    assert losses[0] > losses[2]


def test_growing_lengths_take_two_graphs() -> None:
    counter = CompileCounterWithBackend("eager")
    function = compiled(counter)
    for num_keys in range(5, 25):
        inputs = attention_inputs(DIM, (2, 1, num_keys), is_causal=True)
        results = function(*inputs[:4], **inputs.options)
        torch.testing.assert_close(
            results, tuple(mla_ops.mla_attention(*inputs[:4], **inputs.options))
        )
    assert graphs(counter) <= 2


def test_other_batches_take_three_graphs() -> None:
    counter = CompileCounterWithBackend("eager")
    function = compiled(counter)
    for batch in (1, 2, 3, 4, 5, 6, 1):
        inputs = attention_inputs(DIM, (batch, 1, 9), bounds=True)
        function(*inputs[:4], **inputs.options)
    assert graphs(counter) <= 3


def test_prompts_and_decodes_take_three_graphs() -> None:
    """Neither the number of new tokens nor the form that follows from it is compiled in."""
    counter = CompileCounterWithBackend("aot_eager")
    function = compiled(counter)
    for num_queries, num_keys in [(7, 7), (1, 8), (1, 9), (40, 40), (1, 41), (3, 44), (41, 50)]:
        inputs = attention_inputs(DIM, (2, num_queries, num_keys), is_causal=True)
        results = function(*inputs[:4], **inputs.options)
        expected = mla_ops.mla_attention(*inputs[:4], **inputs.options)
        torch.testing.assert_close(results, tuple(expected))
    assert graphs(counter) <= 3


def test_values_of_bounds_and_masks_are_not_compiled_in() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    function = compiled(counter)
    for seed in range(4):
        inputs = attention_inputs(DIM, (4, 3, 9), mask="bool:b1st", seed=seed)
        bounds = torch.tensor([[0, 9], [seed, 9], [0, seed], [9, seed]], dtype=torch.int32)
        clean = inputs._replace(
            kv_c=inputs.kv_c.nan_to_num(nan=1.0), k_pe=inputs.k_pe.nan_to_num(posinf=1.0)
        )
        options = {**inputs.options, "kv_bounds": bounds}
        results = function(*clean[:4], **options)
        expected = mla_ops.mla_attention(*clean[:4], **options)
        torch.testing.assert_close(results, tuple(expected))
    assert graphs(counter) == 1


def test_the_workspace_is_not_compiled_in() -> None:
    counter = CompileCounterWithBackend("eager")
    function = compiled(counter)
    inputs = attention_inputs(DIM, (2, 3, 9))
    for tokens in (2, 3, 4, 5):
        function(*inputs[:4], **{**inputs.options, "workspace_tokens": tokens})
    assert graphs(counter) <= 2


def test_dynamic_shapes_from_the_start() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    function = compiled(counter, dynamic=True)
    for sizes in [(2, 4, 7), (5, 6, 9), (6, 41, 11)]:  # no two sizes alike: Dynamo ties those
        inputs = attention_inputs(DIM, sizes, is_causal=True)
        results = function(*inputs[:4], **inputs.options)
        torch.testing.assert_close(
            results, tuple(mla_ops.mla_attention(*inputs[:4], **inputs.options))
        )
    assert graphs(counter) == 1


def test_a_scale_that_follows_a_symbolic_width() -> None:
    """`shape[-1] ** -0.5` is a symbolic float; it costs a graph for each width, and no more."""

    def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        scale = tensors[0].shape[-1] ** -0.5
        return tuple(mla_ops.mla_attention(*tensors, softmax_scale=scale))

    counter = CompileCounterWithBackend("aot_eager")
    dynamic = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for name in ("odd", "wide-values"):
        inputs = attention_inputs(DIMS[name], (2, 5, 9))
        torch.testing.assert_close(dynamic(*inputs[:4]), function(*inputs[:4]))
    assert graphs(counter) == 2


@pytest.mark.parametrize("sizes", [(2, 3, 0), (2, 0, 5), (0, 3, 5)], ids=str)
def test_empty_things(sizes: tuple[int, int, int]) -> None:
    inputs = attention_inputs(DIM, sizes, is_causal=True, sinks=True)
    results = compiled("aot_eager")(*inputs[:4], **inputs.options)
    torch.testing.assert_close(results, tuple(mla_ops.mla_attention(*inputs[:4], **inputs.options)))


def test_a_permuted_query() -> None:
    """The layout of transformers: results are contiguous all the same, also where it is fused."""
    inputs = attention_inputs(DIM, (2, 3, 7), layout="strided")

    def function(query: Tensor) -> tuple[Tensor, ...]:
        query = query.transpose(1, 2).contiguous().transpose(1, 2) * 2
        out, lse = mla_ops.mla_attention(query, *inputs[1:4], **inputs.options)
        return out + 0, out.view(2, 3, 36), lse.view(18)

    expected = function(inputs.query)
    results = torch.compile(function, backend="inductor", fullgraph=True)(inputs.query)
    torch.testing.assert_close(results, expected)
    assert [t.stride() for t in results] == [t.stride() for t in expected]


@every_compiler
def test_autocast(compiler: str) -> None:
    inputs = attention_inputs(DIM, (2, 3, 7), sinks=True)
    function = compiled(compiler)
    with torch.autocast("cpu", torch.bfloat16):
        ours = pulled(function, inputs)
        right = pulled(mla_ops.mla_attention, inputs)
    assert [t.dtype for t in ours] == [t.dtype for t in right]
    assert ours[0].dtype == torch.bfloat16
    torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)


def refusal(**changes: Any) -> pytest.RaisesContext:
    expected, got = changes["expected"], changes["got"]
    return pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=f"{expected}.*, got .*{got}")


@every_compiler
def test_wrong_shapes_are_refused(compiler: str) -> None:
    inputs = attention_inputs(DIM, (2, 3, 7))
    with refusal(expected=r"kv_c must be \[B, T, L\] with the query's B = 2", got=r"\(1, 7, 40\)"):
        compiled(compiler)(inputs.query, inputs.kv_c[:1], *inputs[2:4], **inputs.options)


@pytest.mark.parametrize(
    ("changes", "expected", "got"),
    [
        ({"sinks": torch.zeros(4)}, r"sinks must be \[H\] = \(3,\)", r"shape \(4,\)"),
        ({"kv_bounds": torch.zeros(2, 2)}, "kv_bounds must be int32", "torch.float32"),
        ({"attn_mask": torch.zeros(3, 8)}, "attn_mask must be broadcastable", r"shape \(3, 8\)"),
        ({"softmax_scale": float("nan")}, "softmax_scale must be a finite float", "nan"),
        ({"workspace_tokens": 0}, "workspace_tokens must be at least 1", "0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_wrong_options_are_refused(changes: dict[str, Any], expected: str, got: str) -> None:
    inputs = attention_inputs(DIM, (2, 3, 7))
    with refusal(expected=expected, got=got):
        compiled()(*inputs[:4], **{**inputs.options, **changes})


def test_a_wrong_shape_is_refused_after_a_right_one() -> None:
    """Sizes that became symbolic are checked as those before them were."""
    function = compiled("aot_eager")
    for num_keys in (5, 6, 7):
        inputs = attention_inputs(DIM, (2, 3, num_keys))
        function(*inputs[:4], **inputs.options)
    with refusal(expected="k_pe must be .* with kv_c's B, T", got=r"\(2, s\d+, 8\)"):
        function(*inputs[:2], inputs.k_pe[:, :6], inputs.w_kv_b, **inputs.options)


def test_a_mask_with_a_gradient_is_refused() -> None:
    inputs = attention_inputs(DIM, (2, 3, 7))
    options = {**inputs.options, "attn_mask": torch.zeros(3, 7, requires_grad=True)}
    with pytest.raises(
        torch._dynamo.exc.TorchRuntimeError, match="attn_mask must not require grad"
    ):
        compiled("aot_eager")(*inputs[:4], **options)


class Spy(ReferenceBackend):
    """Records what it is asked for."""

    name = "spy"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def mla_attention(self, *args):
        self.calls.append("forward")
        return super().mla_attention(*args)

    def mla_attention_backward(self, *args):
        self.calls.append("backward")
        return super().mla_attention_backward(*args)


@every_compiler
def test_the_backend_is_chosen_when_the_graph_runs(
    compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiled function follows the block and the variable, without a new graph."""
    spy = Spy()
    mla_ops.register_backend(spy, automatic=False)
    counter = CompileCounterWithBackend(compiler)
    function = compiled(counter)
    inputs = attention_inputs(DIM, (2, 3, 7), sinks=True)
    expected = pulled(function, inputs)
    assert spy.calls == []
    with mla_ops.use_backend("spy"):
        found = pulled(function, inputs)
    assert spy.calls == ["forward", "backward"]
    torch.testing.assert_close(found, expected)
    monkeypatch.setenv("MLA_OPS_BACKEND", "spy")
    with torch.no_grad():
        function(*inputs[:4], **inputs.options)
    assert spy.calls == ["forward", "backward", "forward"]
    monkeypatch.delenv("MLA_OPS_BACKEND")
    pulled(function, inputs)
    assert len(spy.calls) == 3
    assert graphs(counter) <= 2  # with gradients and without


def test_exported_graphs() -> None:
    """`torch.export` keeps the op as one node, with batch and lengths free."""
    batch, keys = torch.export.Dim("batch", max=64), torch.export.Dim("keys", max=4096)

    class Attention(torch.nn.Module):
        def forward(self, query, kv_c, k_pe, w_kv_b, bounds):
            options = {"softmax_scale": 0.3, "kv_bounds": bounds}
            return tuple(mla_ops.mla_attention(query, kv_c, k_pe, w_kv_b, **options))

    def example(batch: int, keys: int) -> tuple[Tensor, ...]:
        inputs = attention_inputs(DIM, (batch, 3, keys), bounds=True)
        return (*inputs[:4], inputs.options["kv_bounds"])

    rows = {0: batch, 1: keys}
    shapes = ({0: batch}, rows, rows, None, {0: batch})
    program = torch.export.export(Attention(), example(2, 7), dynamic_shapes=shapes)
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert [name for name in names if "getitem" not in name] == ["mla_ops.mla_attention.default"]
    other = example(4, 19)
    torch.testing.assert_close(program.module()(*other), Attention()(*other))


def test_the_first_call_of_a_process_may_be_compiled() -> None:
    """Nothing has run in eager mode before, and nothing may be traced that registers or imports."""
    script = """
import torch, mla_ops
torch.set_num_threads(1)
torch._dynamo.config.error_on_recompile = True
shapes = (2, 3, 4, 24), (2, 7, 32), (2, 7, 8), (84, 32)
inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
function = torch.compile(mla_ops.mla_attention, backend="aot_eager", fullgraph=True)
out, lse = function(*inputs, softmax_scale=0.3, is_causal=True)
(out.sum() + lse.sum()).backward()
found = [out, *(t.grad.clone() for t in inputs)]
for t in inputs:
    t.grad = None
out, lse = mla_ops.mla_attention(*inputs, softmax_scale=0.3, is_causal=True)
(out.sum() + lse.sum()).backward()
torch.testing.assert_close(found, [out, *(t.grad for t in inputs)])
"""
    environment = {**os.environ, "MLA_OPS_BACKEND": ""}
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
