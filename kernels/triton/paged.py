"""Ragged batches over a paged cache: which requests are absorbed, which are expanded in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_ops import env
from mla_ops.chunking import plan_chunks
from mla_ops.dims import MLADims
from mla_ops.dispatch import PagedBatch, RaggedBatch
from mla_ops.kernels.triton.absorbed import (
    CACHED,
    CONTEXT,
    NEW,
    Keys,
    Queries,
    Rules,
    attend_absorbed,
)
from mla_ops.kernels.triton.cache import as_codes, check_rows, gather_kv_cache
from mla_ops.kernels.triton.expanded import Expanded, State, attend_expanded
from mla_ops.kernels.triton.launch import unit
from mla_ops.kernels.triton.project import halves, project, widths

__all__ = ["attention", "decode", "ragged_prefill"]

_WORKSPACE_TOKENS = 16_384


class _Run(NamedTuple):
    """Consecutive requests of one form.

    Attributes:
        requests: which ones.
        tokens: their new tokens.
        most: new tokens of a request at most.
        contexts: cached tokens of each.
        expand: the form.
    """

    requests: slice
    tokens: slice
    most: int
    contexts: list[int]
    expand: bool


def _dims(query: Tensor, w_kv_b: Tensor, kv_cache: Tensor) -> MLADims:
    (_, heads, width), (expanded, latent) = query.shape, w_kv_b.shape
    return widths(heads, latent, kv_cache.shape[2] - latent, width, expanded)


def _absorbed_rules(batch: PagedBatch) -> Rules:
    return Rules(batch.softmax_scale, is_causal=True, invariant=env.batch_invariant())


def _pages(kind: int, batch: PagedBatch, requests: slice | None, latent: int) -> Keys:
    """Return the cache as the keys of some requests, None for all."""
    check_rows(batch.kv_cache)
    cache = as_codes(batch.kv_cache)
    scale = None
    if cache.dtype == torch.uint8:
        scale = batch.kv_scale
        if scale is None:
            scale = torch.ones(1, dtype=torch.float32, device=cache.device)
    table, lens = unit(batch.block_table), unit(batch.seq_lens)
    if requests is not None:
        table, lens = table[requests], lens[requests]
    return Keys(kind, cache, cache, table.shape[1] * cache.shape[1], table, lens, scale)


def _by_head(ragged: Tensor, width: int) -> Tensor:
    """View the first columns of `[T, H, columns]` as `[H, T, width]`."""
    tokens, heads, _ = ragged.shape
    of_token, of_head, of_column = ragged.stride()
    return ragged.as_strided((heads, tokens, width), (of_head, of_token, of_column))


def decode(query: Tensor, w_kv_b: Tensor, batch: PagedBatch) -> tuple[Tensor, Tensor]:
    """Attend for decodes, all of as many new tokens, which are read from the cache.

    Args:
        query: `[T, H, P+R]`.
        w_kv_b: `[H*(P+V), L]`.
        batch: cache, table and lengths.

    Returns:
        `[T, H, V]` and `[H, T]`.
    """
    dims, requests = _dims(query, w_kv_b, batch.kv_cache), batch.seq_lens.shape[0]
    out, lse = _results(query, dims.v_head_dim)
    query = unit(query)
    most = query.shape[0] // requests if requests else 0
    # The requests are equally long, so nothing is ragged.
    of_token, of_head, _ = query.stride()
    strides = (most * of_token, of_head, of_token)
    keys = [_pages(CACHED.value, batch, None, dims.kv_lora_rank)]
    rules = _absorbed_rules(batch)
    _project(query, w_kv_b, dims, (strides, requests, most), keys, rules, out, lse)
    return out, lse


def _project(
    query: Tensor,
    w_kv_b: Tensor,
    dims: MLADims,
    queries: tuple[Any, ...],
    keys: list[Keys],
    rules: Rules,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Move the queries `[T, H, P+R]` into the latent space, attend, and move the result back.

    `queries` are the fields of `Queries` from `strides` on.
    """
    nope = dims.qk_nope_head_dim
    w_uk, w_uv = halves(w_kv_b, dims)
    latent = query.new_empty(dims.num_heads, query.shape[0], dims.kv_lora_rank)
    project(_by_head(query, nope), w_uk, latent, rules.invariant)
    result = torch.empty_like(latent)
    attend_absorbed(Queries(latent, query, nope, *queries), keys, rules, result, lse)
    project(result, w_uv, _by_head(out, dims.v_head_dim), rules.invariant)


