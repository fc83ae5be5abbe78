"""`explain(model, *inputs)`: what the passes would do to a model, as a table and a picture."""

from __future__ import annotations

import html
import pathlib
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mla_ops.passes.backend import make_backend
from mla_ops.passes.report import HEADER, RewriteReport, Site, rows_of, table, to_svg

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True)
class Explanation:
    """The reports of all graphs of one forward; printing it gives the table.

    Attributes:
        reports: one for each graph, in the order in which they were compiled.
    """

    reports: tuple[RewriteReport, ...]

    @property
    def sites(self) -> list[Site]:
        """Every attention of every graph."""
        return [site for report in self.reports for site in report.sites]

    def __str__(self) -> str:
        """Return the table and a summary line."""
        matched = sum(len(report.matched) for report in self.reports)
        missed = sum(len(report.missed) for report in self.reports)
        fused = sum(report.already_fused for report in self.reports)
        graphs = f"{len(self.reports)} graph{'s' if len(self.reports) != 1 else ''}"
        before = f", {fused} fused before" if fused else ""
        return f"{table(self.sites)}\n{graphs}: {matched} fused, {missed} missed{before}"

    def to_svg(self) -> str:
        """Draw the first rewritten layer, before and after.

        Raises:
            ValueError: nothing was rewritten.
        """
        site = next((site for site in self.sites if site.before and site.matched), None)
        if site is None:
            raise ValueError("nothing was rewritten, so there is nothing to draw")
        return to_svg(site)

    def save(self, path: str | pathlib.Path) -> pathlib.Path:
        """Write the table and the picture to an HTML file that any browser opens.

        Args:
            path: the file.

        Returns:
            The same as a path.
        """
        cells = ["".join(f"<td>{html.escape(c)}</td>" for c in row) for row in rows_of(self.sites)]
        head = "".join(f"<th>{name}</th>" for name in HEADER)
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        picture = self.to_svg() if any(site.matched for site in self.sites) else ""
        path = pathlib.Path(path)
        path.write_text(
            '<!doctype html><meta charset="utf-8"><title>mla_ops: rewritten graph</title>'
            "<style>body{font-family:sans-serif;margin:2em}td,th{text-align:left;"
            "padding:.2em 1em .2em 0}svg{max-width:100%;height:auto}</style>"
            f"<h1>What mla_ops does to this model</h1><table><tr>{head}</tr>{body}</table>"
            f"<h2>One layer</h2>{picture}",
            encoding="utf-8",
        )
        return path


def explain(model: nn.Module, *args: Any, **kwargs: Any) -> Explanation:
    """Run one forward through Dynamo and the passes, without compiling anything.

    Args:
        model: any module, untouched or switched to `mla_ops`; it is not changed, though a cache
            among the inputs is written to as in any forward.
        args: as the model takes them.
        kwargs: as the model takes them.

    Returns:
        What was found in each graph, and what became of it.

    Example:
        >>> import torch
        >>> from mla_ops.passes import explain
        >>> print(explain(torch.nn.Linear(2, 2), torch.zeros(1, 2)))
        no attention in the graph
        1 graph: 0 fused, 0 missed
    """
    reports: list[RewriteReport] = []
    backend = make_backend("eager", on_report=reports.append)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", UserWarning)  # the table says what was missed
        torch.compile(model, backend=backend)(*args, **kwargs)
    return Explanation(tuple(reports))
