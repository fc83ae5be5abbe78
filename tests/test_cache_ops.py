"""Writing and reading the paged cache: every row to its place, in place, also when compiled.

Case numbers are those of the project's list of public bug reports in this field.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native import either_backend, one_thread
from torch import Tensor

import mla_ops
from mla_ops import build_metadata, dispatch, gather_kv_cache, update_kv_cache
from mla_ops.bench import peak_bytes
from mla_ops.kernels.tiled import TiledBackend

pytestmark = [either_backend, one_thread]

RANK, ROPE, NOPE, VALUE, HEADS, BLOCK = 20, 6, 10, 14, 3, 4
WIDTH, SCALE, NAN = RANK + ROPE, 0.37, float("nan")
FP8 = torch.float8_e4m3fn
CACHES = [torch.bfloat16, torch.float16, torch.float32, FP8]
OPS = torch.ops.mla_ops


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8)


def new_rows(tokens, dtype=torch.float32):
    return torch.randn(tokens, RANK).to(dtype), torch.randn(tokens, ROPE).to(dtype)


def slots_of(blocks, count, block_size=BLOCK, start=0):
    """The slots of positions `start`, `start + 1`, ... of a request with these blocks."""
    positions = range(start, start + count)
    return torch.tensor([blocks[p // block_size] * block_size + p % block_size for p in positions])


def decode(query, weight, cache, table, lens, **options):
    return mla_ops.mla_decode(query, weight, cache, table, lens, softmax_scale=SCALE, **options)


# --- update_kv_cache -----------------------------------------------------------------------------


@given(st.permutations(range(20)), st.lists(st.integers(-3, 19), max_size=12), st.integers(0, 99))
def test_every_row_goes_to_its_slot_and_nothing_else_changes(slots, kept, seed):
    torch.manual_seed(seed)
    slots = [slot if slot in kept else -1 - slot for slot in slots]  # below 0: skip
    kv_c, k_pe = new_rows(20)
    cache = torch.randn(5, 4, WIDTH)
    expected = cache.clone()
    for slot, latent, rope in zip(slots, kv_c, k_pe, strict=True):
        if slot >= 0:
            expected[slot // 4, slot % 4] = torch.cat([latent, rope])
    assert update_kv_cache(kv_c, k_pe, cache, torch.tensor(slots)) is None
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("cache_dtype", CACHES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_rows_are_rounded_to_the_cache(dtype, cache_dtype):
    kv_c, k_pe = new_rows(3, dtype)
    cache = torch.full((2, BLOCK, WIDTH), NAN).to(cache_dtype)
    update_kv_cache(kv_c, k_pe, cache, torch.tensor([6, -1, 1]))
    flat = cache.float().flatten(0, 1)
    rounded = torch.cat([kv_c, k_pe], 1).to(cache_dtype).float()
    assert torch.equal(flat[[6, 1]], rounded[[0, 2]])
    assert flat[[0, 2, 3, 4, 5, 7]].isnan().all()


@pytest.mark.parametrize("blocks", [0, 2])
@pytest.mark.parametrize("tokens", [0, 3])
def test_nothing_to_write(tokens, blocks):
    """All padding: no block is touched, block 0 least of all (case 78)."""
    cache = torch.full((blocks, BLOCK, WIDTH), 7.0)
    update_kv_cache(*new_rows(tokens), cache, torch.full((tokens,), -1))
    assert (cache == 7).all()


def test_fp8_values_by_hand():
    """Divided by the scale, rounded to three bits behind the first, saturating at 448."""
    values = [0.0, 1.0, 1.06, 1.07, -3.3, 223.0, 225.0, 1e4, -1e4, 0.001]
    stored = [0.0, 2.0, 2.0, 2.25, -6.5, 448.0, 448.0, 448.0, -448.0, 0.001953125]
    cache = torch.zeros(1, 1, 10).to(FP8)
    row = torch.tensor([values])
    update_kv_cache(row[:, :7], row[:, 7:], cache, torch.tensor([0]), kv_scale=torch.tensor(0.5))
    assert cache.float().flatten().tolist() == stored
    workspace = torch.zeros(1, 10)
    gather = functools.partial(gather_kv_cache, cache, int32([[0]]), seq_starts=int32([0]))
    gather(cu_seqlens_k=int32([0, 1]), workspace=workspace, kv_scale=torch.tensor(0.5))
    assert workspace.flatten().tolist() == [value / 2 for value in stored]


# --- gather_kv_cache -----------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_gather_from_any_start(block_size):
    """A start need not be that of a page; rows that are not asked for stay as they are."""
    blocks, length = torch.randperm(25).tolist(), 21
    cache = torch.full((25, block_size, WIDTH), NAN)
    kv_c, k_pe = new_rows(length)
    update_kv_cache(kv_c, k_pe, cache, slots_of(blocks, length, block_size))
    needed = -(-length // block_size)
    table = int32([blocks[:needed] + [10**8] * 3])
    rows = torch.cat([kv_c, k_pe], 1)
    for start in range(length):
        for count in {0, 1, min(block_size, length - start), length - start}:
            workspace = torch.full((length + 4, WIDTH), 7.0)
            gather_kv_cache(
                cache,
                table,
                cu_seqlens_k=int32([2, 2 + count]),
                seq_starts=int32([start]),
                workspace=workspace,
            )
            assert torch.equal(workspace[2 : 2 + count], rows[start : start + count])
            assert (workspace[:2] == 7).all()
            assert (workspace[2 + count :] == 7).all()


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 30)), max_size=6),
    st.integers(1, 5),
    st.integers(1, 40),
)
def test_the_planned_chunks_bring_every_context(requests, block_size, workspace_tokens):
    """Plan, metadata, writer and gather together: the contexts come out as they went in."""
    query_lens, contexts = ([request[i] for request in requests] for i in range(2))
    needed = [-(-(new + old) // block_size) for new, old in requests]
    ids = torch.randperm(sum(needed)).tolist()
    tables = [[ids.pop() for _ in range(count)] for count in needed]
    cache = torch.full((sum(needed), block_size, WIDTH), NAN)
    rows = [new_rows(old) for old in contexts]
    for blocks, old, (kv_c, k_pe) in zip(tables, contexts, rows, strict=True):
        slots = slots_of(blocks, old, block_size) if old else torch.zeros(0, dtype=torch.int64)
        update_kv_cache(kv_c, k_pe, cache, slots)
    metadata = build_metadata(
        query_lens,
        [sum(request) for request in requests],
        tables,
        block_size=block_size,
        workspace_tokens=workspace_tokens,
        is_prefilling=[True] * len(requests),
    )
    got = [[] for _ in requests]
    for starts, cu in zip(metadata.chunk_starts, metadata.chunk_cu_seqlens, strict=True):
        workspace = torch.full((workspace_tokens, WIDTH), NAN)
        gather_kv_cache(
            cache, metadata.block_table, cu_seqlens_k=cu, seq_starts=starts, workspace=workspace
        )
        for i in range(len(requests)):
            got[i].append(workspace[cu[i] : cu[i + 1]])
    for pieces, pair in zip(got, rows, strict=True):
        assert torch.equal(torch.cat([torch.zeros(0, WIDTH), *pieces]), torch.cat(pair, 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cache_dtype", CACHES, ids=str)
def test_gather_converts_and_scales_fp8_only(cache_dtype, dtype):
    """Case 35: a scale that was set for an fp8 cache must not reach a bf16 one."""
    cache = torch.randn(2, BLOCK, WIDTH).to(cache_dtype)
    workspace = torch.full((5, WIDTH), NAN, dtype=dtype)
    gather_kv_cache(
        cache,
        int32([[1, 0]]),
        cu_seqlens_k=int32([0, 5]),
        seq_starts=int32([2]),
        workspace=workspace,
        kv_scale=torch.tensor(0.3),
    )
    rows = torch.cat([cache[1, 2:].float(), cache[0, :3].float()])
    exact = rows.double() * (float(torch.tensor(0.3)) if cache_dtype == FP8 else 1.0)
    torch.testing.assert_close(workspace, exact.to(dtype), atol=0, rtol=torch.finfo(dtype).eps)


# --- an fp8 cache end to end ---------------------------------------------------------------------


def attend_through(cache_dtype, rows, kv_scale):
    """Write a request's rows, then decode one token and extend by three."""
    kv_c, k_pe = rows.split([RANK, ROPE], 1)
    cache, blocks = torch.full((7, BLOCK, WIDTH), NAN).to(cache_dtype), [5, 0, 6]
    update_kv_cache(kv_c, k_pe, cache, slots_of(blocks, 11), kv_scale=kv_scale)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, HEADS, NOPE + ROPE, generator=generator)
    weight = torch.randn(HEADS * (NOPE + VALUE), RANK, generator=generator) / RANK**0.5
    decoded = decode(query[:1], weight, cache, int32([blocks]), int32([11]), kv_scale=kv_scale)
    metadata = build_metadata([3], [11], [blocks], block_size=BLOCK, workspace_tokens=3)
    extended = mla_ops.mla_paged_attention(
        query,
        torch.zeros(3, RANK),
        torch.zeros(3, ROPE),
        weight,
        cache,
        metadata,
        softmax_scale=SCALE,
        kv_scale=kv_scale,
    )
    return torch.cat([decoded.out, extended.out]), torch.cat([decoded.lse, extended.lse], 1)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_one_scale_for_latent_and_rope_writing_and_reading(shape, scale_dtype):
    """Case 35: decodes and prefills see the rows that the cache can store."""
    rows = torch.randn(11, WIDTH)
    scale = torch.full(shape, 0.125, dtype=scale_dtype)
    stored = (rows / 0.125).to(FP8).float() * 0.125
    assert not torch.equal(stored, rows.to(FP8).float())  # the scale matters
    expected = attend_through(torch.float32, stored, None)
    torch.testing.assert_close(attend_through(FP8, rows, scale), expected, atol=2e-6, rtol=0)