def ragged_prefill(batch: RaggedBatch) -> tuple[Tensor, Tensor]:
    """Attend to keys and values that are expanded already.

    The lengths themselves are read, on the device; the longest ones are not needed.

    Args:
        batch: query `[T, H, P+R]`, k_nope `[K, H, P]`, k_pe `[K, R]`, value `[K, H, V]`, and where
            each request begins.

    Returns:
        `[T, H, V]` and `[H, T]`; tokens of no request are 0 and -inf.
    """
    out, lse = _results(batch.query, batch.value.shape[2])
    query, key, rope, value, cu_q, cu_k = map(unit, batch[:6])
    given = Expanded(query, key, rope, value, cu_q, cu_k)
    attend_expanded(given, Rules(batch.softmax_scale, is_causal=batch.is_causal), out, lse, None)
    return out, lse


def _results(query: Tensor, width: int) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = query.shape
    lse = query.new_empty((heads, tokens), dtype=torch.float32)
    return query.new_empty(tokens, heads, width), lse


def attention(
    query: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    w_kv_b: Tensor,
    batch: PagedBatch,
    num_decodes: int,
) -> tuple[Tensor, Tensor]:
    """Attend for a mixed batch.

    Args:
        query: `[T, H, P+R]`.
        kv_c: `[T, L]`, rows of the new tokens.
        k_pe: `[T, R]`.
        w_kv_b: `[H*(P+V), L]`.
        batch: cache, tables and lengths.
        num_decodes: leading requests whose new tokens are read from the cache.

    Returns:
        `[T, H, V]` and `[H, T]`; tokens of no request are 0 and -inf.
    """
    dims, requests = _dims(query, w_kv_b, batch.kv_cache), batch.seq_lens.shape[0]
    query, kv_c, k_pe = unit(query), unit(kv_c), unit(k_pe)
    out, lse = _results(query, dims.v_head_dim)
    cached = min(num_decodes, requests)
    if cached and cached == requests:
        # From shapes alone, so that a captured graph stays right when the lengths change.
        most = query.shape[0] // requests
        _decode_part(query, w_kv_b, batch, dims, None, most, out, lse)
        return out, lse
    starts, lens = _on_host(batch)
    if cached:
        most = max(b - a for a, b in pairwise(starts[: cached + 1]))
        own = slice(0, starts[cached])
        part = query[own], out[own], lse[:, own]
        _decode_part(part[0], w_kv_b, batch, dims, slice(0, cached), most, *part[1:])
    for run in _runs(starts, lens, cached, dims):
        rows = kv_c[run.tokens], k_pe[run.tokens]
        results = out[run.tokens], lse[:, run.tokens]
        form = _expanded_run if run.expand else _absorbed_run
        form(query[run.tokens], rows, w_kv_b, batch, dims, run, results)
    if starts[-1] < query.shape[0]:  # padding behind the last request
        out[starts[-1] :] = 0
        lse[:, starts[-1] :] = float("-inf")
    return out, lse


def _on_host(batch: PagedBatch) -> tuple[list[int], list[int]]:
    """Return query starts and lengths; without the host's copy of them, from the device."""
    if batch.host is not None:
        starts, lens = batch.host.tolist()
        return starts, lens[:-1]
    return batch.cu_seqlens_q.tolist(), batch.seq_lens.tolist()


def _runs(starts: list[int], lens: list[int], first: int, dims: MLADims) -> Iterator[_Run]:
    """Cut the requests from `first` on into runs of one form; those without tokens are left out."""
    new = [end - begin for begin, end in pairwise(starts)]

    def expand(request: int) -> bool:
        return dims.should_expand(new[request], lens[request])

    for form, group in groupby(range(first, len(lens)), expand):
        run = list(group)
        requests = slice(run[0], run[-1] + 1)
        if most := max(new[requests]):
            yield _Run(
                requests,
                slice(starts[requests.start], starts[requests.stop]),
                most,
                # A request without new tokens has nobody to see its context.
                [lens[i] - new[i] if new[i] else 0 for i in run],
                form,
            )


