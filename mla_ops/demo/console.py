"""The demo in a terminal: a progress bar while it works, the answers as they come, the table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from mla_ops.demo.report import DemoReport, Exchange

__all__ = ["ConsoleObserver", "comparison_table"]


class ConsoleObserver:
    """Shows the stages of a run as progress bars; use it as a context manager."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> ConsoleObserver:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._finish()
        self._progress.stop()

    def stage(self, label: str, steps: int | None = None) -> None:
        """Finish the bar of the last stage and begin another one.

        Args:
            label: what is done.
            steps: how often `step` will be called at most; None shows a bar without an end.
        """
        self._finish()
        self._task = self._progress.add_task(label, total=steps)

    def step(self) -> None:
        """Move the bar on."""
        if self._task is not None:
            self._progress.advance(self._task)

    def said(self, exchange: Exchange) -> None:
        """Print a question and its answer above the bars.

        Args:
            exchange: what was asked and answered.
        """
        print_line = self._progress.console.print
        print_line(
            f"[bold]Q[/bold]  {escape(exchange.question)}"
            f"  [dim]({exchange.prompt_tokens} tokens of prompt)[/dim]"
        )
        print_line(
            f"[bold]A[/bold]  {escape(exchange.answer)}"
            f"  [dim](same tokens from stock: {exchange.tokens_identical})[/dim]\n"
        )

    def _finish(self) -> None:
        """An answer may end before the most tokens that were allowed: fill the bar."""
        if self._task is not None:
            self._progress.update(self._task, total=1, completed=1)
            self._progress.stop_task(self._task)
        self._task = None


def comparison_table(report: DemoReport) -> Table:
    """Return the table of the long prompt.

    Args:
        report: a finished run.
    """
    bench = report.benchmark
    stock, ours = bench.stock, bench.mla_ops
    table = Table(
        title=f"{report.model}, {report.dtype}, {report.threads} threads\n{report.shape}",
        title_justify="left",
        caption="\n".join(_remarks(report)),
        caption_justify="left",
    )
    table.add_column(f"{stock.prompt_tokens} tokens of context")
    for heading in ("stock (sdpa)", "mla_ops", "gain"):
        table.add_column(heading, justify="right")
    rows = (
        ("prefill, s", stock.prefill_s, ours.prefill_s, "{:.2f}"),
        ("decode, ms per token", stock.decode_ms, ours.decode_ms, "{:.1f}"),
        ("peak memory, MiB", _mib(stock.peak_bytes), _mib(ours.peak_bytes), "{:.0f}"),
        (
            "cache, bytes per token",
            stock.cache_bytes_per_token,
            ours.cache_bytes_per_token,
            "{:.0f}",
        ),
    )
    for label, before, after, form in rows:
        shown = ("n/a" if math.isnan(value) else form.format(value) for value in (before, after))
        table.add_row(label, *shown, _gain(before, after))
    table.add_row("tokens identical", "", str(bench.agreement), "")
    return table


def _remarks(report: DemoReport) -> Iterator[str]:
    bench = report.benchmark
    yield "peak memory: growth of the resident set above the loaded model, cache included"
    if bench.stock.cut_short:
        decoded, answer = len(bench.stock.tokens), len(bench.mla_ops.tokens)
        yield f"stock was stopped after {decoded} of {answer} tokens, to save time"
    if bench.agreement.first_difference is not None:
        yield (
            "tokens differ where two of them are nearly equally likely and the two sides round "
            "differently: --dtype float32 rounds far less"
        )


def _mib(size: int | None) -> float:
    return math.nan if size is None else size / 2**20


def _gain(before: float, after: float) -> str:
    if math.isnan(before) or math.isnan(after) or after == 0:
        return ""
    ratio = before / after
    return "same" if ratio == 1.0 else f"{ratio:.1f}x"
