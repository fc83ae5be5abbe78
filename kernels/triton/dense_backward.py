"""The backward of dense attention: keys are expanded again, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_ops.dispatch import AttentionOptions
from mla_ops.kernels.triton.absorbed import Rules
from mla_ops.kernels.triton.backward_keys import mla_backward_keys_kernel, mla_backward_rows_kernel
from mla_ops.kernels.triton.backward_queries import mla_backward_queries_kernel
from mla_ops.kernels.triton.configs import (
    Config,
    Expansion,
    arch_of,
    backward_configs,
    padded,
    run_chosen,
)
from mla_ops.kernels.triton.dense import chunk_of_keys, rules_of
from mla_ops.kernels.triton.expanded import Expanded, width_constants
from mla_ops.kernels.triton.launch import cdiv, launch, unit

__all__ = ["attention_backward"]

_ROWS = 16


def attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    w_kv_b: Tensor,
    out: Tensor,
    lse: Tensor,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Pull gradients back through attention to a batch of latents.

    What it holds beside its results is a chunk of keys and values, their gradients, an fp32 rotary
    gradient for every head of that chunk, and two numbers per query row; with more than one chunk
    also the gradients of query and weight in fp32. None of it grows with the context.

    Args:
        grad_out: `[B, H, S, V]`.
        grad_lse: `[B, H, S]`, or None for zeros.
        query: `[B, H, S, P+R]`.
        kv_c: `[B, T, L]`.
        k_pe: `[B, T, R]`.
        w_kv_b: `[H*(P+V), L]`.
        out: `[B, H, S, V]`, as the forward returned it.
        lse: `[B, H, S]` fp32, likewise.
        options: those of the forward.

    Returns:
        Gradients of `query`, `kv_c`, `k_pe`, `w_kv_b` and of the sinks, empty without sinks.
    """
    rules = rules_of(options)
    grads = [t.new_empty(t.shape) for t in (query, kv_c, k_pe, w_kv_b)]
    stats = _row_stats(unit(out), unit(grad_out), lse.contiguous(), grad_lse, rules)
    if query.numel() and kv_c.shape[1]:
        _walk_chunks(
            unit(query),
            kv_c,
            unit(k_pe),
            w_kv_b,
            unit(grad_out),
            stats,
            rules,
            options.workspace_tokens,
            grads,
        )
    else:
        for grad in grads:
            grad.zero_()
    grad_sinks = query.new_empty(0)
    if rules.sinks is not None:
        shares = torch.exp(rules.sinks.float()[:, None] - lse)
        shares.masked_fill_(lse == float("-inf"), 0.0)
        grad_sinks = -(shares * stats[1]).sum(dim=(0, 2)).to(rules.sinks.dtype)
    dq, dc, dp, dw = grads
    return dq, dc, dp, dw, grad_sinks


def _row_stats(
    out: Tensor, grad_out: Tensor, lse: Tensor, grad_lse: Tensor | None, rules: Rules
) -> Tensor:
    """Return `[2, B, H, S]`: the lse in the unit of the exponents, and `delta`."""
    batch, heads, queries, width = out.shape
    stats = torch.empty((2, *lse.shape), dtype=torch.float32, device=lse.device)
    launch(
        mla_backward_rows_kernel,
        (cdiv(batch * heads * queries, _ROWS),),
        out,
        out,
        grad_out,
        lse,
        lse if grad_lse is None else grad_lse.contiguous(),
        stats,
        batch * heads * queries,
        queries,
        *out.stride()[:3],
        *grad_out.stride()[:3],
        H=heads,
        V=width,
        NATURAL=rules.is_natural,
        GRAD_LSE=grad_lse is not None,
        ROWS=_ROWS,
        BLOCK_V=padded(width),
        num_warps=4,
    )
    return stats


class _Pull(NamedTuple):
    """What both large kernels read.

    Attributes:
        given: queries, and the keys and values of one chunk.
        grad_out: `[B, H, S, V]`.
        stats: `[2, B, H, S]`.
        rules: who sees whom.
    """

    given: Expanded
    grad_out: Tensor
    stats: Tensor
    rules: Rules


