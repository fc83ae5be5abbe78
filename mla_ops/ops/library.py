"""The library that all ops are registered in, and what every call of an op goes through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mla_ops.dispatch import Backend, Call, select

__all__ = ["LIB", "admission", "needs_autograd"]

LIB = torch.library.Library("mla_ops", "FRAGMENT")  # ops vanish when it is collected

_MOST_KINDS = 512  # a kind takes about 2 KB


def needs_autograd(args: tuple[Any, ...]) -> bool:
    """Whether a call must pass autograd: a transform is active, or an input wants a gradient.

    Args:
        args: the arguments of the call, those that are no tensors too.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*args)


def admission(op: str, check: Callable[..., Any], like: int = 0) -> Callable[..., Backend]:
    """Return what the body of an op asks first: it checks the call and says who takes it.

    A check looks at nothing but the shape, dtype and device of its tensors, and at its other
    arguments: calls that agree in these pass it alike, so it runs once for each kind of call.
    Comparing kinds takes less than half the time of checking, and the layers of a model agree. What
    a check refuses is not kept; the backend is chosen anew by every call.

    Args:
        op: name of the op, for the backends.
        check: takes positional arguments, of which the tensors are real (a symbolic size has no
            hash), and raises or returns.
        like: index of the argument whose device and dtype are those of the computation.
    """
    passed: dict[tuple[Any, ...], Call] = {}

    def admit(*args: Any) -> Backend:
        kind = tuple([(a.shape, a.dtype, a.device) if isinstance(a, Tensor) else a for a in args])
        call = passed.get(kind)
        if call is None:
            check(*args)
            call = Call(op, args[like].device.type, args[like].dtype)
            if len(passed) >= _MOST_KINDS:
                passed.clear()
            passed[kind] = call
        return select(call)

    return admit
