"""Joining partial results: the splits of one call, and two attention states by their lse."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_ops.kernels.triton.launch import cdiv, launch, pow2
from mla_ops.kernels.triton.primitives import LN2, LOG2E, finish

__all__ = ["launch_merge_splits", "merge_attn_states"]

_SPLITS_AT_ONCE = 8
_ROWS = 16


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "splits", "per_request", "stride_lse_b"])
def mla_merge_splits_kernel(
    parts_ptr,
    stats_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    num_rows,
    num_tokens,
    splits,
    per_request,
    stride_lse_b,
    stride_lse_h,
    L: tl.constexpr,
    SINKS: tl.constexpr,
    NATURAL: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """Join the splits of one row, in ascending order and by fixed groups of splits.

    Empty splits add exactly 0, so the bits do not depend on how many of them follow.
    """
    row = tl.program_id(0).to(tl.int64)
    unit = LOG2E if NATURAL else 1.0
    lanes = tl.arange(0, AT_ONCE)
    cols = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    top = tl.full([1], float("-inf"), tl.float32)
    for first in range(0, splits, AT_ONCE):
        part = (first + lanes).to(tl.int64)
        tops = tl.load(
            stats_ptr + part * 2 * num_rows + row, mask=part < splits, other=float("-inf")
        )
        top = tl.maximum(top, tl.max(tops, 0))
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_L], tl.float32)
    for first in range(0, splits, AT_ONCE):
        part = (first + lanes).to(tl.int64)
        at = stats_ptr + part * 2 * num_rows + row
        tops = tl.load(at, mask=part < splits, other=float("-inf"))
        totals = tl.load(at + num_rows, mask=part < splits, other=0.0)
        weights = tl.exp2((tops - base) * unit)
        read = (part < splits) & (totals != 0.0)
        at = (part * num_rows + row) * L
        values = tl.load(
            parts_ptr + at[:, None] + cols[None, :],
            mask=read[:, None] & (cols < L)[None, :],
            other=0.0,
        )
        acc += tl.sum(values * weights[:, None], 0)[None, :]
        total += tl.sum(totals * weights, 0)
    head = row // num_tokens
    sink = tl.zeros([1], tl.float32)
    if SINKS:
        sink += tl.load(sinks_ptr + head).to(tl.float32)
    acc, lse = finish(acc, top, total, sink, SINKS, NATURAL)
    tl.store(
        out_ptr + row * L + cols[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=(cols < L)[None, :],
    )
    token = row % num_tokens
    at = token // per_request * stride_lse_b + head * stride_lse_h + token % per_request
    tl.store(lse_ptr + at + tl.arange(0, 1), lse, mask=tl.arange(0, 1) == tl.program_id(1))


def launch_merge_splits(
    parts: Tensor,
    stats: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    per_request: int,
    natural: bool,
) -> None:
    """Join the splits of an absorbed call.

    Args:
        parts: `[splits, H, T, L]` fp32, unnormalised.
        stats: `[splits, 2, H, T]` fp32: maximum and sum.
        sinks: `[H]` or None.
        out: `[H, T, L]`, written.
        lse: `[B, H, S]` with `B * S = T`, or `[H, T]`; written.
        per_request: S, or T.
        natural: whether the maxima are natural logarithms, not those of base 2.
    """
    splits, heads, tokens, latent = parts.shape
    block = min(128, pow2(latent))
    launch(
        mla_merge_splits_kernel,
        (heads * tokens, cdiv(latent, block)),
        parts,
        parts,
        stats,
        parts if sinks is None else sinks,
        out,
        lse,
        heads * tokens,
        tokens,
        splits,
        per_request,
        lse.stride(0) if lse.dim() == 3 else 0,
        lse.stride(-2),
        L=latent,
        SINKS=sinks is not None,
        NATURAL=natural,
        AT_ONCE=_SPLITS_AT_ONCE,
        BLOCK_L=block,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_rows"])
def mla_merge_states_kernel(
    prefix_ptr,
    prefix_lse_ptr,
    suffix_ptr,
    suffix_lse_ptr,
    out_ptr,
    lse_ptr,
    num_rows,
    stride_prefix_t,
    stride_prefix_h,
    stride_prefix_v,
    stride_suffix_t,
    stride_suffix_h,
    stride_suffix_v,
    stride_out_t,
    stride_out_h,
    stride_out_v,
    stride_plse_h,
    stride_plse_t,
    stride_slse_h,
    stride_slse_t,
    stride_lse_h,
    H: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Merge some rows, that is (token, head) pairs, of two states."""
    offs = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = (tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)).to(tl.int64)
    ok = offs < num_rows
    token, head = offs // H, offs % H
    empty = float("-inf")
    at = head * stride_plse_h + token * stride_plse_t
    a = tl.load(prefix_lse_ptr + at, mask=ok, other=empty)
    at = head * stride_slse_h + token * stride_slse_t
    b = tl.load(suffix_lse_ptr + at, mask=ok, other=empty)
    a = tl.where(a == float("inf"), empty, a)
    b = tl.where(b == float("inf"), empty, b)
    top = tl.maximum(a, b)
    base = tl.where(top == empty, 0.0, top)
    a = tl.exp2((a - base) * LOG2E)
    b = tl.exp2((b - base) * LOG2E)
    total = a + b
    safe = tl.where(total == 0.0, 1.0, total)

    # What an empty side holds may be garbage: it is not read.
    inside = (cols < V)[None, :]
    at = token[:, None] * stride_prefix_t + head[:, None] * stride_prefix_h
    read = (ok & (a != 0.0))[:, None] & inside
    at += cols[None, :] * stride_prefix_v
    left = tl.load(prefix_ptr + at, mask=read, other=0.0).to(tl.float32)
    at = token[:, None] * stride_suffix_t + head[:, None] * stride_suffix_h
    read = (ok & (b != 0.0))[:, None] & inside
    at += cols[None, :] * stride_suffix_v
    right = tl.load(suffix_ptr + at, mask=read, other=0.0).to(tl.float32)
    merged = left * (a / safe)[:, None] + right * (b / safe)[:, None]
    at = token[:, None] * stride_out_t + head[:, None] * stride_out_h
    at += cols[None, :] * stride_out_v
    tl.store(out_ptr + at, merged.to(out_ptr.dtype.element_ty), mask=ok[:, None] & inside)
    lse = tl.where(total == 0.0, empty, top + tl.log2(safe) * LN2)
    at = head * stride_lse_h + token
    tl.store(lse_ptr + at, lse, mask=ok & (tl.zeros_like(offs) == tl.program_id(1)))


