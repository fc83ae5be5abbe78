"""Find multi-head latent attention in an FX graph, by data flow.

The anchor is the attention node. From there the search walks back: the key must be assembled from
a part without position and a rotary part that all heads share, and the former and the value must be
the two pieces of one `split` of `linear(latent, weight)`. How the query, the latent and the rotary
key came about (norms, rope, caches, gates) is no part of the pattern.

An attention that looks like this one but differs somewhere is not rewritten, and says where.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from mla_ops.passes.attention_forms import Attention, DiffersError, read_attention, require
from mla_ops.passes.nodes import (
    argument,
    base_of,
    dimensions,
    is_mutation,
    kind,
    number_of,
    same_size,
    sizes,
    tensor_of,
    written_pieces,
)

__all__ = ["Match", "NoMatch", "find_attention"]


@dataclass(frozen=True)
class Match:
    """An attention that the op can replace.

    Attributes:
        node: what the op's output stands for: `[B, H, S, V]`.
        query: `[B, H, S, P+R]`.
        latent: `[B, 1, T, L]` or `[B, T, L]`.
        k_pe: `[B, 1, T, R]`.
        weight: `[H*(P+V), L]`.
        attn_mask: as `scaled_dot_product_attention` takes it, or None.
        sinks: `[H]`, or None.
        softmax_scale: factor on the scores.
        is_causal: whether query `s` sees the keys up to its own.
        prefix: index of the keys that are used, None for all.
        chain: the nodes of the pattern, which the op makes superfluous.
    """

    node: Node
    query: Node
    latent: Node
    k_pe: Node
    weight: Node
    attn_mask: Node | None
    sinks: Node | None
    softmax_scale: float
    is_causal: bool
    prefix: slice | None
    chain: tuple[Node, ...]


@dataclass(frozen=True)
class NoMatch:
    """An attention that stays as it is.

    Attributes:
        node: the attention node.
        reason: what differs from the pattern.
        looks_like_mla: whether it is one that a user would expect to be rewritten.
    """

    node: Node
    reason: str
    looks_like_mla: bool


def find_attention(graph: Graph) -> list[Match | NoMatch]:
    """Return every attention of a graph in order, matched or not.

    Args:
        graph: of Dynamo (`torch` functions, `meta["example_value"]`) or of `torch.export`
            (ATen, `meta["val"]`). It is not changed.

    Returns:
        A `Match` for each multi-head latent attention, a `NoMatch` with the reason for each other
        attention: SDPA, matmul-softmax-matmul, FlexAttention or a flash kernel.

    Example:
        >>> import torch
        >>> from mla_ops.passes.match import find_attention
        >>> class Plain(torch.nn.Module):
        ...     def forward(self, q, k, v):
        ...         return torch.nn.functional.scaled_dot_product_attention(q, k, v)
        >>> x = torch.randn(1, 2, 3, 8)
        >>> graph = torch.export.export(Plain(), (x, x, x)).graph
        >>> [site.reason for site in find_attention(graph)]
        ['the value is not the second piece of a split (it is a graph input)']
    """
    return [found for node in graph.nodes if (found := _examine(node)) is not None]


def _examine(node: Node) -> Match | NoMatch | None:
    """Match one node, or say why not; None for a node that is no attention."""
    try:
        attention = read_attention(node)
    except DiffersError as differs:
        return NoMatch(node, str(differs), _in_mla_module(node))
    if attention is None:
        return _examine_output(node)
    try:
        return _match(attention)
    except DiffersError as differs:
        expected = _in_mla_module(node) or _is_assembled(attention.key)
        return NoMatch(attention.node, str(differs), expected)


def _examine_output(node: Node) -> NoMatch | None:
    """Say so when expanded keys leave the graph: a graph break parts them from their attention."""
    leaves = any(user.op == "output" for user in node.users)
    if not (leaves and kind(node) in ("cat", "new_empty") and _is_assembled(node)):
        return None
    k_nope = _read_parts(node)[0]
    if kind(k_nope) != "item" or kind(k_nope.args[0]) != "split":
        return None
    reason = "the expanded key leaves the graph: a graph break lies in front of its attention"
    return NoMatch(node, reason, looks_like_mla=True)


def _is_assembled(key: Any) -> bool:
    """Whether a key is put together from two parts, the second shared by the heads."""
    try:
        _read_parts(key)
    except DiffersError:
        return False
    return True


def _in_mla_module(node: Node) -> bool:
    """Whether the innermost modules that ran the node know latents.

    Dynamo keeps the classes, export their names only, which say nothing.
    """
    stack = node.meta.get("nn_module_stack") or {}
    return any(isinstance(cls, type) and hasattr(cls, "expand_kv") for _, cls in stack.values())


def _match(attention: Attention) -> Match:
    """Walk back from an attention to the latent, and check all that the op relies on."""
    require(not attention.objections, "; ".join(attention.objections))
    query, mask = attention.query, attention.attn_mask
    require(len(sizes(query)) == 4, "the query is not [B, H, S, P+R]")
    scale = number_of(attention.softmax_scale)
    require(isinstance(scale, int | float), "its scale is no constant")
    _check_mask(mask)
    causal = _read_causal(attention)
    prefix = _read_prefix(attention)
    value, nope, value_width = _read_value(attention)
    k_nope, k_pe = _read_key(attention, nope)
    split = value.args[0]
    same = kind(k_nope) == "item" and k_nope.args == (split, 0)
    require(same, "key and value do not come from one split")
    attention.chain += [k_nope, value, split]
    latent, weight = _read_linear(attention, split, nope + value_width)
    _check_sizes(attention, latent, k_pe, weight, nope, value_width)
    _check_unchanged(attention, latent, k_pe, weight)
    return Match(
        attention.node,
        query,
        latent,
        k_pe,
        weight,
        mask,
        attention.sinks,
        float(scale),
        causal,
        prefix,
        tuple(dict.fromkeys(attention.chain)),
    )


def _check_mask(mask: Any) -> None:
    """Check that the op takes the mask."""
    value = tensor_of(mask)
    require(mask is None or isinstance(value, Tensor), "its mask is no tensor")
    if mask is not None:
        known = value.dtype == torch.bool or value.is_floating_point()
        require(known, f"its mask is {value.dtype}, neither bool nor float")
        require(not value.requires_grad, "its mask needs a gradient")


def _read_causal(attention: Attention) -> bool:
    """Read `is_causal`, which torch aligns at the top left and the op at the bottom right."""
    require(isinstance(attention.is_causal, bool), "is_causal is no constant")
    if not attention.is_causal:
        return False
    square = same_size(sizes(attention.query)[2], (*sizes(attention.key), 0, 0, 0)[2])
    require(square, "is_causal where S and T may differ: torch aligns it at the first key")
    return True


def _read_prefix(attention: Attention) -> slice | None:
    """Strip `key[:, :, a:b]` and the same of the value, as static caches cut their buffers."""
    key, value = _token_slice(attention.key), _token_slice(attention.value)
    if key is None and value is None:
        return None
    if key is None or value is None or key[1] != value[1]:
        raise DiffersError("key and value are cut at different tokens")
    attention.chain += [attention.key, attention.value]
    attention.key, attention.value = key[0], value[0]
    return key[1]


def _token_slice(node: Any) -> tuple[Node, slice] | None:
    if kind(node) == "slice" and argument(node, 1, "dim", 0) == 2:
        return node.args[0], slice(argument(node, 2, "start"), argument(node, 3, "end"))
    if kind(node) != "index":
        return None
    index, everything = node.args[1], slice(None, None, None)
    if not isinstance(index, tuple) or len(index) < 3 or index[:2] != (everything, everything):
        return None
    rest = all(i in (everything, Ellipsis) for i in index[3:])
    ours = isinstance(index[2], slice) and index[2].step in (None, 1)
    return (node.args[0], index[2]) if rest and ours else None


def _read_value(attention: Attention) -> tuple[Any, int, int]:
    """Return the value's piece of the split, and the widths of both pieces."""
    value = attention.value
    split: Any = value.args[0] if kind(value) == "item" else None
    require(
        kind(split) == "split" and value.args[1] == 1,
        f"the value is not the second piece of a split ({_describe(value)})",
    )
    widths = argument(split, 1, "split_size_or_sections", split.kwargs.get("split_size"))
    require(isinstance(widths, list | tuple) and len(widths) == 2, "the split is not in two")
    rank = len(sizes(split.args[0]))
    dim = argument(split, 2, "dim", 0)
    require(dim in (-1, rank - 1), "the split is not over the last dimension")
    require(all(isinstance(w, int) for w in widths), "the widths of the split vary")
    return value, widths[0], widths[1]


