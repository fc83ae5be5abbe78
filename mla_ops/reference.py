"""The oracle: multi-head latent attention in plain torch, in both of its forms.

Every backend, pass and patch is tested against this module. It is written to be read: it
materialises everything, runs in any dtype on any device, passes fp64 through, and autograd
differentiates it.

Sources: DeepSeek-V2 (arXiv:2405.04434, section 2.1) for the layer and for the absorption of the up
projections into query and output; the law of empty sets is this package's own.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mla_ops.dims import split_kv_b, stat_dtype

__all__ = [
    "MLAOutput",
    "attend",
    "merge_attn_states",
    "mla_attention",
    "paged_rows",
    "stored",
    "visible_keys",
]


class MLAOutput(NamedTuple):
    """What attention returns.

    Attributes:
        out: `[B, H, S, V]`, dtype of the query.
        lse: `[B, H, S]` fp32 (fp64 for fp64 inputs), natural logarithm of the softmax denominator.
    """

    out: Tensor
    lse: Tensor


def visible_keys(
    num_queries: int,
    num_keys: int,
    *,
    attn_mask: Tensor | None,
    kv_bounds: Tensor | None,
    is_causal: bool,
    device: torch.device,
) -> Tensor:
    """Return which query sees which key, bool and broadcastable to `[B, H, S, T]`.

    Causal is bottom-right aligned to the end of the keys: query `i` of `S` sees key `j` when
    `j <= end - S + i`.

    Args:
        num_queries: S.
        num_keys: T.
        attn_mask: bool (true: visible) or additive float (-inf: invisible), or None.
        kv_bounds: `[B, 2]` int (first valid key, end), or None for (0, T).
        is_causal: whether the causal rule holds.
        device: where to build the result.
    """
    key = torch.arange(num_keys, device=device)
    query = torch.arange(num_queries, device=device)[:, None]
    visible = torch.ones(1, 1, num_queries, num_keys, dtype=torch.bool, device=device)
    end: Tensor | int = num_keys
    if kv_bounds is not None:
        bounds = kv_bounds.to(torch.int64).clamp(0, num_keys)[:, :, None, None, None]
        first, end = bounds[:, 0], bounds[:, 1]
        visible = visible & (key >= first) & (key < end)
    if is_causal:
        visible = visible & (key <= end - num_queries + query)
    if attn_mask is not None:
        seen = attn_mask if attn_mask.dtype == torch.bool else attn_mask != float("-inf")
        visible = visible & seen
    return visible


def _scores(
    query: Tensor, kv_c: Tensor, k_pe: Tensor, w_uk: Tensor, form: Literal["expanded", "absorbed"]
) -> Tensor:
    """Return unscaled scores `[B, H, S, T]` in the inputs' dtype."""
    nope = w_uk.shape[1]
    if form == "expanded":
        k_nope = torch.einsum("btl,hpl->bhtp", kv_c, w_uk)
        k_rope = k_pe[:, None].expand(-1, w_uk.shape[0], -1, -1)
        return query @ torch.cat([k_nope, k_rope], dim=-1).transpose(-1, -2)
    q_latent = torch.einsum("bhsp,hpl->bhsl", query[..., :nope], w_uk)
    rows = torch.cat([kv_c, k_pe], dim=-1)[:, None]
    return torch.cat([q_latent, query[..., nope:]], dim=-1) @ rows.transpose(-1, -2)


def _probabilities(logits: Tensor) -> Tensor:
    """Return the softmax over the last dimension; what stands in rows of -inf does not matter.

    Not `exp(logits - lse)`: where a mask hides a whole row by the smallest number, lse is too large
    to hold the logarithm of the row's length.
    """
    blank = (logits == float("-inf")).all(dim=-1, keepdim=True)
    return torch.softmax(logits.masked_fill(blank, 0.0), dim=-1)


