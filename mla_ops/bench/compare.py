"""Two runs on one machine, row by row."""

from __future__ import annotations

from dataclasses import dataclass

from mla_ops.bench.document import Document, Machine
from mla_ops.bench.timing import Timing
from mla_ops.errors import InvalidInputError

__all__ = ["Change", "compare", "require_same"]

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


def require_same(old: Machine, new: Machine) -> None:
    """Refuse to compare what cannot be compared.

    Args:
        old: where the old run took place.
        new: where the new one does.

    Raises:
        InvalidInputError: machine, threads or dtype differ.
    """
    differing = [
        f"{name} {getattr(old, name)!r}, now {getattr(new, name)!r}"
        for name in _SAME
        if getattr(old, name) != getattr(new, name)
    ]
    if differing:
        raise InvalidInputError(
            "expected a run of the same machine, threads and dtype; it had "
            f"{'; '.join(differing)}; --force compares all the same"
        )


def compare(old: Document, new: Document) -> list[Change]:
    """Match the rows of two runs by case and side; the fastest variants are compared.

    Args:
        old: the run to compare with; `require_same` says whether that makes sense.
        new: the run in question.

    Raises:
        InvalidInputError: the runs have no row in common.
    """
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
