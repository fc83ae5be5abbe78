"""Other people's code is called as its documentation says: stand-ins in plain torch tell.

A stand-in has the signature of the real function and computes what that is documented to, from
the arguments alone. So a wrong layout, scale or order of arguments fails the gate here, on a
machine that has none of the packages.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_ops.bench.cases import LITE, AttentionCase
from mla_ops.bench.peers import Peer
from mla_ops.bench.peers_cuda import FlashAttention, FlashInfer, FlashMLA, VllmTriton
from mla_ops.bench.peers_torch import TorchSDPA, Transformers
from mla_ops.bench.peers_vllm import (
    VllmDecode,
    VllmDecodeBrgemm,
    VllmExpanded,
    VllmLibrary,
    VllmPrefill,
)
from mla_ops.bench.problems import draw
from mla_ops.bench.runner import absent, check
from mla_ops.bench.sides import sides

pytestmark = pytest.mark.usefixtures("with_one_thread")

DECODE = AttentionCase(LITE, 3, 1, 100)
SEVERAL = AttentionCase(LITE, 2, 3, 100)
PREFILL = AttentionCase(LITE, 2, 20, 50)
PROMPT = AttentionCase(LITE, 2, 20, 0)

drawn = functools.cache(draw)  # with the exact result, which takes longest


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool = True) -> Tensor:
    """Attention of one request: [S, H, D], [T, H or 1, D], [T, H or 1, V] -> [S, H, V]."""
    scores = torch.einsum("shd,thd->hst", query.float(), key.float().expand(-1, query.shape[1], -1))
    rows, keys = scores.shape[1:]
    if causal:
        seen = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
        scores = scores.masked_fill(~seen, float("-inf"))
    values = value.float().expand(-1, query.shape[1], -1)
    return torch.einsum("hst,thv->shv", (scores * scale).softmax(-1), values).to(query.dtype)


def passes(peer: Peer, case: AttentionCase) -> None:
    assert case.group in peer.groups
    assert peer.available() is None
    assert peer.refuses(case) is None
    assert peer.memory(case) > 0
    problem = drawn(case)
    assert check(peer, problem, peer.prepare(problem)) < 0.05


@pytest.mark.parametrize("case", [DECODE, SEVERAL, PREFILL, PROMPT], ids=lambda case: case.name)
@pytest.mark.parametrize("peer", [Transformers(), TorchSDPA()], ids=lambda peer: peer.name)
def test_torch_and_transformers(peer, case):
    if isinstance(peer, Transformers):
        pytest.importorskip("transformers")
    passes(peer, case)


def cached(cache: Tensor, blocks: Tensor, length: Any) -> Tensor:
    """Rows [T, 1, L+R] of one request in a cache [blocks, block size, (1,) L+R]."""
    return cache[blocks.long()].flatten(0, -2)[: int(length), None]


class VllmOps:
    """The ops of vLLM's library, by their schemas."""

    def mla_decode_kvcache(self, out, query, kv_cache, scale, block_tables, seq_lens):
        assert kv_cache.shape[1:] == (16, 576)
        assert block_tables.dtype == seq_lens.dtype == torch.int32
        for i, length in enumerate(seq_lens):
            rows = cached(kv_cache, block_tables[i], length)
            out[i] = attend(query[i : i + 1], rows, rows[..., :512], scale)[0]

    def decode_attention_cpu(
        self, query, k_buffer, v_buffer, output, key, value, loc, attn_logits, req_to_token,
        req_pool_indices, seq_lens, sm_scale, logit_cap, is_cross, window, encoder_lens, sinks,
    ):  # fmt: skip
        assert (key, value, loc, logit_cap, is_cross, window) == (None, None, None, 0.0, False, 0)
        assert (encoder_lens, sinks) == (None, None)
        assert k_buffer.data_ptr() == v_buffer.data_ptr()  # else it takes a slower kernel
        assert attn_logits.shape[:2] == query.shape[:2]
        assert attn_logits.shape[3] == 513
        assert seq_lens.dtype == req_pool_indices.dtype == torch.int64
        for i, request in enumerate(req_pool_indices):
            places = req_to_token[request, : seq_lens[i]].long()
            rows = (k_buffer[places], v_buffer[places])
            output[i] = attend(query[i : i + 1], *rows, sm_scale)[0]

    def extend_attention_cpu(
        self, q_extend, k_extend, v_extend, o_extend, k_buffer, v_buffer, req_to_token,
        req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc, max_len_extend, sm_scale,
        logit_cap, is_cross, window, encoder_lens, sinks, tree_mask,
    ):  # fmt: skip
        assert (logit_cap, is_cross, window) == (0.0, False, 0)
        assert (encoder_lens, sinks, tree_mask) == (None, None, None)
        assert req_to_token.dtype == extend_seq_lens.dtype == extend_start_loc.dtype == torch.int64
        assert o_extend.is_contiguous()
        assert int(extend_seq_lens.max()) == max_len_extend
        for i, request in enumerate(req_pool_indices):
            new, first = int(extend_seq_lens[i]), int(extend_start_loc[i])
            context = req_to_token[request, : seq_lens[i] - new]
            span = slice(first, first + new)
            key, value = k_extend[span], v_extend[span]
            if len(context):
                key = torch.cat([k_buffer[context], key])
                value = torch.cat([v_buffer[context], value])
            o_extend[span] = attend(q_extend[span], key, value, sm_scale)

    def convert_weight_packed(self, weight):
        assert weight.is_contiguous()
        return weight

    def bmm_cpu(self, out, mat1, mat2, is_vnni, scale):
        assert (is_vnni, scale) == (True, None)
        out.copy_(mat1 @ mat2.transpose(1, 2))


