"""What a run leaves behind: files that are whole, tables that are right, and comparisons."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

import torch
from rich.console import Console
from typer.testing import CliRunner

import mla_ops
from mla_ops.bench.cases import LITE, AttentionCase, CacheCase
from mla_ops.bench.compare import compare, require_same
from mla_ops.bench.document import Document, Machine, this_machine
from mla_ops.bench.extras import PagedCase, PagedResult
from mla_ops.bench.limits import Limits
from mla_ops.bench.plots import draw_figures
from mla_ops.bench.runner import LeftOut, Row, WrongResultError
from mla_ops.bench.tables import changes, grids, insert, markdown, notes
from mla_ops.bench.timing import Timing
from mla_ops.cli import build_app
from mla_ops.errors import InvalidInputError

pytestmark = pytest.mark.usefixtures("with_one_thread")

ROOT = Path(__file__).parent.parent
SMALL = AttentionCase(LITE, 1, 1, 63)
TINY = PagedCase(LITE, 2, 90, 1, 40, 70)


def row(case: str, side: str, ms: float, *, against: str | None = None, backend: str = "tiled"):
    group, model, size = case.split("/")
    requests, new, cached = (int(part) for part in re.split("[x@]", size))
    return Row(
        *(case, group, model, 16, requests, new, cached, "bfloat16", side, backend, against),
        Timing(ms / 1e3, ms / 1e3 * 0.9, ms / 1e3 * 1.1, ms / 2e3, 7),
        *(1e-3, 2e11 / ms, 3e9 / ms, 0.5, 0.25),
    )


@pytest.fixture
def document():
    found = Document(
        Machine("cpu", "A processor", "AVX512", 2, "bfloat16", {"mla_ops": "1", "torch": "2"}),
        Limits(12e9, 400e9, "bfloat16"),
        absent={"vLLM": "vllm is not installed"},
    )
    for cached, ours in ((512, 1.0), (8192, 2.0)):
        name = f"decode/{LITE}/1x1@{cached}"
        found.add(row(name, "mla_ops dense", ours))
        found.add(row(name, "mla_ops paged", ours / 2, backend="cpu"))
        found.add(row(name, "transformers", ours * 40, against="mla_ops dense"))
        found.add(row(name, "other", ours * 4, against="mla_ops paged", backend="slow"))
        found.add(row(name, "other", ours, against="mla_ops paged", backend="fast"))
    found.add(row(f"prefill/{LITE}/1x512@0", "mla_ops dense", 30.0))
    for case in (f"prefill/{LITE}/1x512@0", f"prefill/{LITE}/1x512@8192"):
        for side in ("other", "third", "third"):  # two variants of the third
            found.add(LeftOut(case, side, "takes no prompt"))
    found.add(LeftOut(f"decode/{LITE}/1x1@512", "other", "this variant does not"))
    found.add(LeftOut(f"prefill/{LITE}/1x512@32768", None, "the time was up"))
    found.paged.append(PagedResult(TINY.name, "mixed / halves", Timing.of([2e-3]), 1e-3))
    found.scratch["prefill/x"] = 2**20
    return found


def shown(document: Document, width: int = 160) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        for grid in grids(document):
            console.print(grid)
        console.print("\n".join(notes(document)))
    return capture.get()


def test_a_table_compares_each_side_with_its_counterpart(document):
    decode = next(iter(grids(document)))
    assert decode.header == (
        *("model / requests x new @ cached", "backend", "mla_ops dense", "mla_ops paged"),
        *("transformers", "other", "GB/s (of read)", "GFLOP/s (of matmul)"),
    )
    # transformers against the dense op, the fastest variant of the other against the paged one
    assert decode.rows[0] == (
        *(f"{LITE}/1x1@512", "tiled / cpu", "1 ±10%", "0.5 ±10%", "40 (40x)", "1 (2x)"),
        *("6 (25%)", "400 (50%)"),  # of the paged op, which is faster
    )
    text = shown(document)
    assert "mixed / halves" in text
    assert "2.00" in text


def test_a_narrow_terminal_loses_no_figure(document):
    wide, narrow = shown(document, 120), shown(document, 80)
    assert all(len(line.rstrip()) <= 80 for line in narrow.splitlines())
    assert (
        f"{LITE}/1x1@512\n  backend             tiled / cpu\n  mla_ops dense       1 ±10%" in narrow
    )
    for grid in grids(document):
        for cell in (cell for row in grid.rows for cell in row):
            assert cell in wide
            assert cell in narrow


def test_notes_name_the_machine_and_what_is_missing(document):
    text = "\n".join(notes(document))
    assert text.splitlines() == [
        "A processor (AVX512), 2 threads, bfloat16; mla_ops 1, torch 2",
        "at best it reads 12.0 GB/s and multiplies bfloat16 at 400 GFLOP/s, measured in the same "
        "run",
        "peak memory of one call, result included: prefill/x 1.0 MiB",
        "vLLM not measured: vllm is not installed",
        f"other, third left out: takes no prompt: prefill/{LITE}/1x512@0, "
        f"prefill/{LITE}/1x512@8192",
        f"all sides left out: the time was up: prefill/{LITE}/1x512@32768",
    ]


def test_json_is_read_back_whole(document, tmp_path):
    path = tmp_path / "new" / "bench.json"
    document.write_json(path)
    again = Document.read(path)
    assert again == document
    assert json.loads(path.read_text())["rows"][2]["gain"] == 40.0
    assert [found.name for found in path.parent.iterdir()] == ["bench.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "expected the JSON of a run"),
        ("[]", "expected format 2 of mla-ops bench, got None"),
        ('{"format": 1}', "expected format 2 of mla-ops bench, got 1"),
        ('{"format": 2, "machine": {}}', "not a whole document"),
    ],
)
def test_other_files_are_refused(tmp_path, text, message):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InvalidInputError, match=message):
        Document.read(path)


def test_csv_has_a_line_per_row(document, tmp_path):
    document.write_csv(tmp_path / "bench.csv")
    with (tmp_path / "bench.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(document.rows)
    assert lines[2]["side"] == "transformers"
    assert float(lines[2]["median"]) == 0.04
    assert float(lines[2]["gain"]) == 40.0
    assert lines[0]["gain"] == ""


def test_figures_are_drawn_for_what_there_is(document, tmp_path):
    files = draw_figures(document, tmp_path / "figures")
    assert [path.name for path in files] == ["decode.png", "decode-speedup.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files)


def test_markdown_goes_into_a_page_between_its_marks(document, tmp_path):
    data, page = tmp_path / "runs" / "bench.json", tmp_path / "page.md"
    document.write_json(data)
    (tmp_path / "runs" / "decode.png").write_bytes(b"")
    begin, end = "<!-- bench: runs/bench.json -->", "<!-- bench: end -->"
    page.write_text(f"before\n{begin}\nold\n{end}\nafter {end}\n")
    insert(data, page)
    once = page.read_text()
    assert once.startswith(f"before\n{begin}\n\n**Decode: one attention layer")
    assert f"| {LITE}/1x1@512 | tiled / cpu | 1 ±10% |" in once
    assert "- vLLM not measured: vllm is not installed\n" in once
    assert "![decode](runs/decode.png)" in once
    assert "old" not in once
    assert once.endswith(f"{end}\nafter {end}\n")
    insert(data, page)
    assert page.read_text() == once
    page.write_text("no marks")
    with pytest.raises(InvalidInputError, match="expected <!-- bench: runs"):
        insert(data, page)


def test_compare_marks_what_left_the_spread(document):
    new = replace(document, rows=list(document.rows))
    name = document.rows[0].case
    slower, same = row(name, "mla_ops dense", 1.3), row(name, "mla_ops paged", 0.6)
    new.rows[0], new.rows[1] = slower, same
    new.rows[2] = row(name, "transformers", 20.0, against="mla_ops dense")
    found = {(c.case, c.side): c for c in compare(document, new)}
    assert found[name, "mla_ops dense"].verdict == "slower"
    assert found[name, "mla_ops dense"].ratio == pytest.approx(1 / 1.3)
    assert found[name, "mla_ops paged"].verdict == ""
    assert found[name, "transformers"].verdict == "faster"
    table = changes(list(found.values()))
    assert table.rows[0][:5] == (name, "mla_ops dense, tiled", "1", "1.3", "0.77")


@pytest.mark.parametrize(
    "change", [{"name": "Another"}, {"threads": 4}, {"dtype": "float16"}, {"device": "cuda"}]
)
def test_compare_refuses_another_machine(document, change):
    other = replace(document, machine=replace(document.machine, **change))
    with pytest.raises(InvalidInputError, match=f"{next(iter(change))}.*--force"):
        require_same(other.machine, document.machine)
    require_same(document.machine, document.machine)


def test_compare_needs_a_row_in_common(document):
    with pytest.raises(InvalidInputError, match=r"at least one of the cases .*it has none"):
        compare(replace(document, rows=[]), document)


def test_this_machine_says_what_counts():
    machine = this_machine(torch.device("cpu"), torch.bfloat16)
    assert (machine.device, machine.dtype) == ("cpu", "bfloat16")
    assert machine.threads == torch.get_num_threads()
    assert machine.versions["torch"] == torch.__version__
    assert machine.versions["mla_ops"] == mla_ops.__version__


@pytest.fixture
def command(monkeypatch):
    """Run the verb on small cases and warm caches; raise what it raises."""
    cases = (SMALL, CacheCase("gather", LITE, 64))
    monkeypatch.setattr("mla_ops.bench.timing._MOST_COPIES", 2)
    monkeypatch.setattr("mla_ops.bench.limits._CPU_BYTES", 2**20)
    monkeypatch.setattr("mla_ops.bench.limits._CPU_SIDES", (64,))
    monkeypatch.setattr("mla_ops.bench.command.QUICK", cases)
    monkeypatch.setattr("mla_ops.bench.command.SCRATCH", (AttentionCase(LITE, 1, 16, 64),))
    monkeypatch.setattr("mla_ops.bench.command.MIXED", TINY)
    monkeypatch.setattr("mla_ops.bench.command.LAYOUTS", (PagedCase(LITE, 1, 90),))

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(build_app(), ["bench", *arguments])
        if result.exception is not None:
            raise result.exception
        return result.output

    return run


def test_command_prints_and_writes(command, tmp_path):
    out, page = tmp_path / "out", tmp_path / "page.md"
    page.write_text("<!-- bench: out/bench.json -->\n<!-- bench: end -->\n")
    arguments = ("--quick", "--seconds", "0.01", "--out", str(out), "--into", str(page))
    text = command(*arguments, "--json", str(tmp_path / "x.json"))
    for words in ("transformers", "torch SDPA", "mixed / halves", "peak memory", "at best it"):
        assert words in text
    document = Document.read(out / "bench.json")
    assert Document.read(tmp_path / "x.json") == document
    assert {row.case for row in document.rows} == {SMALL.name, f"gather/{LITE}/64"}
    assert {"mla_ops dense", "transformers"} <= {row.side for row in document.rows}
    assert [result.name for result in document.paged] == [
        "mixed / halves",
        "scattered / consecutive",
    ]
    assert list(document.scratch) == [f"prefill/{LITE}/1x16@64"]
    assert {path.name for path in out.iterdir()} == {
        *("bench.json", "bench.csv", "decode-speedup.png"),
    }
    assert "![decode-speedup](out/decode-speedup.png)" in page.read_text()
    assert command("--render", str(out / "bench.json")) == markdown(out / "bench.json") + "\n"


def test_command_compares_with_another_machine_if_it_must(command, tmp_path):
    path, few = tmp_path / "old.json", ("--quick", "--no-peers", "--seconds", "0.01")
    command(*few, "--case", "gather/*", "--json", str(path))
    data = json.loads(path.read_text())
    data["machine"]["name"] = "Another"
    path.write_text(json.dumps(data))
    compared = (*few, "--case", "gather/*", "--compare", str(path))
    with pytest.raises(InvalidInputError, match="it had name 'Another', now"):
        command(*compared)
    assert "old / new" in command(*compared, "--force")


def test_command_compares_chooses_and_stops(command, tmp_path):
    path, few = tmp_path / "old.json", ("--quick", "--no-peers", "--seconds", "0.01")
    text = command(*few, "--case", "decode/*", "--backend", "tiled", "--json", str(path))
    assert "gather" not in text
    assert "transformers" not in Document.read(path).machine.name
    assert {row.backend for row in Document.read(path).rows} == {"tiled"}
    assert "old / new" in command(*few, "--case", "decode/*", "--compare", str(path))
    stopped = command(*few, "--json", str(path), "--budget", "1000")
    assert "the time was up" not in stopped
    assert command("--quick", "--list").split() == [SMALL.name, f"gather/{LITE}/64"]
    with pytest.raises(InvalidInputError, match="nothing was measured: None: the time was up"):
        command(*few, "--budget", "0")


def test_every_part_of_a_run_has_its_dtype(command, monkeypatch):
    seen: list[torch.dtype] = []

    def paged(*tensors, **options):
        seen.append(tensors[0].dtype)
        return mla_ops.mla_paged_attention(*tensors, **options)

    def dense(*tensors, **options):
        seen.append(tensors[0].dtype)
        return mla_ops.mla_attention(*tensors, **options)

    monkeypatch.setattr("mla_ops.bench.extras.mla_paged_attention", paged)
    monkeypatch.setattr("mla_ops.bench.extras.mla_attention", dense)
    command("--quick", "--no-peers", "--seconds", "0.01", "--dtype", "fp32")
    assert set(seen) == {torch.float32}


def test_command_uses_as_many_threads_as_it_is_told(command, tmp_path):
    path, before = tmp_path / "x.json", torch.get_num_threads()
    arguments = ("--quick", "--no-peers", "--seconds", "0.01", "--case", "gather/*")
    try:
        command(*arguments, "--threads", str(before + 1), "--json", str(path))
        assert torch.get_num_threads() == Document.read(path).machine.threads == before + 1
    finally:
        torch.set_num_threads(before)


def test_command_saves_after_each_row(command, tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    seen: list[int] = []
    write = Document.write_json

    def counted(self, target):
        write(self, target)
        seen.append(len(Document.read(target).rows))

    monkeypatch.setattr(Document, "write_json", counted)
    command("--quick", "--no-peers", "--case", "*", "--seconds", "0.01", "--json", str(path))
    assert seen == [1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--dtype", "fp8"), "dtype must be one of bf16, fp16, fp32, got 'fp8'"),
        (("--device", "tpu"), "device must be one of cpu, cuda, got 'tpu'"),
        (("--quick", "--case", "nothing"), "no case is nothing"),
        (("--quick", "--backend", "nobody"), "backend must be auto or one of"),
        (("--quick", "--into", "page.md"), "--into needs --out or --render"),
        (("--quick", "--out", "x", "--into", "no/page.md"), "page.md: expected a page"),
        (("--quick", "--compare", "nowhere.json"), "nowhere.json: expected the JSON of a run"),
    ],
)
def test_command_refuses(command, arguments, message):
    with pytest.raises(mla_ops.errors.MLAOpsError, match=message):
        command(*arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_command_needs_a_gpu_for_cuda(command):
    with pytest.raises(InvalidInputError, match="timing on cuda needs a CUDA device"):
        command("--device", "cuda")


def test_command_fails_when_one_of_our_results_is_wrong(command, monkeypatch, tmp_path):
    path = tmp_path / "x.json"

    def shifted(*tensors, **options):
        out, lse = mla_ops.mla_attention(*tensors, **options)
        return mla_ops.MLAOutput(out + 1, lse)

    monkeypatch.setattr("mla_ops.bench.ours.mla_attention", shifted)
    with pytest.raises(WrongResultError, match=r"measured:\ndecode/.*mla_ops dense: wrong"):
        command(*("--quick", "--no-peers", "--case", "*", "--seconds", "0.01", "--json", str(path)))
    assert [row.side for row in Document.read(path).rows] == ["mla_ops paged"] * 2


def test_committed_runs_are_what_the_pages_show():
    """Whoever commits new figures renders the page again."""
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text("utf-8")
        for name in re.findall(r"<!-- bench: (\S+\.json) -->", text):
            data = page.parent / name
            if data.exists():
                assert markdown(data, page) in text, f"mla-ops bench --render {data} --into {page}"
