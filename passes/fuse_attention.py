"""Rewrite multi-head latent attention into the op.

Keys and values are no longer expanded from the latent for the whole context: the op reads the
latent as the cache holds it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from mla_ops import ops as _registers_the_ops  # noqa: F401
from mla_ops.passes.match import Match, find_attention
from mla_ops.passes.nodes import sizes, tensor_of
from mla_ops.passes.report import Site, draw
from mla_ops.passes.rewriting import erase_unused, graphs_of, insert, read_sizes_elsewhere

__all__ = ["ATTENTION", "NAME", "fuse_attention"]

NAME = "fuse_attention"
"""The name by which the pass is switched."""

ATTENTION = torch.ops.mla_ops.mla_attention.default
"""The op that the pass puts in; its arguments are in the order of its schema."""


def fuse_attention(gm: GraphModule) -> list[Site]:
    """Replace every multi-head latent attention of a graph by `mla_ops.mla_attention`.

    Args:
        gm: changed in place, with the graphs of its submodules.

    Returns:
        One `Site` for each attention, rewritten or left alone.
    """
    return [
        _replace(module.graph, found)
        if isinstance(found, Match)
        else Site.left_alone(NAME, found.node, found.reason, found.looks_like_mla)
        for module in graphs_of(gm)
        for found in find_attention(module.graph)
    ]


def _replace(graph: Graph, match: Match) -> Site:
    """Put the op where the attention was: behind the cache writes, which no edge leads from."""
    node = match.node
    inputs = (match.query, match.latent, match.k_pe, match.weight, match.attn_mask, match.sinks)
    before = draw((*inputs, *match.chain))
    first = node.prev
    with graph.inserting_before(node):
        kv_c = _rows(graph, match, match.latent)
        k_pe = _rows(graph, match, match.k_pe)
        if tensor_of(k_pe).dtype != tensor_of(kv_c).dtype:  # the copy into the key cast it
            k_pe = insert(graph, node, torch.ops.aten.to.dtype, k_pe, tensor_of(kv_c).dtype)
        arguments = (match.query, kv_c, k_pe, match.weight, match.attn_mask, None, match.sinks)
        options = (match.softmax_scale, match.is_causal, None)
        out, lse = _fake_results(match)
        result = insert(graph, node, ATTENTION, *arguments, *options, value=(out, lse))
        result = insert(graph, node, operator.getitem, result, 0, value=out)
    added = _between(first, node)
    site = Site.rewritten(NAME, node, before, draw((*inputs, *added)), len(match.chain), len(added))
    node.replace_all_uses_with(result)
    read_sizes_elsewhere(graph, match.chain, (match.latent, match.k_pe, match.query))
    erase_unused(graph, match.chain)
    return site


def _between(first: Node, last: Node) -> list[Node]:
    """Return the nodes after one and before another."""
    nodes, node = [], first.next
    while node is not last:
        nodes.append(node)
        node = node.next
    return nodes


def _rows(graph: Graph, match: Match, node: Node) -> Node:
    """Return `[B, T, ...]` rows of a latent that has a dimension for its one head, and cut them.

    ATen calls stand well in a Dynamo graph, too, and every compile cache knows them.
    """
    aten = torch.ops.aten
    if len(sizes(node)) == 4:
        node = insert(graph, match.node, aten.select.int, node, 1, 0)
    if match.prefix is not None:
        cut = (match.prefix.start or 0, match.prefix.stop)
        node = insert(graph, match.node, aten.slice.Tensor, node, 1, *cut)
    return node


def _fake_results(match: Match) -> tuple[Any, Any]:
    """Return what the op's fake rule would, without the guards that its checks might add."""
    out = tensor_of(match.node)
    with out.fake_mode:
        statistics = torch.float64 if out.dtype == torch.float64 else torch.float32
        return out.new_empty(out.shape), out.new_empty(out.shape[:3], dtype=statistics)