@pytest.fixture
def vllm_ops(monkeypatch):
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setattr(torch.ops, "_C", VllmOps(), raising=False)
    return VllmLibrary(Path("_C.abi3.so"))


@pytest.mark.parametrize(
    ("side", "case"),
    [
        (VllmDecode, DECODE),
        (VllmDecodeBrgemm, DECODE),
        (VllmPrefill, PREFILL),
        (VllmPrefill, PROMPT),
        (VllmExpanded, PROMPT),
    ],
)
def test_vllm(vllm_ops, side, case):
    passes(side(vllm_ops), case)


def test_vllm_refuses_what_its_kernels_do_not_take(vllm_ops):
    assert VllmDecode(vllm_ops).refuses(SEVERAL) == "takes one new token per request"
    other = AttentionCase("minicpm3", 1, 1, 10)
    assert VllmDecode(vllm_ops).refuses(other) == (
        "kv_lora_rank 256, takes 512, qk_rope_head_dim 32, takes 64"
    )
    single = AttentionCase(LITE, 1, 1, 10, torch.float32)
    assert VllmDecode(vllm_ops).refuses(single) is None
    assert "torch.float32 is not taken" in str(VllmDecodeBrgemm(vllm_ops).refuses(single))
    assert VllmExpanded(vllm_ops).refuses(PREFILL) == "takes no context"


def test_vllm_that_is_not_there_has_a_reason(monkeypatch, tmp_path):
    assert "not installed, and no --vllm-library" in str(VllmDecode(VllmLibrary()).available())
    broken = tmp_path / "_C.abi3.so"
    broken.write_bytes(b"no library")
    assert str(VllmDecode(VllmLibrary(broken)).available()).startswith("_C.abi3.so: ")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setattr(torch.ops, "_C", object(), raising=False)
    reason = VllmDecode(VllmLibrary(broken)).available()
    assert reason == "the library has no mla_decode_kvcache"


def test_vllm_is_found_where_it_is_installed(monkeypatch, tmp_path):
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('its Python code must not run')")
    (package / "_C_AVX2.abi3.so").write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded: list[str] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    monkeypatch.setattr(torch.ops, "_C", VllmOps(), raising=False)
    assert VllmDecode(VllmLibrary()).available() is None
    assert loaded == [str(package / "_C_AVX2.abi3.so")]


@pytest.fixture
def module(monkeypatch):
    """Put a stand-in where a package would be imported from."""

    def install(name: str, **functions: Any) -> None:
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            dotted = ".".join(parts[:depth])
            monkeypatch.setitem(sys.modules, dotted, ModuleType(dotted))
        vars(sys.modules[name]).update(functions)

    return install


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
    softmax_scale=None, causal=False,
):  # fmt: skip
    assert (tile_scheduler_metadata, num_splits, head_dim_v) == ("schedule", None, 512)
    assert k_cache.shape[1:] == (64, 1, 576)
    outs = []
    for i, length in enumerate(cache_seqlens):
        rows = cached(k_cache, block_table[i], length)
        outs.append(attend(q[i], rows, rows[..., :512], softmax_scale, causal))
    return torch.stack(outs), None


class BatchMLAPagedAttentionWrapper:
    def __init__(self, float_workspace_buffer, backend="auto"):
        assert float_workspace_buffer.dtype == torch.int8

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe,
        page_size, causal, sm_scale, q_data_type, kv_data_type,
    ):  # fmt: skip
        assert (num_heads, head_dim_ckv, head_dim_kpe, page_size) == (16, 512, 64, 64)
        assert q_data_type == kv_data_type == torch.bfloat16
        self.queries, self.pages, self.indices = qo_indptr, kv_indptr, kv_indices
        self.lengths, self.causal, self.scale = kv_len_arr, causal, sm_scale

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache):
        query, cache = torch.cat([q_nope, q_pe], -1), torch.cat([ckv_cache, kpe_cache], -1)
        outs = []
        for i, length in enumerate(self.lengths):
            blocks = self.indices[self.pages[i] : self.pages[i + 1]]
            rows = cached(cache, blocks, length)
            part = query[self.queries[i] : self.queries[i + 1]]
            outs.append(attend(part, rows, rows[..., :512], self.scale, self.causal))
        return torch.cat(outs)


