"""The CPU backend: what the native kernels need to know, and nothing else.

Sources: absorption, DeepSeek-V2 (arXiv:2405.04434); tiles and online softmax, FlashAttention-2
(arXiv:2307.08691); spans of keys, Flash-Decoding (Dao et al., 2023).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
from mla_ops.errors import InvalidInputError
from mla_ops.kernels.cpu import build
from mla_ops.kernels.rows import check_rows

__all__ = ["CpuBackend"]

_MOST_KEYS = 1 << 20
_MASKS = (torch.bool, torch.bfloat16, torch.float16, torch.float32)


@contextmanager
def _refusing() -> Iterator[None]:
    """Turn the native module's refusals into this package's."""
    try:
        yield
    except ValueError as error:
        raise InvalidInputError(str(error)) from None


def _lined(tensor: Tensor) -> Tensor:
    """Return a tensor whose rows are contiguous; the kernels take any other strides."""
    return tensor if tensor.shape[-1] <= 1 or tensor.stride(-1) == 1 else tensor.contiguous()


def _widths(query: Tensor, w_kv_b: Tensor, rope: int) -> tuple[int, int, int, int, int]:
    """Return H, L, P, R and V, for a query `[..., P+R]` whose heads are dimension 1."""
    heads, nope = query.shape[1], query.shape[-1] - rope
    return heads, w_kv_b.shape[1], nope, rope, w_kv_b.shape[0] // heads - nope


def _results(query: Tensor, value_width: int) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = query.shape
    lse = query.new_full((heads, tokens), float("-inf"), dtype=torch.float32)
    return query.new_zeros(tokens, heads, value_width), lse


class CpuBackend:
    """Attention in C++, with torch's matrix micro-kernels; see `kernels/cpu/*.h`.

    Raises:
        ImportError: the native kernels cannot be had here.
    """

    name = "cpu"
    capabilities = Capabilities(
        ops=OPS - {"mla_attention_backward"},
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        devices=frozenset({"cpu"}),
    )

    def __init__(self) -> None:
        self._native = build.load()
        self._has_bfloat16 = self._native.takes_bfloat16()

    def describe(self) -> str:
        """Return how this machine multiplies: one line for a person."""
        if torch.cpu._is_amx_tile_supported() and self._has_bfloat16:
            units = "bf16 by AMX"
        else:
            units = "bf16 by AVX512-BF16" if self._has_bfloat16 else "16-bit inputs in fp32"
        return f"{torch.backends.cpu.get_cpu_capability()}, {units}; {build.library_path()}"

    def not_supported_reasons(self, call: Call) -> list[str]:
        """Return why this backend cannot take `call`."""
        return self.capabilities.not_supported_reasons(call)

    def _known(self, tensor: Tensor) -> Tensor:
        """Return a tensor in a dtype that the kernels know, with contiguous rows."""
        return _lined(tensor if tensor.dtype in self.capabilities.dtypes else tensor.float())

    def _in_bfloat16(self, dtype: torch.dtype) -> bool:
        return dtype == torch.bfloat16 and self._has_bfloat16

    def mla_attention(
        self,
        query: Tensor,
        kv_c: Tensor,
        k_pe: Tensor,
        w_kv_b: Tensor,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor]:
        """Return `out` `[B, H, S, V]` and `lse` `[B, H, S]`, both fresh and contiguous."""
        batch, heads, num_queries, _ = query.shape
        widths = _widths(query, w_kv_b, k_pe.shape[2])
        mask, bounds, sinks = options.attn_mask, options.kv_bounds, options.sinks
        if mask is not None:
            mask = mask.float() if mask.dtype not in _MASKS else mask
            mask = mask.expand(batch, heads, num_queries, kv_c.shape[1])
        out = query.new_empty(batch, heads, num_queries, widths[-1])
        lse = query.new_empty((batch, heads, num_queries), dtype=torch.float32)
        self._native.attention(
            _lined(query),
            _lined(kv_c),
            _lined(k_pe),
            _lined(w_kv_b),
            mask,
            None if bounds is None else bounds.contiguous(),
            None if sinks is None else sinks.float().contiguous(),
            options.softmax_scale,
            options.is_causal,
            options.workspace_tokens or _MOST_KEYS,
            self._in_bfloat16(query.dtype),
            torch.get_num_threads(),
            out,
            lse,
        )
        return out, lse

    def mla_prefill(self, batch: RaggedBatch) -> tuple[Tensor, Tensor]:
        """Return `[T, H, V]` and `[H, T]` of ragged attention over expanded keys and values."""
        out, lse = _results(batch.query, batch.value.shape[2])
        with _refusing():
            self._native.prefill(
                *(_lined(tensor) for tensor in batch[:4]),
                batch.cu_seqlens_q.contiguous(),
                batch.cu_seqlens_k.contiguous(),
                batch.softmax_scale,
                batch.is_causal,
                self._in_bfloat16(batch.query.dtype),
                torch.get_num_threads(),
                out,
                lse,
            )
        return out, lse

    def mla_paged_attention(self, batch: PagedBatch) -> tuple[Tensor, Tensor]:
        """Return `[T, H, V]` and `[H, T]` of a mixed batch, decodes first."""
        query, w_kv_b = batch.query, batch.w_kv_b
        check_rows(batch.kv_cache)
        widths = _widths(query, w_kv_b, batch.kv_cache.shape[2] - w_kv_b.shape[1])
        out, lse = _results(query, widths[-1])
        starts, lens = batch.cu_seqlens_q, batch.seq_lens
        if batch.host is not None:
            starts, lens = batch.host.unbind()
        with _refusing():
            self._native.paged(
                _lined(query),
                None if batch.kv_c is None else _lined(batch.kv_c),
                None if batch.k_pe is None else _lined(batch.k_pe),
                _lined(w_kv_b),
                batch.kv_cache,
                _lined(batch.block_table),
                starts.contiguous(),
                lens.contiguous(),
                batch.kv_scale,
                batch.num_decodes,
                batch.softmax_scale,
                batch.workspace_tokens or _MOST_KEYS,
                self._in_bfloat16(query.dtype),
                torch.get_num_threads(),
                out,
                lse,
            )
        return out, lse

    def paged_bytes(self, dims: MLADims, limits: PagedLimits) -> dict[str, int]:
        """Return the bytes that the worst call within the limits holds at once, by part."""
        widths = (
            dims.num_heads,
            dims.kv_lora_rank,
            dims.qk_nope_head_dim,
            dims.qk_rope_head_dim,
            dims.v_head_dim,
        )
        scratch = self._native.worst_bytes(
            *widths,
            limits.num_tokens,
            limits.workspace_tokens,
            self._in_bfloat16(limits.dtype),
            torch.get_num_threads(),
        )
        per_token = dims.v_head_dim * limits.dtype.itemsize + torch.float32.itemsize
        return {"results": limits.num_tokens * dims.num_heads * per_token, "scratch": scratch}

    def merge_attn_states(
        self,
        prefix_out: Tensor,
        prefix_lse: Tensor,
        suffix_out: Tensor,
        suffix_lse: Tensor,
        out: Tensor,
    ) -> Tensor:
        """Write the merged result into `out` and return its lse `[H, T]`."""
        lse = torch.empty(prefix_lse.shape, dtype=torch.float32)
        target = self._known(out)  # one of the results may be fp64 beside the others
        self._native.merge(
            self._known(prefix_out),
            prefix_lse,
            self._known(suffix_out),
            suffix_lse,
            target,
            lse,
            torch.get_num_threads(),
        )
        if target is not out:
            out.copy_(target)
        return lse

    def update_kv_cache(
        self,
        kv_c: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_scale: Tensor | None,
    ) -> None:
        """Write new rows into the cache; slots below 0 are skipped."""
        check_rows(kv_cache)
        with _refusing():
            self._native.update_cache(
                _lined(kv_c),
                _lined(k_pe),
                kv_cache,
                slot_mapping.contiguous(),
                kv_scale,
                torch.get_num_threads(),
            )

    def gather_kv_cache(
        self,
        kv_cache: Tensor,
        block_table: Tensor,
        cu_seqlens_k: Tensor,
        seq_starts: Tensor,
        workspace: Tensor,
        kv_scale: Tensor | None,
    ) -> None:
        """Copy cached rows into the workspace."""
        check_rows(kv_cache)
        target = _lined(workspace)
        with _refusing():
            self._native.gather(
                kv_cache,
                _lined(block_table),
                cu_seqlens_k.contiguous(),
                seq_starts.contiguous(),
                target,
                kv_scale,
                torch.get_num_threads(),
            )
        if target is not workspace:
            workspace.copy_(target)
