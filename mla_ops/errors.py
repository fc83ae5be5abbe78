"""The errors that users see, in one tree.

```
MLAOpsError
├── InvalidInputError        (ValueError)           an argument is wrong
├── UnsupportedInputError    (NotImplementedError)  no backend takes the call; lists all reasons
├── BackendUnavailableError  (ImportError)          a backend asked for by name cannot be loaded
├── PatchError               (RuntimeError)         a model could not be switched; has the report
└── RewriteError             (RuntimeError)         a graph could not be rewritten
```

Every message says what was expected and what came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "BackendUnavailableError",
    "InvalidInputError",
    "MLAOpsError",
    "PatchError",
    "RewriteError",
    "UnsupportedInputError",
]


class MLAOpsError(Exception):
    """Root of all errors that this package raises on purpose."""


class InvalidInputError(MLAOpsError, ValueError):
    """An argument has a wrong rank, size, dtype, device or value."""


class UnsupportedInputError(MLAOpsError, NotImplementedError):
    """No backend takes the call.

    Attributes:
        reasons: for each backend that was asked, why it refused.
    """

    def __init__(self, call: str, reasons: Mapping[str, Sequence[str]]) -> None:
        """Build the message from what was asked for and every refusal.

        Args:
            call: one line that describes the call.
            reasons: backend name to its list of reasons.
        """
        self._call = call
        self.reasons: dict[str, list[str]] = {name: list(why) for name, why in reasons.items()}
        lines = [f"no backend takes {call}:"]
        lines += [f"  {name}: {'; '.join(why)}" for name, why in self.reasons.items()]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel between processes."""
        return type(self), (self._call, self.reasons)


class BackendUnavailableError(MLAOpsError, ImportError):
    """A backend was chosen by name but is unknown or cannot be loaded here."""


class PatchError(MLAOpsError, RuntimeError):
    """A model could not be switched to `mla_ops`.

    Attributes:
        report: the layer table, as `mla_ops.report` returns it.
    """

    def __init__(self, message: str, report: object = None) -> None:
        """Keep the report beside the message.

        Args:
            message: what went wrong, with the table in it.
            report: the report object.
        """
        self.report = report
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel between processes."""
        return type(self), (*self.args, self.report)


class RewriteError(MLAOpsError, RuntimeError):
    """A graph could not be rewritten as asked."""
