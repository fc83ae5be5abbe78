"""The error of the accuracy run."""

from __future__ import annotations

from mla_ops.errors import MLAOpsError

__all__ = ["AccuracyError"]


class AccuracyError(MLAOpsError, RuntimeError):
    """The run cannot start, or its runs disagree: the message says why."""
