"""The console script `mla-ops`.

Each verb is a plain function with typer annotations, in the part of the package that it belongs
to; `VERBS` says where. A verb's module is imported when the script runs, so this one needs neither
typer nor rich.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

import mla_ops
from mla_ops.errors import MLAOpsError

if TYPE_CHECKING:
    import typer

__all__ = ["VERBS", "build_app", "main"]

VERBS = {
    "accuracy": "mla_ops.accuracy.command",
    "bench": "mla_ops.bench.command",
    "compile-kernels": "mla_ops.kernels_command",
    "demo": "mla_ops.demo.command",
}
"""Verb to the module that holds the function of that name, with `_` for `-`."""

PIP_LINE = "pip install 'mla-ops[demo]'"


def build_app() -> typer.Typer:
    """Put the verbs together.

    Returns:
        The typer app; a verb's `MLAOpsError` leaves it as it is.

    Raises:
        ImportError: typer or rich is not installed.
    """
    import typer

    app = typer.Typer(
        name="mla-ops", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            typer.echo(f"mla-ops {mla_ops.__version__}")
            raise typer.Exit

    @app.callback()
    def top(
        version: bool = typer.Option(
            False, "--version", callback=show_version, is_eager=True, help="Show the version."
        ),
    ) -> None:
        """Multi-head latent attention for PyTorch and transformers."""

    for verb, module in VERBS.items():
        app.command(verb)(getattr(importlib.import_module(module), verb.replace("-", "_")))
    return app


def main() -> None:
    """Run the command line; an error that a user can act on ends it with one message, status 1."""
    try:
        app = build_app()
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        sys.exit(f"mla-ops: {package} is not installed: {PIP_LINE}")
    try:
        app()
    except MLAOpsError as error:
        sys.exit(f"mla-ops: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
