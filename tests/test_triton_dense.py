"""Dense attention in Triton's interpreter, eager and compiled; `test_triton.py` runs this file.

bf16 products are wrong in the interpreter, so kernels multiply fp32 copies there, and it truncates
where a GPU rounds: fp32 and fp16 are held to the suite's budget, bf16 to a wider one.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1: test_triton.py runs it", allow_module_level=True)

import mla_ops
from mla_ops import reference
from mla_ops.dims import MLADims
from mla_ops.kernels.triton import absorbed, configs, expanded, launch
from mla_ops.kernels.triton.configs import Arch, Config
from mla_ops.testing import DIMS, ConformanceCase, attention_inputs, conformance_cases

CASES = {case.name: case for case in conformance_cases()}
LONG = ("decode-bounds", "decode-one-key-tiles", "extend-causal", "extend-strided")
LONG += ("prefill-tiles", "prefill-no-rope", "prefill-mask-of-heads")
HALF = ("decode", "decode-strided", "decode-sinks", "extend-causal-mask", "extend-additive")
HALF += ("prefill", "prefill-rope-only", "no-keys", "all-masked")


def in_one_piece(name: str) -> ConformanceCase:
    """The case without its small workspace, which costs the interpreter many launches."""
    case = CASES[name]
    return replace(case, options={**case.options, "workspace_tokens": None})


@pytest.fixture(autouse=True)
def _chosen():
    torch.set_num_threads(1)
    with mla_ops.use_backend("triton"):
        yield


@pytest.mark.parametrize("name", sorted(CASES.keys() - set(LONG)))
def test_conforms(name: str) -> None:
    CASES[name].check("triton", torch.float32)


@pytest.mark.parametrize("name", HALF)
def test_conforms_in_half_precision(name: str) -> None:
    in_one_piece(name).check("triton", torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_conforms_in_all_cases(name: str, dtype: torch.dtype) -> None:
    CASES[name].check("triton", dtype)


@pytest.mark.parametrize("name", ["decode", "extend-causal-mask", "prefill-bounds"])
def test_bfloat16_up_to_the_truncation_of_the_interpreter(name: str) -> None:
    case = CASES[name]
    inputs = attention_inputs(case.dims, case.sizes, dtype=torch.bfloat16, **case.options)
    options = dict(inputs.to(torch.float64).options)
    options.pop("workspace_tokens")
    exact = reference.mla_attention(*inputs.to(torch.float64)[:4], **options)
    ours = mla_ops.mla_attention(*inputs[:4], **inputs.options)
    torch.testing.assert_close(ours.out.double(), exact.out, rtol=2e-2, atol=4e-2)
    torch.testing.assert_close(ours.lse.double(), exact.lse, rtol=1e-2, atol=2e-2)


TILES = [
    (Config(16, 16, 4, 1), Config(16, 16, 4, 1)),
    (Config(64, 16, 4, 1), Config(128, 16, 4, 1)),
    (Config(32, 64, 4, 1), Config(32, 64, 4, 1)),
]


@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("name", ["extend-causal-bounds", "extend-causal-mask", "prefill"])
def test_any_tile_gives_the_same_result(name: str, tiles: tuple[Config, Config]) -> None:
    with configs.override("absorbed", tiles[0]), configs.override("expanded", tiles[1]):
        CASES[name].check("triton", torch.float32)


ALIGNED = MLADims(2, 32, 16, 16, 16)  # rows in steps of 16 bytes, in fp32 and in fp16
DESCRIBED = Config(16, 16, 4, 1, tma=True)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every launch of the expanded form, whether it loads by descriptors."""
    found: list[bool] = []

    def spy(*args, **options) -> None:
        found.append(options["TMA"])
        launch.launch(*args, **options)

    monkeypatch.setattr(expanded, "launch", spy)
    return found


