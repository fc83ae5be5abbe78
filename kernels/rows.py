"""Where the rows of a tile come from: two dense tensors, a paged cache, or one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mla_ops.dims import MLADims
from mla_ops.errors import InvalidInputError

__all__ = ["ChainedRows", "DenseRows", "PagedCache", "PagedRows", "RowSource", "Rows"]


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


class RowSource(Protocol):
    """The keys of one request."""

    def tiles(self, begin: int, end: int, size: int) -> Iterator[slice]:
        """Cut `[begin, end)` into tiles of at most `size` keys, as the source likes them."""
        ...

    def load(self, keys: slice, compute: torch.dtype) -> Rows:
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


class PagedCache:
    """A paged cache and the scratch that scattered rows are gathered into."""

    def __init__(
        self, kv_cache: Tensor, dims: MLADims, scale: float | None, compute: torch.dtype, rows: int
    ) -> None:
        """Allocate the scratch.

        Args:
            kv_cache: `[num_blocks, block_size, L+R]`; rows contiguous, blocks a whole number of
                rows apart.
            dims: widths of the layer.
            scale: factor on the stored values, None for 1.
            compute: dtype of the gathered rows.
            rows: most rows of one tile.
        """
        self.num_blocks, self.block_size, width = kv_cache.shape
        stride = flat_stride(kv_cache)
        self.dims, self.scale = dims, scale
        self.pitch = stride // width  # rows from one block to the next
        total = (self.num_blocks - 1) * self.pitch + self.block_size if self.num_blocks else 0
        self.flat = kv_cache.as_strided((total, width), (width, 1))
        self._gathered = kv_cache.new_empty(rows, width)
        self._converted = (
            None
            if compute == kv_cache.dtype and scale is None
            else kv_cache.new_empty(rows, width, dtype=compute)
        )

    def load(self, table: Tensor, keys: slice) -> Rows:
        """Return logical rows `keys` of the request whose block ids are `table`, `[n]` on the host.

        Pages that lie one after the other are a view; others are gathered.
        """
        first, last = keys.start // self.block_size, (keys.stop - 1) // self.block_size + 1
        pages = table[first:last].long()
        count = keys.stop - keys.start
        offset = keys.start - first * self.block_size
        consecutive = self.pitch == self.block_size and bool((pages.diff() == 1).all())
        if pages.numel() == 1 or consecutive:
            begin = int(pages[0]) * self.pitch + offset
            rows = self.flat[begin : begin + count]
        else:
            position = torch.arange(offset, offset + count)
            ids = pages[position // self.block_size] * self.pitch + position % self.block_size
            rows = self._gathered[:count]
            torch.index_select(self.flat, 0, ids.to(self.flat.device), out=rows)
        if self._converted is not None:
            rows = self._converted[:count].copy_(rows)
            if self.scale is not None:
                rows.mul_(self.scale)
        latent, rope = rows.split([self.dims.kv_lora_rank, self.dims.qk_rope_head_dim], dim=-1)
        return Rows(latent, rope, rows)


def flat_stride(kv_cache: Tensor) -> int:
    """Return the distance of two blocks in elements, or refuse a layout that is not rows.

    Args:
        kv_cache: `[num_blocks, block_size, L+R]`.

    Raises:
        InvalidInputError: rows are not contiguous, or blocks not a whole number of rows apart.
    """
    width = kv_cache.shape[2]
    stride = kv_cache.stride(0) if kv_cache.shape[0] > 1 else kv_cache.shape[1] * width
    inner = kv_cache.shape[1] <= 1 or kv_cache.stride(1) == width
    if (width > 1 and kv_cache.stride(2) != 1) or not inner or stride % width:
        raise InvalidInputError(
            "kv_cache must have contiguous rows, one after the other within a block, and blocks a "
            f"whole number of rows apart; got shape {tuple(kv_cache.shape)} with strides "
            f"{kv_cache.stride()}"
        )
    return int(stride)


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
