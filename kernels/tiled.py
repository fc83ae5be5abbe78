"""The tiled backend: plain torch on any device, and the fast one on a CPU.

Keys are walked in tiles. The scores of a tile are small enough to stay in cache, take one softmax,
and their result joins the running one by its log-sum-exp, so nothing grows with the context:

```
for each block of heads
    for each tile of keys              absorbed: the latent rows as they lie, shared by the heads
                                       expanded: the tile's own K and V, made in scratch
        for each block of queries      skipped where the causal rule or the mask hides all of it
            scores, softmax, P @ V     matmuls in the compute dtype, statistics in fp32
```

Absorbed or expanded is chosen per request by the number of new tokens.
Sources: online softmax, Milakov and Gimelshein (arXiv:1805.02867); tiles, FlashAttention
(arXiv:2205.14135); absorption, DeepSeek-V2 (arXiv:2405.04434).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_ops.dims import MLADims, split_kv_b
from mla_ops.dispatch import AttentionOptions, Call, Capabilities
from mla_ops.kernels.tiled_backward import Gradients, attend_backward
from mla_ops.kernels.tiling import (
    Job,
    Request,
    Running,
    Visibility,
    blocks,
    compute_dtype,
    plan_tiles,
    tile_softmax,
)

__all__ = ["TiledBackend"]


class _Absorbed:
    """Keys and values are the latent rows; the up projections act on queries and results."""

    def __init__(self, query: Tensor, w_kv_b: Tensor, job: Job) -> None:
        dims = job.dims
        w_uk, w_uv = split_kv_b(w_kv_b, query.shape[0], dims.qk_nope_head_dim)
        self._w_uv = w_uv.contiguous()  # bmm would copy the strided view itself, transposed
        nope, rope = query.split([dims.qk_nope_head_dim, dims.qk_rope_head_dim], dim=-1)
        latent = torch.bmm(nope, w_uk)  # [h, S, L]
        self._queries = [
            (latent[:, s].flatten(0, 1), rope[:, s].flatten(0, 1))
            for s in blocks(query.shape[1], job.plan.queries)
        ]
        self._job = job

    def load(self, latent: Tensor, rope: Tensor) -> None:
        """Take a tile's rows: `[C, L]` and `[C, R]`."""
        self._latent, self._rope = latent, rope

    def scores(self, block: int, shape: tuple[int, int, int]) -> Tensor:
        """Return the scaled scores of one query block `[h, s, C]`, fp32, in the scratch."""
        job, (latent, rope) = self._job, self._queries[block]
        scores, low = job.scores(shape), job.low(shape)
        flat, flat_low = scores.flatten(0, 1), low.flatten(0, 1)
        keys, rope_keys = self._latent[: shape[2]].t(), self._rope[: shape[2]].t()
        torch.addmm(flat_low, latent, keys, beta=0, alpha=job.scale, out=flat_low)
        if low.dtype == scores.dtype:
            flat.addmm_(rope, rope_keys, alpha=job.scale)
        else:
            flat.copy_(flat_low)
            torch.addmm(flat_low, rope, rope_keys, beta=0, alpha=job.scale, out=flat_low)
            flat.add_(flat_low)
        return scores

    def values(self, weights: Tensor) -> Tensor:
        """Return a tile's result for weights `[h, s, C]`: `[h, s, L]`."""
        flat = torch.mm(weights.flatten(0, 1), self._latent[: weights.shape[2]])
        return flat.view(*weights.shape[:2], flat.shape[-1])

    def finish(self, value: Tensor) -> Tensor:
        """Return the output of one query block: `[h, s, V]`."""
        return torch.bmm(value, self._w_uv.transpose(1, 2))


class _Expanded:
    """Keys and values of one tile are made from the latents in scratch, used, and overwritten."""

    def __init__(self, query: Tensor, w_kv_b: Tensor, job: Job) -> None:
        self._queries = [query[:, s].contiguous() for s in blocks(query.shape[1], job.plan.queries)]
        self._w_kv_b = w_kv_b
        self._job = job

    def load(self, latent: Tensor, rope: Tensor) -> None:
        """Expand a tile's rows: `[C, L]` and `[C, R]`."""
        self._keys, self._values = self._job.expand(latent, rope, self._w_kv_b)

    def scores(self, block: int, shape: tuple[int, int, int]) -> Tensor:
        """Return the scaled scores of one query block `[h, s, C]`, fp32, in the scratch."""
        scores, low = self._job.scores(shape), self._job.low(shape)
        keys = self._keys[:, : shape[2]].transpose(1, 2)
        torch.baddbmm(low, self._queries[block], keys, beta=0, alpha=self._job.scale, out=low)
        return scores if low.dtype == scores.dtype else scores.copy_(low)

    def values(self, weights: Tensor) -> Tensor:
        """Return a tile's result for weights `[h, s, C]`: `[h, s, V]`."""
        return torch.bmm(weights, self._values[:, : weights.shape[2]])

    def finish(self, value: Tensor) -> Tensor:
        """Return the output of one query block, which is there already: `[h, s, V]`."""
        return value


