"""What is measured side by side: our ops and other people's, all through one small protocol."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from mla_ops.bench.cases import AttentionCase, Case
from mla_ops.bench.problems import AttentionProblem, Problem
from mla_ops.bench.timing import Run
from mla_ops.dims import split_kv_b

__all__ = ["DENSE", "PAGED", "Peer", "absorbed"]

DENSE, PAGED = "mla_ops dense", "mla_ops paged"


class Peer(ABC):
    """One side of the comparison.

    Attributes:
        name: the column of a table. Sides of one name are variants, of which a table shows the
            fastest.
        groups: the groups of cases it takes part in.
        devices: types of the devices it runs on.
        against: the side of ours that does the same work; None for our own.
    """

    name: ClassVar[str]
    groups: ClassVar[frozenset[str]]
    devices: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})
    against: ClassVar[str | None] = None

    @abstractmethod
    def backend(self, case: Case) -> str:
        """Return what computes a case: our backend's name, or the function of somebody else."""

    def available(self) -> str | None:
        """Return why this side cannot be measured here, None if it can."""
        return None

    def refuses(self, case: Case) -> str | None:
        """Return why this side cannot run a case of its groups, None if it can."""
        del case
        return None

    def memory(self, case: Case) -> int:
        """Return the bytes that one prepared copy of a case and a call take, at most."""
        return 3 * case.bytes

    @abstractmethod
    def prepare(self, problem: Problem) -> Run:
        """Lay a problem out as this side wants it and return the call to time.

        The call returns attention as `[B, H, S, V]`, gathered rows as `[T, L+R]`, the slots of a
        cache as `[slots, L+R]`, a merged result as `[T, H, V]`: a view of what was computed, never
        work of its own.
        """


def absorbed(
    problem: AttentionProblem, attend: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[], Tensor]:
    """Return an absorbed call around somebody's kernel: project, attend, project.

    Args:
        problem: with any number of new tokens.
        attend: takes latent queries `[B, S, H, L]` and rotary queries `[B, S, H, R]` and returns
            `[B, S, H, L]`.
    """
    dims = problem.case.dims
    w_uk, w_uv = split_kv_b(problem.w_kv_b, dims.num_heads, dims.qk_nope_head_dim)
    query = problem.query.transpose(1, 2).contiguous()
    nope, rope = query.split([dims.qk_nope_head_dim, dims.qk_rope_head_dim], dim=-1)
    batch, new = query.shape[:2]

    def run() -> Tensor:
        flat = nope.reshape(batch * new, dims.num_heads, -1).transpose(0, 1)
        latent = torch.bmm(flat, w_uk).transpose(0, 1)  # [B*S, H, L]
        out = attend(latent.view(batch, new, dims.num_heads, -1), rope).flatten(0, 1)
        values = torch.bmm(out.transpose(0, 1), w_uv.transpose(1, 2))  # [H, B*S, V]
        return values.view(dims.num_heads, batch, new, -1).transpose(0, 1)

    return run


def expanded_bytes(case: AttentionCase) -> int:
    """Return the bytes of a case's keys and values, expanded.

    Args:
        case: whose context.
    """
    dims = case.dims
    width = dims.qk_head_dim + dims.v_head_dim
    return case.batch * case.context * dims.num_heads * width * case.dtype.itemsize


def missing(module: str) -> str | None:
    """Return why a module cannot be imported, None if it can.

    Args:
        module: dotted name.
    """
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        # A package that lacks a library of the driver raises what it likes.
        return f"import {module}: {_first_line(error)}"
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def widths(case: Case, **expected: int) -> str | None:
    """Return which width of a case a kernel was not built for, None if it was built for all.

    Args:
        case: whose layer.
        **expected: names of `MLADims` and the only values that the kernel takes.
    """
    wrong = [
        f"{name} {getattr(case.dims, name)}, takes {value}"
        for name, value in expected.items()
        if getattr(case.dims, name) != value
    ]
    return ", ".join(wrong) or None
