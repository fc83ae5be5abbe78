"""The passes on untouched models of transformers: every family, every cache, the same numbers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
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
    one_thread,
    relative_error,
    sample_input_ids,
    scenarios,
)
from families.scenarios import Scenario
from torch import Tensor, nn
from torch.fx import GraphModule
from transformers import PreTrainedModel

from mla_ops.passes import RewriteReport, explain, make_backend
from mla_ops.passes.fuse_attention import ATTENTION

STEPS = 20
# One of each structure; `-m slow` runs the others.
FAST = ("deepseek_v2", "hy_v4", "mistral_large4_shared_kv")
# Stock breaks the graph of these, between expansion and attention in the second.
BREAKING = [name for name, family in FAMILIES.items() if not family.fullgraph_ok]
SPLIT = ("glm5_next", "glm5_next_small_topk")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


class Compiled(nn.Module):
    """A stock model behind the passes, with the reports of its graphs."""

    def __init__(self, model: PreTrainedModel, *, fullgraph: bool = True, **options: Any) -> None:
        super().__init__()
        self.reports: list[RewriteReport] = []
        self.model = model
        self.config = model.config
        backend = make_backend("eager", on_report=self.reports.append, **options)
        self.whole = torch.compile(model, backend=backend, fullgraph=fullgraph)

    def forward(self, **kwargs: Any) -> Any:
        return self.whole(**kwargs)

    def matched(self) -> list[int]:
        return [len(report.matched) for report in self.reports]

    def bounded(self) -> list[int]:
        return [report.count("bound_static_cache") for report in self.reports]


def check(family: Family, scenario: Scenario, implementation: str | None = None) -> Compiled:
    """Run stock eagerly and behind the passes; every MLA layer of every graph is rewritten.

    A latent attention that is left alone warns, and a warning fails the test.
    """
    model = family.build()
    model.set_attn_implementation(implementation or family.stock_impl)
    expected = scenario(model)
    compiled = Compiled(model, fullgraph=family.fullgraph_ok)
    actual = scenario(compiled)
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    assert {name: error for name, error in errors.items() if not error < 1e-5} == {}
    if family.name not in BREAKING:
        assert set(compiled.matched()) == {family.mla_layers}
    assert sum(compiled.matched()) % family.mla_layers == 0
    assert sum(compiled.matched()) > 0
    return compiled


def static(model: PreTrainedModel) -> dict[str, Tensor]:
    """Prefill, several tokens, single tokens, in a cache that is larger than they are."""
    cache = scenarios.static_cache(model)
    return {"steps": scenarios.in_steps(model, sample_input_ids(2, 11), cache)}


@each_family(without=SPLIT)
def test_no_cache(family: Family) -> None:
    check(family, scenarios.no_cache)


@each_family(without=SPLIT, fast=("minicpm3", "hy_v4"))
def test_growing_cache(family: Family) -> None:
    check(family, scenarios.growing_cache)


@each_family(without=SPLIT, fast=FAST)
def test_static_cache_is_read_as_far_as_it_is_filled(family: Family) -> None:
    compiled = check(family, static)
    decode = compiled.bounded()[-1]
    if family.name in BREAKING:
        return
    # A sliding layer does not write by index_copy_, and its mask is no plain causal one.
    sliding = sum(scenarios.static_cache(compiled.model).is_sliding)
    assert decode == family.mla_layers - sliding


@each_family(without=SPLIT, fast=("deepseek_v3",))
@pytest.mark.parametrize("scenario", [scenarios.no_cache, scenarios.growing_cache, static])
def test_eager_form(family: Family, scenario: Scenario) -> None:
    check(family, scenario, "eager")


@each_family(*SPLIT, fast=("glm5_next",))
def test_a_graph_break_inside_the_attention_is_reported(family: Family) -> None:
    """Stock breaks between the expansion and the attention; the reason is in the report."""
    model, ids = family.build(), sample_input_ids()
    expected = forward_logits(model, ids)
    compiled = Compiled(model, fullgraph=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert relative_error(forward_logits(compiled, ids), expected) == 0.0
    missed = [site for report in compiled.reports for site in report.missed]
    # The piece of a layer up to the break is compiled once for all layers.
    assert len(missed) == 1
    assert {site.reason for site in missed} == {
        "the expanded key leaves the graph: a graph break lies in front of its attention"
    }
    assert sum("latent attentions of this graph" in str(w.message) for w in caught) == len(missed)


@each_family(without=SPLIT, fast=("deepseek_v3",))
@torch._dynamo.config.patch(recompile_limit=32)  # the scenario has many shapes
def test_left_padding(family: Family) -> None:
    check(family, scenarios.padded(scenarios.LEFT_PADDING))


def decode(family: Family, cache_of: Any) -> Compiled:
    """Prefill eagerly, then compare single tokens of stock with those behind the passes."""
    model = family.build()
    compiled = Compiled(model)
    caches = [cache_of(model) for _ in range(2)]
    for cache in caches:
        forward(model, sample_input_ids(), cache=cache)
    for step in range(STEPS):
        token = sample_input_ids(length=1, seed=step)
        actual, expected = (
            forward_logits(run, token, cache=cache)
            for run, cache in zip((compiled, model), caches, strict=True)
        )
        assert relative_error(actual, expected) < 1e-5
    return compiled


@each_family(without=(*SPLIT, *BREAKING), fast=("deepseek_v3",))
def test_decode_with_a_growing_cache_is_two_graphs(family: Family) -> None:
    # Case 49.
    compiled = decode(family, scenarios.dynamic_cache)
    assert compiled.matched() == [family.mla_layers] * 2


@each_family(
    without=(*SPLIT, *BREAKING, "dots3_note", "dots3_note_small_topk"), fast=("deepseek_v3",)
)
def test_decode_with_a_static_cache_is_one_graph(family: Family) -> None:
    compiled = decode(family, lambda model: scenarios.static_cache(model, 40))
    assert compiled.matched() == [family.mla_layers]


def test_only_batch_and_lengths_are_dynamic() -> None:
    """Case 50: widths and heads are numbers in the graph, whatever else varies."""
    family, ops = FAMILIES["deepseek_v3"], []

    def keep(gm: GraphModule, _: Any) -> Any:
        ops.extend(node for node in gm.graph.nodes if node.target is ATTENTION)
        return gm.forward

    model = family.build()
    compiled = torch.compile(model, backend=make_backend(keep), fullgraph=True)
    cache = scenarios.dynamic_cache(model)
    forward(model, sample_input_ids(), cache=cache)
    for step in range(3):
        forward(compiled, sample_input_ids(length=1, seed=step), cache=cache)
    query, kv_c, k_pe, w_kv_b = (node.meta["example_value"] for node in ops[-1].args[:4])
    assert not isinstance(kv_c.shape[1], int)  # the context grows
    widths = (*query.shape[1:], kv_c.shape[2], k_pe.shape[2], *w_kv_b.shape)
    assert all(isinstance(width, int) for width in widths)


def test_causal_mask_of_a_static_cache_is_not_built() -> None:
    """One pair of bounds serves all layers, and nothing of the size of the cache is left."""
    compiled = decode(FAMILIES["deepseek_v3"], lambda model: scenarios.static_cache(model, 40))
    (report,) = compiled.reports
    sites = [site for site in report.sites if site.pass_name == "bound_static_cache"]
    assert [site.nodes_before > 5 for site in sites] == [False, True]  # with the last reader
    masks = [
        {node.name for node in site.before} - {node.name for node in site.after} for site in sites
    ]
    assert all(len(gone) >= 1 for gone in masks)  # the op reads its mask no more


@pytest.mark.parametrize("poison", [float("nan"), 1e4])
def test_unfilled_slots_are_not_read(poison: float) -> None:
    family = FAMILIES["deepseek_v3"]

    def run(model: Any) -> dict[str, Tensor]:
        cache, ids = scenarios.static_cache(model), sample_input_ids(2, 9)
        value = poison if isinstance(model, Compiled) else 0.0
        steps = scenarios.in_steps(
            model,
            ids,
            cache,
            steps=(6, 1, 1, 1),
            between=lambda cache: scenarios.poison_unfilled(cache, value),
        )
        return {"steps": steps}

    check(family, run)


def test_switched_off_by_name_restores_the_bits_of_stock() -> None:
    model, ids = FAMILIES["deepseek_v3"].build(), sample_input_ids()
    expected = forward_logits(model, ids)
    off = Compiled(model, disable=["fuse_attention"])
    assert torch.equal(forward_logits(off, ids), expected)
    assert off.matched() == [0]
    assert not torch.equal(forward_logits(Compiled(model), ids), expected)


def test_switch_and_passes_together_are_one_op() -> None:
    import mla_ops

    family = FAMILIES["deepseek_v3"]
    model = mla_ops.patch(family.build())
    compiled = Compiled(model)
    forward_logits(compiled, sample_input_ids())
    (report,) = compiled.reports
    assert (report.already_fused, report.sites) == (family.mla_layers, [])


def test_explain_shows_table_and_picture(tmp_path: Any) -> None:
    model = FAMILIES["deepseek_v3"].build()
    explanation = explain(model, input_ids=sample_input_ids(), use_cache=False)
    text = str(explanation)
    assert "model.layers.0.self_attn" in text
    assert text.splitlines()[-1] == "1 graph: 2 fused, 0 missed"
    page = explanation.save(tmp_path / "graph.html").read_text(encoding="utf-8")
    assert page.count("<td>yes</td>") == 2
    assert "mla_attention" in page
    svg = explanation.to_svg()
    assert svg.startswith("<svg")
    assert svg.count("<rect") == 1 + sum(
        len(part) for part in (explanation.sites[0].before, explanation.sites[0].after)
    )


def test_explain_draws_nothing_where_nothing_was_rewritten() -> None:
    explanation = explain(nn.Linear(2, 2), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="nothing was rewritten, so there is nothing to draw"):
        explanation.to_svg()
