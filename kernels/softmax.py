"""The softmax of one tile, and the merged result of many."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mla_ops.kernels.tiling import Tile

__all__ = ["Mass", "Running", "tile_softmax"]


class Mass(NamedTuple):
    """The softmax denominator of each row: `exp(top) * sum`.

    The two are kept apart: at the magnitude of an additive mask's smallest number, `top + log(sum)`
    is `top` again, and rows that are masked as a whole would lose their weights.

    Attributes:
        top: `[h, s, 1]`, the largest score; -inf for a row without a visible key.
        sum: `[h, s, 1]`, the sum of `exp(score - top)`; 0 for such a row.
    """

    top: Tensor
    sum: Tensor

    def lse(self) -> Tensor:
        """Return the logarithm of the denominator, -inf for a row without a visible key."""
        return self.top + self.sum.log()


def tile_softmax(scores: Tensor, tile: Tile) -> Mass:
    """Turn the scaled scores of a tile into probabilities, in place, and return their mass.

    One fused softmax and two row maxima replace the usual max, subtract, exp and sum: the largest
    probability is `1 / sum(exp(score - max))`.

    Args:
        scores: `[h, s, C]`, overwritten by probabilities; a row without a visible key becomes 0.
        tile: what is visible.
    """
    if tile.bias is not None:
        scores.add_(tile.bias)
    if tile.hidden is not None:
        scores.masked_fill_(tile.hidden, float("-inf"))
    top = scores.amax(dim=-1, keepdim=True)
    torch.softmax(scores, dim=-1, out=scores)
    total = scores.amax(dim=-1, keepdim=True).reciprocal_()
    if tile.empty_rows:
        empty = top == float("-inf")
        scores.masked_fill_(empty, 0.0)
        total.masked_fill_(empty, 0.0)
    return Mass(top, total)


class Running:
    """The merged result of the tiles that one block of queries has seen so far.

    A single tile is kept as it is, in the compute dtype; from the second one on the result is
    accumulated in fp32.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._value: Tensor | None = None
        self._mass: Mass | None = None

    def add(self, value: Tensor, mass: Mass) -> None:
        """Merge one tile.

        Args:
            value: `[h, s, W]`, normalised within the tile.
            mass: of the tile.
        """
        if self._value is None or self._mass is None:
            self._value, self._mass = value, mass
            return
        if self._value.dtype != mass.sum.dtype:
            self._value = self._value.to(mass.sum.dtype)
        before, now, self._mass = _shares(self._mass, mass)
        self._value.mul_(before).addcmul_(value.to(now.dtype), now)

    def result(self, sink: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Return value and lse `[h, s, 1]`, or None when no tile was seen.

        Args:
            sink: `[h, 1, 1]` logits that join the denominator.
        """
        if self._value is None or self._mass is None:
            return None
        if sink is None:
            return self._value, self._mass.lse()
        alone = Mass(sink.expand_as(self._mass.top), torch.ones_like(self._mass.sum))
        share, _, total = _shares(self._mass, alone)
        return self._value * share.to(self._value.dtype), total.lse()


def _shares(a: Mass, b: Mass) -> tuple[Tensor, Tensor, Mass]:
    """Return which part of their union each of two masses is, and the union."""
    top = torch.maximum(a.top, b.top)
    base = top.masked_fill(top == float("-inf"), 0.0)
    mine, theirs = a.sum * (a.top - base).exp_(), b.sum * (b.top - base).exp_()
    total = mine + theirs
    whole = total.masked_fill(total == 0.0, 1.0)
    return mine.div_(whole), theirs.div_(whole), Mass(top, total)
