"""Scores and their standard errors, as lm-evaluation-harness computes them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Estimate", "contains", "flexible_extract", "mean", "perplexity", "strict_match"]

STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
IGNORED = re.compile(r",|\$|\.$")
STOP = "Question:"


class Estimate(NamedTuple):
    """A value and its standard error.

    Attributes:
        value: the estimate.
        stderr: NaN for a single sample.
    """

    value: float
    stderr: float


def mean(samples: Sequence[float]) -> Estimate:
    """Return the mean and the sample standard error of the mean, `s / sqrt(n)`.

    Args:
        samples: at least one.

    Example:
        >>> mean([0.0, 1.0, 1.0, 1.0])
        Estimate(value=0.75, stderr=0.25)
    """
    size = len(samples)
    value = math.fsum(samples) / size
    if size == 1:
        return Estimate(value, math.nan)
    squares = math.fsum((sample - value) ** 2 for sample in samples)
    return Estimate(value, math.sqrt(squares / (size - 1) / size))


def perplexity(logprobs: Sequence[float]) -> Estimate:
    """Return `exp(-mean)`; its standard error by the delta method, with tokens as the samples.

    Args:
        logprobs: natural, one per token.
    """
    average = mean([-logprob for logprob in logprobs])
    value = math.exp(average.value)
    return Estimate(value, value * average.stderr)


def strict_match(text: str, result: str) -> float:
    """Return 1 if the first number after `####` is the result, else 0.

    Args:
        text: what was generated; it ends where the next question begins.
        result: the right number.
    """
    found = STRICT.findall(text.partition(STOP)[0])
    return float(bool(found) and IGNORED.sub("", found[0]) == result)


def flexible_extract(text: str, result: str) -> float:
    """Return 1 if the last number is the result, else 0.

    Args:
        text: what was generated; it ends where the next question begins.
        result: the right number.
    """
    found = FLEXIBLE.findall(text.partition(STOP)[0])
    return float(bool(found) and IGNORED.sub("", found[-1][0] or found[-1][1]) == result)


def contains(text: str, result: str) -> float:
    """Return 1 if the result stands anywhere in the text, else 0.

    Args:
        text: what was generated.
        result: what was hidden.
    """
    return float(result in text)
