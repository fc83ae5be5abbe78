"""Attention over ragged batches and a paged cache: contracts, and one op call each."""

from __future__ import annotations

from torch import Tensor

from mla_ops import ops
from mla_ops.metadata import MLAMetadata
from mla_ops.reference import MLAOutput

__all__ = [
    "gather_kv_cache",
    "merge_attn_states",
    "mla_chunked_prefill",
    "mla_decode",
    "mla_paged_attention",
    "mla_prefill",
    "update_kv_cache",
]


def mla_paged_attention(
    query: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    w_kv_b: Tensor,
    kv_cache: Tensor,
    metadata: MLAMetadata,
    *,
    softmax_scale: float,
    kv_scale: Tensor | None = None,
) -> MLAOutput:
    """Attend for a batch that mixes decodes and prefills over one paged cache.

    The cache already holds the new tokens: `update_kv_cache` comes first. Decodes read everything
    from the cache, absorbed; prefills read their context from it in tiles that fit the workspace,
    and the new tokens from `kv_c` and `k_pe`. Every query sees its request up to itself.

    Args:
        query: `[T, H, P+R]`; bf16, fp16, fp32 or fp64; the batch's tokens in the order of
            `metadata`. Tokens behind the last request's are padding.
        kv_c: `[T, L]`, like the query; RMS-normed latents of the new tokens.
        k_pe: `[T, R]`, like the query; their rotated shared keys.
        w_kv_b: `[H*(P+V), L]`, like the query; the weight of `kv_b_proj`.
        kv_cache: `[num_blocks, block_size, L+R]`; bf16, fp16, fp32 or fp8 e4m3; latent first. Slots
            that no request owns may hold anything.
        metadata: what `build_metadata` returned for the batch.
        softmax_scale: factor on the scores, before any absorption.
        kv_scale: one element, what an fp8 cache is multiplied by; ignored for other caches.

    Returns:
        `out` `[T, H, V]` and `lse` `[H, T]` fp32; padding is 0 and -inf.

    Raises:
        InvalidInputError: an argument does not fit; the message says what was expected.
        UnsupportedInputError: no backend takes the call, or a gradient is asked for.

    Source: vLLM's "MLA with chunked prefill" (PR 12639) and "MLA + V1" (PR 14253).

    Example:
        >>> import torch, mla_ops
        >>> cache, w = torch.zeros(4, 8, 32 + 8), torch.randn(4 * (16 + 12), 32)
        >>> metadata = mla_ops.build_metadata(
        ...     [1, 5], [9, 5], [[0, 1], [2]], block_size=8, workspace_tokens=64
        ... )  # one decode with 8 tokens cached, one fresh prompt of 5
        >>> query, kv_c, k_pe = torch.randn(6, 4, 24), torch.randn(6, 32), torch.randn(6, 8)
        >>> mla_ops.update_kv_cache(kv_c, k_pe, cache, metadata.slot_mapping)
        >>> out, lse = mla_ops.mla_paged_attention(
        ...     query, kv_c, k_pe, w, cache, metadata, softmax_scale=24**-0.5
        ... )
        >>> tuple(out.shape), tuple(lse.shape)
        ((6, 4, 12), (4, 6))
    """
    return MLAOutput(
        *ops.mla_paged_attention(
            query,
            kv_c,
            k_pe,
            w_kv_b,
            kv_cache,
            metadata.block_table,
            metadata.seq_lens,
            kv_scale,
            metadata.cu_seqlens_q,
            metadata.host,
            metadata.chunk_starts,
            metadata.chunk_cu_seqlens,
            metadata.max_query_len,
            metadata.workspace_tokens,
            metadata.num_decodes,
            metadata.decode_query_len,
            softmax_scale,
        )
    )


