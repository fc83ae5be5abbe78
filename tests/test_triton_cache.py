"""Writing, gathering and merging in Triton's interpreter; `test_triton.py` runs this file."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1: test_triton.py runs it", allow_module_level=True)

import mla_ops
from mla_ops import gather_kv_cache, reference, update_kv_cache

FP8 = torch.float8_e4m3fn
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def _chosen():
    torch.set_num_threads(1)
    with mla_ops.use_backend("triton"):
        yield


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8)


def test_fp8_is_rounded_as_torch_does():
    """Every code, the middle between any two, a little beside it, what saturates, and NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    codes = codes[codes.isfinite()].sort().values
    middles = (codes[1:] + codes[:-1]) / 2
    values = torch.cat([codes, middles, middles * (1 + 1e-6), middles * (1 - 1e-6)])
    values = torch.cat([values, torch.tensor([449.0, -1e30, INF, -INF, NAN, 1e-30, -0.0])])
    values = torch.cat([values, torch.randn(120) * 0.01])
    rows = values[: len(values) // 64 * 64].view(-1, 64)
    for scale in (None, torch.tensor(0.37)):
        cache = torch.zeros(len(rows), 1, 64, dtype=torch.uint8).view(FP8)
        update_kv_cache(rows[:, :40], rows[:, 40:], cache, torch.arange(len(rows)), kv_scale=scale)
        right = reference.stored(rows, FP8, scale)
        same = as_bytes(cache[:, 0]) == as_bytes(right)
        assert (same | right.float().isnan()).all()
        assert cache[:, 0].float().isnan().equal(right.float().isnan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_every_fp8_code_is_gathered_exactly(dtype):
    cache = torch.arange(256, dtype=torch.uint8).view(FP8).view(8, 4, 8)
    workspace = torch.full((34, 8), 7.0, dtype=dtype)
    gather_kv_cache(
        cache,
        int32([[0, 1, 2, 3, 4, 5, 6, 7]]),
        cu_seqlens_k=int32([1, 33]),
        seq_starts=int32([0]),
        workspace=workspace,
    )
    torch.testing.assert_close(
        workspace[1:33], cache.view(32, 8).to(dtype), rtol=0, atol=0, equal_nan=True
    )
    assert (workspace[[0, 33]] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, FP8], ids=str)
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_rows_go_to_their_slots_and_nowhere_else(dtype, block_size):
    rows = torch.randn(5, 20), torch.randn(5, 6)
    cache = torch.zeros(48 // block_size, block_size, 26).to(dtype)
    before, slots = as_bytes(cache).clone(), [7, -1, 0, 47, 10**12]
    update_kv_cache(*rows, cache, torch.tensor(slots))
    flat, kept = cache.view(48, 26), torch.ones(48, dtype=torch.bool)
    stored = reference.stored(torch.cat(rows, dim=1), dtype, None)
    for i in (0, 2, 3):
        assert torch.equal(as_bytes(flat[slots[i]]), as_bytes(stored[i]))
        kept[slots[i]] = False
    assert torch.equal(as_bytes(flat[kept]), before.view(48, -1)[kept])


def test_many_tokens_take_several_for_a_program(monkeypatch):
    from mla_ops.kernels.triton import cache as module

    monkeypatch.setattr(module, "_MANY_TOKENS", 8)
    rows = torch.randn(11, 4), torch.randn(11, 0)
    cache = torch.zeros(3, 4, 4)
    update_kv_cache(*rows, cache, torch.arange(11).flip(0))
    assert torch.equal(cache.view(12, 4)[:11], rows[0].flip(0))


def test_a_cache_of_any_strides():
    pool = torch.zeros(9, 4, 5, 2)
    cache = pool.permute(2, 1, 0, 3)[..., 1]
    rows = torch.randn(3, 6).t().contiguous().t(), torch.randn(3, 3)
    update_kv_cache(*rows, cache, torch.tensor([0, 19, 6]))
    expected = torch.cat(rows, dim=1)
    assert torch.equal(cache[[0, 4, 1], [0, 3, 2]], expected)
    workspace = torch.zeros(2, 9)
    gather_kv_cache(
        cache,
        int32([[0, 4]]),
        cu_seqlens_k=int32([0, 1]),
        seq_starts=int32([7]),
        workspace=workspace,
    )
    assert torch.equal(workspace, torch.stack([expected[1], torch.zeros(9)]))


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_gather_from_any_row_on(block_size):
    lens, starts = [20, 0, 37, 3], [5, 0, 17, 0]
    pages = 64 // block_size
    cache = torch.randn(4 * pages, block_size, 26)
    table = torch.randperm(4 * pages).view(4, pages).int()
    cu = torch.tensor([0, *lens]).cumsum(0).int()
    table_with_garbage = table.clone()
    for i in range(4):
        table_with_garbage[i, -(-(starts[i] + lens[i]) // block_size) :] = 2_147_480_000
    workspace = torch.full((70, 26), NAN)
    gather_kv_cache(
        cache,
        table_with_garbage,
        cu_seqlens_k=cu,
        seq_starts=int32(starts),
        workspace=workspace,
    )
    for i in range(4):
        rows = cache[table[i].long()].flatten(0, 1)[starts[i] : starts[i] + lens[i]]
        assert torch.equal(workspace[cu[i] : cu[i + 1]], rows)
    assert workspace[60:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("empty", [-INF, INF])
def test_merge(dtype, empty):
    tokens, heads, width = 7, 3, 140
    wide = torch.randn(tokens, 2 * heads, width + 3)
    prefix = wide[:, ::2, :width].to(dtype)
    suffix = torch.randn(heads, tokens, width).to(dtype).transpose(0, 1)
    lses = torch.randn(heads, tokens) * 5, torch.randn(tokens, heads).t() * 5
    prefix[0], lses[0][:, 0] = NAN, empty
    suffix[1], lses[1][:, 1] = NAN, empty
    prefix[2], suffix[2], lses[0][:, 2], lses[1][:, 2] = NAN, INF, empty, -INF
    lses[0][:, 3], lses[1][:, 3] = 3e38, 3e38
    args = (prefix, lses[0], suffix, lses[1])
    right = reference.merge_attn_states(*(a.double() for a in args))
    step = torch.finfo(dtype).eps
    fresh = mla_ops.merge_attn_states(*args)
    in_place = mla_ops.merge_attn_states(*args, out=prefix)
    for out, lse in (fresh, in_place):
        torch.testing.assert_close(out.double(), right.out, rtol=2 * step, atol=2 * step)
        torch.testing.assert_close(lse.double(), right.lse, rtol=1e-6, atol=1e-5)
        assert (out[2] == 0).all()
        assert (lse[:, 2] == -INF).all()
    assert in_place.out.data_ptr() == prefix.data_ptr()


def test_nothing_to_do():
    cache = torch.zeros(2, 4, 6)
    update_kv_cache(torch.zeros(0, 4), torch.zeros(0, 2), cache, torch.zeros(0, dtype=torch.int64))
    gather_kv_cache(
        cache,
        torch.zeros(0, 3, dtype=torch.int32),
        cu_seqlens_k=int32([0]),
        seq_starts=int32([]),
        workspace=torch.zeros(3, 6),
    )
    out, lse = torch.zeros(0, 3, 5), torch.zeros(3, 0)
    assert mla_ops.merge_attn_states(out, lse, out, lse).out.shape == (0, 3, 5)


def test_opcheck():
    utils = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    ops, cache = torch.ops.mla_ops, torch.randn(4, 4, 26)
    rows = torch.randn(3, 20), torch.randn(3, 6)
    table, lens = int32([[3, 1], [0, 2]]), int32([5, 3])
    calls = {
        "update_kv_cache": (*rows, cache, torch.tensor([3, -1, 9]), None),
        "gather_kv_cache": (
            cache,
            table,
            int32([0, 5, 8]),
            int32([0, 1]),
            torch.zeros(8, 26),
            None,
        ),
        "mla_decode": (torch.randn(2, 3, 16), torch.randn(72, 20), cache, table, lens, None, 0.3),
    }
    for name, args in calls.items():
        torch.library.opcheck(getattr(ops, name).default, args, test_utils=utils)
