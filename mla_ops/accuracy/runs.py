"""Answering the items: with `generate`, or over the paged cache with a token budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mla_ops.accuracy.tasks import Item
from mla_ops.demo.measure import OURS, STOCK, attention

if TYPE_CHECKING:
    from transformers import DeepseekV3ForCausalLM

__all__ = ["Outcome", "Run", "answer", "choose", "standard_runs"]

BLOCK_SIZE = 16
CACHE_TOKENS = 8192
BATCH_TOKENS = 6144
CHUNKED_BUDGET, CHUNKED_WORKSPACE = 256, 64
WORKSPACE = 65536
FULL_BUDGET, LARGEST_STRIDE = 64, 20
"""A forward costs much the same for one token as for some dozens: rows with budgets below
`FULL_BUDGET` run only every k-th item, so that they do not take an hour."""


@dataclass(frozen=True)
class Run:
    """One way to run the model.

    Attributes:
        name: what the table calls it.
        side: `stock` or `mla_ops`.
        token_budget: most tokens per forward; None for `generate`, which cuts nothing.
        workspace_tokens: rows that a chunk of context has to fit.
        stride: only every so many-th item of a task is run.
    """

    name: str
    side: str
    token_budget: int | None = None
    workspace_tokens: int = WORKSPACE
    stride: int = 1


@dataclass(frozen=True)
class Outcome:
    """What a run made of one item.

    Attributes:
        tokens: the answer, up to and with the end token; empty where the prompt was scored.
        logprobs: of the prompt's tokens after the first; empty where an answer was generated.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()


def standard_runs(token_budgets: Sequence[int], *, all_items: bool = False) -> list[Run]:
    """Return the runs of a table, stock first.

    Args:
        token_budgets: one run for each.
        all_items: let small budgets run all items too.
    """
    budgets = [
        Run(
            f"mla_ops, token budget {budget}",
            OURS,
            budget,
            stride=1 if all_items else min(LARGEST_STRIDE, -(-FULL_BUDGET // budget)),
        )
        for budget in token_budgets
    ]
    chunked = Run("mla_ops, chunked prefill on", OURS, CHUNKED_BUDGET, CHUNKED_WORKSPACE)
    return [
        Run("stock (sdpa)", STOCK),
        Run("mla_ops, chunked prefill off", OURS),
        chunked,
        *budgets,
    ]


def choose(items: Sequence[Item], run: Run) -> list[int]:
    """Return the indices of the items that a run answers.

    Args:
        items: all of them.
        run: the run.
    """
    seen: dict[str, int] = {}
    chosen = []
    for index, item in enumerate(items):
        position = seen.get(item.task, 0)
        seen[item.task] = position + 1
        if position % run.stride == 0:
            chosen.append(index)
    return chosen


def answer(
    model: DeepseekV3ForCausalLM,
    items: Sequence[Item],
    run: Run,
    on_item: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """Answer items, in their order.

    Args:
        model: the model, not patched.
        items: the questions.
        run: how.
        on_item: called when an item is done.
    """
    outcomes: dict[int, Outcome] = {}
    with attention(model, run.side), torch.inference_mode():
        steps = _generate(model, items) if run.token_budget is None else _serve(model, items, run)
        for index, outcome in steps:
            outcomes[index] = outcome
            on_item()
    return [outcomes[index] for index in range(len(items))]


def _generate(model: DeepseekV3ForCausalLM, items: Sequence[Item]) -> Iterator[tuple[int, Outcome]]:
    device = model.device
    for index, item in enumerate(items):
        if not item.new_tokens:
            ids = torch.tensor([item.prompt], device=device)
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            scores = logits.float().log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            yield index, Outcome(logprobs=tuple(scores.tolist()))
    for batch in _batches(items):
        longest = max(len(items[index].prompt) for index in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long, device=device)
        mask = torch.zeros_like(ids)
        for row, index in enumerate(batch):
            prompt = items[index].prompt
            ids[row, longest - len(prompt) :] = torch.tensor(prompt, device=device)
            mask[row, longest - len(prompt) :] = 1
        output = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max(items[index].new_tokens for index in batch),
            pad_token_id=0,
        )
        for index, row in zip(batch, output[:, longest:], strict=True):
            yield index, _cut(model, row, items[index])


def _batches(items: Sequence[Item]) -> Iterator[list[int]]:
    """Group answers of the same task and about the same length."""
    waiting = [index for index, item in enumerate(items) if item.new_tokens]
    waiting.sort(key=lambda index: (items[index].task, len(items[index].prompt)))
    batch: list[int] = []
    for index in waiting:
        item = items[index]
        room = (len(batch) + 1) * (len(item.prompt) + item.new_tokens) <= BATCH_TOKENS
        if batch and (not room or items[batch[0]].task != item.task):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _serve(
    model: DeepseekV3ForCausalLM, items: Sequence[Item], run: Run
) -> Iterator[tuple[int, Outcome]]:
    from mla_ops.hf.serving import TokenBudgetRunner

    blocks = [-(-(len(item.prompt) + max(1, item.new_tokens)) // BLOCK_SIZE) for item in items]
    runner = TokenBudgetRunner(
        model,
        token_budget=run.token_budget or 1,
        num_blocks=max([CACHE_TOKENS // BLOCK_SIZE, *blocks]),
        block_size=BLOCK_SIZE,
        workspace_tokens=run.workspace_tokens,
    )
    waiting, running = deque(range(len(items))), dict[int, int]()
    free = runner.cache.num_blocks
    while waiting or running:
        # A request waits until the cache can hold all of it: none stops half-way for lack of room.
        while waiting and blocks[waiting[0]] <= free:
            index = waiting.popleft()
            item = items[index]
            request = runner.add(
                list(item.prompt), max(1, item.new_tokens), prompt_logprobs=not item.new_tokens
            )
            running[request] = index
            free -= blocks[index]
        for request, completion in runner.step().items():
            index = running.pop(request)
            free += blocks[index]
            if completion.prompt_logprobs is not None:
                yield index, Outcome(logprobs=tuple(completion.prompt_logprobs.tolist()))
            else:
                yield index, _cut(model, torch.tensor(completion.tokens), items[index])


def _cut(model: DeepseekV3ForCausalLM, row: Tensor, item: Item) -> Outcome:
    """Keep an answer up to its end token."""
    tokens = row[: item.new_tokens].tolist()
    end = model.generation_config.eos_token_id
    ends = {end} if isinstance(end, int) else set(end or ())
    for position, token in enumerate(tokens):
        if token in ends:
            return Outcome(tokens=tuple(tokens[: position + 1]))
    return Outcome(tokens=tuple(tokens))
