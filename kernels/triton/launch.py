"""What every launch needs: the device of its tensors, and rows with unit stride."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Launch", "cdiv", "launch", "pow2", "recording", "unit"]


class Launch(NamedTuple):
    """A launch that was recorded in place of being done.

    Attributes:
        kernel: a jitted function.
        grid: programs along each axis.
        args: its arguments.
        options: constants, warps and stages.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]


_records: list[list[Launch]] = []


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Record launches instead of doing them; results stay unwritten."""
    records: list[Launch] = []
    _records.append(records)
    try:
        yield records
    finally:
        _records.remove(records)


def launch(kernel: Any, grid: tuple[int, ...], tensor: Tensor, *args: Any, **options: Any) -> None:
    """Launch a kernel on the device of `tensor`; an empty grid launches nothing.

    Args:
        kernel: a jitted function.
        grid: programs along each axis.
        tensor: says the device.
        args: of the kernel.
        options: constants, warps and stages.
    """
    if 0 in grid:
        return
    if _records:
        _records[-1].append(Launch(kernel, grid, args, options))
        return
    if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        with torch.cuda.device(tensor.get_device()):
            kernel[grid](*args, **options)
    else:
        kernel[grid](*args, **options)


def unit(tensor: Tensor) -> Tensor:
    """Return the tensor with its last dimension contiguous, copied if it is not."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()


def cdiv(a: int, b: int) -> int:
    """Return `a / b` rounded up; Triton's own costs microseconds on the host."""
    return -(-a // b)


def pow2(a: int) -> int:
    """Return the least power of two that is not below `a`, and at least 1."""
    return 1 << max(0, a - 1).bit_length()
