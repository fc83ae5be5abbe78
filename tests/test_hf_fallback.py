"""Where the weight of `kv_b_proj` is not the whole truth, the family's own code runs, and is said.

Whatever is done to the projection, before or after `patch`, the model gives what the unpatched
model gives with the same thing done to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from families import (
    FAMILIES,
    Family,
    attention_modules,
    each_family,
    forward,
    forward_logits,
    one_thread,
    op_calls,
    relative_error,
    sample_input_ids,
    scenarios,
)
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from transformers import PreTrainedModel

import mla_ops

# Plain, with indices that leave keys out, with sinks too, with a sliding layer of other widths.
FEW = ("deepseek_v3_yarn", "deepseek_v32_small_topk", "hy_v4_small_topk", "dots3_note")
# Names that transformers is about to give up and that peft and older versions of it still use.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def op_count(model: Any) -> int:
    """How many layers call the op in a forward."""
    with op_calls() as calls:
        forward_logits(model, sample_input_ids())
    return len(calls)


def run(model: Any) -> dict[str, Tensor]:
    """Prefill and decode with all kinds of masks: what the fallback has to spell out."""
    padded = scenarios.padded(scenarios.LEFT_PADDING[:2])(model)
    return {
        "growing": scenarios.growing_cache(model)["steps"],
        "static": scenarios.fixed_cache(None)(model)["fresh"],
        "not causal": scenarios.bidirectional(model)["all"],
        **padded,
    }


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    assert {name: error for name, error in errors.items() if not error < 1e-5} == {}


class Scaled(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 1.5 * weight


class Packed(nn.Module):
    """A projection that keeps integers, and no parameter of the name `weight`."""

    def __init__(self, linear: nn.Linear, name: str = "qweight") -> None:
        super().__init__()
        scale = linear.weight.abs().amax(dim=1, keepdim=True) / 127
        self.name = name
        self.register_buffer(name, (linear.weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale.detach())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, getattr(self, self.name).to(x.dtype) * self.scale)


class Int8Linear(nn.Linear):
    """A linear layer by class, whose `weight` holds integers."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.scale = nn.Parameter(linear.weight.abs().amax(dim=1, keepdim=True) / 127)
        integers = (linear.weight / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(integers, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


class QuantizedTensor(Tensor):
    """A tensor that looks like its float self and computes from integers, as torchao's do."""

    @staticmethod
    def __new__(cls, integers: Tensor, scale: Tensor) -> QuantizedTensor:
        return Tensor._make_wrapper_subclass(cls, integers.shape, dtype=scale.dtype)

    def __init__(self, integers: Tensor, scale: Tensor) -> None:
        self.integers, self.scale = integers, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].integers, args[0].scale)
        args = [a.integers * a.scale if isinstance(a, cls) else a for a in args]
        return func(*args, **(kwargs or {}))


def integers_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.detach().abs().amax(dim=1, keepdim=True) / 127
    return (weight.detach() / scale).round().to(torch.int8), scale


def quantize_weight(module: Any) -> None:
    weight = QuantizedTensor(*integers_of(module.kv_b_proj.weight))
    module.kv_b_proj.weight = nn.Parameter(weight, requires_grad=False)


def replace_forward(module: Any) -> None:
    linear = module.kv_b_proj
    original = linear.forward
    linear.forward = lambda x: 1.5 * original(x)


def add_bias(module: Any) -> None:
    rows = module.kv_b_proj.out_features
    module.kv_b_proj.bias = nn.Parameter(torch.linspace(-1, 1, rows))


