"""Patched models under `torch.compile(fullgraph=True)`: one graph, no recompiles, same numbers."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from families import (
    FAMILIES,
    Family,
    each_family,
    forward,
    forward_logits,
    in_a_fresh_process,
    one_thread,
    op_calls,
    relative_error,
    sample_input_ids,
    scenarios,
)
from torch import Tensor
from transformers import PreTrainedModel

import mla_ops

# The MoE of these loops on data.
BREAKING = [name for name, family in FAMILIES.items() if not family.fullgraph_ok]
# One of each structure; `-m slow` runs the others. Growing caches take the longest to trace.
FAST = ("minicpm3", "mistral_large4_shared_kv")
MORE = ("deepseek_v2", "deepseek_v32_small_topk", "hy_v4_small_topk", "dots3_note", *FAST)
STEPS = 20


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


class Counter:
    """A backend that keeps each graph and runs it as it is."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        del inputs
        self.graphs.append(module)
        return module.forward

    def ops(self) -> list[int]:
        """How often each graph calls the op."""
        return [
            sum("mla_attention" in str(node.target) for node in module.graph.nodes)
            for module in self.graphs
        ]


def compiled(model: PreTrainedModel) -> tuple[Any, Counter]:
    """The model, patched and compiled whole, and its graphs."""
    counter = Counter()
    return torch.compile(mla_ops.patch(model), fullgraph=True, backend=counter), counter


def first_layer(family: Family) -> Any:
    """A model cut to its first layer: tracing takes the time, and layers are traced alike."""
    model: Any = family.build()
    model.model.layers = model.model.layers[:1]
    return model


@each_family(without=BREAKING, fast=MORE)
def test_whole_model_is_one_graph(family: Family) -> None:
    """Without a cache; then with padding, whose mask cannot be read while tracing."""
    model = family.build()
    ids, mask = sample_input_ids(), scenarios.LEFT_PADDING[:2]
    stock = forward_logits(model, ids)
    stock_padded = forward_logits(model, ids, attention_mask=mask)
    whole, counter = compiled(model)

    actual = forward_logits(whole, ids)
    assert counter.ops() == [family.mla_layers]
    assert relative_error(actual, stock) < 1e-5
    assert relative_error(actual, forward_logits(model, ids)) < 1e-5

    padded = forward_logits(whole, ids, attention_mask=mask)
    assert counter.ops() == [family.mla_layers] * 2
    assert relative_error(padded[mask.bool()], stock_padded[mask.bool()]) < 1e-5


def decode(model: Any, caches: list[Any], reference: PreTrainedModel, padding: bool) -> None:
    """Prefill eagerly, then compare `STEPS` single tokens with the reference."""
    ids = sample_input_ids()
    mask = scenarios.LEFT_PADDING[:2] if padding else None
    for cache in caches:
        forward(reference, ids, cache=cache, attention_mask=mask)
    for step in range(STEPS):
        token = sample_input_ids(length=1, seed=step)
        if mask is not None:
            mask = torch.cat([mask, mask[:, -1:]], dim=1)
        actual, expected = (
            forward_logits(run, token, cache=cache, attention_mask=mask)
            for run, cache in zip((model, reference), caches, strict=True)
        )
        assert relative_error(actual, expected) < 1e-5


@each_family(without=BREAKING, fast=FAST)
def test_decode_with_a_growing_cache_is_two_graphs(family: Family) -> None:
    """Case 49: one for the length that came first, one for any length."""
    model, counter = compiled(family.build())
    decode(model, [scenarios.dynamic_cache(model) for _ in range(2)], family.build(), False)
    assert counter.ops() == [family.mla_layers] * 2


@each_family(without=BREAKING, fast=MORE)
def test_decode_with_a_static_cache_is_one_graph(family: Family) -> None:
    model, counter = compiled(family.build())
    caches = [scenarios.static_cache(model, 40) for _ in range(2)]
    decode(model, caches, family.build(), False)
    # A sliding layer keeps its length as a Python number: another graph when it is full.
    graphs = 2 if any(caches[0].is_sliding) else 1
    assert counter.ops() == [family.mla_layers] * graphs


@each_family("deepseek_v3", "deepseek_v32_small_topk", "hy_v4", fast=("deepseek_v3",))
def test_decode_with_a_growing_padding_mask_is_two_graphs(family: Family) -> None:
    for make in (scenarios.dynamic_cache, lambda model: scenarios.static_cache(model, 40)):
        torch.compiler.reset()
        model, counter = compiled(first_layer(family))
        decode(model, [make(model) for _ in range(2)], first_layer(family), True)
        assert counter.ops() == [1, 1]


