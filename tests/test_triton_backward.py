"""Gradients in Triton's interpreter; `test_triton.py` runs this file.

The conformance suite of `test_triton_dense.py` pulls gradients back too; here tiles are small, so
that the loops without masks run, and what the suite cannot ask for is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1: test_triton.py runs it", allow_module_level=True)

import mla_ops
from mla_ops.dims import MLADims
from mla_ops.kernels.triton import configs
from mla_ops.kernels.triton.configs import Config
from mla_ops.testing import DIMS, ConformanceCase, attention_inputs

ODD, NO_ROPE, ROPE_ONLY = DIMS["odd"], DIMS["no-rope"], DIMS["rope-only"]
TILE = Config(16, 16, 4, 1)
CASES = [
    ConformanceCase("causal", ODD, (1, 50, 60), {"is_causal": True}),
    ConformanceCase("more queries than keys", ODD, (1, 60, 37), {"is_causal": True}),
    ConformanceCase("chunks", ODD, (2, 37, 50), {"is_causal": True, "workspace_tokens": 46}),
    ConformanceCase("bounds", ODD, (4, 35, 40), {"is_causal": True, "bounds": True, "sinks": True}),
    ConformanceCase("not causal", NO_ROPE, (2, 33, 40), {"bounds": True, "layout": "strided"}),
    ConformanceCase("mask", ROPE_ONLY, (2, 40, 35), {"mask": "bool:b1st", "is_causal": True}),
    ConformanceCase("additive", ODD, (1, 40, 35), {"mask": "float:hst", "workspace_tokens": 20}),
]


@pytest.fixture(autouse=True)
def _chosen() -> Iterator[None]:
    torch.set_num_threads(1)
    with mla_ops.use_backend("triton"):
        yield


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_by_small_tiles(case: ConformanceCase) -> None:
    with configs.override("backward_keys", TILE), configs.override("backward_queries", TILE):
        case.check("triton", torch.float32)


@pytest.mark.parametrize("tiles", [((32, 16), (16, 32)), ((16, 64), (64, 16))], ids=str)
def test_any_tile_gives_the_same_gradients(tiles: tuple[tuple[int, int], ...]) -> None:
    keys, queries = (Config(*tile, 4, 1) for tile in tiles)
    with configs.override("backward_keys", keys), configs.override("backward_queries", queries):
        CASES[0].check("triton", torch.float32)


def backward(inputs, grad_lse, grad_out=None):
    options = {name: inputs.options[name] for name in ("attn_mask", "kv_bounds", "sinks")}
    rest = (inputs.options[n] for n in ("softmax_scale", "is_causal", "workspace_tokens"))
    out, lse = mla_ops.mla_attention(*inputs[:4], **inputs.options)
    grad_out = torch.ones_like(out) if grad_out is None else grad_out
    op = torch.ops.mla_ops.mla_attention_backward
    return op(grad_out, grad_lse, *inputs[:4], out, lse, *options.values(), *rest)


def test_no_gradient_of_the_lse_is_one_of_zeros() -> None:
    inputs = attention_inputs(ODD, (2, 3, 9), is_causal=True, sinks=True)
    absent, zeros = backward(inputs, None), backward(inputs, torch.zeros(2, 3, 3))
    given = backward(inputs, torch.ones(2, 3, 3))
    for a, b, c in zip(absent, zeros, given, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


def test_gradients_without_strides_of_their_own() -> None:
    """What `sum()` pulls back is one number, expanded to the shape of the result."""
    inputs = attention_inputs(ODD, (2, 3, 9), is_causal=True)
    one, width = torch.ones(()), ODD.v_head_dim
    expanded = backward(inputs, one.expand(2, 3, 3), one.expand(2, 3, 3, width))
    whole = backward(inputs, torch.ones(2, 3, 3), torch.ones(2, 3, 3, width))
    assert all(torch.equal(a, b) for a, b in zip(expanded, whole, strict=True))


def test_a_sink_that_takes_nothing_has_no_gradient() -> None:
    inputs = attention_inputs(ODD, (2, 4, 2), is_causal=True, sinks=True)
    inputs.options["sinks"].fill_(float("-inf"))
    *grads, grad_sinks = backward(inputs, torch.ones(2, 3, 4))
    assert torch.equal(grad_sinks, torch.zeros(3))
    assert all(grad.isfinite().all() for grad in grads)


def test_compiled_gradients() -> None:
    inputs = attention_inputs(MLADims(2, 16, 8, 4, 8), (1, 5, 9), is_causal=True)
    leaves = [tensor.requires_grad_() for tensor in inputs[:4]]

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        out, lse = mla_ops.mla_attention(*tensors, **inputs.options)
        return (out * out).sum() + lse.sum()

    eager = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for ours, right in zip(torch.autograd.grad(compiled(*leaves), leaves), eager, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-6, atol=1e-6)
