"""Checks of op arguments: each refusal says what was expected and what came.

The rules look at ranks, sizes, dtypes and devices only, never at values, so they run on fake
tensors under `torch.compile` just as they do in eager.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mla_ops.errors import InvalidInputError

__all__ = [
    "FLOAT_DTYPES",
    "check_device",
    "check_like_query",
    "check_mla_attention",
    "check_mla_attention_types",
    "check_rank",
    "check_scale",
    "fail",
]

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Dtypes that attention computes in."""

_INT32_MAX = 2**31 - 1


def fail(name: str, expected: str, got: object) -> None:
    """Raise the error that says what was expected and what came."""
    raise InvalidInputError(f"{name} must be {expected}, got {got}")


def check_rank(name: str, tensor: Tensor, shape: str) -> None:
    """Check the number of dimensions against a shape such as `[B, T, L]`."""
    rank = shape.count(",") + 1
    if tensor.dim() != rank:
        fail(name, f"{shape} ({rank} dimensions)", f"shape {tuple(tensor.shape)}")


def check_like_query(name: str, tensor: Tensor, query: Tensor) -> None:
    """Check that a tensor has the query's dtype and device."""
    if tensor.dtype != query.dtype:
        fail(name, f"of the query's dtype {query.dtype}", tensor.dtype)
    check_device(name, tensor, query)


def check_device(name: str, tensor: Tensor, query: Tensor) -> None:
    """Check that a tensor is on the query's device."""
    if tensor.device != query.device:
        fail(name, f"on the query's device {query.device}", f"a tensor on {tensor.device}")


def _check_mask(attn_mask: Tensor, query: Tensor, num_keys: int) -> None:
    if attn_mask.dtype != torch.bool and attn_mask.dtype not in FLOAT_DTYPES:
        fail("attn_mask", "bool or floating point", attn_mask.dtype)
    check_device("attn_mask", attn_mask, query)
    target = (*query.shape[:3], num_keys)
    sizes = attn_mask.shape
    fits = len(sizes) <= 4 and all(
        have == 1 or have == want
        for have, want in zip(reversed(sizes), reversed(target), strict=False)
    )
    if not fits:
        fail("attn_mask", f"broadcastable to [B, H, S, T] = {target}", f"shape {tuple(sizes)}")


def _check_bounds(kv_bounds: Tensor, query: Tensor, num_keys: int) -> None:
    batch = query.shape[0]
    if kv_bounds.dtype != torch.int32:
        fail("kv_bounds", "int32", kv_bounds.dtype)
    if kv_bounds.dim() != 2 or kv_bounds.shape[0] != batch or kv_bounds.shape[1] != 2:
        fail("kv_bounds", f"[B, 2] = ({batch}, 2)", f"shape {tuple(kv_bounds.shape)}")
    if num_keys > _INT32_MAX:
        fail("kv_c", f"at most {_INT32_MAX} keys long with int32 kv_bounds", num_keys)
    check_device("kv_bounds", kv_bounds, query)


def _check_sinks(sinks: Tensor, query: Tensor) -> None:
    heads = query.shape[1]
    if sinks.dtype not in FLOAT_DTYPES:
        fail("sinks", "floating point", sinks.dtype)
    if sinks.dim() != 1 or sinks.shape[0] != heads:
        fail("sinks", f"[H] = ({heads},)", f"shape {tuple(sinks.shape)}")
    check_device("sinks", sinks, query)


def check_scale(softmax_scale: object) -> None:
    """Check that the scale is a finite number; a symbolic one passes."""
    if isinstance(softmax_scale, torch.SymFloat):
        return
    number = isinstance(softmax_scale, (int, float)) and not isinstance(softmax_scale, bool)
    if not (number and math.isfinite(softmax_scale)):  # type: ignore[arg-type]
        fail("softmax_scale", "a finite float", repr(softmax_scale))


