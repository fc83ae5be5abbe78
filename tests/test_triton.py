"""The Triton backend without a GPU: choice, launches, and the suites that the interpreter runs.

The interpreter has to be asked for before triton is imported, so the files `test_triton_*.py` that
need it run in a child process each.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mla_ops
from mla_ops.dispatch import AttentionOptions, Call, PagedBatch, PagedLimits, select

pytest.importorskip("triton", reason="triton is not installed")

from mla_ops.dims import PRESETS
from mla_ops.kernels.triton import absorbed, configs, launch, memory
from mla_ops.kernels.triton.configs import ARCHS, Arch, Config, Expansion
from mla_ops.kernels.triton.expanded import Expanded, attend_expanded
from mla_ops.kernels.triton.problems import PROBLEMS, paged_batch

HERE = Path(__file__).parent
SUITES = ("dense", "backward", "paged", "cache")
CALL = Call("mla_attention", "cuda", torch.bfloat16)


def pytest_child(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    for name in [n for n in environment if n.startswith("PYTEST_")]:
        del environment[name]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        capture_output=True,
        text=True,
        env=environment | {"PYTHONSAFEPATH": "1"},
        cwd=HERE.parent,
        check=False,
    )


@pytest.mark.parametrize("suite", SUITES)
def test_in_the_interpreter(suite: str) -> None:
    done = pytest_child(str(HERE / f"test_triton_{suite}.py"))
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "passed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_long_sweeps_in_the_interpreter(suite: str) -> None:
    done = pytest_child(str(HERE / f"test_triton_{suite}.py"), "-m", "slow")
    assert done.returncode in (0, 5), done.stdout[-8000:] + done.stderr[-2000:]


def test_every_suite_of_the_interpreter_is_run() -> None:
    files = {path.stem.removeprefix("test_triton_") for path in HERE.glob("test_triton_*.py")}
    assert files - {"compile"} == set(SUITES)


def test_importing_and_a_cpu_call_do_not_import_the_kernels() -> None:
    code = """
import sys, torch, mla_ops
inputs = torch.zeros(1, 2, 1, 6), torch.zeros(1, 3, 4), torch.zeros(1, 3, 2), torch.zeros(14, 4)
mla_ops.mla_attention(*inputs, softmax_scale=1.0)
assert not [name for name in sys.modules if name.startswith("mla_ops.kernels.triton")]
"""
    environment = {**os.environ, "MLA_OPS_BACKEND": "", "PYTHONSAFEPATH": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert run.returncode == 0, run.stderr.decode()


def test_auto_takes_it_on_a_gpu_only() -> None:
    assert select(CALL).name == "triton"
    assert select(CALL._replace(device="cpu")).name != "triton"


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is on")
def test_what_it_does_not_take_has_a_reason() -> None:
    backend = mla_ops.get_backend("triton")
    (device, remedy) = backend.not_supported_reasons(CALL._replace(device="cpu"))
    assert device == "does not run on cpu, only on cuda"
    assert remedy.startswith("TRITON_INTERPRET=1")
    (dtype,) = backend.not_supported_reasons(CALL._replace(dtype=torch.float64))
    assert dtype == "does not compute in float64, only in bfloat16, float16, float32"
    query = torch.zeros(1, 2, 1, 6)
    with mla_ops.use_backend("triton"), pytest.raises(mla_ops.UnsupportedInputError) as caught:
        mla_ops.mla_attention(
            query, torch.zeros(1, 3, 4), torch.zeros(1, 3, 2), torch.zeros(14, 4), softmax_scale=1.0
        )
    assert list(caught.value.reasons) == ["triton"]


def test_it_takes_the_backward_of_its_forward() -> None:
    assert select(CALL._replace(op="mla_attention_backward")).name == "triton"


class Created(TorchDispatchMode):
    """The sizes of the tensors that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.bytes.add(result.untyped_storage().nbytes())
        return result


