"""The tiled backend over ragged batches and a paged cache.

A request's keys are one line: the cached context, page by page, then the new tokens from the
activations. The walk over it is that of the dense op, one softmax state from the first key to the
last, so a chunk is a tile, its merge is the tile's, and the running partial is fp32.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from mla_ops.dims import MLADims, stat_dtype
from mla_ops.dispatch import PagedBatch, RaggedBatch
from mla_ops.errors import InvalidInputError
from mla_ops.kernels.attend import Expanded, attend, attend_together, form_from_latents
from mla_ops.kernels.rows import (
    ChainedRows,
    DenseRows,
    GivenRows,
    PagedCache,
    PagedRows,
    RowSource,
    as_bytes,
    check_blocks,
    flat_rows,
)
from mla_ops.kernels.tiling import Job, Plan, Request, Visibility, compute_dtype, plan_tiles

__all__ = [
    "TOGETHER",
    "gather",
    "merge",
    "paged_attention",
    "plan_paged",
    "ragged_prefill",
    "to_cache",
    "write",
]

TOGETHER = 32
"""Most tokens of decodes that share one turn of the up projections."""

_PAGED_KEYS = 4096


class _Ragged(NamedTuple):
    """The requests of a batch on the host.

    Attributes:
        starts: first new token of each request, and the end.
        lens: length of each request, new tokens included.
    """

    starts: list[int]
    lens: list[int]

    def new(self, i: int) -> int:
        """Return the new tokens of a request."""
        return self.starts[i + 1] - self.starts[i]


def _ragged(batch: PagedBatch) -> _Ragged:
    if batch.host is not None:
        starts, lens = batch.host.tolist()
        return _Ragged(starts, lens[:-1])
    return _Ragged(batch.cu_seqlens_q.tolist(), batch.seq_lens.tolist())


def paged_attention(batch: PagedBatch) -> tuple[Tensor, Tensor]:
    """Attend for a mixed batch.

    Args:
        batch: decodes first.

    Returns:
        `[T, H, V]` and `[H, T]`; tokens of no request are 0 and -inf.
    """
    query, w_kv_b = batch.query, batch.w_kv_b
    heads, rope = query.shape[1], batch.kv_cache.shape[2] - w_kv_b.shape[1]
    nope = query.shape[2] - rope
    dims = MLADims(heads, w_kv_b.shape[1], nope, rope, w_kv_b.shape[0] // heads - nope)
    ragged = _ragged(batch)
    out, lse = _empty_results(query, dims.v_head_dim)
    cached = min(batch.num_decodes, len(ragged.lens))
    for members, new in (
        (range(cached), None),
        (range(cached, len(ragged.lens)), (batch.kv_c, batch.k_pe)),
    ):
        for expand in (False, True):
            group = [
                i
                for i in members
                if ragged.new(i) > 0 and dims.should_expand(ragged.new(i), ragged.lens[i]) == expand
            ]
            if group:
                _attend_group(group, query, new, w_kv_b, batch, ragged, dims, expand, out, lse)
    return out, lse


def plan_paged(
    dims: MLADims,
    num_queries: int,
    num_keys: int,
    *,
    workspace_tokens: int | None,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: torch.device,
    expand: bool,
) -> Plan:
    """Plan the requests of one form together: they share the scratch.

    Args:
        dims: widths of the layer.
        num_queries: most new tokens of one of them.
        num_keys: length of the longest one.
        workspace_tokens: most keys in one tile, None for no limit of the caller's.
        dtype: of the inputs.
        cache_dtype: of the cache.
        device: where the tensors are.
        expand: the form.
    """
    return plan_tiles(
        dims,
        num_queries,
        num_keys,
        workspace_tokens=min(_PAGED_KEYS, workspace_tokens or _PAGED_KEYS),
        device=device,
        converts=compute_dtype(dtype, device) != cache_dtype,
        expand=expand,
    )


def _attend_group(
    group: list[int],
    query: Tensor,
    new: tuple[Tensor | None, Tensor | None] | None,
    w_kv_b: Tensor,
    batch: PagedBatch,
    ragged: _Ragged,
    dims: MLADims,
    expand: bool,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attend for requests of one form; `new` holds the activations, None where all is cached."""
    plan = plan_paged(
        dims,
        max(ragged.new(i) for i in group),
        max(ragged.lens[i] for i in group),
        workspace_tokens=batch.workspace_tokens,
        dtype=query.dtype,
        cache_dtype=batch.kv_cache.dtype,
        device=query.device,
        expand=expand,
    )
    compute = compute_dtype(query.dtype, query.device)
    job = Job(dims, plan, batch.softmax_scale, query, compute)
    cache = PagedCache(batch.kv_cache, job.dims, batch.kv_scale, job.compute, job.plan.keys)

    def request_of(i: int) -> Request:
        tokens = slice(ragged.starts[i], ragged.starts[i + 1])
        pages = PagedRows(cache, batch.block_table[i])
        source: RowSource = pages
        if new is not None and new[0] is not None and new[1] is not None:
            rows = DenseRows(new[0][tokens], new[1][tokens])
            source = ChainedRows(pages, ragged.lens[i] - ragged.new(i), rows)
        count, length = ragged.new(i), ragged.lens[i]
        visibility = Visibility(
            count, length, is_causal=True, mask=None, bounds=None, device=query.device
        )
        return Request(query[tokens].transpose(0, 1), source, visibility)

    if new is None and not expand:  # decodes, as many new tokens each
        count = max(1, TOGETHER // ragged.new(group[0]))
        for some in (group[i : i + count] for i in range(0, len(group), count)):
            begin, end = ragged.starts[some[0]], ragged.starts[some[-1] + 1]
            places = [slice(ragged.starts[i] - begin, ragged.starts[i + 1] - begin) for i in some]
            requests = [(place, request_of(i)) for place, i in zip(places, some, strict=True)]
            queries, results = (x[begin:end].transpose(0, 1) for x in (query, out))
            attend_together(requests, queries, w_kv_b, job, results, lse[:, begin:end])
        return
    form_of = form_from_latents(w_kv_b, job)
    for i in group:
        tokens = slice(ragged.starts[i], ragged.starts[i + 1])
        attend(request_of(i), form_of, None, job, out[tokens].transpose(0, 1), lse[:, tokens])


def ragged_prefill(batch: RaggedBatch) -> tuple[Tensor, Tensor]:
    """Attend to keys and values that are expanded already.

    Args:
        batch: query `[T, H, P+R]`, k_nope `[K, H, P]`, k_pe `[K, R]`, value `[K, H, V]`, and where
            each request begins, which says the longest ones too.

    Returns:
        `[T, H, V]` and `[H, T]`; tokens of no request are 0 and -inf.
    """
    query, given = batch.query, GivenRows(batch.k_nope, batch.k_pe, batch.value)
    tokens, heads, width = query.shape
    rope, value = given.rope.shape[1], given.value.shape[2]
    dims = MLADims(heads, 1, width - rope, rope, value)  # no latent takes part
    starts, keys = batch.cu_seqlens_q.tolist(), batch.cu_seqlens_k.tolist()
    _check_spans("cu_seqlens_q", starts, tokens)
    _check_spans("cu_seqlens_k", keys, given.rope.shape[0])
    out, lse = _empty_results(query, value)
    compute = compute_dtype(query.dtype, query.device)
    plan = plan_tiles(
        dims,
        max((b - a for a, b in pairwise(starts)), default=0),
        max((b - a for a, b in pairwise(keys)), default=0),
        workspace_tokens=None,
        device=query.device,
        converts=False,
        expand=True,
    )
    job = Job(dims, plan, batch.softmax_scale, query, compute)
    for q, k in zip(map(slice, *_spans(starts)), map(slice, *_spans(keys)), strict=True):
        visibility = Visibility(
            q.stop - q.start,
            k.stop - k.start,
            is_causal=batch.is_causal,
            mask=None,
            bounds=None,
            device=query.device,
        )
        request = Request(query[q].transpose(0, 1), GivenRows(*(t[k] for t in given)), visibility)
        if q.stop > q.start:
            attend(
                request,
                lambda block, heads: Expanded(block, None, heads, job),
                None,
                job,
                out[q].transpose(0, 1),
                lse[:, q],
            )
    return out, lse


def _check_spans(name: str, bounds: list[int], rows: int) -> None:
    """Refuse bounds that decrease or leave `[0, rows]`."""
    if bounds[0] < 0 or bounds[-1] > rows or any(b < a for a, b in pairwise(bounds)):
        raise InvalidInputError(f"{name} must rise from 0 to at most {rows}, got {bounds}")


def _spans(bounds: list[int]) -> tuple[list[int], list[int]]:
    return bounds[:-1], bounds[1:]


def _empty_results(query: Tensor, value_width: int) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = query.shape
    lse = query.new_full((heads, tokens), float("-inf"), dtype=stat_dtype(query.dtype))
    return query.new_zeros(tokens, heads, value_width), lse


def merge(
    prefix_out: Tensor,
    prefix_lse: Tensor,
    suffix_out: Tensor,
    suffix_lse: Tensor,
    out: Tensor,
) -> Tensor:
    """Merge two partial results by their log-sum-exp.

    Args:
        prefix_out: `[T, H, V]`.
        prefix_lse: `[H, T]`; both infinities mean that the row has seen no key.
        suffix_out: like `prefix_out`.
        suffix_lse: like `prefix_lse`.
        out: `[T, H, V]`, written; may be one of the inputs.

    Returns:
        lse `[H, T]`.
    """
    empty = float("-inf")
    stats = stat_dtype(prefix_out.dtype)
    a, b = (x.to(stats).masked_fill(x == float("inf"), empty) for x in (prefix_lse, suffix_lse))
    top = torch.maximum(a, b)
    base = top.masked_fill(top == empty, 0.0)
    parts = [(part - base).exp_() for part in (a, b)]
    total = parts[0] + parts[1]
    # Weights come from the sum, not from its rounded logarithm: they add up to 1 at any size.
    whole = total.masked_fill(total == 0.0, 1.0)
    merged = None
    for value, part in ((prefix_out, parts[0]), (suffix_out, parts[1])):
        weight = (part / whole).t().unsqueeze(-1)
        # What an empty side holds may be garbage, and 0 * NaN is NaN.
        share = (value.to(stats) * weight).masked_fill_(weight == 0.0, 0.0)
        merged = share if merged is None else merged.add_(share)
    if merged is not None:
        out.copy_(merged)
    return top + total.log_()


def write(
    kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: Tensor | None
) -> None:
    """Write new rows into their slots of the cache; slots below 0 are skipped.

    Args:
        kv_c: `[T, L]`.
        k_pe: `[T, R]`.
        kv_cache: `[num_blocks, block_size, L+R]`, changed in place.
        slot_mapping: `[T]` int64.
        kv_scale: one element, what stored values are multiplied by when they are read.
    """
    flat, pitch = flat_rows(kv_cache)
    rows = to_cache(torch.cat([kv_c, k_pe], dim=-1), kv_cache.dtype, kv_scale)
    size = kv_cache.shape[1]
    slots = kv_cache.shape[0] * size
    if slot_mapping.device.type == "cpu" and bool((slot_mapping >= slots).any()):
        raise InvalidInputError(
            f"slot_mapping must be below {slots}, the slots of the cache, got {slot_mapping.max()}"
        )
    ids = slot_mapping // size * pitch + slot_mapping % size
    valid = slot_mapping >= 0
    if slot_mapping.device.type == "cpu":
        rows, ids = rows[valid], ids[valid]
    elif ids.numel():
        # No host sync: a skipped row repeats the write of the first valid one, or what is there.
        first = valid.int().argmax()
        stand_in = torch.where(valid[first], ids[first], 0)
        there = as_bytes(flat)[0] if flat.shape[0] else as_bytes(rows)[0]
        content = torch.where(valid[first], as_bytes(rows)[first], there)
        ids = torch.where(valid, ids, stand_in)
        rows = torch.where(valid[:, None], as_bytes(rows), content)
    as_bytes(flat).index_copy_(0, ids, as_bytes(rows))


def to_cache(rows: Tensor, dtype: torch.dtype, kv_scale: Tensor | None) -> Tensor:
    """Convert rows to what the cache stores: divided by the scale, saturating in fp8.

    Args:
        rows: any shape.
        dtype: of the cache.
        kv_scale: one element or None.
    """
    if dtype.itemsize > 1:
        return rows.to(dtype)
    limit = torch.finfo(dtype).max
    scaled = rows.float() if kv_scale is None else rows.float() / kv_scale.reshape(())
    return scaled.clamp(-limit, limit).to(dtype)


def gather(
    kv_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_k: Tensor,
    seq_starts: Tensor,
    workspace: Tensor,
    kv_scale: Tensor | None,
) -> None:
    """Copy cached rows into a workspace, one request after the other.

    Args:
        kv_cache: `[num_blocks, block_size, L+R]`.
        block_table: `[num_reqs, max_blocks]`.
        cu_seqlens_k: `[num_reqs + 1]`: where each request's rows go.
        seq_starts: `[num_reqs]`: the first row of each request that is wanted.
        workspace: `[rows, L+R]`, written.
        kv_scale: one element or None.
    """
    flat, pitch = flat_rows(kv_cache)
    size = kv_cache.shape[1]
    bounds, starts = cu_seqlens_k.tolist(), seq_starts.tolist()
    _check_spans("cu_seqlens_k", bounds, workspace.shape[0])
    if min(starts, default=0) < 0:
        raise InvalidInputError(f"seq_starts must be at least 0, got {starts}")
    for i, (begin, end) in enumerate(pairwise(bounds)):
        position = torch.arange(starts[i], starts[i] + end - begin, device=kv_cache.device)
        used = block_table[i, starts[i] // size : -(-(starts[i] + end - begin) // size)]
        check_blocks(used, -(-(starts[i] + end - begin) // size) - starts[i] // size, kv_cache)
        pages = block_table[i].long()[position // size]
        rows = as_bytes(flat)[pages * pitch + position % size].view(kv_cache.dtype)
        target = workspace[begin:end].copy_(rows)
        if kv_scale is not None and kv_cache.dtype.itemsize == 1:
            target.mul_(kv_scale.reshape(()))
