"""Clocks: how long a call takes on caches that are cold; and peak memory."""

from __future__ import annotations

import itertools
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from mla_ops.errors import InvalidInputError

__all__ = [
    "Clock",
    "CpuClock",
    "CudaClock",
    "Run",
    "Timing",
    "alternate",
    "clock_for",
    "measure",
    "peak_bytes",
]

Run = Callable[[], Tensor]
"""One call of what is measured; its result is looked at before it is timed."""

_LEAST, _MOST = 3, 50  # calls
_LEAST_COLD = 96 * 2**20
_MOST_COPIES = 32


@dataclass(frozen=True)
class Timing:
    """Repeated measurements of one thing.

    Attributes:
        median: seconds.
        low: the first quartile, seconds.
        high: the third quartile, seconds.
        best: the shortest, seconds.
        repeats: how many; 1 where a call took so long that it was measured once.
    """

    median: float
    low: float
    high: float
    best: float
    repeats: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Summarise measurements.

        Args:
            seconds: at least one.

        Example:
            >>> Timing.of([3.0, 1.0, 2.0]).median
            2.0
        """
        if len(seconds) == 1:
            return cls(seconds[0], seconds[0], seconds[0], seconds[0], 1)
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, low, high, min(seconds), len(seconds))


def measure(function: Callable[[], object], *, seconds: float = 1.0) -> Timing:
    """Time a function on the host: one call to warm up, then as many as fit.

    Where the call to warm up takes more than four times `seconds`, it is the measurement.

    Args:
        function: called without arguments.
        seconds: time to spend, about.

    Example:
        >>> measure(lambda: None).repeats
        50
    """
    begin = time.perf_counter()
    function()
    first = time.perf_counter() - begin
    if first > 4 * seconds:
        return Timing.of([first])
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < _LEAST or (len(times) < _MOST and time.perf_counter() - begin < seconds):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return Timing.of(times)


def alternate(functions: Sequence[Callable[[], object]], *, seconds: float = 1.0) -> list[Timing]:
    """Time functions in turns, so that a machine that slows down slows all of them.

    Args:
        functions: called without arguments.
        seconds: time to spend on each, about.

    Example:
        >>> [timing.repeats for timing in alternate([int, str])]
        [50, 50]
    """
    for function in functions:
        function()
    times: list[list[float]] = [[] for _ in functions]
    begin = time.perf_counter()
    while (rounds := len(times[0])) < _LEAST or (
        rounds < _MOST and time.perf_counter() - begin < seconds * len(functions)
    ):
        for function, taken in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            taken.append(time.perf_counter() - start)
    return [Timing.of(taken) for taken in times]


class Clock(Protocol):
    """A device's way to time calls and to say what memory is free.

    Attributes:
        device: where the tensors lie.
    """

    device: torch.device

    def copies(self, size: int) -> int:
        """Return how many copies of a problem of `size` bytes `time` wants, to find them cold."""
        ...

    def free_bytes(self) -> int:
        """Return the memory that a side may use."""
        ...

    def time(self, runs: Sequence[Run], seconds: float) -> Timing:
        """Time calls that do the same on different memory, for about `seconds`."""
        ...


class CpuClock:
    """The host's clock; caches are cold because as many copies take turns as overflow them."""

    device = torch.device("cpu")

    def copies(self, size: int) -> int:
        """Return as many as fill three times the last level of cache, and 96 MiB at least.

        Args:
            size: bytes of one problem.
        """
        cold = max(_LEAST_COLD, 3 * _last_level_cache())
        return max(1, min(_MOST_COPIES, -(-cold // max(1, size))))

    def free_bytes(self) -> int:
        """Return what Linux calls available; anything goes where it is not said."""
        info = pathlib.Path("/proc/meminfo")
        if info.exists():
            for line in info.read_text("utf-8").splitlines():
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        return 2**62

    def time(self, runs: Sequence[Run], seconds: float) -> Timing:
        """Time the calls in turn.

        Args:
            runs: one per copy of the problem.
            seconds: time to spend, about.
        """
        turns = itertools.cycle(runs)
        return measure(lambda: next(turns)(), seconds=seconds)


def _last_level_cache() -> int:
    sizes = pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    texts = [path.read_text("utf-8").strip() for path in sizes]
    return max(
        (int(text[:-1]) * units[text[-1]] for text in texts if text[-1:] in units), default=0
    )


class CudaClock:
    """A CUDA device's events around replays of a captured graph, with the L2 cache overwritten."""

    _MOST, _LEAST, _WARM_UPS = 200, 5, 3

    def __init__(self) -> None:
        """Take the current device.

        Raises:
            InvalidInputError: torch sees no CUDA device.
        """
        if not torch.cuda.is_available():
            raise InvalidInputError(
                f"timing on cuda needs a CUDA device, torch {torch.__version__} sees none; "
                "expected --device cpu here"
            )
        self.device = torch.device("cuda", torch.cuda.current_device())
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        self._flush = torch.empty(max(4 * cache, 2**28), dtype=torch.uint8, device=self.device)

    def copies(self, size: int) -> int:
        """Return 1: the cache is overwritten between the calls.

        Args:
            size: bytes of one problem.
        """
        del size
        return 1

    def free_bytes(self) -> int:
        """Return what the driver and torch's pool have left."""
        free, _ = torch.cuda.mem_get_info(self.device)
        pooled = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + pooled

    def time(self, runs: Sequence[Run], seconds: float) -> Timing:
        """Capture the call, and time its replays by events.

        Args:
            runs: the first one is timed.
            seconds: time to spend, about.
        """
        graph = self._capture(runs[0])
        first = self._replay(graph, self._LEAST)
        fit = int(seconds / max(statistics.median(first), 1e-5))
        return Timing.of(self._replay(graph, max(self._LEAST, min(self._MOST, fit))))

    def _capture(self, run: Run) -> torch.cuda.CUDAGraph:
        # What is compiled or allocated at the first call must not fall into the capture.
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(self._WARM_UPS):
                run()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph

    def _replay(self, graph: torch.cuda.CUDAGraph, times: int) -> list[float]:
        pairs = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(times)
        ]
        for begin, end in pairs:
            self._flush.zero_()
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


def clock_for(device: str) -> Clock:
    """Return the clock of a device type.

    Args:
        device: `cpu` or `cuda`.

    Raises:
        InvalidInputError: there is no such clock, or no such device here.
    """
    clocks: dict[str, Callable[[], Clock]] = {"cpu": CpuClock, "cuda": CudaClock}
    if device not in clocks:
        raise InvalidInputError(f"device must be one of {', '.join(clocks)}, got {device!r}")
    return clocks[device]()


def peak_bytes(function: Callable[[], object]) -> int:
    """Return the most CPU memory that torch's allocator held at once for one call.

    What was allocated before does not count; the results do. Every allocation is seen, also those
    inside of ATen kernels.

    Args:
        function: called once, without arguments.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch 2.13 writes its marks to stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        function()
    results = recorded.profiler.kineto_results if recorded.profiler is not None else None
    events = results.events() if results is not None else []
    held = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