def test_rows_and_scale_four_times_as_large_are_the_same_bytes():
    """Case 35; and saturation is that of the scaled value."""
    kv_c, k_pe = (t * 100 for t in new_rows(3))
    caches = []
    for factor in (1.0, 4.0):
        cache = torch.zeros(1, BLOCK, WIDTH).to(FP8)
        scale = torch.tensor(0.5 * factor)
        update_kv_cache(kv_c * factor, k_pe * factor, cache, torch.arange(3), kv_scale=scale)
        caches.append(as_bytes(cache))
    assert torch.equal(*caches)
    assert (caches[0] & 0x7F == 0x7E).any()  # 448, the largest number
    assert not (caches[0] & 0x7F == 0x7F).any()  # NaN


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_scale_is_ignored_for_other_caches(dtype):
    rows = torch.randn(11, WIDTH)
    plain = attend_through(dtype, rows, None)
    scaled = attend_through(dtype, rows, torch.tensor(2.0))
    torch.testing.assert_close(scaled, plain, atol=0, rtol=0)


# --- layouts of the cache ------------------------------------------------------------------------

LAYOUTS = {
    "layer-inside-block": lambda n, dtype: torch.full((n, 3, BLOCK, WIDTH), NAN).to(dtype)[:, 1],
    "layer-outside": lambda n, dtype: torch.full((3, n, BLOCK, WIDTH), NAN).to(dtype)[1],
    "offset": lambda n, dtype: torch.full((n + 2, BLOCK, WIDTH), NAN).to(dtype)[1:-1],
    "larger-blocks": lambda n, dtype: torch.full((n, BLOCK + 3, WIDTH), NAN).to(dtype)[:, 2:-1],
    "every-second-block": lambda n, dtype: torch.full((2 * n, BLOCK, WIDTH), NAN).to(dtype)[1::2],
}


