"""How much memory a serving engine has to set aside before it sizes its cache.

Everything follows from the widths of a layer and the limits of the engine, never from a context
length that occurs. A backend that knows its own memory says so itself, by the functions that size
its buffers; of any other it is assumed that it gathers a whole chunk, expands it, and merges its
result. Layers run one after the other, so one layer's bytes serve all of them.

Source: the number of rows is that of vLLM (since "MLA with chunked prefill", PR 12639), whose
profile run counts one of the buffers only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from mla_ops.dims import MLADims, stat_dtype
from mla_ops.dispatch import Backend, Call, PagedLimits, SizedBackend, select, use_backend
from mla_ops.errors import InvalidInputError
from mla_ops.validation import FLOAT_DTYPES, fail
from mla_ops.validation_paged import CACHE_DTYPES

__all__ = [
    "ServingLimits",
    "Workspace",
    "WorkspaceBytes",
    "chunk_loop_bytes",
    "profile",
    "reserve_workspace",
    "workspace_bytes",
    "workspace_tokens",
]

_MOST_ROWS = 65_536
_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1


def _check_count(name: str, value: object, least: int = 1) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not (whole and least <= value <= _INT32_MAX):  # type: ignore[operator]
        fail(name, f"an int from {least} to {_INT32_MAX}", repr(value))


def workspace_tokens(*, max_model_len: int, max_num_seqs: int, block_size: int) -> int:
    """Return how many rows of context a chunk should hold.

    Room for eight of the longest requests or four pages for each request, at most 65,536 rows, at
    least one page. Any other number of rows works too: fewer rows mean more chunks.

    Args:
        max_model_len: tokens of the longest request, new ones included.
        max_num_seqs: most requests of a batch.
        block_size: tokens per block of the cache.

    Raises:
        InvalidInputError: one is no int from 1 to 2**31 - 1.

    Example:
        >>> import mla_ops
        >>> mla_ops.workspace_tokens(max_model_len=4096, max_num_seqs=8, block_size=64)
        32768
        >>> mla_ops.workspace_tokens(max_model_len=163_840, max_num_seqs=256, block_size=64)
        65536
    """
    for name, value in (
        ("max_model_len", max_model_len),
        ("max_num_seqs", max_num_seqs),
        ("block_size", block_size),
    ):
        _check_count(name, value)
    return max(min(max(8 * max_model_len, 4 * max_num_seqs * block_size), _MOST_ROWS), block_size)


@dataclass(frozen=True)
class ServingLimits:
    """What no batch of an engine exceeds.

    Attributes:
        max_num_tokens: new tokens of a batch, padding included.
        max_num_seqs: requests of a batch.
        max_model_len: tokens of the longest request, new ones included.
        block_size: tokens per block of the cache.
        workspace_tokens: rows of context per chunk, as given to `build_metadata`; None for what
            `mla_ops.workspace_tokens` says.
        decode_threshold: most new tokens of a decode, as given to `build_metadata`.

    Raises:
        InvalidInputError: one is no int from 1 to 2**31 - 1.

    Example:
        >>> import mla_ops
        >>> limits = mla_ops.ServingLimits(
        ...     max_num_tokens=2048, max_num_seqs=64, max_model_len=4096, block_size=64
        ... )
        >>> limits.rows
        32768
    """

    max_num_tokens: int
    max_num_seqs: int
    max_model_len: int
    block_size: int
    workspace_tokens: int | None = None
    decode_threshold: int = 1

    def __post_init__(self) -> None:
        """Refuse what is no count."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "workspace_tokens" or value is not None:
                _check_count(field.name, value)

    @property
    def rows(self) -> int:
        """Rows of context per chunk: what `build_metadata` takes as `workspace_tokens`."""
        if self.workspace_tokens is not None:
            return self.workspace_tokens
        return workspace_tokens(
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            block_size=self.block_size,
        )


