"""The figure: decode time against context length."""

from __future__ import annotations

from pathlib import Path

from mla_ops.demo.report import DemoReport

__all__ = ["plot"]

INK, MUTED, GRID = "#1f2328", "#6b7280", "#e5e7eb"
STOCK_COLOR, OUR_COLOR = "#9a6b3f", "#1f6feb"


def plot(report: DemoReport, path: Path) -> None:
    """Draw decode milliseconds per token against context length, as PNG.

    Args:
        report: a finished run.
        path: where to write.
    """
    # The object-oriented interface leaves the caller's pyplot and its backend alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    contexts = [point.context for point in report.sweep]
    figure = Figure(figsize=(7.2, 4.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for label, color, values in (
        ("stock transformers (sdpa)", STOCK_COLOR, [p.stock_ms for p in report.sweep]),
        ("mla_ops", OUR_COLOR, [p.mla_ops_ms for p in report.sweep]),
    ):
        axes.plot(contexts, values, color=color, linewidth=2, marker="o", markersize=5)
        axes.annotate(
            f"{label}\n{_milliseconds(values[-1])} ms",
            (contexts[-1], values[-1]),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=color,
            fontsize=9,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(contexts, [str(context) for context in contexts])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("context length, tokens", color=MUTED)
    axes.set_ylabel("decode, ms per token", color=MUTED)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(colors=MUTED, which="both", length=0)
    axes.set_title(
        f"{report.model} as MLA: time per generated token", loc="left", color=INK, fontsize=11
    )
    figure.text(0.01, -0.04, _footnote(report), color=MUTED, fontsize=7.5)
    figure.savefig(path, format="png", bbox_inches="tight", facecolor="white")


def _milliseconds(value: float) -> str:
    return f"{value:.0f}" if value >= 10.0 else f"{value:.2g}"


def _footnote(report: DemoReport) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return f"{report.shape}; {report.dtype}, CPU, {report.threads} threads; {versions}"
