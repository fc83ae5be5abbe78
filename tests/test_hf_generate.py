"""`generate` on a patched model gives the tokens of the stock model, in every mode."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from families import FAMILIES, Family, each_family, one_thread, op_calls, sample_input_ids
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, CompileConfig, PreTrainedModel

import mla_ops

GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 6}
# transformers refuses assisted generation for models whose layers keep a state.
STATEFUL = ("kimi_linear", "bailing_hybrid", "glm5_next", "glm5_next_small_topk")
# With a static cache, transformers allocates it with the wrong widths for chunked prefill.
SLIDING = ("dots3_note", "dots3_note_small_topk")
# One of each structure; `-m slow` runs the others.
FAST = (
    "deepseek_v2",
    "deepseek_v3_yarn",
    "glm4_moe_lite",
    "longcat_flash",
    "deepseek_v32_small_topk",
    "hy_v4_small_topk",
    "kimi_linear",
    "glm5_next",
    "dots3_note",
    "mistral_large4_shared_kv",
)
COMPILED = ("deepseek_v2", "deepseek_v3_yarn", "hy_v4_small_topk", "mistral_large4_shared_kv")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def generated(model: PreTrainedModel, ids: Tensor, **options: Any) -> Any:
    """What `generate` gives for prompts in which 0 is padding."""
    torch.manual_seed(0)
    return model.generate(
        ids,
        attention_mask=(ids != 0).long(),
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
        **(GREEDY | options),
    )


def check(family: Family, ids: Tensor, **options: Any) -> Tensor:
    """Generate with stock attention and patched, compare, and return the tokens."""
    model = family.build()
    stock = generated(model, ids, **options)
    mla_ops.patch(model)
    with op_calls() as calls:
        ours = generated(model, ids, **options)

    assert len(calls) >= family.mla_layers
    assert torch.equal(ours.sequences, stock.sequences)
    for mine, theirs in zip(ours.logits, stock.logits, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    if "num_beams" in options:
        torch.testing.assert_close(ours.sequences_scores, stock.sequences_scores)
    return ours.sequences


@each_family()
def test_growing_cache(family: Family) -> None:
    tokens = check(family, sample_input_ids())
    assert tokens.shape == (2, 17)
    check(family, sample_input_ids(), do_sample=True, temperature=0.7)


@each_family()
def test_static_cache(family: Family) -> None:
    """Case 70: its two parts differ in width; the second call finds a cache of the first."""
    short, long = sample_input_ids(length=5), sample_input_ids(length=13)
    expected = check(family, short, cache_implementation="static")
    model = mla_ops.patch(family.build())
    assert torch.equal(generated(model, short).sequences, expected)
    for ids in (long, short):
        again = generated(model, ids, cache_implementation="static").sequences
        assert torch.equal(again, generated(model, ids).sequences)


@each_family(fast=FAST)
def test_prefill_in_chunks(family: Family) -> None:
    """Several new tokens on top of a cache: the causal rule counts from the end."""
    ids = sample_input_ids()
    ids[0, :5] = 0  # the first chunk of this row is nothing but padding
    whole = check(family, ids)
    assert torch.equal(check(family, ids, prefill_chunk_size=4), whole)
    if family.name not in SLIDING:
        options = {"prefill_chunk_size": 4, "cache_implementation": "static"}
        assert torch.equal(check(family, ids, **options), whole)


@each_family(fast=FAST)
def test_beam_search(family: Family) -> None:
    """Case 69: the cache follows the beams."""
    tokens = check(family, sample_input_ids(), num_beams=4, num_return_sequences=4)
    assert tokens.shape == (8, 17)
    assert len(tokens.unique(dim=0)) > 2
    check(family, sample_input_ids(), num_beams=4, cache_implementation="static")


@each_family(fast=FAST)
def test_left_padded_batch(family: Family) -> None:
    """Case 68: a padded row gets the tokens that it gets alone."""
    long, short = sample_input_ids(1, 12, seed=1), sample_input_ids(1, 7, seed=2)
    batch = torch.cat([long, torch.cat([torch.zeros_like(short[:, :5]), short], dim=1)])
    for options in ({}, {"cache_implementation": "static"}):
        tokens = check(family, batch, max_new_tokens=8, **options)
        assert torch.equal(tokens[:1], check(family, long, max_new_tokens=8))
        assert torch.equal(tokens[1:, 5:], check(family, short, max_new_tokens=8))


@each_family(fast=FAST)
def test_no_cache(family: Family) -> None:
    check(family, sample_input_ids(), use_cache=False)


@each_family(without=STATEFUL, fast=FAST)
def test_prompt_lookup(family: Family) -> None:
    """Case 44: several candidates at once, and a crop of what is refused."""
    ids = sample_input_ids(1, 9).repeat(1, 3)
    tokens = check(family, ids, prompt_lookup_num_tokens=3)
    assert torch.equal(tokens, check(family, ids))


@each_family("deepseek_v2", "deepseek_v32_small_topk", "hy_v4", "mistral_large4")
def test_assistant_model(family: Family) -> None:
    """A patched assistant, and one whose every guess is right."""
    model = family.build()
    ids = sample_input_ids(1, 9)
    expected = generated(model, ids).sequences
    other = FAMILIES["deepseek_v3"].build()
    for assistant in (copy.deepcopy(model), other):
        mla_ops.patch(model)
        mla_ops.patch(assistant)
        ours = generated(model, ids, assistant_model=assistant).sequences
        assert torch.equal(ours, expected)


@each_family(*STATEFUL)
def test_stateful_models_refuse_assistance_as_stock_does(family: Family) -> None:
    model = mla_ops.patch(family.build())
    with pytest.raises(ValueError, match="not supported with stateful models"):
        generated(model, sample_input_ids(1, 9), prompt_lookup_num_tokens=3)


graphs: list[torch.fx.GraphModule] = []


def counting_backend(module: torch.fx.GraphModule, inputs: list[Any], **_: Any) -> Any:
    """Run graphs as they are, and remember them. `generate` copies its backend: not an object."""
    del inputs
    graphs.append(module)
    return module.forward


@each_family(
    without=(*SLIDING, *(name for name, family in FAMILIES.items() if not family.fullgraph_ok)),
    fast=COMPILED,
)
def test_compiled_decode_is_one_graph(family: Family) -> None:
    """A static cache and `fullgraph`; padded on the left; the second call compiles nothing."""
    model = family.build()
    ids = sample_input_ids()
    ids[0, :4] = 0
    expected = generated(model, ids).sequences
    mla_ops.patch(model)
    config = CompileConfig(fullgraph=True, backend=counting_backend)
    config._compile_all_devices = True
    graphs.clear()
    for _ in range(2):
        options = {"cache_implementation": "static", "compile_config": config}
        assert torch.equal(generated(model, ids, **options).sequences, expected)
    assert len(graphs) == 1
    assert str(graphs[0].graph).count("mla_ops.mla_attention") == family.mla_layers


def save_with_mtp_layer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save a model whose third layer is for multi-token prediction."""
    model = FAMILIES["deepseek_v3"].build()
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 3
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)

    weights = load_file(folder / "model.safetensors")
    hidden = config.hidden_size
    layer = "model.layers.2."
    weights[layer + "eh_proj.weight"] = torch.randn(hidden, 2 * hidden) / hidden
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{layer}{name}.weight"] = torch.ones(hidden)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text("utf-8"))
    settings |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 1, "num_mtp_layers": 1}
    (folder / "config.json").write_text(json.dumps(settings), "utf-8")
    monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2.*"])


