"""The calls whose kernels are compiled ahead of time: one for each way that a kernel can be built.

They run on tensors of the meta device, with launches recorded in place of being done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from mla_ops.dims import PRESETS, MLADims
from mla_ops.dispatch import AttentionOptions, PagedBatch, RaggedBatch
from mla_ops.kernels.triton.backend import TritonBackend
from mla_ops.kernels.triton.project import halves, project

__all__ = ["PROBLEMS", "paged_batch"]

_LITE = PRESETS["deepseek-v2-lite"]
_V3 = PRESETS["deepseek-v3"]
_GLM = PRESETS["glm-4.7-flash"]
_SMALL = PRESETS["minicpm3"]
_FP8 = torch.float8_e4m3fn
_BF16 = torch.bfloat16
_backend = TritonBackend()


def _new(*shape: int, dtype: torch.dtype = _BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _ints(*shape: int) -> Tensor:
    return _new(*shape, dtype=torch.int32)


def _weight(dims: MLADims, dtype: torch.dtype = _BF16) -> Tensor:
    return _new(dims.expanded_dim, dims.kv_lora_rank, dtype=dtype)


def paged_batch(
    dims: MLADims,
    query_lens: list[int],
    context: int,
    *,
    num_decodes: int = 0,
    block_size: int = 64,
    dtype: torch.dtype = _BF16,
    cache_dtype: torch.dtype = _BF16,
) -> PagedBatch:
    """Describe a batch whose tensors are on the meta device, all but the host's lengths.

    Args:
        dims: widths of the layer.
        query_lens: new tokens of each request.
        context: cached tokens of each.
        num_decodes: how many of the first requests are decodes.
        block_size: tokens per block.
        dtype: of the new tokens.
        cache_dtype: of the cache.
    """
    requests, tokens = len(query_lens), sum(query_lens)
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    lens = torch.tensor([*(context + n for n in query_lens), 0])
    scale = _new(1, dtype=torch.float32) if cache_dtype == _FP8 else None
    return PagedBatch(
        _new(tokens, dims.num_heads, dims.qk_head_dim, dtype=dtype),
        _new(tokens, dims.kv_lora_rank, dtype=dtype),
        _new(tokens, dims.qk_rope_head_dim, dtype=dtype),
        _weight(dims, dtype),
        _new(64, block_size, dims.latent_dim, dtype=cache_dtype),
        _ints(requests, 8192 // block_size),
        _ints(requests),
        _ints(requests + 1),
        torch.stack([starts, lens]).int(),
        scale,
        num_decodes,
        0.1,
        4096,
    )


def _decode(
    dims: MLADims,
    block_size: int = 64,
    cache: torch.dtype = _BF16,
    dtype: torch.dtype = _BF16,
    new: int = 1,
    requests: int = 1,  # few, so that there are splits
) -> Callable[[], object]:
    def run() -> None:
        batch = paged_batch(
            dims,
            [new] * requests,
            4096,
            num_decodes=requests,
            block_size=block_size,
            dtype=dtype,
            cache_dtype=cache,
        )
        _backend.mla_paged_attention(batch._replace(kv_c=None, k_pe=None))

    return run


def _paged(dims: MLADims, query_lens: list[int], num_decodes: int) -> Callable[[], object]:
    def run() -> None:
        batch = paged_batch(dims, query_lens, 6000, num_decodes=num_decodes)
        _backend.mla_paged_attention(batch)

    return run


def _options(
    dims: MLADims, batch: int, new: int, keys: int, mask: torch.dtype | None, bounds: bool
) -> AttentionOptions:
    """Options of a dense call; an additive mask comes with sinks."""
    return AttentionOptions(
        None if mask is None else _new(batch, 1, new, keys, dtype=mask),
        _ints(batch, 2) if bounds else None,
        _new(dims.num_heads) if mask == _BF16 else None,
        0.1,
        True,
        None,
    )


def _dense(
    dims: MLADims,
    new: int,
    keys: int = 4096,
    mask: torch.dtype | None = None,
    bounds: bool = False,
) -> Callable[[], object]:
    def run() -> None:
        _backend.mla_attention(
            _new(256, dims.num_heads, new, dims.qk_head_dim),
            _new(256, keys, dims.kv_lora_rank),
            _new(256, keys, dims.qk_rope_head_dim),
            _weight(dims),
            _options(dims, 256, new, keys, mask, bounds),
        )

    return run


def _backward(
    dims: MLADims,
    batch: int = 2,
    mask: torch.dtype | None = None,
    bounds: bool = False,
    dtype: torch.dtype = _BF16,
) -> Callable[[], object]:
    def run() -> None:
        out = _new(batch, dims.num_heads, 4096, dims.v_head_dim, dtype=dtype)
        lse = _new(batch, dims.num_heads, 4096, dtype=torch.float32)
        _backend.mla_attention_backward(
            out,
            lse,
            _new(batch, dims.num_heads, 4096, dims.qk_head_dim, dtype=dtype),
            _new(batch, 4096, dims.kv_lora_rank, dtype=dtype),
            _new(batch, 4096, dims.qk_rope_head_dim, dtype=dtype),
            _weight(dims, dtype),
            out,
            lse,
            _options(dims, batch, 4096, 4096, mask, bounds),
        )

    return run


def _prefill(dims: MLADims, is_causal: bool, dtype: torch.dtype = _BF16) -> Callable[[], object]:
    def run() -> None:
        heads, nope = dims.num_heads, dims.qk_nope_head_dim
        # As kv_b_proj leaves them: keys and values are slices of one tensor.
        pair = _new(4096, heads, nope + dims.v_head_dim, dtype=dtype)
        query = _new(4096, heads, dims.qk_head_dim, dtype=dtype)
        k_pe, starts = _new(4096, dims.qk_rope_head_dim, dtype=dtype), _ints(9)
        _backend.mla_prefill(
            RaggedBatch(
                *(query, pair[..., :nope], k_pe, pair[..., nope:], starts, starts),
                *(2048, 2048, 0.1, is_causal),
            )
        )

    return run


def _merge() -> None:
    out, lse = _new(4096, 16, 128), _new(16, 4096, dtype=torch.float32)
    _backend.merge_attn_states(out, lse, out, lse, out)


def _cache(dtype: torch.dtype) -> Callable[[], object]:
    def run() -> None:
        cache = _new(64, 64, _LITE.latent_dim, dtype=dtype)
        scale = _new(1, dtype=torch.float32)
        for tokens in (16, 8192):
            _backend.update_kv_cache(
                _new(tokens, _LITE.kv_lora_rank),
                _new(tokens, _LITE.qk_rope_head_dim),
                cache,
                _new(tokens, dtype=torch.int64),
                scale,
            )
        workspace = _new(4096, _LITE.latent_dim)
        _backend.gather_kv_cache(cache, _ints(8, 64), _ints(9), _ints(8), workspace, scale)

    return run


def _projection() -> None:
    tokens = _new(256, _LITE.num_heads, _LITE.qk_head_dim)
    latent = _new(_LITE.num_heads, 256, _LITE.kv_lora_rank)
    out = _new(256, _LITE.num_heads, _LITE.v_head_dim)
    w_uk, w_uv = halves(_weight(_LITE), _LITE)
    project(tokens[..., : _LITE.qk_nope_head_dim].transpose(0, 1), w_uk, latent, True)
    project(latent, w_uv, out.transpose(0, 1), True)


PROBLEMS: Mapping[str, Callable[[], object]] = MappingProxyType(
    {
        "decode, 16 rows": _decode(_LITE),
        "decode, 16 rows, large batch": _decode(_LITE, requests=256),
        "decode, 16 rows, page 16": _decode(_LITE, 16),
        "decode, 16 rows, page 8": _decode(_LITE, 8),
        "decode, 16 rows, page 1": _decode(_LITE, 1),
        "decode, 16 rows, fp8": _decode(_LITE, cache=_FP8),
        "decode, 16 rows, fp8, page 16": _decode(_LITE, 16, _FP8),
        "decode, 16 rows, fp32": _decode(_LITE, cache=torch.float32, dtype=torch.float32),
        "decode, 20 rows, GLM": _decode(_GLM),
        "decode, 32 rows": _decode(_LITE, new=2),
        "decode, 32 rows, page 16": _decode(_LITE, 16, new=2),
        "decode, 32 rows, fp8": _decode(_LITE, cache=_FP8, new=2),
        "decode, 40 rows, MiniCPM3": _decode(_SMALL),
        "decode, 128 rows": _decode(_V3),
        "decode, 128 rows, page 16": _decode(_V3, 16),
        "decode, 128 rows, page 1": _decode(_V3, 1),
        "decode, 128 rows, fp8": _decode(_V3, cache=_FP8),
        "dense decode": _dense(_LITE, 1),
        "dense decode, bounds": _dense(_LITE, 1, bounds=True),
        "dense decode, bool mask": _dense(_LITE, 1, mask=torch.bool),
        "dense decode, additive mask, sinks": _dense(_LITE, 1, mask=_BF16),
        "dense prefill": _dense(_LITE, 512),
        "dense prefill, bounds": _dense(_LITE, 512, bounds=True),
        "dense prefill, bool mask": _dense(_LITE, 512, mask=torch.bool),
        "dense prefill, additive mask, sinks": _dense(_LITE, 512, mask=_BF16),
        "backward": _backward(_LITE),
        "backward, chunks": _backward(_LITE, 256),
        "backward, bounds": _backward(_LITE, bounds=True),
        "backward, bool mask": _backward(_LITE, mask=torch.bool),
        "backward, additive mask, sinks": _backward(_LITE, mask=_BF16),
        "backward, GLM": _backward(_GLM),
        "backward, MiniCPM3": _backward(_SMALL),
        "backward, fp32": _backward(_LITE, dtype=torch.float32),
        "short extends": _paged(_LITE, [1, 8, 8], 1),
        "chunked prefill": _paged(_LITE, [600, 600], 0),
        "prefill": _prefill(_LITE, True),
        "prefill, context": _prefill(_LITE, False),
        "prefill, GLM": _prefill(_GLM, True),
        "prefill, MiniCPM3": _prefill(_SMALL, True),
        "prefill, fp32": _prefill(_LITE, True, torch.float32),
        "projection": _projection,
        "merge of states": _merge,
        "cache": _cache(_BF16),
        "cache, fp8": _cache(_FP8),
    }
)
"""Name of a call to what makes it."""