def decode_attention_fwd(
    q, k_buffer, v_buffer, o, lse, req_to_token, b_seq_len, attn_logits, num_kv_splits, sm_scale,
    page_size=1, logit_cap=0.0, k_scale=None,
):  # fmt: skip
    assert num_kv_splits == attn_logits.shape[2]
    assert (page_size, attn_logits.shape[3], v_buffer.shape[-2:]) == (64, 513, (1, 512))
    for i, length in enumerate(b_seq_len):
        rows = cached(k_buffer, req_to_token[i], length)
        o[i] = attend(q[i : i + 1], rows, rows[..., :512], sm_scale)[0]


def newer_decode_attention_fwd(*args, k_scale, v_scale, is_mla, **options):
    assert is_mla
    assert k_scale == v_scale == 1
    decode_attention_fwd(*args, **options)


def newer(q, *args, k_scale=None, v_scale=None, is_mla=False):
    newer_decode_attention_fwd(q, *args, k_scale=k_scale, v_scale=v_scale, is_mla=is_mla)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None,
    causal=False,
):  # fmt: skip
    assert causal
    assert (max_seqlen_q, max_seqlen_k) == (
        int(cu_seqlens_q.diff().max()),
        int(cu_seqlens_k.diff().max()),
    )
    outs = []
    for i in range(len(cu_seqlens_q) - 1):
        queries = slice(cu_seqlens_q[i], cu_seqlens_q[i + 1])
        keys = slice(cu_seqlens_k[i], cu_seqlens_k[i + 1])
        outs.append(attend(q[queries], k[keys], v[keys], softmax_scale))
    return torch.cat(outs)


def narrow_only(q, k, v, *args, **options):
    assert q.shape[-1] == v.shape[-1]
    return flash_attn_varlen_func(q, k, v, *args, **options)


@pytest.mark.parametrize("case", [DECODE, SEVERAL], ids=lambda case: case.name)
def test_flash_mla(module, case):
    def get_mla_metadata(cache_seqlens, rows, heads):
        assert (rows, heads) == (16 * case.new, 1)
        return "schedule", None

    module(
        "flash_mla",
        get_mla_metadata=get_mla_metadata,
        flash_mla_with_kvcache=flash_mla_with_kvcache,
    )
    passes(FlashMLA(), case)


@pytest.mark.parametrize("case", [DECODE, SEVERAL], ids=lambda case: case.name)
def test_flash_infer(module, case):
    module("flashinfer.mla", BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper)
    passes(FlashInfer(), case)


@pytest.mark.parametrize("function", [decode_attention_fwd, newer])
def test_vllm_triton(module, function):
    module("vllm.v1.attention.ops.triton_decode_attention", decode_attention_fwd=function)
    passes(VllmTriton(), DECODE)
    assert VllmTriton().refuses(SEVERAL) == "takes one new token per request"


@pytest.mark.parametrize("case", [PREFILL, PROMPT], ids=lambda case: case.name)
def test_flash_attention(module, case):
    module(
        "flash_attn_interface",
        flash_attn_varlen_func=lambda *args, **options: (
            flash_attn_varlen_func(*args, **options),
            "lse",
        ),
    )
    passes(FlashAttention("flash_attn_interface"), case)
    module("flash_attn", flash_attn_varlen_func=narrow_only)
    passes(FlashAttention("flash_attn"), case)


def test_kernels_refuse_what_they_were_not_built_for():
    other = AttentionCase("minicpm3", 1, 1, 10)
    assert "kv_lora_rank 256, takes 512" in str(FlashMLA().refuses(other))
    single = AttentionCase(LITE, 1, 1, 10, torch.float32)
    assert FlashInfer().refuses(single) == "torch.float32 is not taken"


def test_who_is_absent_on_which_device(monkeypatch):
    for name in ("flash_mla", "flashinfer", "flash_attn", "flash_attn_interface", "vllm"):
        monkeypatch.setitem(sys.modules, name, None)
    on_cpu, on_gpu = absent(sides("cpu"), "cpu"), absent(sides("cuda"), "cuda")
    assert set(on_cpu) == {"vLLM"}
    assert set(on_gpu) == {"FlashMLA", "FlashInfer", "vLLM Triton", "flash-attn"}
    assert on_gpu["FlashMLA"].startswith("import flash_mla: ")
    assert [side.name for side in sides("cpu", peers=False)] == [
        *("mla_ops dense", "mla_ops paged", "mla_ops paged"),
    ]
