"""Every environment variable of the package, read in one place.

A variable is read when it is needed, not at import, so that tests and notebooks can change it.
An argument wins over a context manager, a context manager over a variable, a variable over the
default.
"""

from __future__ import annotations

import os
import pathlib
from dataclasses import dataclass

__all__ = [
    "VARIABLES",
    "Variable",
    "autotune",
    "backend",
    "batch_invariant",
    "cache_dir",
    "disabled_passes",
    "tma",
]


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
AUTOTUNE = Variable(
    "MLA_OPS_AUTOTUNE", "0", "1: the Triton backend times its tile sizes once per kind of call"
)
BATCH_INVARIANT = Variable(
    "MLA_OPS_BATCH_INVARIANT",
    "0",
    "1: the Triton backend cuts contexts at fixed places, so that a decode has the same bits "
    "whatever else is in its batch",
)
TMA = Variable(
    "MLA_OPS_TMA",
    "1",
    "0: the Triton backend loads expanded keys by pointers where it could by tensor descriptors",
)

DISABLE_PASSES = Variable(
    "MLA_OPS_DISABLE_PASSES", "", "graph passes that do not run: their names, with commas between"
)

VARIABLES: tuple[Variable, ...] = (
    BACKEND,
    CACHE_DIR,
    DISABLE_PASSES,
    AUTOTUNE,
    BATCH_INVARIANT,
    TMA,
)


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


def autotune() -> bool:
    """Return whether tile sizes are to be timed.

    Example:
        >>> import mla_ops.env
        >>> mla_ops.env.autotune()
        False
    """
    return _read(AUTOTUNE) == "1"


def batch_invariant() -> bool:
    """Return whether a decode's bits must not depend on its batch.

    Example:
        >>> import mla_ops.env
        >>> mla_ops.env.batch_invariant()
        False
    """
    return _read(BATCH_INVARIANT) == "1"


def disabled_passes() -> tuple[str, ...]:
    """Return the names in `MLA_OPS_DISABLE_PASSES`.

    Example:
        >>> import mla_ops.env
        >>> mla_ops.env.disabled_passes()
        ()
    """
    return tuple(name for part in _read(DISABLE_PASSES).split(",") if (name := part.strip()))


def tma() -> bool:
    """Return whether tensor descriptors may be used.

    Example:
        >>> import mla_ops.env
        >>> mla_ops.env.tma()
        True
    """
    return _read(TMA) == "1"
