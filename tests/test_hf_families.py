"""Every MLA family with `mla_ops` equals itself with stock attention, however it is run.

A scenario (`families.scenarios`) runs first with stock attention and then patched; each layer must
have called the op in every forward, so that stock code cannot pass for ours.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

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
from families.scenarios import Scenario
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

import mla_ops

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

# A mask for each head cannot fit layers of 4 heads and layers of 3.
MIXED_HEADS = ("dots3_note", "dots3_note_small_topk")
# Which keys are kept is no continuous function of the scores: bf16 may choose others than fp64.
DISCONTINUOUS = [name for name in FAMILIES if name.endswith("small_topk")]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def check(family: Family, scenario: Scenario, stock: Scenario | None = None) -> None:
    """Run stock and patched, and compare; `stock` says the same in words that stock understands."""
    model = family.build()
    expected = (stock or scenario)(model)

    forwards = []
    handle = model.register_forward_hook(lambda *_: forwards.append(1))
    mla_ops.patch(model)
    with op_calls() as calls:
        actual = scenario(model)
    handle.remove()

    assert len(calls) == family.mla_layers * len(forwards)
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    assert {name: error for name, error in errors.items() if not error < 1e-5} == {}


@each_family()
def test_no_cache(family: Family) -> None:
    # Case 42: complex rope (V2), interleaved and half rope (V3), no rope, behind one switch.
    # Cases 39 and 41: the family with yarn, at one token and at many; latents are 32 wide there,
    # query heads 24, so a scale from either width shows.
    check(family, scenarios.no_cache)


@each_family()
def test_growing_cache(family: Family) -> None:
    check(family, scenarios.growing_cache)


@each_family()
def test_fixed_cache_with_poison_in_its_unfilled_slots(family: Family) -> None:
    # Case 70: the two parts of the cache differ in width. Case 29: what no token has written yet
    # must not be read. glm5_next's own mask hides keys by the lowest finite number, and what is
    # then multiplied by 0 has to be finite.
    poison = 1e4 if family.name.startswith("glm5_next") else math.nan
    check(family, scenarios.fixed_cache(poison), stock=scenarios.fixed_cache(None))


@each_family()
def test_left_padding(family: Family) -> None:
    check(family, scenarios.padded(scenarios.LEFT_PADDING))


@each_family()
def test_right_padding(family: Family) -> None:
    check(family, scenarios.padded(scenarios.RIGHT_PADDING))


@each_family()
def test_mask_with_a_hole(family: Family) -> None:
    check(family, scenarios.padded(scenarios.HOLES))


@each_family()
def test_packed_sequences(family: Family) -> None:
    check(family, scenarios.packed)


def check_bool(family: Family, mask_of: Callable[[PreTrainedModel], Tensor]) -> None:
    """A bool mask; the eager code of some families would add it to the scores as 0 and 1."""

    def spelt_out(model: PreTrainedModel) -> Tensor:
        hidden = ~mask_of(model)
        lowest = torch.finfo(model.dtype).min
        return torch.zeros(hidden.shape, dtype=model.dtype).masked_fill(hidden, lowest)

    stock = scenarios.four_dimensional(spelt_out) if family.stock_impl == "eager" else None
    check(family, scenarios.four_dimensional(mask_of), stock)


@each_family()
def test_bool_mask_of_the_user(family: Family) -> None:
    check_bool(family, lambda _: scenarios.visible_pairs())
    check_bool(family, lambda _: scenarios.visible_pairs(batch=1))


@each_family(without=MIXED_HEADS)
def test_bool_mask_for_each_head(family: Family) -> None:
    check_bool(family, lambda model: scenarios.visible_pairs(scenarios.heads_of(model)))


def additive(
    model: PreTrainedModel, heads: int = 1, batch: int = 2, lowest: float | None = None
) -> Tensor:
    return scenarios.additive(scenarios.visible_pairs(heads, batch), model.dtype, lowest)


@each_family()
def test_float_mask_of_the_user(family: Family) -> None:
    for options in ({}, {"batch": 1}, {"lowest": -math.inf}):
        check(family, scenarios.four_dimensional(lambda m, o=options: additive(m, **o)))


@each_family(without=MIXED_HEADS)
def test_float_mask_for_each_head(family: Family) -> None:
    check(family, scenarios.four_dimensional(lambda m: additive(m, scenarios.heads_of(m))))


@each_family()
def test_not_causal(family: Family) -> None:
    check(family, scenarios.bidirectional)


@each_family(without=DISCONTINUOUS)
def test_bfloat16_within_the_error_of_stock(family: Family) -> None:
    """At most twice the largest error of stock and a rounding step, and hardly more on average."""
    model = family.build().bfloat16()
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")  # the usual one has no float64 kernel
    float_mask = scenarios.four_dimensional(additive)
    left_padding = scenarios.padded(scenarios.LEFT_PADDING)
    for scenario in (scenarios.growing_cache, left_padding, float_mask):
        truth, stock = scenario(exact), scenario(model)
        ours = scenario(mla_ops.patch(model))
        mla_ops.unpatch(model)
        for name, true in truth.items():
            allowed = (stock[name].double() - true).abs()
            error = (ours[name].double() - true).abs()
            step = torch.finfo(torch.bfloat16).eps * true.abs().max()
            assert error.max() <= 2 * allowed.max() + step, (name, error.max(), allowed.max())
            assert error.square().mean() <= 2 * allowed.square().mean(), name


@each_family()
def test_autocast_within_the_error_of_stock(family: Family) -> None:
    """A float32 model under bf16 autocast: the op casts as linear and sdpa do."""
    model = family.build()
    ids = sample_input_ids()
    exact = forward_logits(model, ids)
    with torch.autocast("cpu", torch.bfloat16):
        stock = forward_logits(model, ids)
        mla_ops.patch(model)
        with op_calls() as calls:
            ours = forward_logits(model, ids)
    assert len(calls) == family.mla_layers
    assert ours.dtype == stock.dtype
    if family.name not in DISCONTINUOUS:
        allowed, error = (stock - exact).abs(), (ours - exact).abs()
        step = torch.finfo(torch.bfloat16).eps * exact.abs().max()
        assert error.max() <= 2 * allowed.max() + step
        assert error.square().mean() <= 2 * allowed.square().mean()


def caches(model: PreTrainedModel) -> list[Cache]:
    return [scenarios.dynamic_cache(model), scenarios.static_cache(model)]


@each_family()
def test_every_layer_reads_the_same_past(family: Family) -> None:
    """Case 43: a counter that layer 0 advances must not shift the layers behind it."""
    model = mla_ops.patch(family.build())
    ids = sample_input_ids(length=12)
    whole = forward(model, ids, output_hidden_states=True).hidden_states
    for cache in caches(model):
        parts = [
            forward(model, step, cache=cache, output_hidden_states=True).hidden_states
            for step in (ids[:, :7], *ids[:, 7:].split(1, dim=1))
        ]
        assert len(whole) > 2
        for layer, expected in enumerate(whole):
            actual = torch.cat([part[layer] for part in parts], dim=1)
            assert relative_error(actual, expected) < 1e-5, layer


@each_family()
def test_caches_hold_what_stock_caches_hold(family: Family) -> None:
    """Cases 43 and 55: latents and rotated keys, one head, as many tokens in each layer."""
    model = family.build()
    ids = sample_input_ids()
    stock, ours = caches(model), caches(model)
    for cache in stock:
        scenarios.in_steps(model, ids, cache)
    mla_ops.patch(model)
    for cache in ours:
        scenarios.in_steps(model, ids, cache)

    for mine, theirs in zip(ours, stock, strict=True):
        compared = 0
        for layer, expected in zip(mine.layers, theirs.layers, strict=True):
            if isinstance(getattr(layer, "keys", None), Tensor) and layer.keys.dim() == 4:
                assert layer.keys.shape[:2] == (2, 1)
                torch.testing.assert_close(layer.keys, expected.keys, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(layer.values, expected.values, rtol=1e-4, atol=1e-5)
                assert int(layer.get_seq_length()) == int(expected.get_seq_length())
                compared += 1
        assert compared in (family.mla_layers, family.mla_layers - 2)  # two may share latents


@each_family("deepseek_v3", "deepseek_v32_small_topk", "hy_v4", "mistral_large4")
def test_cropped_cache_goes_on_from_there(family: Family) -> None:
    """Case 44: latents can be cropped, as assisted generation does."""
    model = mla_ops.patch(family.build())
    ids = sample_input_ids()
    expected = forward_logits(model, ids)[:, 6:]
    for cache in caches(model):
        if not hasattr(cache.layers[0], "crop"):
            continue  # static layers of older transformers
        forward(model, torch.cat([ids[:, :6], ids[:, :4]], dim=1), cache=cache)
        cache.crop(-4)
        assert relative_error(forward_logits(model, ids[:, 6:], cache=cache), expected) < 1e-5


@each_family("deepseek_v3", "glm_moe_dsa")
def test_full_static_cache_is_an_error(family: Family) -> None:
    """Case 44: never a silent wrap around."""
    model = mla_ops.patch(family.build())
    cache = scenarios.static_cache(model, length=8)
    forward(model, sample_input_ids(length=8), cache=cache)
    with pytest.raises((IndexError, RuntimeError), match="index"):
        forward(model, sample_input_ids(length=1), cache=cache)


@each_family("deepseek_v2", "deepseek_v3_yarn", "hy_v4")
def test_runs_where_sdpa_has_no_kernel(family: Family) -> None:
    """Case 73: query and value heads differ in width, which the flash backend refuses."""
    model = family.build()
    ids = sample_input_ids()
    expected = forward_logits(model, ids)
    mla_ops.patch(model)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert relative_error(forward_logits(model, ids), expected) < 1e-5


@each_family("deepseek_v2", "deepseek_v3_yarn", "hy_v4", "dots3_note")
@pytest.mark.parametrize("length", [1, 12])
def test_scale_is_the_live_modules_own(family: Family, length: int) -> None:
    """Cases 38 and 39: nothing shows at one token, where the softmax is over one key."""
    model = mla_ops.patch(family.build())
    ids = sample_input_ids(length=length)
    before = forward_logits(model, ids)
    for _, module in attention_modules(model):
        module.scaling *= 1.1
    after = forward_logits(model, ids)
    mla_ops.unpatch(model)

    assert relative_error(after, forward_logits(model, ids)) < 1e-5
    follows = 0 if length == 1 and not family.sinks else 1e-3  # a sink is one more key
    assert (relative_error(after, before) > follows) == (follows > 0)


def masks_given(model: PreTrainedModel, run: Callable[[], Any]) -> set[str]:
    """How the op was told what to see."""
    with op_calls() as calls:
        run()
    return {name for call in calls for name in ("attn_mask", "kv_bounds") if call[name] is not None}


@each_family("deepseek_v2", "kimi_linear", "longcat_flash", "minicpm3")
def test_plain_masks_stay_small(family: Family) -> None:
    """A causal mask needs no tensor, padding on the left and a static cache two numbers a row."""
    model = mla_ops.patch(family.build())
    ids = sample_input_ids(batch=3)
    static = scenarios.static_cache(model)
    left, hole = scenarios.LEFT_PADDING, scenarios.HOLES

    assert masks_given(model, lambda: forward(model, ids)) == set()
    assert masks_given(model, lambda: forward(model, ids, attention_mask=left * 0 + 1)) == set()
    assert masks_given(model, lambda: forward(model, ids, attention_mask=left)) == {"kv_bounds"}
    assert masks_given(model, lambda: forward(model, ids, attention_mask=hole)) == {"attn_mask"}
    assert masks_given(model, lambda: forward(model, ids, cache=static)) == {"kv_bounds"}
    assert masks_given(model, lambda: forward(model, ids[:, :1], cache=static)) == {"kv_bounds"}


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # stock's MoE
@each_family("deepseek_v32_small_topk", "hy_v4_small_topk")
def test_vmap_over_rows(family: Family) -> None:
    """Also where the indexer's picks become a mask."""
    model = family.build()
    ids = sample_input_ids(3)[:, None]
    expected = torch.stack([forward_logits(model, row) for row in ids])
    mla_ops.patch(model)
    with torch.no_grad():
        actual = torch.vmap(lambda row: model(input_ids=row, use_cache=False).logits)(ids)
    assert relative_error(actual, expected) < 1e-5


def test_mask_of_integers_is_refused() -> None:
    """As stock refuses it; `int32` is also what bounds are made of."""
    model = mla_ops.patch(FAMILIES["deepseek_v3"].build())
    mask = torch.ones(2, 1, 11, 11, dtype=torch.int32).tril()
    with pytest.raises(mla_ops.InvalidInputError, match="attn_mask must be bool or floating"):
        forward_logits(model, sample_input_ids(), attention_mask=mask)
