"""Dense attention: what it computes, what it takes, and one op call."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_ops import ops
from mla_ops.reference import MLAOutput
from mla_ops.validation import check_mla_attention_types

__all__ = ["MLAOutput", "mla_attention"]


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
    workspace_tokens: int | None = None,
) -> MLAOutput:
    """Attend to a dense latent cache without expanding it.

    With `w_uk, w_uv` the per-head halves of `w_kv_b`:

        k[b, h, t] = [w_uk[h] @ kv_c[b, t], k_pe[b, t]]      v[b, h, t] = w_uv[h] @ kv_c[b, t]
        out[b, h, s] = sum_t softmax_t(softmax_scale * query[b, h, s] . k[b, h, t]) v[b, h, t]

    Keys and values are never built for the whole context: a few new tokens attend to the latents
    themselves (absorbed form), many expand them tile by tile. Scratch does not grow with T.

    Args:
        query: `[B, H, S, P+R]`; bf16, fp16, fp32 or fp64, any strides; rotary position already
            applied to the last R.
        kv_c: `[B, T, L]`, dtype and device of the query, any strides; RMS-normed latents. Rows that
            no query sees may hold anything, NaN included.
        k_pe: `[B, T, R]`, like `kv_c`; rotated shared key; R may be 0.
        w_kv_b: `[H*(P+V), L]`, like the query; the weight of `kv_b_proj`.
        softmax_scale: factor on the scores, before any absorption: the module's own `scaling`.
        attn_mask: broadcastable to `[B, H, S, T]`; bool (true: visible) or floating point (added to
            the scaled scores, -inf: invisible). It gets no gradient.
        kv_bounds: `[B, 2]` int32 on the query's device, (first valid key, end) of each request:
            padding and length without a mask, clamped to [0, T]. Keys outside are not read.
        is_causal: bottom-right aligned: query `s` sees key `t` when `t <= end - S + s`, where `end`
            is T or the request's from `kv_bounds`.
        sinks: `[H]`, floating point; logits that join each head's softmax denominator, like a key
            whose value is zero.
        workspace_tokens: most keys per tile, a bound on the scratch; None lets the backend choose.
            Any value >= 1 gives the same result.

    Returns:
        `out` `[B, H, S, V]` in the query's dtype and `lse` `[B, H, S]` in fp32 (fp64 for fp64),
        fresh and contiguous. A query that sees no key has output 0 and lse -inf (with sinks: lse
        is the sink's logit).

    Raises:
        InvalidInputError: an argument does not fit; the message says what was expected.
        UnsupportedInputError: no backend takes the dtype or device.

    Gradients of query, kv_c, k_pe, w_kv_b and sinks, of first order, through both results. Works
    under `torch.compile(fullgraph=True)`, `torch.func.vmap`, `torch.func.grad` and
    `functional_call`; `torch.func.grad` inside a compiled function is not supported by torch.

    Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.

    Example:
        >>> import torch, mla_ops
        >>> query = torch.randn(1, 4, 1, 16 + 8)  # one new token, 4 heads
        >>> kv_c, k_pe = torch.randn(1, 100, 32), torch.randn(1, 100, 8)  # 100 cached ones
        >>> w_kv_b = torch.randn(4 * (16 + 12), 32)
        >>> out, lse = mla_ops.mla_attention(query, kv_c, k_pe, w_kv_b, softmax_scale=24**-0.5)
        >>> tuple(out.shape), tuple(lse.shape)
        ((1, 4, 1, 12), (1, 4, 1))
    """
    tensors = query, kv_c, k_pe, w_kv_b, attn_mask, kv_bounds, sinks
    options = softmax_scale, is_causal, workspace_tokens
    if not torch.compiler.is_compiling():  # a graph has symbolic scalars; the op's fake rule checks
        check_mla_attention_types(*tensors, *options)
    return MLAOutput(*ops.mla_attention(*tensors, *options))
