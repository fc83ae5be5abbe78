"""Gradients of the tiled backend: probabilities are computed again, tile by tile.

Nothing of size S x T is kept between forward and backward; the backward holds one tile and, in
fp32, the gradients themselves. Source: FlashAttention (arXiv:2205.14135), algorithm 4, here with
the up projection inside the loop over the keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mla_ops.kernels.softmax import tile_softmax
from mla_ops.kernels.tiling import Job, Request, Tile, blocks, finite

__all__ = ["Gradients", "attend_backward"]


class Gradients(NamedTuple):
    """Accumulators of one request, in the dtype of the statistics; `w_kv_b` is the whole call's.

    Attributes:
        query: `[H, S, P+R]`.
        kv_c: `[T, L]`.
        k_pe: `[T, R]`.
        w_kv_b: `[H*(P+V), L]`.
    """

    query: Tensor
    kv_c: Tensor
    k_pe: Tensor
    w_kv_b: Tensor


class _Queries(NamedTuple):
    """What one block of queries brings to the backward: everything is contiguous."""

    where: slice
    query: Tensor  # [h, s, P+R], compute dtype
    grad_out: Tensor  # [h, s, V], compute dtype
    delta: Tensor  # [h, s, 1]: sum(grad_out * out) - grad_lse
    lse: Tensor  # [h, s, 1], +inf for a row without keys, so that its probabilities are 0


def attend_backward(
    request: Request,
    w_kv_b: Tensor,
    grad_out: Tensor,
    delta: Tensor,
    lse: Tensor,
    job: Job,
    grads: Gradients,
) -> None:
    """Add the gradients of one request to `grads`.

    Args:
        request: the request's tensors.
        w_kv_b: `[H*(P+V), L]`.
        grad_out: `[H, S, V]`.
        delta: `[H, S]`: `sum(grad_out * out, -1) - grad_lse`.
        lse: `[H, S]`, as the forward returned it.
        job: the call; its plan expands.
        grads: accumulators.
    """
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    for heads in blocks(job.dims.num_heads, job.plan.heads):
        queries = [
            _Queries(
                s,
                request.query[heads, s].to(job.compute).contiguous(),
                grad_out[heads, s].to(job.compute).contiguous(),
                delta[heads, s, None],
                lse[heads, s, None],
            )
            for s in blocks(request.query.shape[1], job.plan.queries)
        ]
        _walk_keys(request, heads, job.weights_of(heads, w_kv_b), queries, job, grads)


def _walk_keys(
    request: Request,
    heads: slice,
    w_kv_b: Tensor,
    queries: list[_Queries],
    job: Job,
    grads: Gradients,
) -> None:
    """Add what one block of heads contributes."""
    dims, visibility = job.dims, request.visibility
    count, pair = heads.stop - heads.start, dims.qk_nope_head_dim + dims.v_head_dim
    grad_w = grads.w_kv_b[heads.start * pair : heads.stop * pair]
    for where in request.tiles(job.plan.keys):
        rows = request.rows(where, job.compute)
        latent, rope = finite(rows[0], visibility), finite(rows[1], visibility)
        keys, values = job.expand(latent, rope, w_kv_b)
        grad_k = torch.zeros_like(keys, dtype=job.stats)
        grad_v = torch.zeros_like(values, dtype=job.stats)
        for block in queries:
            tile = visibility.tile(heads, block.where, where)
            if tile is not None:
                seen = slice(0, tile.keys.stop - tile.keys.start)
                grads.query[heads, block.where] += _tile_backward(
                    block,
                    keys[:, seen],
                    values[:, seen],
                    tile,
                    job,
                    grad_k[:, seen],
                    grad_v[:, seen],
                )
        grad_nope, grad_rope = grad_k.split([dims.qk_nope_head_dim, dims.qk_rope_head_dim], dim=-1)
        grad_pair = torch.cat([grad_nope, grad_v], dim=-1).transpose(0, 1)
        grad_pair = grad_pair.reshape(latent.shape[0], count * pair).to(job.compute)
        grads.kv_c[where] += grad_pair @ w_kv_b
        grads.k_pe[where] += grad_rope.sum(dim=0)
        grad_w += grad_pair.t() @ latent


def _tile_backward(
    block: _Queries,
    keys: Tensor,
    values: Tensor,
    tile: Tile,
    job: Job,
    grad_k: Tensor,
    grad_v: Tensor,
) -> Tensor:
    """Add one tile's gradients of keys and values; return that of its queries."""
    shape = (block.query.shape[0], block.query.shape[1], keys.shape[1])
    low, weights = job.low(shape), job.scores(shape)
    torch.baddbmm(low, block.query, keys.transpose(1, 2), beta=0, alpha=job.scale, out=low)
    if low.dtype != weights.dtype:
        weights.copy_(low)
    mass = tile_softmax(weights, tile)
    weights.mul_((mass.top - block.lse).exp_() * mass.sum)
    grad_v += torch.bmm(weights.to(job.compute).transpose(1, 2), block.grad_out)
    grad_scores = torch.bmm(block.grad_out, values.transpose(1, 2)).to(job.stats)
    grad_scores.sub_(block.delta).mul_(weights).mul_(job.scale)
    grad_scores = grad_scores.to(job.compute)
    grad_k += torch.bmm(grad_scores.transpose(1, 2), block.query)
    return torch.bmm(grad_scores, keys)
