"""`patch`, `unpatch`, `report` and `attn_implementation="mla_ops"`: what switches and what not."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import pickle
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from families import (
    FAMILIES,
    Family,
    attention_modules,
    available_families,
    each_family,
    forward,
    forward_logits,
    in_a_fresh_process,
    one_thread,
    op_calls,
    relative_error,
    sample_input_ids,
)
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.deepseek_v3 import modeling_deepseek_v3

import mla_ops
import mla_ops.hf

VISION = ("kimi_k25", "hy_v4_vl", "glm5_next", "mistral_large4")
FEW = ("deepseek_v2", "deepseek_v32", "hy_v4", "kimi_linear", "mistral_large4")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def deepseek() -> Any:
    return FAMILIES["deepseek_v3"].build()


def llama() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


def implementations(model: nn.Module) -> dict[str, str]:
    """The implementation of every transformers model inside a model."""
    return {
        name: module.config._attn_implementation
        for name, module in model.named_modules()
        if isinstance(module, PreTrainedModel)
    }


def op_count(model: Any) -> int:
    """How many layers call the op in a forward."""
    with op_calls() as calls:
        forward_logits(model, sample_input_ids())
    return len(calls)


@each_family()
def test_unpatch_restores_bit_for_bit(family: Family) -> None:
    """Case 65. Nothing is left on the modules, and the state dict never changes."""
    model = family.build()
    ids = sample_input_ids()
    names = {name: set(vars(module)) for name, module in model.named_modules()}
    keys = list(model.state_dict())
    before, stock = implementations(model), forward_logits(model, ids)

    assert mla_ops.patch(model) is model
    assert op_count(model) == family.mla_layers
    assert list(model.state_dict()) == keys
    assert {name: set(vars(module)) for name, module in model.named_modules()} == names
    assert all("forward" not in vars(module) for module in model.modules())

    assert mla_ops.unpatch(model) is model
    assert implementations(model) == before
    assert op_count(model) == 0
    assert torch.equal(forward_logits(model, ids), stock)


@each_family(*FEW)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_previous_implementation_comes_back(family: Family, implementation: str) -> None:
    """Patch twice is patch once, also for what `unpatch` goes back to."""
    if implementation == "sdpa" and family.stock_impl != "sdpa":
        pytest.skip("the family has no sdpa")
    model = family.build()
    model.set_attn_implementation(implementation)
    before, stock = implementations(model), forward_logits(model, sample_input_ids())
    once = forward_logits(mla_ops.patch(model), sample_input_ids())
    assert torch.equal(forward_logits(mla_ops.patch(model), sample_input_ids()), once)
    for _ in range(2):
        mla_ops.unpatch(model)
        assert implementations(model) == before
        assert torch.equal(forward_logits(model, sample_input_ids()), stock)
    for there, back in ((model.base_model, model), (model, model.base_model)):
        mla_ops.patch(there)
        mla_ops.unpatch(back)
        assert implementations(model) == before


@each_family()
def test_every_way_to_switch(family: Family, tmp_path: Path) -> None:
    """Case 64: at load, by name on a loaded model, by `patch`; saving keeps nothing of it."""
    model = family.build()
    ids = sample_input_ids()
    stock = forward_logits(model, ids)
    for switch in (mla_ops.patch, lambda m: m.set_attn_implementation("mla_ops")):
        switch(model)
        assert op_count(model) == family.mla_layers
        assert relative_error(forward_logits(model, ids), stock) < 1e-5
        mla_ops.unpatch(model)
        assert op_count(model) == 0
    mla_ops.patch(model).save_pretrained(tmp_path)

    assert "mla_ops" not in (tmp_path / "config.json").read_text("utf-8")
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="mla_ops")
    assert set(implementations(loaded).values()) == {"mla_ops"}
    assert op_count(loaded) == family.mla_layers
    assert relative_error(forward_logits(loaded, ids), stock) < 1e-5
    mla_ops.unpatch(loaded)
    assert torch.equal(forward_logits(loaded, ids), stock)
    assert op_count(type(model).from_pretrained(tmp_path)) == 0


def test_two_models_of_one_class() -> None:
    """Case 65: the one that was not patched stays as it was, also while the other is used."""
    ours, stock = deepseek(), deepseek()
    expected = forward_logits(stock, sample_input_ids())
    mla_ops.patch(ours)
    assert op_count(ours) == 2
    assert op_count(stock) == 0
    assert torch.equal(forward_logits(stock, sample_input_ids()), expected)
    mla_ops.unpatch(stock)
    assert op_count(ours) == 2


def test_models_that_share_a_config_switch_together() -> None:
    """Case 65, where it cannot be met: the implementation is a property of the config object."""
    ours = deepseek()
    other = type(ours)(ours.config).eval()
    assert other.config is ours.config
    mla_ops.patch(ours)
    assert mla_ops.report(other).fused == op_count(other) == 2
    mla_ops.unpatch(ours)
    assert mla_ops.report(other).fused == op_count(other) == 0


def test_copies_and_pickles() -> None:
    """They stay patched, run alone, switch alone, and know what ran before."""
    model = deepseek()
    model.set_attn_implementation("eager")
    mla_ops.patch(model)
    expected = forward_logits(model, sample_input_ids())
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(saved, weights_only=False),
    ):
        assert op_count(other) == 2
        assert torch.equal(forward_logits(other, sample_input_ids()), expected)
        mla_ops.unpatch(other)
        assert (op_count(other), op_count(model)) == (0, 2)
        assert set(implementations(other).values()) == {"eager"}


def image_inputs(family: Family) -> dict[str, Tensor]:
    """Text with an image of 4 x 4 patches, as the processor of each family gives it."""
    generator = torch.Generator().manual_seed(3)
    ids, tokens = sample_input_ids(1), 6 if family.name == "hy_v4_vl" else 4
    ids[0, 3 : 3 + tokens] = 120
    shape, layout = {
        "kimi_k25": ((16, 3, 4, 4), {"image_grid_thw": torch.tensor([[1, 4, 4]])}),
        "hy_v4_vl": ((16, 48), {"image_grid_thw": torch.tensor([[1, 4, 4]])}),
        "glm5_next": ((16, 24), {"image_grid_thw": torch.tensor([[1, 4, 4]])}),
        "mistral_large4": ((1, 3, 16, 16), {"image_sizes": torch.tensor([[16, 16]])}),
    }[family.name]
    if family.name == "hy_v4_vl":
        layout["mm_token_type_ids"] = (ids == 120).long()
    if family.name == "glm5_next":
        ids[0, 2], ids[0, 7] = 122, 123
    pixels = torch.randn(shape, generator=generator)
    return {"input_ids": ids, "pixel_values": pixels, **layout}


@each_family(*VISION)
def test_vision_tower(family: Family) -> None:
    """`patch` leaves it alone; where the name reaches it, it runs sdpa, and images still count."""
    model = family.build()
    inputs = image_inputs(family)
    stock = forward_logits(model, **inputs)
    before = implementations(model)
    other = inputs | {"pixel_values": inputs["pixel_values"].flip(0, -1)}
    assert relative_error(forward_logits(model, **other), stock) > 1e-3

    mla_ops.patch(model)
    switched = {name for name, now in implementations(model).items() if now != before[name]}
    assert switched == {"model.language_model"}
    assert relative_error(forward_logits(model, **inputs), stock) < 1e-5
    mla_ops.unpatch(model)
    assert implementations(model) == before
    assert torch.equal(forward_logits(model, **inputs), stock)

    model.set_attn_implementation({"text_config": "mla_ops"})
    assert relative_error(forward_logits(model, **inputs), stock) < 1e-5
    model.set_attn_implementation("mla_ops")
    assert set(implementations(model).values()) == {"mla_ops"}
    with op_calls() as calls:
        assert relative_error(forward_logits(model, **inputs), stock) < 1e-5
    assert len(calls) == family.mla_layers
    mla_ops.unpatch(model)
    assert implementations(model) == before


def test_models_without_mla() -> None:
    """`patch` refuses them; under the name they run sdpa, grouped heads and padding included."""
    model = llama()
    ids = sample_input_ids()
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    stock = forward_logits(model, ids, attention_mask=mask)
    with pytest.raises(mla_ops.PatchError, match="LlamaForCausalLM: it has no MLA layer") as error:
        mla_ops.patch(model)
    assert error.value.report.layers == ()
    assert mla_ops.patch(model, strict=False) is model
    assert set(implementations(model).values()) == {"sdpa"}
    assert str(mla_ops.report(model)) == "0 MLA layers: 0 run mla_ops, 0 stock code"

    model.set_attn_implementation("mla_ops")
    actual = forward_logits(model, ids, attention_mask=mask)
    assert relative_error(actual[mask.bool()], stock[mask.bool()]) < 1e-5
    options = {"do_sample": False, "max_new_tokens": 5, "pad_token_id": 0, "attention_mask": mask}
    tokens = [model.generate(ids, cache_implementation=c, **options) for c in (None, "static")]
    model.set_attn_implementation("sdpa")
    tokens.append(model.generate(ids, **options))
    assert torch.equal(tokens[0], tokens[2])
    assert torch.equal(tokens[1], tokens[2])


def test_remote_code_is_refused_by_name() -> None:
    """Case 66: a class with MLA's projections but without `expand_kv`."""

    class DeepseekV3Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kv_a_proj_with_mqa = nn.Linear(8, 8)
            self.kv_b_proj = nn.Linear(8, 8)

    model = nn.ModuleDict({"self_attn": DeepseekV3Attention()})
    with pytest.raises(mla_ops.PatchError, match=r"first: self_attn.*no expand_kv.*remote_code"):
        mla_ops.patch(model)


