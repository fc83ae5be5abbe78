"""Which backend takes a call, and what is said when none does."""

from __future__ import annotations

import concurrent.futures
import contextvars
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from native import has_native
from torch import Tensor

import mla_ops
from mla_ops import dispatch
from mla_ops.dispatch import AttentionOptions, Backend, Call, Capabilities, select
from mla_ops.reference_backend import ReferenceBackend
from mla_ops.testing import DIMS, attention_inputs

CALL = Call("mla_attention", "cpu", torch.float32)
FAST = "cpu" if has_native() else "tiled"
MARK = 42.0  # the lse of a toy backend, by which it is known


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers or sets is gone afterwards."""
    monkeypatch.delenv("MLA_OPS_BACKEND", raising=False)
    monkeypatch.setattr(dispatch, "_registry", dict(dispatch._registry))
    dispatch._select.cache_clear()
    yield
    dispatch._select.cache_clear()


class Toy:
    """As much as a backend for inference needs."""

    name = "toy"

    def not_supported_reasons(self, call: Call) -> list[str]:
        return [] if call.op == "mla_attention" else [f"has no {call.op}"]

    def mla_attention(self, query, kv_c, k_pe, w_kv_b, options):
        width = w_kv_b.shape[0] // query.shape[1] - query.shape[3] + k_pe.shape[2]
        return query.new_zeros(*query.shape[:3], width), query.new_full(query.shape[:3], MARK)


class Picky(ReferenceBackend):
    """A backend that takes half precision only."""

    name = "picky"
    capabilities = Capabilities(frozenset({"mla_attention"}), frozenset({torch.float16}))


def attend(dtype: torch.dtype = torch.float32, **changes: Any) -> mla_ops.MLAOutput:
    inputs = attention_inputs(DIMS["odd"], (1, 2, 5), dtype=dtype)
    return mla_ops.mla_attention(*inputs[:4], **{**inputs.options, **changes})


def toy_took_it() -> bool:
    return bool((attend().lse == MARK).all())


def unavailable(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Register a backend whose module cannot be imported."""
    entry = dispatch._Entry(dispatch._lazy("mla_ops.no_such_module", "Backend"), True)
    monkeypatch.setattr(dispatch, "_registry", {name: entry, **dispatch._registry})
    dispatch._select.cache_clear()


def test_auto_prefers_the_fast_backend() -> None:
    assert mla_ops.available_backends() == ("triton", "cpu", "tiled", "reference")
    assert select(CALL).name == FAST
    assert select(CALL._replace(dtype=torch.float64)).name == "tiled"


def test_auto_never_takes_the_oracle() -> None:
    with pytest.raises(mla_ops.UnsupportedInputError) as caught:
        select(CALL._replace(dtype=torch.int32))
    assert list(caught.value.reasons) == ["triton", "cpu", "tiled"]


def test_a_backend_of_ten_lines() -> None:
    assert isinstance(Toy(), Backend) is False  # it has no backward, and needs none
    mla_ops.register_backend(Toy())
    assert mla_ops.available_backends() == ("toy", "triton", "cpu", "tiled", "reference")
    assert toy_took_it()
    out, _ = attend()
    assert out.shape == (1, 3, 2, 12)


def test_the_newest_backend_comes_first_and_others_fill_in() -> None:
    mla_ops.register_backend(Toy())
    mla_ops.register_backend(Picky())
    assert mla_ops.available_backends() == ("picky", "toy", "triton", "cpu", "tiled", "reference")
    assert select(CALL).name == "toy"
    assert select(CALL._replace(dtype=torch.float16)).name == "picky"
    assert select(CALL._replace(op="mla_attention_backward")).name == "tiled"


def test_a_backend_by_name_only() -> None:
    mla_ops.register_backend(Toy(), automatic=False)
    assert mla_ops.available_backends()[0] == "toy"
    assert not toy_took_it()
    with mla_ops.use_backend("toy"):
        assert toy_took_it()


def test_a_backend_by_name_never_falls_back() -> None:
    mla_ops.register_backend(Picky())
    with mla_ops.use_backend("picky"):
        assert attend(torch.float16).out.dtype == torch.float16
        with pytest.raises(mla_ops.UnsupportedInputError) as caught:
            attend()
    assert caught.value.reasons == {
        "picky": ["does not compute in float32, only in float16"],
    }
    assert str(caught.value).startswith("no backend takes mla_attention of float32 on cpu:\n")


def test_a_backward_does_not_fall_back_either() -> None:
    mla_ops.register_backend(Toy())
    query = attention_inputs(DIMS["odd"]).query.requires_grad_()
    inputs = attention_inputs(DIMS["odd"])
    with mla_ops.use_backend("toy"):
        out, _ = mla_ops.mla_attention(query, *inputs[1:4], **inputs.options)
        with pytest.raises(mla_ops.UnsupportedInputError, match="toy: has no mla_attention_back"):
            out.sum().backward()


