"""Every refusal says what was expected and what came; what is legal is not refused."""

from __future__ import annotations

import copy
import math
import pickle
import re
from typing import Any

import pytest
import torch
from native import needs_native
from torch import Tensor

import mla_ops
from mla_ops import reference
from mla_ops.dims import MLADims
from mla_ops.testing import AttentionInputs, attention_inputs

DIMS = MLADims(3, 10, 4, 2, 5)
B, H, S, T = 2, 3, 4, 6
ROWS = H * (4 + 5)
NAMES = ("query", "kv_c", "k_pe", "w_kv_b", "attn_mask", "kv_bounds", "sinks")
ORDER = (*NAMES, "softmax_scale", "is_causal", "workspace_tokens")


def arguments(**changes: Any) -> dict[str, Any]:
    inputs = attention_inputs(DIMS, (B, S, T))
    named = {**inputs._asdict(), **inputs.options, **changes}
    return {name: named[name] for name in ORDER}


def public(**named: Any) -> Any:
    tensors = [named.pop(name) for name in NAMES[:4]]
    return mla_ops.mla_attention(*tensors, **named)


def op(**named: Any) -> Any:
    return torch.ops.mla_ops.mla_attention.default(*named.values())


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def refused(entry: Any, expected: str, got: str, changes: dict[str, Any]) -> None:
    pattern = f"^{re.escape(expected)}.*, got .*{re.escape(got)}"
    with pytest.raises(mla_ops.InvalidInputError, match=pattern):
        entry(**arguments(**changes))


# Argument, its wrong value, what the message says was expected, what it says came.
WRONG_TENSORS: list[tuple[str, Tensor, str, str]] = [
    ("query", zeros(B, H, 6), "query must be [B, H, S, P+R] (4 dimensions)", "shape (2, 3, 6)"),
    ("query", zeros(1, B, H, S, 6), "query must be [B, H, S, P+R]", "shape (1, 2, 3, 4, 6)"),
    ("query", zeros(B, 0, S, 6), "H and L must be at least 1", "query (2, 0, 4, 6)"),
    ("kv_c", zeros(T, 10), "kv_c must be [B, T, L] (3 dimensions)", "shape (6, 10)"),
    ("kv_c", zeros(B, 1, T, 10), "kv_c must be [B, T, L]", "shape (2, 1, 6, 10)"),
    ("kv_c", zeros(B + 1, T, 10), "kv_c must be [B, T, L] with the query's B = 2", "(3, 6, 10)"),
    ("kv_c", zeros(1, T, 10), "kv_c must be [B, T, L] with the query's B = 2", "(1, 6, 10)"),
    ("kv_c", zeros(B, T, 0), "H and L must be at least 1", "kv_c (2, 6, 0)"),
    ("kv_c", zeros(B, T, 9), "w_kv_b must be [H*(P+V), L] with kv_c's L = 9", "shape (27, 10)"),
    ("k_pe", zeros(T, 2), "k_pe must be [B, T, R] (3 dimensions)", "shape (6, 2)"),
    ("k_pe", zeros(B, T + 1, 2), "k_pe must be [B, T, R] with kv_c's B, T = (2, 6)", "(2, 7, 2)"),
    ("k_pe", zeros(1, T, 2), "k_pe must be [B, T, R] with kv_c's B, T = (2, 6)", "(1, 6, 2)"),
    ("k_pe", zeros(B, T, 7), "k_pe must be at most as wide as a query head, 6", "R = 7"),
    ("w_kv_b", zeros(H, 9, 10), "w_kv_b must be [H*(P+V), L] (2 dimensions)", "shape (3, 9, 10)"),
    ("w_kv_b", zeros(ROWS), "w_kv_b must be [H*(P+V), L] (2 dimensions)", "shape (27,)"),
    ("w_kv_b", zeros(ROWS, 11), "w_kv_b must be [H*(P+V), L] with kv_c's L = 10", "(27, 11)"),
    ("w_kv_b", zeros(ROWS + 1, 10), "w_kv_b must be [H*(P+V), L] with H = 3, P = 4", "(28, 10)"),
    ("w_kv_b", zeros(H * 4, 10), "w_kv_b must be [H*(P+V), L] with H = 3, P = 4 and V >= 1", "12"),
    ("attn_mask", zeros(S, T + 1), "attn_mask must be broadcastable to [B, H, S, T]", "(4, 7)"),
    ("attn_mask", zeros(S + 1, T), "attn_mask must be broadcastable to [B, H, S, T]", "(5, 6)"),
    ("attn_mask", zeros(2, S, T), "attn_mask must be broadcastable to [B, H, S, T]", "(2, 4, 6)"),
    ("attn_mask", zeros(3, 1, S, T), "attn_mask must be broadcastable", "(3, 1, 4, 6)"),
    ("attn_mask", zeros(1, B, H, S, T), "attn_mask must be broadcastable", "(1, 2, 3, 4, 6)"),
    ("attn_mask", zeros(0, T), "attn_mask must be broadcastable", "(0, 6)"),
    ("kv_bounds", zeros(2, dtype=torch.int32), "kv_bounds must be [B, 2] = (2, 2)", "(2,)"),
    ("kv_bounds", zeros(B, 3, dtype=torch.int32), "kv_bounds must be [B, 2]", "(2, 3)"),
    ("kv_bounds", zeros(1, 2, dtype=torch.int32), "kv_bounds must be [B, 2]", "(1, 2)"),
    ("sinks", zeros(H + 1), "sinks must be [H] = (3,)", "shape (4,)"),
    ("sinks", zeros(1), "sinks must be [H] = (3,)", "shape (1,)"),
    ("sinks", zeros(), "sinks must be [H] = (3,)", "shape ()"),
    ("sinks", zeros(H, 1), "sinks must be [H] = (3,)", "shape (3, 1)"),
]