def mla_chunked_prefill(
    query: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    w_kv_b: Tensor,
    kv_cache: Tensor,
    metadata: MLAMetadata,
    *,
    softmax_scale: float,
    kv_scale: Tensor | None = None,
) -> MLAOutput:
    """Attend for the prefills of a batch: the second half of `mla_paged_attention`.

    The new tokens of the prefills need not be in the cache.

    Args:
        query: `[T, H, P+R]`: the tokens of the prefills only, those behind
            `metadata.num_decode_tokens`.
        kv_c: `[T, L]`, like the query.
        k_pe: `[T, R]`, like the query.
        w_kv_b: `[H*(P+V), L]`, like the query.
        kv_cache: `[num_blocks, block_size, L+R]`; holds the contexts.
        metadata: what `build_metadata` returned for the whole batch.
        softmax_scale: factor on the scores.
        kv_scale: one element, for an fp8 cache.

    Returns:
        `out` `[T, H, V]` and `lse` `[H, T]` fp32.

    Raises:
        InvalidInputError: an argument does not fit.
        UnsupportedInputError: no backend takes the call, or a gradient is asked for.

    Example:
        >>> import torch, mla_ops
        >>> cache, w = torch.randn(4, 8, 32 + 8), torch.randn(4 * (16 + 12), 32)
        >>> metadata = mla_ops.build_metadata(
        ...     [5], [25], [[3, 1, 0, 2]], block_size=8, workspace_tokens=16
        ... )  # 5 new tokens behind 20 cached ones
        >>> query, kv_c, k_pe = torch.randn(5, 4, 24), torch.randn(5, 32), torch.randn(5, 8)
        >>> out, lse = mla_ops.mla_chunked_prefill(
        ...     query, kv_c, k_pe, w, cache, metadata, softmax_scale=24**-0.5
        ... )
        >>> tuple(out.shape)
        (5, 4, 12)
    """
    block_table, seq_lens, cu_seqlens_q, host = metadata.prefills
    return MLAOutput(
        *ops.mla_chunked_prefill(
            query,
            kv_c,
            k_pe,
            w_kv_b,
            kv_cache,
            block_table,
            seq_lens,
            kv_scale,
            cu_seqlens_q,
            host,
            metadata.chunk_starts,
            metadata.chunk_cu_seqlens,
            metadata.max_query_len,
            metadata.workspace_tokens,
            softmax_scale,
        )
    )


def mla_decode(
    query: Tensor,
    w_kv_b: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    softmax_scale: float,
    kv_scale: Tensor | None = None,
) -> MLAOutput:
    """Attend for decodes over a paged cache that holds their new tokens too, absorbed.

    Args:
        query: `[T, H, P+R]`, the same number `T / num_reqs` of new tokens for every request: 1, or
            more with speculative decoding. Query `i` of `q` sees `seq_len - q + i + 1` keys.
        w_kv_b: `[H*(P+V), L]`, like the query.
        kv_cache: `[num_blocks, block_size, L+R]`.
        block_table: `[num_reqs, max_blocks]` int32; entries past a length may be anything.
        seq_lens: `[num_reqs]` int32, new tokens included; 0 marks a padding row.
        softmax_scale: factor on the scores: of the full head, not of the latent.
        kv_scale: one element, for an fp8 cache.

    Returns:
        `out` `[T, H, V]` and `lse` `[H, T]` fp32; rows without keys are 0 and -inf.

    Raises:
        InvalidInputError: an argument does not fit.
        UnsupportedInputError: no backend takes the call, or a gradient is asked for.

    Example:
        >>> import torch, mla_ops
        >>> out, lse = mla_ops.mla_decode(
        ...     torch.randn(2, 4, 24), torch.randn(4 * (16 + 12), 32), torch.randn(4, 8, 32 + 8),
        ...     torch.tensor([[3, 1], [0, 0]], dtype=torch.int32),
        ...     torch.tensor([9, 4], dtype=torch.int32), softmax_scale=24**-0.5,
        ... )
        >>> tuple(out.shape)
        (2, 4, 12)
    """
    return MLAOutput(
        *ops.mla_decode(query, w_kv_b, kv_cache, block_table, seq_lens, kv_scale, softmax_scale)
    )


def mla_prefill(
    query: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    value: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    is_causal: bool,
) -> MLAOutput:
    """Attend over a ragged batch whose keys and values are expanded already.

    Args:
        query: `[T, H, P+R]`.
        k_nope: `[K, H, P]`, like the query.
        k_pe: `[K, R]`, like the query; shared by the heads, so that no key is concatenated.
        value: `[K, H, V]`, like the query; any strides.
        cu_seqlens_q: `[num_reqs + 1]` int32; may repeat (empty request), may end before T.
        cu_seqlens_k: `[num_reqs + 1]` int32, likewise for the keys.
        max_seqlen_q: at least the longest run of queries.
        max_seqlen_k: at least the longest run of keys.
        softmax_scale: factor on the scores.
        is_causal: bottom-right aligned: a request's last query sees its last key.

    Returns:
        `out` `[T, H, V]` and `lse` `[H, T]` fp32; rows without keys are 0 and -inf.

    Raises:
        InvalidInputError: an argument does not fit.
        UnsupportedInputError: no backend takes the call, or a gradient is asked for.

    Example:
        >>> import torch, mla_ops
        >>> cu = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> out, lse = mla_ops.mla_prefill(
        ...     torch.randn(5, 4, 24), torch.randn(5, 4, 16), torch.randn(5, 8),
        ...     torch.randn(5, 4, 12), cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=3,
        ...     max_seqlen_k=3, softmax_scale=24**-0.5, is_causal=True,
        ... )
        >>> tuple(out.shape)
        (5, 4, 12)
    """
    return MLAOutput(
        *ops.mla_prefill(
            query,
            k_nope,
            k_pe,
            value,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            softmax_scale,
            is_causal,
        )
    )


