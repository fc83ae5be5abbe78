"""Find on any machine what would break a CUDA graph: host syncs, and values baked into a capture.

A CUDA graph records kernels with the addresses and the numbers of one run and repeats them. So the
code that is captured may not read a tensor on the host, and whatever it puts into an argument as a
Python number stays what it was. `forbid_host_sync` raises at the first such read; `EmulatedGraph`
repeats recorded op calls on the same memory, so that a baked number gives the wrong result on a
CPU, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mla_ops.errors import InvalidInputError, MLAOpsError

__all__ = ["EmulatedGraph", "HostSyncError", "forbid_host_sync"]


class HostSyncError(MLAOpsError, RuntimeError):
    """Code that is to be captured read a tensor on the host, or sized one by a value."""


_READS = {
    getattr(Tensor, name): name
    for name in (
        *("__array__", "__bool__", "__float__", "__index__", "__int__", "cpu", "item"),
        *("numpy", "tolist"),
    )
}


class _Methods(TorchFunctionMode):
    """Sees reads that never reach a dispatcher: of a CPU tensor, `tolist` and `numpy`."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Refuse reads and hand everything else on."""
        del types
        if func in _READS:
            raise HostSyncError(f"Tensor.{_READS[func]} reads {_shape(args[0])} on the host")
        return func(*args, **(kwargs or {}))


class _Ops(TorchDispatchMode):
    """Sees ops whose result or its shape depends on values, and copies between devices."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Refuse syncs and hand everything else on."""
        del types
        kwargs = kwargs or {}
        shape = _shape(args[0]) if args else ""
        if torch.Tag.data_dependent_output in func.tags:
            raise HostSyncError(f"{func} reads {shape} on the host")
        if torch.Tag.dynamic_output_shape in func.tags or _masked_index(func, args):
            raise HostSyncError(f"{func} sizes its result by the values of {shape}")
        out = func(*args, **kwargs)
        inputs = {t.device for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        devices = inputs | {t.device for t in tree_leaves(out) if isinstance(t, Tensor)}
        if inputs and len({d for d in devices if d.type != "meta"}) > 1:
            raise HostSyncError(f"{func} copies {shape} from one device to another")
        return out


def _masked_index(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an index is a mask: how many elements it picks is a value."""
    if func not in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):
        return False
    masks = (torch.bool, torch.uint8)
    return any(isinstance(i, Tensor) and i.dtype in masks for i in args[1])


def _shape(value: Any) -> str:
    return f"a {tuple(value.shape)} tensor" if isinstance(value, Tensor) else "a tensor"


@contextmanager
def forbid_host_sync() -> Iterator[None]:
    """Raise wherever code would make the host wait for a device, or depend on a tensor's values.

    What an op does inside itself on a CPU is its own business: the op is one kernel to the graph.
    Fake CUDA tensors (`torch._subclasses.FakeTensorMode`) check code for a device that is not
    there.

    Raises:
        HostSyncError: inside the block, at the read: `item`, `tolist`, `bool(tensor)`, `nonzero`,
            a boolean index, a copy to another device and their like.

    Example:
        >>> import torch
        >>> from mla_ops.testing import forbid_host_sync
        >>> with forbid_host_sync():
        ...     torch.ones(2).sum().item()
        Traceback (most recent call last):
        ...
        mla_ops.testing.capture.HostSyncError: Tensor.item reads a () tensor on the host
    """
    with _Methods(), _Ops():  # type: ignore[no-untyped-call]
        yield


@dataclass(frozen=True)
class _Recorded:
    """One op call: its arguments as they were, and the memory that its results went to."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[Tensor, ...]


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Recorded] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an op and keep the call."""
        del types
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.calls.append(_Recorded(func, args, kwargs, _tensors(out)))
        return out


def _tensors(tree: Any) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


class EmulatedGraph:
    """A CUDA graph in all but speed, on a CPU: op calls, recorded once, repeated on their memory.

    Between replays only the contents of the tensors that the captured function used may change,
    as with `torch.cuda.CUDAGraph`. Python code does not run again: a number that it took from a
    tensor, and a tensor that it made anew outside, stay what they were at the capture.

    Attributes:
        result: what the captured function returned; a replay writes into the same tensors.

    Example:
        >>> import torch
        >>> from mla_ops.testing import EmulatedGraph
        >>> length = torch.tensor([2.0])
        >>> right = EmulatedGraph(lambda: length * 10)
        >>> baked = EmulatedGraph(lambda: torch.ones(1) * length.item() * 10)
        >>> _ = length.fill_(3.0)
        >>> right.replay(), baked.replay()
        (tensor([30.]), tensor([20.]))
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        """Run a function once and record its op calls.

        Args:
            function: takes nothing and returns tensors, in any nesting; it must not need gradients.
        """
        recorder = _Recorder()
        with torch.no_grad(), recorder:
            self.result = function()
        self._calls = recorder.calls

    def replay(self) -> Any:
        """Repeat the calls on the memory of the capture.

        Returns:
            `result`, whose tensors hold the new values.

        Raises:
            InvalidInputError: an op's result has another shape now: it depends on values.
        """
        with torch.no_grad():
            for call in self._calls:
                fresh = _tensors(call.func(*call.args, **call.kwargs))
                for kept, new in zip(call.results, fresh, strict=True):
                    _write(call, kept, new)
        return self.result


def _write(call: _Recorded, kept: Tensor, new: Tensor) -> None:
    """Put a result where the captured one lies; a view of an argument is there already."""
    if kept.shape != new.shape:
        raise InvalidInputError(
            f"{call.func} must give the captured shape {tuple(kept.shape)}, got {tuple(new.shape)}"
        )
    if kept.data_ptr() != new.data_ptr():
        kept.copy_(new)
