"""Running `generate` with either attention implementation, and timing it token by token."""

from __future__ import annotations

import contextlib
import inspect
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mla_ops.demo.memory import PeakMemory

if TYPE_CHECKING:
    from transformers import Cache, DeepseekV3ForCausalLM

__all__ = [
    "OURS",
    "STOCK",
    "Agreement",
    "Measurement",
    "attention",
    "compare",
    "decode_ms",
    "measure",
]

STOCK, OURS = "stock", "mla_ops"
MIN_TOKENS = 4
"""Tokens that are generated even when the time for them is used up."""


@dataclass(frozen=True)
class Measurement:
    """One greedy `generate`.

    Attributes:
        side: `stock` or `mla_ops`.
        prompt_tokens: length of the prompt.
        prefill_s: seconds until the first token.
        decode_ms: median milliseconds of the tokens after it; NaN when there are none.
        peak_bytes: growth of the resident set above the loaded model; None when unknown.
        cache_bytes_per_token: bytes of the cache, all layers, per token in it.
        tokens: what was generated.
        cut_short: whether time ran out before the answer ended.
    """

    side: str
    prompt_tokens: int
    prefill_s: float
    decode_ms: float
    peak_bytes: int | None
    cache_bytes_per_token: float
    tokens: tuple[int, ...]
    cut_short: bool


@dataclass(frozen=True)
class Agreement:
    """Whether two runs generated the same tokens.

    Attributes:
        compared: tokens that both have generated.
        first_difference: index of the first token that differs; None when none does.
    """

    compared: int
    first_difference: int | None

    def __str__(self) -> str:
        """Return the answer as the table shows it."""
        if self.first_difference is None:
            return f"yes ({self.compared} tokens)"
        return f"no (first difference at token {self.first_difference})"


class _Clock:
    """A stopping criterion, which `generate` asks after every token: it notes the time.

    After a deadline it ends the answer.
    """

    def __init__(self, deadline: float = math.inf) -> None:
        self.stopped = False
        self._deadline = deadline
        self._times = [time.perf_counter()]

    @property
    def prefill_s(self) -> float:
        """Seconds until the first token."""
        return self._times[1] - self._times[0]

    @property
    def decode_ms(self) -> float:
        """Median milliseconds of the tokens after it; NaN when there are none."""
        steps = [after - before for before, after in pairwise(self._times[1:])]
        return 1e3 * statistics.median(steps) if steps else math.nan

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Note a token, and say whether to stop."""
        self._times.append(time.perf_counter())
        self.stopped = len(self._times) > MIN_TOKENS and self._times[-1] > self._deadline
        return torch.full((input_ids.shape[0],), self.stopped, device=input_ids.device)


@contextlib.contextmanager
def attention(model: DeepseekV3ForCausalLM, side: str) -> Iterator[None]:
    """Let a model run one side's attention inside the block; the weights are the same.

    Args:
        model: the model.
        side: `stock` or `mla_ops`.
    """
    from mla_ops.hf import patch, unpatch

    (patch if side == OURS else unpatch)(model)
    try:
        yield
    finally:
        unpatch(model)


def measure(
    model: DeepseekV3ForCausalLM,
    side: str,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    deadline: float = math.inf,
    on_layer: Callable[[], None] = lambda: None,
) -> tuple[Measurement, Cache]:
    """Answer one prompt greedily.

    Args:
        model: the model.
        side: `stock` or `mla_ops`.
        input_ids: the prompt, `[1, S]`.
        max_new_tokens: most tokens to generate.
        deadline: when to cut the answer short, on the clock of `time.perf_counter`.
        on_layer: called whenever a layer has run.

    Returns:
        What was measured, and the cache.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with attention(model, side), _layer_hooks(model, on_layer), PeakMemory() as memory:
        clock = _Clock(deadline)
        tokens = _generate(model, input_ids, cache, clock, max_new_tokens=max_new_tokens)
    size = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    result = Measurement(
        side=side,
        prompt_tokens=input_ids.shape[1],
        prefill_s=clock.prefill_s,
        decode_ms=clock.decode_ms,
        peak_bytes=memory.growth,
        cache_bytes_per_token=size / cache.get_seq_length(),
        tokens=tuple(tokens),
        cut_short=clock.stopped,
    )
    return result, cache


def decode_ms(
    model: DeepseekV3ForCausalLM, side: str, input_ids: Tensor, cache: Cache, *, tokens: int
) -> float:
    """Time decoding behind a context that is cached already.

    Args:
        model: the model.
        side: `stock` or `mla_ops`.
        input_ids: the context, `[1, S]`.
        cache: holds at least the first S - 1 tokens of it; cut to that length.
        tokens: tokens to time.

    Returns:
        The median, in milliseconds.
    """
    surplus = cache.get_seq_length() - (input_ids.shape[1] - 1)
    cache.crop(-surplus)
    with attention(model, side):
        clock = _Clock()
        # One token more: the first one pays for the set-up of `generate`.
        _generate(model, input_ids, cache, clock, max_new_tokens=tokens + 1, must_go_on=True)
    return clock.decode_ms


def compare(stock: Measurement, ours: Measurement) -> Agreement:
    """Compare what two runs have generated.

    Args:
        stock: one run.
        ours: the other one.
    """
    compared = min(len(stock.tokens), len(ours.tokens))
    pairs = zip(stock.tokens, ours.tokens, strict=False)
    for index, (expected, got) in enumerate(pairs):
        if expected != got:
            return Agreement(compared, index)
    shorter = min(stock, ours, key=lambda run: len(run.tokens))
    if len(stock.tokens) != len(ours.tokens) and not shorter.cut_short:
        return Agreement(compared, compared)
    return Agreement(compared, None)


def _generate(
    model: DeepseekV3ForCausalLM,
    input_ids: Tensor,
    cache: Cache,
    clock: _Clock,
    *,
    max_new_tokens: int,
    must_go_on: bool = False,
) -> list[int]:
    parameters = inspect.signature(model.forward).parameters
    keyword = "cache" if "cache" in parameters else "past_key_values"  # its older name
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        **{keyword: cache},
        do_sample=False,
        max_new_tokens=max_new_tokens,
        min_new_tokens=max_new_tokens if must_go_on else None,
        stopping_criteria=[clock],
    )
    tokens: list[int] = output[0, input_ids.shape[1] :].tolist()
    return tokens


@contextlib.contextmanager
def _layer_hooks(model: DeepseekV3ForCausalLM, on_layer: Callable[[], None]) -> Iterator[None]:
    def hook(*_: object) -> None:
        on_layer()

    handles = [layer.register_forward_hook(hook) for layer in model.model.layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
