"""Switching a loaded model, and saying what each of its layers runs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel

from mla_ops.dispatch import Call, select
from mla_ops.errors import MLAOpsError, PatchError
from mla_ops.hf.attention import IMPLEMENTATION, is_mla, outdated, refusal

__all__ = ["LayerReport", "PatchReport", "patch", "report", "unpatch"]

_Model = TypeVar("_Model", bound=nn.Module)


class _Switched(str):
    """`mla_ops` as `patch` writes it into a config, with what stood there before.

    So `unpatch` knows the way back from any model that reads the config, from copies and pickles;
    `save_pretrained` leaves the implementation out.
    """

    before: str

    def __reduce__(self) -> tuple[Any, ...]:
        return _switched, (self.before,)


@functools.cache
def _switched(before: str) -> _Switched:
    """Return the one object that remembers `before`; graphs of `torch.compile` are kept by it."""
    name = _Switched(IMPLEMENTATION)
    name.before = before
    return name


@dataclass(frozen=True)
class LayerReport:
    """One MLA layer.

    Attributes:
        name: the module's name in the model.
        cls: its class.
        fused: whether its forward runs the op.
        backend: the backend that takes the op there, empty for stock code.
        reason: why stock code runs, or where it still would; empty when there is nothing to say.
    """

    name: str
    cls: str
    fused: bool
    backend: str
    reason: str


@dataclass(frozen=True)
class PatchReport:
    """All MLA layers of a model; printing it gives a table."""

    layers: tuple[LayerReport, ...]

    @property
    def fused(self) -> int:
        """How many layers run the op."""
        return sum(layer.fused for layer in self.layers)

    def __str__(self) -> str:
        """Return a headline and one row per layer."""
        stock = len(self.layers) - self.fused
        rows = [f"{len(self.layers)} MLA layers: {self.fused} run mla_ops, {stock} stock code"]
        width = max((len(layer.name) for layer in self.layers), default=0)
        for layer in self.layers:
            runs = f"mla_ops ({layer.backend})" if layer.fused else "stock"
            rows.append(f"  {layer.name:{width}}  {layer.cls}  {runs}  {layer.reason}".rstrip())
        return "\n".join(rows)


def _mla_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if is_mla(module):
            yield name, module


def _owners(model: nn.Module) -> list[PreTrainedModel]:
    """Return the outermost transformers models whose config an MLA layer reads."""
    configs = {id(module.config) for _, module in _mla_modules(model)}
    owners: list[PreTrainedModel] = []
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and id(module.config) in configs:
            owners.append(module)
            configs.remove(id(module.config))
    return owners


def _describe(name: str, module: Any) -> LayerReport:
    cls = type(module).__name__
    implementation = module.config._attn_implementation
    reason = refusal(module)
    if reason is None and implementation != IMPLEMENTATION:
        reason = f"attn_implementation is {implementation!r}"
    dropout = float(getattr(module, "attention_dropout", 0.0) or 0.0)
    if reason is None and module.training and dropout > 0.0:
        reason = f"attention dropout {dropout} while training"
    if reason is not None:
        return LayerReport(name, cls, False, "", reason)
    weight = module.kv_b_proj.weight
    try:
        backend = select(Call("mla_attention", weight.device.type, weight.dtype)).name
    except MLAOpsError as error:
        return LayerReport(name, cls, False, "", str(error))
    return LayerReport(name, cls, True, backend, "")


def report(model: nn.Module) -> PatchReport:
    """Say for every MLA layer what its next forward runs and, where that is stock code, why.

    A call that asks for `output_attentions` runs stock code for that call in any layer.

    Args:
        model: any module that contains a transformers model.

    Example:
        >>> import mla_ops.hf
        >>> from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
        >>> config = DeepseekV3Config(
        ...     vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=2, q_lora_rank=None, kv_lora_rank=16,
        ...     qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, first_k_dense_replace=1,
        ... )
        >>> model = DeepseekV3ForCausalLM(config).eval()
        >>> with mla_ops.use_backend("tiled"):
        ...     print(mla_ops.hf.report(mla_ops.hf.patch(model)))
        1 MLA layers: 1 run mla_ops, 0 stock code
          model.layers.0.self_attn  DeepseekV3Attention  mla_ops (tiled)
    """
    return PatchReport(tuple(_describe(name, module) for name, module in _mla_modules(model)))


def patch(model: _Model, *, strict: bool = True) -> _Model:
    """Switch every MLA layer of a loaded model to `mla_ops`; other models are not touched.

    The same as `model.set_attn_implementation("mla_ops")`, but it looks first and leaves vision
    towers alone. Weights, state dict and caches stay as they are; patching twice is patching once.

    Args:
        model: a transformers model, or a module around one (a PEFT model, say).
        strict: raise when there is no MLA layer or one would keep running stock code.

    Returns:
        The same model.

    Raises:
        PatchError: under `strict`; carries the report, and the model is as it was.
    """
    layers = list(_mla_modules(model))
    owners = _owners(model)
    switched = {id(owner.config) for owner in owners}
    refused = [
        (name, why)
        for name, module in layers
        if (why := refusal(module) or _orphaned(module, switched)) is not None
    ]
    if strict and (not layers or refused):
        table = "\n".join(f"  {name}: {why}" for name, why in refused)
        what = f"these would keep running stock code:\n{table}" if layers else _no_layers(model)
        raise PatchError(f"cannot patch {type(model).__name__}: {what}", report(model))
    kept = {id(module.config) for _, module in layers if outdated(module) is not None}
    for owner in owners:
        before = owner.config._attn_implementation
        if before != IMPLEMENTATION and id(owner.config) not in kept:
            owner.set_attn_implementation(_switched(before))
    return model


def _orphaned(module: Any, switched: set[int]) -> str | None:
    """Return why `patch` cannot switch a layer that it was given without its model."""
    if id(module.config) in switched or module.config._attn_implementation == IMPLEMENTATION:
        return None
    return "it comes without the transformers model whose implementation could be switched"


def _no_layers(model: nn.Module) -> str:
    named = [
        name for name, module in model.named_modules() if hasattr(module, "kv_a_proj_with_mqa")
    ]
    if named:
        return (
            f"{len(named)} layers look like MLA (first: {named[0]}) but have no expand_kv; "
            "transformers >= 5.15 and its own model classes are needed (no trust_remote_code)"
        )
    return "it has no MLA layer (a module with kv_b_proj and expand_kv)"


def unpatch(model: _Model) -> _Model:
    """Switch a model back to what it ran before `patch`; its numbers are then bit for bit stock's.

    What was switched by name, a vision tower with it, goes to the fastest of its family: `sdpa`,
    or `eager` where there is no other.

    Args:
        model: what was given to `patch`, a part of it, what it is part of, or a copy.

    Returns:
        The same model.
    """
    inner = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    # A model sets those inside it too: choose for all before the first is set.
    for each, chosen in [(each, _usual(each)) for each in inner]:
        if each.config._attn_implementation != chosen:
            each.set_attn_implementation(chosen)
    return model


def _usual(model: PreTrainedModel) -> str:
    """Return what a model runs without `mla_ops`."""
    now: str = model.config._attn_implementation
    if now != IMPLEMENTATION:
        return now
    fastest = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
    return getattr(now, "before", fastest)
