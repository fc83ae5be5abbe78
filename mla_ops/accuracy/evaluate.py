"""The accuracy run from start to end, without any output of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from mla_ops import env
from mla_ops.accuracy.errors import AccuracyError
from mla_ops.accuracy.report import AccuracyReport, ItemResult, Score
from mla_ops.accuracy.runs import Outcome, Run, answer, choose, standard_runs
from mla_ops.accuracy.scoring import (
    contains,
    flexible_extract,
    mean,
    perplexity,
    strict_match,
)
from mla_ops.accuracy.tasks import (
    ARITHMETIC,
    NEEDLE,
    PERPLEXITY,
    ByteCodec,
    Codec,
    Item,
    Sizes,
    TokenizerCodec,
    build_items,
)
from mla_ops.demo.errors import DemoError, require
from mla_ops.demo.model import DemoModel, load_pretrained, load_tiny, quiet_transformers
from mla_ops.demo.report import versions
from mla_ops.demo.run import DTYPES
from mla_ops.errors import InvalidInputError

__all__ = ["DEFAULT_BUDGETS", "AccuracyOptions", "Observer", "run_accuracy"]

DEFAULT_BUDGETS = (16, 64, 1024)
FULL = Sizes(4, 512, 100, (512, 1024, 1536), (0.1, 0.5, 0.9))
QUICK = Sizes(1, 256, 4, (256,), (0.5, 0.9))
TINY = Sizes(1, 96, 2, (400,), (0.1, 0.9))

Scorer = Callable[[str, str], float]
SCORERS: dict[str, tuple[tuple[str, str, int, Scorer], ...]] = {
    ARITHMETIC: (
        ("flexible-extract", "exact_match", 5, flexible_extract),
        ("strict-match", "exact_match", 5, strict_match),
    ),
    NEEDLE: (("none", "contains", 0, contains),),
}


@dataclass(frozen=True)
class AccuracyOptions:
    """What to run.

    Attributes:
        token_budgets: one run for each, besides stock and chunked prefill off and on.
        dtype: `float32` or `bfloat16`.
        quick: a few items of each task.
        tiny: random weights and a few items; nothing is downloaded.
        all_items: let small budgets run all items too.
    """

    token_budgets: tuple[int, ...] = DEFAULT_BUDGETS
    dtype: str = "float32"
    quick: bool = False
    tiny: bool = False
    all_items: bool = False


class Observer(Protocol):
    """Is told what the run does."""

    def stage(self, label: str, steps: int | None = None) -> None:
        """A stage begins; `steps` is None where nobody knows how long it takes."""

    def step(self) -> None:
        """One step of the stage is done."""


def run_accuracy(options: AccuracyOptions, observer: Observer) -> AccuracyReport:
    """Answer the same items in every way, and score them.

    Args:
        options: what to run.
        observer: is told what happens.

    Returns:
        What was found.

    Raises:
        AccuracyError: the model cannot be had.
        InvalidInputError: an option is out of range.
    """
    _check_options(options)
    with quiet_transformers():
        loaded = _load(options, observer)
        codec: Codec = TokenizerCodec(loaded.tokenizer) if loaded.tokenizer else ByteCodec()
        items = build_items(codec, TINY if options.tiny else QUICK if options.quick else FULL)
        outcomes: dict[Run, dict[int, Outcome]] = {}
        seconds = {}
        for run in standard_runs(options.token_budgets, all_items=options.all_items):
            chosen = choose(items, run)
            observer.stage(run.name, len(chosen))
            start = time.perf_counter()
            answers = answer(loaded.model, [items[i] for i in chosen], run, observer.step)
            outcomes[run] = dict(zip(chosen, answers, strict=True))
            seconds[run.name] = time.perf_counter() - start
    stock = next(iter(outcomes.values()))
    return AccuracyReport(
        model=loaded.name,
        dtype=options.dtype,
        threads=torch.get_num_threads(),
        versions=versions(),
        scores=tuple(
            score
            for run, got in outcomes.items()
            for score in score_run(run, items, got, stock, codec)
        ),
        items=tuple(
            _item_result(run, items[index], outcome, codec)
            for run, got in outcomes.items()
            for index, outcome in got.items()
        ),
        seconds=seconds,
    )


def score_run(
    run: Run,
    items: Sequence[Item],
    outcomes: dict[int, Outcome],
    stock: dict[int, Outcome],
    codec: Codec,
) -> list[Score]:
    """Return a run's rows.

    Args:
        run: the run.
        items: all items.
        outcomes: what the run made of them, by index.
        stock: what stock made of them; holds at least the same indices.
        codec: the model's.
    """
    rows: list[Score] = []
    for task in (PERPLEXITY, ARITHMETIC, NEEDLE):
        chosen = [index for index in outcomes if items[index].task == task]
        ours, theirs = ([side[index] for index in chosen] for side in (outcomes, stock))
        if not chosen:
            continue
        if task == PERPLEXITY:
            rows.append(_score_text(run, ours, theirs))
            continue
        same = sum(a.tokens == b.tokens for a, b in zip(ours, theirs, strict=True))
        expected = [items[index].expected for index in chosen]
        for name, metric, shots, scorer in SCORERS[task]:
            found, usual = (
                mean(
                    [scorer(codec.decode(o.tokens), e) for o, e in zip(side, expected, strict=True)]
                )
                for side in (ours, theirs)
            )
            rows.append(
                Score(
                    run=run.name,
                    task=task,
                    samples=len(chosen),
                    filter=name,
                    num_fewshot=shots,
                    metric=metric,
                    value=found.value,
                    stderr=found.stderr,
                    stock=usual.value,
                    same=same,
                    max_difference=None,
                )
            )
    return rows


def _score_text(run: Run, ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> Score:
    mine, usual = ([p for outcome in side for p in outcome.logprobs] for side in (ours, theirs))
    found = perplexity(mine)
    return Score(
        run=run.name,
        task=PERPLEXITY,
        samples=len(mine),
        filter="none",
        num_fewshot=0,
        metric="perplexity",
        value=found.value,
        stderr=found.stderr,
        stock=perplexity(usual).value,
        same=None,
        max_difference=max(abs(a - b) for a, b in zip(mine, usual, strict=True)),
    )


def _item_result(run: Run, item: Item, outcome: Outcome, codec: Codec) -> ItemResult:
    logprob = sum(outcome.logprobs) if outcome.logprobs else None
    answered = codec.decode(outcome.tokens)
    return ItemResult(
        run.name, item.task, item.name, item.expected, answered, outcome.tokens, logprob
    )


def _check_options(options: AccuracyOptions) -> None:
    if options.dtype not in DTYPES:
        raise InvalidInputError(f"dtype must be one of {', '.join(DTYPES)}, got {options.dtype!r}")
    for budget in options.token_budgets:
        if budget < 1:
            raise InvalidInputError(f"a token budget must be at least 1, got {budget}")
    if len(set(options.token_budgets)) < len(options.token_budgets):
        raise InvalidInputError(
            "every token budget must be given once, got "
            f"{', '.join(map(str, options.token_budgets))}"
        )


def _load(options: AccuracyOptions, observer: Observer) -> DemoModel:
    """Load the model of the demo; its error names the verb that the user has called."""
    try:
        require("transformers")
        if options.tiny:
            observer.stage("make a random model")
            return load_tiny(DTYPES[options.dtype])
        return load_pretrained(DTYPES[options.dtype], env.cache_dir(), on_stage=observer.stage)
    except DemoError as error:
        raise AccuracyError(str(error).replace("mla-ops demo", "mla-ops accuracy")) from error
