"""Masks of transformers models, kept as small as they can be.

A plain causal mask with contiguous padding is handed on as `kv_bounds` (first valid key, end) in an
int32 tensor `[B, 1, 1, 2]`: transformers passes a 4-D tensor through to the attention function as
it is. Anything else becomes the bool mask that `sdpa` would get.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.utils import is_tracing

from mla_ops.reference import visible_keys

__all__ = ["as_bool_mask", "bounds_of", "mla_mask"]


def mla_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **rest: Any,
) -> Tensor | None:
    """Describe the mask of one forward; registered with `AttentionMaskInterface` as `mla_ops`.

    Args:
        batch_size: B.
        q_length: S, new tokens.
        kv_length: T, length of the keys; a static cache's full length.
        q_offset: tokens that the cache holds already; a 0-d tensor for static caches.
        kv_offset: position of the first key.
        attention_mask: bool `[B, seen + S]`, false where padded.
        device: where to build the result.
        rest: what transformers passes besides; `mask_function` decides whether the mask is plain.

    Returns:
        None for a plain causal mask that ends with the last key; int32 `[B, 1, 1, 2]` bounds for
        one with contiguous padding or with unfilled slots; else bool `[B, 1, S, T]`.
    """
    plain = (
        rest.get("mask_function", causal_mask_function) is causal_mask_function
        and rest.get("local_size") is None
        and kv_offset == 0
        # A sparse model's indexer reads the mask itself.
        and not hasattr(rest.get("config"), "index_topk")
    )
    end = q_offset + q_length
    first = _first_valid(attention_mask, end) if plain else None
    if first is None:
        arguments = {**rest, "allow_is_causal_skip": False}
        spelled_out: Tensor | None = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            attention_mask=attention_mask,
            device=device,
            **arguments,
        )
        return spelled_out
    if isinstance(first, int) and not isinstance(end, Tensor) and end == kv_length:
        return None
    bounds = torch.zeros(batch_size, 1, 1, 2, dtype=torch.int32, device=device)
    if isinstance(first, Tensor):
        bounds[:, 0, 0, 0] = first
    bounds[..., 1] = end
    return bounds


def _first_valid(attention_mask: Tensor | None, end: int | Tensor) -> Tensor | int | None:
    """Return each row's first valid key, 0 when nothing is padded, None when bounds cannot say it.

    Reading the mask costs one host sync per forward, as in transformers' own `sdpa` path; under
    tracing it cannot be read.
    """
    if attention_mask is None:
        return 0
    if is_tracing(attention_mask) or bool(attention_mask.shape[-1] != end):
        return None
    if bool(attention_mask.all()):
        return 0
    first = attention_mask.int().argmax(dim=-1)
    slot = torch.arange(attention_mask.shape[-1], device=attention_mask.device)
    left_padded = attention_mask == (slot >= first[:, None])
    return first if bool(left_padded.all()) else None


def bounds_of(attention_mask: Tensor | None) -> Tensor | None:
    """Return `kv_bounds` `[B, 2]` when the mask is such a description, None otherwise."""
    if attention_mask is None or attention_mask.dtype != torch.int32:
        return None
    # A mask of the user's own may have integers, too: the op says that it takes none.
    return attention_mask[:, 0, 0] if attention_mask.shape[1:] == (1, 1, 2) else None


def as_bool_mask(
    attention_mask: Tensor | None, query: Tensor, num_keys: int, is_causal: bool
) -> Tensor | None:
    """Spell a mask out as `sdpa` and the indexer's top-k need it.

    Args:
        attention_mask: None, bounds, or a bool or float mask, which stays as it is.
        query: `[B, H, S, D]`.
        num_keys: T.
        is_causal: whether None and bounds mean causal.

    Returns:
        bool `[B or 1, 1, S, T]`, the given float mask, or None where everything is visible.
    """
    bounds = bounds_of(attention_mask)
    if bounds is None and (attention_mask is not None or not is_causal):
        return attention_mask
    return visible_keys(
        query.shape[2],
        num_keys,
        attn_mask=None,
        kv_bounds=bounds,
        is_causal=is_causal,
        device=query.device,
    )
