"""Graph nodes by what they compute, whichever level of FX graph they come from.

The same step of an attention has other names in a Dynamo graph (`torch` functions and methods), in
an exported one (ATen ops) and in a functionalised one (ATen ops, no mutation). The matcher asks
`kind` what a node does and `argument` what it does it to, and knows nothing of the three.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

__all__ = [
    "argument",
    "base_of",
    "dimensions",
    "is_mutation",
    "kind",
    "last_axis_piece",
    "number_of",
    "same_size",
    "sizes",
    "tensor_of",
    "value_key",
]

_aten = torch.ops.aten

# What a node does: its target if it is a function, the method's name if it calls one.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "alias": (_aten.alias.default,),  # what export makes of a slice that takes everything
    "add": (operator.add, torch.add, _aten.add.Tensor),
    "and": (operator.and_, torch.logical_and, _aten.bitwise_and.Tensor, _aten.logical_and.default),
    "arange": (torch.arange, _aten.arange.default, _aten.arange.start, _aten.arange.start_step),
    "cat": (torch.cat, torch.concat, _aten.cat.default),
    "assert": (_aten._assert_tensor_metadata.default,),
    "cast": (_aten.to.dtype, _aten.to.dtype_layout, _aten._to_copy.default, _aten.clone.default),
    "copy": (_aten.copy.default,),
    "copy_": (_aten.copy_.default,),
    "div": (operator.truediv, torch.div, _aten.div.Tensor),
    "dropout": (F.dropout, torch.dropout, _aten.dropout.default),
    "expand": (_aten.expand.default,),
    "index_copy_": (_aten.index_copy_.default,),
    "le": (operator.le, torch.le, _aten.le.Tensor),
    "linear": (F.linear, _aten.linear.default),
    "matmul": (torch.matmul, torch.bmm, operator.matmul, _aten.matmul.default),
    "max": (torch.max, _aten.max.dim),
    "mul": (operator.mul, torch.mul, _aten.mul.Tensor, _aten.mul.Scalar),
    "new_empty": (_aten.new_empty.default,),
    "sdpa": (F.scaled_dot_product_attention, _aten.scaled_dot_product_attention.default),
    "setitem": (operator.setitem,),
    "size": (_aten.sym_size.int,),
    "slice": (_aten.slice.Tensor,),
    "slice_scatter": (_aten.slice_scatter.default,),
    "softmax": (F.softmax, torch.softmax, _aten.softmax.int, _aten._softmax.default),
    "split": (torch.functional.split, torch.split, _aten.split_with_sizes.default),
    "sub": (operator.sub, torch.sub, _aten.sub.Tensor),
    "transpose": (torch.transpose, torch.swapaxes, _aten.transpose.int),
    "view": (torch.reshape, _aten.view.default, _aten.reshape.default, _aten._unsafe_view.default),
    "where": (torch.where, _aten.where.self, _aten.where.ScalarSelf, _aten.where.ScalarOther),
    "item": (operator.getitem,),  # an index or a piece of a tuple; `kind` tells which
}
_BY_FUNCTION = {target: name for name, targets in _FUNCTIONS.items() for target in targets}
# Methods that are called as their function is.
_SAME_NAME = "add copy_ div expand index_copy_ le matmul max mul new_empty size softmax split sub"
_METHODS = {name: name for name in (*_SAME_NAME.split(), "transpose")}
_METHODS |= {"view": "view", "reshape": "view"}
_METHODS |= dict.fromkeys(("bool", "float", "int", "long", "to", "type_as"), "cast")
# Steps whose result shares memory with their first argument, as far as a cache goes through them.
_VIEWS = {"alias", "expand", "index", "slice", "transpose", "view"}
_ALIASING_METHODS = {"detach", "narrow", "permute", "select", "squeeze", "unsqueeze", "view_as"}
_ALIASING_ATEN = {
    _aten.detach.default,
    _aten.select.int,
    _aten.squeeze.dim,
    _aten.unsqueeze.default,
}


def kind(node: Any) -> str | None:
    """Return what a node does, by one name for every level of graph; None if that is not known.

    Indexing a tensor is `"index"`, taking a piece of a tuple is `"item"`.
    """
    if not isinstance(node, Node):
        return None
    if node.op == "call_method":
        return _METHODS.get(str(node.target))
    if node.op != "call_function":
        return None
    name = _BY_FUNCTION.get(node.target)
    if name == "item" and isinstance(tensor_of(node.args[0]), Tensor):
        return "index"
    return name


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """Return an argument that was given by position or by name."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def dimensions(node: Node) -> tuple[Any, ...]:
    """Return the sizes that `view`, `expand` or `new_empty` was given, as one tuple or as many."""
    given = node.args[1:] or (node.kwargs.get("size", ()),)
    return tuple(given[0]) if isinstance(given[0], tuple | list) else tuple(given)


def value_key(node: Node) -> str:
    """Return the name under which this level of graph keeps a node's fake value."""
    return "val" if "val" in node.meta else "example_value"


def tensor_of(node: Any) -> Any:
    """Return the fake value of a node, None when there is none."""
    if not isinstance(node, Node):
        return None
    return node.meta.get("example_value", node.meta.get("val"))


def number_of(value: Any) -> Any:
    """Return a number that a graph holds as a constant or as an input; the latter gets a guard."""
    held = tensor_of(value)
    return float(held) if isinstance(held, torch.SymFloat | torch.SymInt) else value