@dataclass(frozen=True)
class WorkspaceBytes:
    """What the worst batch holds at once, beyond weights, cache and the inputs of the op.

    Attributes:
        backend: name of the backend that it holds for.
        parts: bytes by part; `results` are the outputs of one call.
    """

    backend: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of all parts, which live at the same time."""
        return sum(self.parts.values())


def workspace_bytes(
    dims: MLADims,
    limits: ServingLimits,
    *,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    backend: str | None = None,
) -> WorkspaceBytes:
    """Return the bytes that a call of `mla_paged_attention` holds at most, results included.

    Nothing is allocated. The scratch of a CPU grows with `torch.get_num_threads()`, which is read.

    Args:
        dims: widths of a layer; with tensor parallelism, `num_heads` of one device.
        limits: what no batch exceeds.
        dtype: of queries, new rows and weights.
        cache_dtype: of the cache; None for `dtype`, or fp32 where a cache cannot store that.
        device: where the tensors are.
        backend: name of a backend, None for the one that would be chosen.

    Returns:
        The bytes by part, and their `total`.

    Raises:
        InvalidInputError: an argument is wrong, or the bytes exceed 63 bits.
        UnsupportedInputError: no backend takes the call.
        BackendUnavailableError: the backend is unknown or cannot be loaded.

    Example:
        >>> import torch, mla_ops
        >>> limits = mla_ops.ServingLimits(2048, 64, 163_840, block_size=64)
        >>> dims = mla_ops.MLADims.preset("deepseek-v2-lite")
        >>> need = mla_ops.workspace_bytes(dims, limits, dtype=torch.bfloat16, backend="tiled")
        >>> need.backend, need.parts["results"] == 2048 * 16 * (128 * 2 + 4)
        ('tiled', True)
    """
    where = _device(device)
    stored = _dtypes(dtype, cache_dtype)
    chosen = _backend(backend, where, dtype)
    if isinstance(chosen, SizedBackend):
        parts = chosen.paged_bytes(
            dims,
            PagedLimits(
                num_tokens=limits.max_num_tokens,
                max_seq_len=limits.max_model_len,
                block_size=limits.block_size,
                workspace_tokens=limits.rows,
                decode_threshold=limits.decode_threshold,
                dtype=dtype,
                cache_dtype=stored,
                device=where,
            ),
        )
    else:
        parts = chunk_loop_bytes(dims, limits, dtype=dtype)
    need = WorkspaceBytes(chosen.name, parts)
    _check_bytes(need.total, f"the worst batch of backend {need.backend}")
    return need


def chunk_loop_bytes(dims: MLADims, limits: ServingLimits, *, dtype: torch.dtype) -> dict[str, int]:
    """Return what a loop over chunks holds that gathers, expands, attends and merges each.

    That is the form of an engine with kernels of its own, and of a backend that does not say what
    it needs. Keys are not concatenated with their rotary part; scratch inside a kernel is not in
    it.

    Args:
        dims: widths of a layer.
        limits: what no batch exceeds.
        dtype: of the computation.

    Returns:
        Bytes of `latents` `[rows, L+R]`, of `expanded` `[rows, H*(P+V)]`, the output of
        `kv_b_proj`; of `new`, the same of the new tokens; of two `partials`, the running one and
        that of a chunk, `[T, H, V]` and `[H, T]` fp32; and of the `results`.
    """
    rows, tokens, size = limits.rows, limits.max_num_tokens, dtype.itemsize
    stats = stat_dtype(dtype).itemsize
    outputs = tokens * dims.num_heads
    return {
        "latents": rows * dims.latent_dim * size,
        "expanded": rows * dims.expanded_dim * size,
        "new": tokens * dims.expanded_dim * size,
        "partials": 2 * outputs * (dims.v_head_dim + 1) * stats,
        "results": outputs * (dims.v_head_dim * size + stats),
    }


def profile(
    dims: MLADims,
    limits: ServingLimits,
    *,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    backend: str | None = None,
) -> WorkspaceBytes:
    """Hold the memory of the worst batch for a moment, all parts at once, and touch every page.

    An engine calls it where its profile run calls attention, then reads the peak (of the device's
    allocator, or of the process) and gives what is left to the cache. Nothing stays allocated.

    Arguments are those of `workspace_bytes`.

    Returns:
        What was held.

    Raises:
        InvalidInputError: as `workspace_bytes`; or the device is not there.
        UnsupportedInputError: no backend takes the call.
        BackendUnavailableError: the backend is unknown or cannot be loaded.
        RuntimeError: torch's own, when the memory is not there.

    Example:
        >>> import torch, mla_ops
        >>> limits = mla_ops.ServingLimits(64, 8, 1024, block_size=16)
        >>> held = mla_ops.profile(
        ...     mla_ops.MLADims(4, 64, 32, 16, 32), limits, dtype=torch.float32
        ... )
        >>> held.total == sum(held.parts.values()) > 0
        True
    """
    need = workspace_bytes(
        dims, limits, dtype=dtype, cache_dtype=cache_dtype, device=device, backend=backend
    )
    where = _present(_device(device))
    held = [torch.empty(n, dtype=torch.uint8, device=where) for n in need.parts.values()]
    for buffer in held:
        buffer.fill_(0)  # a CPU's pages count only when they are written
    return need


class Workspace:
    """Rows that chunks of context are gathered into and expanded in, at fixed addresses.

    For engines that run the loop over chunks themselves: `latents` is what `gather_kv_cache` fills,
    `expanded` takes the output of `kv_b_proj`. A wish for more rows than there are allocates anew,
    and what was handed out before is no longer part of the workspace; after `lock` it is refused,
    since a captured graph may hold the addresses. `reserve_workspace` makes one.

    Attributes:
        dims: widths of a layer.
    """

    def __init__(
        self, dims: MLADims, rows: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Allocate.

        Args:
            dims: widths of a layer.
            rows: rows of context.
            dtype: of the computation.
            device: where.

        Raises:
            InvalidInputError: rows, dtype or device are wrong, or the bytes exceed 63 bits.
        """
        _check_count("rows", rows)
        _dtypes(dtype, None)
        self.dims = dims
        self._dtype, self._device = dtype, _present(_device(device))
        self._locked = False
        self._allocate(rows)

    @property
    def rows(self) -> int:
        """Rows that are reserved."""
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes that are reserved: `latents` and `expanded` of `chunk_loop_bytes`."""
        return self._buffer.nbytes

    @property
    def locked(self) -> bool:
        """Whether growth is refused."""
        return self._locked

    def lock(self) -> None:
        """Refuse to grow from now on; call it before a graph is captured."""
        self._locked = True

    def latents(self, rows: int) -> Tensor:
        """Return `[rows, L+R]` for `gather_kv_cache`.

        Args:
            rows: at least 0.

        Raises:
            InvalidInputError: rows are negative, or more than reserved after `lock`.
        """
        self._reserve(rows)
        width = self.dims.latent_dim
        return self._buffer[: rows * width].view(rows, width)

    def expanded(self, rows: int) -> Tensor:
        """Return `[rows, H*(P+V)]` for the output of `kv_b_proj`.

        Args:
            rows: at least 0.

        Raises:
            InvalidInputError: rows are negative, or more than reserved after `lock`.
        """
        self._reserve(rows)
        width, begin = self.dims.expanded_dim, self._rows * self.dims.latent_dim
        return self._buffer[begin : begin + rows * width].view(rows, width)

    def _reserve(self, rows: int) -> None:
        _check_count("rows", rows, least=0)
        if rows <= self._rows:
            return
        if self._locked:
            raise InvalidInputError(
                f"the workspace is locked with {self._rows} rows ({self.nbytes} bytes) reserved, "
                f"and {rows} were asked for: plan batches with workspace_tokens={self._rows}, or "
                f"reserve more, ServingLimits(..., workspace_tokens={rows}), before lock()"
            )
        self._allocate(rows)

    def _allocate(self, rows: int) -> None:
        elements = rows * (self.dims.latent_dim + self.dims.expanded_dim)
        _check_bytes(elements * self._dtype.itemsize, f"a workspace of {rows} rows")
        self._buffer = torch.empty(elements, dtype=self._dtype, device=self._device)
        self._rows = rows


def reserve_workspace(
    dims: MLADims,
    limits: ServingLimits,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Workspace:
    """Allocate the rows that the limits ask for, once, before the cache is sized.

    The package's own backends need no such workspace, since they work tile by tile; an engine that
    gathers and expands chunks with kernels of its own does.

    Args:
        dims: widths of a layer; with tensor parallelism, `num_heads` of one device.
        limits: what no batch exceeds; `limits.rows` are reserved.
        dtype: of the computation.
        device: where.

    Raises:
        InvalidInputError: an argument is wrong, the device is not there, or the bytes exceed 63
            bits.

    Example:
        >>> import torch, mla_ops
        >>> dims = mla_ops.MLADims(4, 64, 32, 16, 32)
        >>> limits = mla_ops.ServingLimits(64, 8, 1024, block_size=16, workspace_tokens=128)
        >>> workspace = mla_ops.reserve_workspace(dims, limits, dtype=torch.float32)
        >>> workspace.lock()
        >>> tuple(workspace.latents(100).shape), tuple(workspace.expanded(100).shape)
        ((100, 80), (100, 256))
    """
    return Workspace(dims, limits.rows, dtype, device)


def _device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidInputError(f"device must be one that torch knows, got {device!r}") from error


def _present(device: torch.device) -> torch.device:
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        fail("device", f"one of the {torch.cuda.device_count()} CUDA devices", device)
    return device


def _dtypes(dtype: torch.dtype, cache_dtype: torch.dtype | None) -> torch.dtype:
    """Check both and return the cache's."""
    if dtype not in FLOAT_DTYPES:
        fail("dtype", f"one of {', '.join(map(str, FLOAT_DTYPES))}", dtype)
    if cache_dtype is None:
        return dtype if dtype in CACHE_DTYPES else torch.float32
    if cache_dtype not in CACHE_DTYPES:
        fail("cache_dtype", f"one of {', '.join(map(str, CACHE_DTYPES))}", cache_dtype)
    return cache_dtype


def _backend(name: str | None, device: torch.device, dtype: torch.dtype) -> Backend:
    call = Call("mla_paged_attention", device.type, dtype)
    if name is None:
        return select(call)
    with use_backend(name):
        return select(call)


def _check_bytes(count: int, what: str) -> None:
    if count > _INT64_MAX:
        raise InvalidInputError(f"{what} must fit in 2**63 - 1 bytes, got {count}")
