"""The console script `mla-ops`.

Each verb is a plain function with typer annotations, in the part of the package that it belongs
to; `VERBS` says where. A verb's module is imported when the verb is run or help on all of them is
wanted, so this one needs neither typer nor rich, and no verb waits for another's packages.

The exit status is 0 when all is well, 1 when something was found wrong or cannot be done here, and
2 when the arguments are wrong.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

import mla_ops
from mla_ops.errors import InvalidInputError, MLAOpsError

if TYPE_CHECKING:
    import typer

__all__ = ["VERBS", "build_app", "main"]

VERBS = {
    "accuracy": "mla_ops.accuracy.command",
    "bench": "mla_ops.bench.command",
    "check": "mla_ops.commands.check",
    "compile-kernels": "mla_ops.kernels_command",
    "demo": "mla_ops.demo.command",
    "explain": "mla_ops.commands.explain",
    "info": "mla_ops.commands.info",
}
"""Verb to the module that holds the function of that name, with `_` for `-`."""

PIP_LINE = "pip install 'mla-ops[demo]'"


def build_app(*verbs: str) -> typer.Typer:
    """Put the verbs together.

    Args:
        verbs: those that are wanted; all of them when none is named.

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

    for verb in verbs or VERBS:
        module = importlib.import_module(VERBS[verb])
        app.command(verb)(getattr(module, verb.replace("-", "_")))
    return app


def main() -> None:
    """Run the command line; an error that a user can act on ends it with one message."""
    try:
        app = build_app(*(verb for verb in sys.argv[1:2] if verb in VERBS))
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        sys.exit(f"mla-ops: {package} is not installed: {PIP_LINE}")
    try:
        app()
    except InvalidInputError as error:
        print(f"mla-ops: {error}", file=sys.stderr)
        sys.exit(2)
    except MLAOpsError as error:
        sys.exit(f"mla-ops: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
