"""Graph passes that put the op into compiled models: FX graph to FX graph.

Importing this package loads nothing: the names come with their modules when they are asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mla_ops.passes.backend import make_backend
    from mla_ops.passes.explanation import Explanation, explain
    from mla_ops.passes.inductor import MLAPass
    from mla_ops.passes.pipeline import PASSES, rewrite
    from mla_ops.passes.report import RewriteReport, Site

_HOME = {
    "Explanation": "explanation",
    "MLAPass": "inductor",
    "PASSES": "pipeline",
    "RewriteReport": "report",
    "Site": "report",
    "explain": "explanation",
    "make_backend": "backend",
    "rewrite": "pipeline",
}
__all__ = [
    "PASSES",
    "Explanation",
    "MLAPass",
    "RewriteReport",
    "Site",
    "explain",
    "make_backend",
    "rewrite",
]


def __dir__() -> list[str]:
    """List the lazy names too."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Load a public name's module when the name is asked for."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"mla_ops.passes.{_HOME[name]}"), name)
    globals()[name] = value
    return value
