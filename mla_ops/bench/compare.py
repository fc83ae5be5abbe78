"""Two runs on one machine, row by row."""

from __future__ import annotations

from dataclasses import dataclass

from mla_ops.bench.document import Document
from mla_ops.bench.timing import Timing
from mla_ops.errors import InvalidInputError

__all__ = ["Change", "compare"]

_SAME = ("device", "name", "capability", "threads", "dtype")


@dataclass(frozen=True)
class Change:
    """One side of one case in both runs.

    Attributes:
        case: its name.
        side: who.
        backend: what computed the new one.
        old: how long it took.
        new: how long it takes.
    """

    case: str
    side: str
    backend: str
    old: Timing
    new: Timing

    @property
    def ratio(self) -> float:
        """Old median over new: above 1 is faster."""
        return self.old.median / self.new.median

    @property
    def verdict(self) -> str:
        """`slower` or `faster` where the quartiles of the two do not overlap, else empty."""
        if self.new.low > self.old.high:
            return "slower"
        return "faster" if self.new.high < self.old.low else ""


def compare(old: Document, new: Document, *, force: bool = False) -> list[Change]:
    """Match the rows of two runs by case and side; the fastest variants are compared.

    Args:
        old: the run to compare with.
        new: the run in question.
        force: whether to compare runs of different machines, threads or dtypes too.

    Raises:
        InvalidInputError: the runs are not of one machine, or have no row in common.
    """
    differing = [
        f"{name} {getattr(old.machine, name)!r}, now {getattr(new.machine, name)!r}"
        for name in _SAME
        if getattr(old.machine, name) != getattr(new.machine, name)
    ]
    if differing and not force:
        raise InvalidInputError(
            f"expected a run of the same machine, threads and dtype; it had "
            f"{'; '.join(differing)}; --force compares all the same"
        )
    found = []
    for case, side in dict.fromkeys((row.case, row.side) for row in new.rows):
        before, after = old.fastest(case, side), new.fastest(case, side)
        if before is not None and after is not None:
            found.append(Change(case, side, after.backend, before.timing, after.timing))
    if not found:
        raise InvalidInputError(
            f"expected a run with at least one of the cases {', '.join(new.cases)}; it has "
            f"{', '.join(old.cases) or 'none'}"
        )
    return found
