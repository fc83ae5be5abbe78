"""What the tiled backend holds at once over a paged cache, from sizes alone.

The scratch is counted by the functions that allocate it; the rest follows the walk in
`kernels/attend.py`, which keeps one block of heads alive at a time.
"""

from __future__ import annotations

from bisect import bisect_left

import torch

from mla_ops.dims import MLADims, stat_dtype
from mla_ops.dispatch import PagedLimits
from mla_ops.kernels.tiled_paged import TOGETHER, plan_paged
from mla_ops.kernels.tiling import MOST_QUERIES, Plan, compute_dtype, scratch_sizes

__all__ = ["batch_bytes", "worst_bytes"]

_PACKED_PER_THREAD = 256 * 1024  # a CPU's matmul library packs 16-bit operands, at most 0.2 MiB
_SMALL = 2048  # rebased query starts, and tensors of one element


def worst_bytes(dims: MLADims, limits: PagedLimits) -> dict[str, int]:
    """Return the bytes of the batch within the limits that holds the most, by part.

    Args:
        dims: widths of the layer.
        limits: what a batch may hold.
    """
    longest = min(limits.num_tokens, limits.max_seq_len)
    # The plan depends on the new tokens of a request up to a block of them, and on the form.
    turn = int(min(dims.expand_threshold, longest))
    sizes = {*range(1, min(longest, MOST_QUERIES) + 1), longest, max(turn, 1)}
    return max(
        (
            batch_bytes(dims, limits, new, keys, cached=cached)
            for new in sizes
            for keys in (limits.max_seq_len, _most_expanded(dims, new, limits.max_seq_len))
            for cached in (False, new <= limits.decode_threshold)
        ),
        key=lambda parts: sum(parts.values()),
    )


def _most_expanded(dims: MLADims, new: int, longest: int) -> int:
    """Return the most keys that are expanded for so many new tokens; without any, `new`."""
    lengths = range(new, max(new, longest) + 1)
    return new + bisect_left(lengths, True, lo=1, key=lambda n: not dims.should_expand(new, n)) - 1


def batch_bytes(
    dims: MLADims, limits: PagedLimits, num_queries: int, num_keys: int, *, cached: bool
) -> dict[str, int]:
    """Return the bytes that one call holds at its peak, by part.

    Args:
        dims: widths of the layer.
        limits: number of new tokens, dtypes and device; its lengths are not read.
        num_queries: new tokens of the request that has the most.
        num_keys: length of the longest request, new tokens included.
        cached: whether the new tokens are read from the cache, as those of decodes are.

    Returns:
        `results`, `scratch` of a tile, `gathered` rows, and `working`: the weights, queries and
        running results of one block of heads, with the temporaries of its fullest moment; and
        `other`.
    """
    compute = compute_dtype(limits.dtype, limits.device)
    stats = stat_dtype(limits.dtype)
    plan = plan_paged(
        dims,
        num_queries,
        num_keys,
        workspace_tokens=limits.workspace_tokens,
        dtype=limits.dtype,
        cache_dtype=limits.cache_dtype,
        device=limits.device,
        expand=dims.should_expand(num_queries, num_keys),
    )
    row = limits.cache_dtype.itemsize + (0 if compute == limits.cache_dtype else compute.itemsize)
    per_token = dims.v_head_dim * limits.dtype.itemsize + stats.itemsize
    threads = torch.get_num_threads() if limits.device.type == "cpu" else 0
    library = 0 if compute == stats else _PACKED_PER_THREAD * threads
    return {
        "results": limits.num_tokens * dims.num_heads * per_token,
        "scratch": scratch_sizes(dims, plan).nbytes(stats, compute),
        "gathered": plan.keys * dims.latent_dim * row + 8 * limits.block_size,
        "working": _working(dims, plan, limits, num_queries, num_keys, cached, compute, stats),
        "other": _SMALL + library,
    }


def _working(
    dims: MLADims,
    plan: Plan,
    limits: PagedLimits,
    num_queries: int,
    num_keys: int,
    cached: bool,
    compute: torch.dtype,
    stats: torch.dtype,
) -> int:
    """Return the peak of one block of heads: making its form, loading a tile, adding a tile."""
    c, s = compute.itemsize, stats.itemsize
    rank, width, value = dims.kv_lora_rank, dims.latent_dim, dims.v_head_dim
    queries, block = plan.heads * num_queries, plan.heads * plan.queries  # rows of [h, s]
    converts, same = compute != limits.dtype, c == s
    half = plan.heads * rank * c  # of the up projection, for each of its columns
    given = queries * dims.qk_head_dim * c if converts else 0
    weights = half * (dims.qk_nope_head_dim + value) if converts else 0
    # A batched 16-bit matmul takes contiguous operands on a CPU, and copies others.
    copies = 0 if same else half * dims.qk_nope_head_dim + queries * dims.qk_nope_head_dim * c

    if plan.expand:
        form = weights + queries * dims.qk_head_dim * c
        making = form + given
        wide = kept = value
        finishing = 0 if same else block * value * c
    elif cached:  # the projections act on several decodes at once
        count = max(1, TOGETHER // num_queries) * num_queries
        tokens = plan.heads * max(num_queries, min(count, limits.num_tokens))
        given = tokens * dims.qk_head_dim * c if converts else 0
        copies = 0 if same else half * dims.qk_nope_head_dim + tokens * dims.qk_nope_head_dim * c
        some = tokens > queries or num_queries > plan.queries  # a request's rows are copied out
        latent = weights + given + half * value + tokens * rank * c
        making = latent + max(copies, tokens * width * c + some * queries * width * c)
        form = half * value + tokens * (width + rank) * c + some * queries * width * c
        wide, kept = width, rank
        finishing = tokens * value * c
    else:
        form = half * value + queries * width * c
        again = width if num_queries > plan.queries else 0
        latent = weights + given + half * value + queries * rank * c
        making = latent + max(copies, queries * (width + again) * c)
        wide, kept = width, rank
        finishing = block * value * c + (0 if same else block * rank * c)

    context = num_keys if cached else num_keys - num_queries
    if num_keys > plan.keys:
        once = 0 if context else min(num_queries, plan.keys)
    else:
        once = 0 if context and not cached else num_queries
    merging = num_queries - once  # new tokens that see more than one tile
    running = queries * 2 * s + plan.heads * once * wide * c
    running += plan.heads * merging * (wide if same else kept) * s
    temporaries = max(8 * s + 1, 4 * s if same else (4 + kept) * s)
    adding = plan.heads * min(plan.queries, merging) * (wide * c + temporaries)

    new = min(plan.keys, num_queries)
    rows = 0 if cached or not converts else new * width * c
    hidden = plan.queries * (plan.keys if cached else new) if plan.queries > 1 else 0
    pages = -(-plan.keys // limits.block_size) + 1
    loading = 8 * (pages * limits.block_size + 2 * pages)
    return max(making, form + running + max(rows + hidden + adding, hidden + loading, finishing))
