"""Ways to run a model, each giving the logits that two attention implementations must share.

A scenario takes a model and returns logits of valid positions, by name. It also checks that the
rows of padding are finite: they reach later layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from families.tools import attention_modules, forward_logits, sample_input_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

Scenario = Callable[["PreTrainedModel"], dict[str, Tensor]]

BATCH, LENGTH, MAX_LENGTH = 2, 11, 16
STEPS = (6, 3, 1, 1)  # prefill, several new tokens at once, two single ones


def dynamic_cache(model: PreTrainedModel) -> Cache:
    """An empty cache that grows."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def static_cache(model: PreTrainedModel, length: int = MAX_LENGTH) -> Cache:
    """An empty cache of a fixed length."""
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=length)


def in_steps(
    model: PreTrainedModel,
    ids: Tensor,
    cache: Cache,
    *,
    steps: tuple[int, ...] = STEPS,
    mask: Tensor | None = None,
    between: Callable[[Cache], None] | None = None,
    **kwargs: Any,
) -> Tensor:
    """Logits of a prefill and of the steps after it; `mask` and what is per token grows along.

    Args:
        model: the model.
        ids: `[B, S]`.
        cache: an empty cache.
        steps: new tokens of each forward.
        mask: `[B, S]`, or `[B or 1, 1 or H, S, S]`.
        between: called with the cache after every step.
        kwargs: tensors `[B, S]`, or what every forward gets as it is.
    """
    logits, begin = [], 0
    for step in steps:
        end = begin + step
        now = {
            name: value[:, begin:end] if isinstance(value, Tensor) else value
            for name, value in kwargs.items()
        }
        if mask is not None:
            now["attention_mask"] = (
                mask[:, :end] if mask.dim() == 2 else mask[:, :, begin:end, :end]
            )
        logits.append(forward_logits(model, ids[:, begin:end], cache=cache, **now))
        if between is not None:
            between(cache)
        begin = end
    return torch.cat(logits, dim=1)


def poison_unfilled(cache: Cache, value: float) -> None:
    """Overwrite the latents of every slot of a static cache that holds no token yet."""
    for layer in cache.layers:
        keys = getattr(layer, "keys", None)
        if isinstance(keys, Tensor) and keys.dim() == 4 and keys.shape[-2] > 1:
            filled = int(layer.get_seq_length())
            layer.keys[:, :, filled:] = value
            layer.values[:, :, filled:] = value


def positions(mask: Tensor) -> Tensor:
    """Position ids as `generate` makes them from a padding mask."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def valid(logits: Tensor, mask: Tensor) -> Tensor:
    """Logits of the tokens that count, `[N, vocab]`; those of the others must be finite."""
    assert logits.isfinite().all()
    return logits[mask.bool()]


def no_cache(model: PreTrainedModel) -> dict[str, Tensor]:
    """One forward of everything, and of one token."""
    ids = sample_input_ids(BATCH, LENGTH)
    return {"all": forward_logits(model, ids), "one token": forward_logits(model, ids[:, :1])}


def growing_cache(model: PreTrainedModel) -> dict[str, Tensor]:
    """Prefill, several new tokens, single tokens."""
    return {"steps": in_steps(model, sample_input_ids(BATCH, LENGTH), dynamic_cache(model))}


def fixed_cache(poison: float | None) -> Scenario:
    """The same with a static cache, fresh and used before; unfilled slots may be poisoned."""

    def between(cache: Cache) -> None:
        if poison is not None:
            poison_unfilled(cache, poison)

    def run(model: PreTrainedModel) -> dict[str, Tensor]:
        ids = sample_input_ids(BATCH, LENGTH)
        mask = torch.ones_like(ids)
        cache = static_cache(model)
        fresh = in_steps(model, ids, cache, between=between)
        cache.reset()
        between(cache)
        again = in_steps(model, ids.flip(1), cache, steps=(2, 8, 1), between=between)
        cache.reset()
        between(cache)
        masked = in_steps(model, ids, cache, mask=mask, between=between)
        full = in_steps(model, ids, static_cache(model, LENGTH), between=between)
        return {"fresh": fresh, "used before": again, "with a mask": masked, "filled": full}

    return run


def padded(mask: Tensor) -> Scenario:
    """Any padding mask, without a cache and with both."""

    def run(model: PreTrainedModel) -> dict[str, Tensor]:
        ids = sample_input_ids(*mask.shape)
        given = {"mask": mask, "position_ids": positions(mask)}
        whole = forward_logits(model, ids, attention_mask=mask, position_ids=given["position_ids"])
        return {
            "no cache": valid(whole, mask),
            "float": valid(forward_logits(model, ids, attention_mask=mask.float()), mask),
            "dynamic": valid(in_steps(model, ids, dynamic_cache(model), **given), mask),
            "static": valid(in_steps(model, ids, static_cache(model), **given), mask),
        }

    return run


def padding(*first_and_end: tuple[int, int]) -> Tensor:
    """A mask `[B, LENGTH]` that is 1 from each row's first token to its end."""
    slot = torch.arange(LENGTH)
    return torch.stack([(slot >= first) & (slot < end) for first, end in first_and_end]).long()


