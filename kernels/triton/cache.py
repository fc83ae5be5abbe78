"""The paged cache: writing new rows into their slots, and gathering rows into a workspace.

An fp8 cache is handled as bytes: the codes are made and read by integer arithmetic, so that every
GPU, with or without fp8, stores and reads the same ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_ops.errors import InvalidInputError
from mla_ops.kernels.triton.launch import cdiv, launch, pow2, unit
from mla_ops.kernels.triton.primitives import find_block, from_e4m3, to_e4m3

__all__ = ["as_codes", "check_rows", "gather_kv_cache", "update_kv_cache"]

_MANY_TOKENS = 4096
_GATHERED = 16


@triton.jit
def _store_row(source, target, first, cols, WIDTH: tl.constexpr, FP8: tl.constexpr, scale, stride):
    inside = cols < WIDTH
    row = tl.load(source + cols, mask=inside, other=0)
    if FP8:
        stored = to_e4m3(tl.div_rn(row.to(tl.float32), tl.zeros_like(row).to(tl.float32) + scale))
    else:
        stored = row.to(target.dtype.element_ty)
    tl.store(target + (first + cols.to(tl.int64)) * stride, stored, mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def mla_cache_write_kernel(
    latent_ptr,
    rope_ptr,
    cache_ptr,
    slots_ptr,
    scale_ptr,
    num_tokens,
    num_slots,
    stride_latent,
    stride_rope,
    stride_slot,
    stride_page,
    stride_row,
    stride_col,
    L: tl.constexpr,
    R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FP8: tl.constexpr,
    SCALED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Write a few tokens, one after the other; slots outside of the cache are skipped."""
    scale = 1.0
    if SCALED:
        scale = tl.load(scale_ptr).to(tl.float32)
    first = tl.program_id(0).to(tl.int64) * TOKENS
    for token in range(first, tl.minimum(first + TOKENS, num_tokens)):
        slot = tl.load(slots_ptr + token * stride_slot)
        if (slot >= 0) and (slot < num_slots):
            target = cache_ptr + slot // BLOCK_SIZE * stride_page + slot % BLOCK_SIZE * stride_row
            cols = tl.arange(0, BLOCK_L)
            source = latent_ptr + token * stride_latent
            _store_row(source, target, 0, cols, L, FP8, scale, stride_col)
            if R > 0:
                cols = tl.arange(0, BLOCK_R)
                source = rope_ptr + token * stride_rope
                _store_row(source, target, L, cols, R, FP8, scale, stride_col)


@triton.jit
def _copy_part(
    source,
    target,
    at,
    to,
    ok,
    first,
    scale,
    stride_col,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,
    SCALED: tl.constexpr,
):
    cols = first + tl.arange(0, BLOCK)
    inside = ok[:, None] & (cols < D)[None, :]
    rows = tl.load(
        source + at[:, None] + cols[None, :].to(tl.int64) * stride_col, mask=inside, other=0
    )
    if FP8:
        rows = from_e4m3(rows, tl.float32)
    if SCALED:
        rows = rows.to(tl.float32) * scale
    rows = rows.to(target.dtype.element_ty)
    tl.store(target + to[:, None] + cols[None, :], rows, mask=inside)


