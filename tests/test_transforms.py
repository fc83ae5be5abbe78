"""`torch.func` over the public function: vmap, grad, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, jacrev, stack_module_state, vjp, vmap

import mla_ops
from mla_ops import reference
from mla_ops.testing import DIMS, AttentionInputs, attention_inputs

DIM = DIMS["odd"]
SAMPLES = 3
ARGUMENTS = ("query", "kv_c", "k_pe", "w_kv_b", "attn_mask", "kv_bounds", "sinks")
every_backend = pytest.mark.parametrize("backend", ["tiled", "reference"])


def make(**options: Any) -> AttentionInputs:
    options = {"sizes": (2, 3, 7), "dtype": torch.float64, "is_causal": True, **options}
    return attention_inputs(DIM, **options)


def attend(inputs: dict[str, Tensor | None]) -> tuple[Tensor, Tensor]:
    """The public function on a dict of its tensors."""
    tensors = [inputs[name] for name in ARGUMENTS[:4]]
    options = {name: inputs.get(name) for name in ARGUMENTS[4:]}
    return mla_ops.mla_attention(*tensors, softmax_scale=0.3, is_causal=True, **options)


def tensors_of(inputs: AttentionInputs) -> dict[str, Tensor]:
    named = {**inputs._asdict(), **inputs.options}
    return {name: named[name] for name in ARGUMENTS if isinstance(named[name], Tensor)}


def stacked(names: set[str], dim: int = 0, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of which those in `names` have a dimension of samples, and vmap's `in_dims`."""
    samples = [tensors_of(make(seed=seed, **options)) for seed in range(SAMPLES)]
    for sample in samples:  # unseen keys differ among samples, so a mixture would show NaN
        sample["kv_c"].nan_to_num_(nan=1.0)
        sample["k_pe"].nan_to_num_(posinf=1.0)
    batched = {
        name: torch.stack([sample[name] for sample in samples], dim % (tensor.dim() + 1))
        if name in names
        else tensor
        for name, tensor in samples[0].items()
    }
    in_dims = {
        name: dim % tensor.dim() if name in names else None for name, tensor in batched.items()
    }
    return batched, in_dims


def check_against_a_loop(batched: dict[str, Any], in_dims: dict[str, Any]) -> None:
    out, lse = vmap(attend, in_dims=(in_dims,))(batched)
    for i in range(SAMPLES):
        sample = {
            name: t if in_dims[name] is None else t.select(in_dims[name], i)
            for name, t in batched.items()
        }
        expected = attend(sample)
        torch.testing.assert_close((out[i], lse[i]), expected, rtol=1e-12, atol=1e-12)


everything = {"mask": "float:b1st", "bounds": True, "sinks": True}


@every_backend
@pytest.mark.parametrize("name", ARGUMENTS)
def test_vmap_over_one_argument(backend: str, name: str) -> None:
    with mla_ops.use_backend(backend):
        check_against_a_loop(*stacked({name}, **everything))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_vmap_over_all_but_one_argument(name: str) -> None:
    check_against_a_loop(*stacked(set(ARGUMENTS) - {name}, **everything))


@pytest.mark.parametrize("mask", ["bool:b1st", "bool:1hst", "float:hst", "bool:st", "bool:b11t"])
@pytest.mark.parametrize("with_query", [False, True])
def test_vmap_over_masks_of_any_shape(mask: str, with_query: bool) -> None:
    names = {"attn_mask", "query"} if with_query else {"attn_mask"}
    check_against_a_loop(*stacked(names, mask=mask))
    check_against_a_loop(*stacked({"query", "kv_c", "k_pe"}, mask=mask))


@pytest.mark.parametrize("dim", [1, -1, -2])
def test_vmap_over_other_dimensions(dim: int) -> None:
    requests = {"query", "kv_c", "k_pe", "attn_mask", "kv_bounds"}
    check_against_a_loop(*stacked(requests, dim, mask="bool:b1st", bounds=True))
    check_against_a_loop(*stacked({"w_kv_b"}, dim))


@pytest.mark.parametrize("layout", ["strided", "shared"])
def test_vmap_over_strided_samples(layout: str) -> None:
    inputs = tensors_of(make(layout=layout, sizes=(SAMPLES * 2, 3, 7)))
    batched = {
        name: t if name == "w_kv_b" else t.unflatten(0, (SAMPLES, 2)) for name, t in inputs.items()
    }
    in_dims = {name: None if name == "w_kv_b" else 0 for name in inputs}
    check_against_a_loop(batched, in_dims)


@pytest.mark.parametrize("sizes", [(2, 0, 5), (2, 3, 0), (0, 3, 5), (2, 9, 4)], ids=str)
@pytest.mark.parametrize("names", [{"query", "kv_c", "k_pe"}, {"w_kv_b"}], ids=["requests", "w"])
def test_vmap_over_empty_things(sizes: tuple[int, int, int], names: set[str]) -> None:
    check_against_a_loop(*stacked(names, sizes=sizes))


