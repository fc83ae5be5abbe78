"""Running cases: every side's result is checked first, then timed, on the same threads.

The runner knows sides and a clock, and neither devices nor packages. What could not be measured is
a row of its own with the reason, so nothing drops out in silence.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mla_ops.bench.cases import AttentionCase, Case
from mla_ops.bench.limits import Limits
from mla_ops.bench.peers import Peer
from mla_ops.bench.problems import Problem, draw
from mla_ops.bench.timing import Clock, Run, Timing
from mla_ops.errors import MLAOpsError

__all__ = ["Budget", "LeftOut", "Row", "WrongResultError", "absent", "check", "run_cases"]

_MEMORY_SHARE = 0.8  # of what is free: a machine that swaps measures its disk


class WrongResultError(MLAOpsError, RuntimeError):
    """A side's numbers are off, so its speed means nothing."""


@dataclass(frozen=True)
class Row:
    """One side of one case, measured.

    Attributes:
        case: its name.
        group: `decode`, `prefill`, `gather`, `merge` or `write`.
        model: whose widths.
        heads: heads of the layer, of one shard.
        batch: requests; 1 for an op on the cache.
        new: new tokens per request, or the tokens of an op on the cache.
        cached: tokens per request that were cached before.
        dtype: of all tensors.
        side: who ran it.
        backend: our backend, or the function of somebody else.
        against: the side of ours that does the same work; None for ours.
        timing: medians and quartiles, in seconds.
        error: largest error against fp64, relative to the largest value.
        flops_per_second: needed FLOPs over the median.
        bytes_per_second: needed bytes over the median.
        of_matmul: `flops_per_second` as a fraction of the matmul rate.
        of_bandwidth: `bytes_per_second` as a fraction of the bandwidth.
    """

    case: str
    group: str
    model: str
    heads: int
    batch: int
    new: int
    cached: int
    dtype: str
    side: str
    backend: str
    against: str | None
    timing: Timing
    error: float
    flops_per_second: float
    bytes_per_second: float
    of_matmul: float
    of_bandwidth: float

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, the timing's among them."""
        values = asdict(self)
        timing = values.pop("timing")
        return {**values, **timing}


@dataclass(frozen=True)
class LeftOut:
    """One side of one case, or a whole case, that was not measured.

    Attributes:
        case: its name.
        side: who; None for all.
        reason: why.
        fault: whether the side should have run: its result was wrong, or it failed.
    """

    case: str
    side: str | None
    reason: str
    fault: bool = False


@dataclass
class Budget:
    """A limit on the time of a run.

    Attributes:
        seconds: to spend; infinite by default.
        now: a clock that goes on.
    """

    seconds: float = math.inf
    now: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        """Start."""
        self._begin = self.now()

    @property
    def spent(self) -> bool:
        """Whether the time is up."""
        return self.now() - self._begin >= self.seconds


def absent(peers: Sequence[Peer], device: str) -> dict[str, str]:
    """Return the sides of which no variant can be measured here, each with the first reason.

    Args:
        peers: all sides.
        device: type of the device; sides of other devices do not count.
    """
    here = [(peer.name, peer.available()) for peer in peers if device in peer.devices]
    present = {name for name, reason in here if reason is None}
    reasons: dict[str, str] = {}
    for name, reason in here:
        if reason is not None and name not in present:
            reasons.setdefault(name, reason)
    return reasons


def check(peer: Peer, problem: Problem, run: Run) -> float:
    """Run a side once and return its error.

    Args:
        peer: whose call it is.
        problem: what was prepared for it.
        run: the call.

    Raises:
        WrongResultError: the error is larger than that of the same computation in plain torch
            allows.
    """
    error, allowed = problem.error(run())
    if not error <= allowed:  # NaN too
        raise WrongResultError(
            f"{problem.case.name}, {peer.name}: error {error:.1e}, at most {allowed:.1e} expected"
        )
    return error


def run_cases(
    cases: Sequence[Case],
    peers: Sequence[Peer],
    clock: Clock,
    limits: Limits,
    *,
    seconds: float = 1.0,
    budget: Budget | None = None,
    watch: Callable[[Case, str], None] = lambda case, side: None,
) -> Iterator[Row | LeftOut]:
    """Measure every case on every side that takes it; yield what comes out, one by one.

    Args:
        cases: in the order of their importance.
        peers: the sides, ours among them.
        clock: of the device.
        limits: of the machine, from the same run.
        seconds: time to spend on each side of each case, about.
        budget: when to stop; what is left is yielded as left out.
        watch: called before each side with the case and the side's name.
    """
    budget = budget or Budget()
    device = clock.device.type
    present = [peer for peer in peers if device in peer.devices and peer.available() is None]
    for case in cases:
        sides = [peer for peer in present if case.group in peer.groups]
        if budget.spent:
            yield LeftOut(case.name, None, "the time was up")
            continue
        problems: list[Problem] = []
        for peer in sides:
            watch(case, peer.name)
            reason = peer.refuses(case) or _too_large(peer, case, clock)
            if reason is not None:
                yield LeftOut(case.name, peer.name, reason)
                continue
            problems = problems or _copies(case, clock)
            yield _measure(peer, problems, clock, limits, seconds)


def _copies(case: Case, clock: Clock) -> list[Problem]:
    first = draw(case, clock.device)
    return [first, *(first.copy() for _ in range(clock.copies(case.bytes) - 1))]


def _too_large(peer: Peer, case: Case, clock: Clock) -> str | None:
    copies = clock.copies(case.bytes)
    needed = copies * (case.bytes + peer.memory(case))
    if needed <= _MEMORY_SHARE * clock.free_bytes():
        return None
    return f"needs {needed / 2**30:.1f} GiB, more than is free"


def _faults() -> tuple[type[BaseException], ...]:
    """What foreign code raises when it cannot do a case: reported, never the end of the run."""
    known = (
        *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError),
        *(NotImplementedError, OSError, RuntimeError, TypeError, ValueError, MLAOpsError),
    )
    triton = sys.modules.get("triton.errors")
    return known if triton is None else (*known, triton.TritonError)


def _measure(
    peer: Peer, problems: Sequence[Problem], clock: Clock, limits: Limits, seconds: float
) -> Row | LeftOut:
    case = problems[0].case
    try:
        with torch.no_grad():
            runs = [peer.prepare(problem) for problem in problems]
            error = check(peer, problems[0], runs[0])
            timing = clock.time(runs, seconds)
    except WrongResultError as wrong:
        return LeftOut(case.name, peer.name, f"wrong result: {wrong}", fault=True)
    except _faults() as failure:
        text = (str(failure).strip().splitlines() or [""])[0]
        reason = f"{type(failure).__name__}: {text}"
        return LeftOut(case.name, peer.name, reason, fault=True)
    if isinstance(case, AttentionCase):
        batch, new, cached = case.batch, case.new, case.cached
    else:
        batch, new, cached = 1, case.tokens, 0
    flops, moved = case.flops / timing.median, case.bytes / timing.median
    return Row(
        case=case.name,
        group=case.group,
        model=case.model,
        heads=case.dims.num_heads,
        batch=batch,
        new=new,
        cached=cached,
        dtype=str(case.dtype).removeprefix("torch."),
        side=peer.name,
        backend=peer.backend(case),
        against=peer.against,
        timing=timing,
        error=error,
        flops_per_second=flops,
        bytes_per_second=moved,
        of_matmul=flops / limits.matmul,
        of_bandwidth=moved / limits.bandwidth,
    )
