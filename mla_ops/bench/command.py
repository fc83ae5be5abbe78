"""The verb `mla-ops bench`."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import mla_ops
from mla_ops.bench.cases import CASES, QUICK, Case
from mla_ops.bench.paged import LAYOUTS, MIXED, PagedResult, measure_layouts, measure_mixed
from mla_ops.bench.runner import Result, measure_case, measure_scratch
from mla_ops.bench.timing import Limits, machine_limits

__all__ = ["bench"]

_SCRATCH_CONTEXTS = (4096, 32768)
_SCRATCH_MODEL, _SCRATCH_NEW = "deepseek-v2-lite", 512


def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Four cases, under a minute.")] = False,
    stock: Annotated[bool, typer.Option(help="Time transformers' own code too.")] = True,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads, the same for both sides.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="Time per case and side.")] = 1.0,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write all figures there, as JSON.")
    ] = None,
) -> None:
    """Measure one attention layer against transformers, on this CPU.

    Every case is checked against fp64 before it is timed; caches are cold; times are medians.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    console = Console()
    cases = QUICK if quick else CASES
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("machine limits", total=len(cases) + 3)
        limits = machine_limits()
        progress.advance(task)
        results = []
        for case in cases:
            progress.update(task, description=str(case))
            results.append(measure_case(case, limits, stock=stock, seconds=seconds))
            progress.advance(task)
        progress.update(task, description="paged cache")
        paged = [measure_mixed(MIXED, seconds=seconds)]
        paged += [measure_layouts(case, seconds=seconds) for case in LAYOUTS]
        progress.advance(task)
        progress.update(task, description="scratch")
        scratch = {
            cached: measure_scratch(Case(_SCRATCH_MODEL, 1, _SCRATCH_NEW, cached))
            for cached in _SCRATCH_CONTEXTS
        }
    console.print(_table(results))
    console.print(_paged_table(paged))
    console.print(_footer(limits, scratch))
    if json_path is not None:
        document = {
            "machine": _machine(limits),
            "results": [result.as_dict() for result in results],
            "paged": [result.as_dict() for result in paged],
            "scratch_bytes": scratch,
        }
        json_path.write_text(json.dumps(document, indent=2) + "\n", "utf-8")


def _table(results: list[Result]) -> Table:
    table = Table(title="one attention layer, from latent cache to output projection")
    table.add_column("case: batch x new on cached")
    for name in ("mla_ops ms", "quartiles", "stock ms", "speed-up", "of matmul", "of bandwidth"):
        table.add_column(name, justify="right")
    for result in results:
        ours, stock = result.ours, result.stock
        table.add_row(
            str(result.case),
            f"{ours.median * 1e3:.2f}",
            f"{ours.low * 1e3:.2f} - {ours.high * 1e3:.2f}",
            "-" if stock is None else f"{stock.median * 1e3:.1f}",
            "-" if result.speedup is None else f"{result.speedup:.1f}x",
            f"{result.of_matmul:.0%}",
            f"{result.of_bandwidth:.0%}",
        )
    return table


def _paged_table(results: list[PagedResult]) -> Table:
    table = Table(title="a paged cache, blocks of 64")
    table.add_column("batch")
    table.add_column("compared")
    for name in ("ms", "quartiles", "ratio"):
        table.add_column(name, justify="right")
    for result in results:
        one = result.one
        table.add_row(
            str(result.case),
            result.name,
            f"{one.median * 1e3:.2f} / {result.other * 1e3:.2f}",
            f"{one.low * 1e3:.2f} - {one.high * 1e3:.2f}",
            f"{result.ratio:.2f}",
        )
    return table


def _footer(limits: Limits, scratch: dict[int, int]) -> str:
    sizes = ", ".join(f"{size / 2**20:.1f} MiB with {cached}" for cached, size in scratch.items())
    return (
        f"this machine, {torch.get_num_threads()} threads: reads {limits.bandwidth / 1e9:.1f} GB/s,"
        f" multiplies {limits.dtype} at {limits.matmul / 1e9:.0f} GFLOP/s\n"
        f"peak memory of {_SCRATCH_NEW} new tokens ({_SCRATCH_MODEL}), output included: {sizes} "
        "cached tokens"
    )


def _machine(limits: Limits) -> dict[str, object]:
    return {
        "processor": platform.processor() or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "bandwidth_bytes_per_second": limits.bandwidth,
        "matmul_flops_per_second": limits.matmul,
        "matmul_dtype": limits.dtype,
        "torch": torch.__version__,
        "mla_ops": mla_ops.__version__,
    }