@pytest.mark.parametrize("switch", ["1", "0"])
@pytest.mark.parametrize("name", sorted(n for n in CASES if n.startswith("prefill")))
def test_conforms_with_and_without_descriptors(
    name: str, switch: str, loads: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(CASES[name], dims=ALIGNED)
    monkeypatch.setenv("MLA_OPS_TMA", switch)
    with configs.override("expanded", DESCRIBED):
        case.check("triton", torch.float32)
    masked = "mask" in case.options or case.options.get("layout") == "strided"
    assert set(loads) == {switch == "1" and not masked}


@pytest.mark.parametrize("name", ["prefill-tiles", "prefill-bounds"])
def test_conforms_in_half_precision_with_descriptors(name: str, loads: list[bool]) -> None:
    case = replace(in_one_piece(name), dims=ALIGNED)
    with configs.override("expanded", DESCRIBED):
        case.check("triton", torch.float16)
    assert set(loads) == {True}


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many splits, though there are few keys."""
    monkeypatch.setattr(absorbed, "_LEAST_TOKENS", 3)
    monkeypatch.setattr(configs, "_INTERPRETER", Arch("interpreter", 232_448, 64))


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize(
    "name",
    [
        "decode",
        "decode-sinks",
        "extend-causal-mask",
        "extend-additive",
        "extend-sinks-blind-rows",
        "all-masked",
    ],
)
def test_splits_are_merged(name: str) -> None:
    with configs.override("absorbed", Config(16, 16, 4, 1)):
        in_one_piece(name).check("triton", torch.float32)


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("queries", [2, 40])
def test_a_row_hidden_by_the_smallest_number_is_the_mean(queries: int) -> None:
    """transformers masks with `finfo.min`; in base 2 it would be -inf, and no lse can hold it."""
    keys = 40
    inputs = attention_inputs(DIMS["odd"], (1, queries, keys), workspace_tokens=7)
    mask = torch.zeros(queries, keys)
    mask[0] = torch.finfo(torch.float32).min
    with configs.override("absorbed", Config(16, 16, 4, 1)):
        out, _ = mla_ops.mla_attention(*inputs[:4], **{**inputs.options, "attn_mask": mask})
    w_uv = reference.split_kv_b(inputs.w_kv_b, 3, DIMS["odd"].qk_nope_head_dim)[1]
    mean = torch.einsum("btl,hvl->bhv", inputs.kv_c, w_uv) / keys
    torch.testing.assert_close(out[:, :, 0], mean)


ERRORS = {
    "decode": ((4, 64, 32, 16, 32), (2, 1, 150), {}),
    "decode-mask": ((4, 64, 32, 16, 32), (2, 1, 150), {"mask": "float:1t"}),
    "extend": ((3, 40, 16, 8, 12), (2, 6, 100), {"is_causal": True, "sinks": True}),
    "prefill": ((3, 40, 16, 8, 12), (2, 40, 70), {"is_causal": True}),
    "prefill-chunks": ((2, 64, 32, 16, 32), (1, 48, 150), {"workspace_tokens": 40}),
    "prefill-mask": ((3, 40, 16, 8, 12), (2, 40, 70), {"mask": "float:st"}),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_no_larger_than_those_of_the_tiled_backend(name: str) -> None:
    """In fp32, the root of the mean square over several draws, next to fp64.

    Largest errors say more about the order of sums in a library's products than about a kernel; so
    does the limit of the chunks, whose error falls by a quarter when products are exact.
    """
    dims, sizes, options = ERRORS[name]
    limit = 1.1 if name == "prefill-chunks" else 1.0
    squares = {"triton": torch.zeros(2), "tiled": torch.zeros(2)}
    for seed in range(4):
        inputs = attention_inputs(MLADims(*dims), sizes, seed=seed, **options)
        exact_options = dict(inputs.to(torch.float64).options)
        del exact_options["workspace_tokens"]
        exact = reference.mla_attention(*inputs.to(torch.float64)[:4], **exact_options)
        for backend, sums in squares.items():
            with mla_ops.use_backend(backend):
                results = mla_ops.mla_attention(*inputs[:4], **inputs.options)
            for i, (ours, right) in enumerate(zip(results, exact, strict=True)):
                difference = torch.where(right.isfinite(), ours.double() - right, 0.0)
                sums[i] += difference.square().mean()
    out, lse = (squares["triton"] / squares["tiled"]).sqrt().tolist()
    assert out <= limit
    assert lse <= 0.95


@pytest.mark.parametrize(
    ("name", "backend"), [("decode-bounds", "aot_eager"), ("prefill-bounds", "inductor")]
)
def test_compiled_without_a_graph_break(name: str, backend: str) -> None:
    function = torch.compile(mla_ops.mla_attention, fullgraph=True, backend=backend)
    case = CASES[name]
    inputs = attention_inputs(case.dims, case.sizes, **case.options)
    with torch.no_grad():
        compiled = function(*inputs[:4], **inputs.options)
        eager = mla_ops.mla_attention(*inputs[:4], **inputs.options)
    torch.testing.assert_close(tuple(compiled), tuple(eager), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("queries", [2, 40])
def test_a_visible_key_that_is_not_a_number_shows(queries: int) -> None:
    inputs = attention_inputs(DIMS["odd"], (1, queries, 41), is_causal=True)
    inputs.kv_c[:, -1] = float("nan")
    out, lse = mla_ops.mla_attention(*inputs[:4], **inputs.options)
    assert out[:, :, -1].isnan().all()
    assert lse[:, :, -1].isnan().all()


def test_opcheck() -> None:
    inputs = attention_inputs(DIMS["odd"], (2, 3, 9), bounds=True, sinks=True, is_causal=True)
    options = inputs.options
    names = ("attn_mask", "kv_bounds", "sinks", "softmax_scale", "is_causal", "workspace_tokens")
    args = (*inputs[:4], *(options[name] for name in names))
    torch.library.opcheck(
        torch.ops.mla_ops.mla_attention.default,
        args,
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"),
    )


def test_repeats_bit_for_bit() -> None:
    inputs = attention_inputs(DIMS["odd"], (3, 2, 50))
    first, second = (mla_ops.mla_attention(*inputs[:4], **inputs.options) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
