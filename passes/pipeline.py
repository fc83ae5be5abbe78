"""The passes in their order, and the one way to run them."""

from __future__ import annotations

import difflib
import logging
import time
import warnings
from collections.abc import Callable, Iterable

from torch.export import ExportedProgram
from torch.fx import GraphModule

from mla_ops import env
from mla_ops.errors import InvalidInputError, RewriteError
from mla_ops.passes import fuse_attention, static_cache
from mla_ops.passes.report import RewriteReport, Site, table
from mla_ops.passes.rewriting import graphs_of

__all__ = ["PASSES", "check_names", "rewrite"]

_LOG = logging.getLogger("mla_ops.passes")

PASSES: dict[str, Callable[[GraphModule], list[Site]]] = {
    fuse_attention.NAME: fuse_attention.fuse_attention,
    static_cache.NAME: static_cache.bound_static_cache,
}
"""Every pass by name, in the order in which they run. Each changes the graph in place."""


def check_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return names of passes as a tuple.

    Args:
        names: passes to switch off.

    Raises:
        InvalidInputError: there is no pass of that name.
    """
    if isinstance(names, str):
        names = [names]
    chosen = tuple(names)
    unknown = [name for name in chosen if name not in PASSES]
    if unknown:
        raise InvalidInputError(
            f"disable must name passes among {', '.join(PASSES)}; got {', '.join(unknown)}"
        )
    return chosen


def rewrite(
    graph: GraphModule | ExportedProgram,
    *,
    disable: Iterable[str] = (),
    strict: bool = False,
    diff: bool = False,
) -> RewriteReport:
    """Put the op into a graph wherever the graph computes multi-head latent attention.

    Running it again changes nothing. A graph on which no pass acts is not touched.

    Args:
        graph: a Dynamo graph, as a backend of `torch.compile` gets it, or an `ExportedProgram`,
            before or after `run_decompositions({})`; changed in place, with its submodules.
        disable: names of passes that do not run, besides those of `MLA_OPS_DISABLE_PASSES`.
        strict: raise when an attention that looks like latent attention was left alone.
        diff: keep what changed as text, in the report's `diff`.

    Returns:
        What was rewritten, and why the rest was not.

    Raises:
        InvalidInputError: `disable` names no pass, or `graph` is no graph.
        RewriteError: under `strict`, with the table; the graph is rewritten all the same.

    Warns:
        UserWarning: latent attention was left alone, and `strict` is off.

    Example:
        >>> import torch
        >>> from mla_ops.passes import rewrite
        >>> class Plain(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x + 1
        >>> program = torch.export.export(Plain(), (torch.zeros(2),))
        >>> print(rewrite(program))
        no attention in the graph
    """
    if isinstance(graph, ExportedProgram):  # its signature names the nodes that it returns
        gm = graph.graph_module
        with gm._set_replace_hook(graph.graph_signature.get_replace_hook()):
            return rewrite(gm, disable=disable, strict=strict, diff=diff)
    gm = graph
    if not isinstance(gm, GraphModule):
        raise InvalidInputError(
            f"graph must be a GraphModule or an ExportedProgram, got {type(graph).__name__}"
        )
    disabled = {*check_names(disable), *check_names(env.disabled_passes())}
    report = RewriteReport(already_fused=_count_ops(gm), nodes_before=_size(gm))
    before = _lines(gm) if diff else []
    for name, run in PASSES.items():
        if name in disabled:
            continue
        start = time.perf_counter()
        sites = run(gm)
        report.seconds[name] = time.perf_counter() - start
        report.sites += sites
    if any(site.matched for site in report.sites):
        for module in graphs_of(gm):
            module.graph.lint()
            module.recompile()
    report.nodes_after = _size(gm)
    if diff:
        report.diff = "\n".join(
            difflib.unified_diff(before, _lines(gm), "before", "after", lineterm="")
        )
    _tell(report, disabled, strict)
    return report


def _tell(report: RewriteReport, disabled: set[str], strict: bool) -> None:
    """Log one line, and make what was missed visible."""
    _LOG.info(
        "%d attentions fused, %d given bounds, %d left alone; %d -> %d nodes; off: %s",
        len(report.matched),
        report.count(static_cache.NAME),
        len(report.missed),
        report.nodes_before,
        report.nodes_after,
        ", ".join(sorted(disabled)) or "none",
    )
    if not report.missed:
        return
    total = len(report.missed) + len(report.matched)
    message = (
        f"{len(report.missed)} of {total} latent attentions of this graph were not rewritten "
        f"and run as they are:\n{table(report.missed)}"
    )
    if strict:
        raise RewriteError(message)
    warnings.warn(message, stacklevel=3)


def _count_ops(gm: GraphModule) -> int:
    target = fuse_attention.ATTENTION
    return sum(node.target is target for module in graphs_of(gm) for node in module.graph.nodes)


def _size(gm: GraphModule) -> int:
    return sum(len(module.graph.nodes) for module in graphs_of(gm))


def _lines(gm: GraphModule) -> list[str]:
    return [
        text
        for module in graphs_of(gm)
        for node in module.graph.nodes
        if (text := node.format_node()) is not None
    ]
