"""Every environment variable of the package, read in one place.

A variable is read when it is needed, not at import, so that tests and notebooks can change it.
An argument wins over a context manager, a context manager over a variable, a variable over the
default.
"""

from __future__ import annotations

import os
import pathlib
from dataclasses import dataclass

__all__ = ["VARIABLES", "Variable", "backend", "cache_dir", "disabled_passes"]


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, its default and what it does."""

    name: str
    default: str
    meaning: str


BACKEND = Variable(
    "MLA_OPS_BACKEND", "auto", "name of the backend that every op uses; `auto` lets each op choose"
)
CACHE_DIR = Variable(
    "MLA_OPS_CACHE_DIR",
    "",
    "folder for downloads and converted models; empty means `mla_ops` in the user's cache folder",
)

DISABLE_PASSES = Variable(
    "MLA_OPS_DISABLE_PASSES", "", "graph passes that do not run: their names, with commas between"
)

VARIABLES: tuple[Variable, ...] = (BACKEND, CACHE_DIR, DISABLE_PASSES)


def _read(variable: Variable) -> str:
    return os.environ.get(variable.name, "").strip() or variable.default


def backend() -> str:
    """Return the backend named by `MLA_OPS_BACKEND`, `auto` when it is unset.

    Example:
        >>> import mla_ops.env
        >>> mla_ops.env.backend()
        'auto'
    """
    return _read(BACKEND)


def cache_dir() -> pathlib.Path:
    """Return the folder for downloads and converted models; it may not exist yet.

    Example:
        >>> import mla_ops.env
        >>> mla_ops.env.cache_dir().name
        'mla_ops'
    """
    chosen = _read(CACHE_DIR)
    if chosen:
        return pathlib.Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (pathlib.Path(base) if base else pathlib.Path.home() / ".cache") / "mla_ops"


def disabled_passes() -> tuple[str, ...]:
    """Return the names in `MLA_OPS_DISABLE_PASSES`.

    Example:
        >>> import mla_ops.env
        >>> mla_ops.env.disabled_passes()
        ()
    """
    return tuple(name for part in _read(DISABLE_PASSES).split(",") if (name := part.strip()))
