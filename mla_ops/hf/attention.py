"""The two hooks that give every MLA family of transformers the op, without copying a forward.

Since 5.15 all of them cache the latents, expand them in one method, `expand_kv(latent, k_rot)`, and
hand the two results to the attention function. So with `config._attn_implementation == "mla_ops"`
`expand_kv` returns its arguments, and the attention function gets the latents themselves.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mla_ops.attention import mla_attention
from mla_ops.errors import InvalidInputError, PatchError
from mla_ops.hf.masks import as_bool_mask, bounds_of
from mla_ops.hf.paged import in_paged_batch, paged_forward

__all__ = [
    "IMPLEMENTATION",
    "hook_class",
    "is_mla",
    "mla_attention_forward",
    "original_expand_kv",
    "outdated",
    "refusal",
]

IMPLEMENTATION = "mla_ops"
"""The name under which the attention and mask functions are registered."""

_ORIGINAL = "_mla_ops_original"

# Known once: a graph of `torch.compile` cannot parse a version.
_SPARSE_CACHES_LATENTS = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 18)

# While torch.export runs a model, its plain parameters are fake tensors.
_PLAIN = (nn.Parameter, Tensor, FakeTensor)


def is_mla(module: nn.Module) -> bool:
    """Whether a module is MLA attention that expands latents through `expand_kv`."""
    return hasattr(type(module), "expand_kv") and hasattr(module, "kv_b_proj")


def original_expand_kv(cls: type) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return the family's own `expand_kv` when the class is hooked, None when it is not."""
    return getattr(getattr(cls, "expand_kv", None), _ORIGINAL, None)