MODIFICATIONS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "bias": (add_bias, "has a bias"),
    "forward hook": (
        lambda m: m.kv_b_proj.register_forward_hook(lambda _m, _args, out: 1.5 * out),
        "has forward hooks",
    ),
    "forward pre-hook": (
        lambda m: m.kv_b_proj.register_forward_pre_hook(lambda _m, args: (1.5 * args[0],)),
        "has forward hooks",
    ),
    "replaced forward": (replace_forward, "has its forward replaced"),
    "parametrized": (
        lambda m: parametrize.register_parametrization(m.kv_b_proj, "weight", Scaled()),
        r"is torch\..*ParametrizedLinear, not a plain",
    ),
    "pruned": (lambda m: prune.l1_unstructured(m.kv_b_proj, "weight", 0.5), "has forward hooks"),
    "no weight": (
        lambda m: setattr(m, "kv_b_proj", Packed(m.kv_b_proj)),
        r"is .*\.Packed, not a plain",
    ),
    "packed weight": (
        lambda m: setattr(m, "kv_b_proj", Packed(m.kv_b_proj, "weight")),
        r"is .*\.Packed, not a plain",
    ),
    "integer weight": (lambda m: setattr(m, "kv_b_proj", Int8Linear(m.kv_b_proj)), "Int8Linear"),
    "quantized tensor": (quantize_weight, "weight is QuantizedTensor, not a plain tensor"),
}


def check_modified(family: Family, name: str) -> None:
    """Modified before `patch` and after it."""
    modify, reason = MODIFICATIONS[name]
    stock = family.build()
    plain = run(stock)
    for _, module in attention_modules(stock):
        modify(module)
    expected = run(stock)
    assert max(relative_error(expected[key], plain[key]) for key in plain) > 1e-4

    with pytest.raises(mla_ops.PatchError, match=f"stock code:\n.*{reason}") as error:
        mla_ops.patch(stock)
    assert error.value.report.fused == 0
    late = mla_ops.patch(family.build())
    for _, module in attention_modules(late):
        modify(module)
    for model in (mla_ops.patch(stock, strict=False), late):
        report = mla_ops.report(model)
        assert report.fused == 0
        assert all(re.search(reason, layer.reason) for layer in report.layers)
        with op_calls() as calls:
            assert_same(run(model), expected)
        assert not calls


@pytest.mark.parametrize("name", MODIFICATIONS)
def test_modified_projection(name: str) -> None:
    """Case 62: any of them, with short and long prompts."""
    check_modified(FAMILIES["deepseek_v3_yarn"], name)


@each_family()
def test_fallback_of_every_family(family: Family) -> None:
    """Its own code gets the same masks, indices and sinks that the op would have got."""
    check_modified(family, "bias")


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (torch.empty(112, 32, device="meta"), "on the meta device"),
        (torch.zeros(112, 32).to(torch.float8_e4m3fn), "stored as torch.float8_e4m3fn"),
        (torch.zeros(112, 32, dtype=torch.int8), "stored as torch.int8"),
        pytest.param(torch.eye(112, 32).to_sparse(), "has the layout"),
    ],
)
def test_weight_that_cannot_be_read(weight: Tensor, reason: str) -> None:
    model = FAMILIES["deepseek_v3"].build()
    for _, module in attention_modules(model):
        module.kv_b_proj.weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(mla_ops.PatchError, match=reason):
        mla_ops.patch(model)


def test_backward_hooks_run() -> None:
    """They see what passes through the module, so the module has to be called."""
    model = mla_ops.patch(FAMILIES["deepseek_v3"].build())
    seen = []
    for _, module in attention_modules(model):
        module.kv_b_proj.register_full_backward_hook(lambda *args: seen.append(args[0]))
    model(input_ids=sample_input_ids(), use_cache=False).logits.sum().backward()
    assert len(seen) == 2
    assert {layer.reason for layer in mla_ops.report(model).layers} == {
        "kv_b_proj has backward hooks"
    }


