"""What a batch of a paged cache looks like: built once per batch on the host, used by every layer.

A batch holds decodes first, then prefills; each part is one slice of the tokens. Lengths and maxima
are host ints; the tensors are views of one buffer that is copied to the device once.

Source: the split, and slices that are computed once, are those of vLLM's "MLA + V1, illegal memory
access and accuracy issues" (PR 14253).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mla_ops.chunking import plan_chunks
from mla_ops.errors import InvalidInputError

__all__ = ["BatchOrder", "MLAMetadata", "PrefillBatch", "build_metadata", "reorder_batch"]

_INT32_MAX = 2**31 - 1
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BatchOrder:
    """The order in which `build_metadata` wants the requests of a batch.

    Attributes:
        permutation: the request at each new place: `ordered = [items[i] for i in permutation]`.
        inverse: the new place of each request: `items = [ordered[i] for i in inverse]`.
    """

    permutation: tuple[int, ...]
    inverse: tuple[int, ...]


class PrefillBatch(NamedTuple):
    """The prefills of a batch on their own, their tokens counted from 0.

    Attributes:
        block_table: `[num_prefills, max_blocks]` int32 on the device, a view of the batch's.
        seq_lens: `[num_prefills]` int32 on the device, a view of the batch's.
        cu_seqlens_q: `[num_prefills + 1]` int32 on the device.
        host: `[2, num_prefills + 1]` int32 on the host: query starts, then lengths and a zero.
    """

    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    host: Tensor


@dataclass(frozen=True)
class MLAMetadata:
    """One batch; `build_metadata` makes it.

    Attributes:
        num_reqs: requests, padding rows included.
        num_tokens: new tokens of all requests.
        num_decodes: leading requests with context and `decode_query_len` new tokens each.
        decode_query_len: new tokens of a decode, 0 without decodes.
        max_query_len: most new tokens of a request.
        max_seq_len: longest request, new tokens included.
        block_size: tokens per block.
        workspace_tokens: rows that the chunks were planned for.
        num_chunks: context chunks of the prefills.
        host: `[2, num_reqs + 1]` int32 on the host: query starts, then lengths and a zero.
        cu_seqlens_q: `[num_reqs + 1]` int32 on the device.
        seq_lens: `[num_reqs]` int32 on the device, new tokens included.
        block_table: `[num_reqs, max_blocks]` int32 on the device.
        slot_mapping: `[num_tokens]` int64 on the device: the cache slot of each new token.
        chunk_starts: `[num_chunks, num_prefills]` int32 on the device: first context row.
        chunk_cu_seqlens: `[num_chunks, num_prefills + 1]` int32 on the device: rows in the
            workspace.
        prefills: what `mla_chunked_prefill` takes of the batch.
    """

    num_reqs: int
    num_tokens: int
    num_decodes: int
    decode_query_len: int
    max_query_len: int
    max_seq_len: int
    block_size: int
    workspace_tokens: int
    num_chunks: int
    host: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    chunk_starts: Tensor
    chunk_cu_seqlens: Tensor
    prefills: PrefillBatch

    @property
    def num_prefills(self) -> int:
        """Requests behind the decodes."""
        return self.num_reqs - self.num_decodes

    @property
    def num_decode_tokens(self) -> int:
        """New tokens of the decodes; they come first."""
        return self.num_decodes * self.decode_query_len

    def update_(self, other: MLAMetadata) -> None:
        """Take over another batch in place, for replaying a captured graph: no address changes.

        Args:
            other: a batch of the same shape: as many requests, tokens, decodes, chunks and blocks
                per request, padded where needed (see `pad_to` of `build_metadata`).

        Raises:
            InvalidInputError: a size differs or a maximum grew; nothing was changed.
        """
        same = ("num_reqs", "num_tokens", "num_decodes", "decode_query_len", "num_chunks")
        for name in (*same, "block_size", "workspace_tokens"):
            if getattr(self, name) != getattr(other, name):
                raise InvalidInputError(
                    f"update_ needs the captured {name} {getattr(self, name)}, "
                    f"got {getattr(other, name)}"
                )
        for name in ("max_query_len", "max_seq_len"):
            if getattr(self, name) < getattr(other, name):
                raise InvalidInputError(
                    f"update_ needs {name} of at most the captured {getattr(self, name)}, "
                    f"got {getattr(other, name)}"
                )
        tensors = [field.name for field in fields(self) if field.type == "Tensor"]
        for name in tensors:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine.shape != theirs.shape:
                raise InvalidInputError(
                    f"update_ needs {name} of the captured shape {tuple(mine.shape)}, "
                    f"got {tuple(theirs.shape)}"
                )
        for name in tensors:
            getattr(self, name).copy_(getattr(other, name))
        for mine, theirs in zip(self.prefills, other.prefills, strict=True):
            mine.copy_(theirs)


def reorder_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    decode_threshold: int = 1,
    is_prefilling: Sequence[bool] | None = None,
) -> BatchOrder:
    """Order a batch: decodes, short extends, long extends, prefills; stable within each.

    A decode has context and at most `decode_threshold` new tokens. The longest decodes come first,
    so that those of the full length form one uniform run.

    Args:
        query_lens: new tokens of each request.
        seq_lens: length of each request, new tokens included.
        decode_threshold: most new tokens of a decode.
        is_prefilling: requests whose prompt is not finished: never decodes. None: not known.

    Raises:
        InvalidInputError: the lengths do not fit together.

    Example:
        >>> reorder_batch([3, 1, 3, 200, 3], [53, 100, 73, 200, 13], decode_threshold=3).permutation
        (0, 2, 4, 1, 3)
    """
    lens, seqs = _lengths(query_lens, seq_lens)
    unfinished = _flags(is_prefilling, len(lens))

    def region(i: int) -> tuple[int, int]:
        new, context = int(lens[i]), int(seqs[i] - lens[i])
        if context == 0:
            return 3, 0
        if new > decode_threshold:
            return 2, 0
        return (1, 0) if unfinished[i] or new == 0 else (0, -new)

    permutation = tuple(sorted(range(len(lens)), key=region))
    inverse = tuple(int(i) for i in np.argsort(np.asarray(permutation, dtype=np.int64)))
    return BatchOrder(permutation, inverse)


def build_metadata(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_table: Tensor | Sequence[Sequence[int]],
    *,
    block_size: int,
    workspace_tokens: int,
    decode_threshold: int = 1,
    is_prefilling: Sequence[bool] | None = None,
    pad_to: int | None = None,
    device: torch.device | str = "cpu",
) -> MLAMetadata:
    """Plan one batch; every layer of the model then uses the result.

    Host work only, two copies to the device at most, and no sync.

    Args:
        query_lens: new tokens of each request; requests ordered as `reorder_batch` leaves them.
        seq_lens: length of each request, new tokens included.
        block_table: block ids of each request: `[num_reqs, max_blocks]` int32 on any device, or a
            sequence per request. Entries past a length are not read.
        block_size: tokens per block, at least 1.
        workspace_tokens: rows of the workspace that context chunks have to fit, at least 1.
        decode_threshold: most new tokens of a decode.
        is_prefilling: requests whose prompt is not finished: never decodes. None: not known.
        pad_to: pad a batch of decodes with empty requests up to this many, for a captured graph:
            no tokens of theirs are in the cache (slot -1), their outputs are 0.
        device: of the tensors.

    Raises:
        InvalidInputError: lengths or blocks do not fit together, or requests are not in order.

    Example:
        >>> metadata = build_metadata(
        ...     [1, 1, 5], [9, 4, 12], [[3, 1], [7], [0, 2]], block_size=8, workspace_tokens=4
        ... )
        >>> metadata.num_decodes, metadata.num_prefills, metadata.num_chunks
        (2, 1, 2)
        >>> metadata.slot_mapping.tolist()
        [8, 59, 7, 16, 17, 18, 19]
    """
    lens, seqs = _lengths(query_lens, seq_lens)
    if block_size < 1 or decode_threshold < 1:
        raise InvalidInputError(
            f"block_size and decode_threshold must be at least 1, got {block_size} and "
            f"{decode_threshold}"
        )
    unfinished = _flags(is_prefilling, len(lens))
    decodes, decode_len = _split(lens, seqs, unfinished, decode_threshold)
    table = _table(block_table, lens, seqs, block_size)
    if pad_to is not None:
        if decodes != len(lens) or pad_to < len(lens):
            raise InvalidInputError(
                f"pad_to needs a batch of at most {pad_to} decodes, got {decodes} decodes among "
                f"{len(lens)} requests"
            )
        extra = pad_to - len(lens)
        decode_len = decode_len or decode_threshold  # a batch of nothing but padding
        lens, seqs = np.pad(lens, (0, extra)), np.pad(seqs, (0, extra))
        table = torch.nn.functional.pad(table, (0, 0, 0, extra))
    return _assemble(
        lens,
        seqs,
        table,
        decodes=len(lens) if pad_to is not None else decodes,
        decode_len=decode_len,
        padding=0 if pad_to is None else pad_to * decode_len - int(lens.sum()),
        block_size=block_size,
        workspace_tokens=workspace_tokens,
        device=torch.device(device),
    )


def _assemble(
    lens: _Ints,
    seqs: _Ints,
    table: Tensor,
    *,
    decodes: int,
    decode_len: int,
    padding: int,
    block_size: int,
    workspace_tokens: int,
    device: torch.device,
) -> MLAMetadata:
    """Put all host arrays into one buffer, copy it once, and view it."""
    context = seqs - lens
    plan = plan_chunks([int(c) for c in context[decodes:]], workspace_tokens)
    cu = np.concatenate([[0], np.cumsum(lens)])
    request = np.repeat(np.arange(len(lens)), lens)
    position = np.arange(int(cu[-1])) - cu[request] + context[request]
    first = cu[decodes:] - cu[decodes]
    parts = [cu, seqs, request, position, plan.starts, plan.cu_seqlens, first]
    on_host = table.device.type == "cpu"
    if on_host:
        parts.append(table.numpy())
    flat = torch.from_numpy(np.concatenate([p.reshape(-1) for p in parts]).astype(np.int32))
    pieces = iter(flat.to(device).split([p.size for p in parts]))
    cu_d, seqs_d, request_d, position_d, starts_d, chunk_cu_d, first_d = (
        next(pieces) for _ in range(7)
    )
    table = next(pieces).view(table.shape) if on_host else table.to(device, copy=True)

    position_d, request_d = position_d.long(), request_d.long()
    slots = table[request_d, position_d // block_size].long() * block_size
    slots = slots + position_d % block_size
    lengths = np.append(seqs, 0)
    host = torch.from_numpy(np.stack([cu, lengths]).astype(np.int32))
    prefill_host = torch.from_numpy(np.stack([first, lengths[decodes:]]).astype(np.int32))
    return MLAMetadata(
        num_reqs=len(lens),
        num_tokens=int(cu[-1]) + padding,
        num_decodes=decodes,
        decode_query_len=decode_len,
        max_query_len=int(lens.max(initial=0)),
        max_seq_len=int(seqs.max(initial=0)),
        block_size=block_size,
        workspace_tokens=workspace_tokens,
        num_chunks=plan.num_chunks,
        host=host,
        cu_seqlens_q=cu_d,
        seq_lens=seqs_d,
        block_table=table,
        slot_mapping=torch.nn.functional.pad(slots, (0, padding), value=-1),
        chunk_starts=starts_d.view(plan.starts.shape),
        chunk_cu_seqlens=chunk_cu_d.view(plan.cu_seqlens.shape),
        prefills=PrefillBatch(table[decodes:], seqs_d[decodes:], first_d, prefill_host),
    )


def _lengths(query_lens: Sequence[int], seq_lens: Sequence[int]) -> tuple[_Ints, _Ints]:
    lens = np.asarray(query_lens, dtype=np.int64).reshape(-1)
    seqs = np.asarray(seq_lens, dtype=np.int64).reshape(-1)
    if lens.size != seqs.size:
        raise InvalidInputError(
            f"query_lens and seq_lens must be equally long, got {lens.size} and {seqs.size}"
        )
    wrong = np.flatnonzero((lens < 0) | (seqs < lens) | (seqs > _INT32_MAX))
    if wrong.size:
        i = int(wrong[0])
        raise InvalidInputError(
            "a request needs 0 <= query_len <= seq_len < 2**31 (seq_len counts the new tokens); "
            f"request {i} has query_len {lens[i]} and seq_len {seqs[i]}"
        )
    return lens, seqs


def _flags(is_prefilling: Sequence[bool] | None, count: int) -> npt.NDArray[np.bool_]:
    flags = np.zeros(count, dtype=bool) if is_prefilling is None else np.asarray(is_prefilling)
    if flags.shape != (count,):
        raise InvalidInputError(f"is_prefilling must have {count} entries, got {flags.size}")
    return flags.astype(bool)


def _split(
    lens: _Ints, seqs: _Ints, unfinished: npt.NDArray[np.bool_], threshold: int
) -> tuple[int, int]:
    """Return how many leading requests are decodes, and the new tokens of each."""
    like_decode = (lens > 0) & (lens <= threshold) & (seqs > lens) & ~unfinished
    length = int(lens[0]) if like_decode.size and like_decode[0] else 0
    run = like_decode & (lens == length)
    count = int(run.size if run.all() else np.argmin(run))
    late = np.flatnonzero(like_decode[count:] & (lens[count:] >= length))
    if late.size:
        first = count + int(late[0])
        raise InvalidInputError(
            "requests must come decodes first, the longest decodes in front (reorder_batch does "
            f"it, with the same decode_threshold {threshold}); request {first} with {lens[first]} "
            "new tokens comes too late"
        )
    return count, length


def _table(
    block_table: Tensor | Sequence[Sequence[int]], lens: _Ints, seqs: _Ints, block_size: int
) -> Tensor:
    """Return the block table as a rectangle and check that it is wide enough."""
    needed = -(-seqs // block_size)
    if isinstance(block_table, Tensor):
        table = block_table
        if table.is_floating_point() or table.is_complex() or table.dtype == torch.bool:
            raise InvalidInputError(f"block_table must be of ints, got {table.dtype}")
        if table.dim() != 2 or table.shape[0] != lens.size:
            raise InvalidInputError(
                f"block_table must be [num_reqs, max_blocks] with {lens.size} rows, "
                f"got shape {tuple(table.shape)}"
            )
        widths = np.full(lens.size, table.shape[1])
    else:
        rows = [list(row) for row in block_table]
        if len(rows) != lens.size:
            raise InvalidInputError(f"block_table must have {lens.size} rows, got {len(rows)}")
        widths = np.array([len(row) for row in rows], dtype=np.int64)
        table = torch.zeros(lens.size, int(widths.max(initial=0)), dtype=torch.int64)
        for i, row in enumerate(rows):
            table[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
    short = np.flatnonzero(widths < needed)
    if short.size:
        i = int(short[0])
        raise InvalidInputError(
            f"request {i} of length {seqs[i]} needs {needed[i]} blocks of {block_size}, "
            f"its block_table row has {widths[i]}"
        )
    if table.device.type != "cpu":
        return table.to(torch.int32)
    ids = table.numpy()
    used = np.arange(ids.shape[1]) < needed[:, None]
    wrong = np.argwhere(used & ((ids < 0) | (ids > _INT32_MAX)))
    if wrong.size:
        i, j = wrong[0]
        raise InvalidInputError(
            f"block_table must hold ids from 0 to {_INT32_MAX}, got {ids[i, j]} for request {i}"
        )
    # What stands behind a length may be anything, also what no int32 can hold.
    return torch.from_numpy(np.where(used, ids, 0).astype(np.int32))
