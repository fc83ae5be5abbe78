"""Kernels compile for GPUs that are not here, and the report says what they take."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")
pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from mla_ops import cli
from mla_ops.errors import InvalidInputError
from mla_ops.kernels.triton import aot
from mla_ops.kernels.triton.configs import ARCHS, Config, override
from mla_ops.kernels_command import KernelError

SMALL = ("merge of states", "cache, fp8")


def invoke(*arguments: str) -> str:
    app = cli.build_app()
    result = CliRunner().invoke(app, ["compile-kernels", *arguments], env={"COLUMNS": "160"})
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


def test_small_kernels_compile_for_every_vendor(tmp_path: Path) -> None:
    table, figures = tmp_path / "table.md", tmp_path / "figures.json"
    options = ("--only", "merge of", "--markdown", str(table), "--json", str(figures))
    shown = invoke("--targets", "sm90,gfx942", *options)
    assert "2 kernels compile" in shown
    assert table.read_text("utf-8").startswith("| call | kernel | tile | variant | sm90 | gfx942 |")
    loaded = json.loads(figures.read_text("utf-8"))
    assert [report["target"] for report in loaded] == ["sm90", "gfx942"]
    assert all(8 <= report["registers"] <= 255 for report in loaded)
    assert all(report["in_loop"] == 0 and not report["error"] for report in loaded)


def test_a_decode_kernel_compiles_without_a_spill_in_its_main_loop() -> None:
    every = [u for u in aot.units(["sm90"], ["decode, 16 rows"]) if "absorbed" in u.kernel]
    (report,) = aot.compile_units(every[:1])
    assert report.faults == []
    assert report.unit.config == "16x32 w4 st3"
    assert report.shared > 50_000
    assert report.registers >= 128


def test_a_prefill_kernel_compiles_with_descriptors() -> None:
    """One source, with a switch: descriptors become bulk copies, and no spill in the main loop."""
    every = [u for u in aot.units(["sm90"], ["prefill"]) if u.kernel == "mla_expanded_kernel"]
    assert [unit.config.endswith("tma") for unit in every] == [True, True, False, False]
    (report,) = aot.compile_units(every[:1])
    assert report.faults == []
    assert report.unit.config == "128x128 w8 st2 tma"
    copies = [
        path.read_text("utf-8") for path in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.ptx")
    ]
    assert ["cp.async.bulk.tensor.4d" in text for text in copies] == [True]


def test_faults_are_found() -> None:
    """Too much shared memory, a spill in the loop, and what does not compile at all."""
    (unit,) = list(aot.units(["sm90"], ["merge of states"]))
    good = aot.Report(unit, 40, 0, 0, 1000, 2000, "")
    assert good.faults == []
    assert good._replace(spilled=64).faults == []
    assert good._replace(in_loop=2).faults == ["2 spills in the main loop"]
    assert good._replace(shared=2001).faults == ["shared memory 2001 > 2000"]
    (broken,) = aot.compile_units([unit._replace(number=99)])
    assert "IndexError" in broken.faults[0]


def test_a_failure_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    (unit,) = list(aot.units(["sm90"], ["merge of states"]))
    bad = aot.Report(unit, 255, 800, 12, 1000, 2000, "")
    monkeypatch.setattr(aot, "compile_units", lambda every: iter([bad]))
    with pytest.raises(KernelError, match=r"1 of 1 kernels fail:\n.*12 spills in the main loop"):
        invoke("--targets", "sm90", "--only", "merge of")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"expected some of sm80, .*, got sm91"):
        list(aot.units(["sm91"]))
    assert "decode, 16 rows" in invoke("--list")


LISTING = """
.L_x_0:
 LDL R1, [R2] ;
 FFMA R1, R2 ;
 BRA `(.L_x_0) ;
.L_x_1:
 HMMA.16816.F32 R4, R8 ;
 STL [R1], R2 ;
 BRA `(.L_x_1) ;
.L_x_2:
 HMMA.16816.F32 R4, R8 ;
 LDL R2, [R1] ;
 BRA `(.L_x_2) ;
"""


def test_the_main_loop_is_the_first_one_that_multiplies() -> None:
    lines = LISTING.splitlines()
    loop = aot._main_loop(lines, *aot._NVIDIA_PLACES)
    assert [lines[n].split()[0] for n in loop] == [".L_x_1:", "HMMA.16816.F32", "STL"]


def test_without_matrix_units_it_is_the_first_one_of_many_products() -> None:
    body = " FFMA R1, R2, R3, R1 ;\n"
    few, many = (f".L_x_{n}:\n{body * n} BRA `(.L_x_{n}) ;\n" for n in (8, 64))
    lines = (few + many).splitlines()
    assert aot._main_loop(lines, *aot._NVIDIA_PLACES).start == lines.index(".L_x_64:")


@pytest.mark.parametrize("target", sorted(ARCHS))
def test_every_target_has_units_of_every_kernel(target: str) -> None:
    found = list(aot.units([target]))
    kernels = {unit.kernel for unit in found}
    assert kernels == {
        "mla_absorbed_kernel",
        "mla_backward_keys_kernel",
        "mla_backward_queries_kernel",
        "mla_backward_rows_kernel",
        "mla_cache_gather_kernel",
        "mla_cache_write_kernel",
        "mla_expanded_kernel",
        "mla_merge_splits_kernel",
        "mla_merge_states_kernel",
        "mla_project_kernel",
    }


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nproc") is None, reason="a long compilation, on Linux only")
@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100", "sm120", "gfx942"])
def test_everything_compiles(target: str) -> None:
    faulty = [r for r in aot.compile_units(list(aot.units([target]))) if r.faults]
    assert [(str(r.unit), r.faults) for r in faulty] == []


def test_a_forced_tile_is_what_is_compiled() -> None:
    with override("absorbed", Config(16, 16, 4, 2)):
        found = [u for u in aot.units(["sm90"], ["decode, 16 rows"]) if "absorbed" in u.kernel]
    assert [unit.config for unit in found] == ["16x16 w4 st2"]
