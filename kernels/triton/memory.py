"""What the Triton backend holds at once over a paged cache, from sizes alone."""

from __future__ import annotations

import torch

from mla_ops import env
from mla_ops.dims import MLADims
from mla_ops.dispatch import PagedLimits
from mla_ops.kernels.triton.absorbed import FIXED_TOKENS
from mla_ops.kernels.triton.configs import arch_of
from mla_ops.kernels.triton.launch import cdiv

__all__ = ["partial_rows", "worst_bytes"]

_MOST_ROWS = 64  # of a program of the absorbed form


def partial_rows(heads: int, limits: PagedLimits, processors: int) -> int:
    """Return how many rows of all splits together an absorbed call has at most.

    There are two splits where a context and new tokens are two sets of keys; more of them only as
    long as all programs together are few.

    Args:
        heads: H.
        limits: what a batch may hold.
        processors: of the device.
    """
    rows = heads * limits.num_tokens
    if env.batch_invariant():
        return rows * (cdiv(limits.max_seq_len, FIXED_TOKENS) + 1)
    return 2 * rows + 4 * processors * _MOST_ROWS


def worst_bytes(dims: MLADims, limits: PagedLimits) -> dict[str, int]:
    """Return the bytes that the worst batch within the limits holds, by part.

    The absorbed and the expanded form do not run at the same time; both are counted, since one
    batch may need both and memory that is free again is not always one piece.

    Args:
        dims: widths of the layer.
        limits: what a batch may hold.

    Returns:
        Bytes of the `results`; of the `queries` in latent space and the results there; of the
        `partials` of splits; of `latents` and `expanded` of a chunk, of `new`, the expanded new
        tokens; of the `state` between chunks.
    """
    size, heads, tokens = limits.dtype.itemsize, dims.num_heads, limits.num_tokens
    processors = arch_of(torch.empty(0, device=limits.device)).processors
    partials = partial_rows(heads, limits, processors)
    return {
        "results": tokens * heads * (dims.v_head_dim * size + 4),
        "queries": 2 * heads * tokens * dims.kv_lora_rank * size,
        "partials": partials * (dims.kv_lora_rank + 2) * 4,
        "latents": limits.workspace_tokens * dims.latent_dim * size,
        "expanded": limits.workspace_tokens * dims.expanded_dim * size,
        "new": tokens * dims.expanded_dim * size,
        "state": tokens * heads * (dims.v_head_dim + 2) * 4,
    }