def test_offloaded_weights() -> None:
    """Case 72: between calls they are on the meta device; the hooks bring them in."""
    accelerate = pytest.importorskip("accelerate")
    expected = run(FAMILIES["deepseek_v3"].build())
    for order in ("patch first", "offload first"):
        model = FAMILIES["deepseek_v3"].build()
        if order == "patch first":
            mla_ops.patch(model)
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        assert model.model.layers[0].self_attn.kv_b_proj.weight.device.type == "meta"
        with pytest.raises(mla_ops.PatchError, match="offloading hooks"):
            mla_ops.patch(model)
        mla_ops.patch(model, strict=False)
        assert mla_ops.report(model).fused == 0
        assert_same(run(model), expected)


def test_sharded_weight() -> None:
    """A DTensor holds one shard of the rows, here all of them."""
    distributed = torch.distributed
    if not distributed.is_available():
        pytest.skip("torch is built without distributed")
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = FAMILIES["deepseek_v3"].build()
    expected = run(model)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = distributed.init_device_mesh("cpu", (1,))
        plan = {f"model.layers.{i}.self_attn.kv_b_proj": ColwiseParallel() for i in range(2)}
        parallelize_module(model, mesh, plan)
        mla_ops.patch(model, strict=False)
        assert mla_ops.report(model).fused == 0
        assert_same(run(model), expected)
        projection = model.model.layers[0].self_attn.kv_b_proj
        projection._forward_hooks.clear()
        projection._forward_pre_hooks.clear()
        assert "DTensor" in mla_ops.report(model).layers[0].reason
    finally:
        distributed.destroy_process_group()


def lora(model: PreTrainedModel, *targets: str) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=list(targets), init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


@pytest.mark.parametrize("patch_first", [True, False])
@each_family("deepseek_v3_yarn", "hy_v4_small_topk")
def test_lora_on_the_projection(family: Family, patch_first: bool) -> None:
    """Case 63: its weight is the base's; active, disabled, merged, and merged for good."""
    stock, model = lora(family.build(), "kv_b_proj"), family.build()
    if patch_first:
        model = lora(mla_ops.patch(model), "kv_b_proj")
    else:
        model = lora(model, "kv_b_proj")
        with pytest.raises(mla_ops.PatchError, match=r"kv_b_proj is peft\..*\.Linear, not a plain"):
            mla_ops.patch(model)
        mla_ops.patch(model, strict=False)

    expected = run(stock)
    assert_same(run(model), expected)
    assert mla_ops.report(model).fused == 0
    with stock.disable_adapter(), model.disable_adapter():
        disabled = run(stock)
        assert relative_error(disabled["growing"], expected["growing"]) > 1e-2
        assert_same(run(model), disabled)
    model.merge_adapter()
    assert_same(run(model), expected)
    model.unmerge_adapter()
    merged = model.merge_and_unload()
    assert mla_ops.report(merged).fused == op_count(merged) == family.mla_layers
    assert_same(run(merged), expected)