def _read_key(attention: Attention, nope: int) -> tuple[Any, Node]:
    """Return the two parts of the key; the second as it was before the heads shared it."""
    k_nope, k_pe, begin, nodes = _read_parts(attention.key)
    require(same_size(begin, nope), "the key's first part is not as wide as the split's first")
    mine = {*nodes, *attention.chain}
    strangers = [u for u in attention.key.users if u not in mine and kind(u) != "size"]
    require(not strangers, f"the key is used elsewhere, too ({', '.join(map(str, strangers))})")
    attention.chain += nodes
    return k_nope, k_pe


def _read_parts(key: Any) -> tuple[Any, Node, Any, list[Node]]:
    """Return a key's two parts, where the second begins, and the nodes that join them."""
    parts = sorted(written_pieces(key), key=_begin_of)
    require(len(parts) == 2, f"the key is not put together from two parts ({_describe(key)})")
    (first, middle, k_nope, _), (again, end, k_pe, _) = parts
    require(first == 0 and middle == again and end is None, "the key's parts leave a gap")
    nodes = [node for *_, owners in parts for node in owners]
    if kind(k_pe) == "expand":
        nodes.append(k_pe)
        k_pe = k_pe.args[0]
    shared = len(sizes(k_pe)) == 4 and same_size(sizes(k_pe)[1], 1)
    require(shared, "the second part of the key is not shared by the heads")
    return k_nope, k_pe, middle, nodes