@pytest.mark.parametrize("entry", [public, op])
@pytest.mark.parametrize(
    ("name", "value", "expected", "got"),
    WRONG_TENSORS,
    ids=[f"{name}-{'x'.join(map(str, t.shape))}" for name, t, _, _ in WRONG_TENSORS],
)
def test_wrong_shapes(entry: Any, name: str, value: Tensor, expected: str, got: str) -> None:
    refused(entry, expected, got, {name: value})


@pytest.mark.parametrize("entry", [public, op])
@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("query", torch.int32, "query must be one of torch.bfloat16"),
        ("query", torch.bool, "query must be one of torch.bfloat16"),
        ("query", torch.complex64, "query must be one of torch.bfloat16"),
        ("query", torch.float8_e4m3fn, "query must be one of torch.bfloat16"),
        ("query", torch.bfloat16, "kv_c must be of the query's dtype torch.bfloat16"),
        ("kv_c", torch.float64, "kv_c must be of the query's dtype torch.float32"),
        ("k_pe", torch.float16, "k_pe must be of the query's dtype torch.float32"),
        ("w_kv_b", torch.bfloat16, "w_kv_b must be of the query's dtype torch.float32"),
        ("w_kv_b", torch.int8, "w_kv_b must be of the query's dtype torch.float32"),
        ("attn_mask", torch.int64, "attn_mask must be bool or floating point"),
        ("attn_mask", torch.uint8, "attn_mask must be bool or floating point"),
        ("attn_mask", torch.complex64, "attn_mask must be bool or floating point"),
        ("kv_bounds", torch.int64, "kv_bounds must be int32"),
        ("kv_bounds", torch.float32, "kv_bounds must be int32"),
        ("sinks", torch.int64, "sinks must be floating point"),
        ("sinks", torch.bool, "sinks must be floating point"),
    ],
)
def test_wrong_dtypes(entry: Any, name: str, dtype: torch.dtype, expected: str) -> None:
    shapes = {"attn_mask": (S, T), "kv_bounds": (B, 2), "sinks": (H,)}
    given = arguments()[name]
    value = zeros(*shapes[name]) if given is None else given
    # The message about another tensor's dtype names that tensor's.
    got = (
        "torch.float32" if expected.startswith("kv_c must be of the query's dtype torch.b") else ""
    )
    refused(entry, expected, got or str(dtype), {name: value.to(dtype)})