@pytest.mark.parametrize("cache_dtype", [torch.float32, FP8], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("blocks", [[5, 0, 6], [2, 3, 4]], ids=["scattered", "consecutive"])
def test_a_strided_cache_is_written_and_read_like_a_contiguous_one(blocks, layout, cache_dtype):
    """One layer of a cache of all layers, and other views: the memory around it is not touched."""
    kv_c, k_pe = new_rows(11)
    query, weight = torch.randn(1, HEADS, NOPE + ROPE), torch.randn(HEADS * (NOPE + VALUE), RANK)
    plain, results = torch.full((7, BLOCK, WIDTH), NAN).to(cache_dtype), []
    for cache in (plain, LAYOUTS[layout](7, cache_dtype)):
        update_kv_cache(kv_c, k_pe, cache, slots_of(blocks, 11))
        workspace = torch.zeros(9, WIDTH)
        gather_kv_cache(
            cache,
            int32([blocks]),
            cu_seqlens_k=int32([0, 9]),
            seq_starts=int32([2]),
            workspace=workspace,
        )
        decoded = decode(query, weight, cache, int32([blocks]), int32([11]))
        results.append((as_bytes(cache), workspace, *decoded))
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=0)
    storage = torch.empty(0, dtype=cache_dtype).set_(cache.untyped_storage())
    assert int((~storage.float().isnan()).sum()) == 11 * WIDTH


