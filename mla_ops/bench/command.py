"""The verb `mla-ops bench`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mla_ops.bench.cases import CPU_CASES, CUDA_CASES, DTYPES, QUICK, Case, choose
from mla_ops.bench.compare import compare, require_same
from mla_ops.bench.document import Document, Machine, this_machine
from mla_ops.bench.extras import (
    LAYOUTS,
    MIXED,
    SCRATCH,
    measure_layouts,
    measure_mixed,
    measure_scratch,
)
from mla_ops.bench.limits import machine_limits
from mla_ops.bench.peers import Peer
from mla_ops.bench.plots import draw_figures
from mla_ops.bench.runner import Budget, WrongResultError, absent, run_cases
from mla_ops.bench.sides import sides
from mla_ops.bench.tables import changes, grids, insert, markdown, notes, require_marks
from mla_ops.bench.timing import Clock, clock_for
from mla_ops.dispatch import use_backend
from mla_ops.errors import InvalidInputError

__all__ = ["bench"]

_QUICK_SECONDS = 0.3
_SECONDS = 1.0
_FILE_WIDTH = 160  # of output that is no terminal, so that no table is folded


@dataclass(frozen=True)
class _Run:
    """What to measure, and where the figures go as they come in."""

    clock: Clock
    machine: Machine
    dtype: torch.dtype
    cases: Sequence[Case]
    peers: Sequence[Peer]
    seconds: float
    budget: Budget
    extras: bool
    paths: Sequence[Path]


_Quick = Annotated[
    bool, typer.Option("--quick", help="Four cases, under a minute on an idle machine.")
]
_Cases = Annotated[
    list[str] | None,
    typer.Option(help="Only cases of this name, * and ? allowed; repeatable. See --list."),
]
_Heads = Annotated[
    list[int] | None, typer.Option(help="Only layers with so many heads; repeatable.")
]
_List = Annotated[bool, typer.Option("--list", help="Name the cases and stop.")]
_DType = Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")]
_Device = Annotated[str, typer.Option(help="cpu or cuda.")]
_Backend = Annotated[str, typer.Option(help="Which of our backends; auto: as always.")]
_Peers = Annotated[bool, typer.Option(help="Time other people's code too.")]
_Library = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="File of vLLM's CPU ops, _C.abi3.so."),
]
_Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads, the same for all sides.")]
_Seconds = Annotated[
    float | None,
    typer.Option(min=0.001, help=f"Time per case and side, {_SECONDS} unless --quick."),
]
_BudgetOption = Annotated[
    float | None, typer.Option(min=0.0, help="Stop after so many seconds, keep what there is.")
]
_Json = Annotated[
    Path | None, typer.Option("--json", help="Write all figures there, after each one.")
]
_Out = Annotated[Path | None, typer.Option(help="Folder for bench.json, bench.csv and PNGs.")]
_Old = Annotated[Path | None, typer.Option("--compare", help="JSON of an old run to compare with.")]
_Force = Annotated[
    bool, typer.Option("--force", help="Compare with another machine's run all the same.")
]
_Rendered = Annotated[
    Path | None, typer.Option(help="Measure nothing; print this JSON as Markdown.")
]
_Into = Annotated[
    Path | None, typer.Option(help="Page to put the Markdown into, between its marks.")
]


def bench(
    quick: _Quick = False,
    case: _Cases = None,
    heads: _Heads = None,
    list_: _List = False,
    dtype: _DType = "bf16",
    device: _Device = "cpu",
    backend: _Backend = "auto",
    peers: _Peers = True,
    vllm_library: _Library = None,
    threads: _Threads = None,
    seconds: _Seconds = None,
    budget: _BudgetOption = None,
    json_path: _Json = None,
    out: _Out = None,
    compare_with: _Old = None,
    force: _Force = False,
    render: _Rendered = None,
    into: _Into = None,
) -> None:
    """Measure one attention layer against other people's code, on this machine.

    Every result is checked against fp64 before it is timed; caches are cold; times are medians.
    """
    if render is not None:
        _render(render, into)
        return
    known = QUICK if quick else CUDA_CASES if device == "cuda" else CPU_CASES
    if dtype not in DTYPES:
        raise InvalidInputError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    cases = choose(known, patterns=case or (), heads=heads or (), dtype=DTYPES[dtype])
    if list_:
        typer.echo("\n".join(one.name for one in cases))
        return
    if threads is not None:
        torch.set_num_threads(threads)
    clock = clock_for(device)
    machine = this_machine(clock.device, DTYPES[dtype])
    # What would spoil the end of a long run is found at its beginning.
    if into is not None and out is None:
        raise InvalidInputError("--into needs --out or --render: the page names the JSON")
    if into is not None and out is not None:
        require_marks(out / "bench.json", into)
    old = None if compare_with is None else Document.read(compare_with)
    if old is not None and not force:
        require_same(old.machine, machine)
    run = _Run(
        clock=clock,
        machine=machine,
        dtype=DTYPES[dtype],
        cases=cases,
        peers=sides(device, peers=peers, vllm_library=vllm_library),
        seconds=seconds or (_QUICK_SECONDS if quick else _SECONDS),
        budget=Budget(math.inf if budget is None else budget),
        extras=device == "cpu" and not case and not heads,
        paths=[path for path in (json_path, out and out / "bench.json") if path is not None],
    )
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    with use_backend(backend):
        document = _measure(run, console)
    _report(document, console)
    if out is not None:
        document.write_csv(out / "bench.csv")
        draw_figures(document, out)
        if into is not None:
            insert(out / "bench.json", into)
    if old is not None:
        console.print(changes(compare(old, document)))
    _fail_on_faults(document)


def _render(path: Path, page: Path | None) -> None:
    if page is None:
        typer.echo(markdown(path))
    else:
        insert(path, page)


def _measure(run: _Run, console: Console) -> Document:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        extras = (len(LAYOUTS) + 1 + len(SCRATCH)) if run.extras else 0
        task = progress.add_task("machine limits", total=1 + len(run.cases) + extras)
        document = Document(
            machine=run.machine,
            limits=machine_limits(run.clock, run.dtype),
            absent=absent(run.peers, run.clock.device.type),
        )
        done = {""}

        def watch(case: Case, side: str) -> None:
            done.add(case.name)
            progress.update(task, description=f"{case.name}, {side}", completed=len(done) - 1)

        for result in run_cases(
            run.cases,
            run.peers,
            run.clock,
            document.limits,
            seconds=run.seconds,
            budget=run.budget,
            watch=watch,
        ):
            document.add(result)
            _save(document, run.paths)
        if run.extras and not run.budget.spent:
            progress.update(task, description="mixed batches, pages, scratch")
            _extras(document, run, lambda: progress.advance(task))
            _save(document, run.paths)
    return document


def _save(document: Document, paths: Sequence[Path]) -> None:
    for path in paths:
        document.write_json(path)


def _extras(document: Document, run: _Run, advance: Callable[[], None]) -> None:
    mixed = replace(MIXED, dtype=run.dtype)
    document.paged.append(measure_mixed(mixed, seconds=run.seconds))
    advance()
    for paged in LAYOUTS:
        paged = replace(paged, dtype=run.dtype)
        document.paged.append(measure_layouts(paged, seconds=run.seconds))
        advance()
    for case in SCRATCH:
        document.scratch[case.name] = measure_scratch(replace(case, dtype=run.dtype))
        advance()


def _report(document: Document, console: Console) -> None:
    for grid in grids(document):
        console.print(grid)
    for line in notes(document):
        console.print(line, highlight=False)


def _fail_on_faults(document: Document) -> None:
    faults = [left for left in document.left_out if left.fault]
    if any(left.side is not None and left.side.startswith("mla_ops") for left in faults):
        lines = [f"{left.case}, {left.side}: {left.reason}" for left in faults]
        raise WrongResultError("not everything could be measured:\n" + "\n".join(lines))
    if not document.rows:
        reasons = dict.fromkeys(f"{left.side}: {left.reason}" for left in document.left_out)
        raise InvalidInputError("nothing was measured: " + "; ".join(reasons))
