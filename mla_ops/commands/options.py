"""Arguments and options that several verbs have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from mla_ops.errors import InvalidInputError

__all__ = ["Device", "DtypeName", "JsonPath", "ModelName", "Real", "Seed", "float_dtype"]

JsonPath = Annotated[
    Path | None, typer.Option("--json", help="Write everything there, as JSON.", metavar="FILE")
]
ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A folder with config.json, a config file, or a kind of model."
    ),
]
Real = Annotated[
    bool | None,
    typer.Option(
        "--real/--tiny",
        help="Load the weights, or build a small model with random ones.",
        show_default="the weights, if they are there",
    ),
]
DtypeName = Annotated[
    str | None,
    typer.Option("--dtype", help="Of the weights.", show_default="as stored; tiny: float32"),
]
Device = Annotated[str, typer.Option(help="Where to run.")]
Seed = Annotated[int, typer.Option(help="Of the prompt and of random weights.")]


def float_dtype(name: str) -> torch.dtype:
    """Return the floating-point dtype of a name.

    Args:
        name: `bfloat16`, for instance.

    Raises:
        InvalidInputError: there is no such dtype.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise InvalidInputError(f"expected a floating dtype such as bfloat16, got {name!r}")
    return found
