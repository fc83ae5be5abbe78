"""Whether a model says the same with `mla_ops` as with its own code.

A prompt is run, then some decode steps. Both sides see the same tokens, those that stock chooses,
so that every row of logits compares.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

import mla_ops.hf
from mla_ops.commands.models import in_dtype
from mla_ops.hf import PatchReport

__all__ = ["Agreement", "Part", "compare_with_stock"]

_FP64_PARAMETERS = 50_000_000
"""Up to this size the model is run in fp64 too, as the measure of both sides."""

# Without fp64: the largest error relative to the largest logit that rounding alone explains.
_RELATIVE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class Part:
    """The logits of the prompt, or of the decode steps.

    Attributes:
        name: `prompt` or `decode`.
        rows: how many tokens.
        difference: largest difference between the two sides.
        relative: the same over the largest logit.
        stock_error: stock's largest error against fp64; None where fp64 was not run.
        error: the same of `mla_ops`.
        allowed: what `error`, or `difference` without fp64, may be.
    """

    name: str
    rows: int
    difference: float
    relative: float
    stock_error: float | None
    error: float | None
    allowed: float

    @property
    def agrees(self) -> bool:
        """Whether the error is one that rounding explains; NaN never is."""
        return (self.difference if self.error is None else self.error) <= self.allowed


@dataclass(frozen=True)
class Agreement:
    """The result of one comparison.

    Attributes:
        implementation: the name of the stock attention.
        parts: prompt and decode steps.
        tokens: what stock chose, after the prompt and after every step.
        same_tokens: how many of them `mla_ops` chose too.
        report: what every layer ran.
    """

    implementation: str
    parts: tuple[Part, ...]
    tokens: tuple[int, ...]
    same_tokens: int
    report: PatchReport

    @property
    def agrees(self) -> bool:
        """Whether some layer ran `mla_ops` and all parts agree."""
        return self.report.fused > 0 and all(part.agrees for part in self.parts)


def compare_with_stock(model: PreTrainedModel, prompt: Tensor, steps: int) -> Agreement:
    """Run a model with its own attention, then with `mla_ops`.

    With fp64 the rule is that of the tests: the error may be twice that of stock in the same dtype,
    plus one rounding step of the largest logit.

    Args:
        model: with stock attention, in eval mode; left as it was.
        prompt: token ids `[1, S]`.
        steps: decode steps after it.
    """
    implementation = model.config._attn_implementation
    stock = _logits(model, prompt, steps, None)
    tokens = stock.argmax(-1)[-steps - 1 :]
    exact = None
    size = sum(parameter.numel() for parameter in model.parameters())
    if size <= _FP64_PARAMETERS and model.dtype != torch.float64:
        exact = _logits(in_dtype(copy.deepcopy(model), torch.float64), prompt, steps, tokens)
    mla_ops.hf.patch(model, strict=False)
    try:
        ours = _logits(model, prompt, steps, tokens)
        report = mla_ops.hf.report(model)
    finally:
        mla_ops.hf.unpatch(model)
    length = prompt.shape[1]
    parts = tuple(
        _part(name, rows, stock, ours, exact)
        for name, rows in (("prompt", slice(length)), ("decode", slice(length, None)))
        if stock[rows].numel()
    )
    same = int((ours.argmax(-1)[-steps - 1 :] == tokens).sum())
    return Agreement(implementation, parts, tuple(tokens.tolist()), same, report)


@torch.no_grad()
def _logits(model: PreTrainedModel, prompt: Tensor, steps: int, tokens: Tensor | None) -> Tensor:
    """Return logits `[S + steps, vocab]` of a prompt and of steps over given or greedy tokens."""
    # transformers calls it `cache` since 5.24.
    keyword = (
        "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    )
    past: dict[str, object] = {}
    rows, new = [], prompt
    for step in range(steps + 1):
        output = model(input_ids=new, use_cache=True, **past)
        past = {keyword: output[keyword]}
        rows.append(_head(model, output)[0])
        chosen = rows[-1][-1].argmax() if tokens is None else tokens[step]
        new = chosen.reshape(1, 1)
    return torch.cat(rows)


def _head(model: PreTrainedModel, output: object) -> Tensor:
    """Return logits; a language model that comes without a head is read through its embeddings."""
    logits: Tensor | None = getattr(output, "logits", None)
    if logits is None:
        hidden: Tensor = output.last_hidden_state  # type: ignore[attr-defined]
        logits = hidden @ model.get_input_embeddings().weight.T
    return logits


def _part(name: str, rows: slice, stock: Tensor, ours: Tensor, exact: Tensor | None) -> Part:
    one, two = stock[rows].double(), ours[rows].double()
    difference, largest = float((two - one).abs().max()), float(one.abs().max())
    if exact is None:
        return Part(
            name, len(one), difference, difference / largest, None, None,
            _RELATIVE[stock.dtype] * largest,
        )  # fmt: skip
    stock_error = float((one - exact[rows]).abs().max())
    error = float((two - exact[rows]).abs().max())
    allowed = 2 * stock_error + torch.finfo(stock.dtype).eps * largest
    return Part(name, len(one), difference, difference / largest, stock_error, error, allowed)
