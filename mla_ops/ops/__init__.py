"""The torch ops of the package; the only place that talks to `torch.library`.

Every op has tensors and scalars in its schema, a fixed number of results, fresh contiguous results,
declared mutation, and one boundary: its body validates, picks a backend and calls one method of it.
Registration is `Library.define` with one implementation for all devices, the cheapest form at call
time that `opcheck` and AOTAutograd accept.
"""

from __future__ import annotations

from mla_ops.ops.dense import mla_attention
from mla_ops.ops.paged import (
    gather_kv_cache,
    merge_attn_states,
    mla_chunked_prefill,
    mla_decode,
    mla_paged_attention,
    mla_prefill,
    update_kv_cache,
)

__all__ = [
    "gather_kv_cache",
    "merge_attn_states",
    "mla_attention",
    "mla_chunked_prefill",
    "mla_decode",
    "mla_paged_attention",
    "mla_prefill",
    "update_kv_cache",
]