def _walk_keys(
    form: _Absorbed | _Expanded, request: Request, heads: slice, queries: list[slice], job: Job
) -> list[Running]:
    """Walk the keys for one block of heads; one running result per block of queries."""
    visibility = request.visibility
    running = [Running() for _ in queries]
    for keys in blocks(visibility.end, job.plan.keys, visibility.begin):
        loaded = False
        for i, where in enumerate(queries):
            tile = visibility.tile(heads, where, keys)
            if tile is None:
                continue
            if not loaded:
                form.load(*request.rows(keys, job.compute))
                loaded = True
            count = tile.keys.stop - tile.keys.start
            shape = (heads.stop - heads.start, where.stop - where.start, count)
            scores = form.scores(i, shape)
            lse = tile_softmax(scores, tile)
            weights = job.low(shape)
            if weights.dtype != scores.dtype:
                weights.copy_(scores)
            running[i].add(form.values(weights), lse)
    return running


def _attend(
    request: Request, w_kv_b: Tensor, sinks: Tensor | None, job: Job, out: Tensor, lse: Tensor
) -> None:
    """Attend for one request, into out `[H, S, V]` and lse `[H, S]`."""
    queries = list(blocks(request.query.shape[1], job.plan.queries))
    form_of = _Expanded if job.plan.expand else _Absorbed
    for heads in blocks(job.dims.num_heads, job.plan.heads):
        form = form_of(request.query[heads].to(job.compute), job.weights_of(heads, w_kv_b), job)
        sink = None if sinks is None else sinks[heads, None, None].to(lse.dtype)
        for where, running in zip(
            queries, _walk_keys(form, request, heads, queries, job), strict=True
        ):
            merged = running.result(sink)
            if merged is None:
                out[heads, where] = 0.0
                lse[heads, where] = float("-inf") if sink is None else sink[..., 0]
            else:
                out[heads, where] = form.finish(merged[0].to(job.compute))
                lse[heads, where] = merged[1][..., 0]


def _prepare(
    query: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    w_kv_b: Tensor,
    options: AttentionOptions,
    expand: bool | None,
) -> tuple[Job, list[Request]]:
    """Cut a dense batch into requests and plan the call."""
    _, heads, num_queries, width = query.shape
    rope = k_pe.shape[2]
    nope = width - rope
    dims = MLADims(heads, kv_c.shape[2], nope, rope, w_kv_b.shape[0] // heads - nope)
    mask, bounds = options.attn_mask, options.kv_bounds
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
    requests = [
        Request(
            query[b],
            kv_c[b],
            k_pe[b],
            Visibility(
                num_queries,
                kv_c.shape[1],
                is_causal=options.is_causal,
                mask=None if mask is None else mask[b if mask.shape[0] > 1 else 0],
                bounds=None if bounds is None else bounds[b],
                device=query.device,
            ),
        )
        for b in range(query.shape[0])
    ]
    compute = compute_dtype(query.dtype, query.device)
    plan = plan_tiles(
        dims,
        num_queries,
        max((r.visibility.end - r.visibility.begin for r in requests), default=0),
        workspace_tokens=options.workspace_tokens,
        device=query.device,
        converts=compute != query.dtype,
        expand=expand,
    )
    return Job(dims, plan, options.softmax_scale, query, compute), requests


class TiledBackend:
    """Attention in cache-sized tiles of plain torch; see the module's page."""

    name = "tiled"
    capabilities = Capabilities(
        ops=frozenset({"mla_attention", "mla_attention_backward"}),
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64}),
    )

    def not_supported_reasons(self, call: Call) -> list[str]:
        """Return why this backend cannot take `call`."""
        return self.capabilities.not_supported_reasons(call)

    def mla_attention(
        self,
        query: Tensor,
        kv_c: Tensor,
        k_pe: Tensor,
        w_kv_b: Tensor,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor]:
        """Return `out` `[B, H, S, V]` and `lse` `[B, H, S]`, both fresh and contiguous."""
        job, requests = _prepare(query, kv_c, k_pe, w_kv_b, options, expand=None)
        out = query.new_empty(*query.shape[:3], job.dims.v_head_dim)
        lse = query.new_empty(query.shape[:3], dtype=job.stats)
        for request, out_b, lse_b in zip(requests, out, lse, strict=True):
            _attend(request, w_kv_b, options.sinks, job, out_b, lse_b)
        return out, lse

    def mla_attention_backward(
        self,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        query: Tensor,
        kv_c: Tensor,
        k_pe: Tensor,
        w_kv_b: Tensor,
        out: Tensor,
        lse: Tensor,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of query, kv_c, k_pe, w_kv_b and sinks (empty without sinks)."""
        job, requests = _prepare(query, kv_c, k_pe, w_kv_b, options, expand=True)
        inputs = (query, kv_c, k_pe, w_kv_b)
        grads = Gradients(*(t.new_zeros(t.shape, dtype=job.stats) for t in inputs))
        delta = (grad_out.to(job.stats) * out.to(job.stats)).sum(dim=-1)
        if grad_lse is not None:
            delta -= grad_lse
        for b, request in enumerate(requests):
            attend_backward(
                request,
                w_kv_b,
                grad_out[b],
                delta[b],
                lse[b],
                job,
                Gradients(grads.query[b], grads.kv_c[b], grads.k_pe[b], grads.w_kv_b),
            )
        sinks = options.sinks
        if sinks is None:
            grad_sinks = query.new_empty(0)
        else:
            share = torch.exp(sinks.to(job.stats)[:, None] - lse)
            grad_sinks = -(share * delta).sum(dim=(0, 2)).to(sinks.dtype)
        dq, dc, dp, dw = (g.to(query.dtype) for g in grads)
        return dq, dc, dp, dw, grad_sinks
