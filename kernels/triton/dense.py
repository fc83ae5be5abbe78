"""Dense attention: the absorbed form for few queries, the expanded one, in chunks, for many."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_ops import env
from mla_ops.dims import MLADims
from mla_ops.dispatch import AttentionOptions
from mla_ops.kernels.triton.absorbed import DENSE, Keys, Queries, Rules, attend_absorbed
from mla_ops.kernels.triton.expanded import Expanded, State, attend_expanded
from mla_ops.kernels.triton.launch import unit
from mla_ops.kernels.triton.project import halves, project, widths

__all__ = ["attention", "chunk_of_keys", "rules_of"]

_CHUNK_TOKENS = 16_384


def attention(
    query: Tensor, kv_c: Tensor, k_pe: Tensor, w_kv_b: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Attend to a batch of latents.

    Args:
        query: `[B, H, S, P+R]`.
        kv_c: `[B, T, L]`.
        k_pe: `[B, T, R]`.
        w_kv_b: `[H*(P+V), L]`.
        options: the others.

    Returns:
        `out` `[B, H, S, V]` and `lse` `[B, H, S]` fp32.
    """
    _, heads, queries, width = query.shape
    dims = widths(heads, kv_c.shape[2], k_pe.shape[2], width, w_kv_b.shape[0])
    query, kv_c, k_pe = unit(query), unit(kv_c), unit(k_pe)
    out = query.new_empty(*query.shape[:3], dims.v_head_dim)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    if not lse.numel():
        return out, lse
    rules = rules_of(options)
    form = _expanded if dims.should_expand(queries, kv_c.shape[1]) else _absorbed
    form(query, kv_c, k_pe, w_kv_b, dims, rules, options.workspace_tokens, out, lse)
    return out, lse


def chunk_of_keys(batch: int, workspace_tokens: int | None) -> int:
    """Return how many keys of each request are expanded at once.

    Args:
        batch: B.
        workspace_tokens: what the caller grants to all requests together, None for the default.
    """
    return max(1, (workspace_tokens or _CHUNK_TOKENS) // max(1, batch))


def rules_of(options: AttentionOptions) -> Rules:
    """Return who sees whom, as the kernels take it.

    Args:
        options: of the call.
    """
    mask, bounds, sinks = options.attn_mask, options.kv_bounds, options.sinks
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    return Rules(
        options.softmax_scale,
        mask,
        None if bounds is None else bounds.contiguous(),
        None if sinks is None else sinks.contiguous(),
        options.is_causal,
        env.batch_invariant(),
    )


def _absorbed(
    query: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    w_kv_b: Tensor,
    dims: MLADims,
    rules: Rules,
    workspace_tokens: int | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Walk the latents as they lie; nothing but the queries is projected."""
    del workspace_tokens  # no scratch depends on the keys
    batch, heads, queries, _ = query.shape
    nope, tokens, width = dims.qk_nope_head_dim, batch * queries, dims.v_head_dim
    of_batch, of_head, of_query, _ = query.stride()
    w_uk, w_uv = halves(w_kv_b, dims)
    one_row = batch == 1 or queries == 1  # the tokens of a head are evenly spaced
    if one_row:
        of_token = of_query if batch == 1 else of_batch
        by_head = query.as_strided((heads, tokens, nope), (of_head, of_token, 1))
        value = out.as_strided(
            (heads, tokens, width),
            (queries * width, width if batch == 1 else heads * width, 1),
        )
    else:
        by_head = query.transpose(0, 1)[..., :nope].reshape(heads, tokens, nope)
        value = query.new_empty(heads, tokens, width)
    latent = query.new_empty(heads, tokens, dims.kv_lora_rank)
    project(by_head, w_uk, latent, rules.invariant)
    result = torch.empty_like(latent)
    attend_absorbed(
        Queries(latent, query, nope, (of_batch, of_head, of_query), batch, queries),
        [Keys(DENSE.value, kv_c, k_pe, kv_c.shape[1])],
        rules,
        result,
        lse,
    )
    project(result, w_uv, value, rules.invariant)
    if not one_row:
        out.copy_(value.view(heads, batch, queries, -1).transpose(0, 1))


def _expanded(
    query: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    w_kv_b: Tensor,
    dims: MLADims,
    rules: Rules,
    workspace_tokens: int | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Project some keys at a time; the running softmax goes from launch to launch."""
    batch, heads, queries, _ = query.shape
    keys = kv_c.shape[1]
    chunk = chunk_of_keys(batch, workspace_tokens)
    nope, width = dims.qk_nope_head_dim, dims.v_head_dim
    state = State.empty(heads, batch * queries, width, query) if keys > chunk else None
    for begin in range(0, max(keys, 1), chunk):
        part = slice(begin, min(begin + chunk, keys))
        expanded = torch.matmul(kv_c[:, part], w_kv_b.t()).view(batch, -1, heads, nope + width)
        given = Expanded(
            query,
            expanded[..., :nope],
            k_pe[:, part],
            expanded[..., nope:],
            None,
            None,
            key_begin=begin,
            num_keys=keys,
        )
        last = part.stop == keys
        attend_expanded(given, rules, out if last else None, lse if last else None, state)
