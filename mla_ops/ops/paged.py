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
from mla_ops.dispatch import Backend, Call, PagedBatch, select
from mla_ops.errors import UnsupportedInputError
from mla_ops.ops.library import LIB, needs_autograd
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


def _backend(op: str, like: Tensor) -> Backend:
    return select(Call(op, like.device.type, like.dtype))


def _results(query: Tensor, value_width: int) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = query.shape
    lse = query.new_empty((heads, tokens), dtype=stat_dtype(query.dtype))
    return query.new_empty((tokens, heads, value_width)), lse


def _update(
    kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: Tensor | None
) -> None:
    check_update(kv_c, k_pe, kv_cache, slot_mapping, kv_scale)
    backend = _backend("update_kv_cache", kv_c)
    backend.update_kv_cache(kv_c, k_pe, kv_cache, slot_mapping, kv_scale)


def _update_fake(*args: Any) -> None:
    check_update(*args)


def _gather(
    kv_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_k: Tensor,
    seq_starts: Tensor,
    workspace: Tensor,
    kv_scale: Tensor | None,
) -> None:
    check_gather(kv_cache, block_table, cu_seqlens_k, seq_starts, workspace, kv_scale)
    backend = _backend("gather_kv_cache", workspace)
    backend.gather_kv_cache(kv_cache, block_table, cu_seqlens_k, seq_starts, workspace, kv_scale)


def _gather_fake(*args: Any) -> None:
    check_gather(*args)


def _prefill(*args: Any) -> tuple[Tensor, Tensor]:
    check_prefill(*args)
    return _backend("mla_prefill", args[0]).mla_prefill(*args)


def _prefill_fake(*args: Any) -> tuple[Tensor, Tensor]:
    check_prefill(*args)
    return _results(args[0], args[3].shape[2])


def _merge(*args: Tensor) -> tuple[Tensor, Tensor]:
    check_merge(*args)
    prefix_out, prefix_lse, suffix_out, suffix_lse = args
    out = prefix_out.new_empty(prefix_out.shape)
    backend = _backend("merge_attn_states", prefix_out)
    return out, backend.merge_attn_states(prefix_out, prefix_lse, suffix_out, suffix_lse, out)


def _merge_fake(*args: Tensor) -> tuple[Tensor, Tensor]:
    check_merge(*args)
    return args[0].new_empty(args[0].shape), args[1].new_empty(args[1].shape)


def _merge_out(*args: Tensor) -> Tensor:
    check_merge(*args)
    return _backend("merge_attn_states", args[0]).merge_attn_states(*args)


def _merge_out_fake(*args: Tensor) -> Tensor:
    check_merge(*args)
    return args[1].new_empty(args[1].shape)


def _decode(
    query: Tensor,
    w_kv_b: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    kv_scale: Tensor | None,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    check_paged(query, None, None, w_kv_b, kv_cache, block_table, seq_lens, kv_scale, softmax_scale)
    requests = seq_lens.shape[0]
    length = query.shape[0] // requests if requests else 0
    starts = torch.arange(requests + 1, dtype=torch.int32, device=query.device) * length
    batch = PagedBatch(kv_cache, block_table, seq_lens, starts, None, kv_scale, softmax_scale, None)
    return _backend("mla_decode", query).mla_decode(query, w_kv_b, batch)


def _decode_fake(
    query: Tensor,
    w_kv_b: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    kv_scale: Tensor | None,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    width = check_paged(
        query, None, None, w_kv_b, kv_cache, block_table, seq_lens, kv_scale, softmax_scale
    )
    return _results(query, width)


_New = tuple[Tensor, Tensor, Tensor, Tensor]


def _check_ragged(args: tuple[Any, ...]) -> tuple[_New, PagedBatch, int]:
    """Check the arguments of the two ops over new tokens and part them."""
    query, kv_c, k_pe, w_kv_b, kv_cache, block_table, seq_lens, kv_scale = args[:8]
    cu_seqlens_q, host, workspace_tokens, scale = args[8], args[9], args[13], args[-1]
    width = check_paged(
        query,
        kv_c,
        k_pe,
        w_kv_b,
        kv_cache,
        block_table,
        seq_lens,
        kv_scale,
        scale,
        cu_seqlens_q=cu_seqlens_q,
        workspace_tokens=workspace_tokens,
    )
    batch = PagedBatch(
        kv_cache, block_table, seq_lens, cu_seqlens_q, host, kv_scale, scale, workspace_tokens
    )
    return (query, kv_c, k_pe, w_kv_b), batch, width


def _chunked(*args: Any) -> tuple[Tensor, Tensor]:
    tensors, batch, _ = _check_ragged(args)
    backend = _backend("mla_chunked_prefill", tensors[0])
    return backend.mla_chunked_prefill(*tensors, batch)


def _paged(*args: Any) -> tuple[Tensor, Tensor]:
    tensors, batch, _ = _check_ragged(args)
    backend = _backend("mla_paged_attention", tensors[0])
    return backend.mla_paged_attention(*tensors, batch, args[14])


def _ragged_fake(*args: Any) -> tuple[Tensor, Tensor]:
    tensors, _, width = _check_ragged(args)
    return _results(tensors[0], width)


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
        if not detached and needs_autograd(a for a in args if isinstance(a, Tensor)):
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
