"""The chunk planner: cutting cached contexts so that each piece fits a bounded workspace.

The contexts of a batch are laid end to end in request order and the line is cut every
`workspace_tokens` rows. So there are never more than `ceil(total / workspace_tokens)` chunks, a
request is split only where a cut falls inside it, only the first request of a chunk can be a
continuation, and a request without context takes no part. Host only, numpy only.

Source: the bounded workspace is that of vLLM's "MLA with chunked prefill" (PR 12639), which gave
every request an equal share of it instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mla_ops.errors import InvalidInputError

__all__ = ["ChunkPlan", "plan_chunks"]

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class ChunkPlan:
    """Which rows of which contexts each chunk holds.

    Attributes:
        starts: `[num_chunks, num_reqs]` int32, first context row of each request in each chunk.
        lens: `[num_chunks, num_reqs]` int32, its rows there; 0 where it takes no part.
    """

    starts: npt.NDArray[np.int32]
    lens: npt.NDArray[np.int32]

    @property
    def num_chunks(self) -> int:
        """How many chunks there are; 0 when nothing is cached."""
        return int(self.lens.shape[0])

    @property
    def cu_seqlens(self) -> npt.NDArray[np.int32]:
        """`[num_chunks, num_reqs + 1]` int32: where each request's rows lie in the workspace."""
        cu = np.zeros((self.num_chunks, self.lens.shape[1] + 1), dtype=np.int32)
        np.cumsum(self.lens, axis=1, out=cu[:, 1:])
        return cu


def plan_chunks(context_lens: Sequence[int], workspace_tokens: int) -> ChunkPlan:
    """Pack the contexts of a batch into chunks of at most `workspace_tokens` rows.

    Args:
        context_lens: cached tokens of each request, at least 0.
        workspace_tokens: rows of the workspace, at least 1.

    Raises:
        InvalidInputError: a length is negative, or the workspace has no row.

    Example:
        >>> plan = plan_chunks([60, 0, 10], workspace_tokens=64)
        >>> plan.starts.tolist(), plan.lens.tolist()
        ([[0, 0, 0], [0, 0, 4]], [[60, 0, 4], [0, 0, 6]])
    """
    if workspace_tokens < 1:
        raise InvalidInputError(f"workspace_tokens must be at least 1, got {workspace_tokens}")
    lens = np.asarray(context_lens, dtype=np.int64).reshape(-1)
    if lens.size and (lens.min() < 0 or lens.max() > _INT32_MAX):
        raise InvalidInputError(
            f"context_lens must be between 0 and {_INT32_MAX}, got {list(context_lens)}"
        )
    ends = np.cumsum(lens)
    total = int(ends[-1]) if lens.size else 0
    # Every end of a context and every cut begins a piece; a piece lies in one request and chunk.
    pieces = np.union1d(ends, np.arange(0, total, workspace_tokens))
    begin, stop = pieces[:-1][pieces[:-1] < total], pieces[1:][pieces[:-1] < total]
    request = np.searchsorted(ends, begin, side="right")
    chunk = begin // workspace_tokens
    shape = (-(-total // workspace_tokens), lens.size)
    starts, taken = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.int32)
    starts[chunk, request] = begin - (ends - lens)[request]
    taken[chunk, request] = stop - begin
    return ChunkPlan(starts, taken)