@pytest.mark.parametrize("target", ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"])
@pytest.mark.parametrize("patch_first", [True, False])
def test_lora_elsewhere_is_fused(target: str, patch_first: bool) -> None:
    """Cases 51 and 63: the op runs, and its gradients reach the adapters."""
    stock, model = lora(FAMILIES["deepseek_v3"].build(), target), FAMILIES["deepseek_v3"].build()
    model = (
        lora(mla_ops.patch(model), target) if patch_first else mla_ops.patch(lora(model, target))
    )

    assert mla_ops.report(model).fused == op_count(model) == 2
    assert_same(run(model), run(stock))
    expected, actual = gradients(stock), gradients(model)
    assert all("lora" in name for name in expected)
    assert_gradients(actual, expected)


def test_weights_that_change_are_followed() -> None:
    """Case 63: nothing is kept of them, so nothing can be stale."""
    stock = FAMILIES["deepseek_v3"].build()
    model = mla_ops.patch(FAMILIES["deepseek_v3"].build())
    run(model)

    def in_place(m: Any) -> None:
        with torch.no_grad():
            m.model.layers[0].self_attn.kv_b_proj.weight.mul_(2)

    def data(m: Any) -> None:
        weight = m.model.layers[1].self_attn.kv_b_proj.weight
        weight.data = weight.data.flip(0)

    def parameter(m: Any) -> None:
        linear = m.model.layers[1].self_attn.kv_b_proj
        linear.weight = nn.Parameter(linear.weight.detach() * 0.5)

    def state_dict(m: Any) -> None:
        m.load_state_dict({name: value.flip(0) for name, value in m.state_dict().items()})

    before = run(stock)
    for change in (in_place, data, parameter, state_dict):
        change(stock)
        change(model)
        expected = run(stock)
        assert relative_error(expected["growing"], before["growing"]) > 1e-3
        assert_same(run(model), expected)
        before = expected
    assert op_count(model) == 2


def gradients(model: Any, **options: Any) -> dict[str, Tensor]:
    """The gradients of a language-modeling loss, padded on the left.

    The row of padding that would predict the first token does not count: what attention gives
    where nothing is visible differs among stock's own implementations.
    """
    torch.manual_seed(0)
    ids, mask = sample_input_ids(), scenarios.LEFT_PADDING[:2]
    labels = ids.masked_fill(mask.cumsum(1) <= 1, -100)
    model.zero_grad()
    model(
        input_ids=ids, attention_mask=mask, labels=labels, use_cache=False, **options
    ).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        limit = 2e-4 * max(float(grad.abs().max()), 1e-3)
        torch.testing.assert_close(actual[name], grad, rtol=2e-4, atol=limit, msg=name)


@each_family()
def test_gradients(family: Family) -> None:
    """Case 51: those of stock, for every parameter that stock has one for."""
    stock, model = family.build().train(), mla_ops.patch(family.build().train())
    with op_calls() as calls:
        actual = gradients(model)
    assert len(calls) == family.mla_layers
    assert_gradients(actual, gradients(stock))


@pytest.mark.parametrize("use_reentrant", [True, False])
@each_family(*FEW)
def test_gradient_checkpointing(family: Family, use_reentrant: bool) -> None:
    stock, model = family.build().train(), mla_ops.patch(family.build().train())
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    with op_calls() as calls:
        actual = gradients(model)
    assert len(calls) == 2 * family.mla_layers
    assert_gradients(actual, gradients(stock))


@each_family(*FEW)
def test_dropout(family: Family) -> None:
    """Case 67: in training it takes stock code, and says so; in evaluation the op."""
    stock, model = family.build(), mla_ops.patch(family.build())
    for each in (stock, model):
        for _, module in attention_modules(each):
            module.attention_dropout = 0.3
    assert mla_ops.report(model).fused == op_count(model) == family.mla_layers
    assert_same(run(model), run(stock))

    report = mla_ops.report(model.train())
    assert report.fused == 0
    assert {layer.reason for layer in report.layers} == {"attention dropout 0.3 while training"}
    with op_calls() as calls:
        actual = gradients(model)
    assert not calls
    expected = gradients(stock.train())
    assert_gradients(actual, expected)
    assert any(
        relative_error(grad, expected[name]) > 1e-2
        for name, grad in gradients(family.build()).items()
    )


@each_family()
def test_attention_probabilities(family: Family) -> None:
    """A call that asks for them takes eager code; the next one takes the op."""
    model = family.build()
    ids, mask = sample_input_ids(), scenarios.LEFT_PADDING[:2]
    model.set_attn_implementation("eager")
    options = {"attention_mask": mask, "output_attentions": True}
    expected = forward(model, ids, **options)
    mla_ops.patch(model)
    actual = forward(model, ids, **options)

    assert len(actual.attentions) == len(expected.attentions) == family.mla_layers
    rows = mask.bool()
    for mine, theirs in zip(actual.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(mine.transpose(1, 2)[rows], theirs.transpose(1, 2)[rows])
    assert relative_error(actual.logits[rows], expected.logits[rows]) < 1e-5
    assert op_count(model) == family.mla_layers
