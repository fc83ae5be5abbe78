"""What the passes did to a graph: a table, and a picture of one rewritten place."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from mla_ops.passes.nodes import kind, sizes

__all__ = ["DrawnNode", "RewriteReport", "Site", "draw"]


@dataclass(frozen=True)
class DrawnNode:
    """A node as a picture shows it."""

    name: str
    label: str
    inputs: tuple[str, ...]


def draw(nodes: Iterable[Node | None]) -> tuple[DrawnNode, ...]:
    """Keep what a picture needs of some nodes, in graph order; they may be erased afterwards."""
    kept = sorted({node for node in nodes if node is not None})
    drawn = []
    for node in kept:
        inside = tuple(used.name for used in node.all_input_nodes if used in kept)
        shape = "×".join(map(str, sizes(node)))
        drawn.append(DrawnNode(node.name, f"{_title(node)} {shape}".strip(), inside))
    return tuple(drawn)


def _title(node: Node) -> str:
    if node.op in ("placeholder", "get_attr"):
        name = str(node.target).strip("_").removeprefix("L_").rpartition("_modules_")[2]
        return name.removeprefix("kwargs_").replace("_parameters_", ".")
    if node.op == "call_method":
        return str(node.target)
    step = kind(node)
    return node.name if step in (None, "item", "index") else str(step)


@dataclass(frozen=True)
class Site:
    """One place that a pass looked at.

    Attributes:
        pass_name: the pass.
        path: the module that the place belongs to, empty when the graph does not tell.
        node: name of the node that the pass anchored on.
        matched: whether it was rewritten.
        reason: why not; empty where it was.
        expected: whether a user would expect it to be rewritten.
        nodes_before: nodes that the rewrite made superfluous.
        nodes_after: nodes that it put in.
        before: those nodes and their inputs, to be drawn.
        after: the new ones.
    """

    pass_name: str
    path: str
    node: str
    matched: bool
    reason: str = ""
    expected: bool = True
    nodes_before: int = 0
    nodes_after: int = 0
    before: tuple[DrawnNode, ...] = ()
    after: tuple[DrawnNode, ...] = ()

    @classmethod
    def left_alone(cls, pass_name: str, node: Node, reason: str, expected: bool) -> Site:
        """Describe a place that stays as it is."""
        return cls(pass_name, _path(node), node.name, False, reason, expected)

    @classmethod
    def rewritten(
        cls,
        pass_name: str,
        node: Node,
        before: tuple[DrawnNode, ...],
        after: tuple[DrawnNode, ...],
        nodes_before: int,
        nodes_after: int,
    ) -> Site:
        """Describe a place that was rewritten, while its nodes are still there."""
        return cls(
            pass_name,
            _path(node),
            node.name,
            matched=True,
            nodes_before=nodes_before,
            nodes_after=nodes_after,
            before=before,
            after=after,
        )


def _path(node: Node) -> str:
    """Return the path of the module that a node belongs to, as `named_modules` gives it."""
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    return path.replace("L['self'].", "").replace("L['self']", "").replace("_modules.", "")


@dataclass
class RewriteReport:
    """What one run of the passes did to one graph.

    Attributes:
        sites: every attention, in graph order, and every place that a later pass looked at.
        already_fused: ops that were in the graph before, put there by an earlier run or by
            `attn_implementation="mla_ops"`.
        nodes_before: size of the graph, submodules included.
        nodes_after: and afterwards.
        seconds: time in each pass, by name.
        diff: what changed, line by line, where it was asked for.
    """

    sites: list[Site] = field(default_factory=list)
    already_fused: int = 0
    nodes_before: int = 0
    nodes_after: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    diff: str = ""

    @property
    def matched(self) -> list[Site]:
        """The attentions that the op replaced."""
        return [s for s in self.sites if s.matched and s.pass_name == "fuse_attention"]

    @property
    def missed(self) -> list[Site]:
        """The attentions that look like latent attention and were left alone."""
        return [s for s in self.sites if not s.matched and s.expected]

    def count(self, pass_name: str) -> int:
        """Return how many places a pass rewrote."""
        return sum(s.matched for s in self.sites if s.pass_name == pass_name)

    def __str__(self) -> str:
        """Return the table: site, matched, reason, nodes before and after."""
        return table(self.sites)


HEADER = ("site", "pass", "matched", "reason", "nodes")


def rows_of(sites: Sequence[Site]) -> list[tuple[str, ...]]:
    """Return the table's rows as text."""
    return [
        (
            site.path or site.node,
            site.pass_name,
            "yes" if site.matched else "no",
            site.reason or "-",
            f"{site.nodes_before} -> {site.nodes_after}" if site.matched else "-",
        )
        for site in sites
    ]


def table(sites: Sequence[Site]) -> str:
    """Return sites as an aligned table."""
    if not sites:
        return "no attention in the graph"
    rows = [HEADER, *rows_of(sites)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


# --- the picture ---

_BOX, _ROW, _WIDTH = (176, 28), 52, 192


def to_svg(site: Site) -> str:
    """Draw a rewritten place, before and after side by side, as an SVG document.

    Args:
        site: one whose `matched` is true.
    """
    left, width, height = _half(site.before, 20, f"before: {site.nodes_before} nodes")
    right, more, other = _half(site.after, width + 40, f"after: {site.nodes_after} nodes")
    total, tall = width + more + 60, max(height, other) + 20
    title = html.escape(site.path or site.node)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {tall}" width="{total}" '
        f'height="{tall}" font-family="sans-serif" font-size="10.5"><title>{title}</title>'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#667"/></marker></defs>'
        f'<rect width="{total}" height="{tall}" fill="#fff"/>{left}{right}</svg>'
    )


def _half(nodes: tuple[DrawnNode, ...], x: int, caption: str) -> tuple[str, int, int]:
    """Draw one graph in layers; return it with its width and height."""
    depth: dict[str, int] = {}
    for node in nodes:
        depth[node.name] = 1 + max((depth[name] for name in node.inputs), default=-1)
    layers: dict[int, list[DrawnNode]] = {}
    for node in nodes:
        layers.setdefault(depth[node.name], []).append(node)
    width = _WIDTH * max(map(len, layers.values()))
    place = {
        node.name: (x + (width - _WIDTH * len(row)) // 2 + i * _WIDTH, 50 + level * _ROW)
        for level, row in layers.items()
        for i, node in enumerate(row)
    }
    half = _BOX[0] // 2
    lines = [
        f'<line x1="{place[name][0] + half}" y1="{place[name][1] + _BOX[1]}" '
        f'x2="{place[node.name][0] + half}" y2="{place[node.name][1]}" stroke="#667" '
        'marker-end="url(#tip)"/>'
        for node in nodes
        for name in node.inputs
    ]
    boxes = [
        f'<rect x="{place[n.name][0]}" y="{place[n.name][1]}" width="{_BOX[0]}" '
        f'height="{_BOX[1]}" rx="5" fill="{_colour(n)}" stroke="#445"/>'
        f'<text x="{place[n.name][0] + half}" y="{place[n.name][1] + 19}" '
        f'text-anchor="middle">{html.escape(n.label[:34])}</text>'
        for n in nodes
    ]
    caption = (
        f'<text x="{x}" y="30" font-size="15" font-weight="bold">{html.escape(caption)}</text>'
    )
    return caption + "".join(lines + boxes), width, 50 + _ROW * len(layers)


def _colour(node: DrawnNode) -> str:
    if not node.inputs:
        return "#e8eef7"
    return "#cfeccf" if "mla_attention" in node.label else "#fff7e0"