@pytest.mark.parametrize("entry", [public, op])
@pytest.mark.parametrize("name", NAMES)
def test_wrong_devices(entry: Any, name: str) -> None:
    values = {
        **arguments(),
        "attn_mask": zeros(S, T),
        "kv_bounds": zeros(B, 2, dtype=torch.int32),
        "sinks": zeros(H),
    }
    changes = {name: values[name].to("meta")}
    if name == "query":
        refused(entry, "kv_c must be on the query's device meta", "a tensor on cpu", changes)
    else:
        refused(entry, f"{name} must be on the query's device cpu", "a tensor on meta", changes)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "value", [[1.0], "x", 1.0, torch.nn.Linear(2, 2)], ids=lambda v: type(v).__name__
)
def test_other_things_than_tensors(name: str, value: Any) -> None:
    kind = "a tensor" if name in NAMES[:4] else "a tensor or None"
    refused(public, f"{name} must be {kind}", type(value).__name__, {name: value})


@pytest.mark.parametrize("name", NAMES[:4])
def test_none_for_a_tensor(name: str) -> None:
    refused(public, f"{name} must be a tensor", "NoneType", {name: None})


@pytest.mark.parametrize("entry", [public, op])
@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_scales_that_are_not_finite(entry: Any, scale: float) -> None:
    refused(entry, "softmax_scale must be a finite float", repr(scale), {"softmax_scale": scale})


@pytest.mark.parametrize("scale", [None, "1", True, 1j, torch.tensor(0.5), [0.5]], ids=repr)
def test_scales_that_are_no_numbers(scale: Any) -> None:
    refused(public, "softmax_scale must be a finite float", repr(scale), {"softmax_scale": scale})


@pytest.mark.parametrize("entry", [public, op])
@pytest.mark.parametrize("tokens", [0, -1, -(2**40)])
def test_workspaces_without_a_token(entry: Any, tokens: int) -> None:
    refused(entry, "workspace_tokens must be at least 1", str(tokens), {"workspace_tokens": tokens})


@pytest.mark.parametrize("tokens", [2.5, "3", True, torch.tensor(3)], ids=repr)
def test_workspaces_that_are_no_int(tokens: Any) -> None:
    refused(public, "workspace_tokens must be an int", repr(tokens), {"workspace_tokens": tokens})


@pytest.mark.parametrize("rule", [1, None, "yes", torch.tensor(True)], ids=repr)
def test_causal_rules_that_are_no_bool(rule: Any) -> None:
    refused(public, "is_causal must be a bool", repr(rule), {"is_causal": rule})


def test_softmax_scale_has_no_default() -> None:
    named = arguments()
    with pytest.raises(TypeError, match="softmax_scale"):
        mla_ops.mla_attention(*(named[name] for name in NAMES[:4]))


def test_options_are_keywords() -> None:
    named = arguments()
    with pytest.raises(TypeError, match="positional"):
        mla_ops.mla_attention(*named.values())


def test_more_keys_than_bounds_can_count() -> None:
    """Bounds are 32 bits wide; without them, the length is not limited by that."""
    long = {
        "query": zeros(1, H, 1, 6, device="meta"),
        "kv_c": zeros(1, 2**31, 10, device="meta"),
        "k_pe": zeros(1, 2**31, 2, device="meta"),
        "w_kv_b": zeros(ROWS, 10, device="meta"),
    }
    out, _ = op(**arguments(**long))
    assert out.shape == (1, H, 1, 5)
    bounds = zeros(1, 2, dtype=torch.int32, device="meta")
    expected = f"kv_c must be at most {2**31 - 1} keys long with int32 kv_bounds"
    refused(op, expected, str(2**31), {**long, "kv_bounds": bounds})
    shorter = {name: long[name][:, : 2**31 - 1] for name in ("kv_c", "k_pe")}
    op(**arguments(**{**long, **shorter, "kv_bounds": bounds}))


