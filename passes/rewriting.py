"""What every rewrite of a graph needs: new nodes with their metadata, removal of dead chains."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from mla_ops.passes.nodes import (
    base_of,
    is_mutation,
    kind,
    same_size,
    sizes,
    tensor_of,
    value_key,
)

__all__ = ["erase_unused", "graphs_of", "insert", "read_sizes_elsewhere"]

_KEPT_META = ("nn_module_stack", "stack_trace", "source_fn_stack", "torch_fn", "seq_nr")


def graphs_of(gm: GraphModule) -> list[GraphModule]:
    """Return a graph module and those inside it: checkpointed and compiled regions."""
    return [module for module in gm.modules() if isinstance(module, GraphModule)]


def insert(
    graph: Graph, like: Node, target: Callable[..., Any], *args: Any, value: Any = None
) -> Node:
    """Add a function call at the graph's insertion point, with metadata.

    Args:
        graph: with its insertion point set.
        like: the node whose place in the model the new one takes.
        target: the function.
        args: its arguments.
        value: the fake result; computed from the arguments' fake values when it is None.
    """
    node = graph.call_function(target, args)
    node.meta = {key: like.meta[key] for key in _KEPT_META if key in like.meta}
    node.meta[value_key(like)] = _fake(target, args) if value is None else value
    return node


def _fake(target: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run a function on the fake values of its arguments."""
    values = map_arg(args, lambda node: node.meta.get("example_value", node.meta.get("val")))
    fakes = [v for v in values if isinstance(v, FakeTensor)]
    with fakes[0].fake_mode if fakes else contextlib.nullcontext():
        return target(*values)


def read_sizes_elsewhere(graph: Graph, nodes: Iterable[Node], sources: Iterable[Node]) -> None:
    """Take sizes that the graph asks of some nodes from others, which stay.

    Args:
        graph: the graph.
        nodes: those that are to go; a mask may be cut to the length of the key, say.
        sources: tensors in front of them, among which the same sizes are found.
    """
    for asked in [user for node in nodes for user in node.users if kind(user) == "size"]:
        readers = [asked] if len(asked.args) > 1 else [u for u in asked.users if kind(u) == "item"]
        for reader in readers:
            _replace_size(graph, reader, sources)
        if not asked.users:
            graph.erase_node(asked)


def _replace_size(graph: Graph, reader: Node, sources: Iterable[Node]) -> None:
    """Replace one size by the same of a source."""
    wanted = tensor_of(reader)
    same = (
        (source, dim)
        for source in sources
        if source < reader
        for dim, size in enumerate(sizes(source))
        if same_size(size, wanted)
    )
    found = next(same, None)
    if reader.users and found is not None:
        with graph.inserting_before(reader):
            size = insert(graph, reader, torch.ops.aten.sym_size.int, *found, value=wanted)
        reader.replace_all_uses_with(size)
    if not reader.users:
        graph.erase_node(reader)


def erase_unused(graph: Graph, nodes: Iterable[Node]) -> int:
    """Erase those of the nodes that nothing else uses.

    A Dynamo graph may not be cleaned as a whole: its cache writes have no users. Here a write goes
    only together with the buffer that it writes into.

    Args:
        graph: the graph.
        nodes: candidates.

    Returns:
        How many were erased.
    """
    doomed = set(nodes)
    # What exported graphs assert of a candidate, and the other results of one with several.
    loose = {user for node in doomed for user in node.users if not user.users}
    doomed |= {user for user in loose if kind(user) in ("assert", "item")}
    while kept := {node for node in doomed if not _may_go(node, doomed)}:
        doomed -= kept
    for node in sorted(doomed, reverse=True):
        graph.erase_node(node)
    return len(doomed)


def _may_go(node: Node, doomed: set[Node]) -> bool:
    """Whether nothing that stays uses a node, or sees what it writes."""
    if is_mutation(node) and base_of(node.args[0]) not in doomed:
        return False
    return all(user in doomed for user in node.users)
