"""Attention over a paged cache in Triton's interpreter; `test_triton.py` runs this file.

The batches are those of `test_paged.py`: scattered pages, NaN in every slot that no request owns,
in page tails and in the activations that must not be read, and garbage block ids past a length.
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1: test_triton.py runs it", allow_module_level=True)

import test_paged
from test_paged import DIMS, FP8, SCALE, make_batch

import mla_ops
from mla_ops import MLADims, build_metadata
from mla_ops.kernels.triton import absorbed, configs
from mla_ops.kernels.triton.configs import Arch, Config

FP32 = torch.float32
SMALL = Config(16, 16, 4, 1)
MIXED = ([1, 1, 4, 33, 2, 0], [40, 1, 0, 33, 50, 5])


@pytest.fixture(autouse=True)
def _chosen():
    torch.set_num_threads(1)
    with mla_ops.use_backend("triton"):
        yield


@pytest.fixture
def splits(monkeypatch):
    monkeypatch.setattr(absorbed, "_LEAST_TOKENS", 3)
    monkeypatch.setattr(configs, "_INTERPRETER", Arch("interpreter", 232_448, 64))


@pytest.mark.parametrize("block_size", [1, 3, 4, 8, 16, 64])
def test_a_mixed_batch(block_size):
    """With tiles of 16 keys, block sizes take one, two, four or as many ids as keys."""
    with configs.override("absorbed", SMALL), configs.override("expanded", SMALL):
        make_batch(*MIXED, block_size=block_size, workspace_tokens=40, dtype=FP32).check()


@pytest.mark.parametrize("workspace_tokens", [20, 65_536])
def test_chunks_of_a_context(workspace_tokens):
    make_batch([40, 33], [33, 9], dtype=FP32, workspace_tokens=workspace_tokens).check()


@pytest.mark.parametrize("cache", ["same", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP32], ids=str)
def test_every_dtype(dtype, cache):
    options = {} if cache == "same" else {"cache_dtype": FP8, "kv_scale": torch.tensor(0.03)}
    options |= {"dtype": dtype, "workspace_tokens": 50}
    batch = make_batch([1, 1, 4, 33], [9, 40, 0, 20], **options)
    if dtype != torch.bfloat16:
        batch.check()
        return
    # The interpreter truncates where a GPU rounds to bf16.
    for ours, exact in zip(batch.attend(), batch.expected(), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1.6e-2, atol=3e-2)


@pytest.mark.parametrize("switch", ["1", "0"])
@pytest.mark.parametrize("workspace_tokens", [40, 65_536])
def test_chunks_with_and_without_descriptors(workspace_tokens, switch, monkeypatch):
    """Tiles that are not masked come by descriptors, which read what lies there: of no other."""
    monkeypatch.setenv("MLA_OPS_TMA", switch)
    options = {"dims": MLADims(3, 32, 16, 16, 16), "padding": 3, "dtype": FP32}
    with configs.override("expanded", Config(16, 16, 4, 1, tma=True)):
        make_batch(
            [1, 40, 33, 37], [9, 37, 50, 0], workspace_tokens=workspace_tokens, **options
        ).check()


@pytest.mark.parametrize("heads", [1, 12, 20])
def test_head_counts(heads):
    dims = replace(DIMS, num_heads=heads)
    make_batch([3, 3, 5], [7, 20, 6], dims=dims, threshold=3, dtype=FP32).check()


@pytest.mark.parametrize(
    "dims",
    [MLADims(2, 48, 128, 64, 128), MLADims(5, 24, 10, 0, 14), MLADims(1, 24, 0, 10, 9)],
    ids=str,
)
def test_widths(dims):
    make_batch([1, 5, 33], [9, 16, 0], dims=dims, dtype=FP32, workspace_tokens=16).check()


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("block_size", [1, 16])
def test_splits_are_merged(block_size):
    with configs.override("absorbed", SMALL):
        make_batch([1, 1, 2], [60, 3, 30], block_size=block_size, dtype=FP32).check()


@pytest.mark.parametrize("junk", [float("nan"), float("inf")])
def test_what_no_request_owns_may_be_anything(junk):
    make_batch([1, 1, 2], [4, 20, 3], block_size=16, junk=junk, dtype=FP32).check()


@pytest.mark.parametrize("query_len", [1, 3])
def test_padding_of_a_captured_batch(query_len):
    options = {"threshold": query_len, "pad_to": 5, "padding": 4, "dtype": FP32}
    batch = make_batch([query_len] * 2, [7, 12], **options)
    batch.check()
    batch.query = batch.query[:-4]
    batch.check(test_paged.decode(batch, batch.metadata.block_table, batch.metadata.seq_lens))


@pytest.mark.parametrize("lens", [[8, 12], [1, 0, 12, 2, 3]])
def test_decodes_of_several_tokens(lens):
    batch = make_batch([3] * len(lens), [9] * len(lens), threshold=3, dtype=FP32)
    batch.rows = [rows[:length] for rows, length in zip(batch.rows, lens, strict=True)]
    lens = torch.tensor(lens, dtype=torch.int32)
    batch.check(test_paged.decode(batch, batch.metadata.block_table, lens))


@pytest.mark.parametrize(
    ("query_lens", "contexts", "padding"),
    [([], [], 0), ([], [], 3), ([0, 0], [5, 0], 0), ([1], [4], 0), ([3], [0], 0), ([0], [9], 2)],
)
def test_nothing(query_lens, contexts, padding):
    make_batch(query_lens, contexts, padding=padding, dtype=FP32).check()


def test_a_batch_does_not_change_a_request_s_bits(monkeypatch):
    """With fixed chunks: the same bits alone, among others, and with a wider block table."""
    monkeypatch.setenv("MLA_OPS_BATCH_INVARIANT", "1")
    monkeypatch.setattr(absorbed, "FIXED_TOKENS", 16)
    batch = make_batch([1, 1, 1, 1], [70, 9, 33, 15], dtype=FP32)
    out, lse = batch.attend()
    batch.check((out, lse))
    meta = batch.metadata
    for i, (begin, end) in enumerate(pairwise(meta.cu_seqlens_q.tolist())):
        length = int(meta.seq_lens[i])
        table = meta.block_table[i : i + 1, : -(-length // meta.block_size)]
        alone = build_metadata([1], [length], table, block_size=3, workspace_tokens=5)
        mine = {name: getattr(batch, name)[begin:end] for name in ("query", "kv_c", "k_pe")}
        single = replace(batch, **mine, metadata=alone).attend()
        assert torch.equal(single.out, out[begin:end])
        assert torch.equal(single.lse, lse[:, begin:end])


def test_addresses_are_64_bit_wide(monkeypatch):
    """Block ids whose byte offset is beyond 2**31; of the cache, only those pages are touched."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    dims, block_size = MLADims(2, 24, 8, 8, 8), 16
    blocks = 2**31 // (block_size * 32) + 100
    cache = torch.empty(blocks, block_size, 32, dtype=torch.uint8).view(FP8)
    batch = make_batch([1, 1], [20, 9], dims=dims, block_size=16, cache_dtype=FP8, dtype=FP32)
    table = batch.metadata.block_table
    ids = torch.tensor([blocks - 2, 5, blocks - 40])
    used = torch.stack([table[0, 0], table[0, 1], table[1, 0]]).long()
    cache.view(torch.uint8)[ids] = batch.kv_cache.view(torch.uint8)[used]
    table[0, 0], table[0, 1], table[1, 0] = ids.int()
    batch.kv_cache = cache
    for block_n in (16, 32, 64, 128):  # one, two and four ids, and one for every key
        with configs.override("absorbed", Config(16, block_n, 4, 1)):
            batch.check()
    workspace = torch.zeros(21, 32)
    mla_ops.gather_kv_cache(
        cache,
        table[:1],
        cu_seqlens_k=torch.tensor([0, 21], dtype=torch.int32),
        seq_starts=torch.tensor([0], dtype=torch.int32),
        workspace=workspace,
    )
    torch.testing.assert_close(workspace.double(), batch.rows[0])
    row = torch.randn(1, 32)
    mla_ops.update_kv_cache(
        row[:, :24], row[:, 24:], cache, torch.tensor([(blocks - 1) * block_size + 3])
    )
    assert torch.equal(cache[blocks - 1, 3].float(), row[0].to(FP8).float())


