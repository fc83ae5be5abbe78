"""The forms in which an attention is written, brought into one.

`scaled_dot_product_attention`, and the product, softmax, product chain, with a mask added and with
sink logits joined to the scores; FlexAttention and flash kernels are recognised and refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from mla_ops.passes.nodes import argument, kind, last_axis_piece, number_of, sizes

__all__ = ["Attention", "DiffersError", "read_attention", "require"]


class DiffersError(Exception):
    """The pattern ends here; the message says why."""


@dataclass
class Attention:
    """An attention in one form, whichever code computed it."""

    node: Node
    query: Any
    key: Any
    value: Any
    attn_mask: Any = None
    sinks: Any = None
    softmax_scale: Any = 1.0
    is_causal: Any = False
    chain: list[Node] = field(default_factory=list)
    objections: list[str] = field(default_factory=list)


def require(holds: Any, reason: str) -> None:
    """Raise a `DiffersError` with the reason unless something holds."""
    if not holds:
        raise DiffersError(reason)


def read_attention(node: Node) -> Attention | None:
    """Bring an attention node of any form into one; None for any other node."""
    name = kind(node)
    if name == "sdpa":
        return _read_sdpa(node)
    if name == "softmax":
        return _read_softmax(node)
    target = str(getattr(node.target, "__name__", node.target))
    if node.op == "call_function" and "flex_attention" in target:
        raise DiffersError("FlexAttention keeps its mask in a block mask; use sdpa or eager")
    if node.op == "call_function" and "flash_attn" in f"{node.target} {target}":
        raise DiffersError("a flash-attention kernel pads the values; use sdpa or eager")
    return None


def _read_sdpa(node: Node) -> Attention:
    query, key, value = (argument(node, i, n) for i, n in enumerate(("query", "key", "value")))
    scale = argument(node, 6, "scale")
    if scale is None and sizes(query):
        scale = float(sizes(query)[-1]) ** -0.5
    attention = Attention(
        node,
        query,
        key,
        value,
        attn_mask=argument(node, 3, "attn_mask"),
        softmax_scale=scale,
        is_causal=argument(node, 5, "is_causal", False),
        chain=[node],
    )
    if number_of(argument(node, 4, "dropout_p", 0.0)) != 0.0:
        attention.objections.append("it uses dropout")
    if argument(node, 7, "enable_gqa", False):
        attention.objections.append("it shares key heads (enable_gqa)")
    return attention


def _read_softmax(node: Node) -> Attention | None:
    """Read `matmul(softmax(matmul(q, k.mT) * scale + mask), v)`; None for another softmax."""
    probs, chain = node, [node]
    while (following := _next_of_probs(probs)) is not None:
        probs = following
        chain.append(probs)
    if kind(probs) != "matmul" or probs.args[0] is not chain[-2]:
        return None
    scores, sinks = _read_sinks(node.args[0], chain)
    mask, scale = None, 1.0
    if kind(scores) == "add":
        chain.append(scores)
        scores, mask = scores.args
    if kind(scores) in ("mul", "div"):
        chain.append(scores)
        scores, factor = scores.args
        scale = _inverse(factor) if kind(chain[-1]) == "div" else factor
    if kind(scores) != "matmul":
        return None
    query, flipped = scores.args[:2]
    rank = len(sizes(flipped))
    require(rank > 1, "the graph carries no shapes")
    dims = flipped.args[1:3] if kind(flipped) == "transpose" else ()
    require({d % rank for d in dims} == {rank - 1, rank - 2}, "the key is not transposed")
    require(argument(node, 1, "dim") in (-1, rank - 1), "its softmax is not over the keys")
    chain += [scores, flipped]
    objections = ["it uses dropout"] if any(map(_drops_out, chain)) else []
    key, value = flipped.args[0], probs.args[1]
    return Attention(
        probs, query, key, value, mask, sinks, scale, chain=chain, objections=objections
    )


def _next_of_probs(probs: Node) -> Node | None:
    """Return the one step that takes probabilities on to the product with the values."""
    users = [user for user in probs.users if kind(user) != "assert"]
    if kind(probs) == "matmul" or len(users) != 1:
        return None
    (user,) = users
    name = kind(user)
    return user if _drops_last(user) or name in ("cast", "dropout", "matmul") else None


def _drops_out(node: Node) -> bool:
    """Whether a node is a dropout that does something."""
    if kind(node) != "dropout":
        return False
    trains = argument(node, 2, "training", node.kwargs.get("train", True))
    return bool(number_of(argument(node, 1, "p", 0.5)) != 0.0 and trains is not False)


def _drops_last(node: Node) -> bool:
    """Whether a node is `x[..., :-1]`, which takes the sink's column out."""
    piece = last_axis_piece(node)
    return piece is not None and piece[1:] == (0, -1)


def _read_sinks(scores: Any, chain: list[Node]) -> tuple[Any, Any]:
    """Part scores from the sink logits that were joined to them, if any were."""
    if kind(scores) == "sub" and kind(scores.args[1]) == "item":
        largest = scores.args[1].args[0]
        require(kind(largest) == "max", "something else than the maximum is subtracted")
        chain += [scores, scores.args[1], largest]
        scores = scores.args[0]
    if kind(scores) != "cat":
        return scores, None
    parts = scores.args[0]
    require(len(parts) == 2, f"its scores are put together from {len(parts)} parts")
    require(any(_drops_last(n) for n in chain), "the sink's column stays in the probabilities")
    chain.append(scores)
    sinks = parts[1]
    while kind(sinks) in ("expand", "view") and len(sizes(sinks)) != 1:
        chain.append(sinks)
        sinks = sinks.args[0]
    require(len(sizes(sinks)) == 1, "its sinks are not one number per head")
    return parts[0], sinks


def _inverse(divisor: Any) -> Any:
    return 1.0 / divisor if isinstance(divisor, int | float) else divisor
