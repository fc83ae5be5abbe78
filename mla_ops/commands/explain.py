"""The verb `mla-ops explain`: what the graph passes do to a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from mla_ops.commands.options import DtypeName, JsonPath, ModelName, Real, Seed, float_dtype
from mla_ops.commands.output import check_outputs, table, write_json
from mla_ops.errors import InvalidInputError
from mla_ops.passes.explanation import Explanation
from mla_ops.passes.explanation import explain as run_passes
from mla_ops.passes.report import HEADER, Site, rows_of

__all__ = ["explain"]


def explain(
    name: ModelName,
    real: Real = None,
    dtype_name: DtypeName = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the forward.")] = 32,
    seed: Seed = 0,
    svg_path: Annotated[
        Path | None,
        typer.Option("--svg", help="Draw one layer before and after.", metavar="FILE"),
    ] = None,
    html_path: Annotated[
        Path | None,
        typer.Option("--html", help="Write the table and the picture.", metavar="FILE"),
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Show what torch.compile with the backend mla_ops does to each attention of a model.

    MODEL is what `mla-ops check` takes. One forward goes through Dynamo and the
    passes; nothing is compiled. An attention that is left alone has the reason
    beside it.
    """
    # transformers takes seconds to import; `mla-ops --help` does not wait for it.
    from mla_ops.commands.models import load_model

    check_outputs(svg_path, html_path, json_path)
    dtype = None if dtype_name is None else float_dtype(dtype_name)
    loaded = load_model(name, real=real, dtype=dtype, seed=seed)
    console = Console()
    console.print(escape(str(loaded)), soft_wrap=True, highlight=False)
    with console.status("tracing"):
        explanation = run_passes(loaded.model, loaded.prompt(prompt_tokens, seed), use_cache=False)
    console.print()
    if explanation.sites:
        shown = table("Attention in the graph", *HEADER)
        for row in rows_of(explanation.sites):
            shown.add_row(*map(escape, row))
        console.print(shown)
    console.print(str(explanation).splitlines()[-1], highlight=False)
    if svg_path is not None:
        svg_path.write_text(_picture(explanation), encoding="utf-8")
    if html_path is not None:
        explanation.save(html_path)
    document = {
        "schema": 1,
        "model": str(loaded),
        "tiny": loaded.tiny,
        "graphs": len(explanation.reports),
        "sites": [_flat(site) for site in explanation.sites],
    }
    write_json(json_path, document)


def _picture(explanation: Explanation) -> str:
    if not any(site.matched for site in explanation.sites):
        raise InvalidInputError("--svg draws a rewritten layer, and none was rewritten")
    return explanation.to_svg()


def _flat(site: Site) -> dict[str, object]:
    names = ("path", "node", "pass_name", "matched", "reason", "nodes_before", "nodes_after")
    return {name: getattr(site, name) for name in names}
