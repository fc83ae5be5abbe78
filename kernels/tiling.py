"""What the tiled backend is made of: plan, scratch, and who sees whom."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mla_ops.dims import MLADims, stat_dtype
from mla_ops.kernels.rows import ExpandedRows, Rows, RowSource

__all__ = [
    "MOST_QUERIES",
    "Job",
    "Plan",
    "Request",
    "Scratch",
    "Tile",
    "Visibility",
    "blocks",
    "compute_dtype",
    "finite",
    "plan_tiles",
    "scratch_sizes",
]

_CPU_ELEMENTS_PER_THREAD = 1024 * 1024
_DEVICE_ELEMENTS = 32 * 1024 * 1024
_EXPANDED_KEYS = 512
MOST_QUERIES = 256
_ABSORBED_ROWS = 512
_CONVERTED_KEYS = 2048


def _has_fast_matmul(dtype: torch.dtype) -> bool:
    """Whether a CPU multiplies matrices of a 16-bit dtype faster than it converts them to fp32."""
    probe = {
        torch.bfloat16: "_is_mkldnn_bf16_supported",
        torch.float16: "_is_mkldnn_fp16_supported",
    }[dtype]
    supported = getattr(torch.ops.mkldnn, probe, None)
    return supported is not None and bool(supported())


_CPU_COMPUTE = {
    dtype: dtype if _has_fast_matmul(dtype) else torch.float32
    for dtype in (torch.bfloat16, torch.float16)
}


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of the matmuls.

    It is the input dtype, except on a CPU without matrix units for it: there a 16-bit matmul can be
    a hundred times slower than one in fp32, and tiles are converted as they are read.

    Args:
        dtype: of the inputs.
        device: where they are.
    """
    return _CPU_COMPUTE.get(dtype, dtype) if device.type == "cpu" else dtype


@dataclass(frozen=True)
class Plan:
    """How one request is cut: the sizes of a tile, and the form.

    Attributes:
        expand: make keys and values of a tile (true), or attend to the latents (false).
        heads: heads per block.
        queries: query tokens per block.
        keys: keys per tile.
    """

    expand: bool
    heads: int
    queries: int
    keys: int


def plan_tiles(
    dims: MLADims,
    num_queries: int,
    num_keys: int,
    *,
    workspace_tokens: int | None,
    device: torch.device,
    converts: bool,
    expand: bool | None = None,
) -> Plan:
    """Choose form and tile sizes for one request.

    The scores of a tile hold at most a million elements per CPU thread (4 MiB in fp32), so
    that they stay in cache; the sizes do not depend on the context beyond that.

    Args:
        dims: widths of the layer.
        num_queries: S, new tokens.
        num_keys: keys to attend to.
        workspace_tokens: most keys in one tile, None for no limit of the caller's.
        device: where the tensors are.
        converts: whether latents are copied into the compute dtype, which bounds the tile too.
        expand: the form, None to choose by `MLADims.should_expand`.
    """
    on_cpu = device.type == "cpu"
    budget = _CPU_ELEMENTS_PER_THREAD * torch.get_num_threads() if on_cpu else _DEVICE_ELEMENTS
    if expand is None:
        expand = dims.should_expand(num_queries, num_keys)
    queries = max(1, min(num_queries, MOST_QUERIES))
    if expand:
        keys = _EXPANDED_KEYS
        heads = budget // (queries * keys)
    else:
        heads = _ABSORBED_ROWS // queries
        keys = budget // (queries * max(1, min(heads, dims.num_heads)))
        if converts:
            keys = min(keys, _CONVERTED_KEYS)
    limit = num_keys if workspace_tokens is None else min(num_keys, workspace_tokens)
    return Plan(
        expand=expand,
        heads=max(1, min(heads, dims.num_heads)),
        queries=queries,
        keys=max(1, min(keys, limit)),
    )