def test_scratch_of_a_backward_does_not_grow_with_the_context() -> None:
    """What is made beside the gradients is bounded by the workspace."""
    dims, backend = PRESETS["deepseek-v2-lite"], mla_ops.get_backend("triton")
    found = []
    for keys in (4096, 32_768):
        out = torch.empty(1, dims.num_heads, 64, dims.v_head_dim, device="meta")
        query = torch.empty(1, dims.num_heads, 64, dims.qk_head_dim, device="meta")
        rows = [torch.empty(1, keys, n, device="meta") for n in (512, 64)]
        weight = torch.empty(dims.expanded_dim, dims.kv_lora_rank, device="meta")
        options = AttentionOptions(None, None, None, 0.1, True, 1024)
        with launch.recording(), Created() as created:
            backend.mla_attention_backward(
                out, None, query, *rows, weight, out, out[..., 0], options
            )
        found.append(created.bytes - {row.nbytes for row in rows})
    assert found[0] == found[1]
    assert max(found[0]) == 1024 * dims.expanded_dim * 4


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_table_has_something_for_every_model(name: str, arch: Arch) -> None:
    dims = PRESETS[name]
    for rows in (1, 16, 17, 32, 33, 128, 4096):
        offered = configs.absorbed_configs(
            rows, dims.kv_lora_rank, dims.qk_rope_head_dim, 2, False, False, arch
        )
        assert offered
        assert offered == configs.absorbed_configs(
            rows, dims.kv_lora_rank, dims.qk_rope_head_dim, 2, False, False, arch
        )
    widths = (dims.qk_nope_head_dim, dims.qk_rope_head_dim, dims.v_head_dim)
    for tma in {False, arch.has_descriptors}:
        offered = configs.expanded_configs(Expansion(*widths, 2, False, tma), arch)
        assert {config.tma for config in offered} == {False, tma}
        assert offered[0].tma == tma


@pytest.mark.parametrize(
    ("block_size", "block_n", "ids"),
    [(64, 32, 1), (32, 32, 1), (16, 32, 2), (8, 32, 4), (4, 32, -1), (1, 32, -1), (3, 32, -1)],
)
def test_block_ids_of_a_tile(block_size: int, block_n: int, ids: int) -> None:
    assert configs.block_ids(block_size, block_n) == ids


