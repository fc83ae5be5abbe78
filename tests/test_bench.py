"""The benchmark measures what it says: named cases, right results only, reasons for what is not."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

import mla_ops
from mla_ops.bench import (
    CPU_CASES,
    CUDA_CASES,
    QUICK,
    Budget,
    LeftOut,
    Limits,
    Peer,
    Row,
    machine_limits,
    measure,
    peak_bytes,
    run_cases,
)
from mla_ops.bench.cases import DTYPES, LITE, V3, AttentionCase, CacheCase, choose
from mla_ops.bench.extras import PagedCase, measure_layouts, measure_mixed, measure_scratch
from mla_ops.bench.ours import CacheOps, Dense, Paged
from mla_ops.bench.problems import draw, paged
from mla_ops.bench.runner import WrongResultError, absent, check
from mla_ops.bench.timing import CpuClock, Timing, alternate, clock_for
from mla_ops.errors import InvalidInputError
from mla_ops.kernels.tiled import TiledBackend

pytestmark = pytest.mark.usefixtures("with_one_thread")

SMALL = AttentionCase(LITE, 1, 1, 63)
LIMITS = Limits(bandwidth=1e9, matmul=1e9, dtype="bfloat16")
drawn = functools.cache(draw)  # with the exact result, which takes longest
OURS = [Dense("cpu"), Paged("cpu"), CacheOps("cpu")]


class _Clock(CpuClock):
    """A clock that runs everything once and has plenty of room."""

    def __init__(self, free: int = 2**40) -> None:
        self.free = free

    def free_bytes(self) -> int:
        return self.free

    def copies(self, size: int) -> int:
        return 2

    def time(self, runs: Any, seconds: float) -> Timing:
        for run in runs:
            run()
        return Timing(2e-3, 1e-3, 3e-3, 1e-3, len(runs))


def run(cases: Any, peers: Any = OURS, clock: Any = None, **options: Any) -> list[Any]:
    return list(run_cases(cases, peers, clock or _Clock(), LIMITS, **options))


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
    class NoTime(_Clock):
        def time(self, runs: Any, seconds: float) -> Timing:
            pytest.fail("a wrong result was timed")

    with mla_ops.use_backend(wrong_backend):
        (left,) = run([SMALL], [Dense("cpu")], NoTime())
    assert left.fault
    assert left.reason.startswith("wrong result: decode/deepseek-v2-lite/1x1@63, mla_ops dense")
    problem = draw(SMALL)
    with mla_ops.use_backend(wrong_backend), pytest.raises(WrongResultError, match="at most"):
        check(Dense("cpu"), problem, Dense("cpu").prepare(problem))


@pytest.mark.parametrize("side", OURS[:2], ids=lambda side: side.name)
@pytest.mark.parametrize(
    "case",
    [
        AttentionCase(LITE, 3, 1, 700),
        AttentionCase(LITE, 2, 3, 90),
        AttentionCase(V3, 1, 1, 200, shards=4),
        AttentionCase(LITE, 2, 130, 260),
        AttentionCase("minicpm3", 1, 70, 0, torch.float32),
    ],
    ids=lambda case: case.name,
)
def test_every_kind_of_case_passes_its_gate(case, side):
    problem = drawn(case)
    out = side.prepare(problem)()
    error, allowed = problem.error(out)
    assert error <= allowed < 0.06
    assert out.shape == (case.batch, case.dims.num_heads, case.new, case.dims.v_head_dim)
    # The last query of the last request counts, on its own.
    broken = out.clone()
    broken[-1, -1, -1] *= 1.5
    assert problem.error(broken)[0] > allowed
    with pytest.raises(WrongResultError, match="error nan, at most"):
        check(side, problem, lambda: out * float("nan"))


@pytest.mark.parametrize("group", ["gather", "merge", "write"])
def test_ops_on_the_cache_pass_their_gate(group):
    problem = draw(CacheCase(group, "minicpm3", 200))
    out = CacheOps("cpu").prepare(problem.copy())()
    assert check(CacheOps("cpu"), problem, lambda: out) < 0.01
    broken = out.clone()
    broken.flatten()[int(broken.float().abs().argmax())] *= 1.25
    with pytest.raises(WrongResultError, match="at most"):
        check(CacheOps("cpu"), problem, lambda: broken)


def test_rows_say_what_was_measured():
    dense, paged_row = run([SMALL])
    assert isinstance(dense, Row)
    assert (dense.side, paged_row.side) == ("mla_ops dense", "mla_ops paged")
    assert (
        dense.backend
        == mla_ops.dispatch.select(
            mla_ops.dispatch.Call("mla_attention", "cpu", torch.bfloat16)
        ).name
    )
    assert (dense.heads, dense.batch, dense.new, dense.cached) == (16, 1, 1, 63)
    assert dense.flops_per_second == SMALL.flops / 2e-3
    assert dense.of_bandwidth == pytest.approx(SMALL.bytes / 2e-3 / 1e9)
    assert dense.as_dict()["median"] == 2e-3
    with mla_ops.use_backend("reference"):
        assert {row.backend for row in run([SMALL])} == {"reference"}


def test_a_case_meets_the_sides_of_its_group_only():
    rows = run([CacheCase("gather", "minicpm3", 64), SMALL])
    assert [row.group for row in rows] == ["gather", "decode", "decode"]


class _Refuses(Dense):
    name = "refuses"

    def refuses(self, case):
        return "not this one"


class _Fails(Dense):
    name = "fails"

    def prepare(self, problem):
        raise RuntimeError("no such kernel\nsecond line")


class _Absent(Dense):
    name = "absent"

    def available(self):
        return "is not installed"


def test_what_was_not_measured_has_a_reason():
    sides: list[Peer] = [_Refuses("cpu"), _Fails("cpu"), _Absent("cpu"), Dense("cpu")]
    refused, failed, row = run([SMALL], sides)
    assert refused == LeftOut(SMALL.name, "refuses", "not this one")
    assert failed == LeftOut(SMALL.name, "fails", "RuntimeError: no such kernel", fault=True)
    assert row.side == "mla_ops dense"
    assert absent(sides, "cpu") == {"absent": "is not installed"}
    variant = type("Variant", (Dense,), {"name": "absent"})("cpu")
    assert absent([*sides, variant], "cpu") == {}


def test_what_does_not_fit_into_memory_is_left_out():
    (left,) = run([SMALL], [Dense("cpu")], _Clock(free=2**20))
    assert left.reason == "needs 0.0 GiB, more than is free"
    one = SMALL.bytes + OURS[0].memory(SMALL)  # the clock wants two copies
    assert isinstance(run([SMALL], OURS[:1], _Clock(free=2 * one))[0], LeftOut)
    assert isinstance(run([SMALL], OURS[:1], _Clock(free=3 * one))[0], Row)


def test_a_backend_that_refuses_says_why(monkeypatch):
    monkeypatch.setattr(TiledBackend, "not_supported_reasons", lambda self, call: ["not today"])
    mla_ops.dispatch._select.cache_clear()
    with mla_ops.use_backend("tiled"):
        (left,) = run([SMALL], [Dense("cpu")])
    mla_ops.dispatch._select.cache_clear()
    assert left.reason == "tiled: not today"


def test_a_spent_budget_keeps_what_there_is():
    ticks = iter(range(100))
    budget = Budget(2.5, now=lambda: next(ticks))
    other, last = AttentionCase(LITE, 1, 1, 70), AttentionCase(LITE, 1, 1, 80)
    first, second, left = run([SMALL, other, last], [Dense("cpu")], budget=budget)
    assert (first.case, second.case) == (SMALL.name, other.name)
    assert left == LeftOut(last.name, None, "the time was up")


def test_flops_and_bytes_of_a_case_by_hand():
    decode = AttentionCase(LITE, 2, 1, 7)
    # absorbed: 8 keys of 576 + 512 per head, and both projections of one token
    assert decode.flops == 2 * 16 * (2 * 8 * (576 + 512) + 2 * 512 * 256)
    assert decode.bytes == (2 * 8 * 576 + 16 * 256 * 512) * 2
    prefill = AttentionCase(LITE, 1, 512, 512)
    # expanded: 512 x 768.5 pairs of 192 + 128, and 1024 tokens through kv_b_proj
    assert prefill.flops == 16 * (2 * 512 * 768.5 * 320 + 2 * 1024 * 512 * 256)
    assert CacheCase("gather", LITE, 10).bytes == 2 * 10 * 576 * 2
    assert CacheCase("merge", LITE, 10).bytes == 3 * 10 * 16 * (128 * 2 + 4)


def test_the_standard_matrix_is_complete():
    names = {case.name for case in CPU_CASES}
    assert len(names) == len(CPU_CASES)
    for model, batch, context in (
        (model, batch, context)
        for model in (LITE, V3)
        for batch in (1, 4, 8, 32)
        for context in (512, 2048, 8192, 32768)
    ):
        assert f"decode/{model}/{batch}x1@{context}" in names
    for new in (128, 512, 2048):
        assert {f"prefill/{LITE}/1x{new}@{c}" for c in (0, 4096, 8192, 32768)} <= names
    assert {case.name for case in QUICK} <= names


def test_the_cases_for_gpus_are_complete_and_begin_with_what_matters():
    names = [case.name for case in CUDA_CASES]
    assert len(set(names)) == len(names)
    decodes = {
        (case.dims.num_heads * case.new, case.batch, case.cached)
        for case in CUDA_CASES
        if case.group == "decode"
    }
    assert {(r, b, c) for r in (16, 32, 64, 128) for b in (1, 8, 32, 128)
            for c in (1024, 8192, 32768)} <= decodes  # fmt: skip
    new = {case.new for case in CUDA_CASES if case.group == "prefill"}
    assert new == {2048, 4096, 8192, 16384}
    assert {case.group for case in CUDA_CASES[:12]} == {
        *("decode", "prefill", "gather", "merge", "write"),
    }


def test_cases_are_chosen_by_name_heads_and_dtype():
    chosen = choose(CPU_CASES, patterns=["decode/*@512", "gather/*"], heads=[16])
    assert [case.name for case in chosen] == [
        *(f"decode/{LITE}/{batch}x1@512" for batch in (1, 4, 8, 32)),
        f"gather/{LITE}/65536",
    ]
    assert choose(QUICK, dtype=torch.float16)[0].dtype == torch.float16
    with pytest.raises(InvalidInputError, match=r"no case is nothing/\* or 7 heads"):
        choose(CPU_CASES, patterns=["nothing/*"], heads=[7])
    with pytest.raises(InvalidInputError, match="shards must divide the 16 heads"):
        _ = AttentionCase(LITE, 1, 1, 1, shards=3).dims


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype_runs(dtype):
    rows = run([replace(SMALL, dtype=dtype)])
    assert [row.dtype for row in rows] == [str(dtype).removeprefix("torch.")] * 2


def test_pages_hold_the_rows_and_lie_scattered():
    problem = draw(AttentionCase("minicpm3", 2, 1, 99))
    pages = paged(problem, 16)
    rows = torch.cat([problem.kv_c, problem.k_pe], -1)
    for request, blocks in enumerate(pages.table.tolist()):
        assert torch.equal(pages.cache[blocks].flatten(0, 1)[:100], rows[request])
        assert not pages.cache[blocks].flatten(0, 1)[100:].any()
        assert blocks != sorted(blocks)


def test_many_rows_are_drawn_without_repeating_one():
    kv_c = draw(AttentionCase("minicpm3", 1, 1, 70000)).kv_c[0]
    assert kv_c.shape == (70001, 256)
    assert not torch.equal(kv_c[0], kv_c[65536])
    assert torch.equal(kv_c[0, :-1], kv_c[65536, 1:])  # the same numbers, turned


def test_as_many_copies_as_make_a_cache_cold():
    clock = CpuClock()
    assert clock.copies(2**40) == 1
    assert clock.copies(1) > 1
    assert clock.copies(16 * 2**20) * 16 * 2**20 >= 96 * 2**20
    assert clock.free_bytes() > 2**20
    calls: list[int] = []
    runs = [lambda i=i: (calls.append(i), torch.empty(0))[1] for i in range(3)]
    clock.time(runs, 1.0)
    assert calls[:6] == [0, 1, 2, 0, 1, 2]


def test_a_clock_needs_its_device(monkeypatch):
    assert clock_for("cpu").device.type == "cpu"
    with pytest.raises(InvalidInputError, match="device must be one of cpu, cuda, got 'tpu'"):
        clock_for("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidInputError, match="needs a CUDA device"):
        clock_for("cuda")


def test_peak_bytes_sees_what_is_alive_at_once(capfd):
    def two_then_one() -> torch.Tensor:
        a = torch.empty(1 << 20, dtype=torch.uint8)
        b = torch.empty(1 << 20, dtype=torch.uint8)
        del a, b
        return torch.empty(1 << 20, dtype=torch.uint8)

    assert 2 << 20 <= peak_bytes(two_then_one) < (2 << 20) + 4096
    assert capfd.readouterr().err == ""


def test_scratch_does_not_grow_with_the_context():
    short, long = (measure_scratch(AttentionCase(LITE, 1, 192, c)) for c in (1024, 4096))
    assert long <= short * 1.01


def test_measure_orders_its_quantiles():
    timing = measure(lambda: sum(range(1000)), seconds=1.0)
    assert 0 < timing.best <= timing.low <= timing.median <= timing.high
    assert timing.repeats >= 3
    assert measure(lambda: sum(range(100000)), seconds=1e-5).repeats == 1


def test_alternate_takes_turns():
    calls: list[str] = []
    timings = alternate([lambda: calls.append("a"), lambda: calls.append("b")], seconds=0.001)
    assert calls[:6] == ["a", "b"] * 3
    assert len({timing.repeats for timing in timings}) == 1


def test_limits_are_those_of_the_clock():
    limits = machine_limits(_Clock(), torch.float32)
    assert limits == Limits(128 * 2**20 / 1e-3, 2 * 2048**3 / 1e-3, "float32")

    class Slow(_Clock):
        def time(self, runs: Any, seconds: float) -> Timing:
            return Timing.of([0.5])

    assert machine_limits(Slow(), torch.float32).matmul == 2 * 1024**3 / 0.5


TINY = PagedCase(LITE, 2, 90, 1, 40, 70)


def test_both_ways_over_a_paged_cache_agree_before_they_are_timed(monkeypatch):
    assert measure_mixed(TINY, seconds=0.01).ratio > 0
    assert measure_layouts(PagedCase(LITE, 2, 90), seconds=0.01).ratio > 0

    def shifted(*tensors, **options):
        out, lse = mla_ops.mla_paged_attention(*tensors, **options)
        return mla_ops.MLAOutput(out + tensors[5].num_reqs, lse)

    monkeypatch.setattr("mla_ops.bench.extras.mla_paged_attention", shifted)
    with pytest.raises(WrongResultError, match="two ways to run it differ by"):
        measure_mixed(TINY, seconds=0.01)


@pytest.mark.gpu
def test_a_gpu_is_timed_on_captured_graphs():
    clock = clock_for("cuda")
    sides = [Dense("cuda"), Paged("cuda"), CacheOps("cuda")]
    cases = [SMALL, AttentionCase(LITE, 2, 130, 260), CacheCase("gather", LITE, 200)]
    rows = run(cases, sides, clock, seconds=0.01)
    assert [type(row) for row in rows] == [Row] * 5
    assert all(0 < row.timing.best <= row.timing.median for row in rows)
    assert machine_limits(clock).bandwidth > 1e10