# --- the ops as torch sees them ------------------------------------------------------------------


def samples(requests=2, new=3, dtype=torch.float32, permuted=False, cache_dtype=None):
    """Arguments for every op, for as many `requests` of `new` tokens behind four cached ones."""
    tokens, kind = requests * new, {"dtype": dtype}
    query = torch.randn(HEADS, tokens, NOPE + ROPE).to(dtype).transpose(0, 1)
    query = query if permuted else query.contiguous()
    weight = torch.randn(HEADS * (NOPE + VALUE), RANK).to(dtype)
    pools = torch.randn(3 * requests + 1, BLOCK, WIDTH)
    cache = pools.to(cache_dtype or (torch.float32 if dtype == torch.float64 else dtype))
    table = torch.arange(3 * requests, dtype=torch.int32).view(requests, 3)
    kv_c, k_pe = new_rows(tokens, dtype)
    meta = build_metadata(
        [new] * requests,
        [new + 4] * requests,
        table,
        block_size=BLOCK,
        workspace_tokens=3,
        is_prefilling=[True] * requests,
    )
    scale = torch.tensor(0.5)
    paged = (query, kv_c, k_pe, weight, cache, meta.block_table, meta.seq_lens, scale)
    chunks = (meta.cu_seqlens_q, meta.host, meta.chunk_starts, meta.chunk_cu_seqlens, new, 3)
    cu = meta.cu_seqlens_q
    side = (torch.randn(tokens, HEADS, VALUE, **kind), torch.randn(HEADS, tokens))
    side = (side[0], side[1].to(torch.float64) if dtype == torch.float64 else side[1])
    expanded = (torch.randn(tokens, HEADS, NOPE, **kind), k_pe, side[0])
    workspace = torch.zeros(5 * requests, WIDTH, **kind)
    ends = torch.arange(requests + 1, dtype=torch.int32) * 5
    starts = torch.full((requests,), 1, dtype=torch.int32)
    return {
        "update_kv_cache": (kv_c, k_pe, cache, meta.slot_mapping, scale),
        "gather_kv_cache": (cache, table, ends, starts, workspace, scale),
        "mla_prefill": (query, *expanded, cu, cu, new, new, SCALE, True),
        "merge_attn_states": (*side, *side),
        "merge_attn_states_out": (*side, *side, side[0].clone()),
        "mla_decode": (query, weight, cache, meta.block_table, meta.seq_lens, scale, SCALE),
        "mla_chunked_prefill": (*paged, *chunks, SCALE),
        "mla_paged_attention": (*paged, *chunks, 0, 0, SCALE),
    }


