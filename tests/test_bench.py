"""The benchmark: gates before speed, counts what it says it counts, and writes what it shows."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import mla_ops
from mla_ops.bench import CASES, Case, Limits, machine_limits, measure, measure_case, peak_bytes
from mla_ops.bench.paged import PagedCase, measure_layouts, measure_mixed
from mla_ops.bench.runner import WrongResultError, check_case, measure_scratch
from mla_ops.cli import build_app
from mla_ops.kernels.tiled import TiledBackend

SMALL = Case("deepseek-v2-lite", 1, 1, 63)
LIMITS = Limits(bandwidth=1e9, matmul=1e9, dtype="bfloat16")


class _Wrong(TiledBackend):
    name = "wrong"

    def mla_attention(self, query, kv_c, k_pe, w_kv_b, options):
        out, lse = super().mla_attention(query, kv_c, k_pe, w_kv_b, options)
        return out * 1.05, lse


@pytest.fixture
def wrong_backend():
    from mla_ops import dispatch

    mla_ops.register_backend(_Wrong(), automatic=False)
    yield "wrong"
    del dispatch._registry["wrong"]
    dispatch._select.cache_clear()


def test_a_wrong_result_is_not_timed(wrong_backend):
    with mla_ops.use_backend(wrong_backend), pytest.raises(WrongResultError, match="at most twice"):
        measure_case(SMALL, LIMITS, stock=False, seconds=0.01)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case_passes_its_gate(case):
    assert check_case(case) < 0.05


TINY = PagedCase("deepseek-v2-lite", 2, 90, 1, 40, 70)


def test_both_ways_over_a_paged_cache_agree_before_they_are_timed(monkeypatch):
    assert measure_mixed(TINY, seconds=0.01).ratio > 0
    assert measure_layouts(PagedCase("deepseek-v2-lite", 2, 90), seconds=0.01).ratio > 0

    def shifted(*tensors, **options):
        out, lse = mla_ops.mla_paged_attention(*tensors, **options)
        return mla_ops.MLAOutput(out + tensors[5].num_reqs, lse)

    monkeypatch.setattr("mla_ops.bench.paged.mla_paged_attention", shifted)
    with pytest.raises(WrongResultError, match="two ways to run it differ by"):
        measure_mixed(TINY, seconds=0.01)


def test_flops_and_bytes_of_a_case_by_hand():
    decode = Case("deepseek-v2-lite", 2, 1, 7)
    # absorbed: 8 keys of 576 + 512 per head, and both projections of one token
    assert decode.flops == 2 * 16 * (2 * 8 * (576 + 512) + 2 * 512 * 256)
    assert decode.bytes == (2 * 8 * 576 + 16 * 256 * 512) * 2


def test_peak_bytes_sees_what_is_alive_at_once():
    def two_then_one() -> torch.Tensor:
        a = torch.empty(1 << 20, dtype=torch.uint8)
        b = torch.empty(1 << 20, dtype=torch.uint8)
        del a, b
        return torch.empty(1 << 20, dtype=torch.uint8)

    assert 2 << 20 <= peak_bytes(two_then_one) < (2 << 20) + 4096


def test_scratch_does_not_grow_with_the_context():
    short, long = (measure_scratch(Case("deepseek-v2-lite", 1, 192, c)) for c in (1024, 8192))
    assert long <= short * 1.01


def test_measure_orders_its_quantiles():
    timing = measure(lambda: sum(range(1000)), seconds=0.02)
    assert 0 < timing.best <= timing.low <= timing.median <= timing.high
    assert timing.repeats >= 3


def test_limits_are_positive():
    limits = machine_limits(torch.float32)
    assert limits.bandwidth > 0
    assert limits.matmul > 0


def test_command_prints_and_writes(tmp_path, monkeypatch):
    monkeypatch.setattr("mla_ops.bench.command.QUICK", (SMALL,))
    monkeypatch.setattr("mla_ops.bench.command._SCRATCH_CONTEXTS", (64, 128))
    monkeypatch.setattr("mla_ops.bench.command.MIXED", TINY)
    monkeypatch.setattr("mla_ops.bench.command.LAYOUTS", (PagedCase("deepseek-v2-lite", 1, 90),))
    path = tmp_path / "bench.json"
    arguments = ["bench", "--quick", "--seconds", "0.01", "--json", str(path)]
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == 0, result.output
    assert "speed-up" in result.output
    document = json.loads(path.read_text())
    assert document["results"][0]["case"]["name"] == str(SMALL)
    assert document["results"][0]["speedup"] > 0
    assert [row["name"] for row in document["paged"]] == [
        "mixed / halves",
        "scattered / consecutive",
    ]
    assert all(row["ratio"] > 0 for row in document["paged"])
    assert set(document["scratch_bytes"]) == {"64", "128"}
