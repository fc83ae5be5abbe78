"""Times, the machine's limits, and peak memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["Limits", "Timing", "machine_limits", "measure", "peak_bytes"]


@dataclass(frozen=True)
class Timing:
    """Repeated measurements of one thing.

    Attributes:
        median: seconds.
        low: the first quartile, seconds.
        high: the third quartile, seconds.
        best: the shortest, seconds.
        repeats: how many.
    """

    median: float
    low: float
    high: float
    best: float
    repeats: int


@dataclass(frozen=True)
class Limits:
    """What the machine can do at best, measured in the same run.

    Attributes:
        bandwidth: bytes per second of reading memory.
        matmul: FLOPs per second of a large square matmul in `dtype`.
        dtype: of the matmul.
    """

    bandwidth: float
    matmul: float
    dtype: str


def measure(
    function: Callable[[], object], *, seconds: float = 1.0, least: int = 3, most: int = 50
) -> Timing:
    """Time a function: one call to warm up, then as many as fit.

    Args:
        function: called without arguments.
        seconds: time to spend, about.
        least: fewest measured calls.
        most: most measured calls.

    Example:
        >>> measure(lambda: None, seconds=0.01).repeats
        50
    """
    function()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < least or (len(times) < most and time.perf_counter() - begin < seconds):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return Timing(median, low, high, min(times), len(times))


def machine_limits(dtype: torch.dtype = torch.bfloat16) -> Limits:
    """Measure read bandwidth and matmul rate with the threads that torch uses now.

    Args:
        dtype: of the matmul.
    """
    rows = torch.randn(128 * 1024 * 1024 // 4)  # 128 MiB: larger than the caches
    read = measure(rows.sum, seconds=0.5)
    side = 1024
    a, b = (torch.randn(side, side).to(dtype) for _ in range(2))
    product = measure(lambda: torch.mm(a, b), seconds=0.5)
    return Limits(
        bandwidth=rows.numel() * rows.itemsize / read.best,
        matmul=2 * side**3 / product.best,
        dtype=str(dtype).removeprefix("torch."),
    )


def peak_bytes(function: Callable[[], object]) -> int:
    """Return the most CPU memory that torch's allocator held at once for one call.

    What was allocated before does not count; the results do. Every allocation is seen, also those
    inside of ATen kernels.

    Args:
        function: called once, without arguments.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        function()
    results = recorded.profiler.kineto_results if recorded.profiler is not None else None
    events = results.events() if results is not None else []
    held = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
