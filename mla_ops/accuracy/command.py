"""The verb `mla-ops accuracy`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from mla_ops.accuracy.evaluate import DEFAULT_BUDGETS, AccuracyOptions, run_accuracy
from mla_ops.demo.console import ConsoleObserver
from mla_ops.demo.errors import require_writable
from mla_ops.errors import InvalidInputError

__all__ = ["accuracy"]


def accuracy(
    quick: Annotated[bool, typer.Option("--quick", help="A few items of each task.")] = False,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Random weights, few items, offline.")
    ] = False,
    token_budgets: Annotated[
        str, typer.Option(help="Most tokens per forward, one run each; commas between.")
    ] = ",".join(map(str, DEFAULT_BUDGETS)),
    all_items: Annotated[
        bool, typer.Option("--all-items", help="Small token budgets run every item too.")
    ] = False,
    dtype: Annotated[
        Literal["bfloat16", "float32"], typer.Option(help="Type of the weights.")
    ] = "float32",
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write all figures and answers there, as JSON.")
    ] = None,
) -> None:
    """Score a real model with stock transformers and with mla_ops, however prompts are cut.

    Perplexity, arithmetic word problems and needle retrieval. Ends with status 1
    when a row is not within the standard error of stock or, in float32, an
    answer differs. The first run downloads the model of the demo, 93 MB.
    """
    options = AccuracyOptions(
        token_budgets=_parse_budgets(token_budgets),
        dtype=dtype,
        quick=quick,
        tiny=tiny,
        all_items=all_items,
    )
    require_writable(json_path)
    console = Console()
    with ConsoleObserver(console) as observer:
        report = run_accuracy(options, observer)

    def show(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False, highlight=False)

    show(f"{report.model}, {report.dtype}, {report.threads} threads")
    table = report.markdown()
    narrow = console.is_terminal and console.width < table.index("\n")
    show(report.narrow() if narrow else table)
    show(report.verdict())
    show(f"took {sum(report.seconds.values()):.0f} s")
    if json_path is not None:
        json_path.write_text(json.dumps(report.to_json(), indent=1) + "\n", "utf-8")
        show(f"all figures: {json_path}")
    same, answers = report.answers
    if report.outside_stderr or (dtype == "float32" and same < answers):
        raise typer.Exit(1)


def _parse_budgets(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidInputError(
            f"token budgets must be whole numbers with commas between, got {text!r}"
        ) from None
