"""Our own sides: the dense op, the paged op, and the ops on the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_ops.attention import mla_attention
from mla_ops.bench.cases import AttentionCase, Case
from mla_ops.bench.peers import DENSE, PAGED, Peer
from mla_ops.bench.problems import BLOCK_SIZE, CacheProblem, Problem, paged, problem_of
from mla_ops.bench.timing import Run
from mla_ops.dispatch import Call, select
from mla_ops.errors import UnsupportedInputError
from mla_ops.metadata import build_metadata
from mla_ops.paged import (
    gather_kv_cache,
    merge_attn_states,
    mla_paged_attention,
    update_kv_cache,
)

__all__ = ["CacheOps", "Dense", "Ours", "Paged"]

_WORKSPACE = 65536


class Ours(Peer):
    """A side whose op is chosen by `mla_ops.use_backend`."""

    def __init__(self, device: str) -> None:
        """Measure on a device.

        Args:
            device: its type.
        """
        self._device = device

    def op(self, case: Case) -> str:
        """Return the name of the op that a case calls."""
        raise NotImplementedError

    def backend(self, case: Case) -> str:
        """Return the backend that takes the op."""
        return select(Call(self.op(case), self._device, case.dtype)).name

    def refuses(self, case: Case) -> str | None:
        """Return what every backend has against the op, None where one takes it."""
        try:
            self.backend(case)
        except UnsupportedInputError as error:
            reasons = [f"{name}: {'; '.join(why)}" for name, why in error.reasons.items()]
            return "; ".join(reasons)
        return None


class Dense(Ours):
    """`mla_attention` on the two tensors of a transformers cache."""

    name = DENSE
    groups = frozenset({"decode", "prefill"})

    def op(self, case: Case) -> str:
        """Return `mla_attention`."""
        del case
        return "mla_attention"

    def prepare(self, problem: Problem) -> Run:
        """Take the tensors as they are."""
        dense = problem_of(problem)
        tensors = (dense.query, dense.kv_c, dense.k_pe, dense.w_kv_b)
        scale, causal = dense.scale, dense.case.new > 1

        def run() -> Tensor:
            return mla_attention(*tensors, softmax_scale=scale, is_causal=causal).out

        return run


class Paged(Ours):
    """`mla_paged_attention` on scattered blocks, metadata built before."""

    name = PAGED
    groups = frozenset({"decode", "prefill"})

    def op(self, case: Case) -> str:
        """Return `mla_paged_attention`."""
        del case
        return "mla_paged_attention"

    def prepare(self, problem: Problem) -> Run:
        """Lay the rows out in blocks and plan the batch."""
        dense = problem_of(problem)
        case = dense.case
        pages = paged(dense, BLOCK_SIZE)
        metadata = build_metadata(
            [case.new] * case.batch,
            [case.context] * case.batch,
            pages.table.tolist(),
            block_size=BLOCK_SIZE,
            workspace_tokens=_WORKSPACE,
            decode_threshold=_decode_threshold(case),
            device=pages.cache.device,
        )
        query = dense.query.transpose(1, 2).flatten(0, 1).contiguous()
        kv_c, k_pe = (t[:, case.cached :].flatten(0, 1) for t in (dense.kv_c, dense.k_pe))
        tensors = (query, kv_c.contiguous(), k_pe.contiguous(), dense.w_kv_b, pages.cache)
        scale = dense.scale

        def run() -> Tensor:
            out = mla_paged_attention(*tensors, metadata, softmax_scale=scale).out
            return out.view(case.batch, case.new, *out.shape[1:]).transpose(1, 2)

        return run


def _decode_threshold(case: AttentionCase) -> int:
    return case.new if case.group == "decode" else 1


class CacheOps(Ours):
    """`gather_kv_cache`, `update_kv_cache` and `merge_attn_states`."""

    name = PAGED
    groups = frozenset({"gather", "merge", "write"})

    def op(self, case: Case) -> str:
        """Return the op of the case's group."""
        ops = {
            "gather": "gather_kv_cache",
            "merge": "merge_attn_states",
            "write": "update_kv_cache",
        }
        return ops[case.group]

    def prepare(self, problem: Problem) -> Run:
        """Allocate what the op writes to."""
        if not isinstance(problem, CacheProblem):
            raise TypeError(f"expected an op on the cache, got {problem.case.name}")
        makers = {"gather": _gather, "merge": _merge, "write": _write}
        return makers[problem.case.group](problem)


def _gather(problem: CacheProblem) -> Run:
    cache, table = problem.tensors
    rows = problem.case.tokens
    workspace = cache.new_empty(rows, cache.shape[-1])
    lengths = torch.tensor([0, rows], dtype=torch.int32, device=cache.device)
    starts = torch.zeros(1, dtype=torch.int32, device=cache.device)

    def run() -> Tensor:
        gather_kv_cache(cache, table, cu_seqlens_k=lengths, seq_starts=starts, workspace=workspace)
        return workspace

    return run


def _write(problem: CacheProblem) -> Run:
    kv_c, k_pe, cache, slots = problem.tensors
    rows = cache.flatten(0, 1)

    def run() -> Tensor:
        update_kv_cache(kv_c, k_pe, cache, slots)
        return rows

    return run


def _merge(problem: CacheProblem) -> Run:
    prefix_out, prefix_lse, suffix_out, suffix_lse = problem.tensors
    out = torch.empty_like(prefix_out)

    def run() -> Tensor:
        return merge_attn_states(prefix_out, prefix_lse, suffix_out, suffix_lse, out=out).out

    return run
