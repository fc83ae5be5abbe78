"""The error of the demo, and what is checked before its work begins."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from mla_ops.errors import InvalidInputError, MLAOpsError

__all__ = ["DemoError", "require", "require_writable"]


class DemoError(MLAOpsError, RuntimeError):
    """The demo cannot run here: the message says why and what to do instead."""


def require(*packages: str) -> None:
    """Refuse to go on without packages that the demo needs.

    Args:
        packages: names to import.

    Raises:
        DemoError: one is not installed; the message has the pip line.
    """
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise DemoError(
            f"the demo needs {', '.join(missing)}, which is not installed here: "
            "pip install 'mla-ops[demo]'"
        )


def require_writable(*paths: Path | None) -> None:
    """Refuse to go on when results could not be written.

    Args:
        paths: files that will be written, None for those that will not.

    Raises:
        InvalidInputError: one is a folder, or its folder does not exist.
    """
    for path in paths:
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise InvalidInputError(f"expected a file in an existing folder, got {path}")
