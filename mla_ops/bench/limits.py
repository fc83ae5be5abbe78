"""What the machine can do at best, measured in the same run as everything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mla_ops.bench.timing import Clock

__all__ = ["Limits", "machine_limits"]

_CPU_BYTES, _CUDA_BYTES = 128 * 2**20, 2**30  # larger than the caches
_CPU_SIDES, _CUDA_SIDES = (1024, 2048), (4096, 8192)
_SLOW = 0.1  # seconds of a product: a larger one would take long and be no faster


@dataclass(frozen=True)
class Limits:
    """What the machine can do at best.

    Attributes:
        bandwidth: bytes per second: of reading on a CPU, of a copy (read and written) on a GPU.
        matmul: FLOPs per second of large square linears in `dtype`, by torch.
        dtype: of the matmul.
    """

    bandwidth: float
    matmul: float
    dtype: str


def machine_limits(clock: Clock, dtype: torch.dtype = torch.bfloat16) -> Limits:
    """Measure bandwidth and matmul rate with the threads that torch uses now.

    Args:
        clock: of the device.
        dtype: of the matmul.
    """
    device = clock.device
    on_cpu = device.type == "cpu"
    rows = torch.ones((_CPU_BYTES if on_cpu else _CUDA_BYTES) // 4, device=device)
    target = rows if on_cpu else torch.empty_like(rows)

    def move() -> Tensor:
        return rows.sum() if on_cpu else target.copy_(rows)

    moved = rows.numel() * rows.itemsize * (1 if on_cpu else 2)
    return Limits(
        bandwidth=moved / clock.time([move], 0.5).best,
        matmul=_matmul(clock, dtype, _CPU_SIDES if on_cpu else _CUDA_SIDES),
        dtype=str(dtype).removeprefix("torch."),
    )


def _matmul(clock: Clock, dtype: torch.dtype, sides: Sequence[int]) -> float:
    rate = 0.0
    for side in sides:
        a, b = (torch.randn(side, side, device=clock.device).to(dtype) for _ in range(2))
        seconds = clock.time([partial(torch.nn.functional.linear, a, b)], 0.5).best
        rate = max(rate, 2 * side**3 / seconds)
        if seconds > _SLOW:
            break
    return rate
