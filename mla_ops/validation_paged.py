"""Checks of the arguments of the ops over ragged batches and a paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_ops.dims import stat_dtype
from mla_ops.validation import (
    FLOAT_DTYPES,
    check_device,
    check_like_query,
    check_rank,
    check_scale,
    fail,
)

__all__ = [
    "CACHE_DTYPES",
    "check_gather",
    "check_merge",
    "check_paged",
    "check_prefill",
    "check_update",
]

CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
"""Dtypes that a paged cache stores."""


def _check_ints(
    name: str, tensor: Tensor, shape: str, sizes: tuple[int | None, ...], like: Tensor
) -> None:
    """Check an int32 tensor beside `like`: None in `sizes` lets any size pass."""
    if tensor.dtype != torch.int32:
        fail(name, "int32", tensor.dtype)
    fits = tensor.dim() == len(sizes) and all(
        want is None or have == want for have, want in zip(tensor.shape, sizes, strict=True)
    )
    if not fits:
        known = ", ".join("any" if size is None else str(size) for size in sizes)
        fail(name, f"{shape} = ({known})", f"shape {tuple(tensor.shape)}")
    if tensor.device != like.device:
        fail(name, f"on the device of the data, {like.device}", f"a tensor on {tensor.device}")


def _check_cache(kv_cache: Tensor, latent_dim: int | None, kv_scale: Tensor | None) -> None:
    check_rank("kv_cache", kv_cache, "[num_blocks, block_size, L+R]")
    if kv_cache.dtype not in CACHE_DTYPES:
        fail("kv_cache", f"one of {', '.join(map(str, CACHE_DTYPES))}", kv_cache.dtype)
    if kv_cache.shape[1] < 1:
        fail("kv_cache", "of block_size at least 1", f"shape {tuple(kv_cache.shape)}")
    if latent_dim is not None and kv_cache.shape[2] != latent_dim:
        fail("kv_cache", f"[num_blocks, block_size, L+R = {latent_dim}]", tuple(kv_cache.shape))
    if kv_scale is not None:
        if kv_scale.numel() != 1 or not kv_scale.is_floating_point():
            fail("kv_scale", "one floating-point element", f"{kv_scale.dtype} {kv_scale.shape}")
        check_device("kv_scale", kv_scale, kv_cache)


def check_update(
    kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: Tensor | None
) -> None:
    """Check the arguments of `update_kv_cache`.

    Args:
        kv_c: `[T, L]`, floating point.
        k_pe: `[T, R]`, like `kv_c`.
        kv_cache: `[num_blocks, block_size, L+R]`.
        slot_mapping: `[T]` int64.
        kv_scale: one element.

    Raises:
        InvalidInputError: any of these does not hold.
    """
    check_rank("kv_c", kv_c, "[T, L]")
    check_rank("k_pe", k_pe, "[T, R]")
    if kv_c.dtype not in FLOAT_DTYPES:
        fail("kv_c", f"one of {', '.join(map(str, FLOAT_DTYPES))}", kv_c.dtype)
    if k_pe.dtype != kv_c.dtype or k_pe.shape[0] != kv_c.shape[0]:
        fail(
            "k_pe",
            f"[T = {kv_c.shape[0]}, R] of {kv_c.dtype}, as kv_c",
            f"{k_pe.dtype} {tuple(k_pe.shape)}",
        )
    _check_cache(kv_cache, kv_c.shape[1] + k_pe.shape[1], kv_scale)
    if slot_mapping.dtype != torch.int64:
        fail("slot_mapping", "int64", slot_mapping.dtype)
    if slot_mapping.dim() != 1 or slot_mapping.shape[0] != kv_c.shape[0]:
        fail("slot_mapping", f"[T] = ({kv_c.shape[0]},)", f"shape {tuple(slot_mapping.shape)}")
    for name, tensor in (("k_pe", k_pe), ("kv_cache", kv_cache), ("slot_mapping", slot_mapping)):
        if tensor.device != kv_c.device:
            fail(name, f"on kv_c's device {kv_c.device}", f"a tensor on {tensor.device}")


def check_gather(
    kv_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_k: Tensor,
    seq_starts: Tensor,
    workspace: Tensor,
    kv_scale: Tensor | None,
) -> None:
    """Check the arguments of `gather_kv_cache`.

    Args:
        kv_cache: `[num_blocks, block_size, L+R]`.
        block_table: `[num_reqs, max_blocks]` int32.
        cu_seqlens_k: `[num_reqs + 1]` int32.
        seq_starts: `[num_reqs]` int32.
        workspace: `[rows, L+R]`, floating point.
        kv_scale: one element.

    Raises:
        InvalidInputError: any of these does not hold.
    """
    _check_cache(kv_cache, None, kv_scale)
    _check_ints("block_table", block_table, "[num_reqs, max_blocks]", (None, None), kv_cache)
    requests = block_table.shape[0]
    _check_ints("cu_seqlens_k", cu_seqlens_k, "[num_reqs + 1]", (requests + 1,), kv_cache)
    _check_ints("seq_starts", seq_starts, "[num_reqs]", (requests,), kv_cache)
    check_rank("workspace", workspace, "[rows, L+R]")
    if workspace.dtype not in FLOAT_DTYPES or workspace.shape[1] != kv_cache.shape[2]:
        fail(
            "workspace",
            f"[rows, L+R = {kv_cache.shape[2]}], floating point",
            f"{workspace.dtype} {tuple(workspace.shape)}",
        )
    if workspace.device != kv_cache.device:
        fail("workspace", f"on the cache's device {kv_cache.device}", workspace.device)


def check_prefill(
    query: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    is_causal: bool,
) -> None:
    """Check the arguments of `mla_prefill`.

    Args:
        query: `[T, H, P+R]`, floating point.
        k_nope: `[K, H, P]`, like the query.
        k_pe: `[K, R]`, like the query.
        value: `[K, H, V]`, like the query.
        cu_seqlens_q: `[num_reqs + 1]` int32.
        cu_seqlens_k: like `cu_seqlens_q`.
        max_seqlen_q: at least 0.
        max_seqlen_k: at least 0.
        softmax_scale: finite.
        is_causal: any.

    Raises:
        InvalidInputError: any of these does not hold.
    """
    del is_causal
    check_rank("query", query, "[T, H, P+R]")
    if query.dtype not in FLOAT_DTYPES:
        fail("query", f"one of {', '.join(map(str, FLOAT_DTYPES))}", query.dtype)
    shapes = (("k_nope", k_nope, "[K, H, P]"), ("k_pe", k_pe, "[K, R]"))
    for name, tensor, shape in (*shapes, ("value", value, "[K, H, V]")):
        check_rank(name, tensor, shape)
        check_like_query(name, tensor, query)
    keys, heads, width = value.shape[0], query.shape[1], query.shape[2]
    if k_nope.shape[:2] != (keys, heads) or value.shape[1] != heads or k_pe.shape[0] != keys:
        fail(
            "k_nope, k_pe and value",
            f"of K = {keys} keys and H = {heads} heads",
            f"shapes {tuple(k_nope.shape)}, {tuple(k_pe.shape)}, {tuple(value.shape)}",
        )
    if heads < 1 or width < 1 or value.shape[2] < 1:
        fail(
            "query and value",
            "of H >= 1, P+R >= 1 and V >= 1",
            f"shapes {tuple(query.shape)}, {tuple(value.shape)}",
        )
    if k_nope.shape[2] + k_pe.shape[1] != width:
        fail("P + R", f"the query's width {width}", f"{k_nope.shape[2]} + {k_pe.shape[1]}")
    _check_ints("cu_seqlens_q", cu_seqlens_q, "[num_reqs + 1]", (None,), query)
    if cu_seqlens_q.shape[0] < 1:
        fail("cu_seqlens_q", "[num_reqs + 1]", f"shape {tuple(cu_seqlens_q.shape)}")
    sizes = (cu_seqlens_q.shape[0],)
    _check_ints("cu_seqlens_k", cu_seqlens_k, "[num_reqs + 1]", sizes, query)
    if max_seqlen_q < 0 or max_seqlen_k < 0:
        fail("max_seqlen_q and max_seqlen_k", "at least 0", f"{max_seqlen_q}, {max_seqlen_k}")
    check_scale(softmax_scale)


def check_merge(
    prefix_out: Tensor,
    prefix_lse: Tensor,
    suffix_out: Tensor,
    suffix_lse: Tensor,
    out: Tensor | None = None,
) -> None:
    """Check the arguments of `merge_attn_states`.

    Args:
        prefix_out: `[T, H, V]`, floating point.
        prefix_lse: `[H, T]` fp32 (fp64 for fp64 results).
        suffix_out: like `prefix_out`; any strides.
        suffix_lse: like `prefix_lse`.
        out: like `prefix_out`, or None.

    Raises:
        InvalidInputError: any of these does not hold.
    """
    check_rank("prefix_out", prefix_out, "[T, H, V]")
    if prefix_out.dtype not in FLOAT_DTYPES:
        fail("prefix_out", f"one of {', '.join(map(str, FLOAT_DTYPES))}", prefix_out.dtype)
    for name, tensor in (("suffix_out", suffix_out), ("out", out)):
        if tensor is not None and tensor.shape != prefix_out.shape:
            fail(name, f"shape {tuple(prefix_out.shape)}", f"shape {tuple(tensor.shape)}")
        if tensor is not None and not tensor.is_floating_point():
            fail(name, "floating point", tensor.dtype)
        if tensor is not None and tensor.device != prefix_out.device:
            fail(name, f"on the device {prefix_out.device}", f"a tensor on {tensor.device}")
    stats = stat_dtype(prefix_out.dtype)
    tokens, heads, _ = prefix_out.shape
    for name, tensor in (("prefix_lse", prefix_lse), ("suffix_lse", suffix_lse)):
        if tensor.shape != (heads, tokens) or tensor.dtype != stats:
            kind = "fp64" if stats == torch.float64 else "fp32"
            fail(
                name,
                f"[H, T] = ({heads}, {tokens}), {kind}",
                f"{tensor.dtype} {tuple(tensor.shape)}",
            )
        if tensor.device != prefix_out.device:
            fail(name, f"on the device {prefix_out.device}", f"a tensor on {tensor.device}")


def check_paged(
    query: Tensor,
    kv_c: Tensor | None,
    k_pe: Tensor | None,
    w_kv_b: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    kv_scale: Tensor | None,
    softmax_scale: float,
    cu_seqlens_q: Tensor | None,
    workspace_tokens: int,
) -> int:
    """Check the arguments of the ops over a paged cache.

    Args:
        query: `[T, H, P+R]`, floating point.
        kv_c: `[T, L]`, like the query; None for `mla_decode`.
        k_pe: `[T, R]`, like the query; None for `mla_decode`.
        w_kv_b: `[H*(P+V), L]`, like the query.
        kv_cache: `[num_blocks, block_size, L+R]`.
        block_table: `[num_reqs, max_blocks]` int32.
        seq_lens: `[num_reqs]` int32.
        kv_scale: one element.
        softmax_scale: finite.
        cu_seqlens_q: `[num_reqs + 1]` int32; None: every request has `T / num_reqs` tokens.
        workspace_tokens: at least 1.

    Returns:
        V; a symbolic int under tracing.

    Raises:
        InvalidInputError: any of these does not hold.
    """
    check_rank("query", query, "[T, H, P+R]")
    check_rank("w_kv_b", w_kv_b, "[H*(P+V), L]")
    if query.dtype not in FLOAT_DTYPES:
        fail("query", f"one of {', '.join(map(str, FLOAT_DTYPES))}", query.dtype)
    check_like_query("w_kv_b", w_kv_b, query)
    _check_cache(kv_cache, None, kv_scale)
    check_device("kv_cache", kv_cache, query)
    tokens, heads, width = query.shape
    rank = w_kv_b.shape[1]
    rope = kv_cache.shape[2] - rank
    nope = width - rope
    if rope < 0 or nope < 0:
        fail(
            "kv_cache",
            f"L+R wide with w_kv_b's L = {rank} and R of at most {width}",
            f"shape {tuple(kv_cache.shape)}",
        )
    if heads < 1 or w_kv_b.shape[0] % heads or w_kv_b.shape[0] // heads <= nope:
        fail(
            "w_kv_b",
            f"[H*(P+V), L] with H = {heads}, P = {nope} and V >= 1",
            f"shape {tuple(w_kv_b.shape)}",
        )
    for name, tensor, size in (("kv_c", kv_c, rank), ("k_pe", k_pe, rope)):
        if tensor is not None:
            check_like_query(name, tensor, query)
            if tensor.shape != (tokens, size):
                fail(name, f"[T, {size}] with T = {tokens}", f"shape {tuple(tensor.shape)}")
    _check_ints("block_table", block_table, "[num_reqs, max_blocks]", (None, None), query)
    requests = block_table.shape[0]
    _check_ints("seq_lens", seq_lens, "[num_reqs]", (requests,), query)
    if cu_seqlens_q is not None:
        _check_ints("cu_seqlens_q", cu_seqlens_q, "[num_reqs + 1]", (requests + 1,), query)
    elif tokens % requests if requests else tokens:
        fail("query", f"[T, H, P+R] with T a multiple of {requests} requests", tuple(query.shape))
    check_scale(softmax_scale)
    if workspace_tokens < 1:
        fail("workspace_tokens", "at least 1", workspace_tokens)
    return w_kv_b.shape[0] // heads - nope
