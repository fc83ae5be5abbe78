"""Moving queries into the latent space and results out of it: one product per head."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_ops.dims import MLADims
from mla_ops.kernels.triton.configs import padded
from mla_ops.kernels.triton.launch import cdiv, launch
from mla_ops.kernels.triton.primitives import dot

__all__ = ["halves", "project", "widths"]


@triton.jit(do_not_specialize=["num_tokens"])
def mla_project_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    num_tokens,
    stride_x_h,
    stride_x_t,
    stride_x_k,
    stride_w_h,
    stride_w_k,
    stride_w_n,
    stride_out_h,
    stride_out_t,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Multiply some tokens of one head; a token's sum does not depend on the others."""
    head = tl.program_id(2).to(tl.int64)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    inner = tl.arange(0, BLOCK_K).to(tl.int64)
    acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + inner
        at = head * stride_x_h + tokens[:, None] * stride_x_t + k[None, :] * stride_x_k
        inside = (tokens < num_tokens)[:, None] & (k < K)[None, :]
        x = tl.load(x_ptr + at, mask=inside, other=0.0)
        at_w = head * stride_w_h + k[:, None] * stride_w_k + cols[None, :] * stride_w_n
        w = tl.load(w_ptr + at_w, mask=(k < K)[:, None] & (cols < N)[None, :], other=0.0)
        acc = dot(x, w, acc)
    at_out = head * stride_out_h + tokens[:, None] * stride_out_t + cols[None, :]
    inside_out = (tokens < num_tokens)[:, None] & (cols < N)[None, :]
    tl.store(out_ptr + at_out, acc.to(out_ptr.dtype.element_ty), mask=inside_out)


@functools.cache
def widths(heads: int, latent: int, rope: int, query: int, expanded: int) -> MLADims:
    """Return the widths of a layer from sizes of its tensors.

    Args:
        heads: H.
        latent: L.
        rope: R.
        query: P + R.
        expanded: H * (P + V).
    """
    nope = query - rope
    return MLADims(heads, latent, nope, rope, expanded // heads - nope)


def halves(w_kv_b: Tensor, dims: MLADims) -> tuple[Tensor, Tensor]:
    """Return `w_uk` `[H, P, L]` and `w_uv` transposed, `[H, L, V]`: views.

    Args:
        w_kv_b: `[H*(P+V), L]`.
        dims: widths of the layer.
    """
    heads, latent = dims.num_heads, dims.kv_lora_rank
    nope, value = dims.qk_nope_head_dim, dims.v_head_dim
    of_row, of_column = w_kv_b.stride()
    of_head = (nope + value) * of_row
    # One view each: slicing and transposing would make six of them.
    w_uk = w_kv_b.as_strided((heads, nope, latent), (of_head, of_row, of_column))
    behind = w_kv_b.storage_offset() + nope * of_row
    w_uv = w_kv_b.as_strided((heads, latent, value), (of_head, of_column, of_row), behind)
    return w_uk, w_uv


def project(x: Tensor, weight: Tensor, out: Tensor, invariant: bool) -> None:
    """Multiply per head: by the library, whose sums depend on the batch, or by a kernel.

    Args:
        x: `[H, T, K]`.
        weight: `[H, K, N]`.
        out: `[H, T, N]`, written; its rows are contiguous.
        invariant: whether a token's bits must not depend on the others.
    """
    if not invariant:
        torch.bmm(x, weight, out=out)
        return
    heads, tokens, inner = x.shape
    width = weight.shape[2]
    block = min(64, padded(width))
    launch(
        mla_project_kernel,
        (cdiv(tokens, 16), cdiv(width, block), heads),
        x,
        x,
        weight,
        out,
        tokens,
        *x.stride(),
        *weight.stride(),
        out.stride(0),
        out.stride(1),
        K=inner,
        N=width,
        BLOCK_T=16,
        BLOCK_K=min(64, padded(inner)),
        BLOCK_N=block,
        num_warps=4,
        num_stages=2,
    )
