"""Dense attention as an op: schema, fake rule, autograd, vmap, autocast.

The op has an autograd formula, which a compiled graph uses; eager code goes through an
`autograd.Function` in `setup_context` style, since only that form serves `torch.func.grad` and
`vmap(grad)`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mla_ops.dims import stat_dtype
from mla_ops.dispatch import AttentionOptions
from mla_ops.errors import InvalidInputError, UnsupportedInputError
from mla_ops.ops.library import LIB, admission, needs_autograd
from mla_ops.validation import check_mla_attention

__all__ = ["mla_attention"]


_TENSORS = "Tensor query, Tensor kv_c, Tensor k_pe, Tensor w_kv_b"
_OPTIONS = (
    "Tensor? attn_mask, Tensor? kv_bounds, Tensor? sinks, "
    "float softmax_scale, bool is_causal, SymInt? workspace_tokens"
)
LIB.define(f"mla_attention({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor)")
LIB.define(
    f"mla_attention_backward(Tensor grad_out, Tensor? grad_lse, {_TENSORS}, Tensor out, Tensor lse,"
    f" {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_forward_op = torch.ops.mla_ops.mla_attention.default
_backward_op = torch.ops.mla_ops.mla_attention_backward.default

_admit = admission("mla_attention", check_mla_attention)
_admit_backward = admission("mla_attention_backward", check_mla_attention)


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    query, kv_c, k_pe, w_kv_b, *options = args
    backend = _admit(*args)
    return backend.mla_attention(query, kv_c, k_pe, w_kv_b, AttentionOptions(*options))


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    width = check_mla_attention(*args)
    query = args[0]
    out = query.new_empty((*query.shape[:3], width))
    return out, query.new_empty(query.shape[:3], dtype=stat_dtype(query.dtype))


def _backward(grad_out: Tensor, grad_lse: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    query, kv_c, k_pe, w_kv_b, out, lse, *options = args
    backend = _admit_backward(query, kv_c, k_pe, w_kv_b, *options)
    return backend.mla_attention_backward(
        grad_out, grad_lse, query, kv_c, k_pe, w_kv_b, out, lse, AttentionOptions(*options)
    )


def _backward_fake(grad_out: Tensor, grad_lse: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    tensors, options = args[:4], args[6:]
    check_mla_attention(*tensors, *options)
    sinks = options[2]
    last = tensors[0].new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return (*(t.new_empty(t.shape) for t in tensors), last)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    if ctx.needs_input_grad[4]:
        raise InvalidInputError(
            "attn_mask must not require grad: an additive mask gets no gradient here; "
            "pass attn_mask.detach()"
        )
    ctx.save_for_backward(*inputs[:7], *output)
    ctx.options = inputs[7:]


def _pull_back(
    backward: Callable[..., Any], ctx: Any, grad_out: Tensor, grad_lse: Tensor | None
) -> tuple[Any, ...]:
    *tensors, attn_mask, kv_bounds, sinks, out, lse = ctx.saved_tensors
    *grads, grad_sinks = backward(
        grad_out, grad_lse, *tensors, out, lse, attn_mask, kv_bounds, sinks, *ctx.options
    )
    last = None if sinks is None else grad_sinks
    return (*grads, None, None, last, None, None, None)


def _refuse_second_derivative(ctx: Any, *grads: Tensor) -> Any:
    raise UnsupportedInputError(
        "second derivatives of mla_attention",
        {"every backend": ["only first derivatives are implemented"]},
    )


class _AttentionGradient(torch.autograd.Function):
    """The backward op under `torch.func.grad`, which records the backward too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return tuple(_backward_op(*args))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep nothing: there is no second derivative."""

    backward = staticmethod(_refuse_second_derivative)


class _Attention(torch.autograd.Function):
    """The op for eager autograd and for `torch.func` transforms."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        out, lse = _forward_op(*args)
        return out, lse

    setup_context = staticmethod(_setup_context)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return _pull_back(_AttentionGradient.apply, ctx, *grads)


def _move_batch(args: tuple[Any, ...], in_dims: tuple[int | None, ...]) -> list[Any]:
    """Bring the vmapped dimension of every batched tensor to the front."""
    return [a if d is None else a.movedim(d, 0) for a, d in zip(args, in_dims, strict=True)]


def _vmap_loop(op: Any, size: int, in_dims: tuple[int | None, ...], args: list[Any]) -> Any:
    """Run the op once per sample and stack the results."""
    if size == 0:  # the results' shapes are those of any one sample
        sample = (
            a if d is None else a.new_zeros(a.shape[1:]) for a, d in zip(args, in_dims, strict=True)
        )
        results = tuple(r.new_empty((0, *r.shape)) for r in op(*sample))
        return results, (0,) * len(results)
    samples = [
        op(*(a if d is None else a[i] for a, d in zip(args, in_dims, strict=True)))
        for i in range(size)
    ]
    results = tuple(torch.stack(column) for column in zip(*samples, strict=True))
    return results, (0,) * len(results)


