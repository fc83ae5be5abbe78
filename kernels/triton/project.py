"""Moving queries into the latent space and results out of it: one product per head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_ops import env
from mla_ops.kernels.triton.configs import padded
from mla_ops.kernels.triton.launch import launch
from mla_ops.kernels.triton.primitives import dot

__all__ = ["project"]


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


def project(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Multiply per head: by the library, or so that a token's bits depend on nothing else.

    Args:
        x: `[H, T, K]`.
        weight: `[H, K, N]`.
        out: `[H, T, N]`, written; its rows are contiguous.
    """
    if not env.batch_invariant():
        torch.bmm(x, weight, out=out)
        return
    heads, tokens, inner = x.shape
    width = weight.shape[2]
    block = min(64, padded(width))
    launch(
        mla_project_kernel,
        (triton.cdiv(tokens, 16), triton.cdiv(width, block), heads),
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
