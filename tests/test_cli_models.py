"""`mla-ops check` and `mla-ops explain`: what they find, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("transformers")

import families
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from typer.testing import CliRunner

from mla_ops import cli
from mla_ops.commands import agreement
from mla_ops.commands.agreement import compare_with_stock
from mla_ops.commands.models import load_model
from mla_ops.commands.tiny import shrink
from mla_ops.errors import InvalidInputError
from mla_ops.hf import attention, masks

MODEL_TYPES = sorted({families.FAMILIES[name].model_type for name in families.available_families()})


def invoke(verb: str, *arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(cli.build_app(verb), (verb, *arguments), env={"COLUMNS": "200"})
    if isinstance(result.exception, Exception):
        raise result.exception
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with families.one_thread():
        yield


@pytest.fixture
def wrong_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op is off by a thousandth."""
    right = attention.mla_attention

    def wrong(*tensors: torch.Tensor, **options: object) -> object:
        out, lse = right(*tensors, **options)
        return out * 1.001, lse

    monkeypatch.setattr(attention, "mla_attention", wrong)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with a config and weights, as a download leaves it; stored in bfloat16."""
    folder = tmp_path / "model"
    load_model("deepseek_v3", dtype=torch.bfloat16).model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_family_is_built_small_and_agrees(model_type: str) -> None:
    loaded = load_model(model_type)
    found = compare_with_stock(loaded.model, loaded.prompt(12, seed=0), steps=2)
    assert found.agrees, found
    assert found.report.fused == len(found.report.layers) > 0
    assert found.same_tokens == len(found.tokens) == 3
    assert [part.rows for part in found.parts] == [12, 2, 18, 4][: len(found.parts)]
    assert len(found.parts) == (4 if loaded.model.can_generate() else 3)
    assert found.same_generated == sum(map(len, found.generated))
    assert loaded.tiny
    assert loaded.model.config._attn_implementation == found.implementation != "mla_ops"
    assert sum(parameter.numel() for parameter in loaded.model.parameters()) < 2e7


def test_check_shows_numbers_and_layers(tmp_path: Path) -> None:
    data = tmp_path / "check.json"
    shown = invoke("check", "DeepseekV3ForCausalLM", "--json", str(data))
    for text in (
        "DeepseekV3ForCausalLM: scaled down, random weights",
        "float32 on cpu",
        "Logits: sdpa and mla_ops",
        "model.layers.1.self_attn",
        "2 of 2 layers run mla_ops; 25 of 25 greedy tokens are the same",
        "the numbers agree",
    ):
        assert text in shown
    found = json.loads(data.read_text("utf-8"))
    assert found.keys() == {
        "schema", "model", "tiny", "agrees", "stock", "parts", "tokens", "same_tokens", "generated",
        "same_generated", "layers",
    }  # fmt: skip
    assert (found["agrees"], found["tiny"], found["stock"]) == (True, True, "sdpa")
    assert [(part["name"], part["rows"]) for part in found["parts"]] == [
        ("prompt", 32), ("decode", 8), ("padded", 48), ("generate", 16),
    ]  # fmt: skip
    assert all(0 < part["error"] < part["allowed"] < 1e-3 for part in found["parts"])
    assert [len(row) for row in found["generated"]] == [8, 8]
    assert found["same_generated"] == 16


@pytest.mark.usefixtures("wrong_op")
def test_a_wrong_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = invoke("check", "deepseek_v3", status=1)
    assert "the numbers differ by more than rounding explains" in shown
    assert shown.count(" off ") == 4
    loaded = load_model("deepseek_v3")
    monkeypatch.setattr(agreement, "_FP64_PARAMETERS", 0)
    monkeypatch.setitem(agreement._RELATIVE, torch.float32, 1e-5)
    assert not compare_with_stock(loaded.model, loaded.prompt(8, 0), 1).agrees


def test_nan_is_a_wrong_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention.mla_attention
    monkeypatch.setattr(
        attention, "mla_attention", lambda *a, **k: (right(*a, **k)[0] * float("nan"), None)
    )
    data = tmp_path / "check.json"
    shown = invoke("check", "minicpm3", "--new-tokens", "0", "--json", str(data), status=1)
    assert " off " in shown
    parts = json.loads(data.read_text("utf-8"))["parts"]
    assert [part["name"] for part in parts] == ["prompt", "padded"]
    assert {(part["error"], part["agrees"]) for part in parts} == {(None, False)}


def test_padding_that_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt and the steps after it have none: they agree all the same."""
    monkeypatch.setattr(masks, "_first_valid", lambda mask, end: 0)
    loaded = load_model("deepseek_v3")
    found = compare_with_stock(loaded.model, loaded.prompt(8, 0), 2)
    wrong = {part.name: part.agrees for part in found.parts}
    assert wrong == {"prompt": True, "decode": True, "padded": False, "generate": False}
    assert not found.agrees


