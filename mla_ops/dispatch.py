"""Backends: what they are, which are known, and which one takes a call.

A backend is any object with the attributes of `Backend`; no base class is needed. `auto` asks the
backends in their order and takes the first that has no objection; a backend chosen by name never
falls back. When nobody takes a call, the error lists what every backend had against it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from mla_ops import env
from mla_ops.dims import MLADims
from mla_ops.errors import BackendUnavailableError, InvalidInputError, UnsupportedInputError

__all__ = [
    "OPS",
    "AttentionOptions",
    "Backend",
    "Call",
    "Capabilities",
    "PagedBatch",
    "PagedLimits",
    "RaggedBatch",
    "SizedBackend",
    "available_backends",
    "get_backend",
    "register_backend",
    "select",
    "use_backend",
]


OPS = frozenset(
    {
        "gather_kv_cache",
        "merge_attn_states",
        "mla_attention",
        "mla_attention_backward",
        "mla_chunked_prefill",
        "mla_decode",
        "mla_paged_attention",
        "mla_prefill",
        "update_kv_cache",
    }
)
"""Names of all ops that a backend can take."""


class Call(NamedTuple):
    """What a backend needs to know to accept or refuse a call; hashable, so choices are cached.

    Attributes:
        op: name of the op.
        device: device type, `cpu` or `cuda` for instance.
        dtype: dtype of the computation.
    """

    op: str
    device: str
    dtype: torch.dtype

    def __str__(self) -> str:
        """Describe the call in one phrase."""
        return f"{self.op} of {str(self.dtype).removeprefix('torch.')} on {self.device}"


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do, as data.

    Attributes:
        ops: names of its ops.
        dtypes: dtypes it computes in.
        devices: device types it runs on; None means any.
    """

    ops: frozenset[str]
    dtypes: frozenset[torch.dtype]
    devices: frozenset[str] | None = None

    def not_supported_reasons(self, call: Call) -> list[str]:
        """Return why `call` is outside of these capabilities, an empty list when it is inside."""
        reasons = []
        if call.op not in self.ops:
            reasons.append(f"has no {call.op}, only {', '.join(sorted(self.ops))}")
        if call.dtype not in self.dtypes:
            known = sorted(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            reasons.append(
                f"does not compute in {str(call.dtype).removeprefix('torch.')}, "
                f"only in {', '.join(known)}"
            )
        if self.devices is not None and call.device not in self.devices:
            reasons.append(
                f"does not run on {call.device}, only on {', '.join(sorted(self.devices))}"
            )
        return reasons


class AttentionOptions(NamedTuple):
    """Everything of an attention call but its four tensors; see `mla_ops.mla_attention`."""

    attn_mask: Tensor | None
    kv_bounds: Tensor | None
    sinks: Tensor | None
    softmax_scale: float
    is_causal: bool
    workspace_tokens: int | None


class RaggedBatch(NamedTuple):
    """Ragged requests with expanded keys and values; see `mla_ops.mla_prefill`."""

    query: Tensor
    k_nope: Tensor
    k_pe: Tensor
    value: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    softmax_scale: float
    is_causal: bool


class PagedBatch(NamedTuple):
    """A batch over a paged cache; see `mla_ops.mla_paged_attention`.

    `kv_c` and `k_pe` are None where all requests are decodes, which read their new tokens from the
    cache.
    """

    query: Tensor
    kv_c: Tensor | None
    k_pe: Tensor | None
    w_kv_b: Tensor
    kv_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    host: Tensor | None
    kv_scale: Tensor | None
    num_decodes: int
    softmax_scale: float
    workspace_tokens: int | None


class PagedLimits(NamedTuple):
    """What a batch over a paged cache holds at most; see `mla_ops.ServingLimits`."""

    num_tokens: int
    max_seq_len: int
    block_size: int
    workspace_tokens: int
    decode_threshold: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    device: torch.device


@runtime_checkable
class SizedBackend(Protocol):
    """A backend that knows its memory; others are taken to gather and expand whole chunks."""

    def paged_bytes(self, dims: MLADims, limits: PagedLimits) -> dict[str, int]:
        """Return the bytes that the worst call within the limits holds at once, by part."""
        ...


@runtime_checkable
class Backend(Protocol):
    """What a backend offers. Arguments arrive validated; results are fresh and contiguous."""

    name: str

    def not_supported_reasons(self, call: Call) -> list[str]:
        """Return why this backend cannot take `call`; an empty list means that it can."""
        ...

    def mla_attention(
        self,
        query: Tensor,
        kv_c: Tensor,
        k_pe: Tensor,
        w_kv_b: Tensor,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor]:
        """Return `out` `[B, H, S, V]` and `lse` `[B, H, S]`."""
        ...

    def mla_attention_backward(
        self,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        query: Tensor,
        kv_c: Tensor,
        k_pe: Tensor,
        w_kv_b: Tensor,
        out: Tensor,
        lse: Tensor,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of query, kv_c, k_pe, w_kv_b and sinks (empty without sinks)."""
        ...

    def mla_prefill(self, batch: RaggedBatch) -> tuple[Tensor, Tensor]:
        """Return `out` `[T, H, V]` and `lse` `[H, T]`."""
        ...

    def mla_paged_attention(self, batch: PagedBatch) -> tuple[Tensor, Tensor]:
        """Return `out` `[T, H, V]` and `lse` `[H, T]`; tokens of no request are 0 and -inf.

        It serves `mla_decode`, a batch of decodes, and `mla_chunked_prefill`, one without any.
        """
        ...

    def merge_attn_states(
        self,
        prefix_out: Tensor,
        prefix_lse: Tensor,
        suffix_out: Tensor,
        suffix_lse: Tensor,
        out: Tensor,
    ) -> Tensor:
        """Write the merged result into `out` and return its lse `[H, T]`."""
        ...

    def update_kv_cache(
        self,
        kv_c: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_scale: Tensor | None,
    ) -> None:
        """Write new rows into the cache; slots below 0 are skipped."""
        ...

    def gather_kv_cache(
        self,
        kv_cache: Tensor,
        block_table: Tensor,
        cu_seqlens_k: Tensor,
        seq_starts: Tensor,
        workspace: Tensor,
        kv_scale: Tensor | None,
    ) -> None:
        """Copy cached rows into the workspace."""
        ...


class _Entry(NamedTuple):
    load: Callable[[], Backend]
    automatic: bool
    devices: frozenset[str] | None = None  # on which `auto` asks it; elsewhere it is not imported


def _lazy(module: str, attribute: str) -> Callable[[], Backend]:
    @functools.cache
    def load() -> Backend:
        backend: Backend = getattr(importlib.import_module(module), attribute)()
        return backend

    return load


_registry: dict[str, _Entry] = {
    "triton": _Entry(
        _lazy("mla_ops.kernels.triton.backend", "TritonBackend"), True, frozenset({"cuda"})
    ),
    "cpu": _Entry(_lazy("mla_ops.kernels.cpu.backend", "CpuBackend"), True, frozenset({"cpu"})),
    "tiled": _Entry(_lazy("mla_ops.kernels.tiled", "TiledBackend"), True),
    "reference": _Entry(_lazy("mla_ops.reference_backend", "ReferenceBackend"), False),
}
_chosen: ContextVar[str | None] = ContextVar("mla_ops_backend", default=None)


def available_backends() -> tuple[str, ...]:
    """Return the names of all registered backends, in the order in which `auto` asks them.

    Example:
        >>> import mla_ops
        >>> mla_ops.available_backends()
        ('triton', 'cpu', 'tiled', 'reference')
    """
    return tuple(_registry)


def register_backend(backend: Backend, *, automatic: bool = True) -> None:
    """Add a backend, in front of those that are there.

    Args:
        backend: object with the attributes of `Backend`.
        automatic: whether `auto` may choose it; by name it can be chosen in any case.

    Raises:
        InvalidInputError: the object lacks an attribute, or the name is taken or reserved.
    """
    needed = ("name", "not_supported_reasons")
    missing = [attribute for attribute in needed if not hasattr(backend, attribute)]
    if missing:
        raise InvalidInputError(f"a backend needs {', '.join(needed)}; missing {missing}")
    if backend.name in _registry or backend.name == "auto":
        raise InvalidInputError(f"the backend name {backend.name!r} is taken")
    others = dict(_registry)
    _registry.clear()
    _registry[backend.name] = _Entry(lambda: backend, automatic)
    _registry.update(others)
    _select.cache_clear()


def get_backend(name: str) -> Backend:
    """Return a backend by name, importing it if needed.

    Args:
        name: one of `available_backends()`.

    Raises:
        BackendUnavailableError: it is unknown or cannot be imported here.
    """
    entry = _registry.get(name)
    if entry is None:
        raise BackendUnavailableError(
            f"backend must be auto or one of {', '.join(_registry)}, got {name!r}"
        )
    try:
        return entry.load()
    except ImportError as error:
        raise BackendUnavailableError(f"backend {name} cannot be loaded: {error}") from error


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Choose the backend of every op inside the block; `auto` lets each op choose again.

    The choice is read when an op runs, also from a compiled graph. It wins over `MLA_OPS_BACKEND`
    and never falls back.

    Args:
        name: `auto` or one of `available_backends()`.

    Raises:
        BackendUnavailableError: it is unknown or cannot be imported here.

    Example:
        >>> import mla_ops
        >>> with mla_ops.use_backend("reference"):
        ...     pass
    """
    if name != "auto":
        get_backend(name)
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)


def select(call: Call) -> Backend:
    """Return the backend that takes `call`.

    Args:
        call: op, device and dtype.

    Raises:
        UnsupportedInputError: nobody takes it; carries everybody's reasons.
        BackendUnavailableError: the backend chosen by name is unknown or cannot be loaded.
    """
    return _select(call, _chosen.get() or env.backend())


@functools.lru_cache(maxsize=256)
def _select(call: Call, name: str) -> Backend:
    names = [n for n, entry in _registry.items() if entry.automatic] if name == "auto" else [name]
    reasons = {}
    for candidate in names:
        devices = _registry[candidate].devices if name == "auto" else None
        if devices is not None and call.device not in devices:
            reasons[candidate] = [f"is asked on {', '.join(sorted(devices))} only, unless by name"]
            continue
        try:
            backend = get_backend(candidate)
        except BackendUnavailableError as error:
            if name != "auto":
                raise
            reasons[candidate] = [str(error)]
            continue
        reasons[candidate] = backend.not_supported_reasons(call)
        if not reasons[candidate]:
            return backend
    raise UnsupportedInputError(str(call), reasons)