def test_layers_built_during_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multi-token prediction builds its layers late; they run the op and draft as stock does."""
    modeling_layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(modeling_layers, "MtpModel"):
        pytest.skip("this transformers has no multi-token prediction")
    save_with_mtp_layer(tmp_path, monkeypatch)
    drafted: list[Tensor] = []
    forward = modeling_layers.MtpModel.forward

    def recorded(*args: Any, **kwargs: Any) -> Any:
        tokens, logits, loss = forward(*args, **kwargs)
        drafted.append(logits)
        return tokens, logits, loss

    monkeypatch.setattr(modeling_layers.MtpModel, "forward", recorded)
    ids = sample_input_ids(1, 9)
    results = {}
    for name in ("sdpa", "mla_ops"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
        drafted.clear()
        with op_calls() as calls:
            tokens = generated(model, ids, use_mtp=True).sequences
        results[name] = tokens, list(drafted)
        assert len(calls) == (0 if name == "sdpa" else 2 * (len(drafted) + 1) + len(drafted))
    assert torch.equal(results["mla_ops"][0], results["sdpa"][0])
    assert torch.equal(results["mla_ops"][0], generated(model, ids).sequences)
    assert len(results["sdpa"][1]) > 1
    for mine, theirs in zip(results["mla_ops"][1], results["sdpa"][1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
