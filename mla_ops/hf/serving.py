"""A small serving loop: arrivals, a token budget per step, one mixed batch per step.

It shows how the pieces fit: prompts are cut by the budget, decodes are mixed in, the batch is
ordered, planned once, and run in one forward. Sampling is greedy. It is for tests, accuracy runs
and reading, not for production.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mla_ops.errors import InvalidInputError
from mla_ops.hf.paged import PagedModelCache, paged
from mla_ops.metadata import MLAMetadata, build_metadata, reorder_batch

__all__ = ["Completion", "TokenBudgetRunner"]


@dataclass
class _Request:
    name: int
    tokens: list[int]
    prompt: int
    max_new_tokens: int
    scores_prompt: bool = False
    cached: int = 0
    blocks: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)

    @property
    def pending(self) -> int:
        """Tokens that are known but not in the cache."""
        return len(self.tokens) - self.cached

    def needed(self, count: int) -> range:
        """Which of its next `count` tokens' logits are needed."""
        if self.scores_prompt and self.cached < self.prompt:
            return range(count)
        return range(count - 1 if count == self.pending else count, count)


@dataclass(frozen=True)
class Completion:
    """A finished request.

    Attributes:
        tokens: what was generated.
        logits: `[len(tokens), vocab]`, the logits that each token was chosen from, fp32.
        prompt_logprobs: `[len(prompt) - 1]`, the log-probability of each prompt token after the
            first, fp32; None unless asked for.
    """

    tokens: tuple[int, ...]
    logits: Tensor
    prompt_logprobs: Tensor | None = None