@triton.jit(do_not_specialize=["num_requests", "num_rows"])
def mla_cache_gather_kernel(
    cache_ptr,
    table_ptr,
    cu_ptr,
    starts_ptr,
    workspace_ptr,
    scale_ptr,
    num_requests,
    num_rows,
    stride_page,
    stride_row,
    stride_col,
    stride_table,
    stride_workspace,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FP8: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Copy some rows of one request: a wide part and the rest, so that little is masked."""
    request, block = find_block(tl.program_id(0), cu_ptr, 0, num_requests, ROWS)
    begin = tl.load(cu_ptr + request)
    end = tl.minimum(tl.load(cu_ptr + request + 1), num_rows)
    place = begin + block * ROWS + tl.arange(0, ROWS)
    ok = (place < end) & (place >= 0)
    key = tl.load(starts_ptr + request) + place - begin
    at = table_ptr + request.to(tl.int64) * stride_table + key // BLOCK_SIZE
    page = tl.load(at, mask=ok, other=0).to(tl.int64)
    at = page * stride_page + (key % BLOCK_SIZE).to(tl.int64) * stride_row
    to = place.to(tl.int64) * stride_workspace
    scale = 1.0
    if SCALED:
        scale = tl.load(scale_ptr).to(tl.float32)
    _copy_part(cache_ptr, workspace_ptr, at, to, ok, 0, scale, stride_col, D, BLOCK_A, FP8, SCALED)
    if BLOCK_B > 0:
        _copy_part(
            cache_ptr,
            workspace_ptr,
            at,
            to,
            ok,
            BLOCK_A,
            scale,
            stride_col,
            D,
            BLOCK_B,
            FP8,
            SCALED,
        )


def as_codes(kv_cache: Tensor) -> Tensor:
    """View an fp8 cache as the bytes of its codes; others stay as they are.

    Args:
        kv_cache: any shape.
    """
    return kv_cache.view(torch.uint8) if kv_cache.dtype.itemsize == 1 else kv_cache


def check_rows(kv_cache: Tensor) -> None:
    """Refuse a cache that attention cannot read in whole rows.

    Args:
        kv_cache: `[num_blocks, block_size, L+R]`.

    Raises:
        InvalidInputError: its last dimension is not contiguous.
    """
    if kv_cache.stride(2) != 1 and kv_cache.shape[2] > 1:
        raise InvalidInputError(
            f"kv_cache must have contiguous rows, got shape {tuple(kv_cache.shape)} with strides "
            f"{kv_cache.stride()}"
        )


def update_kv_cache(
    kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: Tensor | None
) -> None:
    """Write new rows into their slots of the cache; slots outside of it are skipped.

    Args:
        kv_c: `[T, L]`.
        k_pe: `[T, R]`.
        kv_cache: `[num_blocks, block_size, L+R]`, changed in place; any strides.
        slot_mapping: `[T]` int64.
        kv_scale: one element, what stored values are multiplied by when they are read.
    """
    tokens, latent = kv_c.shape
    rope, fp8 = k_pe.shape[1], kv_cache.dtype.itemsize == 1
    kv_c, k_pe = unit(kv_c), unit(k_pe)
    block_size = kv_cache.shape[1]
    at_once = 4 if tokens > _MANY_TOKENS else 1
    cache = as_codes(kv_cache)
    launch(
        mla_cache_write_kernel,
        (cdiv(tokens, at_once),),
        cache,
        kv_c,
        k_pe,
        cache,
        slot_mapping,
        kv_c if kv_scale is None else kv_scale,
        tokens,
        kv_cache.shape[0] * block_size,
        kv_c.stride(0),
        k_pe.stride(0),
        slot_mapping.stride(0),
        *cache.stride(),
        L=latent,
        R=rope,
        BLOCK_SIZE=block_size,
        FP8=fp8,
        SCALED=fp8 and kv_scale is not None,
        TOKENS=at_once,
        BLOCK_L=pow2(latent),
        BLOCK_R=pow2(max(rope, 1)),
        num_warps=1,
    )


def gather_kv_cache(
    kv_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_k: Tensor,
    seq_starts: Tensor,
    workspace: Tensor,
    kv_scale: Tensor | None,
) -> None:
    """Copy cached rows into a workspace, one request after the other.

    Args:
        kv_cache: `[num_blocks, block_size, L+R]`.
        block_table: `[num_reqs, max_blocks]` int32.
        cu_seqlens_k: `[num_reqs + 1]` int32: where each request's rows go.
        seq_starts: `[num_reqs]` int32: the first row of each request that is wanted.
        workspace: `[rows, L+R]`, written.
        kv_scale: one element or None.
    """
    requests, (rows, width) = seq_starts.shape[0], workspace.shape
    if workspace.stride(1) != 1 and width > 1:
        raise InvalidInputError(f"workspace must have contiguous rows, got {workspace.stride()}")
    fp8 = kv_cache.dtype.itemsize == 1
    cache, table = as_codes(kv_cache), unit(block_table)
    wide = 1 << (width.bit_length() - 1)
    launch(
        mla_cache_gather_kernel,
        (rows // _GATHERED + requests if requests else 0,),
        cache,
        cache,
        table,
        unit(cu_seqlens_k),
        unit(seq_starts),
        workspace,
        cache if kv_scale is None else kv_scale,
        requests,
        rows,
        *cache.stride(),
        table.stride(0),
        workspace.stride(0),
        D=width,
        BLOCK_SIZE=kv_cache.shape[1],
        FP8=fp8,
        SCALED=fp8 and kv_scale is not None,
        ROWS=_GATHERED,
        BLOCK_A=wide,
        BLOCK_B=pow2(width - wide) if width > wide else 0,
        num_warps=4,
    )