def merge_attn_states(
    prefix_out: Tensor,
    prefix_lse: Tensor,
    suffix_out: Tensor,
    suffix_lse: Tensor,
    *,
    out: Tensor | None = None,
) -> MLAOutput:
    """Merge attention over two disjoint sets of keys by their log-sum-exp.

    A row whose lse is -inf or +inf has seen no key: it contributes nothing, whatever its values
    are. Both sides empty: 0 and -inf.

    Args:
        prefix_out: `[T, H, V]`, any strides.
        prefix_lse: `[H, T]` fp32, natural logarithm, any strides.
        suffix_out: `[T, H, V]`.
        suffix_lse: `[H, T]`.
        out: `[T, H, V]`, where to write, any strides; may be one of the inputs. None: fresh.

    Returns:
        `out`, and `lse` `[H, T]`.

    Raises:
        InvalidInputError: an argument does not fit.
        UnsupportedInputError: a gradient is asked for.

    Source: section 2.2 of "Cascade Inference" (FlashInfer, arXiv:2501.01005).

    Example:
        >>> import torch, mla_ops
        >>> one, zero = torch.ones(1, 1, 2), torch.zeros(1, 1)
        >>> mla_ops.merge_attn_states(one, zero, 3 * one, zero).out
        tensor([[[2., 2.]]])
    """
    return MLAOutput(
        *ops.merge_attn_states(prefix_out, prefix_lse, suffix_out, suffix_lse, out=out)
    )


def update_kv_cache(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_scale: Tensor | None = None,
) -> None:
    """Write new tokens into a paged cache; the only function that changes one.

    Args:
        kv_c: `[T, L]`, floating point; RMS-normed latents.
        k_pe: `[T, R]`, like `kv_c`; rotated shared keys.
        kv_cache: `[num_blocks, block_size, L+R]`, changed in place; bf16, fp16, fp32 or fp8 e4m3.
        slot_mapping: `[T]` int64, `block * block_size + offset`; below 0: skip the token.
        kv_scale: one element; an fp8 cache stores `value / kv_scale`, saturating. Ignored for other
            caches.

    Raises:
        InvalidInputError: an argument does not fit.

    Example:
        >>> import torch, mla_ops
        >>> cache = torch.zeros(2, 4, 3)
        >>> slots = torch.tensor([5, -1])
        >>> mla_ops.update_kv_cache(torch.ones(2, 2), torch.full((2, 1), 7.0), cache, slots)
        >>> cache[1, 1].tolist(), int(cache.count_nonzero())
        ([1.0, 1.0, 7.0], 3)
    """
    ops.update_kv_cache(kv_c, k_pe, kv_cache, slot_mapping, kv_scale)


def gather_kv_cache(
    kv_cache: Tensor,
    block_table: Tensor,
    *,
    cu_seqlens_k: Tensor,
    seq_starts: Tensor,
    workspace: Tensor,
    kv_scale: Tensor | None = None,
) -> None:
    """Copy cached rows of several requests into a workspace that the caller owns.

    Request `i` gets rows `seq_starts[i]`, `seq_starts[i] + 1`, ... of its sequence, from any row
    on, into `workspace[cu_seqlens_k[i] : cu_seqlens_k[i + 1]]`.

    Args:
        kv_cache: `[num_blocks, block_size, L+R]`.
        block_table: `[num_reqs, max_blocks]` int32.
        cu_seqlens_k: `[num_reqs + 1]` int32.
        seq_starts: `[num_reqs]` int32.
        workspace: `[rows, L+R]`, floating point, changed in place; other rows stay as they are.
        kv_scale: one element, what an fp8 cache is multiplied by.

    Raises:
        InvalidInputError: an argument does not fit.

    Example:
        >>> import torch, mla_ops
        >>> cache = torch.arange(8.0).view(4, 2, 1)
        >>> workspace = torch.zeros(3, 1)
        >>> mla_ops.gather_kv_cache(
        ...     cache, torch.tensor([[3, 0]], dtype=torch.int32), workspace=workspace,
        ...     cu_seqlens_k=torch.tensor([0, 3], dtype=torch.int32),
        ...     seq_starts=torch.tensor([1], dtype=torch.int32),
        ... )
        >>> workspace.flatten().tolist()
        [7.0, 0.0, 1.0]
    """
    ops.gather_kv_cache(kv_cache, block_table, cu_seqlens_k, seq_starts, workspace, kv_scale)