def mla_attention(
    query: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    w_kv_b: Tensor,
    *,
    softmax_scale: float,
    attn_mask: Tensor | None = None,
    kv_bounds: Tensor | None = None,
    is_causal: bool = False,
    sinks: Tensor | None = None,
    form: Literal["expanded", "absorbed"] = "expanded",
) -> MLAOutput:
    """Compute what `mla_ops.mla_attention` computes, with everything materialised.

    Arguments and results are those of the public function; nothing is validated. A row that sees no
    key gives output 0 and lse -inf (the sink's logit where there are sinks: a sink is a key whose
    value is zero). Keys that no query sees may hold anything, NaN included.

    Args:
        query: `[B, H, S, P+R]`.
        kv_c: `[B, T, L]`.
        k_pe: `[B, T, R]`.
        w_kv_b: `[H*(P+V), L]`.
        softmax_scale: factor on the scores before the softmax.
        attn_mask: bool or additive float, broadcastable to `[B, H, S, T]`.
        kv_bounds: `[B, 2]` int.
        is_causal: bottom-right aligned causal rule.
        sinks: `[H]` logits that join the denominator.
        form: `expanded` builds keys and values as the paper writes them; `absorbed` moves the up
            projections to the query and the output.

    Example:
        >>> import torch
        >>> g = torch.Generator().manual_seed(0)
        >>> q, kv_c, k_pe, w = (
        ...     torch.randn(s, generator=g, dtype=torch.float64)
        ...     for s in [(1, 3, 2, 24), (1, 5, 32), (1, 5, 8), (3 * 28, 32)]
        ... )
        >>> a = mla_attention(q, kv_c, k_pe, w, softmax_scale=0.2)
        >>> b = mla_attention(q, kv_c, k_pe, w, softmax_scale=0.2, form="absorbed")
        >>> torch.allclose(a.out, b.out), torch.allclose(a.lse, b.lse)
        (True, True)
    """
    num_queries, num_keys = query.shape[2], kv_c.shape[1]
    w_uk, w_uv = split_kv_b(w_kv_b, query.shape[1], query.shape[3] - k_pe.shape[2])
    visible = visible_keys(
        num_queries,
        num_keys,
        attn_mask=attn_mask,
        kv_bounds=kv_bounds,
        is_causal=is_causal,
        device=query.device,
    )
    # 0 * NaN is NaN: a key that nobody sees must not be read at all.
    used = visible.expand(query.shape[0], -1, -1, -1).any(dim=2).any(dim=1)[..., None]
    kv_c, k_pe = torch.where(used, kv_c, 0), torch.where(used, k_pe, 0)

    stats = stat_dtype(query.dtype)
    scores = _scores(query, kv_c, k_pe, w_uk, form).to(stats) * softmax_scale
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        scores = scores + attn_mask.to(stats)
    scores = scores.masked_fill(~visible, float("-inf"))
    logits = scores
    if sinks is not None:
        sink = sinks.to(stats)[None, :, None, None].expand(*scores.shape[:3], 1)
        logits = torch.cat([scores, sink], dim=-1)
    if logits.shape[-1] == 0:
        lse = scores.new_full(scores.shape[:3], float("-inf"))
    else:
        lse = torch.logsumexp(logits, dim=-1)
    empty = ~visible.any(dim=-1, keepdim=True)
    weights = _probabilities(logits)[..., :num_keys].masked_fill(empty, 0.0).to(query.dtype)
    if form == "expanded":
        out = weights @ torch.einsum("btl,hvl->bhtv", kv_c, w_uv)
    else:
        out = torch.einsum("bhsl,hvl->bhsv", weights @ kv_c[:, None], w_uv)
    return MLAOutput(out, lse)


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, softmax_scale: float, is_causal: bool
) -> MLAOutput:
    """Compute attention over keys and values that are given.

    Args:
        query: `[B, H, S, D]`.
        key: `[B, H, T, D]`.
        value: `[B, H, T, V]`.
        softmax_scale: factor on the scores.
        is_causal: bottom-right aligned causal rule.
    """
    visible = visible_keys(
        query.shape[2],
        key.shape[2],
        attn_mask=None,
        kv_bounds=None,
        is_causal=is_causal,
        device=query.device,
    )
    used = visible[0, 0].any(dim=0)[:, None]
    key, value = torch.where(used, key, 0), torch.where(used, value, 0)
    scores = (query @ key.transpose(-1, -2)).to(stat_dtype(query.dtype)) * softmax_scale
    scores = scores.masked_fill(~visible, float("-inf"))
    if scores.shape[-1] == 0:
        lse = scores.new_full(scores.shape[:3], float("-inf"))
    else:
        lse = torch.logsumexp(scores, dim=-1)
    weights = _probabilities(scores).masked_fill(~visible.any(dim=-1, keepdim=True), 0.0)
    return MLAOutput(weights.to(query.dtype) @ value, lse)


def merge_attn_states(
    prefix_out: Tensor, prefix_lse: Tensor, suffix_out: Tensor, suffix_lse: Tensor
) -> MLAOutput:
    """Merge two partial results by their log-sum-exp; both infinities mean empty.

    Args:
        prefix_out: `[T, H, V]`.
        prefix_lse: `[H, T]`.
        suffix_out: `[T, H, V]`.
        suffix_lse: `[H, T]`.
    """
    lse = torch.stack([prefix_lse, suffix_lse])
    lse = lse.masked_fill(lse == float("inf"), float("-inf"))
    total = torch.logsumexp(lse, dim=0)
    empty = total == float("-inf")
    weights = torch.softmax(lse.masked_fill(empty, 0.0), dim=0).masked_fill(empty, 0.0)
    weights = weights.transpose(1, 2)[..., None]
    values = torch.stack([prefix_out, suffix_out]).to(weights.dtype)
    merged = torch.where(weights > 0, values * weights, 0.0).sum(dim=0)
    return MLAOutput(merged.to(prefix_out.dtype), total)


def stored(rows: Tensor, dtype: torch.dtype, kv_scale: Tensor | None) -> Tensor:
    """Convert rows to what a cache of `dtype` holds: fp8 is divided by the scale and saturates.

    Args:
        rows: any shape.
        dtype: of the cache.
        kv_scale: one element, None for 1; used for fp8 only.
    """
    if dtype.itemsize > 1:
        return rows.to(dtype)
    limit = torch.finfo(dtype).max
    scaled = rows.float() if kv_scale is None else rows.float() / kv_scale.reshape(())
    return scaled.clamp(-limit, limit).to(dtype)


def paged_rows(
    kv_cache: Tensor,
    blocks: Tensor,
    start: int,
    stop: int,
    kv_scale: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return rows `[start, stop)` of one request: `[stop - start, L+R]`.

    Args:
        kv_cache: `[num_blocks, block_size, L+R]`.
        blocks: `[max_blocks]`, the request's block ids.
        start: first row.
        stop: end.
        kv_scale: one element, for an fp8 cache.
        dtype: of the result.
    """
    position = torch.arange(start, stop, device=kv_cache.device)
    block = blocks.long()[position // kv_cache.shape[1]]
    if kv_cache.dtype.itemsize > 1:
        return kv_cache[block, position % kv_cache.shape[1]].to(dtype)
    rows = kv_cache.view(torch.uint8)[block, position % kv_cache.shape[1]].view(kv_cache.dtype)
    return rows.to(dtype) if kv_scale is None else (rows.float() * kv_scale.reshape(())).to(dtype)
