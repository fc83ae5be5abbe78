"""The walk over the keys of one request, in the absorbed and in the expanded form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mla_ops.dims import split_kv_b
from mla_ops.kernels.rows import ExpandedRows, Rows
from mla_ops.kernels.softmax import Running, tile_softmax
from mla_ops.kernels.tiling import Job, Request, Visibility, blocks, finite

__all__ = ["Absorbed", "Expanded", "Form", "attend", "attend_together", "form_from_latents"]


class Form(Protocol):
    """How keys and values of a tile come about, for one block of heads."""

    def load(self, rows: Any, visibility: Visibility) -> None:
        """Take a tile's rows."""
        ...

    def scores(self, block: int, shape: tuple[int, int, int]) -> Tensor:
        """Return the scaled scores of one query block `[h, s, C]`, fp32, in the scratch."""
        ...

    def values(self, weights: Tensor) -> Tensor:
        """Return a tile's result for weights `[h, s, C]`."""
        ...

    def finish(self, value: Tensor) -> Tensor:
        """Return the output of one query block: `[h, s, V]`."""
        ...


class Absorbed:
    """Keys and values are the latent rows; the up projections act on queries and results."""

    def __init__(self, query: Tensor, w_kv_b: Tensor, job: Job) -> None:
        dims = job.dims
        w_uk, w_uv = split_kv_b(w_kv_b, query.shape[0], dims.qk_nope_head_dim)
        self._w_uv = w_uv.contiguous()  # bmm would copy the strided view itself, transposed
        nope, rope = query.split([dims.qk_nope_head_dim, dims.qk_rope_head_dim], dim=-1)
        latent = torch.bmm(nope, w_uk)  # [h, S, L]
        self._absorbed = torch.cat([latent, rope], dim=-1)
        self._job = job
        self.select(slice(0, query.shape[1]))

    def select(self, tokens: slice) -> None:
        """Attend for some of the tokens from here on."""
        rows = self._absorbed[:, tokens]
        self._queries = [
            rows[:, s].flatten(0, 1) for s in blocks(rows.shape[1], self._job.plan.queries)
        ]

    def load(self, rows: Rows, visibility: Visibility) -> None:
        """Take a tile's rows as they lie."""
        self._rows = rows
        # A whole row is contiguous, its first part is not, and matmul would copy it.
        self._values = finite(rows.latent if rows.packed is None else rows.packed, visibility)

    def scores(self, block: int, shape: tuple[int, int, int]) -> Tensor:
        """Return the scaled scores of one query block `[h, s, C]`, fp32, in the scratch."""
        job, query = self._job, self._queries[block]
        scores, low = job.scores(shape), job.low(shape)
        flat, flat_low = scores.flatten(0, 1), low.flatten(0, 1)
        if self._rows.packed is not None:
            keys = self._rows.packed[: shape[2]].t()
            torch.addmm(flat_low, query, keys, beta=0, alpha=job.scale, out=flat_low)
            return scores if low.dtype == scores.dtype else scores.copy_(low)
        q_latent, q_rope = query.split([job.dims.kv_lora_rank, job.dims.qk_rope_head_dim], dim=-1)
        keys, rope_keys = self._rows.latent[: shape[2]].t(), self._rows.rope[: shape[2]].t()
        torch.addmm(flat_low, q_latent, keys, beta=0, alpha=job.scale, out=flat_low)
        if low.dtype == scores.dtype:
            flat.addmm_(q_rope, rope_keys, alpha=job.scale)
        else:
            flat.copy_(flat_low)
            torch.addmm(flat_low, q_rope, rope_keys, beta=0, alpha=job.scale, out=flat_low)
            flat.add_(flat_low)
        return scores

    def values(self, weights: Tensor) -> Tensor:
        """Return a tile's result for weights `[h, s, C]`: `[h, s, L]`."""
        flat = torch.mm(weights.flatten(0, 1), self._values[: weights.shape[2]])
        value = flat.view(*weights.shape[:2], flat.shape[-1])
        return value[..., : self._job.dims.kv_lora_rank]

    def finish(self, value: Tensor) -> Tensor:
        """Return the output of one query block: `[h, s, V]`."""
        return torch.bmm(value, self._w_uv.transpose(1, 2))