def test_choice_is_the_first_offer_unless_it_is_to_be_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offered, ran = [Config(16, 16, 4, 1), Config(16, 32, 4, 1)], []
    configs.run_chosen("absorbed", lambda: "a key", offered, ran.append, True)
    monkeypatch.setenv("MLA_OPS_AUTOTUNE", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    times = iter([2.0, 1.0])
    monkeypatch.setattr(configs.triton.testing, "do_bench", lambda run: [run(), next(times)][1])
    monkeypatch.setattr(configs, "_TUNED", {})
    for _ in range(2):
        configs.run_chosen("absorbed", lambda: "a key", offered, ran.append, True)
    configs.run_chosen("absorbed", lambda: "another", offered, ran.append, False)
    assert ran == [offered[0], *offered, offered[1], offered[1], offered[0]]


@pytest.fixture
def records() -> Iterator[list[launch.Launch]]:
    with launch.recording() as found:
        yield found


@pytest.mark.parametrize("problem", PROBLEMS)
def test_kernels_have_names_that_a_profiler_shows(
    problem: str, records: list[launch.Launch]
) -> None:
    PROBLEMS[problem]()
    assert records
    for record in records:
        name = record.kernel.__name__
        assert name.startswith("mla_")
        assert name.endswith("_kernel")


def loads_of(arch: str, pair: int = 256, keys: int = 64, mask: torch.Tensor | None = None) -> set:
    """With and without descriptors: what the launches of a prefill are built for."""
    query = torch.empty(2, 16, 64, 192, dtype=torch.bfloat16, device="meta")
    expanded, rope = query.new_empty(2, keys, 16, pair), query.new_empty(2, keys, 64)
    parts = expanded[..., :128], rope, expanded[..., 128:256]
    rules = absorbed.Rules(1.0, mask, is_causal=True)
    with launch.recording() as found, configs.every_config(ARCHS[arch]):
        given = Expanded(query, *parts, None, None, num_keys=keys)
        attend_expanded(given, rules, query[..., :128], query[..., 0], None)
        if mask is None:
            starts = query.new_empty(3, dtype=torch.int32)
            given = Expanded(query[0].transpose(0, 1), *(part[0] for part in parts), starts, starts)
            attend_expanded(given, rules, given.query[..., :128], query[0, ..., 0], None)
    return {record.options["TMA"] for record in found}


@pytest.mark.parametrize(
    ("arch", "options", "loads"),
    [
        ("sm90", {}, {True, False}),
        ("sm100", {}, {True, False}),
        ("sm120", {}, {False}),
        ("sm80", {}, {False}),
        ("gfx942", {}, {False}),
        ("sm90", {"pair": 257}, {False}),  # rows that are not in steps of 16 bytes
        ("sm90", {"keys": 0}, {False}),
        ("sm90", {"mask": torch.empty(2, 1, 64, 64, dtype=torch.uint8)}, {False}),
    ],
)
def test_descriptors_are_used_where_they_can_be_made(
    arch: str, options: dict, loads: set, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loads_of(arch, **options) == loads
    monkeypatch.setenv("MLA_OPS_TMA", "0")
    assert loads_of(arch, **options) == {False}


def test_no_descriptor_of_what_is_not_aligned_or_is_repeated() -> None:
    key, rope = torch.zeros(8, 2, 16, dtype=torch.bfloat16), torch.zeros(8, 16).bfloat16()
    starts = torch.zeros(2, dtype=torch.int32)

    def takes(key: torch.Tensor, rope: torch.Tensor) -> bool:
        return Expanded(key, key, rope, key, starts, starts).takes_descriptors()

    assert takes(key, rope)
    assert takes(key, rope[:, :0])
    assert not takes(key[:1].expand(8, 2, 16), rope)
    assert not takes(key, torch.zeros(129).bfloat16()[1:].view(8, 16))
    assert not takes(torch.zeros(8, 2, 20).bfloat16(), rope)


def plain(record: launch.Launch) -> list[object]:
    """What a captured graph would hold: everything but addresses."""
    shapes = [a.shape if isinstance(a, torch.Tensor) else a for a in record.args]
    return [record.kernel.__name__, record.grid, shapes, record.options]


def test_a_decode_launch_does_not_depend_on_lengths(records: list[launch.Launch]) -> None:
    """What is launched for a batch of decodes follows from shapes: a graph stays right."""
    dims, backend = PRESETS["deepseek-v2-lite"], mla_ops.get_backend("triton")
    found = []
    for lens in ([1] * 4, [1, 1, 0, 0]):
        for context in (10, 5000):
            # As many tokens in either case, as in a graph: some of them belong to nobody.
            tensors = paged_batch(dims, [1] * 4, context)[:4]
            batch = PagedBatch(*tensors, *paged_batch(dims, lens, context, num_decodes=4)[4:])
            backend.mla_paged_attention(batch)
            backend.mla_paged_attention(batch._replace(kv_c=None, k_pe=None))
            found.append([plain(record) for record in records])
            records.clear()
    assert len(found[0]) >= 2
    assert found == [found[0]] * 4


def test_launches_are_made_on_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another device current, the launch is inside of a guard."""
    current, seen = [0], []

    class Guard:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            current.append(self.index)

        def __exit__(self, *args: object) -> None:
            current.pop()

    class OnSecond:
        is_cuda = True

        def get_device(self) -> int:
            return 1

    class Kernel:
        def __getitem__(self, grid: object):
            return lambda *args: seen.append(current[-1])

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", Guard)
    launch.launch(Kernel(), (1,), OnSecond())  # type: ignore[arg-type]
    launch.launch(Kernel(), (0, 3), OnSecond())  # type: ignore[arg-type]
    assert (seen, current) == ([1], [0])


@pytest.mark.parametrize(
    ("new", "context", "form"),
    [
        (1, 8192, "absorbed"),
        (4, 0, "absorbed"),  # a handful
        (5, 0, "expanded"),
        (100, 0, "expanded"),
        (100, 8192, "absorbed"),
        (180, 8192, "expanded"),
    ],
)
def test_the_form_is_the_one_that_costs_less(
    new: int, context: int, form: str, records: list[launch.Launch]
) -> None:
    """Dense and paged calls follow `MLADims.should_expand`."""
    dims, backend = PRESETS["deepseek-v2-lite"], mla_ops.get_backend("triton")
    assert dims.should_expand(new, context + new) == (form == "expanded")
    query = torch.empty(1, 16, new, 192, dtype=torch.bfloat16, device="meta")
    rows = [query.new_empty(1, context + new, n) for n in (512, 64)]
    weight = query.new_empty(16 * 256, 512)
    options = AttentionOptions(None, None, None, 0.1, True, None)
    backend.mla_attention(query, *rows, weight, options)
    dense = {record.kernel.__name__ for record in records}
    records.clear()
    backend.mla_paged_attention(paged_batch(dims, [new], context))
    paged = {record.kernel.__name__ for record in records}
    attention = {"mla_absorbed_kernel", "mla_expanded_kernel"}
    assert dense & attention == paged & attention == {f"mla_{form}_kernel"}


def test_requests_of_one_form_are_one_run(records: list[launch.Launch]) -> None:
    """A prompt between short extends cuts them in two; requests without tokens are left out."""
    dims, backend = PRESETS["deepseek-v2-lite"], mla_ops.get_backend("triton")
    lens = [8, 9, 300, 7, 0]
    backend.mla_paged_attention(paged_batch(dims, lens, 600))
    names = [record.kernel.__name__ for record in records]
    extend = ["mla_absorbed_kernel", "mla_absorbed_kernel", "mla_merge_splits_kernel"]
    chunk = ["mla_cache_gather_kernel", "mla_expanded_kernel"]
    assert names == [*extend, *chunk, "mla_expanded_kernel", *extend]


@pytest.mark.parametrize("heads", [3, 16, 128])
@pytest.mark.parametrize(("requests", "new"), [(1, 1), (1, 100), (7, 2), (300, 1)])
def test_splits_stay_within_what_is_reserved(heads: int, requests: int, new: int) -> None:
    tokens, arch = requests * new, ARCHS["sm90"]
    latent = torch.empty(heads, tokens, 512, dtype=torch.bfloat16, device="meta")
    limits = PagedLimits(
        tokens, 2**17, 64, 1024, new, torch.bfloat16, torch.bfloat16, torch.device("cpu")
    )
    queries = absorbed.Queries(latent, latent, 448, (0, 0, 0), requests, new)
    rules = absorbed.Rules(1.0, is_causal=True)
    keys = [absorbed.Keys(2, latent, latent, most) for most in (2**17, new)]
    for config in configs.absorbed_configs(heads * new, 512, 64, 2, False, False, arch):
        splits = [absorbed._plan_splits(queries, k, rules, config, arch)[0] for k in keys]
        rows = sum(splits) * heads * tokens
        assert rows <= memory.partial_rows(heads, limits, arch.processors)
    parts = mla_ops.get_backend("triton").paged_bytes(PRESETS["deepseek-v3"], limits)
    assert min(parts.values()) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("new", [1, 3])
def test_a_captured_decode_follows_its_lengths(new: int) -> None:
    dims, requests, pages = PRESETS["deepseek-v2-lite"], 4, 8
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    query = torch.randn(requests * new, dims.num_heads, dims.qk_head_dim, **options)
    weight = torch.randn(dims.expanded_dim, dims.kv_lora_rank, **options) / 20
    cache = torch.randn(requests * pages, 64, dims.latent_dim, **options)
    table = torch.randperm(requests * pages, device="cuda").view(requests, pages).int()
    lens = torch.tensor([512, 65, 64, 3], dtype=torch.int32, device="cuda")

    def attend() -> mla_ops.MLAOutput:
        return mla_ops.mla_decode(query, weight, cache, table, lens, softmax_scale=0.07)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    for changed in ([512, 65, 64, 3], [1, 0, 300, 511], [0, 0, 0, 0]):
        lens.copy_(torch.tensor(changed, dtype=torch.int32))
        graph.replay()
        torch.testing.assert_close(captured, attend(), rtol=0, atol=0, equal_nan=True)
        with mla_ops.use_backend("tiled"):
            expected = attend()
        torch.testing.assert_close(captured.out, expected.out, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(captured.lse, expected.lse, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("switch", ["1", "0"])
def test_a_prefill_with_and_without_descriptors(
    switch: str, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of the last request are NaN, and every row behind it."""
    monkeypatch.setenv("MLA_OPS_TMA", switch)
    dims, options = PRESETS["deepseek-v2-lite"], {"dtype": torch.bfloat16, "device": "cuda"}
    starts = torch.tensor([0, 300, 300, 307, 700, 900], dtype=torch.int32, device="cuda")
    pair = torch.randn(960, dims.num_heads, 256, **options)
    query, rope = torch.randn(960, dims.num_heads, 192, **options), torch.randn(960, 64, **options)
    pair[700:, :, 128:], query[900:] = float("nan"), float("nan")
    pair[900:], rope[900:] = float("nan"), float("nan")
    tensors = query, pair[..., :128], rope, pair[..., 128:]
    rules = {"max_seqlen_q": 393, "max_seqlen_k": 393, "softmax_scale": 0.07}
    rules |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "is_causal": is_causal}
    out, lse = mla_ops.mla_prefill(*tensors, **rules)
    with mla_ops.use_backend("reference"):
        exact = mla_ops.mla_prefill(*(tensor.double() for tensor in tensors), **rules)
    assert out[:700].isfinite().all()
    torch.testing.assert_close(out.double(), exact.out, rtol=2e-2, atol=2e-2, equal_nan=True)
    torch.testing.assert_close(lse.double(), exact.lse, rtol=1e-4, atol=1e-3)
