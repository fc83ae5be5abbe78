"""The Triton backend: what it takes, and which kernels a call becomes."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_ops.dims import MLADims
from mla_ops.dispatch import (
    OPS,
    AttentionOptions,
    Call,
    Capabilities,
    PagedBatch,
    PagedLimits,
    RaggedBatch,
)
from mla_ops.kernels.triton import cache, dense, dense_backward, memory, merge, paged
from mla_ops.kernels.triton.primitives import INTERPRETED

__all__ = ["TritonBackend"]


class TritonBackend:
    """Attention in Triton kernels, on GPUs; on CPU tensors in Triton's interpreter."""

    name = "triton"
    capabilities = Capabilities(
        ops=OPS,
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        devices=frozenset({"cpu", "cuda"} if INTERPRETED.value else {"cuda"}),
    )

    def not_supported_reasons(self, call: Call) -> list[str]:
        """Return why this backend cannot take `call`."""
        reasons = self.capabilities.not_supported_reasons(call)
        if call.device == "cpu" and not INTERPRETED.value:
            reasons.append("TRITON_INTERPRET=1, set before triton is imported, runs it on a CPU")
        return reasons

    def mla_attention(
        self,
        query: Tensor,
        kv_c: Tensor,
        k_pe: Tensor,
        w_kv_b: Tensor,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor]:
        """Return `out` `[B, H, S, V]` and `lse` `[B, H, S]`."""
        return dense.attention(query, kv_c, k_pe, w_kv_b, options)

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
        return dense_backward.attention_backward(
            grad_out, grad_lse, query, kv_c, k_pe, w_kv_b, out, lse, options
        )

    def mla_prefill(self, batch: RaggedBatch) -> tuple[Tensor, Tensor]:
        """Return `[T, H, V]` and `[H, T]` of ragged attention over expanded keys and values."""
        return paged.ragged_prefill(batch)

    def mla_paged_attention(self, batch: PagedBatch) -> tuple[Tensor, Tensor]:
        """Return `[T, H, V]` and `[H, T]` of a mixed batch, decodes first."""
        if batch.kv_c is None or batch.k_pe is None:
            return paged.decode(batch.query, batch.w_kv_b, batch)
        new = (batch.kv_c, batch.k_pe)
        return paged.attention(batch.query, *new, batch.w_kv_b, batch, batch.num_decodes)

    def paged_bytes(self, dims: MLADims, limits: PagedLimits) -> dict[str, int]:
        """Return the bytes that the worst call within the limits holds at once, by part."""
        return memory.worst_bytes(dims, limits)

    merge_attn_states = staticmethod(merge.merge_attn_states)
    update_kv_cache = staticmethod(cache.update_kv_cache)
    gather_kv_cache = staticmethod(cache.gather_kv_cache)