def hook_class(cls: type) -> None:
    """Wrap a class's own `expand_kv`, once; nothing happens while another name is chosen.

    Args:
        cls: an attention class that defines `expand_kv`; one that inherits it is left alone.
    """
    original = cls.__dict__.get("expand_kv")
    if original is None or hasattr(original, _ORIGINAL):
        return

    @functools.wraps(original)
    def expand_kv(self: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        if self.config._attn_implementation == IMPLEMENTATION:
            if (old := outdated(self)) is not None:
                raise PatchError(
                    f"{type(self).__name__} cannot run under {IMPLEMENTATION!r}: {old}"
                )
            if refusal(self) is None:
                return kv_nope, k_rot
        expanded: tuple[Tensor, Tensor] = original(self, kv_nope, k_rot)
        return expanded

    setattr(expand_kv, _ORIGINAL, original)
    cls.expand_kv = expand_kv  # type: ignore[attr-defined]


def outdated(module: Any) -> str | None:
    """Return why a sparse layer must not run with this transformers, None when it may.

    Before 5.18 sparse layers cache expanded keys, and before 5.17 their indexer misreads every mask
    but that of `eager`: not even the family's own code is right under another name.

    Args:
        module: an MLA attention module.
    """
    if _SPARSE_CACHES_LATENTS or not hasattr(module.config, "index_topk"):
        return None
    return f"sparse attention needs transformers >= 5.18, this is {transformers.__version__}"


def refusal(module: Any) -> str | None:
    """Return why the weight of `kv_b_proj` must not be read, None when it may.

    The op reads the weight instead of calling the module. Whatever makes the module more than
    `linear(latent, weight)` would be lost in silence, so any of it means the family's own code.

    Args:
        module: an MLA attention module.
    """
    if (old := outdated(module)) is not None:
        return old
    if original_expand_kv(type(module)) is None:
        return "its class has an expand_kv of its own"
    if "expand_kv" in module.__dict__:
        return "its expand_kv is replaced"
    proj = module.kv_b_proj
    if type(proj) is not nn.Linear:
        cls = type(proj)  # adapters and quantised layers are often called Linear, too
        return f"kv_b_proj is {cls.__module__}.{cls.__qualname__}, not a plain nn.Linear"
    if "forward" in proj.__dict__:
        return "kv_b_proj has its forward replaced (offloading hooks do that)"
    if proj._forward_hooks or proj._forward_pre_hooks:
        return "kv_b_proj has forward hooks"
    if proj._backward_hooks or proj._backward_pre_hooks:
        return "kv_b_proj has backward hooks"
    if getattr(proj, "bias", None) is not None:
        return "kv_b_proj has a bias"
    weight = proj.weight
    if type(weight) not in _PLAIN:
        return f"kv_b_proj.weight is {type(weight).__name__}, not a plain tensor"
    if weight.layout is not torch.strided:
        return f"kv_b_proj.weight has the layout {weight.layout}"
    if weight.device.type == "meta":
        return "kv_b_proj.weight is on the meta device"
    if not weight.is_floating_point() or weight.dtype.itemsize < 2:
        return f"kv_b_proj.weight is stored as {weight.dtype}"
    return None


def mla_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend; registered with `AttentionInterface` as `mla_ops`.

    Args:
        module: the attention module; one that is not MLA (a vision tower's) goes to `sdpa`.
        query: `[B, H, S, P+R]`.
        key: latents `[B, 1, T, L]`, or expanded keys where `expand_kv` was not bypassed.
        value: rotary keys `[B, 1, T, R]`, or expanded values.
        attention_mask: what `mla_mask` made, or the user's own 4-D mask.
        dropout: on the probabilities; anything but 0 takes the family's own code.
        scaling: factor on the scores, the module's own.
        is_causal: overrides the module's.
        kwargs: `indices` (sparse attention) and `s_aux` (sinks) matter, the rest goes on.

    Returns:
        `[B, S, H, V]`, and the probabilities where `output_attentions` asked for them.
    """
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    causal = causal and query.shape[2] > 1
    if not is_mla(module):
        mask = as_bool_mask(attention_mask, query, key.shape[2], causal)
        mask = mask if bounds_of(attention_mask) is not None else attention_mask
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, mask, dropout, scaling, is_causal, **kwargs
        )
    latent = refusal(module) is None
    if in_paged_batch():
        _check_paged(module, latent, dropout, kwargs)
        scale = module.scaling if scaling is None else scaling
        return paged_forward(module, query, key, value, scale), None
    if not latent or dropout > 0.0 or kwargs.get("output_attentions"):
        original = original_expand_kv(type(module))
        if latent and original is not None:
            key, value = original(module, key, value)
        return _stock(module, query, key, value, attention_mask, causal, dropout, scaling, kwargs)

    indices = kwargs.get("indices")
    num_keys = key.shape[2]
    bounds = bounds_of(attention_mask)
    mask = None if bounds is not None else attention_mask
    if indices is not None and indices.shape[-1] < num_keys:
        mask = _select(as_bool_mask(attention_mask, query, num_keys, causal), indices, num_keys)
        bounds = None
    out, _ = mla_attention(
        query,
        key[:, 0],
        value[:, 0],
        module.kv_b_proj.weight,
        softmax_scale=module.scaling if scaling is None else scaling,
        attn_mask=mask,
        kv_bounds=bounds,
        is_causal=causal and mask is None,
        sinks=kwargs.get("s_aux"),
    )
    return out.transpose(1, 2), None


def _check_paged(module: Any, latent: bool, dropout: float, kwargs: dict[str, Any]) -> None:
    """Refuse what the paged cache cannot serve: stock code would see the new tokens only."""
    wrong = {
        "it runs stock code": not latent,
        "dropout": dropout > 0.0,
        "output_attentions": bool(kwargs.get("output_attentions")),
        "sparse attention": kwargs.get("indices") is not None,
        "sinks": kwargs.get("s_aux") is not None,
        "a sliding window": kwargs.get("sliding_window") is not None,
    }
    reasons = [reason for reason, holds in wrong.items() if holds]
    if reasons:
        raise InvalidInputError(
            f"layer {module.layer_idx} cannot use a paged cache: {', '.join(reasons)}"
        )


def _select(mask: Tensor | None, indices: Tensor, num_keys: int) -> Tensor:
    """Keep only the keys that a sparse model's indexer picked: `indices` `[B, S, k]`."""
    nothing = torch.zeros(*indices.shape[:2], num_keys, dtype=torch.bool, device=indices.device)
    picked = nothing.scatter(-1, indices.long(), True)[:, None]  # in place, vmap could not
    if mask is None:
        return picked
    return mask & picked if mask.dtype == torch.bool else mask.masked_fill(~picked, float("-inf"))


def _stock(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    causal: bool,
    dropout: float,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Run the family's own attention on expanded keys and values."""
    num_keys = key.shape[2]
    mask = as_bool_mask(attention_mask, query, num_keys, causal)
    indices = kwargs.get("indices")
    if indices is not None and indices.shape[-1] < num_keys:
        mask = _select(mask, indices, num_keys)
    if not kwargs.get("output_attentions") and kwargs.get("s_aux") is None:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, mask, dropout, scaling, False
        )
    if mask is not None and mask.dtype == torch.bool:
        lowest = torch.finfo(query.dtype).min
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, lowest)
    files = (sys.modules.get(cls.__module__) for cls in type(module).__mro__)
    eager = next(f for file in files if (f := getattr(file, "eager_attention_forward", None)))
    return eager(  # type: ignore[no-any-return]
        module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs
    )