def _vmap_forward(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
    """Fold samples into the batch when they share the weights, loop over them otherwise."""
    size, moved = info.batch_size, _move_batch(args, in_dims)
    shares_weights = in_dims[3] is None and in_dims[6] is None
    if not shares_weights or size == 0:
        return _vmap_loop(_forward_op, size, in_dims, moved)

    query, kv_c, k_pe, w_kv_b, attn_mask, kv_bounds, *rest = moved
    batch = query.shape[0 if in_dims[0] is None else 1]

    def fold(tensor: Tensor, dim: int | None) -> Tensor:
        return (tensor.expand(size, *tensor.shape) if dim is None else tensor).flatten(0, 1)

    if attn_mask is not None:
        attn_mask = attn_mask[(slice(None),) * (in_dims[4] is not None)]
        missing = 4 + (in_dims[4] is not None) - attn_mask.dim()
        lead = attn_mask.shape[:1] if in_dims[4] is not None else ()
        attn_mask = attn_mask.view(*lead, *(1,) * missing, *attn_mask.shape[len(lead) :])
        rows = attn_mask.shape[-3:]
        attn_mask = attn_mask.expand(*(size,) * len(lead), batch, *rows)
        attn_mask = fold(attn_mask, in_dims[4])
    if kv_bounds is not None:
        kv_bounds = fold(kv_bounds, in_dims[5])
    results = _forward_op(
        *(fold(t, d) for t, d in zip((query, kv_c, k_pe), in_dims[:3], strict=True)),
        w_kv_b,
        attn_mask,
        kv_bounds,
        *rest,
    )
    return tuple(r.unflatten(0, (size, batch)) for r in results), (0, 0)


def _vmap_backward(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
    """Loop: every sample has its own gradient of the weights."""
    return _vmap_loop(_backward_op, info.batch_size, in_dims, _move_batch(args, in_dims))


def _autocast(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Cast the four tensors as `linear` would under autocast; fp64 stays as it is."""
    dtype = torch.get_autocast_dtype(args[0].device.type)
    cast = (
        t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in args[:4]
    )
    return (*cast, *args[4:])


def _autocasts(query: Tensor) -> bool:
    """Whether autocast is on; some device types, meta among them, do not know it."""
    if not torch._C._is_any_autocast_enabled():
        return False
    device = query.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


_AUTOCAST_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA", "xpu": "AutocastXPU"}
_AUTOCAST_OFF = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
for _key in ("AutocastCUDA", "AutocastXPU"):
    _AUTOCAST_OFF = _AUTOCAST_OFF | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _key))


def _forward_autocast(*args: Any) -> tuple[Tensor, Tensor]:
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_OFF):
        out, lse = _forward_op(*_autocast(args))
    return out, lse


LIB.impl("mla_attention", _forward, "CompositeExplicitAutograd")
LIB.impl("mla_attention_backward", _backward, "CompositeExplicitAutograd")
for _key in _AUTOCAST_KEYS.values():
    LIB.impl("mla_attention", _forward_autocast, _key)
torch.library.register_fake("mla_ops::mla_attention", _forward_fake, lib=LIB)
torch.library.register_fake("mla_ops::mla_attention_backward", _backward_fake, lib=LIB)
torch.library.register_autograd(
    "mla_ops::mla_attention",
    functools.partial(_pull_back, _backward_op),
    setup_context=_setup_context,
    lib=LIB,
)
torch.library.register_autograd(
    "mla_ops::mla_attention_backward", _refuse_second_derivative, lib=LIB
)
torch.library.register_vmap("mla_ops::mla_attention", _vmap_forward, lib=LIB)
torch.library.register_vmap("mla_ops::mla_attention_backward", _vmap_backward, lib=LIB)


def mla_attention(*args: Any) -> tuple[Tensor, Tensor]:
    """Call the op along the shortest road that is right.

    Compiled code takes the op as it is. Under `torch.func` transforms, forward-mode AD, or when an
    input needs a gradient, the call goes through the `autograd.Function`. Otherwise the autograd
    kernel, which costs more than the op's own call, is left out.

    Args:
        args: the op's arguments in the order of its schema.
    """
    if torch.compiler.is_compiling():
        out, lse = _forward_op(*args)
        return out, lse
    if _autocasts(args[0]):
        args = _autocast(args)
    if needs_autograd(args):
        out, lse = _Attention.apply(*args)  # type: ignore[no-untyped-call]
        return out, lse
    with torch._C._AutoDispatchBelowAutograd():
        out, lse = _forward_op(*args)
    return out, lse
