"""What the machine can do at best, measured in the same run as everything else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_ops.bench.timing import Clock

__all__ = ["Limits", "machine_limits"]

_CPU_BYTES, _CPU_SIDE = 128 * 2**20, 2048  # larger than the caches; long enough for full speed
_CUDA_BYTES, _CUDA_SIDE = 2**30, 8192


@dataclass(frozen=True)
class Limits:
    """What the machine can do at best.

    Attributes:
        bandwidth: bytes per second: of reading on a CPU, of a copy (read and written) on a GPU.
        matmul: FLOPs per second of a large square matmul in `dtype`.
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
    side = _CPU_SIDE if on_cpu else _CUDA_SIDE
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))

    def move() -> Tensor:
        return rows.sum() if on_cpu else target.copy_(rows)

    moved = rows.numel() * rows.itemsize * (1 if on_cpu else 2)
    return Limits(
        bandwidth=moved / clock.time([move], 0.5).best,
        matmul=2 * side**3 / clock.time([lambda: torch.mm(a, b)], 0.5).best,
        dtype=str(dtype).removeprefix("torch."),
    )
