"""The native CPU kernels: what makes them different from other backends.

That they give the oracle's numbers is checked with every backend (test_backends.py), and over a
paged cache with every test that runs with either backend of a CPU.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from families import in_a_fresh_process
from native import needs_native

import mla_ops
from mla_ops import MLADims, reference
from mla_ops.dispatch import Call
from mla_ops.kernels.cpu import build
from mla_ops.testing import DIMS, attention_inputs

WIDE = MLADims(16, 128, 32, 16, 24)  # as many heads as a vector has lanes
CALL = Call("mla_attention", "cpu", torch.bfloat16)


@pytest.fixture
def threads() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@pytest.fixture
def nothing_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("MLA_OPS_CACHE_DIR", str(tmp_path))
    return tmp_path


def errors(dims: MLADims, sizes: tuple[int, int, int], dtype: torch.dtype, **options) -> None:
    """Within twice the error of the oracle in the same dtype, and a rounding step."""
    inputs = attention_inputs(dims, sizes, dtype=dtype, **options)
    fp64 = inputs.map(lambda t: t.double() if t.is_floating_point() else t)

    def run(function, given):
        arguments = {k: v for k, v in given.options.items() if k != "workspace_tokens"}
        return function(*given[:4], **arguments)

    exact = run(reference.mla_attention, fp64)
    ordinary = run(reference.mla_attention, inputs)
    with mla_ops.use_backend("cpu"):
        ours = mla_ops.mla_attention(*inputs[:4], **inputs.options)
    size = exact.out.abs().max().item()
    allowed = 2 * (ordinary.out - exact.out).abs().max().item() + torch.finfo(dtype).eps * size
    assert (ours.out - exact.out).abs().max().item() <= allowed
    seen = torch.isfinite(exact.lse)
    assert torch.equal(torch.isfinite(ours.lse), seen)
    close = 2e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(ours.lse[seen].double(), exact.lse[seen], atol=close, rtol=close)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keys", [1, 15, 16, 17, 127, 128, 129, 257, 1024, 1500])
def test_sizes_around_tiles_and_spans(keys: int, dtype: torch.dtype, threads: None) -> None:
    torch.set_num_threads(3)
    errors(WIDE, (2, 1, keys), dtype)
    errors(WIDE, (1, 3, keys), dtype, is_causal=True)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [1, 2, 16, 17, 33, 128, 130])
def test_rows_around_vectors_and_blocks(heads: int, dtype: torch.dtype) -> None:
    errors(MLADims(heads, 64, 16, 8, 16), (1, 1, 140), dtype)
    errors(MLADims(heads, 64, 16, 8, 16), (1, 2, 140), dtype, is_causal=True)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("new", [63, 64, 65, 129, 300])
def test_queries_around_blocks_in_the_expanded_form(
    new: int, dtype: torch.dtype, threads: None
) -> None:
    """Seven threads for two heads: the queries are divided, too."""
    dims = MLADims(2, 48, 16, 8, 12)
    assert new > dims.expand_threshold
    for count in (1, 7):
        torch.set_num_threads(count)
        errors(dims, (1, new, new), dtype, is_causal=True)
        errors(dims, (1, new, new + 260), dtype, is_causal=True)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [2, 12, 13, 63, 64, 65, 130])
def test_tokens_around_what_the_up_projections_take_at_once(
    tokens: int, dtype: torch.dtype
) -> None:
    errors(MLADims(3, 64, 60, 8, 100), (1, tokens, 150), dtype, is_causal=True)
    errors(MLADims(40, 32, 16, 8, 100), (tokens, 1, 20), dtype)


@needs_native
@pytest.mark.parametrize("dims", [MLADims(3, 41, 15, 7, 11), MLADims(5, 33, 0, 9, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_odd_widths(dims: MLADims, dtype: torch.dtype) -> None:
    for new in (1, 2, 60):
        errors(dims, (2, new, 70), dtype, is_causal=True)


@needs_native
@pytest.mark.parametrize("sizes", [(1, 1, 3000), (3, 2, 1100), (1, 200, 400)], ids=str)
def test_the_bits_depend_on_the_number_of_threads_alone(
    sizes: tuple[int, int, int], threads: None
) -> None:
    inputs = attention_inputs(WIDE, sizes, dtype=torch.bfloat16, is_causal=True)
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        with mla_ops.use_backend("cpu"):
            runs = [mla_ops.mla_attention(*inputs[:4], **inputs.options) for _ in range(4)]
        assert all(torch.equal(run.out, runs[0].out) for run in runs)
        assert all(torch.equal(run.lse, runs[0].lse) for run in runs)


@needs_native
@pytest.mark.parametrize("new", [1, 200])
def test_a_nan_that_is_seen_shows_and_one_that_is_hidden_does_not(new: int) -> None:
    inputs = attention_inputs(WIDE, (1, new, 300), dtype=torch.bfloat16)
    inputs.kv_c[0, 7] = float("nan")
    scale = inputs.options["softmax_scale"]
    mask = torch.ones(300, dtype=torch.bool)
    with mla_ops.use_backend("cpu"):
        assert mla_ops.mla_attention(*inputs[:4], softmax_scale=scale).out.isnan().all()
        mask[7] = False
        hidden = mla_ops.mla_attention(*inputs[:4], softmax_scale=scale, attn_mask=mask)
        inputs.kv_c[0, 7] = 0.0
        clean = mla_ops.mla_attention(*inputs[:4], softmax_scale=scale, attn_mask=mask)
    assert torch.equal(hidden.out, clean.out)


@needs_native
@pytest.mark.parametrize("place", ["out", "suffix"])
def test_a_partial_result_in_fp64_beside_others(place: str) -> None:
    generator = torch.Generator().manual_seed(0)
    outs = [torch.randn(5, 3, 20, generator=generator) for _ in range(2)]
    lses = [torch.randn(3, 5, generator=generator) for _ in range(2)]
    expected = mla_ops.merge_attn_states(outs[0], lses[0], outs[1], lses[1])
    target = torch.full((5, 3, 20), float("nan"))
    if place == "out":
        target = target.double()
    else:
        outs[1] = outs[1].double()
    with mla_ops.use_backend("cpu"):
        lse = mla_ops.merge_attn_states(outs[0], lses[0], outs[1], lses[1], out=target).lse
    torch.testing.assert_close(target.float(), expected.out)
    torch.testing.assert_close(lse, expected.lse)


@needs_native
@pytest.mark.parametrize("dims", [WIDE, *DIMS.values()], ids=str)
def test_the_form_is_chosen_as_everywhere(dims: MLADims) -> None:
    native = mla_ops.get_backend("cpu")._native
    widths = (dims.kv_lora_rank, dims.qk_nope_head_dim, dims.qk_rope_head_dim, dims.v_head_dim)
    for queries in range(0, 90, 3):
        for keys in range(0, 400, 7):
            ours = native.should_expand(*widths, queries, keys)
            assert ours == dims.should_expand(queries, keys)


@needs_native
def test_auto_takes_it_where_it_can() -> None:
    assert mla_ops.dispatch.select(CALL).name == "cpu"
    for other in (CALL._replace(dtype=torch.float64), CALL._replace(op="mla_attention_backward")):
        assert mla_ops.dispatch.select(other).name == "tiled"


@needs_native
def test_it_says_how_it_multiplies() -> None:
    text = mla_ops.get_backend("cpu").describe()
    assert re.match(r"AVX\d+, (bf16 by (AMX|AVX512-BF16)|16-bit inputs in fp32); ", text)
    assert text.endswith(str(build.library_path()))


ON_AVX2 = """
import torch
import mla_ops
from mla_ops.kernels.cpu import build
from mla_ops.testing import conformance_cases