@pytest.mark.parametrize("cache_dtype", [None, FP8], ids=str)
@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("op", list(samples()))
def test_opcheck(op, permuted, cache_dtype):
    """Cases 45 and 46. torch cannot compare fp8 tensors, which `test_schema` would do."""
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    checks.append("test_aot_dispatch_dynamic")
    args = samples(permuted=permuted, cache_dtype=cache_dtype)[op]
    uses_fp8 = any(isinstance(a, Tensor) and a.dtype == FP8 for a in args)
    torch.library.opcheck(getattr(OPS, op).default, args, test_utils=checks[uses_fp8:])


@pytest.mark.parametrize("op", list(samples()))
def test_fake_rules_say_what_the_ops_return(op):
    """What opcheck leaves out: sizes that a rule was not written for, and fp8 (cases 45, 46)."""
    call = getattr(OPS, op).default
    kinds = [(torch.float32, None), (torch.bfloat16, FP8), (torch.float64, None)]
    for requests, new, permuted, (dtype, cache_dtype) in itertools.product(
        (0, 1, 2, 5), (0, 1, 7), (False, True), kinds
    ):
        args = samples(requests, new, dtype, permuted, cache_dtype)[op]
        with torch._subclasses.FakeTensorMode() as mode:
            said = call(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args))
        real = call(*args)
        described = [
            [(t.shape, t.stride(), t.dtype, t.device) for t in torch.utils._pytree.tree_leaves(r)]
            for r in (said, real)
            if r is not None
        ]
        assert described == [] or described[0] == described[1], (requests, new, dtype, permuted)
        assert (said is None) == (real is None)


def test_a_written_cache_keeps_no_graph():
    """Weights that want a gradient must not make a cache remember every step."""
    kv_c, k_pe = (t.requires_grad_() for t in new_rows(2))
    cache = torch.zeros(2, BLOCK, WIDTH)
    update_kv_cache(kv_c, k_pe, cache, torch.tensor([1, 5]))
    assert not cache.requires_grad
    workspace = torch.zeros(2, WIDTH)
    scale = torch.tensor(1.0, requires_grad=True)
    gather_kv_cache(
        cache.to(FP8),
        int32([[0, 1]]),
        cu_seqlens_k=int32([0, 2]),
        seq_starts=int32([1]),
        workspace=workspace,
        kv_scale=scale,
    )
    assert not workspace.requires_grad


# --- in place under torch.compile ----------------------------------------------------------------


class Spy(TiledBackend):
    """Notes which cache the ops see."""

    name = "spy"

    def __init__(self):
        self.pointers = []

    def update_kv_cache(self, kv_c, k_pe, kv_cache, *rest):
        self.pointers.append(kv_cache.data_ptr())
        super().update_kv_cache(kv_c, k_pe, kv_cache, *rest)

    def mla_paged_attention(self, batch):
        self.pointers.append(batch.kv_cache.data_ptr())
        return super().mla_paged_attention(batch)


@pytest.fixture
def spy():
    backend = Spy()
    mla_ops.register_backend(backend, automatic=False)
    with mla_ops.use_backend("spy"):
        yield backend
    del dispatch._registry["spy"]
    dispatch._select.cache_clear()


class Layers(torch.nn.Module):
    """Two layers that write the new tokens and then attend; caches are buffers or arguments."""

    def __init__(self):
        super().__init__()
        self.register_buffer("caches", torch.zeros(2, 512, 16, WIDTH))

    def forward(self, query, kv_c, k_pe, weight, metadata, caches=None):
        for cache in self.caches if caches is None else caches:
            update_kv_cache(kv_c, k_pe, cache, metadata.slot_mapping)
            out, lse = mla_ops.mla_paged_attention(
                query, kv_c, k_pe, weight, cache, metadata, softmax_scale=SCALE
            )
            kv_c = out.flatten(1) @ weight[: HEADS * VALUE]  # the next layer depends on this one
        return out, lse