def test_compiled_without_a_graph_break():
    batch = make_batch([1, 1, 4], [9, 20, 3], dtype=FP32)

    def step(query, kv_c, k_pe, weight, cache, metadata):
        mla_ops.update_kv_cache(kv_c, k_pe, cache, metadata.slot_mapping)
        return mla_ops.mla_paged_attention(
            query, kv_c, k_pe, weight, cache, metadata, softmax_scale=SCALE
        )

    batch.kv_c, batch.k_pe = torch.randn(6, 20), torch.randn(6, 6)
    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        cache = batch.kv_cache.clone()
        tensors = (batch.query, batch.kv_c, batch.k_pe, batch.w_kv_b)
        with torch.no_grad():
            results.append((*function(*tensors, cache, batch.metadata), cache))
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("value_width", [12, 16])  # of odd and of even steps of 16 bytes
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, FP32], ids=str)
def test_ragged_prefill_of_strided_views(dtype, is_causal, value_width):
    """Values are slices of a projection; requests are empty, or have more queries than keys.

    Values of the last request are NaN, which shows in its own results alone.
    """
    q, k = [0, 7, 7, 30, 33, 40], [0, 5, 9, 40, 76, 100]
    width = 16 + value_width
    pair = torch.randn(102, 3, width).to(dtype)
    query, rope = torch.randn(42, 3, 32).to(dtype), torch.randn(102, 16).to(dtype)
    pair[76:, :, 16:], query[40:] = float("nan"), float("nan")
    pair[100:], rope[100:] = float("nan"), float("nan")
    sizes = {"max_seqlen_q": 23, "max_seqlen_k": 36, "softmax_scale": 0.3, "is_causal": is_causal}
    cus = {"cu_seqlens_q": q, "cu_seqlens_k": k}
    cus = {name: torch.tensor(cu, dtype=torch.int32) for name, cu in cus.items()}
    args = (query, pair[..., :16], rope, pair[..., 16:])
    with configs.override("expanded", Config(16, 16, 4, 1, tma=True)):
        out, lse = mla_ops.mla_prefill(*args, **cus, **sizes)
    with mla_ops.use_backend("reference"):
        right = mla_ops.mla_prefill(*(a.double() for a in args), **cus, **sizes)
    step = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), right.out, rtol=step, atol=step, equal_nan=True)
    torch.testing.assert_close(lse.double(), right.lse, rtol=1e-3, atol=step)
    assert out[33:40].isnan().all()
    assert (out[40:] == 0).all()
    assert (lse[:, 40:] == float("-inf")).all()


@pytest.mark.parametrize("tokens", [0, 3, 70])
def test_ragged_prefill_of_no_request(tokens):
    """Every token is padding, of more blocks than one."""
    key, rope, value = torch.ones(1, 2, 8), torch.ones(1, 4), torch.ones(1, 2, 6)
    starts = torch.zeros(1, dtype=torch.int32)
    with configs.override("expanded", SMALL):
        out, lse = mla_ops.mla_prefill(
            torch.ones(tokens, 2, 12), key, rope, value, cu_seqlens_q=starts, cu_seqlens_k=starts,
            max_seqlen_q=0, max_seqlen_k=0, softmax_scale=0.3, is_causal=False,
        )  # fmt: skip
    assert out.shape == (tokens, 2, 6)
    assert (out == 0).all()
    assert (lse == float("-inf")).all()
