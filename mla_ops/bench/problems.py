"""The tensors of a case, and the exact result to hold a side to before it is timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, overload

import torch
from torch import Tensor

from mla_ops.bench.cases import AttentionCase, CacheCase, Case
from mla_ops.reference import merge_attn_states, mla_attention

__all__ = [
    "BLOCK_SIZE",
    "AttentionProblem",
    "CacheProblem",
    "Pages",
    "Problem",
    "draw",
    "paged",
    "problem_of",
]

BLOCK_SIZE = 64
"""Rows per block of our paged caches."""

_SLAB = 65536  # rows that are drawn; more are made from them
_HEADS = 8


@dataclass(frozen=True)
class AttentionProblem:
    """Inputs of an attention case.

    Attributes:
        case: what they are for.
        query: `[B, H, S, P+R]`.
        kv_c: `[B, T, L]`.
        k_pe: `[B, T, R]`.
        w_kv_b: `[H*(P+V), L]`.
    """

    case: AttentionCase
    query: Tensor
    kv_c: Tensor
    k_pe: Tensor
    w_kv_b: Tensor

    @property
    def scale(self) -> float:
        """The softmax scale."""
        return float(self.case.dims.qk_head_dim**-0.5)

    def lengths(self, dtype: torch.dtype = torch.int32) -> Tensor:
        """Return the keys of every request `[B]`, the new ones included.

        Args:
            dtype: of the result.
        """
        size = (self.case.batch,)
        return torch.full(size, self.case.context, dtype=dtype, device=self.query.device)

    def copy(self) -> AttentionProblem:
        """Return the same problem in memory of its own, the few queries aside."""
        return replace(
            self, kv_c=self.kv_c.clone(), k_pe=self.k_pe.clone(), w_kv_b=self.w_kv_b.clone()
        )

    @cached_property
    def _sample(self) -> tuple[list[int], list[int], Tensor]:
        """First and last request; first, middle and last query; at most eight heads."""
        batch, heads, new, _ = self.query.shape
        count = min(heads, _HEADS)
        picked = torch.linspace(0, heads - 1, count, device=self.query.device).long()
        return sorted({0, batch - 1}), sorted({0, new // 2, new - 1}), picked

    def _pick(self, rows: Tensor) -> Tensor:
        """Return the sampled rows `[requests, heads, queries, V]` of `[B, H, S, V]`."""
        requests, queries, heads = self._sample
        return rows[requests][:, heads][:, :, queries]

    def _rows(self, dtype: torch.dtype, form: Literal["absorbed", "expanded"]) -> Tensor:
        requests, queries, heads = self._sample
        weight = self.w_kv_b.unflatten(0, (self.case.dims.num_heads, -1))[heads].flatten(0, 1)
        tensors = (self._pick(self.query), self.kv_c[requests], self.k_pe[requests], weight)
        query, kv_c, k_pe, w_kv_b = (tensor.to(dtype) for tensor in tensors)
        keys = torch.arange(self.case.context, device=kv_c.device)
        last = torch.tensor(queries, device=kv_c.device) + self.case.cached
        seen = keys <= last[:, None]
        result = mla_attention(
            query, kv_c, k_pe, w_kv_b, softmax_scale=self.scale, attn_mask=seen, form=form
        )
        return result.out.double()

    @cached_property
    def _exact(self) -> tuple[Tensor, float]:
        """The sampled rows in fp64, and the error of plain torch in the case's own dtype."""
        exact = self._rows(torch.float64, "absorbed")
        dtype = self.case.dtype
        plain = [self._rows(dtype, "absorbed"), self._rows(dtype, "expanded")]
        return exact, max(_relative(rows, exact) for rows in plain)

    def error(self, out: Tensor) -> tuple[float, float]:
        """Return the error of a result against fp64, and the largest that is accepted.

        Rows of both ends and of the middle are compared, each over its whole context. Accepted is
        twice the error of plain torch and one rounding step.

        Args:
            out: `[B, H, S, V]`.
        """
        exact, ordinary = self._exact
        error = _relative(self._pick(out).double(), exact)
        return error, 2 * ordinary + torch.finfo(self.case.dtype).eps


def _relative(rows: Tensor, exact: Tensor) -> float:
    return float((rows - exact).abs().max() / exact.abs().max())


@dataclass(frozen=True)
class CacheProblem:
    """Inputs of an op on the cache.

    Attributes:
        case: what they are for.
        tensors: gather: cache and block table; write: latents, rotary keys, cache and slots; merge:
            two partial results with their lse.
        expected: what must come out.
    """

    case: CacheCase
    tensors: tuple[Tensor, ...]
    expected: Tensor

    def copy(self) -> CacheProblem:
        """Return the same problem in memory of its own."""
        return replace(self, tensors=tuple(tensor.clone() for tensor in self.tensors))

    def error(self, out: Tensor) -> tuple[float, float]:
        """Return the error of a result, and the largest that is accepted: none for copies.

        Args:
            out: gathered rows, all slots of the written cache, or the merged result.
        """
        copies = self.case.group != "merge"
        error = _relative(out.double(), self.expected.double())
        return error, 0.0 if copies else torch.finfo(self.case.dtype).eps


