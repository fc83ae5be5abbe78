"""Measuring the package: named cases, a correctness gate, peers, and the machine's own limits."""

from __future__ import annotations

from mla_ops.bench.cases import CPU_CASES, CUDA_CASES, QUICK, AttentionCase, CacheCase
from mla_ops.bench.limits import Limits, machine_limits
from mla_ops.bench.peers import Peer
from mla_ops.bench.runner import Budget, LeftOut, Row, run_cases
from mla_ops.bench.timing import Timing, clock_for, measure, peak_bytes

__all__ = [
    "CPU_CASES",
    "CUDA_CASES",
    "QUICK",
    "AttentionCase",
    "Budget",
    "CacheCase",
    "LeftOut",
    "Limits",
    "Peer",
    "Row",
    "Timing",
    "clock_for",
    "machine_limits",
    "measure",
    "peak_bytes",
    "run_cases",
]