@pytest.mark.parametrize("names", [{"query", "kv_c", "k_pe"}, {"w_kv_b"}], ids=["requests", "w"])
def test_vmap_over_no_samples(names: set[str]) -> None:
    batched, in_dims = stacked(names)
    empty = {name: t[:0] if name in names else t for name, t in batched.items()}
    out, lse = vmap(attend, in_dims=(in_dims,))(empty)
    assert (out.shape, lse.shape) == ((0, 2, 3, 3, 12), (0, 2, 3, 3))


def test_nested_vmap() -> None:
    """Requests inside, weights outside."""
    requests, inner = stacked({"query", "kv_c", "k_pe"})
    weights = stacked({"w_kv_b"})[0]["w_kv_b"]
    outer = {name: 0 if name == "w_kv_b" else None for name in requests}
    mapped = vmap(vmap(attend, in_dims=(inner,)), in_dims=(outer,))
    out, lse = mapped({**requests, "w_kv_b": weights})
    for i in range(SAMPLES):
        expected = vmap(attend, in_dims=(inner,))({**requests, "w_kv_b": weights[i]})
        torch.testing.assert_close((out[i], lse[i]), expected, rtol=1e-12, atol=1e-12)


def test_vmap_refuses_what_the_function_refuses() -> None:
    """Samples are folded into the batch; a batch of one must not be broadcast by that."""
    batched, in_dims = stacked({"query", "kv_c", "k_pe"})
    for name in ("kv_c", "k_pe"):
        with pytest.raises(mla_ops.InvalidInputError, match=f"{name} must be"):
            vmap(attend, in_dims=(in_dims,))({**batched, name: batched[name][:, :1]})


Loss = Callable[..., Tensor]


def make_loss(function: Callable[..., tuple[Tensor, Tensor]]) -> Loss:
    def loss(query: Tensor, kv_c: Tensor, k_pe: Tensor, w_kv_b: Tensor, sinks: Tensor) -> Tensor:
        options = {"softmax_scale": 0.3, "is_causal": True, "sinks": sinks}
        out, lse = function(query, kv_c, k_pe, w_kv_b, **options)
        return out.square().sum() + lse.square().sum()

    return loss


LOSS, RIGHT = make_loss(mla_ops.mla_attention), make_loss(reference.mla_attention)
DIFFERENTIABLE = ("query", "kv_c", "k_pe", "w_kv_b", "sinks")
ALL = tuple(range(5))


def leaves(inputs: AttentionInputs) -> tuple[Tensor, ...]:
    return (*inputs[:4], inputs.options["sinks"])


@every_backend
def test_grad_is_autograd(backend: str) -> None:
    args = leaves(make(sinks=True))
    with mla_ops.use_backend(backend):
        functional = grad(LOSS, ALL)(*args)
        value_gradients, value = grad_and_value(LOSS, ALL)(*args)
        variables = [t.clone().requires_grad_() for t in args]
        total = LOSS(*variables)
        total.backward()
    torch.testing.assert_close(functional, tuple(t.grad for t in variables), rtol=0, atol=0)
    torch.testing.assert_close(value_gradients, functional, rtol=0, atol=0)
    torch.testing.assert_close(value, total.detach(), rtol=0, atol=0)
    torch.testing.assert_close(functional, grad(RIGHT, ALL)(*args), rtol=1e-11, atol=1e-11)