assert "-march=x86-64-v3" in build.flags()
assert torch.backends.cpu.get_cpu_capability() == "AVX2"
backend = mla_ops.get_backend("cpu")
assert "16-bit inputs in fp32" in backend.describe(), backend.describe()
for case in conformance_cases():
    if str(case) in ("decode", "extend-additive", "prefill-bounds", "prefill-no-rope"):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            case.check("cpu", dtype)
"""


@needs_native
def test_a_cpu_without_avx512(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Torch and its matrix library are told to do without; the kernels are built for it."""
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    in_a_fresh_process(ON_AVX2, tmp_path)


def test_no_compiler(nothing_built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ImportError, match="needs a C\\+\\+ compiler, and there is no no-such-comp"):
        build.load()
    assert not list(nothing_built.rglob("*.so"))


def test_no_headers(nothing_built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", sys.executable)  # any program will do
    monkeypatch.setattr(build, "python_header", lambda: nothing_built / "Python.h")
    with pytest.raises(
        ImportError, match=r"needs the headers of Python \(python3-dev\), there is no"
    ):
        build.load()


@needs_native
def test_a_compiler_that_fails_is_asked_once(
    nothing_built: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    count = nothing_built / "count"
    script = nothing_built / "c++"
    script.write_text(f"#!/bin/sh\necho x >> {count}\necho 'no such flag' >&2\nexit 1\n", "utf-8")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    for _ in range(2):
        with pytest.raises(ImportError, match="could not be compiled"):
            build.load()
    calls = count.read_text("utf-8")
    assert "could not be compiled" in caplog.text
    with pytest.raises(ImportError):
        build.load()
    assert count.read_text("utf-8") == calls
    assert not list(nothing_built.rglob("mla_ops_cpu_*"))


def test_other_machines_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
    with pytest.raises(ImportError, match=r"needs Linux on x86_64, this is \w+ on aarch64"):
        build.load()
    monkeypatch.undo()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    with pytest.raises(ImportError, match="needs a CPU with AVX2 or AVX512, torch found DEFAULT"):
        build.flags()


def test_the_library_goes_by_what_it_is_made_of(
    nothing_built: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = build.library_path()
    assert first.parent == nothing_built / "kernels"
    sources = tmp_path / "sources"
    shutil.copytree(build._SOURCES, sources, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(build, "_SOURCES", sources)
    assert build.library_path() == first
    with (sources / "lanes.h").open("a", encoding="utf-8") as header:
        header.write("// another\n")
    second = build.library_path()
    monkeypatch.setattr(torch, "__version__", "0.0.0")
    assert len({first, second, build.library_path()}) == 3


@needs_native
def test_a_cache_that_cannot_be_written_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_OPS_CACHE_DIR", os.devnull)
    with pytest.raises(ImportError, match=r"could not be compiled: .*(Not a dir|exists)"):
        build.load()