LEGAL: dict[str, dict[str, Any]] = {
    "integer scale": {"softmax_scale": 1},
    "scale of 0": {"softmax_scale": 0.0},
    "negative scale": {"softmax_scale": -0.3},
    "huge workspace": {"workspace_tokens": 2**40},
    "mask of no dimension": {"attn_mask": torch.tensor(True)},
    "additive mask of no dimension": {"attn_mask": torch.tensor(0.5)},
    "mask of a row": {"attn_mask": torch.arange(T) < 4},
    "mask of a column": {"attn_mask": (torch.arange(S) < 2)[:, None]},
    "mask of heads": {"attn_mask": (torch.arange(H) < 2)[:, None, None]},
    "mask of a request": {"attn_mask": (torch.arange(B) < 1)[:, None, None, None]},
    "additive mask in another dtype": {"attn_mask": torch.linspace(-1, 1, T).double()},
    "sinks in another dtype": {"sinks": torch.linspace(-1, 1, H).half()},
    "strided bounds": {
        "kv_bounds": torch.tensor([[0, 1, 3], [2, 9, 6]], dtype=torch.int32)[:, ::2]
    },
    "strided mask": {"attn_mask": (torch.arange(T * S) % 3 > 0).view(T, S).t()},
    "strided sinks": {"sinks": torch.linspace(-1, 1, 2 * H)[::2]},
}


@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=needs_native), "tiled", "reference"])
@pytest.mark.parametrize("name", LEGAL)
def test_legal_arguments(backend: str, name: str) -> None:
    named = arguments(**LEGAL[name])
    with mla_ops.use_backend(backend):
        out, lse = public(**dict(named))
    del named["workspace_tokens"]
    tensors = [named.pop(key) for key in NAMES[:4]]
    right = reference.mla_attention(*tensors, **named)
    torch.testing.assert_close((out, lse), tuple(right), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [(0, S, T), (B, 0, T), (B, S, 0), (0, 0, 0)], ids=str)
def test_empty_sizes_are_legal(sizes: tuple[int, int, int]) -> None:
    inputs = attention_inputs(DIMS, sizes, is_causal=True, bounds=True, sinks=True)
    out, lse = mla_ops.mla_attention(*inputs[:4], **inputs.options)
    assert (out.shape, lse.shape) == ((sizes[0], H, sizes[1], 5), (sizes[0], H, sizes[1]))


def test_arguments_without_memory_in_order_are_legal() -> None:
    """Negative strides do not exist in torch; every other layout is taken as it is."""
    inputs: AttentionInputs = attention_inputs(DIMS, (B, S, T))
    expected = mla_ops.mla_attention(*inputs[:4], **inputs.options)
    permuted = [t.permute(*reversed(range(t.dim()))).contiguous() for t in inputs[:4]]
    views = [t.permute(*reversed(range(t.dim()))) for t in permuted]
    assert not any(t.is_contiguous() for t in views)
    torch.testing.assert_close(mla_ops.mla_attention(*views, **inputs.options), expected)


def test_the_tree_of_errors() -> None:
    for error, builtin in (
        (mla_ops.InvalidInputError, ValueError),
        (mla_ops.UnsupportedInputError, NotImplementedError),
        (mla_ops.BackendUnavailableError, ImportError),
        (mla_ops.PatchError, RuntimeError),
        (mla_ops.RewriteError, RuntimeError),
    ):
        assert issubclass(error, mla_ops.MLAOpsError)
        assert issubclass(error, builtin)


def test_unsupported_input_lists_every_reason() -> None:
    error = mla_ops.UnsupportedInputError("a call", {"a": ["too old", "too slow"], "b": ["broken"]})
    assert error.reasons == {"a": ["too old", "too slow"], "b": ["broken"]}
    lines = ["no backend takes a call:", "  a: too old; too slow", "  b: broken"]
    assert str(error).splitlines() == lines


def test_patch_error_carries_the_report() -> None:
    report = object()
    assert mla_ops.PatchError("no layer", report).report is report
    assert mla_ops.PatchError("no layer").report is None


@pytest.mark.parametrize("copies", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_errors_travel_between_processes(copies: Any) -> None:
    error = copies(mla_ops.UnsupportedInputError("a call", {"a": ["too old"]}))
    assert error.reasons == {"a": ["too old"]}
    assert "a: too old" in str(error)
    patched = copies(mla_ops.PatchError("no layer", {"layers": 0}))
    assert (str(patched), patched.report) == ("no layer", {"layers": 0})