class Expanded:
    """Keys and values of one tile are laid out in scratch, used, and overwritten.

    They are made from the latents, or copied where they are given.
    """

    def __init__(self, query: Tensor, w_kv_b: Tensor | None, heads: slice, job: Job) -> None:
        self._queries = [query[:, s].contiguous() for s in blocks(query.shape[1], job.plan.queries)]
        self._w_kv_b, self._heads = w_kv_b, heads
        self._job = job

    def load(self, rows: Rows | ExpandedRows, visibility: Visibility) -> None:
        """Expand a tile's rows, or take the heads of expanded ones."""
        if isinstance(rows, Rows) and self._w_kv_b is not None:
            self._keys, self._values = self._job.expand(rows.latent, rows.rope, self._w_kv_b)
        elif isinstance(rows, ExpandedRows):
            nope, value = rows.nope[:, self._heads], rows.value[:, self._heads]
            self._keys, self._values = self._job.place(nope, rows.rope, value)
        self._values = finite(self._values, visibility)

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
    form: Form, request: Request, heads: slice, queries: list[slice], job: Job
) -> list[Running]:
    """Walk the keys for one block of heads; one running result per block of queries."""
    visibility = request.visibility
    running = [Running() for _ in queries]
    for keys in request.tiles(job.plan.keys):
        loaded = False
        for i, where in enumerate(queries):
            tile = visibility.tile(heads, where, keys)
            if tile is None:
                continue
            if not loaded:
                form.load(request.rows(keys, job.compute), visibility)
                loaded = True
            count = tile.keys.stop - tile.keys.start
            shape = (heads.stop - heads.start, where.stop - where.start, count)
            scores = form.scores(i, shape)
            mass = tile_softmax(scores, tile)
            weights = job.low(shape)
            if weights.dtype != scores.dtype:
                weights.copy_(scores)
            running[i].add(form.values(weights), mass)
    return running


def attend(
    request: Request,
    form_of: Callable[[Tensor, slice], Form],
    sinks: Tensor | None,
    job: Job,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attend for one request.

    Args:
        request: query, keys and who sees whom.
        form_of: makes the form for a block of queries and its heads.
        sinks: `[H]` or None.
        job: the call.
        out: `[H, S, V]`, written.
        lse: `[H, S]`, written.
    """
    for heads in blocks(job.dims.num_heads, job.plan.heads):
        _attend_heads(request, form_of, sinks, job, out, lse, heads)


def _attend_heads(
    request: Request,
    form_of: Callable[[Tensor, slice], Form],
    sinks: Tensor | None,
    job: Job,
    out: Tensor,
    lse: Tensor,
    heads: slice,
) -> None:
    """Attend for one block of heads; what it holds is free before the next one begins."""
    queries = list(blocks(request.query.shape[1], job.plan.queries))
    form = form_of(request.query[heads].to(job.compute), heads)
    sink = None if sinks is None else sinks[heads, None, None].to(lse.dtype)
    for where, running in zip(queries, _walk_keys(form, request, heads, queries, job), strict=True):
        merged = running.result(sink)
        if merged is None:
            out[heads, where] = 0.0
            lse[heads, where] = float("-inf") if sink is None else sink[..., 0]
        else:
            out[heads, where] = form.finish(merged[0].to(job.compute))
            lse[heads, where] = merged[1][..., 0]


def attend_together(
    requests: Sequence[tuple[slice, Request]],
    query: Tensor,
    w_kv_b: Tensor,
    job: Job,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attend for several small requests in the absorbed form.

    Alone, each would read the whole up projection twice for its few tokens; so the projections act
    once, on the tokens of all of them.

    Args:
        requests: each with the place of its tokens.
        query: `[H, T, P+R]` of all of them.
        w_kv_b: `[H*(P+V), L]`.
        job: the call; its plan is absorbed.
        out: `[H, T, V]`, written.
        lse: `[H, T]`, written.
    """
    for heads in blocks(job.dims.num_heads, job.plan.heads):
        _attend_heads_together(requests, query, w_kv_b, job, out, lse, heads)


def _attend_heads_together(
    requests: Sequence[tuple[slice, Request]],
    query: Tensor,
    w_kv_b: Tensor,
    job: Job,
    out: Tensor,
    lse: Tensor,
    heads: slice,
) -> None:
    """Attend for one block of heads; what it holds is free before the next one begins."""
    form = Absorbed(query[heads].to(job.compute), job.weights_of(heads, w_kv_b), job)
    shape = (heads.stop - heads.start, query.shape[1], job.dims.kv_lora_rank)
    latent = query.new_empty(shape, dtype=job.compute)
    for tokens, request in requests:
        form.select(tokens)
        queries = list(blocks(tokens.stop - tokens.start, job.plan.queries))
        walked = _walk_keys(form, request, heads, queries, job)
        for where, running in zip(queries, walked, strict=True):
            place = slice(tokens.start + where.start, tokens.start + where.stop)
            merged = running.result(None)
            latent[:, place] = 0.0 if merged is None else merged[0]
            lse[heads, place] = float("-inf") if merged is None else merged[1][..., 0]
    out[heads] = form.finish(latent)


def form_from_latents(w_kv_b: Tensor, job: Job) -> Callable[[Tensor, slice], Form]:
    """Return what makes the plan's form for a block of heads.

    Args:
        w_kv_b: `[H*(P+V), L]`.
        job: the call; its plan says whether to expand.
    """

    def make(query: Tensor, heads: slice) -> Form:
        weights = job.weights_of(heads, w_kv_b)
        return (
            Expanded(query, weights, heads, job)
            if job.plan.expand
            else Absorbed(query, weights, job)
        )

    return make