def _begin_of(part: tuple[Any, ...]) -> int:
    return part[0] if isinstance(part[0], int) else -1


def _read_linear(attention: Attention, split: Node, width: int) -> tuple[Node, Node]:
    """Walk from the split to `linear(latent, weight)`."""
    turned: Any = split.args[0]
    swapped = kind(turned) == "transpose" and {d % 4 for d in turned.args[1:3]} == {1, 2}
    require(swapped, f"heads and tokens do not change places ({_describe(turned)})")
    view = turned.args[0]
    require(kind(view) == "view" and len(dimensions(view)) == 4, "the heads are no view")
    require(same_size(sizes(view)[-1], width), "the heads are not as wide as the split's pieces")
    linear = view.args[0]
    plain = kind(linear) == "linear"
    require(plain, f"kv_b_proj is not a plain linear layer ({_describe(linear)})")
    require(argument(linear, 2, "bias") is None, "kv_b_proj has a bias")
    latent, weight = argument(linear, 0, "input"), argument(linear, 1, "weight")
    attention.chain += [turned, view, linear]
    return latent, weight


def _check_sizes(
    attention: Attention, latent: Node, k_pe: Node, weight: Node, nope: int, value_width: int
) -> None:
    """Check what the op's own rules on shapes would refuse."""
    (batch, heads, _, width), shape, rotary = sizes(attention.query), sizes(latent), sizes(k_pe)
    one_head = len(shape) == 3 or (len(shape) == 4 and same_size(shape[1], 1))
    require(one_head, "the latent has several heads")
    rows, columns = sizes(weight)
    require(same_size(rows, heads * (nope + value_width)), "query and key differ in their heads")
    require(same_size(columns, shape[-1]), "the weight does not fit the latent")
    require(same_size(width, nope + rotary[3]), "query and key differ in their width")
    require(same_size(batch, shape[0]), "query and latent differ in their batch")
    require(same_size(rotary[2], shape[-2]), "latent and rotary key differ in their length")


def _check_unchanged(attention: Attention, latent: Node, k_pe: Node, weight: Node) -> None:
    """Refuse when something is written to between the expansion and the attention.

    The op reads the latents later than the expansion did, and never makes what was expanded: a
    write into either, which no edge of the graph may show, would be lost.
    """
    mine = set(attention.chain)
    owners = {base_of(latent): "the latent", base_of(k_pe): "the rotary key"}
    owners |= {base_of(weight): "the weight"} | dict.fromkeys(mine, "what was expanded")
    node, first = attention.node.prev, min(mine)
    while node is not first:
        if node not in mine and is_mutation(node) and base_of(node.args[0]) in owners:
            what = owners[base_of(node.args[0])]
            raise DiffersError(f"{what} is written to in front of the attention")
        node = node.prev


def _describe(node: Any) -> str:
    """Name what was found where something else was expected."""
    if not isinstance(node, Node):
        return f"a {type(node).__name__}"
    if node.op == "placeholder":
        return "it is a graph input"
    if node.op == "call_method":
        return f"it is the result of .{node.target}()"
    if node.op == "call_function":
        return f"it is the result of {getattr(node.target, '__name__', node.target)}"
    return f"it is a {node.op}"
