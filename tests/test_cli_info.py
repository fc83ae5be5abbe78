"""`mla-ops info`: what it shows is what dispatch does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

import torch
from typer.testing import CliRunner

import mla_ops
from mla_ops import cli, dispatch, env
from mla_ops.commands.info import backend_choice
from mla_ops.errors import InvalidInputError
from mla_ops.kernels.tiled import TiledBackend


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(cli.build_app("info"), ("info", *arguments), env={"COLUMNS": "200"})
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch):
    """The backends, to be changed at will."""
    backends = dict(dispatch._registry)
    monkeypatch.setattr(dispatch, "_registry", backends)
    dispatch._select.cache_clear()
    yield backends
    dispatch._select.cache_clear()


class OnlyDecodes(TiledBackend):
    name = "decoder"

    def not_supported_reasons(self, call: dispatch.Call) -> list[str]:
        return [] if call.op == "mla_decode" else ["it only decodes [really]"]

    def describe(self) -> str:
        return "built by hand"


def row(shown: str, first: str) -> list[str]:
    """The first row that starts with a word; a long reason may bring the word again."""
    return next(cells for line in shown.splitlines() if (cells := line.split())[:1] == [first])


def test_every_op_has_a_row_with_the_backend_that_runs_it(registry) -> None:
    mla_ops.register_backend(OnlyDecodes())
    shown = invoke("--device", "cpu", "--dtype", "float32")
    assert "Backends for float32 on cpu" in shown
    assert row(shown, "op") == ["op", "auto", *mla_ops.available_backends()]
    assert row(shown, "mla_decode")[1:3] == ["decoder", "yes"]
    assert row(shown, "mla_prefill")[1] not in ("decoder", "nobody")
    assert row(shown, "mla_prefill")[2] == "-"
    for op in dispatch.OPS:
        chosen = dispatch.select(dispatch.Call(op, "cpu", torch.float32)).name
        assert row(shown, op)[1] == chosen


def test_reasons_and_descriptions_are_shown_as_they_are(registry) -> None:
    mla_ops.register_backend(OnlyDecodes())
    lines = [line.split() for line in invoke().splitlines()]
    assert ["decoder", "built", "by", "hand"] in lines
    assert ["decoder", "all", "but", "mla_decode", "it", "only", "decodes", "[really]"] in lines


def test_a_backend_that_does_not_load_says_why(registry) -> None:
    def load() -> dispatch.Backend:
        raise ImportError("no compiler here")

    registry["native"] = dispatch._Entry(load, True)
    choice = backend_choice("cpu", torch.bfloat16)
    assert choice.refusals["native"]["mla_decode"] == [
        "backend native cannot be loaded: no compiler here"
    ]
    lines = [line.split()[:5] for line in invoke().splitlines()]
    assert ["native", "all", "backend", "native", "cannot"] in lines


def test_a_variable_that_is_set_decides(registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_OPS_BACKEND", "reference")
    shown = invoke()
    assert row(shown, "op")[1] == "reference"
    assert row(shown, "mla_decode")[1] == "reference"
    assert row(shown, "MLA_OPS_BACKEND")[1] == "reference"
    assert row(shown, "MLA_OPS_AUTOTUNE")[1:3] == ["0", "(default)"]


def test_nobody_takes_a_call(registry, tmp_path: Path) -> None:
    for name in list(registry):
        del registry[name]
    mla_ops.register_backend(OnlyDecodes())
    data = tmp_path / "info.json"
    assert row(invoke("--json", str(data)), "mla_prefill")[1] == "nobody"
    (found,) = json.loads(data.read_text("utf-8"))["backends"]
    assert found["chosen"]["mla_prefill"] is None
    assert found["chosen"]["mla_decode"] == "decoder"


def test_json_has_everything(tmp_path: Path) -> None:
    data = tmp_path / "info.json"
    several = ("--device", "cpu", "--device", "cuda", "--dtype", "float64", "--dtype", "bfloat16")
    invoke(*several, "--json", str(data))
    found = json.loads(data.read_text("utf-8"))
    assert found.keys() == {"schema", "versions", "machine", "backends", "environment"}
    assert found["versions"]["mla_ops"] == mla_ops.__version__
    assert found["versions"]["torch"] == torch.__version__
    assert [v["name"] for v in found["environment"]] == [v.name for v in env.VARIABLES]
    pairs = [(choice["device"], choice["dtype"]) for choice in found["backends"]]
    assert pairs == [
        (device, dtype) for device in ("cpu", "cuda") for dtype in ("float64", "bfloat16")
    ]
    assert all(choice["chosen"].keys() == dispatch.OPS for choice in found["backends"])
    refused = found["backends"][2]["refusals"]["triton"]["mla_decode"]
    assert refused
    assert all(isinstance(reason, str) for reason in refused)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--dtype", "int32"), "expected a floating dtype such as bfloat16, got 'int32'"),
        (("--dtype", "nn"), "expected a floating dtype such as bfloat16, got 'nn'"),
        (("--device", "toaster"), "expected a device type such as cpu or cuda, got 'toaster'"),
        (("--device", "cuda:1"), "expected a device type without an index, got 'cuda:1'"),
        (("--json", "no/such/folder/f"), "expected a file in an existing folder, got no/such"),
    ],
)
def test_bad_input_is_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        invoke(*arguments)


def test_a_wrong_argument_ends_with_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["mla-ops", "info", "--dtype", "int8"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("mla-ops: expected a floating dtype such as")