LEFT_PADDING = padding((3, LENGTH), (0, LENGTH), (LENGTH - 1, LENGTH))
RIGHT_PADDING = padding((0, LENGTH), (0, 7), (0, 1))
HOLES = padding((0, LENGTH), (2, LENGTH), (0, LENGTH))
HOLES[0, 4:6] = 0
HOLES[1, 7] = 0


def packed(model: PreTrainedModel) -> dict[str, Tensor]:
    """Several sequences in one row, told apart by their position ids."""
    ids = sample_input_ids(BATCH, LENGTH)
    position_ids = torch.tensor([[*range(4), *range(7)], [*range(6), *range(1), *range(4)]])
    return {
        "rows": forward_logits(model, ids, position_ids=position_ids),
        "one row for all": forward_logits(model, ids, position_ids=position_ids[:1]),
    }


def visible_pairs(heads: int = 1, batch: int = BATCH) -> Tensor:
    """A random bool mask `[B, heads, S, S]`, not causal, in which every query sees itself."""
    generator = torch.Generator().manual_seed(1)
    seen = torch.rand(batch, heads, LENGTH, LENGTH, generator=generator) > 0.4
    return seen | torch.eye(LENGTH, dtype=torch.bool)


def additive(seen: Tensor, dtype: torch.dtype, lowest: float | None = None) -> Tensor:
    """A float mask with random finite values where `seen`, the lowest elsewhere."""
    generator = torch.Generator().manual_seed(2)
    bias = torch.randn(seen.shape, generator=generator, dtype=torch.float64).to(dtype)
    return bias.masked_fill(~seen, torch.finfo(dtype).min if lowest is None else lowest)


def four_dimensional(mask_of: Callable[[PreTrainedModel], Tensor]) -> Scenario:
    """A mask of the user's own, without a cache and, where it fits every layer, with one."""

    def run(model: PreTrainedModel) -> dict[str, Tensor]:
        ids, mask = sample_input_ids(BATCH, LENGTH), mask_of(model)
        logits = {"no cache": forward_logits(model, ids, attention_mask=mask)}
        cache = dynamic_cache(model)
        if not any(cache.is_sliding):
            logits["dynamic"] = in_steps(model, ids, cache, mask=mask)
        return logits

    return run


def heads_of(model: PreTrainedModel) -> int:
    """The head count of a model whose attention layers all have the same."""
    (heads,) = {module.num_heads for _, module in attention_modules(model)}
    return heads


def bidirectional(model: PreTrainedModel) -> dict[str, Tensor]:
    """`is_causal=False`, without and with padding."""
    ids = sample_input_ids(BATCH, LENGTH)
    mask = padding((3, LENGTH), (0, 8))
    hidden = forward_logits(model, ids, attention_mask=mask, is_causal=False)
    return {
        "all": forward_logits(model, ids, is_causal=False),
        "padded": valid(hidden, mask),
    }