def check_mla_attention_types(
    query: object,
    kv_c: object,
    k_pe: object,
    w_kv_b: object,
    attn_mask: object,
    kv_bounds: object,
    sinks: object,
    softmax_scale: object,
    is_causal: object,
    workspace_tokens: object,
) -> None:
    """Refuse arguments of `mla_attention` that the op's schema would refuse less clearly.

    Args:
        query: a tensor.
        kv_c: a tensor.
        k_pe: a tensor.
        w_kv_b: a tensor.
        attn_mask: a tensor or None.
        kv_bounds: a tensor or None.
        sinks: a tensor or None.
        softmax_scale: a finite number.
        is_causal: a bool.
        workspace_tokens: an int or None.

    Raises:
        InvalidInputError: one is something else.
    """
    tensors = {"query": query, "kv_c": kv_c, "k_pe": k_pe, "w_kv_b": w_kv_b}
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            fail(name, "a tensor", f"{type(value).__name__} {value!r:.60}")
    optional = {"attn_mask": attn_mask, "kv_bounds": kv_bounds, "sinks": sinks}
    for name, value in optional.items():
        if value is not None and not isinstance(value, Tensor):
            fail(name, "a tensor or None", f"{type(value).__name__} {value!r:.60}")
    check_scale(softmax_scale)
    if not isinstance(is_causal, bool):
        fail("is_causal", "a bool", repr(is_causal))
    whole = isinstance(workspace_tokens, int) and not isinstance(workspace_tokens, bool)
    if workspace_tokens is not None and not whole:
        fail("workspace_tokens", "an int or None", repr(workspace_tokens))


def check_mla_attention(
    query: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    w_kv_b: Tensor,
    attn_mask: Tensor | None,
    kv_bounds: Tensor | None,
    sinks: Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    workspace_tokens: int | None,
) -> int:
    """Check the arguments of `mla_attention` and return the width of the values that they imply.

    Args:
        query: `[B, H, S, P+R]`, floating point.
        kv_c: `[B, T, L]`, like the query.
        k_pe: `[B, T, R]`, like the query.
        w_kv_b: `[H*(P+V), L]`, like the query.
        attn_mask: bool or float, broadcastable to `[B, H, S, T]`.
        kv_bounds: `[B, 2]` int32.
        sinks: `[H]`, floating point.
        softmax_scale: finite.
        is_causal: any.
        workspace_tokens: at least 1.

    Returns:
        V; a symbolic int under tracing.

    Raises:
        InvalidInputError: any of these does not hold.
    """
    del is_causal
    check_rank("query", query, "[B, H, S, P+R]")
    check_rank("kv_c", kv_c, "[B, T, L]")
    check_rank("k_pe", k_pe, "[B, T, R]")
    check_rank("w_kv_b", w_kv_b, "[H*(P+V), L]")
    if query.dtype not in FLOAT_DTYPES:
        fail("query", f"one of {', '.join(map(str, FLOAT_DTYPES))}", query.dtype)
    for name, tensor in (("kv_c", kv_c), ("k_pe", k_pe), ("w_kv_b", w_kv_b)):
        check_like_query(name, tensor, query)

    batch, heads, _, width = query.shape
    num_keys, rank = kv_c.shape[1:]
    rope = k_pe.shape[2]
    if kv_c.shape[0] != batch:
        fail("kv_c", f"[B, T, L] with the query's B = {batch}", f"shape {tuple(kv_c.shape)}")
    if k_pe.shape[:2] != kv_c.shape[:2]:
        fail(
            "k_pe", f"[B, T, R] with kv_c's B, T = {tuple(kv_c.shape[:2])}", f"{tuple(k_pe.shape)}"
        )
    if heads < 1 or rank < 1:
        fail("H and L", "at least 1", f"query {tuple(query.shape)} and kv_c {tuple(kv_c.shape)}")
    if rope > width:
        fail("k_pe", f"at most as wide as a query head, {width}", f"R = {rope}")
    if w_kv_b.shape[1] != rank:
        fail("w_kv_b", f"[H*(P+V), L] with kv_c's L = {rank}", f"shape {tuple(w_kv_b.shape)}")
    nope = width - rope
    if w_kv_b.shape[0] % heads or w_kv_b.shape[0] // heads <= nope:
        fail(
            "w_kv_b",
            f"[H*(P+V), L] with H = {heads}, P = {nope} and V >= 1",
            f"shape {tuple(w_kv_b.shape)}",
        )

    if attn_mask is not None:
        _check_mask(attn_mask, query, num_keys)
    if kv_bounds is not None:
        _check_bounds(kv_bounds, query, num_keys)
    if sinks is not None:
        _check_sinks(sinks, query)
    check_scale(softmax_scale)
    if workspace_tokens is not None and workspace_tokens < 1:
        fail("workspace_tokens", "at least 1 or None", workspace_tokens)
    return w_kv_b.shape[0] // heads - nope