@pytest.mark.parametrize("wrap", [lambda layers: layers[0], lambda layers: nn.Sequential(*layers)])
def test_layers_without_their_model_are_refused(wrap: Any) -> None:
    """There is no model whose implementation could be switched: say so, do not do nothing."""
    layers = wrap(deepseek().model.layers)
    with pytest.raises(mla_ops.PatchError, match="transformers model"):
        mla_ops.patch(layers)


def test_sparse_layers_of_an_old_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 5.18 not even their own code is right under another name: never switch, never run."""
    if "deepseek_v32" not in available_families():
        pytest.skip("this transformers is that old")
    monkeypatch.setattr(mla_ops.hf.attention, "_SPARSE_CACHES_LATENTS", False)
    model = FAMILIES["deepseek_v32"].build()
    needs = r"sparse attention needs transformers >= 5\.18, this is \d"
    with pytest.raises(mla_ops.PatchError, match=needs):
        mla_ops.patch(model)
    mla_ops.patch(model, strict=False)
    assert set(implementations(model).values()) == {"sdpa"}
    model.set_attn_implementation("mla_ops")
    with pytest.raises(mla_ops.PatchError, match=f"DeepseekV32Attention cannot run.*{needs}"):
        forward_logits(model, sample_input_ids())
    assert op_count(mla_ops.patch(deepseek())) == 2


def with_attention(cls: type) -> Any:
    model = deepseek()
    for _, module in attention_modules(model):
        module.__class__ = cls
    return model


def test_subclass_that_inherits_expand_kv_is_fused() -> None:
    model = with_attention(type("Subclass", (modeling_deepseek_v3.DeepseekV3Attention,), {}))
    stock = forward_logits(model, sample_input_ids())
    mla_ops.patch(model)
    assert op_count(model) == 2
    assert relative_error(forward_logits(model, sample_input_ids()), stock) < 1e-5


@each_family("deepseek_v3", "hy_v4")
def test_probabilities_of_a_subclass(family: Family) -> None:
    """The eager code is that of the module which defines the family, not of the subclass."""
    model = family.build()
    for _, module in attention_modules(model):
        module.__class__ = type("Subclass", (type(module),), {"__module__": __name__})
    model.set_attn_implementation("eager")
    expected = forward(model, sample_input_ids(), output_attentions=True).attentions
    actual = forward(mla_ops.patch(model), sample_input_ids(), output_attentions=True).attentions
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("first", ["patch", "report", "set"])
def test_subclass_that_overrides_expand_kv_keeps_its_own(first: str) -> None:
    """Its results are not what the weight gives: stock code, with a reason."""

    class Doubled(modeling_deepseek_v3.DeepseekV3Attention):
        def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
            key, value = super().expand_kv(kv_nope, k_rot)
            return 2 * key, 3 * value

    model = with_attention(Doubled)
    ids = sample_input_ids()
    stock = forward_logits(model, ids)
    assert relative_error(stock, forward_logits(deepseek(), ids)) > 1e-2
    if first == "patch":
        with pytest.raises(mla_ops.PatchError, match="expand_kv"):
            mla_ops.patch(model)
        mla_ops.patch(model, strict=False)
    elif first == "report":
        mla_ops.report(model)
    model.set_attn_implementation("mla_ops")
    assert relative_error(forward_logits(model, ids), stock) < 1e-5
    assert mla_ops.report(model).fused == 0


def test_expand_kv_that_is_replaced_on_one_module_keeps_its_own() -> None:
    model = deepseek()
    _, module = attention_modules(model)[0]
    original = module.expand_kv

    def doubled(kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        key, value = original(kv_nope, k_rot)
        return 2 * key, 3 * value

    module.expand_kv = doubled
    ids = sample_input_ids()
    stock = forward_logits(model, ids)
    mla_ops.patch(model, strict=False)
    assert relative_error(forward_logits(model, ids), stock) < 1e-5
    assert mla_ops.report(model).fused == 1


def test_report_as_text() -> None:
    model = deepseek()
    name = "model.layers.{}.self_attn  DeepseekV3Attention  "
    rows = ["2 MLA layers: 0 run mla_ops, 2 stock code"]
    rows += [f"  {name.format(i)}stock  attn_implementation is 'sdpa'" for i in range(2)]
    assert str(mla_ops.report(model)) == "\n".join(rows)

    mla_ops.patch(model)
    rows = ["2 MLA layers: 2 run mla_ops, 0 stock code"]
    rows += [f"  {name.format(i)}mla_ops (tiled)" for i in range(2)]
    with mla_ops.use_backend("tiled"):
        assert str(mla_ops.report(model)) == "\n".join(rows)
    with mla_ops.use_backend("reference"):
        assert {layer.backend for layer in mla_ops.report(model).layers} == {"reference"}

    model.model.layers[1].self_attn.kv_b_proj.bias = nn.Parameter(torch.zeros(4 * 28))
    report = mla_ops.report(model)
    assert (report.fused, len(report.layers)) == (1, 2)
    assert str(report).endswith("stock  kv_b_proj has a bias")


def test_refused_layer_leaves_the_model_alone() -> None:
    """Strict: the error carries the table. Not strict: the other layers run the op."""
    model = deepseek()
    model.model.layers[1].self_attn.kv_b_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(mla_ops.PatchError, match=r"layers\.1\.self_attn: .*forward hooks") as error:
        mla_ops.patch(model)
    assert set(implementations(model).values()) == {"sdpa"}
    assert [bool(layer.reason) for layer in error.value.report.layers] == [True, True]
    mla_ops.patch(model, strict=False)
    assert op_count(model) == 1


@each_family("youtu")
def test_modeling_module_imported_late(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is hooked as it loads, and is otherwise its own loader's: source, reload, spec."""
    name = f"transformers.models.{family.name}.modeling_{family.name}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    for loaded in (module, importlib.reload(module)):
        assert mla_ops.hf.attention.original_expand_kv(loaded.YoutuAttention) is not None
        assert "mla_ops" not in type(loaded.__loader__).__module__
        assert "mla_ops" not in type(loaded.__spec__.loader).__module__
        assert "def expand_kv" in inspect.getsource(loaded.YoutuAttention)


