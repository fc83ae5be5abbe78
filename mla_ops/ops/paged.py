"""The paged cache and ragged attention as ops: schemas, fake rules, declared mutation.

They serve inference: none has a gradient, and asking for one is refused by name. A graph writes a
cache with `update_kv_cache` before it reads it, so that the cache is changed in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mla_ops.dims import stat_dtype
from mla_ops.dispatch import PagedBatch, RaggedBatch
from mla_ops.errors import UnsupportedInputError
from mla_ops.ops.library import LIB, admission, needs_autograd
from mla_ops.validation_paged import (
    check_gather,
    check_merge,
    check_paged,
    check_prefill,
    check_update,
)

__all__ = [
    "gather_kv_cache",
    "merge_attn_states",
    "mla_chunked_prefill",
    "mla_decode",
    "mla_paged_attention",
    "mla_prefill",
    "update_kv_cache",
]

_CACHE = "Tensor kv_cache, Tensor block_table, Tensor seq_lens, Tensor? kv_scale"
_CHUNKS = (
    "Tensor cu_seqlens_q, Tensor? host, Tensor chunk_starts, Tensor chunk_cu_seqlens, "
    "int max_query_len, int workspace_tokens"
)
_NEW = "Tensor query, Tensor kv_c, Tensor k_pe, Tensor w_kv_b"
_MERGE = "Tensor prefix_out, Tensor prefix_lse, Tensor suffix_out, Tensor suffix_lse"

LIB.define(
    "update_kv_cache(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping, "
    "Tensor? kv_scale) -> ()"
)
LIB.define(
    "gather_kv_cache(Tensor kv_cache, Tensor block_table, Tensor cu_seqlens_k, Tensor seq_starts, "
    "Tensor(a!) workspace, Tensor? kv_scale) -> ()"
)
LIB.define(
    "mla_prefill(Tensor query, Tensor k_nope, Tensor k_pe, Tensor value, Tensor cu_seqlens_q, "
    "Tensor cu_seqlens_k, int max_seqlen_q, int max_seqlen_k, float softmax_scale, bool is_causal)"
    " -> (Tensor, Tensor)"
)
LIB.define(f"merge_attn_states({_MERGE}) -> (Tensor, Tensor)")
LIB.define(f"merge_attn_states_out({_MERGE}, Tensor(a!) out) -> Tensor")
LIB.define(
    f"mla_decode(Tensor query, Tensor w_kv_b, {_CACHE}, float softmax_scale) -> (Tensor, Tensor)"
)
LIB.define(
    f"mla_chunked_prefill({_NEW}, {_CACHE}, {_CHUNKS}, float softmax_scale) -> (Tensor, Tensor)"
)
LIB.define(
    f"mla_paged_attention({_NEW}, {_CACHE}, {_CHUNKS}, int num_decodes, int decode_query_len, "
    "float softmax_scale) -> (Tensor, Tensor)"
)


def _results(query: Tensor, value_width: int) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = query.shape
    lse = query.new_empty((heads, tokens), dtype=stat_dtype(query.dtype))
    return query.new_empty((tokens, heads, value_width)), lse


_admit_update = admission("update_kv_cache", check_update)
_admit_gather = admission("gather_kv_cache", check_gather, like=4)
_admit_prefill = admission("mla_prefill", check_prefill)
_admit_merge = admission("merge_attn_states", check_merge)
_admit_decode = admission("mla_decode", check_paged)
_admit_chunked = admission("mla_chunked_prefill", check_paged)
_admit_paged = admission("mla_paged_attention", check_paged)


def _update(*args: Any) -> None:
    _admit_update(*args).update_kv_cache(*args)


def _update_fake(*args: Any) -> None:
    check_update(*args)


def _gather(*args: Any) -> None:
    _admit_gather(*args).gather_kv_cache(*args)


def _gather_fake(*args: Any) -> None:
    check_gather(*args)


def _prefill(*args: Any) -> tuple[Tensor, Tensor]:
    return _admit_prefill(*args).mla_prefill(RaggedBatch(*args))


def _prefill_fake(*args: Any) -> tuple[Tensor, Tensor]:
    check_prefill(*args)
    return _results(args[0], args[3].shape[2])


def _merge(
    prefix_out: Tensor, prefix_lse: Tensor, suffix_out: Tensor, suffix_lse: Tensor
) -> tuple[Tensor, Tensor]:
    backend = _admit_merge(prefix_out, prefix_lse, suffix_out, suffix_lse)
    out = torch.empty_like(prefix_out, memory_format=torch.contiguous_format)
    return out, backend.merge_attn_states(prefix_out, prefix_lse, suffix_out, suffix_lse, out)


def _merge_fake(*args: Tensor) -> tuple[Tensor, Tensor]:
    check_merge(*args)
    return args[0].new_empty(args[0].shape), args[1].new_empty(args[1].shape)


def _merge_out(*args: Tensor) -> Tensor:
    return _admit_merge(*args).merge_attn_states(*args)


def _merge_out_fake(*args: Tensor) -> Tensor:
    check_merge(*args)
    return args[1].new_empty(args[1].shape)


def _decode_order(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Put the arguments of `mla_decode` in the order of `check_paged`."""
    return (args[0], None, None, *args[1:], None, 1)


