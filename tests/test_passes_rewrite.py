"""The rewrite as a whole: counts, reports, switches, and graphs of torch.export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx import GraphModule
from toys import (
    B,
    Cat,
    Eager,
    H,
    Outer,
    Prefix,
    S,
    Sinks,
    T,
    Toy,
    V,
    check,
    compiled,
    inputs,
    with_bias,
)

from mla_ops.errors import InvalidInputError, RewriteError
from mla_ops.passes import make_backend, rewrite
from mla_ops.passes.fuse_attention import ATTENTION
from mla_ops.passes.nodes import kind


def test_strict_raises_with_the_table() -> None:
    # Case 56: no match is never silent.
    with pytest.raises(BackendCompilerFailed, match="kv_b_proj has a bias") as caught:
        compiled(with_bias(), *inputs(), strict=True)
    assert isinstance(caught.value.inner_exception, RewriteError)


def test_second_run_changes_nothing() -> None:
    _, gm = check(Toy(), *inputs())
    before = [n.format_node() for n in gm.graph.nodes]
    report = rewrite(gm)
    assert (report.already_fused, report.sites) == (1, [])
    assert [n.format_node() for n in gm.graph.nodes] == before


def test_report_counts_nodes_and_shows_the_difference() -> None:
    # Case 60.
    report, gm = check(Toy(), *inputs())
    (site,) = report.matched
    assert report.nodes_after == len(gm.graph.nodes)
    assert report.nodes_before - report.nodes_after == site.nodes_before - site.nodes_after
    assert f"{site.nodes_before} -> {site.nodes_after}" in str(report)
    assert set(report.seconds) == {"fuse_attention", "bound_static_cache"}

    graphs: list[GraphModule] = []
    torch._dynamo.reset()
    torch.compile(Toy(), backend=lambda gm, _: graphs.append(gm) or gm.forward)(*inputs())
    diff = rewrite(graphs[0], diff=True).diff
    assert any(
        line.startswith("-") and "scaled_dot_product_attention" in line
        for line in diff.splitlines()
    )
    assert any(
        line.startswith("+") and "mla_ops.mla_attention" in line for line in diff.splitlines()
    )


def test_new_nodes_carry_metadata() -> None:
    _, gm = check(Outer(Prefix()), *inputs())
    added = [n for n in gm.graph.nodes if "aten" in str(n.target) or n.target is ATTENTION]
    assert len(added) == 5
    for node in added:
        assert isinstance(node.meta["example_value"], (Tensor, tuple))
        assert node.meta["nn_module_stack"]
    out = next(n for n in gm.graph.nodes if n.target is ATTENTION).meta["example_value"][0]
    assert out.shape == (B, H, S, V)


@pytest.mark.parametrize("name", ["fuse_attention", "bound_static_cache"])
def test_passes_are_switched_off_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, report, _ = compiled(Toy(), *inputs(), disable=[name])
    assert len(report.matched) == (name != "fuse_attention")
    assert name not in report.seconds
    monkeypatch.setenv("MLA_OPS_DISABLE_PASSES", f" {name}, ")
    _, report, _ = compiled(Toy(), *inputs())
    assert name not in report.seconds


def test_wrong_names_and_graphs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInputError, match="disable must name passes among fuse_attention"):
        make_backend(disable=["fuse"])
    with pytest.raises(InvalidInputError, match="got fuse"):
        rewrite(torch.fx.symbolic_trace(torch.nn.Linear(1, 1)), disable="fuse")
    with pytest.raises(InvalidInputError, match="must be a GraphModule or an ExportedProgram, got"):
        rewrite(torch.nn.Linear(1, 1))
    monkeypatch.setenv("MLA_OPS_DISABLE_PASSES", "nothing")
    with pytest.raises(InvalidInputError, match="got nothing"):
        rewrite(torch.fx.symbolic_trace(torch.nn.Linear(1, 1)))


def test_graph_without_attention_is_not_touched() -> None:
    _, report, _ = compiled(torch.nn.Linear(2, 2), torch.ones(1, 2))
    assert report.sites == []
    assert report.nodes_before == report.nodes_after
    assert str(report) == "no attention in the graph"


def test_missing_metadata_is_a_reason_and_no_crash() -> None:
    graphs: list[GraphModule] = []
    torch._dynamo.reset()
    torch.compile(Toy(), backend=lambda gm, _: graphs.append(gm) or gm.forward)(*inputs())
    for node in graphs[0].graph.nodes:
        node.meta.clear()
    report = rewrite(graphs[0])
    assert report.matched == []
    assert len(report.sites) == 1


# --- bounds over a static cache ---


class Static(Toy):
    """Attention over a cache of a fixed length, with a causal mask that the graph makes itself."""

    change = staticmethod(lambda mask: mask)

    def forward(self, query: Tensor, latent: Tensor, k_pe: Tensor, filled: Tensor) -> Tensor:
        new = query.shape[2]
        position = torch.arange(new) + filled
        filled.add_(new)
        slots = torch.arange(latent.shape[2])
        mask = slots[None, None, None, :] <= position[None, None, :, None]
        return super().forward(query, latent, k_pe, self.change(mask))


def bounded(change: Callable[[Tensor], Tensor], **options: Any) -> tuple[int, Any]:
    """How often bounds were put in, and the mask that the op still gets; the result is right."""
    module = Static()
    module.change = change
    query, latent, k_pe = inputs(s=2, t=9)
    expected = module(query, latent, k_pe, torch.tensor(4))
    torch._dynamo.reset()
    filled = torch.tensor(4)
    out, report, gm = compiled(module, query, latent, k_pe, filled, **options)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    assert filled == 6
    (op,) = (node for node in gm.graph.nodes if node.target is ATTENTION)
    return report.count("bound_static_cache"), op.args[4]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda mask: mask,
        lambda mask: mask.expand(B, -1, -1, -1).bool(),
        lambda mask: torch.where(mask, 0.0, torch.finfo(torch.float32).min),
        lambda mask: torch.where(mask, torch.zeros(()), -float("inf")),
    ],
    ids=["bool", "expanded", "additive", "infinite"],
)
def test_a_causal_mask_of_the_graph_becomes_bounds(change: Any, dynamic: bool) -> None:
    assert bounded(change, dynamic=dynamic) == (1, None)


def test_a_mask_that_hides_more_stays_beside_the_bounds() -> None:
    hidden = torch.ones(1, 1, 1, 9, dtype=torch.bool)
    hidden[..., 2] = False
    count, mask = bounded(lambda mask: mask & hidden)
    assert count == 1
    assert mask is not None


def shown(mask: Tensor) -> Tensor:
    """Changed in place, where no edge of the graph says so."""
    mask.logical_or_(torch.ones((), dtype=torch.bool))
    return mask


@pytest.mark.parametrize(
    "change",
    [
        lambda mask: mask.float(),  # adds 1 to what is visible, and hides nothing
        lambda mask: ~mask,
        shown,
        lambda mask: torch.where(mask, 1.0, -float("inf")),
        lambda mask: torch.where(mask, 0.0, -3.0),
        lambda mask: torch.where(mask, -float("inf"), 0.0),
    ],
    ids=["float", "inverted", "in place", "shifted", "soft", "swapped"],
)
def test_another_mask_gets_no_bounds(change: Any) -> None:
    count, mask = bounded(change)
    assert count == 0
    assert mask is not None


# --- graphs of torch.export ---


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own loading
@pytest.mark.parametrize("module", [Toy, Eager, Cat, Prefix, Sinks])
@pytest.mark.parametrize("functional", [False, True])
def test_exported_graphs(module: type[Toy], functional: bool, tmp_path: Path) -> None:
    # Case 57: graphs with mutation and without; case 52: batch and length are dynamic.
    toy, args = module(), inputs()
    batch, s, t = (torch.export.Dim(name, min=1, max=64) for name in ("batch", "s", "t"))
    shapes = ({0: batch, 2: s}, {0: batch, 2: t}, {0: batch, 2: t})
    if module is Prefix:
        shapes = None
    program = torch.export.export(toy, args, dynamic_shapes=shapes)
    if functional:
        program = program.run_decompositions({})
    report = rewrite(program)
    assert (len(report.matched), report.missed) == (1, [])
    program.validate() if hasattr(program, "validate") else program._validate()
    torch.export.save(program, tmp_path / "toy.pt2")
    loaded = torch.export.load(tmp_path / "toy.pt2").module()
    for sizes in ((S, T),) if module is Prefix else ((S, T), (1, 9)):
        args = inputs(*sizes)
        torch.testing.assert_close(loaded(*args), toy(*args), rtol=1e-5, atol=1e-6)
    assert not {"linear", "slice_scatter"} & set(map(kind, program.graph.nodes))


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own copying
@pytest.mark.parametrize("functional", [False, True])
def test_exported_graph_without_a_rotary_part(functional: bool) -> None:
    """The slice that takes the whole key is an alias there."""
    toy, args = Toy(), inputs(r=0)
    program = torch.export.export(toy, args)
    if functional:
        program = program.run_decompositions({})
    report = rewrite(program)
    assert (len(report.matched), report.missed) == (1, [])
    torch.testing.assert_close(program.module()(*args), toy(*args), rtol=1e-5, atol=1e-6)
    assert not {"linear", "new_empty", "copy"} & set(map(kind, program.graph.nodes))