def blocks(total: int, size: int, begin: int = 0) -> Iterator[slice]:
    """Cut `[begin, total)` into slices of `size`, the last one shorter.

    Example:
        >>> list(blocks(5, 2))
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return (slice(i, min(i + size, total)) for i in range(begin, total, size))


class Scratch(NamedTuple):
    """Elements of a job's buffers.

    Attributes:
        tile: scores in the dtype of statistics, and again in the compute dtype if that is another.
        pair: output of `kv_b_proj` for one tile, in the compute dtype.
        keys: keys by head, likewise.
        values: values by head, likewise.
    """

    tile: int
    pair: int
    keys: int
    values: int

    def nbytes(self, stats: torch.dtype, compute: torch.dtype) -> int:
        """Return the bytes of all buffers."""
        low = 0 if compute == stats else self.tile
        expanded = self.pair + self.keys + self.values
        return self.tile * stats.itemsize + (low + expanded) * compute.itemsize


def scratch_sizes(dims: MLADims, plan: Plan) -> Scratch:
    """Return the sizes of a job's buffers, for its allocation and for whoever reserves it.

    Args:
        dims: widths of the layer.
        plan: tile sizes and form.
    """
    rows = plan.heads * plan.keys if plan.expand else 0
    pair = dims.qk_nope_head_dim + dims.v_head_dim
    return Scratch(
        tile=plan.heads * plan.queries * plan.keys,
        pair=rows * pair,
        keys=rows * dims.qk_head_dim,
        values=rows * dims.v_head_dim,
    )


class Job:
    """One call: its widths, its plan, and the memory that every tile of it uses again.

    The memory is allocated here, once; its size follows from the plan and never from the context.

    Attributes:
        dims: widths of the layer.
        plan: tile sizes and form.
        scale: factor on the scores.
        compute: dtype of the matmuls.
        stats: dtype of softmax statistics and running results.
    """

    def __init__(
        self, dims: MLADims, plan: Plan, scale: float, like: Tensor, compute: torch.dtype
    ) -> None:
        """Allocate the scratch.

        Args:
            dims: widths of the layer.
            plan: tile sizes and form.
            scale: factor on the scores.
            like: a tensor on the right device, with the dtype of the inputs.
            compute: dtype of the matmuls.
        """
        self.dims, self.plan, self.scale, self.compute = dims, plan, scale, compute
        self.stats = stat_dtype(like.dtype)
        scratch = scratch_sizes(dims, plan)
        self._scores = like.new_empty(scratch.tile, dtype=self.stats)
        shared = compute == self.stats
        self._low = self._scores if shared else like.new_empty(scratch.tile, dtype=compute)
        self._pair = like.new_empty(scratch.pair, dtype=compute)
        self._keys = like.new_empty(scratch.keys, dtype=compute)
        self._values = like.new_empty(scratch.values, dtype=compute)

    def scores(self, shape: tuple[int, int, int]) -> Tensor:
        """Return the fp32 scores of a tile `[h, s, C]`, uninitialised."""
        return _view(self._scores, shape)

    def low(self, shape: tuple[int, int, int]) -> Tensor:
        """Return the tile in the compute dtype: the very scores where the two dtypes are one."""
        return _view(self._low, shape)

    def expand(self, latent: Tensor, rope: Tensor, w_kv_b: Tensor) -> tuple[Tensor, Tensor]:
        """Make the keys and values of one tile, in the scratch.

        Args:
            latent: `[C, L]`.
            rope: `[C, R]`.
            w_kv_b: `[h*(P+V), L]`, the rows of one block of heads.

        Returns:
            keys `[h, C, P+R]` and values `[h, C, V]`, valid until the next call.
        """
        nope, value = self.dims.qk_nope_head_dim, self.dims.v_head_dim
        tokens, heads = latent.shape[0], w_kv_b.shape[0] // (nope + value)
        pair = _view(self._pair, (tokens, w_kv_b.shape[0]))
        torch.mm(latent, w_kv_b.t(), out=pair)
        k_nope, v = pair.view(tokens, heads, -1).split([nope, value], dim=-1)
        return self.place(k_nope, rope, v)

    def place(self, nope: Tensor, rope: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Lay the keys and values of one tile out by head, in the scratch.

        Args:
            nope: `[C, h, P]`.
            rope: `[C, R]`.
            value: `[C, h, V]`.

        Returns:
            As `expand`.
        """
        tokens, heads, width = nope.shape
        keys = _view(self._keys, (heads, tokens, self.dims.qk_head_dim))
        keys[..., :width].copy_(nope.transpose(0, 1))
        keys[..., width:].copy_(rope)
        values = _view(self._values, (heads, tokens, value.shape[2]))
        return keys, values.copy_(value.transpose(0, 1))

    def weights_of(self, heads: slice, w_kv_b: Tensor) -> Tensor:
        """Return the rows of `w_kv_b` that belong to a block of heads, in the compute dtype."""
        rows = self.dims.qk_nope_head_dim + self.dims.v_head_dim
        return w_kv_b[heads.start * rows : heads.stop * rows].to(self.compute)


def _view(buffer: Tensor, shape: tuple[int, ...]) -> Tensor:
    return buffer[: math.prod(shape)].view(shape)


class Request(NamedTuple):
    """One request of the batch.

    Attributes:
        query: `[H, S, P+R]`.
        source: its keys.
        visibility: which query sees which key.
    """

    query: Tensor
    source: RowSource
    visibility: Visibility

    def tiles(self, size: int) -> Iterator[slice]:
        """Cut the keys that may be visible into tiles of at most `size`."""
        return self.source.tiles(self.visibility.begin, self.visibility.end, size)

    def rows(self, keys: slice, compute: torch.dtype) -> Rows | ExpandedRows:
        """Return one tile, in the compute dtype."""
        return self.source.load(keys, compute)


