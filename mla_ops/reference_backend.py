"""The oracle as a backend, so that every op can be run by it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from mla_ops import reference
from mla_ops.dims import stat_dtype
from mla_ops.dispatch import OPS, AttentionOptions, Call, Capabilities, PagedBatch, RaggedBatch
from mla_ops.errors import InvalidInputError

__all__ = ["ReferenceBackend"]


class ReferenceBackend:
    """The oracle as a backend: slow, materialises everything, right. Never chosen by `auto`."""

    name = "reference"
    capabilities = Capabilities(
        ops=OPS,
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64}),
    )

    def not_supported_reasons(self, call: Call) -> list[str]:
        """Return why the oracle cannot take `call`."""
        return self.capabilities.not_supported_reasons(call)

    def _forward(
        self, tensors: Sequence[Tensor], options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        query, kv_c, k_pe, w_kv_b = tensors
        return reference.mla_attention(
            query,
            kv_c,
            k_pe,
            w_kv_b,
            softmax_scale=options.softmax_scale,
            attn_mask=options.attn_mask,
            kv_bounds=options.kv_bounds,
            is_causal=options.is_causal,
            sinks=options.sinks,
        )

    def mla_attention(
        self,
        query: Tensor,
        kv_c: Tensor,
        k_pe: Tensor,
        w_kv_b: Tensor,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor]:
        """Return `out` and `lse` of the expanded form."""
        out, lse = self._forward((query, kv_c, k_pe, w_kv_b), options)
        return out.contiguous(), lse.contiguous()

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
        """Return the gradients that autograd finds for the oracle."""
        del out, lse
        given = [query, kv_c, k_pe, w_kv_b]
        if options.sinks is not None:
            given.append(options.sinks)

        def forward(*leaves: Tensor) -> tuple[Tensor, Tensor]:
            sinks = leaves[4] if len(leaves) == 5 else None
            out, lse = self._forward(leaves[:4], options._replace(sinks=sinks))
            return out, lse

        results, pull = torch.func.vjp(forward, *given)[:2]
        lse_part = torch.zeros_like(results[1]) if grad_lse is None else grad_lse
        grads = [grad.contiguous() for grad in pull((grad_out, lse_part))]
        if options.sinks is None:
            grads.append(query.new_empty(0))
        return grads[0], grads[1], grads[2], grads[3], grads[4]

    def _ragged(
        self, query: Tensor, values: int, cu_seqlens_q: Tensor
    ) -> tuple[Tensor, Tensor, list[slice]]:
        tokens, heads, _ = query.shape
        lse = query.new_full((heads, tokens), float("-inf"), dtype=stat_dtype(query.dtype))
        spans = [slice(begin, end) for begin, end in pairwise(cu_seqlens_q.tolist())]
        return query.new_zeros(tokens, heads, values), lse, spans

    def mla_prefill(self, batch: RaggedBatch) -> tuple[Tensor, Tensor]:
        """Return `[T, H, V]` and `[H, T]`, request by request."""
        query, value = batch.query, batch.value
        out, lse, spans = self._ragged(query, value.shape[2], batch.cu_seqlens_q)
        for q, (begin, end) in zip(spans, pairwise(batch.cu_seqlens_k.tolist()), strict=True):
            k = slice(begin, end)
            shared = batch.k_pe[k, None].expand(-1, query.shape[1], -1)
            key = torch.cat([batch.k_nope[k], shared], dim=-1)
            result = reference.attend(
                query[q].transpose(0, 1)[None],
                key.transpose(0, 1)[None],
                value[k].transpose(0, 1)[None],
                softmax_scale=batch.softmax_scale,
                is_causal=batch.is_causal,
            )
            out[q], lse[:, q] = result.out[0].transpose(0, 1), result.lse[0]
        return out, lse

    def mla_paged_attention(self, batch: PagedBatch) -> tuple[Tensor, Tensor]:
        """Return `[T, H, V]` and `[H, T]`; the rows of decodes come from the cache."""
        query, w_kv_b = batch.query, batch.w_kv_b
        rank, heads = w_kv_b.shape[1], query.shape[1]
        nope = query.shape[2] - (batch.kv_cache.shape[2] - rank)
        width = w_kv_b.shape[0] // heads - nope
        out, lse, spans = self._ragged(query, width, batch.cu_seqlens_q)
        for i, (q, length) in enumerate(zip(spans, batch.seq_lens.tolist(), strict=True)):
            rows = reference.paged_rows(
                batch.kv_cache, batch.block_table[i], 0, length, batch.kv_scale, query.dtype
            )
            if i >= batch.num_decodes and batch.kv_c is not None and batch.k_pe is not None:
                new = torch.cat([batch.kv_c[q], batch.k_pe[q]], dim=-1)
                rows = torch.cat([rows[: length - (q.stop - q.start)], new])
            result = reference.mla_attention(
                query[q].transpose(0, 1)[None],
                rows[None, :, :rank],
                rows[None, :, rank:],
                w_kv_b,
                softmax_scale=batch.softmax_scale,
                is_causal=True,
            )
            out[q], lse[:, q] = result.out[0].transpose(0, 1), result.lse[0]
        return out, lse

    def merge_attn_states(
        self,
        prefix_out: Tensor,
        prefix_lse: Tensor,
        suffix_out: Tensor,
        suffix_lse: Tensor,
        out: Tensor,
    ) -> Tensor:
        """Write the merged result into `out` and return its lse `[H, T]`."""
        merged = reference.merge_attn_states(prefix_out, prefix_lse, suffix_out, suffix_lse)
        out.copy_(merged.out)
        return merged.lse

    def update_kv_cache(
        self,
        kv_c: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_scale: Tensor | None,
    ) -> None:
        """Write row by row; slots below 0 are skipped."""
        slots, limit = slot_mapping.tolist(), kv_cache.shape[0] * kv_cache.shape[1]
        if slots and max(slots) >= limit:
            raise InvalidInputError(
                f"slot_mapping must be below {limit}, the slots of the cache, got {max(slots)}"
            )
        rows = reference.stored(torch.cat([kv_c, k_pe], dim=-1), kv_cache.dtype, kv_scale)
        for row, slot in zip(rows, slots, strict=True):
            if slot >= 0:
                kv_cache[slot // kv_cache.shape[1], slot % kv_cache.shape[1]] = row

    def gather_kv_cache(
        self,
        kv_cache: Tensor,
        block_table: Tensor,
        cu_seqlens_k: Tensor,
        seq_starts: Tensor,
        workspace: Tensor,
        kv_scale: Tensor | None,
    ) -> None:
        """Copy each request's rows."""
        starts = seq_starts.tolist()
        for i, (begin, end) in enumerate(pairwise(cu_seqlens_k.tolist())):
            stop = starts[i] + end - begin
            workspace[begin:end] = reference.paged_rows(
                kv_cache, block_table[i], starts[i], stop, kv_scale, workspace.dtype
            )