def _decode_part(
    query: Tensor,
    w_kv_b: Tensor,
    batch: PagedBatch,
    dims: MLADims,
    requests: slice | None,
    most: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attend for the leading requests, or all; they may be padded with requests of no tokens."""
    of_token, of_head, _ = query.stride()
    keys = [_pages(CACHED.value, batch, requests, dims.kv_lora_rank)]
    count = batch.seq_lens.shape[0] if requests is None else requests.stop
    queries = ((0, of_head, of_token), count, most, unit(batch.cu_seqlens_q))
    _project(query, w_kv_b, dims, queries, keys, _absorbed_rules(batch), out, lse)


def _absorbed_run(
    query: Tensor,
    rows: tuple[Tensor, Tensor],
    w_kv_b: Tensor,
    batch: PagedBatch,
    dims: MLADims,
    run: _Run,
    results: tuple[Tensor, Tensor],
) -> None:
    """Attend to the context in the cache and to the new tokens' rows, as two sets of splits."""
    of_token, of_head, _ = query.stride()
    count = run.requests.stop - run.requests.start
    cu = unit(batch.cu_seqlens_q)[run.requests.start : run.requests.stop + 1]
    keys = []
    if any(run.contexts):
        keys.append(_pages(CONTEXT.value, batch, run.requests, dims.kv_lora_rank))
    keys.append(Keys(NEW.value, *rows, run.most))
    queries = ((0, of_head, of_token), count, run.most, cu, run.tokens.start)
    _project(query, w_kv_b, dims, queries, keys, _absorbed_rules(batch), *results)


def _expanded_run(
    query: Tensor,
    rows: tuple[Tensor, Tensor],
    w_kv_b: Tensor,
    batch: PagedBatch,
    dims: MLADims,
    run: _Run,
    results: tuple[Tensor, Tensor],
) -> None:
    """Gather and expand the contexts chunk by chunk, then attend to the new tokens."""
    heads, nope, latent = dims.num_heads, dims.qk_nope_head_dim, dims.kv_lora_rank
    cu_q = unit(batch.cu_seqlens_q)[run.requests.start : run.requests.stop + 1]
    table = batch.block_table[run.requests]
    # Never more than the table can name, and known without the lengths.
    capacity = table.shape[0] * table.shape[1] * batch.kv_cache.shape[1]
    size = max(1, min(batch.workspace_tokens or _WORKSPACE_TOKENS, capacity))
    plan = plan_chunks(run.contexts, size)
    state = None
    if plan.num_chunks:
        state = State.empty(heads, query.shape[0], dims.v_head_dim, query)
        workspace = query.new_empty(size, dims.latent_dim)
        expanded = query.new_empty(size, dims.expanded_dim)
        both = torch.from_numpy(plan.starts.ravel()), torch.from_numpy(plan.cu_seqlens.ravel())
        flat = torch.cat(both).to(query.device, non_blocking=True)
        starts, cus = flat.split([both[0].numel(), both[1].numel()])
        starts, cus = starts.view(plan.starts.shape), cus.view(plan.cu_seqlens.shape)
        for i, used in enumerate(plan.lens.sum(axis=1).tolist()):
            gather_kv_cache(
                batch.kv_cache, table, cus[i], starts[i], workspace[:used], batch.kv_scale
            )
            torch.mm(workspace[:used, :latent], w_kv_b.t(), out=expanded[:used])
            pair = expanded[:used].view(-1, heads, nope + dims.v_head_dim)
            given = Expanded(
                query,
                pair[..., :nope],
                workspace[:used, latent:],
                pair[..., nope:],
                cu_q,
                cus[i],
                run.tokens.start,
            )
            attend_expanded(given, Rules(batch.softmax_scale), None, None, state)
    pair = torch.mm(rows[0], w_kv_b.t()).view(-1, heads, nope + dims.v_head_dim)
    given = Expanded(
        query,
        pair[..., :nope],
        rows[1],
        pair[..., nope:],
        cu_q,
        cu_q - run.tokens.start,
        run.tokens.start,
    )
    attend_expanded(given, Rules(batch.softmax_scale, is_causal=True), *results, state)