def test_a_refusal_lists_every_reason_of_every_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    mla_ops.register_backend(Picky())
    unavailable(monkeypatch, "broken")
    with pytest.raises(mla_ops.UnsupportedInputError) as caught:
        select(Call("mla_paint", "cpu", torch.int8))
    reasons = caught.value.reasons
    assert list(reasons) == ["broken", "picky", "triton", "cpu", "tiled"]
    assert "cannot be loaded" in reasons["broken"][0]
    assert reasons["picky"] == [
        "has no mla_paint, only mla_attention",
        "does not compute in int8, only in float16",
    ]
    assert reasons["tiled"][0].startswith("has no mla_paint, only gather_kv_cache, merge_attn_s")
    assert reasons["triton"] == ["is asked on cuda only, unless by name"]
    assert len(str(caught.value).splitlines()) == 6


def test_capabilities_give_reasons() -> None:
    capabilities = Capabilities(
        frozenset({"b", "a"}),
        frozenset({torch.float32, torch.bfloat16}),
        frozenset({"cuda", "xpu"}),
    )
    assert capabilities.not_supported_reasons(Call("a", "cuda", torch.float32)) == []
    assert capabilities.not_supported_reasons(Call("c", "cpu", torch.float16)) == [
        "has no c, only a, b",
        "does not compute in float16, only in bfloat16, float32",
        "does not run on cpu, only on cuda, xpu",
    ]
    anywhere = Capabilities(frozenset({"a"}), frozenset({torch.float32}))
    assert anywhere.not_supported_reasons(Call("a", "mars", torch.float32)) == []


def test_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    mla_ops.register_backend(Toy(), automatic=False)
    monkeypatch.setenv("MLA_OPS_BACKEND", "toy")
    assert toy_took_it()
    monkeypatch.setenv("MLA_OPS_BACKEND", "  ")
    assert not toy_took_it()
    monkeypatch.setenv("MLA_OPS_BACKEND", "auto")
    assert not toy_took_it()
    monkeypatch.setenv("MLA_OPS_BACKEND", "tyo")
    with pytest.raises(mla_ops.BackendUnavailableError, match=r"auto or one of toy, .* 'tyo'"):
        attend()


def test_the_block_wins_over_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    mla_ops.register_backend(Toy(), automatic=False)
    monkeypatch.setenv("MLA_OPS_BACKEND", "toy")
    with mla_ops.use_backend("reference"):
        assert not toy_took_it()
        with mla_ops.use_backend("auto"):
            assert select(CALL).name == FAST
    assert toy_took_it()


def test_blocks_nest_and_end() -> None:
    names = []
    with mla_ops.use_backend("reference"):
        names.append(select(CALL).name)
        with mla_ops.use_backend("tiled"):
            names.append(select(CALL).name)
            with mla_ops.use_backend("auto"):
                names.append(select(CALL).name)
        names.append(select(CALL).name)
    names.append(select(CALL).name)
    assert names == ["reference", "tiled", FAST, "reference", FAST]


def test_a_block_ends_with_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), mla_ops.use_backend("reference"):
        raise ZeroDivisionError(select(CALL).name)
    assert select(CALL).name == FAST


def test_a_block_refuses_an_unknown_name_at_once() -> None:
    with (
        pytest.raises(mla_ops.BackendUnavailableError, match="got 'rferecne'"),
        mla_ops.use_backend("rferecne"),
    ):
        pytest.fail("the block must not start")
    assert select(CALL).name == FAST


def test_a_block_as_a_decorator() -> None:
    @mla_ops.use_backend("reference")
    def name() -> str:
        return select(CALL).name

    assert [name(), name(), select(CALL).name] == ["reference", "reference", FAST]


def test_threads_choose_for_themselves() -> None:
    """A thread starts with the default, and its choice stays in it."""

    def choose(name: str) -> list[str]:
        before = select(CALL).name
        with mla_ops.use_backend(name):
            return [before, *(select(CALL).name for _ in range(50))]

    with mla_ops.use_backend("reference"), concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(choose, ["tiled", "reference"] * 4))
        handed_over = pool.submit(contextvars.copy_context().run, lambda: select(CALL).name)
        assert handed_over.result() == "reference"
        assert select(CALL).name == "reference"
    for name, names in zip(["tiled", "reference"] * 4, found, strict=True):
        assert names == [FAST, *[name] * 50]


