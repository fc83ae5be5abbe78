"""The tiny models of `families` do what the other tests rely on, with stock attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from families import (
    FAMILIES,
    Family,
    attention_modules,
    available_families,
    forward_logits,
    sample_input_ids,
)
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache

LENGTH = 11
PREFILL = 7

every_family = pytest.mark.parametrize(
    "family", [pytest.param(FAMILIES[name], id=name) for name in available_families()]
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The models are so small that a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to float32 rounding of a few layers."""
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-5)


def prefill_and_decode(model: torch.nn.Module, ids: torch.Tensor, cache: Cache) -> torch.Tensor:
    """Logits of a prefill and of one decode step per remaining token, `[B, S, vocab]`."""
    steps = [ids[:, :PREFILL], *ids[:, PREFILL:].split(1, dim=1)]
    return torch.cat([forward_logits(model, step, cache=cache) for step in steps], dim=1)


@every_family
def test_model_is_as_its_family_says(family: Family) -> None:
    """Dtype, mode, number of attention modules, sinks, and the default implementation."""
    model = family.build()
    attentions: list[Any] = [module for _, module in attention_modules(model)]

    assert not model.training
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert model.config._attn_implementation == family.stock_impl
    assert len(attentions) == family.mla_layers
    for module in attentions:
        assert family.sinks == hasattr(module, "sinks")
        per_head = module.qk_nope_head_dim + module.v_head_dim
        assert module.kv_b_proj.weight.shape == (module.num_heads * per_head, module.kv_lora_rank)
        assert module.kv_b_proj.bias is None
    config = model.config.get_text_config()
    assert family.sparse == hasattr(config, "index_topk")


@every_family
def test_stock_caches_equal_the_forward_without_a_cache(family: Family) -> None:
    """Prefill and decode, with a growing and with a static cache."""
    model = family.build()
    ids = sample_input_ids(length=LENGTH)
    expected = forward_logits(model, ids)

    assert expected.isfinite().all()
    assert_same(prefill_and_decode(model, ids, DynamicCache(config=model.config)), expected)
    if family.static_ok:
        static = StaticCache(config=model.config, max_cache_len=LENGTH + 5)
        assert_same(prefill_and_decode(model, ids, static), expected)


@every_family
def test_attention_matters(family: Family) -> None:
    """Dropping one attention output, and halving one softmax scale, changes the logits."""
    model = family.build()
    ids = sample_input_ids(length=LENGTH)
    expected = forward_logits(model, ids)
    spread = expected.std()
    assert spread > 0.3

    module: Any
    for _, module in attention_modules(model):
        handle = module.o_proj.register_forward_hook(lambda _module, _args, out: out * 0)
        assert (forward_logits(model, ids) - expected).std() > 0.1 * spread
        handle.remove()

        scaling = module.scaling
        module.scaling = 0.5 * scaling
        assert (forward_logits(model, ids) - expected).std() > 0.01 * spread
        module.scaling = scaling
    torch.testing.assert_close(forward_logits(model, ids), expected, rtol=0, atol=0)


@every_family
def test_stock_generates(family: Family) -> None:
    """Greedy generation with a left-padded batch equals generation one by one."""
    if not family.generate_ok:
        pytest.skip(family.notes)
    model = family.build()
    ids = sample_input_ids(batch=1, length=6)
    padded = torch.cat([torch.zeros_like(ids[:, :2]), ids], dim=1)
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}

    alone = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    batched = model.generate(padded, attention_mask=(padded != 0).long(), **options)

    assert alone.shape == (1, 9)
    assert torch.equal(batched[:, 2:], alone)


@pytest.mark.parametrize("name", ["deepseek_v2", "kimi_linear", "mistral_large4"])
def test_build_is_reproducible(name: str) -> None:
    """Two builds have the same weights, whatever the global seed."""
    if name not in available_families():
        pytest.skip(f"{name} is not in the installed transformers")
    torch.manual_seed(1)
    first = FAMILIES[name].build().state_dict()
    torch.manual_seed(2)
    second = FAMILIES[name].build().state_dict()

    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_families_cover_the_odd_shapes() -> None:
    """Some family has a head count that is no power of two, and some has rope dim 0."""
    head_counts, rope_dims = set(), set()
    for name in available_families():
        for _, module in attention_modules(FAMILIES[name].build()):
            head_counts.add(module.num_heads)
            rope_dims.add(module.qk_rope_head_dim)
    assert head_counts == {3, 4}
    assert 8 in rope_dims
    if "glm5_next" in available_families():
        assert 0 in rope_dims
