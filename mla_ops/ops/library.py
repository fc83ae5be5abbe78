"""The library that all ops are registered in, and the question which road a call takes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["LIB", "needs_autograd"]

LIB = torch.library.Library("mla_ops", "FRAGMENT")  # ops vanish when it is collected


def needs_autograd(tensors: Iterable[Tensor | None]) -> bool:
    """Whether a call must pass autograd: a transform is active, or an input wants a gradient.

    Args:
        tensors: the inputs that gradients could be wanted of.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