def test_the_block_holds_for_a_backward_inside_of_it() -> None:
    calls = []

    class Spy(ReferenceBackend):
        name = "spy"

        def mla_attention(self, *args):
            calls.append("forward")
            return super().mla_attention(*args)

        def mla_attention_backward(self, *args):
            calls.append("backward")
            return super().mla_attention_backward(*args)

    mla_ops.register_backend(Spy(), automatic=False)
    inputs = attention_inputs(DIMS["odd"])
    with mla_ops.use_backend("spy"):
        query = inputs.query.requires_grad_()
        mla_ops.mla_attention(query, *inputs[1:4], **inputs.options).out.sum().backward()
    assert calls == ["forward", "backward"]


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"name": "nameless"}, "missing ['not_supported_reasons']"),
        ({"not_supported_reasons": lambda self, call: []}, "missing ['name']"),
        ({"name": "tiled", "not_supported_reasons": lambda self, call: []}, "'tiled' is taken"),
        ({"name": "auto", "not_supported_reasons": lambda self, call: []}, "'auto' is taken"),
    ],
)
def test_registering_refuses(attributes: dict[str, Any], message: str) -> None:
    before = mla_ops.available_backends()
    with pytest.raises(mla_ops.InvalidInputError) as caught:
        mla_ops.register_backend(type("Wrong", (), attributes)())
    assert message in str(caught.value)
    assert mla_ops.available_backends() == before


def test_registering_twice_is_refused() -> None:
    mla_ops.register_backend(Toy())
    with pytest.raises(mla_ops.InvalidInputError, match="'toy' is taken"):
        mla_ops.register_backend(Toy())


def test_registering_reaches_calls_that_were_made_before() -> None:
    """The choice is remembered, but not beyond a change of the registry."""
    assert not toy_took_it()
    mla_ops.register_backend(Toy())
    assert toy_took_it()


def test_get_backend() -> None:
    toy = Toy()
    mla_ops.register_backend(toy)
    assert mla_ops.get_backend("toy") is toy
    assert mla_ops.get_backend("tiled") is mla_ops.get_backend("tiled")
    assert isinstance(mla_ops.get_backend("tiled"), Backend)
    assert isinstance(mla_ops.get_backend("reference"), Backend)
    for wrong in ("auto", "", "Tiled"):
        with pytest.raises(mla_ops.BackendUnavailableError, match=f"one of .*, got '{wrong}'"):
            mla_ops.get_backend(wrong)


def test_a_backend_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name it raises and says why; `auto` goes on to the next one."""
    unavailable(monkeypatch, "broken")
    reason = "backend broken cannot be loaded: No module named 'mla_ops.no_such_module'"
    with pytest.raises(mla_ops.BackendUnavailableError, match=reason) as caught:
        mla_ops.get_backend("broken")
    assert isinstance(caught.value.__cause__, ImportError)
    with pytest.raises(mla_ops.BackendUnavailableError, match=reason):
        mla_ops.use_backend("broken").__enter__()
    monkeypatch.setenv("MLA_OPS_BACKEND", "broken")
    with pytest.raises(mla_ops.BackendUnavailableError, match=reason):
        attend()
    monkeypatch.setenv("MLA_OPS_BACKEND", "auto")
    assert select(CALL).name == FAST


def test_a_fault_inside_a_backend_is_not_a_refusal() -> None:
    """Only what a backend says beforehand sends a call elsewhere."""

    class Crash(Toy):
        def mla_attention(self, *args: Any) -> tuple[Tensor, Tensor]:
            raise NotImplementedError("half written")

    mla_ops.register_backend(Crash())
    with pytest.raises(NotImplementedError, match="half written"):
        attend()


def test_a_backend_gets_checked_arguments_and_all_options() -> None:
    seen = []

    class Spy(Toy):
        def mla_attention(self, query, kv_c, k_pe, w_kv_b, options):
            seen.append(options)
            return super().mla_attention(query, kv_c, k_pe, w_kv_b, options)

    mla_ops.register_backend(Spy())
    mask, sinks = torch.ones(2, 5, dtype=torch.bool), torch.zeros(3)
    bounds = torch.tensor([[0, 5]], dtype=torch.int32)
    given = {"attn_mask": mask, "kv_bounds": bounds, "sinks": sinks, "workspace_tokens": 7}
    attend(**given, softmax_scale=0.25, is_causal=True)
    (options,) = seen
    assert isinstance(options, AttentionOptions)
    assert options[3:] == (0.25, True, 7)
    for name in ("attn_mask", "kv_bounds", "sinks"):
        assert torch.equal(getattr(options, name), given[name])
    with pytest.raises(mla_ops.InvalidInputError):
        attend(sinks=torch.zeros(4))
    assert len(seen) == 1


def test_a_backend_is_imported_when_it_is_chosen() -> None:
    """In a fresh process, neither the import of the package nor the oracle loads the tiles."""
    script = """
import sys, torch, mla_ops
inputs = torch.zeros(1, 2, 1, 6), torch.zeros(1, 3, 4), torch.zeros(1, 3, 2), torch.zeros(14, 4)
loaded = lambda: any(name.startswith("mla_ops.kernels.") for name in sys.modules)
assert not loaded()
with mla_ops.use_backend("reference"):
    mla_ops.mla_attention(*inputs, softmax_scale=1.0)
assert not loaded()
mla_ops.mla_attention(*inputs, softmax_scale=1.0)
assert loaded()
"""
    environment = {**os.environ, "MLA_OPS_BACKEND": ""}
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