Problem = AttentionProblem | CacheProblem
"""What a side is handed: `case`, tensors, `copy` and `error`."""


def problem_of(problem: Problem) -> AttentionProblem:
    """Return an attention problem as such.

    Args:
        problem: of a case that a side has in its `groups`.
    """
    if not isinstance(problem, AttentionProblem):
        raise TypeError(f"expected an attention case, got {problem.case.name}")
    return problem


@dataclass(frozen=True)
class Pages:
    """A paged cache that holds the rows of a problem.

    Attributes:
        cache: `[num_blocks, block_size, L+R]`; slots behind a request's end are 0.
        table: `[B, blocks per request]` int32, on the cache's device.
    """

    cache: Tensor
    table: Tensor


def paged(problem: AttentionProblem, block_size: int) -> Pages:
    """Lay the rows of a problem out in blocks that lie scattered.

    Args:
        problem: whose latents and rotary keys.
        block_size: rows per block.
    """
    rows = torch.cat([problem.kv_c, problem.k_pe], dim=-1)
    batch, context, width = rows.shape
    blocks = -(-context // block_size)
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(batch * blocks, generator=generator).to(rows.device)
    cache = rows.new_zeros(batch * blocks, block_size, width)
    cache[order] = torch.nn.functional.pad(rows, (0, 0, 0, blocks * block_size - context)).view_as(
        cache
    )
    return Pages(cache, order.view(batch, blocks).int())


@overload
def draw(case: AttentionCase, device: torch.device | str = "cpu") -> AttentionProblem: ...
@overload
def draw(case: CacheCase, device: torch.device | str = "cpu") -> CacheProblem: ...
def draw(case: Case, device: torch.device | str = "cpu") -> Problem:
    """Draw the tensors of a case, scaled so that the softmax is neither flat nor sharp.

    Args:
        case: what they are for.
        device: where to put them; the numbers are the same everywhere.
    """
    dims, generator = case.dims, torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype).to(device)

    if isinstance(case, CacheCase):
        return _draw_cache(case, normal, generator)
    rows = _latents(normal, case.batch * case.context, dims.latent_dim)
    kv_c, k_pe = rows.view(case.batch, case.context, -1).split(
        [dims.kv_lora_rank, dims.qk_rope_head_dim], dim=-1
    )
    return AttentionProblem(
        case,
        normal(case.batch, dims.num_heads, case.new, dims.qk_head_dim),
        kv_c.contiguous(),
        k_pe.contiguous(),
        normal(dims.expanded_dim, dims.kv_lora_rank).mul_(dims.kv_lora_rank**-0.5),
    )


def _latents(normal: Callable[..., Tensor], rows: int, width: int) -> Tensor:
    """Draw rows; beyond the first slab, turn them around their width: drawing takes too long."""
    slab = normal(min(rows, _SLAB), width)
    turns = range(-(-rows // _SLAB))
    return slab if rows <= _SLAB else torch.cat([slab.roll(turn, -1) for turn in turns])[:rows]


def _draw_cache(
    case: CacheCase, normal: Callable[..., Tensor], generator: torch.Generator
) -> CacheProblem:
    dims, tokens = case.dims, case.tokens
    if case.group == "merge":
        outs = [normal(tokens, dims.num_heads, dims.v_head_dim) for _ in range(2)]
        lses = [normal(dims.num_heads, tokens).float() for _ in range(2)]
        merged = merge_attn_states(outs[0].double(), lses[0], outs[1].double(), lses[1])
        return CacheProblem(case, (outs[0], lses[0], outs[1], lses[1]), merged.out)
    rows = _latents(normal, tokens, dims.latent_dim)
    blocks = -(-tokens // BLOCK_SIZE)
    order = torch.randperm(blocks, generator=generator).to(rows.device)
    cache = rows.new_zeros(blocks, BLOCK_SIZE, dims.latent_dim)
    slots = order[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=rows.device)
    slots = slots.flatten()[:tokens]
    if case.group == "write":
        kv_c, k_pe = rows.split([dims.kv_lora_rank, dims.qk_rope_head_dim], dim=-1)
        written = cache.flatten(0, 1).clone()
        written[slots] = rows
        return CacheProblem(case, (kv_c.contiguous(), k_pe.contiguous(), cache, slots), written)
    cache.flatten(0, 1)[slots] = rows
    return CacheProblem(case, (cache, order.int()[None]), rows)