def test_both_sides_generate_what_stock_chose() -> None:
    """Also where the model's own settings let it choose something else than the largest logit."""
    loaded = load_model("deepseek_v3")
    plain = compare_with_stock(loaded.model, loaded.prompt(8, 0), 4)
    loaded.model.generation_config.suppress_tokens = [plain.generated[0][0]]
    found = compare_with_stock(loaded.model, loaded.prompt(8, 0), 4)
    assert found.generated[0][0] != plain.generated[0][0]
    assert found.agrees
    assert found.same_generated == 8


def test_without_fp64_the_difference_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_FP64_PARAMETERS", 0)
    loaded = load_model("deepseek_v3", dtype=torch.bfloat16)
    found = compare_with_stock(loaded.model, loaded.prompt(8, 0), 2)
    assert found.agrees
    assert all(part.error is None and part.difference > 0 for part in found.parts)


def test_layers_that_run_stock_code_say_why() -> None:
    loaded = load_model("deepseek_v3")
    hooked = loaded.model.model.layers[0].self_attn.kv_b_proj
    hooked.register_forward_hook(lambda *_: None)
    found = compare_with_stock(loaded.model, loaded.prompt(8, 0), 1)
    assert found.agrees
    assert [layer.fused for layer in found.report.layers] == [False, True]
    assert found.report.layers[0].reason == "kv_b_proj has forward hooks"
    loaded.model.model.layers[1].self_attn.kv_b_proj.register_forward_hook(lambda *_: None)
    assert not compare_with_stock(loaded.model, loaded.prompt(8, 0), 1).agrees


def test_weights_are_used_where_they_are(saved: Path) -> None:
    assert "its own weights, 3.4 M parameters, bfloat16" in invoke("check", str(saved))
    assert "its own weights" in invoke("check", str(saved / "config.json"), "--real")
    tiny = invoke("check", str(saved), "--tiny", "--dtype", "float64")
    assert "scaled down, random weights" in tiny
    assert "float64 on cpu" in tiny
    loaded = load_model(str(saved))
    assert not loaded.tiny
    weight = load_model("deepseek_v3", dtype=torch.bfloat16).model.lm_head.weight
    assert torch.equal(loaded.model.lm_head.weight, weight)


def test_explain_shows_every_site_and_draws_one(tmp_path: Path) -> None:
    svg, page, data = tmp_path / "a.svg", tmp_path / "a.html", tmp_path / "a.json"
    outputs = ("--svg", str(svg), "--html", str(page), "--json", str(data))
    shown = invoke("explain", "deepseek_v3", *outputs)
    assert "1 graph: 2 fused, 0 missed" in shown
    assert shown.count("fuse_attention") == 2
    assert svg.read_text("utf-8").startswith("<svg ")
    assert "model.layers.0.self_attn" in page.read_text("utf-8")
    found = json.loads(data.read_text("utf-8"))
    assert found["graphs"] == 1
    assert [(s["path"], s["matched"], s["nodes_after"]) for s in found["sites"]] == [
        ("model.layers.0.self_attn", True, 4), ("model.layers.1.self_attn", True, 4),
    ]  # fmt: skip


def test_explain_gives_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_OPS_DISABLE_PASSES", "fuse_attention")
    assert "1 graph: 0 fused" in invoke("explain", "deepseek_v3")
    with pytest.raises(InvalidInputError, match="--svg draws a rewritten layer, and none was"):
        invoke("explain", "deepseek_v3", "--svg", str(tmp_path / "a.svg"))


