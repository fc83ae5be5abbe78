"""The error of the demo, and the one that most users would meet first."""

from __future__ import annotations

import importlib.util

from mla_ops.errors import MLAOpsError

__all__ = ["DemoError", "require"]


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
