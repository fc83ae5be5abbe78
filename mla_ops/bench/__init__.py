"""Measuring the package: named cases, a correctness gate, peers, and the machine's own limits."""

from __future__ import annotations

from mla_ops.bench.cases import CASES, QUICK, Case
from mla_ops.bench.runner import Result, measure_case, measure_scratch
from mla_ops.bench.timing import Limits, Timing, machine_limits, measure, peak_bytes

__all__ = [
    "CASES",
    "QUICK",
    "Case",
    "Limits",
    "Result",
    "Timing",
    "machine_limits",
    "measure",
    "measure_case",
    "measure_scratch",
    "peak_bytes",
]