def test_install_is_idempotent() -> None:
    """Case 64: hooks are put in place once, however often they are asked for."""
    finders, wrapped = list(sys.meta_path), modeling_deepseek_v3.DeepseekV3Attention.expand_kv
    mla_ops.hf.install()
    importlib.reload(mla_ops.hf)
    assert sys.meta_path == finders
    assert modeling_deepseek_v3.DeepseekV3Attention.expand_kv is wrapped
    assert not hasattr(wrapped.__wrapped__, "__wrapped__")


FRESH = {
    "hooks before the models": r"""
        import mla_ops.hf
        name = r"transformers\.models\.(?!auto\.)\w+\.modeling_\w+"
        loaded = [module for module in sys.modules if re.fullmatch(name, module)]
        assert not loaded, loaded
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="mla_ops")
        same(model)
        same(torch.load(folder / "whole.pt", weights_only=False))
        model.set_attn_implementation("sdpa")
        assert torch.equal(model(input_ids=ids).logits, stock)
    """,
    "models before the hooks": """
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert torch.equal(model(input_ids=ids).logits, stock)
        try:
            model.set_attn_implementation("mla_ops")
        except ValueError as error:
            assert "mla_ops" in str(error)
        else:
            raise AssertionError("an unknown implementation was accepted")
        import mla_ops.hf
        model.set_attn_implementation("mla_ops")
        same(model)
        same(mla_ops.patch(AutoModelForCausalLM.from_pretrained(folder)))
    """,
}


@pytest.mark.parametrize("code", FRESH.values(), ids=FRESH.keys())
def test_order_of_imports(code: str, tmp_path: Path) -> None:
    """Case 64: in a fresh process, whichever comes first; no modeling module is imported early."""
    model = deepseek()
    model.save_pretrained(tmp_path)
    torch.save(forward_logits(model, sample_input_ids()), tmp_path / "stock.pt")
    torch.save(mla_ops.patch(model), tmp_path / "whole.pt")
    begin = """
        import pathlib, re, sys
        import torch
        from transformers import AutoModelForCausalLM
        from families import op_calls, relative_error, sample_input_ids

        def same(model):
            with op_calls() as calls:
                assert relative_error(model(input_ids=ids).logits, stock) < 1e-5
            assert len(calls) == mla_ops.report(model).fused == 2

        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        folder, ids = pathlib.Path(), sample_input_ids()
        stock = torch.load("stock.pt")
    """
    in_a_fresh_process(textwrap.dedent(begin) + textwrap.dedent(code), tmp_path)