@pytest.mark.parametrize("cache_is", ["buffer", "input"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_graph_writes_the_cache_in_place(spy, cache_is, dynamic):
    """A functionalised write can leave a copy of the whole cache behind, in silence.

    Layers are taken from a common tensor outside of the graph: inside of a graph with dynamic
    shapes, Inductor loses the offset of a view that an op changes (pytorch issue 198068).
    """
    layers, eager = Layers(), Layers()
    metadata = build_metadata([1, 5], [9, 7], [[300], [511]], block_size=16, workspace_tokens=1024)
    inputs = (torch.randn(6, HEADS, NOPE + ROPE), *new_rows(6))
    inputs += (torch.randn(HEADS * (NOPE + VALUE), RANK) / 8, metadata)
    expected = eager(*inputs)
    spy.pointers.clear()
    caches = layers.caches if cache_is == "buffer" else torch.zeros_like(layers.caches)
    extra = () if cache_is == "buffer" else (list(caches),)
    compiled = torch.compile(layers, fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        first = compiled(*inputs, *extra)
        peak = peak_bytes(lambda: compiled(*inputs, *extra))
    torch.testing.assert_close(first, tuple(expected), atol=1e-5, rtol=0)
    assert spy.pointers == [caches[i].data_ptr() for i in (0, 0, 1, 1)] * 2
    assert peak < caches[0].nbytes / 2
    torch.testing.assert_close(caches, eager.caches)
    assert int(caches.any(-1).sum()) == 12


def test_compiled_ops_equal_eager_ones():
    """Case 47."""
    for op, args in samples().items():
        call = getattr(OPS, op).default
        copies = [[a.clone() if isinstance(a, Tensor) else a for a in args] for _ in range(2)]
        eager = call(*copies[0])
        compiled = torch.compile(call, fullgraph=True)(*copies[1])
        torch.testing.assert_close(compiled, eager, equal_nan=True)
        torch.testing.assert_close(*copies, equal_nan=True)


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache_dtype", [torch.float32, FP8], ids=str)
def test_scratch_does_not_grow_with_the_pool(cache_dtype):
    """Case 37: a pool converted as a whole, in every layer."""
    peaks = []
    for blocks in (8, 512):
        cache = torch.zeros(blocks, BLOCK, WIDTH).to(cache_dtype)
        query, weight = torch.zeros(2, HEADS, NOPE + ROPE), torch.zeros(HEADS * 24, RANK)
        call = functools.partial(decode, query, weight, cache)
        peaks.append(peak_bytes(lambda: call(int32([[3, 1], [7, 0]]), int32([6, 8]))))  # noqa: B023
    assert peaks[0] == peaks[1] > 0


@pytest.mark.parametrize("new", [4, 64])
def test_scratch_of_a_chunked_prefill_does_not_grow_with_the_context(new):
    """Case 82: bounded by the workspace, whether the form is absorbed or expanded."""
    peaks = []
    for context in (1024, 8192):
        blocks = torch.randperm((context + new) // 16 + 1).tolist()
        cache = torch.zeros(len(blocks), 16, WIDTH)
        metadata = build_metadata(
            [new], [context + new], [blocks], block_size=16, workspace_tokens=256
        )
        query, weight = torch.zeros(new, HEADS, NOPE + ROPE), torch.zeros(HEADS * 24, RANK)
        call = functools.partial(mla_ops.mla_chunked_prefill, softmax_scale=SCALE)
        args = (query, torch.zeros(new, RANK), torch.zeros(new, ROPE), weight, cache, metadata)
        peaks.append(peak_bytes(lambda: call(*args)))  # noqa: B023
    assert peaks[1] <= 1.02 * peaks[0]