@every_backend
@pytest.mark.parametrize("wanted", ALL, ids=DIFFERENTIABLE)
def test_per_sample_gradients(backend: str, wanted: int) -> None:
    """vmap(grad): every sample has a gradient of its own, of shared tensors too."""
    samples = [leaves(make(seed=seed, sinks=True)) for seed in range(SAMPLES)]
    requests = [torch.stack([sample[i] for sample in samples]) for i in range(3)]
    args = (*requests, *samples[0][3:])
    in_dims = (0, 0, 0, None, None)
    with mla_ops.use_backend(backend):
        mapped = vmap(grad(LOSS, wanted), in_dims=in_dims)(*args)
    looped = [grad(RIGHT, wanted)(*(t[i] for t in requests), *args[3:]) for i in range(SAMPLES)]
    torch.testing.assert_close(mapped, torch.stack(looped), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("wanted", ALL, ids=DIFFERENTIABLE)
def test_gradient_of_a_vmap(wanted: int) -> None:
    """grad(vmap): a tensor that all samples share gathers what each of them gives."""
    samples = [leaves(make(seed=seed, sinks=True)) for seed in range(SAMPLES)]
    requests = [torch.stack([sample[i] for sample in samples]) for i in range(3)]

    def total(*args: Tensor) -> Tensor:
        return vmap(LOSS, in_dims=(0, 0, 0, None, None))(*args).sum()

    def right(*args: Tensor) -> Tensor:
        return sum(RIGHT(*(t[i] for t in args[:3]), *args[3:]) for i in range(SAMPLES))

    args = (*requests, *samples[0][3:])
    ours = grad(total, wanted)(*args)
    torch.testing.assert_close(ours, grad(right, wanted)(*args), rtol=1e-11, atol=1e-11)


def test_gradients_of_an_ensemble() -> None:
    """Weights and sinks of several layers on the same request."""
    args = leaves(make(sinks=True))
    weights, sinks = (torch.stack([t * (1 + 0.1 * i) for i in range(SAMPLES)]) for t in args[3:])
    in_dims = (None, None, None, 0, 0)
    mapped = vmap(grad(LOSS, ALL), in_dims=in_dims)(*args[:3], weights, sinks)
    for i in range(SAMPLES):
        right = grad(RIGHT, ALL)(*args[:3], weights[i], sinks[i])
        torch.testing.assert_close(tuple(g[i] for g in mapped), right, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("argument", range(4), ids=DIFFERENTIABLE[:4])
def test_jacrev(argument: int) -> None:
    args = leaves(make(sizes=(1, 2, 3), sinks=True))

    def jacobian(function: Callable[..., Any]) -> Tensor:
        def outputs(leaf: Tensor) -> tuple[Tensor, Tensor]:
            tensors = [*args[:argument], leaf, *args[argument + 1 : 4]]
            out, lse = function(*tensors, softmax_scale=0.3, is_causal=True)
            return out.sum(dim=-1), lse.masked_fill(lse == -torch.inf, 0.0)

        return jacrev(outputs)(args[argument])

    ours, right = jacobian(mla_ops.mla_attention), jacobian(reference.mla_attention)
    torch.testing.assert_close(ours, right, rtol=1e-11, atol=1e-11)


def test_vjp_of_both_results() -> None:
    args = leaves(make(sinks=True))

    def pull(function: Callable[..., Any]) -> tuple[Tensor, ...]:
        def results(*tensors: Tensor) -> tuple[Tensor, Tensor]:
            out, lse = function(*tensors[:4], softmax_scale=0.3, sinks=tensors[4])
            return out, lse

        (out, lse), pull_back = vjp(results, *args)
        return pull_back((torch.ones_like(out), torch.full_like(lse, 0.5)))

    torch.testing.assert_close(pull(mla_ops.mla_attention), pull(reference.mla_attention))


@pytest.mark.parametrize("transform", [torch.func.hessian, torch.func.jacfwd])
def test_forward_mode_is_refused(transform: Callable[..., Any]) -> None:
    args = leaves(make(sinks=True))
    with pytest.raises(NotImplementedError, match="jvp"):
        transform(LOSS)(*args)


def test_second_derivatives_are_refused() -> None:
    args = leaves(make(sinks=True))

    def first(*tensors: Tensor) -> Tensor:
        return grad(LOSS)(*tensors).sum()

    with pytest.raises(mla_ops.UnsupportedInputError, match="only first derivatives"):
        grad(first)(*args)


def test_a_gradient_of_a_mask_is_refused() -> None:
    inputs = make(mask="float:st")

    def loss(mask: Tensor) -> Tensor:
        return mla_ops.mla_attention(*inputs[:4], softmax_scale=0.3, attn_mask=mask).out.sum()

    with pytest.raises(mla_ops.InvalidInputError, match="attn_mask must not require grad"):
        grad(loss)(inputs.options["attn_mask"])


class Layer(nn.Module):
    """A small attention layer around the function."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(10, DIM.num_heads * DIM.qk_head_dim)
        self.kv_a_proj = nn.Linear(10, DIM.latent_dim)
        self.kv_b_proj = nn.Linear(DIM.kv_lora_rank, DIM.expanded_dim, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        query = self.q_proj(hidden).unflatten(-1, (DIM.num_heads, -1)).transpose(1, 2)
        rows = self.kv_a_proj(hidden).split([DIM.kv_lora_rank, DIM.qk_rope_head_dim], dim=-1)
        out, _ = mla_ops.mla_attention(
            query, *rows, self.kv_b_proj.weight, softmax_scale=0.3, is_causal=True
        )
        return out.transpose(1, 2).flatten(2)


def test_functional_call_of_a_module() -> None:
    layer, hidden = Layer().double(), torch.randn(2, 5, 10, dtype=torch.float64)
    layer(hidden).square().sum().backward()

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(layer, parameters, (hidden,)).square().sum()

    gradients = grad(loss)({name: p.detach() for name, p in layer.named_parameters()})
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-12, atol=1e-12)


def test_an_ensemble_of_modules() -> None:
    layers = [Layer().double() for _ in range(SAMPLES)]
    hidden = torch.randn(2, 5, 10, dtype=torch.float64)
    parameters, buffers = stack_module_state(layers)

    def run(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
        return functional_call(layers[0], (parameters, buffers), (hidden,))

    mapped = vmap(run)(parameters, buffers)
    looped = torch.stack([layer(hidden) for layer in layers])
    torch.testing.assert_close(mapped, looped, rtol=1e-12, atol=1e-12)
