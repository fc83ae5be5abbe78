"""The softmax of one tile, and the merged result of many."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_ops.kernels.tiling import Tile

__all__ = ["Running", "tile_softmax"]


def tile_softmax(scores: Tensor, tile: Tile) -> Tensor:
    """Turn the scaled scores of a tile into probabilities, in place, and return their lse.

    One fused softmax and two row maxima replace the usual max, subtract, exp and sum: the largest
    probability is `1 / sum(exp(score - max))`, so `lse = max - log(largest)`.

    Args:
        scores: `[h, s, C]`, overwritten by probabilities; a row without a visible key becomes 0.
        tile: what is visible.

    Returns:
        `[h, s, 1]`, -inf for a row without a visible key.
    """
    if tile.bias is not None:
        scores.add_(tile.bias)
    if tile.hidden is not None:
        scores.masked_fill_(tile.hidden, float("-inf"))
    top = scores.amax(dim=-1, keepdim=True)
    torch.softmax(scores, dim=-1, out=scores)
    lse = top - scores.amax(dim=-1, keepdim=True).log_()
    if tile.empty_rows:
        empty = top == float("-inf")
        scores.masked_fill_(empty, 0.0)
        lse.masked_fill_(empty, float("-inf"))
    return lse


class Running:
    """The merged result of the tiles that one block of queries has seen so far.

    A single tile is kept as it is, in the compute dtype; from the second one on the result is
    accumulated in fp32.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._value: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, value: Tensor, lse: Tensor) -> None:
        """Merge one tile by its log-sum-exp.

        Args:
            value: `[h, s, W]`, normalised within the tile.
            lse: `[h, s, 1]`, -inf where the tile has nothing for a row.
        """
        if self._value is None or self._lse is None:
            self._value, self._lse = value, lse
            return
        total = torch.logaddexp(self._lse, lse)
        base = total.masked_fill(total == float("-inf"), 0.0)
        if self._value.dtype != lse.dtype:
            self._value = self._value.to(lse.dtype)
        self._value.mul_((self._lse - base).exp_())
        self._value.addcmul_(value.to(lse.dtype), (lse - base).exp_())
        self._lse = total

    def result(self, sink: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Return value and lse, or None when no tile was seen.

        Args:
            sink: `[h, 1, 1]` logits that join the denominator.
        """
        if self._value is None or self._lse is None:
            return None
        if sink is None:
            return self._value, self._lse
        total = torch.logaddexp(self._lse, sink)
        return self._value * (self._lse - total).exp_().to(self._value.dtype), total