def merge_attn_states(
    prefix_out: Tensor,
    prefix_lse: Tensor,
    suffix_out: Tensor,
    suffix_lse: Tensor,
    out: Tensor,
) -> Tensor:
    """Merge two partial results; any strides, and `out` may be one of them.

    Args:
        prefix_out: `[T, H, V]`.
        prefix_lse: `[H, T]`; both infinities mean that the row has seen no key.
        suffix_out: like `prefix_out`.
        suffix_lse: like `prefix_lse`.
        out: `[T, H, V]`, written.

    Returns:
        lse `[H, T]`.
    """
    tokens, heads, width = prefix_out.shape
    lse = torch.empty((heads, tokens), dtype=torch.float32, device=prefix_out.device)
    block = min(128, pow2(width))
    launch(
        mla_merge_states_kernel,
        (cdiv(tokens * heads, _ROWS), cdiv(width, block)),
        out,
        prefix_out,
        prefix_lse,
        suffix_out,
        suffix_lse,
        out,
        lse,
        tokens * heads,
        *prefix_out.stride(),
        *suffix_out.stride(),
        *out.stride(),
        *prefix_lse.stride(),
        *suffix_lse.stride(),
        tokens,
        H=heads,
        V=width,
        ROWS=_ROWS,
        BLOCK_V=block,
        num_warps=4,
    )
    return lse
