"""A document as tables: for a terminal, and as Markdown for the documentation."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import rich.console
import rich.table
from rich.box import SIMPLE_HEAD
from rich.text import Text

from mla_ops.bench.compare import Change
from mla_ops.bench.document import Document
from mla_ops.bench.peers import DENSE, PAGED
from mla_ops.bench.runner import Row
from mla_ops.errors import InvalidInputError

__all__ = ["Grid", "changes", "grids", "insert", "markdown", "notes", "require_marks", "times"]

_OURS = (DENSE, PAGED)
_TITLES = {
    "decode": "Decode: one attention layer, from queries and cache to values, ms",
    "prefill": "Prefill: one attention layer, from queries and cache to values, ms",
    "cache": "Ops on the cache, ms",
}


@dataclass(frozen=True)
class Grid:
    """A table of texts.

    Attributes:
        title: what it shows.
        header: names of the columns; all but the first two are numbers.
        rows: one text per column.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __rich_console__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> rich.console.RenderResult:
        """Show it in a terminal: as a table where that fits, else line by line."""
        for fold in (False, True):
            table = self._table(fold)
            unlimited = options.update(max_width=sys.maxsize)
            if console.measure(table, options=unlimited).maximum <= options.max_width:
                yield table
                return
        yield Text(self._lines())

    def _table(self, fold: bool) -> rich.table.Table:
        """Return it as a table whose headings may be folded; numbers may not."""
        table = rich.table.Table(title=self.title, title_justify="left", box=SIMPLE_HEAD)
        for place, (name, *cells) in enumerate(zip(self.header, *self.rows, strict=True)):
            width = max(map(len, [*(name.split() if fold else [name]), *cells]))
            table.add_column(name, justify="left" if place < 2 else "right", width=width)
        for row in self.rows:
            table.add_row(*row)
        return table

    def _lines(self) -> str:
        """Return it with a line for every cell."""
        width = max(map(len, self.header[1:]))
        lines = [self.title, ""]
        for row in self.rows:
            cells = zip(self.header[1:], row[1:], strict=True)
            lines += [row[0], *(f"  {name:{width}} {cell}" for name, cell in cells if cell), ""]
        return "\n".join(lines)

    def markdown(self) -> str:
        """Return it for a page."""
        rule = ["---" if place < 2 else "---:" for place in range(len(self.header))]
        lines = [self.header, rule, *self.rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"**{self.title}**\n\n{table}\n"


def _ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def times(factor: float) -> str:
    """Return how many times longer something takes, as text.

    Args:
        factor: the quotient.

    Example:
        >>> times(0.923), times(12.3)
        ('0.92x', '12x')
    """
    return f"{factor:.2g}x" if factor < 10 else f"{factor:,.0f}x"


def _ours(row: Row | None) -> str:
    if row is None:
        return "-"
    timing = row.timing
    spread = (timing.high - timing.low) / 2 / timing.median
    return _ms(timing.median) + (f" ±{spread:.0%}" if timing.repeats > 1 else "")


def _theirs(document: Document, row: Row | None) -> str:
    if row is None:
        return "-"
    gain = document.gain(row)
    return _ms(row.timing.median) + ("" if gain is None else f" ({times(gain)})")


def _rate(per_second: float, share: float) -> str:
    return f"{per_second:,.3g} ({share:.0%})" if per_second else "-"


def _grid(document: Document, group: str) -> Grid | None:
    groups = ("gather", "merge", "write") if group == "cache" else (group,)
    rows = [row for row in document.rows if row.group in groups]
    if not rows:
        return None
    sides = list(dict.fromkeys(row.side for row in rows))
    ours = [side for side in _OURS if side in sides]
    peers = [side for side in sides if side not in _OURS]
    on_gpu = document.machine.device == "cuda"
    moved = "GB/s (of copy)" if on_gpu else "GB/s (of read)"
    flops = "TFLOP/s (of matmul)" if on_gpu else "GFLOP/s (of matmul)"
    lines = []
    for case in dict.fromkeys(row.case for row in rows):
        mine = [document.fastest(case, side) for side in ours]
        measured = [row for row in mine if row is not None]
        best = min(measured, key=lambda row: row.timing.median, default=None)
        lines.append(
            (
                case if group == "cache" else case.partition("/")[2],
                " / ".join(dict.fromkeys(row.backend for row in measured)) or "-",
                *(_ours(row) for row in mine),
                *(_theirs(document, document.fastest(case, side)) for side in peers),
                "-" if best is None else _rate(best.bytes_per_second / 1e9, best.of_bandwidth),
                "-"
                if best is None
                else _rate(best.flops_per_second / (1e12 if on_gpu else 1e9), best.of_matmul),
            )
        )
    header = ("model / requests x new @ cached", "backend", *ours, *peers, moved, flops)
    return Grid(_TITLES[group], header, tuple(lines))


def _paged(document: Document) -> Grid | None:
    rows = tuple(
        (result.case, result.name, _ms(result.one.median), _ms(result.other), f"{result.ratio:.2f}")
        for result in document.paged
    )
    header = ("batch", "compared", "first, ms", "second, ms", "ratio")
    return Grid("A paged cache, blocks of 64", header, rows) if rows else None


def grids(document: Document) -> Iterator[Grid]:
    """Yield the tables of a document.

    Args:
        document: what was measured.
    """
    for grid in (*(_grid(document, group) for group in _TITLES), _paged(document)):
        if grid is not None:
            yield grid


def changes(found: Sequence[Change]) -> Grid:
    """Return a comparison of two runs as a table.

    Args:
        found: what `compare` returned.
    """
    rows = tuple(
        (
            change.case,
            f"{change.side}, {change.backend}",
            _ms(change.old.median),
            _ms(change.new.median),
            f"{change.ratio:.2f}",
            change.verdict,
        )
        for change in found
    )
    header = ("case", "side", "old, ms", "new, ms", "old / new", "")
    return Grid("Compared with the old run", header, rows)


def notes(document: Document) -> list[str]:
    """Return what has to be said beside the tables: machine, limits, scratch, who was left out.

    Args:
        document: what was measured.
    """
    limits, machine = document.limits, document.machine
    does = "copies" if machine.device == "cuda" else "reads"
    lines = [
        str(machine),
        f"at best it {does} {limits.bandwidth / 1e9:,.1f} GB/s and multiplies {limits.dtype} at "
        f"{limits.matmul / 1e9:,.0f} GFLOP/s, measured in the same run",
    ]
    lines += [
        f"peak memory of one call, result included: {case} {size / 2**20:.1f} MiB"
        for case, size in document.scratch.items()
    ]
    lines += [f"{side} not measured: {reason}" for side, reason in document.absent.items()]
    kept = {(row.case, row.side) for row in document.rows}
    cases: dict[tuple[str, str | None], list[str]] = {}  # by reason and side
    for left in document.left_out:
        if (left.case, left.side) not in kept:
            cases.setdefault((left.reason, left.side), []).append(left.case)
    sides: dict[tuple[str, str], list[str]] = {}  # by reason and cases
    for (reason, side), names in cases.items():
        who = "all sides" if side is None else side
        sides.setdefault((reason, ", ".join(dict.fromkeys(names))), []).append(who)
    lines += [
        f"{', '.join(who)} left out: {reason}: {names}" for (reason, names), who in sides.items()
    ]
    return lines


def markdown(path: Path, page: Path | None = None) -> str:
    """Render the JSON of a run as Markdown: tables, notes, and the figures that lie beside it.

    Args:
        path: of the JSON.
        page: the page that it is for; figures are linked from there.

    Raises:
        InvalidInputError: `path` is not the JSON of a run.
    """
    document = Document.read(path)
    blocks = [grid.markdown() for grid in grids(document)]
    blocks.append("\n".join(f"- {line}" for line in notes(document)) + "\n")
    start = path.parent if page is None else page.parent
    for figure in sorted(path.parent.glob("*.png")):
        target = Path(os.path.relpath(figure, start)).as_posix()
        blocks.append(f"![{figure.stem}]({target})\n")
    return "\n".join(blocks)


def insert(path: Path, page: Path) -> None:
    """Put the rendered run into a page, between the marks that name it.

    The marks are `<!-- bench: FILE -->`, with the JSON's path as the page would link it, and
    `<!-- bench: end -->`.

    Args:
        path: of the JSON.
        page: Markdown, changed in place.

    Raises:
        InvalidInputError: the page has no such marks, or `path` is not the JSON of a run.
    """
    before, after = _around(path, page)
    page.write_text(f"{before}\n\n{markdown(path, page)}\n{after}", "utf-8")


def require_marks(path: Path, page: Path) -> None:
    """Refuse a page that `insert` would refuse, before anything is measured.

    Args:
        path: of the JSON, which need not be there.
        page: Markdown.

    Raises:
        InvalidInputError: the page cannot be read, or has no marks.
    """
    _around(path, page)


def _around(path: Path, page: Path) -> tuple[str, str]:
    """Return a page up to and from the marks of a run, the marks included."""
    name = Path(os.path.relpath(path, page.parent)).as_posix()
    begin, end = f"<!-- bench: {name} -->", "<!-- bench: end -->"
    try:
        text = page.read_text("utf-8")
    except OSError as error:
        raise InvalidInputError(f"{page}: expected a page: {error}") from error
    before, first, rest = text.partition(begin)
    _, last, after = rest.partition(end)
    if not last:
        raise InvalidInputError(f"{page}: expected {begin} and behind it {end}, found none")
    return before + first, last + after
