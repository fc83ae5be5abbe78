"""Checks of op arguments: each refusal says what was expected and what came.

The rules look at ranks, sizes, dtypes and devices only, never at values, so they run on fake
tensors under `torch.compile` just as they do in eager.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mla_ops.errors import InvalidInputError

__all__ = ["FLOAT_DTYPES", "check_mla_attention"]

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Dtypes that attention computes in."""

_INT32_MAX = 2**31 - 1


def _fail(name: str, expected: str, got: object) -> None:
    raise InvalidInputError(f"{name} must be {expected}, got {got}")


def _check_rank(name: str, tensor: Tensor, shape: str) -> None:
    rank = shape.count(",") + 1
    if tensor.dim() != rank:
        _fail(name, f"{shape} ({rank} dimensions)", f"shape {tuple(tensor.shape)}")


def _check_like_query(name: str, tensor: Tensor, query: Tensor) -> None:
    if tensor.dtype != query.dtype:
        _fail(name, f"of the query's dtype {query.dtype}", tensor.dtype)
    _check_device(name, tensor, query)


def _check_device(name: str, tensor: Tensor, query: Tensor) -> None:
    if tensor.device != query.device:
        _fail(name, f"on the query's device {query.device}", f"a tensor on {tensor.device}")


def _check_mask(attn_mask: Tensor, query: Tensor, num_keys: int) -> None:
    if attn_mask.dtype != torch.bool and attn_mask.dtype not in FLOAT_DTYPES:
        _fail("attn_mask", "bool or floating point", attn_mask.dtype)
    _check_device("attn_mask", attn_mask, query)
    target = (*query.shape[:3], num_keys)
    sizes = attn_mask.shape
    fits = len(sizes) <= 4 and all(
        have == 1 or have == want
        for have, want in zip(reversed(sizes), reversed(target), strict=False)
    )
    if not fits:
        _fail("attn_mask", f"broadcastable to [B, H, S, T] = {target}", f"shape {tuple(sizes)}")


def _check_scale(softmax_scale: object) -> None:
    if isinstance(softmax_scale, torch.SymFloat):
        return
    number = isinstance(softmax_scale, (int, float)) and not isinstance(softmax_scale, bool)
    if not (number and math.isfinite(softmax_scale)):  # type: ignore[arg-type]
        _fail("softmax_scale", "a finite float", repr(softmax_scale))


def check_mla_attention(
    query: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    w_kv_b: Tensor,
    attn_mask: Tensor | None,
    kv_bounds: Tensor | None,
    sinks: Tensor | None,
    softmax_scale: float,
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
        workspace_tokens: at least 1.

    Returns:
        V; a symbolic int under tracing.

    Raises:
        InvalidInputError: any of these does not hold.
    """
    _check_rank("query", query, "[B, H, S, P+R]")
    _check_rank("kv_c", kv_c, "[B, T, L]")
    _check_rank("k_pe", k_pe, "[B, T, R]")
    _check_rank("w_kv_b", w_kv_b, "[H*(P+V), L]")
    if query.dtype not in FLOAT_DTYPES:
        _fail("query", f"one of {', '.join(map(str, FLOAT_DTYPES))}", query.dtype)
    for name, tensor in (("kv_c", kv_c), ("k_pe", k_pe), ("w_kv_b", w_kv_b)):
        _check_like_query(name, tensor, query)

    batch, heads, _, width = query.shape
    num_keys, rank = kv_c.shape[1:]
    rope = k_pe.shape[2]
    if kv_c.shape[0] != batch:
        _fail("kv_c", f"[B, T, L] with the query's B = {batch}", f"shape {tuple(kv_c.shape)}")
    if k_pe.shape[:2] != kv_c.shape[:2]:
        _fail(
            "k_pe", f"[B, T, R] with kv_c's B, T = {tuple(kv_c.shape[:2])}", f"{tuple(k_pe.shape)}"
        )
    if heads < 1 or rank < 1:
        _fail("H and L", "at least 1", f"query {tuple(query.shape)} and kv_c {tuple(kv_c.shape)}")
    if rope > width:
        _fail("k_pe", f"at most as wide as a query head, {width}", f"R = {rope}")
    if w_kv_b.shape[1] != rank:
        _fail("w_kv_b", f"[H*(P+V), L] with kv_c's L = {rank}", f"shape {tuple(w_kv_b.shape)}")
    nope = width - rope
    if w_kv_b.shape[0] % heads or w_kv_b.shape[0] // heads <= nope:
        _fail(
            "w_kv_b",
            f"[H*(P+V), L] with H = {heads}, P = {nope} and V >= 1",
            f"shape {tuple(w_kv_b.shape)}",
        )

    if attn_mask is not None:
        _check_mask(attn_mask, query, num_keys)
    if kv_bounds is not None:
        if kv_bounds.dtype != torch.int32:
            _fail("kv_bounds", "int32", kv_bounds.dtype)
        if kv_bounds.dim() != 2 or kv_bounds.shape[0] != batch or kv_bounds.shape[1] != 2:
            _fail("kv_bounds", f"[B, 2] = ({batch}, 2)", f"shape {tuple(kv_bounds.shape)}")
        if num_keys > _INT32_MAX:
            _fail("kv_c", f"at most {_INT32_MAX} keys long with int32 kv_bounds", num_keys)
        _check_device("kv_bounds", kv_bounds, query)
    if sinks is not None:
        if sinks.dtype not in FLOAT_DTYPES:
            _fail("sinks", "floating point", sinks.dtype)
        if sinks.dim() != 1 or sinks.shape[0] != heads:
            _fail("sinks", f"[H] = ({heads},)", f"shape {tuple(sinks.shape)}")
        _check_device("sinks", sinks, query)
    _check_scale(softmax_scale)
    if workspace_tokens is not None and workspace_tokens < 1:
        _fail("workspace_tokens", "at least 1 or None", workspace_tokens)
    return w_kv_b.shape[0] // heads - nope
