"""The console script: every verb is there, output is complete, errors are one message."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

import mla_ops
from mla_ops import cli
from mla_ops.demo import DemoError, command
from mla_ops.demo.measure import Measurement
from mla_ops.demo.report import Comparison, DemoReport, Exchange, SweepPoint
from mla_ops.errors import InvalidInputError

TINY = ("demo", "--tiny", "--context", "128", "--threads", "1")


def invoke(*arguments: str) -> str:
    """Run the script, in a wide terminal."""
    result = CliRunner().invoke(cli.build_app(), arguments, env={"COLUMNS": "160"})
    if result.exception is not None:
        raise result.exception
    return result.output


def measurement(side: str, **changes: object) -> Measurement:
    values: dict[str, object] = {
        "side": side,
        "prompt_tokens": 4090,
        "prefill_s": 70.0 if side == "stock" else 7.0,
        "decode_ms": 2000.0 if side == "stock" else 80.0,
        "peak_bytes": 2**31,
        "cache_bytes_per_token": 26880.0,
        "tokens": (1, 2, 3, 4, 5),
        "cut_short": False,
    }
    return Measurement(**values | changes)  # type: ignore[arg-type]


def report(stock: Measurement, ours: Measurement) -> DemoReport:
    bench = Comparison(stock, ours)
    exchange = Exchange("What?", 4090, "The code is 7314.", "7314", bench.agreement)
    sweep = (SweepPoint(1024, 200.0, 60.0), SweepPoint(4090, 2000.0, 80.0))
    return DemoReport("A model", "2 layers", "bfloat16", 2, {}, (exchange,), bench, sweep, 150.0)


def test_version() -> None:
    assert invoke("--version").strip() == f"mla-ops {mla_ops.__version__}"


def test_help_lists_every_verb() -> None:
    shown = invoke("--help")
    for verb in cli.VERBS:
        assert verb in shown
        assert "--json" in invoke(verb, "--help")


def test_tiny_demo(tmp_path: Path) -> None:
    figure, data = tmp_path / "figure.png", tmp_path / "figures.json"
    shown = invoke(*TINY, "--plot", str(figure), "--json", str(data))
    for text in (
        "128 tokens of context",
        "random weights, float32, 1 threads",
        "prefill, s",
        "decode, ms per token",
        "peak memory, MiB",
        "cache, bytes per token",
        "yes (24 tokens)",
    ):
        assert text in shown
    assert figure.read_bytes().startswith(b"\x89PNG")
    loaded = json.loads(data.read_text("utf-8"))
    assert loaded["benchmark"]["tokens_identical"] == {"compared": 24, "first_difference": None}
    assert [point["context"] for point in loaded["sweep"]] == [8, 16, 32, 64, 128]
    assert list(tmp_path.iterdir()) in ([figure, data], [data, figure])


def test_tiny_demo_writes_nothing_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    invoke(*TINY, "--no-plot", "--dtype", "bfloat16")
    assert not list(tmp_path.iterdir())


def test_json_schema() -> None:
    data = report(measurement("stock"), measurement("mla_ops")).to_json()
    assert data["schema"] == 1
    assert data.keys() == {
        "schema", "model", "shape", "dtype", "threads", "versions",
        "exchanges", "benchmark", "sweep", "elapsed_s",
    }  # fmt: skip
    side = {
        "side", "prompt_tokens", "prefill_s", "decode_ms", "peak_bytes", "cache_bytes_per_token",
        "tokens", "cut_short",
    }  # fmt: skip
    bench = data["benchmark"]
    assert bench.keys() == {
        "stock", "mla_ops", "prefill_speedup", "decode_speedup", "tokens_identical",
    }  # fmt: skip
    assert bench["stock"].keys() == bench["mla_ops"].keys() == side
    assert (bench["prefill_speedup"], bench["decode_speedup"]) == (10.0, 25.0)
    assert data["exchanges"] == [
        {
            "question": "What?",
            "prompt_tokens": 4090,
            "answer": "The code is 7314.",
            "expected": "7314",
            "correct": True,
            "tokens_identical": {"compared": 5, "first_difference": None},
        }
    ]
    assert data["sweep"][0] == {"context": 1024, "stock_ms": 200.0, "mla_ops_ms": 60.0}


def test_json_has_null_for_what_is_unknown() -> None:
    unknown = measurement("stock", decode_ms=float("nan"), peak_bytes=None)
    data = report(unknown, measurement("mla_ops")).to_json()
    assert data["benchmark"]["stock"]["decode_ms"] is None
    assert data["benchmark"]["stock"]["peak_bytes"] is None
    assert data["benchmark"]["decode_speedup"] is None
    json.dumps(data, allow_nan=False)


@pytest.mark.parametrize(
    ("stock", "expected"),
    [
        ({}, ("10.0x", "25.0x", "same", "yes (5 tokens)")),
        ({"tokens": (1, 2, 9)}, ("no (first difference at token 2)", "--dtype float32")),
        ({"tokens": (1, 2), "cut_short": True}, ("yes (2 tokens)", "after 2 of 5 tokens")),
        ({"peak_bytes": None}, ("n/a",)),
    ],
)
def test_demo_reports_what_was_found(
    stock: dict[str, object], expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = report(measurement("stock", **stock), measurement("mla_ops"))
    monkeypatch.setattr(command, "run_demo", lambda options, observer: found)
    shown = invoke("demo", "--no-plot")
    for text in expected:
        assert text in shown


@pytest.mark.parametrize("option", ["--plot", "--json"])
def test_outputs_are_checked_before_the_work(option: str, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "folder.png"):
        with pytest.raises(InvalidInputError, match="expected a file in an existing folder, got"):
            invoke("demo", "--tiny", option, str(path))


def test_user_errors_are_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(options: object, observer: object) -> None:
        raise DemoError("cannot download it.\nRun `mla-ops demo --tiny`")

    monkeypatch.setattr(command, "run_demo", fail)
    monkeypatch.setattr(sys, "argv", ["mla-ops", "demo", "--no-plot"])
    with pytest.raises(SystemExit, match=r"mla-ops: cannot download it(.|\n)*--tiny") as caught:
        cli.main()
    assert isinstance(caught.value.code, str)  # printed to stderr, status 1


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_missing_dependency_has_the_pip_line(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from mla_ops.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"mla-ops: {missing} is not installed: pip install 'mla-ops[demo]'\n"
