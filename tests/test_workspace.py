"""Memory that is set aside: as much as the worst batch holds, and no batch holds more.

Case numbers are those of the project's list of public bug reports in this field.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from native import needs_native

import mla_ops
from mla_ops import InvalidInputError, MLADims, ServingLimits, dispatch, workspace_bytes
from mla_ops.bench import peak_bytes
from mla_ops.dispatch import PagedLimits
from mla_ops.kernels import tiling
from mla_ops.kernels.tiled_memory import batch_bytes
from mla_ops.kernels.tiling import plan_tiles, scratch_sizes
from mla_ops.workspace import chunk_loop_bytes

DIMS = MLADims(8, 128, 64, 32, 48)
R1_TP8 = MLADims(16, 512, 128, 64, 128)  # the heads of one device of eight
GIB = 2**30
CPU = torch.device("cpu")
BLOCK, CHUNK = 16, 4096
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@pytest.fixture(autouse=True)
def _one_thread():
    """The scratch of a CPU grows with the threads; the figures here are for one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["tiled", pytest.param("cpu", marks=needs_native)])
def backend(request):
    """A backend that says how much it holds."""
    with mla_ops.use_backend(request.param):
        yield request.param


def batch(query_lens, contexts, dtype, *, dims=DIMS, threshold=1, rows=CHUNK, device=CPU):
    """A batch over scattered pages, as the arguments of `mla_paged_attention`."""
    seqs = [new + old for new, old in zip(query_lens, contexts, strict=True)]
    needed = [-(-length // BLOCK) for length in seqs]
    ids = torch.randperm(sum(needed)).tolist()
    metadata = mla_ops.build_metadata(
        query_lens,
        seqs,
        [[ids.pop() for _ in range(count)] for count in needed],
        block_size=BLOCK,
        workspace_tokens=rows,
        decode_threshold=threshold,
        device=device,
    )
    shapes = (
        (sum(query_lens), dims.num_heads, dims.qk_head_dim),
        (sum(query_lens), dims.kv_lora_rank),
        (sum(query_lens), dims.qk_rope_head_dim),
        (dims.expanded_dim, dims.kv_lora_rank),
        (sum(needed), BLOCK, dims.latent_dim),
    )
    return (*(torch.randn(s, device=device).to(dtype) / 8 for s in shapes), metadata)


def measured(args):
    """The bytes that the call holds at its peak, results included, inputs not."""
    return peak_bytes(lambda: mla_ops.mla_paged_attention(*args, softmax_scale=0.1))


def limits(**changes):
    given = {"max_num_tokens": 2048, "max_num_seqs": 8, "max_model_len": 65_536}
    return ServingLimits(**{**given, "block_size": BLOCK, "workspace_tokens": CHUNK, **changes})


# --- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "requests", "block_size", "rows"),
    [
        (1000, 4, 16, 8000),  # eight of the longest requests
        (10, 100, 64, 25_600),  # four pages each
        (163_840, 256, 64, 65_536),
        (8192, 1, 1, 65_536),
        (1, 1, 1, 8),
        (1, 1, 11_000, 44_000),
        (1, 1, 100_000, 100_000),  # one page is the least
        (2**31 - 1, 2**31 - 1, 16, 65_536),  # the products need 64 bits
    ],
)
def test_rows(length, requests, block_size, rows):
    sizes = {"max_model_len": length, "max_num_seqs": requests, "block_size": block_size}
    assert mla_ops.workspace_tokens(**sizes) == rows
    assert ServingLimits(max_num_tokens=1, **sizes).rows == rows
    assert ServingLimits(max_num_tokens=1, workspace_tokens=3, **sizes).rows == 3


# --- bytes against what is measured --------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("context", [0, 1000, 16_000], ids="{} cached".format)
@pytest.mark.parametrize("new", [1, 3, 100, 300])
def test_the_formula_is_what_one_batch_holds(new, context, dtype):
    """Case 83, with no, one and many chunks: decodes, absorbed and expanded prefills."""
    cached = new <= 3 and context > 0
    args = batch([new], [context], dtype, threshold=3)
    sizes = PagedLimits(new, 0, BLOCK, CHUNK, 3, dtype, dtype, CPU)
    parts = batch_bytes(DIMS, sizes, new, new + context, cached=cached)
    allowed = parts.pop("other")
    with mla_ops.use_backend("tiled"):
        held = measured(args)
    assert sum(parts.values()) * 0.95 <= held <= sum(parts.values()) + allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("context", [0, 1024, 16_384, 63_488], ids="{} cached".format)
def test_what_is_reserved_is_what_the_worst_batch_uses(context, dtype, backend):
    """Case 83: within 5 % and never less, whatever the context."""
    reserved = workspace_bytes(DIMS, limits(), dtype=dtype, backend=backend).total
    assert 0.95 * reserved <= measured(batch([2048], [context], dtype)) <= reserved


@DTYPES
@pytest.mark.parametrize(
    ("query_lens", "contexts"),
    [
        ([1] * 8, [8000, 1, 30, 9000, 4000, 17, 64, 4097]),
        ([1, 1, 128, 20, 700], [5000, 40, 6000, 0, 100]),  # both forms, decodes and prefills
        ([171, 128, 129, 2], [9000, 4096, 0, 3]),
        ([600, 600], [0, 0]),
        ([5, 0, 7], [0, 0, 5000]),
    ],
    ids=["decodes", "mixed", "around the turn", "fresh", "empty"],
)
def test_no_legal_batch_holds_more_than_is_reserved(query_lens, contexts, dtype, backend):
    """Cases 83 and 84."""
    reserved = workspace_bytes(DIMS, limits(), dtype=dtype, backend=backend).total
    assert 0 < measured(batch(query_lens, contexts, dtype)) <= reserved


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_a_cache_in_another_dtype_is_counted(cache_dtype):
    args = batch([300], [9000], torch.bfloat16)
    args = (*args[:4], args[4].to(cache_dtype), args[5])
    bounds = limits(max_num_tokens=300)
    need = workspace_bytes(
        DIMS, bounds, dtype=torch.bfloat16, cache_dtype=cache_dtype, backend="tiled"
    )
    same = workspace_bytes(DIMS, bounds, dtype=torch.bfloat16, backend="tiled")
    assert need.parts["gathered"] != same.parts["gathered"]
    with mla_ops.use_backend("tiled"):
        assert 0 < measured(args) <= need.total


@pytest.mark.parametrize("heads", [1, 128])
@pytest.mark.parametrize("new", [1, 171, 172, 8192])
def test_tiles_keep_to_their_budget(new, heads):
    """Case 33: the tile follows from a limit by formula, for one head and for 128."""
    dims = MLADims(heads, 512, 128, 64, 128)
    plan = plan_tiles(dims, new, 65_536, workspace_tokens=None, device=CPU, converts=False)
    assert 0 < scratch_sizes(dims, plan).tile <= 1024 * 1024 * torch.get_num_threads()


# --- the loop over chunks ------------------------------------------------------------------------


def test_bytes_of_a_loop_over_chunks_by_hand():
    parts = chunk_loop_bytes(
        MLADims(2, 5, 3, 1, 4), limits(max_num_tokens=7, workspace_tokens=11), dtype=torch.bfloat16
    )
    assert parts == {
        "latents": 11 * 6 * 2,
        "expanded": 11 * 2 * 7 * 2,
        "new": 7 * 2 * 7 * 2,
        "partials": 2 * (7 * 2 * 4 * 4 + 2 * 7 * 4),
        "results": 7 * 2 * 4 * 2 + 2 * 7 * 4,
    }


def r1_gib(rows):
    """GiB of the loop over chunks on one device of eight, without the projection and with it."""
    bounds = limits(max_num_tokens=2048, max_model_len=163_840, workspace_tokens=rows)
    parts = chunk_loop_bytes(R1_TP8, bounds, dtype=torch.bfloat16)
    return (sum(parts.values()) - parts["expanded"]) / GIB, sum(parts.values()) / GIB


def test_the_projection_is_what_a_profile_run_missed():
    """The published peaks of a profile run were 0.19 GiB without the projection, 1.17 with it."""
    without, whole = r1_gib(131_072)
    assert whole - without == 1.0
    assert abs((whole - without) - (1.17 - 0.19)) < 0.03
    assert (round(without, 2), round(whole, 2)) == (0.20, 1.20)


def test_the_table_of_the_documentation_is_computed(monkeypatch):
    monkeypatch.setitem(tiling._CPU_COMPUTE, torch.bfloat16, torch.bfloat16)
    page = (Path(__file__).parents[1] / "docs" / "serving.md").read_text("utf-8")
    torch.set_num_threads(2)
    bounds = limits(max_num_tokens=2048, max_model_len=163_840, workspace_tokens=65_536)
    tiled = workspace_bytes(R1_TP8, bounds, dtype=torch.bfloat16, backend="tiled").total / GIB
    rows = re.findall(r"^\|[^|]*GiB[^|]*\| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    expected = [r1_gib(131_072), r1_gib(65_536)]
    assert [tuple(map(float, row)) for row in rows] == [
        (0.19, 1.17),
        *[(round(a, 2), round(b, 2)) for a, b in expected],
        (round(tiled, 2), round(tiled, 2)),
    ]


def test_a_backend_without_a_formula_is_taken_to_loop_over_chunks(monkeypatch):
    class Plain:
        name = "plain"

        def not_supported_reasons(self, call):
            return []

    monkeypatch.setattr(dispatch, "_registry", dict(dispatch._registry))
    mla_ops.register_backend(Plain(), automatic=False)
    need = workspace_bytes(DIMS, limits(), dtype=torch.bfloat16, backend="plain")
    assert need.backend == "plain"
    assert need.parts == chunk_loop_bytes(DIMS, limits(), dtype=torch.bfloat16)
    dispatch._select.cache_clear()


# --- profile -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [pytest.param("cpu", marks=needs_native), "tiled", "reference"])
def test_a_profile_holds_everything_at_once_and_keeps_nothing(name):
    need = workspace_bytes(DIMS, limits(), dtype=torch.bfloat16, backend=name)
    held = []
    peak = peak_bytes(
        lambda: held.append(mla_ops.profile(DIMS, limits(), dtype=torch.bfloat16, backend=name))
    )
    assert peak == need.total == held[0].total
    assert held == [need]


@pytest.mark.gpu
def test_a_profile_is_the_peak_on_a_device():
    device = torch.device("cuda")
    args = batch([2048], [16_384], torch.bfloat16, device=device)
    with mla_ops.use_backend("tiled"):
        mla_ops.mla_paged_attention(*args, softmax_scale=0.1)  # the workspace of cuBLAS comes once
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        mla_ops.mla_paged_attention(*args, softmax_scale=0.1)
    used = torch.cuda.max_memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    options = {"dtype": torch.bfloat16, "device": device, "backend": "tiled"}
    need = mla_ops.profile(DIMS, limits(), **options)
    reserved = torch.cuda.max_memory_allocated() - before
    assert need.total <= reserved <= need.total + 512 * len(need.parts)
    assert 0.95 * reserved <= used <= reserved


# --- a workspace ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_workspace_takes_what_its_formula_says(dtype):
    kept = []
    peak = peak_bytes(lambda: kept.append(mla_ops.reserve_workspace(DIMS, limits(), dtype=dtype)))
    parts = chunk_loop_bytes(DIMS, limits(), dtype=dtype)
    assert peak == kept[0].nbytes == parts["latents"] + parts["expanded"]


def test_a_locked_workspace_serves_the_largest_legal_batch():
    """Case 84: a loop over chunks in it equals the op, and no address changes."""
    rows, contexts, new = 64, [150, 0, 41], [9, 4, 7]
    query, kv_c, k_pe, w_kv_b, cache, metadata = batch(new, contexts, torch.float32, rows=rows)
    workspace = mla_ops.reserve_workspace(DIMS, limits(workspace_tokens=rows), dtype=torch.float32)
    workspace.lock()
    addresses = {workspace.latents(rows).data_ptr(), workspace.expanded(rows).data_ptr()}
    used = set()

    def expanded(latents, out=None):
        pair = torch.mm(latents[:, : DIMS.kv_lora_rank], w_kv_b.t(), out=out)
        pair = pair.view(len(latents), DIMS.num_heads, -1)
        return pair.split([DIMS.qk_nope_head_dim, DIMS.v_head_dim], dim=-1)

    def attend(nope, rope, value, cu_seqlens_k, is_causal):
        return mla_ops.mla_prefill(
            query,
            nope,
            rope,
            value,
            cu_seqlens_q=metadata.cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max(new),
            max_seqlen_k=rows,
            softmax_scale=0.1,
            is_causal=is_causal,
        )

    nope, value = expanded(kv_c)
    result = attend(nope, k_pe, value, metadata.cu_seqlens_q, True)
    for starts, cu in zip(metadata.chunk_starts, metadata.chunk_cu_seqlens, strict=True):
        count = int(cu[-1])
        latents, pair = workspace.latents(count), workspace.expanded(count)
        used |= {latents.data_ptr(), pair.data_ptr()}
        mla_ops.gather_kv_cache(
            cache, metadata.block_table, cu_seqlens_k=cu, seq_starts=starts, workspace=latents
        )
        nope, value = expanded(latents, pair)
        chunk = attend(nope, latents[:, DIMS.kv_lora_rank :], value, cu, False)
        result = mla_ops.merge_attn_states(*chunk, *result)
    right = mla_ops.mla_chunked_prefill(
        query, kv_c, k_pe, w_kv_b, cache, metadata, softmax_scale=0.1
    )
    assert metadata.num_chunks == 3
    assert used == addresses
    torch.testing.assert_close(result, right, atol=1e-5, rtol=1e-5)


def test_growth_is_refused_after_lock():
    """Case 77: a captured graph holds the addresses."""
    workspace = mla_ops.reserve_workspace(DIMS, limits(workspace_tokens=8), dtype=torch.float32)
    assert workspace.latents(9).shape == (9, DIMS.latent_dim)
    assert (workspace.rows, workspace.locked) == (9, False)
    workspace.lock()
    before = workspace.latents(9).data_ptr()
    message = (
        rf"locked with 9 rows \({workspace.nbytes} bytes\) reserved, and 10 were asked for.*"
        r"workspace_tokens=10\), before lock"
    )
    for view in (workspace.latents, workspace.expanded):
        with pytest.raises(InvalidInputError, match=message):
            view(10)
    assert (workspace.rows, workspace.latents(9).data_ptr()) == (9, before)
    assert workspace.expanded(0).shape == (0, DIMS.expanded_dim)


def test_the_two_parts_of_a_workspace_do_not_overlap():
    workspace = mla_ops.reserve_workspace(DIMS, limits(workspace_tokens=5), dtype=torch.float32)
    workspace.latents(5).fill_(1)
    workspace.expanded(5).fill_(2)
    assert (workspace.latents(5) == 1).all()
    assert (workspace.expanded(5) == 2).all()


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, 2**31, 1.5, True, "8", None], ids=repr)
@pytest.mark.parametrize("name", ["max_num_tokens", "max_num_seqs", "max_model_len", "block_size"])
def test_limits_are_counts(name, value):
    with pytest.raises(InvalidInputError, match=rf"{name} must be an int from 1 to 2147483647"):
        limits(**{name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "gpu"}, "device must be one that torch knows, got 'gpu'"),
        ({"dtype": torch.int32}, "dtype must be one of .*bfloat16.*, got torch.int32"),
        ({"cache_dtype": torch.float64}, "cache_dtype must be one of .*float8_e4m3fn"),
        ({"dims": MLADims(2**50, 512, 128, 64, 128)}, r"must fit in 2\*\*63 - 1 bytes, got \d{20}"),
    ],
)
@pytest.mark.parametrize("function", [workspace_bytes, mla_ops.profile])
def test_what_does_not_fit_is_refused(function, changes, message):
    given = {"dims": DIMS, "limits": limits(), "dtype": torch.float32, **changes}
    with pytest.raises(InvalidInputError, match=message):
        function(**given)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: limits(workspace_tokens=0), "workspace_tokens must be an int from 1"),
        (
            lambda: mla_ops.workspace_tokens(max_model_len=0, max_num_seqs=1, block_size=1),
            "max_model_len must be an int from 1",
        ),
        (lambda: mla_ops.Workspace(DIMS, 0, torch.float32, CPU), "rows must be an int from 1"),
        (lambda: mla_ops.Workspace(DIMS, 1, torch.int8, CPU), "dtype must be one of"),
        (
            lambda: mla_ops.Workspace(MLADims(2**50, 1, 1, 0, 1), 2**20, torch.float64, CPU),
            r"a workspace of 1048576 rows must fit in 2\*\*63 - 1 bytes",
        ),
        (lambda: mla_ops.Workspace(DIMS, 1, torch.float32, CPU).latents(-1), "rows must be an int"),
        (
            lambda: mla_ops.Workspace(DIMS, 1, torch.float32, f"cuda:{torch.cuda.device_count()}"),
            "device must be one of the .* CUDA devices",
        ),
    ],
)
def test_a_wrong_size_or_place_is_refused(call, message):
    with pytest.raises(InvalidInputError, match=message):
        call()


