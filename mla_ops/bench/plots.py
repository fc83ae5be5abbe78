"""A document as figures: milliseconds by context, and how many times longer the others take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mla_ops.bench.document import Document
from mla_ops.bench.peers import DENSE, PAGED
from mla_ops.bench.runner import Row
from mla_ops.bench.tables import times

__all__ = ["draw_figures"]

_INK, _MUTED, _GRID = "#1f2328", "#6b7280", "#e5e7eb"
_COLORS = {
    DENSE: "#1f6feb",
    PAGED: "#0b3d91",
    "transformers": "#9a6b3f",
    "torch SDPA": "#9ca3af",
}
_COLUMNS = 4
_OTHERS = ("#c2410c", "#7e22ce", "#0f766e", "#be123c", "#4d7c0f")


def draw_figures(document: Document, folder: Path) -> list[Path]:
    """Draw what a document has rows for and return the files, PNGs.

    Args:
        document: what was measured.
        folder: where to write; it is made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for group in ("decode", "prefill"):
        rows = [row for row in document.rows if row.group == group]
        panels = _panels(rows)
        if panels:
            figure = _times(document, panels, f"{group}: ms per layer, by cached tokens")
            written.append(_save(figure, folder / f"{group}.png"))
        gains = [row for row in rows if document.gain(row) is not None]
        if gains:
            figure = _bars(document, gains, f"{group}: how many times longer the others take")
            written.append(_save(figure, folder / f"{group}-speedup.png"))
    return written


def _panels(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return rows by layer, requests and new tokens, where there is more than one context."""
    panels: dict[str, list[Row]] = {}
    for row in rows:
        size = _count(row.batch, "request")
        if row.group == "prefill":
            size = f"{size}, {_count(row.new, 'new token')}"
        panels.setdefault(f"{row.model}, {row.heads} heads\n{size}", []).append(row)
    wide = {name: rows for name, rows in panels.items() if len({row.cached for row in rows}) > 1}
    return dict(sorted(wide.items(), key=lambda item: _order(item[1][0])))


def _order(row: Row) -> tuple[int, str, int, int]:
    return row.heads, row.model, row.batch, row.new


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _colors(rows: Sequence[Row]) -> dict[str, str]:
    sides = list(dict.fromkeys(row.side for row in rows))
    others = iter(_OTHERS * len(sides))
    return {side: _COLORS.get(side) or next(others) for side in sides}


def _figure(width: float, height: float) -> Any:
    # The object-oriented interface leaves the caller's pyplot and its backend alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, format="png", facecolor="white", bbox_inches="tight", pad_inches=0.15)
    return path


def _style(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GRID)
    axes.tick_params(colors=_MUTED, which="both", length=0, labelsize=8)


def _caption(figure: Any, document: Document) -> None:
    machine = document.machine
    threads = f", {machine.threads} threads" if machine.device == "cpu" else ""
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    text = f"{machine.name}{threads}, {machine.dtype}; {versions}"
    figure.supxlabel(text, x=0.01, ha="left", color=_MUTED, fontsize=7)


def _plain(value: float, _: Any = None) -> str:
    return f"{value:g}"


def _context(value: float) -> str:
    return f"{value / 1024:g}k" if value >= 1024 else f"{value:g}"


def _times(document: Document, panels: Mapping[str, Sequence[Row]], title: str) -> Any:
    """Draw one line per side in every panel."""
    columns = min(_COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    figure = _figure(max(6.0, 0.8 + 2.4 * columns), 1.3 + 2.3 * lines)
    grid = figure.subplots(lines, columns, squeeze=False, sharey="row")
    colors = _colors([row for rows in panels.values() for row in rows])
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (name, rows) in zip(grid.flat, panels.items(), strict=False):
        _panel(document, axes, rows, colors)
        axes.set_title(name, loc="left", color=_MUTED, fontsize=8)
    for line in grid:
        line[0].set_ylabel("ms", color=_MUTED, fontsize=8)
    handles: dict[str, Any] = {}
    for axes in grid.flat:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    legend = figure.legend(
        handles.values(),
        handles.keys(),
        title=title,
        title_fontsize=11,
        alignment="left",
        loc="outside upper left",
        ncols=len(handles),
        frameon=False,
        fontsize=8,
    )
    legend.get_title().set_color(_INK)
    _caption(figure, document)
    return figure


def _panel(document: Document, axes: Any, rows: Sequence[Row], colors: dict[str, str]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    for side, color in colors.items():
        cases = dict.fromkeys(row.case for row in rows if row.side == side)
        best = [row for case in cases if (row := document.fastest(case, side)) is not None]
        points = sorted((row.cached, row.timing.median * 1e3) for row in best)
        if points:
            axes.plot(
                *zip(*points, strict=True),
                label=side,
                color=color,
                linewidth=2.0 if side in (DENSE, PAGED) else 1.3,
                linestyle="--" if side == PAGED else "-",
                marker="o",
                markersize=3.5,
            )
    contexts = sorted({row.cached for row in rows})
    axes.set_xscale("symlog", base=2, linthresh=512, linscale=0.6)
    axes.set_xticks(contexts, [_context(context) for context in contexts])
    axes.set_yscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(numticks=6))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(_plain))
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    _style(axes)


def _bars(document: Document, rows: Sequence[Row], title: str) -> Any:
    """Draw one column of bars per peer, one line per case."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    cases = list(dict.fromkeys(row.case for row in rows))
    sides = list(dict.fromkeys(row.side for row in rows))
    colors = _colors(rows)
    figure = _figure(2.6 + 2.2 * len(sides), 1.1 + 0.19 * len(cases))
    grid = figure.subplots(1, len(sides), squeeze=False, sharey=True)[0]
    for axes, side in zip(grid, sides, strict=True):
        best = [document.fastest(case, side) for case in cases]
        gains = {i: document.gain(row) for i, row in enumerate(best) if row is not None}
        known = {i: gain for i, gain in gains.items() if gain is not None}
        axes.barh(list(known), [gain - 1 for gain in known.values()], left=1, color=colors[side])
        for place, gain in known.items():
            beyond = gain >= 1
            axes.annotate(
                times(gain),
                (gain, place),
                xytext=(3 if beyond else -3, 0),
                textcoords="offset points",
                ha="left" if beyond else "right",
                va="center",
                color=_INK,
                fontsize=7,
            )
        axes.axvline(1, color=_MUTED, linewidth=0.8)
        axes.set_xscale("log")
        least, most = min(known.values(), default=1.0), max(known.values(), default=1.0)
        axes.set_xlim(min(0.8, least / 1.8), max(1.5, most * 2.2))
        axes.xaxis.set_major_locator(LogLocator(numticks=5))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(_plain))
        axes.set_title(side, loc="left", color=_MUTED, fontsize=8)
        axes.grid(axis="x", color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        _style(axes)
    labels = [case.partition("/")[2] for case in cases]
    grid[0].set_yticks(range(len(cases)), labels)
    grid[0].set_ylim(len(cases) - 0.4, -0.6)
    figure.suptitle(title, x=0.01, ha="left", color=_INK, fontsize=11)
    _caption(figure, document)
    return figure
