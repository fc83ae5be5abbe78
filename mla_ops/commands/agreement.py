"""Whether a model says the same with `mla_ops` as with its own code.

A prompt is run, then some decode steps; then a batch of two, padded on the left, is run as it is
and by `generate`. Both sides see the same tokens, those that stock chooses, so that every row of
logits compares.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

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
    """The logits of one way to run the model.

    Attributes:
        name: `prompt`, `decode`, `padded` or `generate`.
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
        parts: prompt, decode steps, padded batch, and what `generate` saw; the last one only where
            the model generates.
        tokens: what stock chose, after the prompt and after every step.
        same_tokens: how many of them `mla_ops` chose too.
        generated: what stock generated for either row of the batch.
        same_generated: for how many of these tokens both sides have the largest logit in common.
        report: what every layer ran.
    """

    implementation: str
    parts: tuple[Part, ...]
    tokens: tuple[int, ...]
    same_tokens: int
    generated: tuple[tuple[int, ...], ...]
    same_generated: int
    report: PatchReport

    @property
    def agrees(self) -> bool:
        """Whether some layer ran `mla_ops` and all parts agree."""
        return self.report.fused > 0 and all(part.agrees for part in self.parts)


@dataclass(frozen=True)
class _Run:
    """What one side said.

    Logits are `[rows, vocab]` by part; `tokens` were chosen after the prompt and every step,
    `generated` `[2, steps]` is what `generate` went on with.
    """

    logits: dict[str, Tensor]
    tokens: Tensor
    generated: Tensor

    def chosen(self) -> Tensor:
        """Return the greedy tokens that `generate` saw, before anything processed the logits."""
        rows = self.logits.get("generate")
        return self.generated if rows is None else rows.argmax(-1)


class _Forced:
    """A logits processor that has `generate` choose given tokens `[B, steps]` behind a prompt."""

    def __init__(self, tokens: Tensor, prompt_length: int) -> None:
        self._tokens, self._begin = tokens, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        chosen = self._tokens[:, input_ids.shape[1] - self._begin, None]
        return torch.full_like(scores, float("-inf")).scatter(1, chosen, 0.0)


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
    stock = _run(model, prompt, steps, None)
    exact = None
    size = sum(parameter.numel() for parameter in model.parameters())
    if size <= _FP64_PARAMETERS and model.dtype != torch.float64:
        exact = _run(in_dtype(copy.deepcopy(model), torch.float64), prompt, steps, stock)
    mla_ops.hf.patch(model, strict=False)
    try:
        ours = _run(model, prompt, steps, stock)
        report = mla_ops.hf.report(model)
    finally:
        mla_ops.hf.unpatch(model)
    parts = tuple(
        _part(
            name,
            model.dtype,
            rows,
            ours.logits[name],
            None if exact is None else exact.logits[name],
        )
        for name, rows in stock.logits.items()
    )
    return Agreement(
        implementation,
        parts,
        tuple(stock.tokens.tolist()),
        int((ours.tokens == stock.tokens).sum()),
        tuple(map(tuple, stock.generated.tolist())),
        int((ours.chosen() == stock.chosen()).sum()),
        report,
    )


def _run(model: PreTrainedModel, prompt: Tensor, steps: int, stock: _Run | None) -> _Run:
    """Run all parts, over the tokens that stock chose or, for stock itself, over greedy ones."""
    length = prompt.shape[1]
    rows = _logits(model, prompt, steps, None if stock is None else stock.tokens)
    logits = {"prompt": rows[:length], "decode": rows[length:]}
    # The second row is the first half of the prompt, behind padding.
    batch, mask = prompt.repeat(2, 1), torch.ones_like(prompt).repeat(2, 1)
    padding = length // 2
    batch[1, padding:] = prompt[0, : length - padding]
    batch[1, :padding] = mask[1, :padding] = 0
    with torch.no_grad():
        output = model(input_ids=batch, attention_mask=mask, use_cache=False)
        logits["padded"] = _head(model, output)[mask.bool()]
    generated = batch.new_empty(2, 0)
    if steps and model.can_generate():
        given = None if stock is None else stock.generated
        logits["generate"], generated = _generate(model, batch, mask, steps, given)
    logits = {name: part for name, part in logits.items() if part.numel()}
    return _Run(logits, rows.argmax(-1)[-steps - 1 :], generated)


def _generate(
    model: PreTrainedModel, batch: Tensor, mask: Tensor, steps: int, tokens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return logits `[B * steps, vocab]` and tokens `[B, steps]` of `generate`, greedy or given."""
    forced = [] if tokens is None else [_Forced(tokens, batch.shape[1])]
    output = model.generate(
        batch,
        attention_mask=mask,
        logits_processor=LogitsProcessorList(forced),
        max_new_tokens=steps,
        do_sample=False,
        num_beams=1,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.stack(output.logits, dim=1).flatten(0, 1), output.sequences[:, batch.shape[1] :]


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


def _part(name: str, dtype: torch.dtype, stock: Tensor, ours: Tensor, exact: Tensor | None) -> Part:
    one, two = stock.double(), ours.double()
    difference, largest = float((two - one).abs().max()), float(one.abs().max())
    # `generate` gives fp32 logits, whatever the model computes in.
    dtype = max(dtype, stock.dtype, key=lambda each: torch.finfo(each).eps)
    if exact is None:
        return Part(
            name, len(one), difference, difference / largest, None, None,
            _RELATIVE[dtype] * largest,
        )  # fmt: skip
    stock_error = float((one - exact).abs().max())
    error = float((two - exact).abs().max())
    allowed = 2 * stock_error + torch.finfo(dtype).eps * largest
    return Part(name, len(one), difference, difference / largest, stock_error, error, allowed)