@pytest.mark.parametrize("verb", ["check", "explain"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nosuch",), r"model type that transformers [\d.]+ knows, got 'nosuch'"),
        (("./no/folder",), r"expected an existing folder or config file.*got './no/folder'"),
        (("{tmp}",), r"expected a folder with config.json, got '.*'"),
        (("{tmp}/bad.json",), r"cannot read a config from .*bad.json: .*not a valid JSON file"),
        (("{tmp}/odd.json",), r"cannot read a config from .*model type `nosuch`"),
        (("{tmp}/typed.json",), r"cannot read a config from .*'num_attention_heads' expected int"),
        (("somebody/a-model",), r"'somebody/a-model' is neither here nor in the cache"),
        (("some/bad/name",), r"'some/bad/name' is neither here nor in the cache"),
        (("llama",), r"multi-head latent attention, got LlamaForCausalLM: none of its layers"),
        (("deepseek_v3", "--real"), r"expected weights \(\*.safetensors or .*'deepseek_v3'"),
        (("deepseek_v3", "--dtype", "int8"), r"expected a floating dtype such as bfloat16"),
        (("deepseek_v3", "--json", "{tmp}"), r"expected a file in an existing folder, got"),
    ],
)
def test_bad_input_is_refused(
    verb: str, arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "odd.json").write_text('{"model_type": "nosuch"}')
    typed = {"model_type": "deepseek_v3", "num_attention_heads": "many"}
    (tmp_path / "typed.json").write_text(json.dumps(typed))
    with pytest.raises(InvalidInputError, match=message):
        invoke(verb, *(argument.format(tmp=tmp_path) for argument in arguments))


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(InvalidInputError, match="the model cannot be moved to 'xpu'"):
        load_model("minicpm3", device="xpu")


def test_broken_weights(saved: Path) -> None:
    (weights,) = saved.glob("*.safetensors")
    weights.write_bytes(b"nothing")
    with pytest.raises(InvalidInputError, match=r"cannot load the weights in .*model"):
        load_model(str(saved))


def test_shrinking_keeps_what_decides_which_code_runs() -> None:
    kinds = ["linear", "linear", "full", "linear"]
    small = shrink(
        {
            "num_hidden_layers": 4,
            "layer_types": kinds,
            "kv_source_layers": [0, 1, 2, 3],
            "num_attention_heads": 40,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
            "q_lora_rank": None,
            "moe_intermediate_size": 1407,
            "pad_token_id": 100_000,
            "bos_token_id": 1,
            "eos_token_id": [2, 100_001],
            "n_group": None,
            "num_experts_per_tok": None,
            "rope_interleave": True,
            "rope_parameters": {"mrope_section": [6, 5, 5], "long_factor": [*range(16)]},
            "per_layer_config": {"02": {"kv_lora_rank": 1024}, "03": {"kv_lora_rank": 1024}},
            "id2label": {0: "a"},
        }
    )
    assert small == {
        "num_hidden_layers": 3,
        "layer_types": kinds[:3],
        "kv_source_layers": [0, 1, 2],
        "num_attention_heads": 5,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "q_lora_rank": None,
        "moe_intermediate_size": 80,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 0,
        "n_group": None,
        "num_experts_per_tok": 4,
        "rope_interleave": True,
        "rope_parameters": {"mrope_section": [1, 1, 0], "long_factor": [0, 1]},
        "per_layer_config": {"02": {"kv_lora_rank": 128}},
        "id2label": {0: "a"},
    }


def test_a_config_that_cannot_be_made_small(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "deepseek_v3", "hidden_act": "nosuch"}))
    with pytest.raises(
        InvalidInputError, match=r"a small deepseek_v3 model cannot be built.*nosuch"
    ):
        load_model(str(config))


def test_a_small_model_has_every_kind_of_layer() -> None:
    config = load_model("deepseek_v32").model.config
    assert set(config.mlp_layer_types) == {"dense", "sparse"}
    assert config.num_hidden_layers == len(config.mlp_layer_types) == 4
    assert config.kv_lora_rank // config.qk_rope_head_dim == 8


def test_the_seed_decides_the_weights() -> None:
    first, same, other = (load_model("minicpm3", seed=seed).model for seed in (0, 0, 1))
    pairs = zip(first.parameters(), same.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_a_hub_name_in_the_cache_is_found(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_ops.commands import models

    def cached(name: str, file: str) -> str:
        assert (name, file) == ("somebody/a-model", "config.json")
        return str(saved / file)

    monkeypatch.setattr(models, "try_to_load_from_cache", cached)
    assert not load_model("somebody/a-model").tiny


def test_available_model_types_are_known() -> None:
    assert set(MODEL_TYPES) <= set(CONFIG_MAPPING_NAMES)