def test_sizes_beyond_32_bits_are_exact():
    bounds = limits(max_num_tokens=2**31 - 1, workspace_tokens=2**31 - 1)
    parts = chunk_loop_bytes(R1_TP8, bounds, dtype=torch.bfloat16)
    assert parts["expanded"] == (2**31 - 1) * 8192 > 2**43
    assert workspace_bytes(R1_TP8, bounds, dtype=torch.bfloat16, backend="tiled").total > 2**42


def test_an_unknown_backend_is_refused():
    with pytest.raises(mla_ops.BackendUnavailableError, match="must be auto or one of"):
        workspace_bytes(DIMS, limits(), dtype=torch.float32, backend="none")


# --- addresses -----------------------------------------------------------------------------------


def test_pages_beyond_the_reach_of_32_bits_read_and_write_like_others():
    """Case 26: element 2**31 of a cache; its pages are reserved, most are never touched."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    page, width, tokens = 58_256, 576, 100
    try:
        cache = torch.empty(page + 2, 64, width, dtype=torch.float8_e4m3fn)
    except RuntimeError:
        pytest.skip("no room for a cache of 2.2 GiB")
    assert cache.numel() > 2**31
    rows = torch.randn(tokens, width)
    dims = MLADims(2, 512, 16, 64, 8)
    query = torch.randn(1, 2, dims.qk_head_dim)
    weight = torch.randn(dims.expanded_dim, 512) / 16
    found = []
    for blocks in ([page, page + 1], [3, 4]):
        slots = torch.arange(tokens)
        slots = torch.tensor(blocks)[slots // 64] * 64 + slots % 64
        mla_ops.update_kv_cache(rows[:, :512], rows[:, 512:], cache, slots)
        table = torch.tensor([blocks], dtype=torch.int32)
        lens = torch.tensor([tokens], dtype=torch.int32)
        gathered = torch.empty(tokens, width)
        mla_ops.gather_kv_cache(
            cache,
            table,
            cu_seqlens_k=torch.tensor([0, tokens], dtype=torch.int32),
            seq_starts=torch.tensor([0], dtype=torch.int32),
            workspace=gathered,
        )
        out = mla_ops.mla_decode(query, weight, cache, table, lens, softmax_scale=0.1)
        found.append((gathered, *out))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    torch.testing.assert_close(found[0][0], rows, rtol=0.07, atol=0.01)
