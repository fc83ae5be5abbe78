"""What an accuracy run has found, and its table in the form of lm-evaluation-harness."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from mla_ops.demo.report import plain

__all__ = ["AccuracyReport", "ItemResult", "Score"]

SCHEMA = 1
HEADINGS = (
    "Run", "Tasks", "N", "Filter", "n-shot", "Metric", "Value", "", "Stderr", "Stock", "Same",
)  # fmt: skip
NARROW = ("Tasks", "N", "Filter", "Value", "Stderr", "Stock", "Same")
RIGHT = {"N", "n-shot", "Value", "Stderr", "Stock", "Same"}


@dataclass(frozen=True)
class Score:
    """One row of the table.

    Attributes:
        run: name of the run.
        task: name of the task.
        samples: how many items were scored; tokens, for a perplexity.
        filter: how the answer was found in the text.
        num_fewshot: solved examples in the prompt.
        metric: what `value` is.
        value: the score.
        stderr: its standard error; NaN for a single sample.
        stock: stock's score on the same items.
        same: answers that are stock's, token by token; None for a perplexity.
        max_difference: largest difference of a token's log-probability from stock's; None where
            answers were generated.
    """

    run: str
    task: str
    samples: int
    filter: str
    num_fewshot: int
    metric: str
    value: float
    stderr: float
    stock: float
    same: int | None
    max_difference: float | None

    @property
    def within_stderr(self) -> bool:
        """Whether the value is stock's, give or take the standard error."""
        return self.value == self.stock or abs(self.value - self.stock) <= self.stderr


@dataclass(frozen=True)
class ItemResult:
    """One item in one run.

    Attributes:
        run: name of the run.
        task: name of the task.
        item: name of the item.
        expected: the right answer; empty for a piece of text.
        answer: the text that was generated.
        tokens: its tokens.
        logprob: sum over the tokens of a piece of text; None where an answer was generated.
    """

    run: str
    task: str
    item: str
    expected: str
    answer: str
    tokens: tuple[int, ...]
    logprob: float | None


@dataclass(frozen=True)
class AccuracyReport:
    """Everything that a run has found.

    Attributes:
        model: name of the model.
        dtype: of its weights.
        threads: CPU threads of torch.
        versions: of the packages that the figures depend on.
        scores: the rows, run by run, stock first.
        items: every answer of every run.
        seconds: of each run, by its name.
    """

    model: str
    dtype: str
    threads: int
    versions: dict[str, str]
    scores: tuple[Score, ...]
    items: tuple[ItemResult, ...]
    seconds: dict[str, float]

    @property
    def outside_stderr(self) -> tuple[Score, ...]:
        """Rows that differ from stock by more than the standard error."""
        return tuple(score for score in self.scores if not score.within_stderr)

    @property
    def answers(self) -> tuple[int, int]:
        """Answers that are stock's token by token, and all answers; stock's own do not count."""
        compared: dict[tuple[str, str], tuple[int, int]] = {}
        for score in self.scores:
            if score.same is not None and score.run != self.scores[0].run:
                compared[score.run, score.task] = (score.same, score.samples)
        return sum(s for s, _ in compared.values()), sum(n for _, n in compared.values())

    def markdown(self) -> str:
        """Return the table, every column padded to one width."""
        return "\n".join(self._lines(HEADINGS))

    def narrow(self) -> str:
        """Return the table for a terminal of 80 columns: runs as headings, fewer columns."""
        heading, rule, *rows = self._lines(NARROW)
        lines = [heading, rule]
        for before, score, row in zip([None, *self.scores], self.scores, rows, strict=False):
            if before is None or before.run != score.run:
                lines += ["", score.run]
            lines.append(row)
        return "\n".join(lines)

    def _lines(self, headings: tuple[str, ...]) -> list[str]:
        """Return the lines of the table: headings, the rule, and a row per score."""
        places = [HEADINGS.index(heading) for heading in headings]
        rows = [headings, *([_cells(score)[place] for place in places] for score in self.scores)]
        widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
        rule = [
            "-" * (width - 1) + ":" if heading in RIGHT else "-" * width
            for heading, width in zip(headings, widths, strict=True)
        ]
        lines = [
            [
                cell.rjust(width) if heading in RIGHT else cell.ljust(width)
                for heading, cell, width in zip(headings, row, widths, strict=True)
            ]
            for row in rows
        ]
        return [f"|{'|'.join(line)}|" for line in [lines[0], rule, *lines[1:]]]

    def verdict(self) -> str:
        """Return in two lines whether the runs agree."""
        same, answers = self.answers
        outside = self.outside_stderr
        rows = len(self.scores)
        within = (
            f"all {rows} rows are within the standard error of stock"
            if not outside
            else f"{len(outside)} of {rows} rows are not within the standard error of stock: "
            + ", ".join(f"{score.run} ({score.task})" for score in outside)
        )
        return f"{within}\n{same} of {answers} greedy answers are stock's, token by token"

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data; an unknown standard error is None."""
        same, answers = self.answers
        data: dict[str, Any] = {"schema": SCHEMA, **plain(dataclasses.asdict(self))}
        return data | {
            "answers_identical": same,
            "answers_compared": answers,
            "all_within_stderr": not self.outside_stderr,
        }


def _cells(score: Score) -> tuple[str, ...]:
    if score.same is not None:
        same = f"{score.same}/{score.samples}"
    else:
        same = f"{score.max_difference:.0e}"
    return (
        score.run,
        score.task,
        str(score.samples),
        score.filter,
        str(score.num_fewshot),
        score.metric,
        f"{score.value:.4f}",
        "±",
        "N/A" if math.isnan(score.stderr) else f"{score.stderr:.4f}",
        f"{score.stock:.4f}",
        same,
    )
