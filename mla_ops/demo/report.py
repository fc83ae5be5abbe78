"""What a run of the demo has found, as data and as JSON."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
from dataclasses import dataclass
from typing import Any

import mla_ops
from mla_ops.demo.measure import Agreement, Measurement, compare

__all__ = [
    "SCHEMA",
    "Comparison",
    "DemoReport",
    "Exchange",
    "SweepPoint",
    "plain",
    "versions",
]

SCHEMA = 1
"""Version of the JSON; it grows when a key changes its meaning or goes."""


@dataclass(frozen=True)
class Comparison:
    """The same prompt, answered by stock transformers and by `mla_ops`."""

    stock: Measurement
    mla_ops: Measurement

    @property
    def agreement(self) -> Agreement:
        """Whether both have generated the same tokens."""
        return compare(self.stock, self.mla_ops)

    @property
    def prefill_speedup(self) -> float:
        """How many times faster the prefill of `mla_ops` is."""
        return self.stock.prefill_s / self.mla_ops.prefill_s

    @property
    def decode_speedup(self) -> float:
        """How many times faster a token of `mla_ops` is."""
        return self.stock.decode_ms / self.mla_ops.decode_ms


@dataclass(frozen=True)
class Exchange:
    """A question in words and the answer of `mla_ops`.

    Attributes:
        question: what was asked.
        prompt_tokens: length of the prompt, a long text around the question included.
        answer: what the model said.
        expected: what a right answer contains.
        tokens_identical: whether stock transformers said the same.
    """

    question: str
    prompt_tokens: int
    answer: str
    expected: str
    tokens_identical: Agreement

    @property
    def correct(self) -> bool:
        """Whether the answer contains what was expected."""
        return self.expected in self.answer


@dataclass(frozen=True)
class SweepPoint:
    """Milliseconds per decoded token behind one context length."""

    context: int
    stock_ms: float
    mla_ops_ms: float


@dataclass(frozen=True)
class DemoReport:
    """Everything that a run has found.

    Attributes:
        model: name of the model.
        shape: one line on its layers, heads and widths.
        dtype: of its weights.
        threads: CPU threads of torch.
        versions: of the packages that the figures depend on.
        exchanges: questions and answers; empty with random weights.
        benchmark: the long prompt, measured.
        sweep: decode time against context length, shortest first.
        elapsed_s: seconds that the run took.
    """

    model: str
    shape: str
    dtype: str
    threads: int
    versions: dict[str, str]
    exchanges: tuple[Exchange, ...]
    benchmark: Comparison
    sweep: tuple[SweepPoint, ...]
    elapsed_s: float

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data; a figure that could not be measured is None."""
        data: dict[str, Any] = plain(dataclasses.asdict(self))
        for exchange, source in zip(data["exchanges"], self.exchanges, strict=True):
            exchange["correct"] = source.correct
        bench = self.benchmark
        data["benchmark"] |= {
            "prefill_speedup": plain(bench.prefill_speedup),
            "decode_speedup": plain(bench.decode_speedup),
            "tokens_identical": dataclasses.asdict(bench.agreement),
        }
        return {"schema": SCHEMA, **data}


def versions() -> dict[str, str]:
    """Return the versions of the packages that figures depend on."""
    others = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    return {"mla_ops": mla_ops.__version__, **others}


def plain(value: Any) -> Any:
    """Return plain data for JSON: tuples as lists; NaN, which JSON does not know, as None.

    Args:
        value: data of any depth.

    Example:
        >>> plain({"times": (1.0, float("nan"))})
        {'times': [1.0, None]}
    """
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
