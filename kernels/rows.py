"""Where the rows of a tile come from: two dense tensors, a paged cache, or one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from mla_ops.dims import MLADims
from mla_ops.errors import InvalidInputError

__all__ = [
    "ChainedRows",
    "DenseRows",
    "ExpandedRows",
    "GivenRows",
    "PagedCache",
    "PagedRows",
    "RowSource",
    "Rows",
    "as_bytes",
    "check_blocks",
    "check_rows",
    "flat_rows",
]


class Rows(NamedTuple):
    """The rows of one tile, in the compute dtype.

    Attributes:
        latent: `[C, L]`.
        rope: `[C, R]`.
        packed: `[C, L+R]`, both side by side, where they lie so; else None.
    """

    latent: Tensor
    rope: Tensor
    packed: Tensor | None


class ExpandedRows(NamedTuple):
    """The rows of one tile when keys and values are expanded already.

    Attributes:
        nope: `[C, H, P]`.
        rope: `[C, R]`.
        value: `[C, H, V]`.
    """

    nope: Tensor
    rope: Tensor
    value: Tensor


class RowSource(Protocol):
    """The keys of one request."""

    def tiles(self, begin: int, end: int, size: int) -> Iterator[slice]:
        """Cut `[begin, end)` into tiles of at most `size` keys, as the source likes them."""
        ...

    def load(self, keys: slice, compute: torch.dtype) -> Rows | ExpandedRows:
        """Return one tile, a view where it can be; valid until the next call."""
        ...


def _cut(begin: int, end: int, size: int) -> Iterator[slice]:
    return (slice(i, min(i + size, end)) for i in range(begin, end, size))


class DenseRows(NamedTuple):
    """Rows that lie in two tensors.

    Attributes:
        kv_c: `[T, L]`.
        k_pe: `[T, R]`.
    """

    kv_c: Tensor
    k_pe: Tensor

    def tiles(self, begin: int, end: int, size: int) -> Iterator[slice]:
        """Cut evenly."""
        return _cut(begin, end, size)

    def load(self, keys: slice, compute: torch.dtype) -> Rows:
        """Return views, converted where the dtypes differ."""
        return Rows(self.kv_c[keys].to(compute), self.k_pe[keys].to(compute), None)


class GivenRows(NamedTuple):
    """Keys and values of one request that are expanded already.

    Attributes:
        nope: `[T, H, P]`.
        rope: `[T, R]`.
        value: `[T, H, V]`.
    """

    nope: Tensor
    rope: Tensor
    value: Tensor

    def tiles(self, begin: int, end: int, size: int) -> Iterator[slice]:
        """Cut evenly."""
        return _cut(begin, end, size)

    def load(self, keys: slice, compute: torch.dtype) -> ExpandedRows:
        """Return views, converted where the dtypes differ."""
        return ExpandedRows(*(t[keys].to(compute) for t in self))


def check_rows(kv_cache: Tensor) -> int:
    """Return the rows from one block of a paged cache to the next.

    Args:
        kv_cache: `[num_blocks, block_size, L+R]`.

    Raises:
        InvalidInputError: rows are not contiguous, or blocks not a whole number of rows apart.
    """
    num_blocks, block_size, width = kv_cache.shape
    stride = kv_cache.stride(0) if num_blocks > 1 else block_size * width
    inner = block_size <= 1 or kv_cache.stride(1) == width
    if (width > 1 and kv_cache.stride(2) != 1) or not inner or stride % width:
        raise InvalidInputError(
            "kv_cache must have contiguous rows, one after the other within a block, and blocks a "
            f"whole number of rows apart; got shape {tuple(kv_cache.shape)} with strides "
            f"{kv_cache.stride()}"
        )
    return stride // width


def flat_rows(kv_cache: Tensor) -> tuple[Tensor, int]:
    """View a paged cache as rows.

    Args:
        kv_cache: `[num_blocks, block_size, L+R]`.

    Returns:
        `[rows, L+R]`, the same memory, and the rows from one block to the next.

    Raises:
        InvalidInputError: as `check_rows`.
    """
    num_blocks, block_size, width = kv_cache.shape
    pitch = check_rows(kv_cache)
    total = (num_blocks - 1) * pitch + block_size if num_blocks else 0
    return kv_cache.as_strided((total, width), (width, 1), kv_cache.storage_offset()), pitch


def check_blocks(blocks: Tensor, needed: int, kv_cache: Tensor) -> None:
    """Refuse block ids that are not in the cache, where reading them costs nothing.

    Args:
        blocks: ids that are about to be read.
        needed: how many there must be.
        kv_cache: `[num_blocks, block_size, L+R]`.

    Raises:
        InvalidInputError: there are too few, or one is out of range.
    """
    if blocks.device.type != "cpu" or needed <= 0:
        return
    limit, ids = kv_cache.shape[0], blocks.numpy()  # small, and numpy's calls cost less
    if ids.size < needed or ids.min() < 0 or ids.max() >= limit:
        raise InvalidInputError(
            f"block_table must hold {needed} ids from 0 to {limit - 1} for the rows that are read, "
            f"got {blocks.tolist()}"
        )


class PagedCache:
    """A paged cache and the scratch that scattered rows are gathered into."""

    def __init__(
        self, kv_cache: Tensor, dims: MLADims, scale: Tensor | None, compute: torch.dtype, rows: int
    ) -> None:
        """Allocate the scratch.

        Args:
            kv_cache: `[num_blocks, block_size, L+R]`; rows contiguous, blocks a whole number of
                rows apart.
            dims: widths of the layer.
            scale: one element, factor on the stored values; None for 1.
            compute: dtype of the gathered rows.
            rows: most rows of one tile.
        """
        self.block_size, width = kv_cache.shape[1:]
        self.dims, self._pages = dims, kv_cache
        self.scale = scale if kv_cache.dtype.itemsize == 1 else None
        self.flat, self.pitch = flat_rows(kv_cache)
        self._within = torch.arange(self.block_size, device=kv_cache.device)
        self._gathered = kv_cache.new_empty(rows, width)
        self._converted = (
            None if compute == kv_cache.dtype else kv_cache.new_empty(rows, width, dtype=compute)
        )

    def load(self, table: Tensor, keys: slice) -> Rows:
        """Return logical rows `keys` of the request whose block ids are `table`, `[n]` on the host.

        Pages that lie one after the other are a view; others are gathered.
        """
        first, last = keys.start // self.block_size, (keys.stop - 1) // self.block_size + 1
        check_blocks(table[first:last], last - first, self._pages)
        pages = table[first:last].long()
        count, offset = keys.stop - keys.start, keys.start - first * self.block_size
        begin = self._view_begin(pages)
        if begin is not None:
            rows = self.flat[begin + offset : begin + offset + count]
        else:
            ids = (pages[:, None] * self.pitch + self._within).flatten()
            rows = self._gathered[:count]
            ids = ids[offset : offset + count]
            torch.index_select(as_bytes(self.flat), 0, ids, out=as_bytes(rows))
        if self._converted is not None:
            rows = self._converted[:count].copy_(rows)
            if self.scale is not None:
                rows.mul_(self.scale.reshape(()))
        latent, rope = rows.split([self.dims.kv_lora_rank, self.dims.qk_rope_head_dim], dim=-1)
        return Rows(latent, rope, rows)

    def _view_begin(self, pages: Tensor) -> int | None:
        """Return the first row of pages that follow one another in memory, None for others."""
        if pages.device.type != "cpu":
            return None  # reading the table would be a host sync
        ids = pages.numpy()
        if ids.size > 1 and (self.pitch != self.block_size or (np.diff(ids) != 1).any()):
            return None
        return int(ids[0]) * self.pitch


def as_bytes(rows: Tensor) -> Tensor:
    """View fp8 as bytes, since not every kernel of torch knows the dtype; others stay as they are.

    Args:
        rows: any shape.
    """
    return rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows


class PagedRows(NamedTuple):
    """The cached rows of one request.

    Attributes:
        cache: the cache.
        table: `[max_blocks]` int32 on the host, the request's block ids.
    """

    cache: PagedCache
    table: Tensor

    def tiles(self, begin: int, end: int, size: int) -> Iterator[slice]:
        """Cut evenly; a tile may begin inside a page."""
        return _cut(begin, end, size)

    def load(self, keys: slice, compute: torch.dtype) -> Rows:
        """Return one tile of the cache."""
        return self.cache.load(self.table, keys)


class ChainedRows(NamedTuple):
    """A cached context followed by the new tokens, whose rows come from the activations.

    Attributes:
        context: rows `[0, length)`.
        length: of the context.
        new: the rows behind it.
    """

    context: PagedRows
    length: int
    new: DenseRows

    def tiles(self, begin: int, end: int, size: int) -> Iterator[slice]:
        """Cut so that no tile holds both."""
        yield from self.context.tiles(begin, min(end, self.length), size)
        yield from self.new.tiles(max(begin, self.length), end, size)

    def load(self, keys: slice, compute: torch.dtype) -> Rows:
        """Return one tile of either part."""
        if keys.start < self.length:
            return self.context.load(keys, compute)
        return self.new.load(slice(keys.start - self.length, keys.stop - self.length), compute)
