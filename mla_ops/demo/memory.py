"""How far the process's memory grows."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from pathlib import Path
from types import TracebackType

__all__ = ["PeakMemory"]

_PROC = Path("/proc/self")


class PeakMemory:
    """Measures the peak of the resident set inside a `with` block, above where it was before.

    The kernel keeps the high-water mark, so no peak is missed and nothing runs beside the work.
    Everything counts that became resident: tensors, the cache, the scratch of any library. What
    freed memory the allocator still held is given back first, so that it does not hide growth.

    Attributes:
        growth: bytes, after the block; None where the system keeps no mark that can be reset.
    """

    def __init__(self) -> None:
        self.growth: int | None = None
        self._before: int | None = None

    def __enter__(self) -> PeakMemory:
        gc.collect()
        _trim_heap()
        self._before = _reset_mark()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before is not None:
            self.growth = max(0, _read("VmHWM") - self._before)


def _read(field: str) -> int:
    for line in (_PROC / "status").read_text("ascii", "replace").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in {_PROC / 'status'}")


def _reset_mark() -> int | None:
    """Lower the high-water mark to what is resident now, and return that."""
    try:
        (_PROC / "clear_refs").write_text("5", "ascii")
        return _read("VmRSS")
    except OSError:
        return None


def _trim_heap() -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # other C libraries have no such call
            ctypes.CDLL(None).malloc_trim(0)