@each_family("minicpm3", "deepseek_v32_small_topk", "hy_v4", fast=("minicpm3",))
def test_batch_sizes_and_lengths_need_few_graphs(family: Family) -> None:
    """Case 49: as many as stock needs."""
    model = first_layer(family)
    shapes = [(1, 11), (2, 11), (3, 11), (6, 11), (3, 8), (3, 13)]
    inputs = [sample_input_ids(*shape) for shape in shapes]
    stock = Counter()
    whole: Any = torch.compile(model, fullgraph=True, backend=stock)
    expected = [forward_logits(whole, ids) for ids in inputs]
    torch.compiler.reset()
    whole, ours = compiled(model)
    for ids, logits in zip(inputs, expected, strict=True):
        assert relative_error(forward_logits(whole, ids), logits) < 1e-5
    assert len(ours.graphs) <= len(stock.graphs) <= 4


@each_family(*BREAKING)
def test_what_stock_cannot_compile_whole_is_left_so(family: Family) -> None:
    """The same refusal, from the MoE; with graph breaks the op is called and right."""
    ids = sample_input_ids()
    for model in (first_layer(family), mla_ops.patch(first_layer(family))):
        whole: Any = torch.compile(model, fullgraph=True, backend="eager")
        with pytest.raises(torch._dynamo.exc.UserError, match="data-dependent"):
            forward_logits(whole, ids)
        torch.compiler.reset()
    model = first_layer(family)
    expected = forward_logits(model, ids)
    counter = Counter()
    broken: Any = torch.compile(mla_ops.patch(model), backend=counter)
    assert relative_error(forward_logits(broken, ids), expected) < 1e-5
    assert any(counter.ops())


@each_family("deepseek_v3", "hy_v4", fast=("deepseek_v3",))
def test_switching_back_is_noticed(family: Family) -> None:
    """A compiled model follows `patch` and `unpatch`."""
    model = family.build()
    ids = sample_input_ids()
    expected = forward_logits(model, ids)
    counter = Counter()
    whole: Any = torch.compile(model, fullgraph=True, backend=counter)
    for switch, ops in ((None, 0), (mla_ops.patch, family.mla_layers), (mla_ops.unpatch, 0)):
        if switch is not None:
            switch(model)
        counter.graphs.clear()
        assert relative_error(forward_logits(whole, ids), expected) < 1e-5
        assert set(counter.ops()) <= {ops}
    mla_ops.patch(model)
    with op_calls() as calls:
        forward_logits(model, ids)
    assert len(calls) == family.mla_layers


@each_family("minicpm3", "hy_v4_small_topk", fast=("minicpm3",))
def test_compiled_training_has_the_gradients_of_stock(family: Family) -> None:
    """Case 67: training and compiling together; the graph uses the op's own autograd formula."""
    ids = sample_input_ids()

    def gradients(model: Any, runs: Any) -> dict[str, Tensor]:
        runs(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    stock = family.build().train()
    ours = mla_ops.patch(family.build().train())
    expected = gradients(stock, stock)
    actual = gradients(ours, torch.compile(ours, fullgraph=True, backend="aot_eager"))
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(actual[name], grad, rtol=2e-4, atol=2e-4 * grad.abs().max())


@each_family("deepseek_v3", "hy_v4_small_topk", fast=("deepseek_v3",))
def test_exported_model_calls_the_op(family: Family) -> None:
    """Case 52: with batch and length free; export runs the model on fake parameters."""
    model = family.build()
    ids = sample_input_ids(3, 7)
    expected = forward_logits(model, ids)
    batch = torch.export.Dim("batch", min=2, max=8)
    length = torch.export.Dim("length", min=5, max=64)  # 5: more than `index_topk`
    program = torch.export.export(
        mla_ops.patch(model),
        (),
        {"input_ids": sample_input_ids(), "use_cache": False},
        dynamic_shapes={"input_ids": {0: batch, 1: length}, "use_cache": None},
    )
    assert sum("mla_attention" in str(node.target) for node in program.graph.nodes) == (
        family.mla_layers
    )
    with torch.no_grad():
        actual = program.module()(input_ids=ids, use_cache=False).logits
    assert relative_error(actual, expected) < 1e-5


COLD = """
    import torch
    torch.set_num_threads(1)
    import mla_ops.hf
    from families import FAMILIES, forward_logits, relative_error, sample_input_ids

    def build():
        model = FAMILIES["{family}"].build()
        model.model.layers = model.model.layers[:1]
        return model

    ids = sample_input_ids()
    whole = torch.compile(mla_ops.hf.patch(build()), fullgraph=True, backend="{backend}")
    first = forward_logits(whole, ids)
    assert relative_error(first, forward_logits(build(), ids)) < 1e-5
    print("same")
"""


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        ("minicpm3", "inductor"),
        ("deepseek_v32", "eager"),
        pytest.param("hy_v4", "aot_eager", marks=pytest.mark.slow),
        pytest.param("deepseek_v2", "inductor", marks=pytest.mark.slow),
    ],
)
def test_first_call_of_a_process_may_be_compiled(family: str, backend: str, tmp_path: Path) -> None:
    """Nothing has to run eagerly first: no registration, no lazy import."""
    code = textwrap.dedent(COLD).format(family=family, backend=backend)
    assert in_a_fresh_process(code, tmp_path).strip() == "same"