class Tile(NamedTuple):
    """One tile that some query sees.

    Attributes:
        keys: its keys, cut to those that the block can see.
        hidden: bool, true where a query does not see a key, broadcastable to `[h, s, C]`, or None.
        bias: added to the scores, broadcastable to `[h, s, C]`, or None.
        empty_rows: whether a query may see none of the keys.
    """

    keys: slice
    hidden: Tensor | None
    bias: Tensor | None
    empty_rows: bool


class Visibility:
    """Which queries of one request see which keys, tile by tile.

    On a CPU the bounds are read on the host, and keys outside of them are never touched. On other
    devices reading them would be a host sync, so every tile is masked on the device instead.
    """

    def __init__(
        self,
        num_queries: int,
        num_keys: int,
        *,
        is_causal: bool,
        mask: Tensor | None,
        bounds: Tensor | None,
        device: torch.device,
    ) -> None:
        """Read what can be read on the host.

        Args:
            num_queries: S.
            num_keys: T.
            is_causal: bottom-right aligned causal rule.
            mask: bool or float, broadcastable to `[H, S, T]`, or None.
            bounds: `[2]` int32 (first valid key, end), or None.
            device: where masks are built.
        """
        self._device = device
        self.begin, self.end = 0, num_keys
        self._bounds: Tensor | None = None
        if bounds is not None:
            if bounds.device.type == "cpu":
                first, end = bounds.tolist()
                self.end = min(max(end, 0), num_keys)
                self.begin = min(max(first, 0), self.end)
            else:
                self._bounds = bounds.clamp(0, num_keys)
        self._num_queries = num_queries
        self._causal = is_causal
        self._on_host = device.type == "cpu"
        self._mask: Tensor | None = None
        if mask is not None:
            mask = mask[(None,) * (3 - mask.dim())]
            self._mask = mask.expand(-1, num_queries, num_keys)

    @property
    def reads_unseen(self) -> bool:
        """Whether a tile may hold keys that no query sees, and with them NaN."""
        return self._mask is not None or self._bounds is not None

    def tile(self, heads: slice, queries: slice, keys: slice) -> Tile | None:
        """Describe one tile, or return None when nothing of it is visible.

        Args:
            heads: head block.
            queries: query block.
            keys: key tile; keys that the causal rule hides from the whole block are cut off.
        """
        hidden: Tensor | None = None
        bias: Tensor | None = None
        reach = self.end - self._num_queries  # query i sees keys up to reach + i
        if self._causal and self._bounds is None:
            keys = slice(keys.start, min(keys.stop, reach + queries.stop))
            if keys.start >= keys.stop:
                return None
            diagonal = reach + queries.start - keys.start + 1
            if keys.stop - keys.start > diagonal:
                shape = (queries.stop - queries.start, keys.stop - keys.start)
                hidden = torch.ones(shape, dtype=torch.bool, device=self._device).triu_(diagonal)
        elif self._bounds is not None:
            hidden = self._outside(queries, keys)
        # A causal row is empty only above the first key.
        empty_rows = self._bounds is not None or reach + queries.start < keys.start
        if self._mask is not None:
            part = self._mask[heads if self._mask.shape[0] > 1 else slice(None), queries, keys]
            if part.dtype == torch.bool:
                masked = ~part
            else:
                masked, bias = part == float("-inf"), part
            if self._on_host and bool(masked.all()):
                return None
            if not self._on_host or bool(masked.any()):
                hidden = masked if hidden is None else hidden | masked
                empty_rows = True
        return Tile(keys, hidden, bias, empty_rows and hidden is not None)

    def _outside(self, queries: slice, keys: slice) -> Tensor:
        """Return what the bounds and the causal rule hide, computed on the device."""
        first, end = self._bounds.unbind() if self._bounds is not None else (0, 0)
        key = torch.arange(keys.start, keys.stop, device=self._device)
        hidden = ((key < first) | (key >= end))[None]
        if self._causal:
            query = torch.arange(queries.start, queries.stop, device=self._device)[:, None]
            hidden = hidden | (key > end - self._num_queries + query)
        return hidden


def finite(rows: Tensor, visibility: Visibility) -> Tensor:
    """Return values that a weight of 0 makes 0: keys that no query sees may be NaN or infinite.

    A key that is seen and not finite still shows: its score is not finite either.

    Args:
        rows: latents or values of a tile.
        visibility: of the request.
    """
    return rows.nan_to_num(0.0, 0.0, 0.0) if visibility.reads_unseen else rows
