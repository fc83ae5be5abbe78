"""The demo from start to end, without any output of its own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from mla_ops import env
from mla_ops.demo.errors import require
from mla_ops.demo.measure import OURS, STOCK, decode_ms, measure
from mla_ops.demo.model import DemoModel, load_pretrained, load_tiny, quiet_transformers
from mla_ops.demo.report import Comparison, DemoReport, Exchange, SweepPoint, versions
from mla_ops.demo.text import Prompt, needle_prompt, question_prompt
from mla_ops.errors import InvalidInputError

if TYPE_CHECKING:
    from transformers import Cache

__all__ = ["DTYPES", "DemoOptions", "Observer", "run_demo"]

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
MAX_NEW_TOKENS = 24
STOCK_DECODE_UNTIL_S = 135.0
"""Stock decoding is slow: after so many seconds it is measured on fewer tokens (not on a shorter
context), which keeps a run under three minutes on two cores."""
SWEEP_POINTS = 5
SWEEP_TOKENS = {STOCK: 3, OURS: 8}
WARM_UP_TOKENS = 32
MIN_CONTEXT, MAX_CONTEXT = 128, 8192 - MAX_NEW_TOKENS


@dataclass(frozen=True)
class DemoOptions:
    """What to run.

    Attributes:
        tiny: random weights instead of a pretrained model; nothing is downloaded.
        context: tokens of the long prompt; None for 4096, or 2048 with random weights.
        dtype: `bfloat16` or `float32`; None for bfloat16, or float32 with random weights.
        threads: CPU threads; None for torch's own choice.
    """

    tiny: bool = False
    context: int | None = None
    dtype: str | None = None
    threads: int | None = None

    @property
    def chosen_context(self) -> int:
        """Tokens of the long prompt."""
        return self.context if self.context is not None else (2048 if self.tiny else 4096)

    @property
    def chosen_dtype(self) -> str:
        """Name of the dtype."""
        return self.dtype or ("float32" if self.tiny else "bfloat16")


class Observer(Protocol):
    """Is told what the demo does."""

    def stage(self, label: str, steps: int | None = None) -> None:
        """A stage begins; `steps` is None where nobody knows how long it takes."""

    def step(self) -> None:
        """One step of the stage is done."""

    def said(self, exchange: Exchange) -> None:
        """The model has answered a question."""


def run_demo(options: DemoOptions, observer: Observer) -> DemoReport:
    """Answer a short and a long prompt with stock transformers and with `mla_ops`, and time both.

    Args:
        options: what to run.
        observer: is told what happens.

    Returns:
        What was found.

    Raises:
        DemoError: a package is missing, or the model cannot be had.
        InvalidInputError: an option is out of range.
    """
    start = time.perf_counter()
    require("transformers")
    _check_options(options)
    with _threads(options.threads), quiet_transformers():
        loaded = _load(options, observer)
        deadline = time.perf_counter() + STOCK_DECODE_UNTIL_S
        short, long = _prompts(loaded, options.chosen_context)
        # The short one also warms both sides up.
        answered, _ = _compare(loaded, short, "short prompt", deadline, observer)
        exchanges = _exchange(loaded, short, answered, observer)
        benchmark, sweep = _benchmark(loaded, long, deadline, observer)
        exchanges += _exchange(loaded, long, benchmark, observer)
        threads = torch.get_num_threads()
    return DemoReport(
        model=loaded.name,
        shape=_shape(loaded),
        dtype=options.chosen_dtype,
        threads=threads,
        versions=versions(),
        exchanges=exchanges,
        benchmark=benchmark,
        sweep=sweep,
        elapsed_s=time.perf_counter() - start,
    )


def _check_options(options: DemoOptions) -> None:
    if options.chosen_dtype not in DTYPES:
        raise InvalidInputError(f"dtype must be one of {', '.join(DTYPES)}, got {options.dtype!r}")
    if not MIN_CONTEXT <= options.chosen_context <= MAX_CONTEXT:
        raise InvalidInputError(
            f"context must be between {MIN_CONTEXT} and {MAX_CONTEXT} tokens, "
            f"got {options.chosen_context}"
        )
    if options.threads is not None and options.threads < 1:
        raise InvalidInputError(f"threads must be at least 1, got {options.threads}")


@contextlib.contextmanager
def _threads(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _load(options: DemoOptions, observer: Observer) -> DemoModel:
    dtype = DTYPES[options.chosen_dtype]
    if options.tiny:
        observer.stage("make a random model")
        return load_tiny(dtype)
    return load_pretrained(dtype, env.cache_dir(), on_stage=observer.stage)


def _prompts(loaded: DemoModel, context: int) -> tuple[Prompt, Prompt]:
    """Return a short prompt and a long one: questions, or noise where nobody can read."""
    if loaded.tokenizer is not None:
        long = needle_prompt(loaded.tokenizer, loaded.filler, context)
        return question_prompt(loaded.tokenizer), long
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(loaded.model.config.vocab_size, (1, context), generator=generator)
    return Prompt(noise[:, :WARM_UP_TOKENS]), Prompt(noise)


def _compare(
    loaded: DemoModel, prompt: Prompt, label: str, deadline: float, observer: Observer
) -> tuple[Comparison, Cache]:
    """Answer a prompt with both; the cache is the one of `mla_ops`."""
    steps = loaded.model.config.num_hidden_layers * MAX_NEW_TOKENS
    observer.stage(f"{label}: mla_ops", steps)
    ours, cache = measure(
        loaded.model, OURS, prompt.input_ids, max_new_tokens=MAX_NEW_TOKENS, on_layer=observer.step
    )
    observer.stage(f"{label}: stock transformers", steps)
    stock, _ = measure(
        loaded.model,
        STOCK,
        prompt.input_ids,
        max_new_tokens=MAX_NEW_TOKENS,
        deadline=deadline,
        on_layer=observer.step,
    )
    return Comparison(stock, ours), cache


def _benchmark(
    loaded: DemoModel, prompt: Prompt, deadline: float, observer: Observer
) -> tuple[Comparison, tuple[SweepPoint, ...]]:
    """Measure the long prompt, then decoding behind shorter and shorter parts of it."""
    length = prompt.input_ids.shape[1]
    full, cache = _compare(loaded, prompt, f"{length} tokens of context", deadline, observer)
    points = [SweepPoint(length, full.stock.decode_ms, full.mla_ops.decode_ms)]
    contexts = _shorter_contexts(length)
    observer.stage("decode behind shorter contexts", 2 * len(contexts))
    for context in contexts:
        part = prompt.input_ids[:, :context]
        times = {}
        for side, tokens in SWEEP_TOKENS.items():
            times[side] = decode_ms(loaded.model, side, part, cache, tokens=tokens)
            observer.step()
        points.append(SweepPoint(context, times[STOCK], times[OURS]))
    return full, tuple(reversed(points))


def _shorter_contexts(length: int) -> list[int]:
    """Powers of two, longest first, that are clearly shorter."""
    powers = (1 << exponent for exponent in range(length.bit_length() - 1, 2, -1))
    return [power for power in powers if 4 * power <= 3 * length][: SWEEP_POINTS - 1]


def _exchange(
    loaded: DemoModel, prompt: Prompt, answered: Comparison, observer: Observer
) -> tuple[Exchange, ...]:
    """Put an answer into words and tell the observer; random weights have none."""
    if loaded.tokenizer is None:
        return ()
    answer = loaded.tokenizer.decode(answered.mla_ops.tokens, skip_special_tokens=True)
    exchange = Exchange(
        question=prompt.question,
        prompt_tokens=prompt.input_ids.shape[1],
        answer=answer.strip(),
        expected=prompt.expected,
        tokens_identical=answered.agreement,
    )
    observer.said(exchange)
    return (exchange,)


def _shape(loaded: DemoModel) -> str:
    config = loaded.model.config
    return (
        f"{type(loaded.model).__name__}: {config.num_hidden_layers} layers, "
        f"{config.num_attention_heads} heads, latent {config.kv_lora_rank}, "
        f"rotary {config.qk_rope_head_dim}"
    )
