"""The verb `mla-ops compile-kernels`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mla_ops.errors import BackendUnavailableError, MLAOpsError

if TYPE_CHECKING:
    from mla_ops.kernels.triton.aot import Report

__all__ = ["KernelError", "compile_kernels", "markdown"]

TARGETS = "sm80,sm90,sm100,sm120,gfx942"


class KernelError(MLAOpsError, RuntimeError):
    """A kernel does not compile, spills in its main loop, or takes too much shared memory."""


def compile_kernels(
    targets: Annotated[str, typer.Option(help="Architectures, comma separated.")] = TARGETS,
    only: Annotated[
        str | None, typer.Option(help="Calls whose name contains this; all if not given.")
    ] = None,
    shown: Annotated[
        bool, typer.Option("--list", help="List the calls and compile nothing.")
    ] = False,
    markdown_path: Annotated[
        Path | None, typer.Option("--markdown", help="Write the tables there.")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write all figures there, as JSON.")
    ] = None,
) -> None:
    """Compile every Triton kernel for GPUs that need not be here, and report what it takes.

    Every configuration that the table offers is compiled. A spill in a main loop, or more shared
    memory than the target has, is an error.
    """
    try:
        from mla_ops.kernels.triton import aot
    except ImportError as error:
        raise BackendUnavailableError(f"{error}: pip install 'mla-ops[triton]'") from error
    console = Console()
    problems = [name for name in aot.PROBLEMS if only is None or only in name]
    if shown or not problems:
        console.print("\n".join(aot.PROBLEMS))
        return
    every = list(aot.units(targets.split(","), problems))
    reports = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("compiling", total=len(every))
        for report in aot.compile_units(every):
            reports.append(report)
            progress.update(
                task, advance=1, description=f"{report.unit.target} {report.unit.kernel}"
            )
    console.print(_table(reports))
    if markdown_path is not None:
        markdown_path.write_text(markdown(reports), encoding="utf-8")
    if json_path is not None:
        figures = [_flat(report) for report in reports]
        json_path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    faulty = [report for report in reports if report.faults]
    if faulty:
        listed = "\n".join(f"  {_name(r)}: {'; '.join(r.faults)}" for r in faulty)
        raise KernelError(f"{len(faulty)} of {len(reports)} kernels fail:\n{listed}")
    console.print(f"{len(reports)} kernels compile")


def _name(report: Report) -> str:
    unit = report.unit
    parts = (unit.target, unit.kernel, unit.config, unit.variant, f"({unit.problem})")
    return " ".join(part for part in parts if part)


def _flat(report: Report) -> dict[str, object]:
    return {**report.unit._asdict(), **report._asdict(), "unit": _name(report)}


def _table(reports: Iterable[Report]) -> Table:
    columns = ("target", "call", "kernel", "tile", "regs", "spill B", "in loop", "shared B")
    table = Table(*columns, title="Kernels")
    for report in reports:
        unit = report.unit
        table.add_row(
            unit.target,
            unit.problem,
            unit.kernel.removeprefix("mla_").removesuffix("_kernel"),
            unit.config,
            str(report.registers),
            str(report.spilled),
            str(report.in_loop),
            str(report.shared),
            style="red" if report.faults else None,
        )
    return table


def markdown(reports: Iterable[Report]) -> str:
    """Return a table with a row per kernel and configuration, and a column per target.

    Args:
        reports: of several targets.
    """
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    targets: Counter[str] = Counter()
    for report in reports:
        unit = report.unit
        targets[unit.target] += 1
        kernel = unit.kernel.removeprefix("mla_").removesuffix("_kernel")
        key = (unit.problem, kernel, unit.config, unit.variant)
        cell = f"{report.registers} / {report.spilled} / {report.shared:,}"
        if report.faults:
            cell = f"**{'; '.join(report.faults)}**"
        rows.setdefault(key, {})[unit.target] = cell
    lines = [
        f"| call | kernel | tile | variant | {' | '.join(targets)} |",
        "|---" * (4 + len(targets)) + "|",
    ]
    for names, cells in rows.items():
        found = (cells.get(target, "") for target in targets)
        lines.append(f"| {' | '.join(names)} | {' | '.join(found)} |")
    return "\n".join(lines) + "\n"
