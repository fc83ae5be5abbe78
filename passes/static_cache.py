"""Let attention over a static cache read only the part that is filled.

A static cache has room for its longest context, and stock models hide the empty part behind an
S x max_len mask. Two places of the graph tell how much is filled, by the cache's own counter:

* the mask, when it is `arange(max_len) <= arange(S) + filled`: then bounds and `is_causal` say the
  same, and the mask is not built at all;
* the write, `index_copy_(2, arange(S) + filled, new)`: then the op gets bounds beside its mask.
  This rests on what a static cache promises: no query sees a slot that was never written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from mla_ops.passes.fuse_attention import ATTENTION
from mla_ops.passes.nodes import (
    argument,
    base_of,
    is_mutation,
    kind,
    same_size,
    sizes,
    tensor_of,
)
from mla_ops.passes.report import Site, draw
from mla_ops.passes.rewriting import erase_unused, graphs_of, insert

__all__ = ["NAME", "bound_static_cache"]

_aten = torch.ops.aten

NAME = "bound_static_cache"
"""The name by which the pass is switched."""

_MASK, _BOUNDS, _CAUSAL = 4, 5, 8  # positions in the op's schema


@dataclass(frozen=True)
class _Filled:
    """How many slots hold a token, as the graph computes it.

    Attributes:
        offset: a 0-d tensor, the tokens before the new ones.
        tokens: S, how many are new, an int or the node that has it.
        position: the node `arange(S) + offset`; the counter may change after it.
    """

    offset: Node
    tokens: Any
    position: Node


def bound_static_cache(gm: GraphModule) -> list[Site]:
    """Give the op `kv_bounds` where the graph tells how much of a static cache is filled.

    Args:
        gm: a graph in which `fuse_attention` put the op; changed in place, with its submodules.

    Returns:
        One `Site` for each op that was given bounds.
    """
    sites = []
    for module in graphs_of(gm):
        bounds: dict[Node, Node] = {}
        attentions = [n for n in module.graph.nodes if n.target is ATTENTION]
        for node in attentions:
            if node.args[_BOUNDS] is None and isinstance(node.args[_MASK], Node):
                sites += _bound(module.graph, node, bounds)
    return sites


def _bound(graph: Graph, node: Node, known: dict[Node, Node]) -> list[Site]:
    """Rewrite one op; `known` holds the bounds that were made for another layer."""
    query, mask, max_len = node.args[0], node.args[_MASK], sizes(node.args[1])[1]
    tokens = sizes(query)[2]
    parts = list(_conjuncts(mask))
    filled = next((f for part in parts if (f := _of_mask(part, tokens, max_len))), None)
    whole = filled is not None and len(parts) == 1
    filled = filled or _of_write(node, tokens)
    if filled is None:
        return []
    before = draw((mask, node, *node.args[:4]))  # type: ignore[arg-type]
    added = 1  # the node that repeats the pair for every request
    if filled.position not in known:
        known[filled.position] = _make_bounds(graph, filled)
        added += 4
    arguments = list(node.args)
    arguments[_BOUNDS] = _per_request(graph, node, known[filled.position])
    if whole:
        arguments[_MASK] = None
        arguments[_CAUSAL] = not same_size(tokens, 1)
    node.args = tuple(arguments)
    removed = erase_unused(graph, _only_for(mask)) if whole else 0
    after = draw((node, *(a for a in node.args if isinstance(a, Node))))
    return [Site.rewritten(NAME, node, before, after, removed, added)]


def _make_bounds(graph: Graph, filled: _Filled) -> Node:
    """Build `[2]` int32 (0, end) right behind the position, before the counter is advanced."""
    like = filled.position
    with graph.inserting_before(like.next):
        end = insert(graph, like, _aten.add.Tensor, filled.offset, filled.tokens)
        end = insert(graph, like, _aten.to.dtype, end, torch.int32)
        zero = insert(graph, like, _aten.zeros_like.default, end)
        return insert(graph, like, _aten.stack.default, [zero, end])


def _per_request(graph: Graph, node: Node, pair: Node) -> Node:
    """Repeat one pair of bounds for every row of the batch, in front of the op."""
    query = node.args[0]
    batch = sizes(query)[0]
    with graph.inserting_before(node):
        if not isinstance(batch, int):
            batch = insert(graph, node, _aten.sym_size.int, query, 0, value=batch)
        return insert(graph, node, _aten.expand.default, pair, [batch, 2])


def _conjuncts(mask: Any) -> Iterator[Node]:
    """Yield the masks whose conjunction a mask is, without the views in between.

    One that is written to in place is not looked into: how it was made does not say what it is.
    """
    while kind(mask) == "expand" or _keeps_values(mask):
        mask = mask.args[0]
    if any(is_mutation(user) for user in getattr(mask, "users", ())):
        return
    if kind(mask) == "and":
        for part in mask.args[:2]:
            yield from _conjuncts(part)
    elif kind(mask) == "where" and _is_additive(mask):
        yield from _conjuncts(mask.args[0])
    else:
        yield mask


def _keeps_values(node: Any) -> bool:
    """Whether a node is a cast that keeps a bool mask bool, or a float one float."""
    if kind(node) != "cast":
        return False
    before, after = tensor_of(node.args[0]), tensor_of(node)
    known = isinstance(before, Tensor) and isinstance(after, Tensor)
    return known and before.is_floating_point() == after.is_floating_point()


def _is_additive(mask: Node) -> bool:
    """Whether a float mask adds 0 where its condition holds and hides everything else."""
    hidden = mask.args[2]
    value = tensor_of(mask)
    if not isinstance(hidden, int | float) or not isinstance(value, Tensor):
        return False
    return hidden <= torch.finfo(value.dtype).min and _is_zero(mask.args[1])


def _is_zero(number: Any) -> bool:
    """Whether a number, or a node that makes a tensor of one, is 0."""
    if not isinstance(number, Node):
        return bool(number == 0)
    if number.target in (torch.zeros, _aten.zeros.default):
        return True
    return number.target is torch.tensor and bool(number.args[0] == 0)


def _of_mask(mask: Node, tokens: Any, max_len: Any) -> _Filled | None:
    """Read `arange(max_len)[None, None, None] <= (arange(S) + offset)[None, None, :, None]`."""
    if kind(mask) != "le":
        return None
    keys: Any = mask.args[0]
    queries: Any = mask.args[1]
    if _axis_of(keys) != 3 or _axis_of(queries) != 2:
        return None
    slots, position = keys.args[0], queries.args[0]
    if kind(slots) == "add" and slots.args[1] == 0:
        slots = slots.args[0]
    if not _is_arange(slots, max_len):
        return None
    return _read_position(position, tokens)


def _axis_of(node: Any) -> int | None:
    """Return which of four dimensions a vector was laid along by indexing, None for no vector."""
    if kind(node) != "index" or len(sizes(node.args[0])) != 1:
        return None
    index = node.args[1]
    if not isinstance(index, tuple) or len(index) != 4 or index.count(None) != 3:
        return None
    return index.index(slice(None)) if slice(None) in index else None


def _read_position(position: Any, tokens: Any) -> _Filled | None:
    """Read `arange(S) + offset` with a 0-d tensor as the offset."""
    if kind(position) != "add":
        return None
    count, offset = position.args[:2]
    if isinstance(count, Node) and not sizes(count):
        count, offset = offset, count
    is_counter = isinstance(tensor_of(offset), Tensor) and not sizes(offset)
    if not is_counter or not _is_arange(count, tokens):
        return None
    return _Filled(offset, count.args[-1], position)


def _is_arange(node: Any, length: Any) -> bool:
    """Whether a node is 0, 1, ..., length - 1."""
    if kind(node) != "arange" or not same_size((*sizes(node), None)[0], length):
        return False
    return len(node.args) == 1 or (len(node.args) == 2 and node.args[0] == 0)


def _of_write(node: Node, tokens: Any) -> _Filled | None:
    """Read the position at which the last writes into the op's latents put the new tokens."""
    found = [_last_write(base_of(cache), node) for cache in node.args[1:3]]
    same = found[0] is not None and found[0] is found[1]
    return _read_position(found[0], tokens) if same else None


def _last_write(cache: Any, reader: Node) -> Any:
    """Return the position of the last write into a cache, None when it is of another form."""
    users = getattr(cache, "users", ())
    writes = [u for u in users if u < reader and is_mutation(u) and u.args[0] is cache]
    last = max(writes, default=None)
    if kind(last) != "index_copy_" or argument(last, 1, "dim") != 2:  # type: ignore[arg-type]
        return None
    return argument(last, 2, "index")  # type: ignore[arg-type]


def _only_for(mask: Any) -> list[Node]:
    """Return the nodes that compute a mask and nothing that changes anything."""
    pure = ("add", "and", "arange", "cast", "expand", "index", "le", "where")
    found: list[Node] = []
    todo = [mask]
    while todo:
        node = todo.pop()
        if kind(node) in pure and node not in found:
            found.append(node)
            todo += node.all_input_nodes
    return found