class TokenBudgetRunner:
    """Generates greedily for many requests with at most `token_budget` tokens per forward.

    Example:
        >>> import torch
        >>> from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
        >>> import mla_ops.hf
        >>> config = DeepseekV3Config(
        ...     vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        ...     num_attention_heads=2, num_key_value_heads=2, q_lora_rank=None, kv_lora_rank=16,
        ...     qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, first_k_dense_replace=2,
        ... )
        >>> model = mla_ops.hf.patch(DeepseekV3ForCausalLM(config).eval())
        >>> runner = TokenBudgetRunner(model, token_budget=4, num_blocks=16, block_size=4)
        >>> first, second = runner.add([1, 2, 3, 4, 5, 6]), runner.add([7, 8])
        >>> done = runner.run()
        >>> sorted(done), len(done[first].tokens)
        ([0, 1], 8)
    """

    def __init__(
        self,
        model: Any,
        *,
        token_budget: int,
        num_blocks: int,
        block_size: int,
        workspace_tokens: int = 65536,
        cache_dtype: torch.dtype | None = None,
        kv_scale: Tensor | None = None,
    ) -> None:
        """Allocate the cache.

        Args:
            model: a patched transformers model for causal language modeling.
            token_budget: most new tokens per forward, at least 1.
            num_blocks: blocks of the cache, for all requests together.
            block_size: tokens per block.
            workspace_tokens: rows that context chunks have to fit.
            cache_dtype: of the cache; None for the model's.
            kv_scale: one element, for an fp8 cache.

        Raises:
            InvalidInputError: the budget is below 1.
        """
        if token_budget < 1:
            raise InvalidInputError(f"token_budget must be at least 1, got {token_budget}")
        self.model = model
        self.token_budget = token_budget
        self.workspace_tokens = workspace_tokens
        self.cache = PagedModelCache.allocate(
            model,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=cache_dtype,
            kv_scale=kv_scale,
        )
        self._free = list(range(num_blocks))
        self._active: list[_Request] = []
        self._count = 0

    def add(
        self, prompt: list[int], max_new_tokens: int = 8, *, prompt_logprobs: bool = False
    ) -> int:
        """Queue a request and return its number.

        Args:
            prompt: at least one token.
            max_new_tokens: at least 1.
            prompt_logprobs: whether the prompt itself is scored.

        Raises:
            InvalidInputError: the prompt is empty, or the cache cannot hold the request.
        """
        if not prompt or max_new_tokens < 1:
            raise InvalidInputError(
                "a request needs at least one prompt token and one new token, got "
                f"{len(prompt)} and {max_new_tokens}"
            )
        needed = -(-(len(prompt) + max_new_tokens) // self.cache.block_size)
        if needed > self.cache.num_blocks:
            raise InvalidInputError(
                f"the request needs {needed} blocks, the cache has {self.cache.num_blocks}"
            )
        self._active.append(
            _Request(self._count, list(prompt), len(prompt), max_new_tokens, prompt_logprobs)
        )
        self._count += 1
        return self._count - 1

    def run(self) -> dict[int, Completion]:
        """Run until every request is finished, and return them by number."""
        done: dict[int, Completion] = {}
        while self._active:
            done.update(self.step())
        return done

    def step(self) -> dict[int, Completion]:
        """Run one forward and return what it has finished."""
        batch = self._schedule()
        if not batch:
            raise InvalidInputError(
                f"{len(self._active)} requests wait and none fits: the cache has "
                f"{len(self._free)} free blocks of {self.cache.num_blocks}"
            )
        metadata, order = self._plan(batch)
        batch = [batch[i] for i in order]
        tokens = [t for r, n in batch for t in r.tokens[r.cached : r.cached + n]]
        positions = [p for r, n in batch for p in range(r.cached, r.cached + n)]
        starts = accumulate((n for _, n in batch), initial=0)
        rows = [s + i for s, (r, n) in zip(starts, batch, strict=False) for i in r.needed(n)]
        device = self.cache.layers[min(self.cache.layers)].device
        with torch.no_grad(), paged(self.cache, metadata):
            logits = self.model(
                input_ids=torch.tensor([tokens], device=device),
                position_ids=torch.tensor([positions], device=device),
                use_cache=False,
                logits_to_keep=torch.tensor(rows, dtype=torch.long, device=device),
            ).logits[0]
        return self._advance(batch, logits)

    def _schedule(self) -> list[tuple[_Request, int]]:
        """Choose requests and how many of their tokens run: decodes first, then prompts."""
        room, batch = self.token_budget, []
        ready = sorted(self._active, key=lambda r: r.pending > 1)
        for request in ready:
            count = min(request.pending, room)
            blocks = -(-(request.cached + count) // self.cache.block_size) - len(request.blocks)
            if count < 1 or blocks > len(self._free):
                continue
            request.blocks += [self._free.pop(0) for _ in range(blocks)]
            batch.append((request, count))
            room -= count
        return batch

    def _plan(self, batch: list[tuple[_Request, int]]) -> tuple[MLAMetadata, tuple[int, ...]]:
        lens = [count for _, count in batch]
        seqs = [request.cached + count for request, count in batch]
        order = reorder_batch(lens, seqs).permutation
        metadata = build_metadata(
            [lens[i] for i in order],
            [seqs[i] for i in order],
            [batch[i][0].blocks for i in order],
            block_size=self.cache.block_size,
            workspace_tokens=self.workspace_tokens,
            device=self.cache.layers[min(self.cache.layers)].device,
        )
        return metadata, order

    def _advance(self, batch: list[tuple[_Request, int]], logits: Tensor) -> dict[int, Completion]:
        done: dict[int, Completion] = {}
        sizes = [len(request.needed(count)) for request, count in batch]
        for (request, count), rows in zip(batch, logits.split(sizes), strict=True):
            if request.scores_prompt:
                request.logprobs.append(_logprobs(request, rows))
            request.cached += count
            if request.pending:
                continue
            request.logits.append(rows[-1].to(torch.float32, copy=True))
            request.tokens.append(int(rows[-1].argmax()))
            if len(request.tokens) - request.prompt == request.max_new_tokens:
                done[request.name] = _complete(request)
                self._free += request.blocks
                self._active.remove(request)
        return done


def _logprobs(request: _Request, rows: Tensor) -> Tensor:
    """Score the prompt tokens that follow the next ones to be cached."""
    targets = request.tokens[request.cached + 1 : request.prompt][: len(rows)]
    chosen = torch.tensor(targets, dtype=torch.long, device=rows.device)
    scores = rows[: len(targets)].float().log_softmax(-1)
    return scores.gather(-1, chosen[:, None])[:, 0]


def _complete(request: _Request) -> Completion:
    return Completion(
        tokens=tuple(request.tokens[request.prompt :]),
        logits=torch.stack(request.logits),
        prompt_logprobs=torch.cat(request.logprobs) if request.scores_prompt else None,
    )
