"""The verb `mla-ops check`: does a model say the same with `mla_ops` as with its own code?"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mla_ops.commands.options import Device, DtypeName, JsonPath, ModelName, Real, Seed, float_dtype
from mla_ops.commands.output import check_outputs, table, write_json

if TYPE_CHECKING:
    from mla_ops.commands.agreement import Agreement, Part
    from mla_ops.commands.models import LoadedModel
    from mla_ops.hf import PatchReport

__all__ = ["check"]


def check(
    name: ModelName,
    real: Real = None,
    dtype_name: DtypeName = None,
    device: Device = "cpu",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 32,
    new_tokens: Annotated[int, typer.Option(min=0, help="Decode steps after it.")] = 8,
    seed: Seed = 0,
    json_path: JsonPath = None,
) -> None:
    """Compare a model's logits with stock transformers and with mla_ops.

    They are those of a prompt, of decode steps after it, of a batch that is padded
    on the left, and of generate() on that batch.

    MODEL is a folder with config.json, a config file, or a kind of model that
    transformers knows, such as deepseek_v3 or DeepseekV3ForCausalLM. Where there
    are no weights, a small model of that kind is built. Nothing is downloaded.
    Ends with status 1 when the numbers differ by more than rounding explains, or
    when no layer runs mla_ops.
    """
    # transformers takes seconds to import; `mla-ops --help` does not wait for it.
    from mla_ops.commands.agreement import compare_with_stock
    from mla_ops.commands.models import load_model

    check_outputs(json_path)
    dtype = None if dtype_name is None else float_dtype(dtype_name)
    loaded = load_model(name, real=real, dtype=dtype, device=device, seed=seed)
    console = Console()
    console.print(escape(str(loaded)), soft_wrap=True, highlight=False)
    prompt = loaded.prompt(prompt_tokens, seed)
    with console.status("running stock, fp64 where it is cheap, and mla_ops"):
        result = compare_with_stock(loaded.model, prompt, new_tokens)
    console.print()
    console.print(_numbers(result))
    console.print(_layers(result.report))
    console.print(_verdict(result), highlight=False)
    write_json(json_path, _document(loaded, result))
    if not result.agrees:
        raise typer.Exit(1)


def _numbers(result: Agreement) -> Table:
    shown = table(
        f"Logits: {result.implementation} and mla_ops",
        "part", "tokens", "difference", "relative", "stock error", "mla_ops error", "allowed", "",
    )  # fmt: skip
    for column in shown.columns[1:-1]:
        column.justify = "right"
    for part in result.parts:
        errors = (part.stock_error, part.error, part.allowed)
        shown.add_row(
            part.name,
            str(part.rows),
            f"{part.difference:.1e}",
            f"{part.relative:.1e}",
            *("-" if error is None else f"{error:.1e}" for error in errors),
            "[green]agrees[/]" if part.agrees else "[bold red]off[/]",
        )
    return shown


def _layers(report: PatchReport) -> Table:
    shown = table("Layers", "layer", "class", "runs", "reason")
    for layer in report.layers:
        runs = f"mla_ops ({layer.backend})" if layer.fused else "stock"
        shown.add_row(layer.name, layer.cls, runs, escape(layer.reason) or "-")
    return shown


def _verdict(result: Agreement) -> str:
    report = result.report
    same = result.same_tokens + result.same_generated
    all_tokens = len(result.tokens) + sum(map(len, result.generated))
    lines = [
        f"{report.fused} of {len(report.layers)} layers run mla_ops; "
        f"{same} of {all_tokens} greedy tokens are the same"
    ]
    if report.fused == 0:
        lines.append("[bold red]no layer runs mla_ops, so nothing was compared[/]")
    elif result.agrees:
        lines.append("[green]the numbers agree[/]")
    else:
        lines.append("[bold red]the numbers differ by more than rounding explains[/]")
    return "\n".join(lines)


def _document(loaded: LoadedModel, result: Agreement) -> dict[str, object]:
    return {
        "schema": 1,
        "model": str(loaded),
        "tiny": loaded.tiny,
        "agrees": result.agrees,
        "stock": result.implementation,
        "parts": [_flat(part) for part in result.parts],
        "tokens": list(result.tokens),
        "same_tokens": result.same_tokens,
        "generated": [list(row) for row in result.generated],
        "same_generated": result.same_generated,
        "layers": [asdict(layer) for layer in result.report.layers],
    }


def _flat(part: Part) -> dict[str, object]:
    """Return the figures of a part; JSON has no NaN, so it has null for one."""
    figures = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(part).items()
    }
    return {**figures, "agrees": part.agrees}
