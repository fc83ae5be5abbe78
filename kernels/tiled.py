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

from mla_ops.dims import MLADims
from mla_ops.dispatch import (
    OPS,
    AttentionOptions,
    Call,
    Capabilities,
    PagedLimits,
)
from mla_ops.kernels import tiled_memory, tiled_paged
from mla_ops.kernels.attend import attend, form_from_latents
from mla_ops.kernels.rows import DenseRows
from mla_ops.kernels.tiled_backward import Gradients, attend_backward
from mla_ops.kernels.tiling import Job, Request, Visibility, compute_dtype, plan_tiles

__all__ = ["TiledBackend"]


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
            DenseRows(kv_c[b], k_pe[b]),
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
        ops=OPS,
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
        form_of = form_from_latents(w_kv_b, job)
        for request, out_b, lse_b in zip(requests, out, lse, strict=True):
            attend(request, form_of, options.sinks, job, out_b, lse_b)
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

    def paged_bytes(self, dims: MLADims, limits: PagedLimits) -> dict[str, int]:
        """Return the bytes that the worst call within the limits holds at once, by part."""
        return tiled_memory.worst_bytes(dims, limits)

    mla_prefill = staticmethod(tiled_paged.ragged_prefill)
    mla_paged_attention = staticmethod(tiled_paged.paged_attention)
    merge_attn_states = staticmethod(tiled_paged.merge)
    update_kv_cache = staticmethod(tiled_paged.write)
    gather_kv_cache = staticmethod(tiled_paged.gather)