def sizes(node: Any) -> tuple[Any, ...]:
    """Return a node's shape, `()` when it is unknown."""
    value = tensor_of(node)
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def same_size(one: Any, other: Any) -> bool:
    """Whether two sizes are known to be equal; asking adds no guard."""
    return bool(statically_known_true(one == other))


def base_of(node: Any) -> Any:
    """Return the node that owns the memory which a chain of views looks at."""
    while isinstance(node, Node):
        method = node.op == "call_method" and node.target in _ALIASING_METHODS
        if not (kind(node) in _VIEWS or method or node.target in _ALIASING_ATEN):
            break
        node = node.args[0]
    return node


def is_mutation(node: Node) -> bool:
    """Whether a node changes its first argument, or an argument that its schema names."""
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    if node.op != "call_function":
        return False
    if node.target is operator.setitem:
        return True
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return bool(schema.is_mutable)
    name = getattr(node.target, "__name__", "")
    if getattr(node.target, "__module__", "") == "_operator":  # `and_` changes nothing
        return name in _INPLACE_OPERATORS
    return name.endswith("_") and not name.endswith("__")


_INPLACE_OPERATORS = {"iadd", "isub", "imul", "itruediv", "iand", "ior", "ixor", "ipow"}


def last_axis_piece(node: Any) -> tuple[Node, Any, Any] | None:
    """Return `(whole, begin, end)` when a node is `whole[..., begin:end]`; an open end is None."""
    if kind(node) == "slice":
        whole, dim = node.args[0], argument(node, 1, "dim", 0)
        if dim not in (-1, len(sizes(whole)) - 1) or argument(node, 4, "step", 1) != 1:
            return None
        begin, end = argument(node, 2, "start"), argument(node, 3, "end")
        return whole, begin or 0, _end(end)
    if kind(node) == "alias" and sizes(node):
        return node.args[0], 0, sizes(node)[-1]
    if kind(node) != "index":
        return None
    return _last_axis(node.args[0], node.args[1])


def _last_axis(whole: Node, index: Any) -> tuple[Node, Any, Any] | None:
    index = index if isinstance(index, tuple) else (index,)
    everything = slice(None, None, None)
    full = index[:-1] == (Ellipsis,) or (
        len(index) == len(sizes(whole)) and all(i == everything for i in index[:-1])
    )
    if not full or not isinstance(index[-1], slice) or index[-1].step not in (None, 1):
        return None
    return whole, index[-1].start or 0, index[-1].stop


def written_pieces(whole: Any) -> Iterator[tuple[Any, Any, Any, tuple[Node, ...]]]:
    """Yield `(begin, end, source, nodes)` of each part that a tensor's last axis is made of.

    Args:
        whole: a `cat`, a `new_empty` that `copy_` or `setitem` wrote into, or the last of a chain
            of `slice_scatter`. Anything else has no parts.
    """
    name = kind(whole)
    if name == "cat" and argument(whole, 1, "dim", 0) in (-1, len(sizes(whole)) - 1):
        begin = 0
        pieces = argument(whole, 0, "tensors")
        for piece in pieces:
            end = begin + (*sizes(piece), 0)[len(sizes(piece)) - 1]
            yield begin, None if piece is pieces[-1] else end, piece, (whole,)
            begin = end
    elif name == "slice_scatter":
        yield from _scattered(whole)
    elif name == "new_empty":
        yield from _copied(whole)


def _copied(whole: Node) -> Iterator[tuple[Any, Any, Any, tuple[Node, ...]]]:
    for user in whole.users:
        if kind(user) == "setitem" and user.args[0] is whole:
            piece = _last_axis(whole, user.args[1])
            if piece is not None:
                yield *piece[1:], user.args[2], (user, whole)
            continue
        piece = last_axis_piece(user)
        writes = [w for w in user.users if kind(w) == "copy_" and w.args[0] is user]
        if piece is not None and len(writes) == 1:
            yield *piece[1:], writes[0].args[1], (writes[0], user, whole)


def _scattered(whole: Node) -> Iterator[tuple[Any, Any, Any, tuple[Node, ...]]]:
    node: Any = whole
    while (name := kind(node)) in ("alias", "copy", "slice_scatter"):
        nodes = (node, *_to_base(node.args[0]))
        if name == "copy":  # over everything that was there
            for width in sizes(node)[-1:]:
                yield 0, width, node.args[1], nodes
            return
        if name == "slice_scatter":
            source: Any = node.args[1]
            last = argument(node, 2, "dim", 0) in (-1, len(sizes(node)) - 1)
            if not last or argument(node, 5, "step", 1) != 1:
                return
            if kind(source) == "copy":  # of a piece of what it is scattered into
                nodes += (source, *_to_base(source.args[0]))
                source = source.args[1]
            yield argument(node, 3, "start") or 0, _end(argument(node, 4, "end")), source, nodes
        node = node.args[0]


def _to_base(node: Any) -> list[Node]:
    """Return a node, what it is a view of, and so on up to the owner of the memory."""
    nodes, base = [node], base_of(node)
    while nodes[-1] is not base:
        nodes.append(nodes[-1].args[0])
    return nodes


_FOREVER = 2**63 - 1


def _end(end: Any) -> Any:
    """Return the end of a slice, None when it is the axis' own."""
    return None if end is None or same_size(end, _FOREVER) else end