def _walk_chunks(
    query: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    w_kv_b: Tensor,
    grad_out: Tensor,
    stats: Tensor,
    rules: Rules,
    workspace_tokens: int | None,
    grads: list[Tensor],
) -> None:
    """Write the gradients of `grads`: query, latents, rotary keys and weight."""
    (batch, heads, _, width), (_, keys, _) = query.shape, kv_c.shape
    rope, pair = k_pe.shape[2], w_kv_b.shape[0] // heads
    grad_q, grad_c, grad_pe, grad_w = grads
    chunk = chunk_of_keys(batch, workspace_tokens)
    sums = None  # of the chunks, where there are several
    if keys > chunk:
        sums = [torch.zeros_like(t, dtype=torch.float32) for t in (grad_q, grad_w)]
    for begin in range(0, keys, chunk):
        part = slice(begin, min(begin + chunk, keys))
        latent, k_rope = kv_c[:, part], k_pe[:, part]
        if rules.mask is not None or rules.bounds is not None:
            # A key that nobody sees may hold anything, and its weight of 0 would not make it 0.
            latent, k_rope = (t.nan_to_num(0.0, 0.0, 0.0) for t in (latent, k_rope))
        expanded = torch.matmul(latent, w_kv_b.t()).view(batch, -1, heads, pair)
        key, value = expanded.split([width - rope, pair - width + rope], dim=-1)
        given = Expanded(query, key, k_rope, value, None, None, key_begin=begin, num_keys=keys)
        pull = _Pull(given, grad_out, stats, rules)
        grad_pair = torch.empty_like(expanded)
        partial = torch.empty((*expanded.shape[:3], rope), dtype=torch.float32, device=query.device)
        _pull_to_keys(pull, grad_pair, partial)
        grad_pe[:, part] = partial.sum(dim=2)
        flat = grad_pair.flatten(2)
        grad_c[:, part] = torch.matmul(flat, w_kv_b)
        factors = flat.flatten(0, 1).t(), latent.flatten(0, 1)
        if sums is None:
            torch.mm(*factors, out=grad_w)
        else:
            sums[1] += torch.mm(*factors)
        _pull_to_queries(pull, grad_q, None if sums is None else sums[0], part.stop == keys)
    if sums is not None:
        grad_w.copy_(sums[1])


def _pull_to_keys(pull: _Pull, grad_pair: Tensor, grad_rope: Tensor) -> None:
    """Write the gradients of a chunk's keys and values, and of each head's rotary keys."""
    requests, count = pull.given.key.shape[:2]

    def run(config: Config) -> None:
        blocks = requests * cdiv(count, config.block_n)
        _launch(mla_backward_keys_kernel, blocks, pull, (grad_pair, grad_rope), config)

    _run_chosen("backward_keys", pull, run, True)


def _pull_to_queries(pull: _Pull, grad_q: Tensor, acc: Tensor | None, last: bool) -> None:
    """Add a chunk's part to the gradient of the queries; write it behind the last one."""
    requests, _, queries, _ = pull.given.query.shape
    targets = grad_q, grad_q if acc is None else acc
    flags = {"CONTINUES": acc is not None, "FINAL": last}

    def run(config: Config) -> None:
        blocks = requests * cdiv(queries, config.block_m)
        _launch(mla_backward_queries_kernel, blocks, pull, targets, config, **flags)

    _run_chosen("backward_queries", pull, run, acc is None)


def _run_chosen(kind: str, pull: _Pull, run: Callable[[Config], None], repeatable: bool) -> None:
    query, key, rope, value = pull.given[:4]
    rules, arch = pull.rules, arch_of(query)
    widths = key.shape[-1], rope.shape[-1], value.shape[-1]
    sizes = Expansion(*widths, query.element_size(), rules.mask is not None)
    offered = backward_configs(sizes, arch)

    def name() -> object:
        return sizes, query.shape[1], query.dtype, arch, rules.is_causal, rules.mask_kind

    run_chosen(kind, name, offered, run, repeatable)


def _launch(
    kernel: Any,
    blocks: int,
    pull: _Pull,
    targets: tuple[Tensor, Tensor],
    config: Config,
    **flags: bool,
) -> None:
    given, grad_out, stats, rules = pull
    query, key, rope, value = given[:4]
    requests, heads, queries, _ = query.shape
    launch(
        kernel,
        (blocks, heads),
        query,
        query,
        key,
        rope,
        value,
        grad_out,
        stats,
        *targets,
        query if rules.mask is None else rules.mask,
        query if rules.bounds is None else rules.bounds,
        rules.scale,
        rules.softmax_scale,
        requests * heads * queries,
        queries,
        given.num_keys,
        given.key_begin,
        given.key_begin + key.shape[1],
        *query.stride()[:3],
        *given.key_strides(),
        *grad_out.stride()[:3],
        *rules.mask_strides(),
        **width_constants(heads, key.shape[-1], rope.shape[-1], value.shape[-1]),
        CAUSAL=rules.is_causal,
        MASK=rules.mask_kind,
        BOUNDS=rules.bounds is not None,
        **flags,
        **config.options(),
    )