def _decode(*args: Any) -> tuple[Tensor, Tensor]:
    backend = _admit_decode(*_decode_order(args))
    query, w_kv_b, kv_cache, block_table, seq_lens, kv_scale, softmax_scale = args
    tokens, requests = query.shape[0], seq_lens.shape[0]
    options = {"dtype": torch.int32, "device": query.device}
    if tokens:
        starts = torch.arange(0, tokens + 1, tokens // requests, **options)
    else:
        starts = torch.zeros(requests + 1, **options)
    cache = (kv_cache, block_table, seq_lens, starts, None, kv_scale)
    batch = PagedBatch(query, None, None, w_kv_b, *cache, requests, softmax_scale, None)
    return backend.mla_paged_attention(batch)


def _decode_fake(*args: Any) -> tuple[Tensor, Tensor]:
    return _results(args[0], check_paged(*_decode_order(args)))


def _ragged_order(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Put the arguments of the two ops over new tokens in the order of `check_paged`."""
    return (*args[:8], args[-1], args[8], args[13])


def _paged_batch(args: tuple[Any, ...], num_decodes: int) -> PagedBatch:
    query, kv_c, k_pe, w_kv_b = args[:4]
    kv_cache, block_table, seq_lens, kv_scale, cu_seqlens_q, host = args[4:10]
    cache = (kv_cache, block_table, seq_lens, cu_seqlens_q, host, kv_scale)
    return PagedBatch(query, kv_c, k_pe, w_kv_b, *cache, num_decodes, args[-1], args[13])


def _chunked(*args: Any) -> tuple[Tensor, Tensor]:
    return _admit_chunked(*_ragged_order(args)).mla_paged_attention(_paged_batch(args, 0))


def _paged(*args: Any) -> tuple[Tensor, Tensor]:
    return _admit_paged(*_ragged_order(args)).mla_paged_attention(_paged_batch(args, args[14]))


def _ragged_fake(*args: Any) -> tuple[Tensor, Tensor]:
    return _results(args[0], check_paged(*_ragged_order(args)))


def _refuse_gradient(name: str) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise _no_gradient(name)

    return backward


def _no_gradient(name: str) -> UnsupportedInputError:
    return UnsupportedInputError(
        f"a gradient of {name.removesuffix('_out')}",
        {"every backend": ["it serves inference; mla_attention has gradients"]},
    )


_OPS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "update_kv_cache": (_update, _update_fake),
    "gather_kv_cache": (_gather, _gather_fake),
    "mla_prefill": (_prefill, _prefill_fake),
    "merge_attn_states": (_merge, _merge_fake),
    "merge_attn_states_out": (_merge_out, _merge_out_fake),
    "mla_decode": (_decode, _decode_fake),
    "mla_chunked_prefill": (_chunked, _ragged_fake),
    "mla_paged_attention": (_paged, _ragged_fake),
}
_MUTATING = ("update_kv_cache", "gather_kv_cache", "merge_attn_states_out")

for _name, (_body, _fake) in _OPS.items():
    LIB.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mla_ops::{_name}", _fake, lib=LIB)
    if _name not in _MUTATING:
        torch.library.register_autograd(f"mla_ops::{_name}", _refuse_gradient(_name), lib=LIB)


def _caller(name: str) -> Callable[..., Any]:
    """Return what calls an op; without a gradient in sight, below its autograd kernel."""
    op = getattr(torch.ops.mla_ops, name).default
    # A cache keeps no graph: what is written into it, or gathered from it, is detached.
    detached = name in ("update_kv_cache", "gather_kv_cache")

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            return op(*args)
        if not detached and needs_autograd(args):
            if name in _MUTATING:
                raise _no_gradient(name)
            return op(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    call.__name__ = name
    call.__doc__ = f"Call `torch.ops.mla_ops.{name}` with the arguments of its schema."
    return call


update_kv_cache = _caller("update_kv_cache")
gather_kv_cache = _caller("gather_kv_cache")
mla_prefill = _caller("mla_prefill")
mla_decode = _caller("mla_decode")
mla_chunked_prefill = _caller("mla_chunked_prefill")
mla_paged_attention = _caller("mla_paged_attention")
_merge_fresh = _caller("merge_attn_states")
_merge_into = _caller("merge_attn_states_out")


def merge_attn_states(*args: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Call the op that fits: a fresh result, or one written into `out`.

    Args:
        args: prefix_out, prefix_lse, suffix_out, suffix_lse.
        out: where to write, or None.
    """
    if out is None:
        merged, lse = _merge_fresh(*args)
        return merged, lse
    return out, _merge_into(*args, out)
