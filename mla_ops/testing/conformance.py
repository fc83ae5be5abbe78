"""Hostile inputs, an error budget and the conformance suite that every backend passes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mla_ops import reference
from mla_ops.attention import mla_attention
from mla_ops.dims import MLADims, stat_dtype
from mla_ops.dispatch import Call, get_backend, use_backend
from mla_ops.validation import FLOAT_DTYPES

__all__ = [
    "DIMS",
    "AttentionInputs",
    "ConformanceCase",
    "assert_within_budget",
    "attention_inputs",
    "check_backend",
    "conformance_cases",
]

DIMS: Mapping[str, MLADims] = {
    "odd": MLADims(3, 40, 16, 8, 12),
    "no-rope": MLADims(5, 24, 10, 0, 14),
    "rope-only": MLADims(1, 24, 0, 10, 9),
    "wide-values": MLADims(7, 16, 6, 4, 30),
}
"""Small widths without a convenient property: no power of two for H, V != P+R, R = 0, P = 0; with
the last ones absorbing always costs less than expanding."""

AttentionFunction = Callable[..., tuple[Tensor, Tensor]]
_Results = dict[str, Tensor]

_LSE_BUDGET = 1e-5
_ORACLE_ERROR = 1e-12  # of fp64 itself, which has nothing better to be measured by
_DRAWS = 8


class AttentionInputs(NamedTuple):
    """The arguments of one call of `mla_ops.mla_attention`; `options` are the keyword arguments."""

    query: Tensor
    kv_c: Tensor
    k_pe: Tensor
    w_kv_b: Tensor
    options: Mapping[str, Any]

    def map(self, function: Callable[[Tensor], Tensor]) -> AttentionInputs:
        """Return the arguments with `function` applied to every tensor."""
        options = {k: function(v) if isinstance(v, Tensor) else v for k, v in self.options.items()}
        query, kv_c, k_pe, w_kv_b = map(function, self[:4])
        return AttentionInputs(query, kv_c, k_pe, w_kv_b, options)

    def to(self, dtype: torch.dtype) -> AttentionInputs:
        """Return the arguments with every floating-point tensor in another dtype."""
        return self.map(lambda t: t.to(dtype) if t.is_floating_point() else t)

    def visible(self) -> Tensor:
        """Return which query sees which key, bool `[B, H, S, T]`."""
        (batch, heads, num_queries, _), num_keys = self.query.shape, self.kv_c.shape[1]
        rules = {name: self.options[name] for name in ("attn_mask", "kv_bounds", "is_causal")}
        visible = reference.visible_keys(num_queries, num_keys, device=self.query.device, **rules)
        return visible.expand(batch, heads, num_queries, num_keys)


def _in_nan(values: Tensor) -> Tensor:
    """Return the values as an inner slice of a larger buffer full of NaN."""
    buffer = values.new_full([size + 3 for size in values.shape], float("nan"))
    return buffer[tuple(slice(1, 1 + size) for size in values.shape)].copy_(values)


def _lay_out(inputs: AttentionInputs, layout: str) -> AttentionInputs:
    query, kv_c, k_pe, w_kv_b, options = inputs
    if layout == "shared":
        kv_c, k_pe = kv_c[:1].expand_as(kv_c), k_pe[:1].expand_as(k_pe)
    elif layout == "strided":
        kv_c, k_pe = _in_nan(torch.cat([kv_c, k_pe], 2)).split([kv_c.shape[2], k_pe.shape[2]], 2)
        query = _in_nan(query.transpose(1, 2)).transpose(1, 2)
        w_kv_b = _in_nan(w_kv_b.t()).t()
    return AttentionInputs(query, kv_c, k_pe, w_kv_b, options)


def _mask(name: str, sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
    kind, _, letters = name.partition(":")
    shape = [1 if letter == "1" else sizes[letter] for letter in letters]
    seen = torch.rand(shape, generator=generator) < (0.0 if kind == "hidden" else 0.7)
    if letters.endswith("st") and seen.numel():
        seen[..., :1, :] = False  # a query that sees nothing
        seen[..., :, shape[-1] // 2] = False  # a key that nobody sees
    if kind != "float":
        return seen
    return torch.randn(shape, generator=generator).masked_fill(~seen, float("-inf"))


def _bounds(batch: int, num_keys: int) -> Tensor:
    """Return for each request in turn: everything and more, an inner part, nothing, two keys."""
    third = num_keys // 3
    pattern = [(-3, num_keys + 7), (third, num_keys - third // 2), (third + 1, third), (0, 2)]
    return torch.tensor(pattern, dtype=torch.int32).repeat(batch // 4 + 1, 1)[:batch]


def attention_inputs(
    dims: MLADims,
    sizes: tuple[int, int, int] = (2, 1, 9),
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    softmax_scale: float | None = None,
    is_causal: bool = False,
    mask: str | None = None,
    bounds: bool = False,
    sinks: bool = False,
    workspace_tokens: int | None = None,
    layout: Literal["contiguous", "strided", "shared"] = "contiguous",
    seed: int = 0,
) -> AttentionInputs:
    """Make arguments that a careless backend gets wrong, for layers of the widths `dims`.

    `sizes` are B, S and T. The scale is not `1/sqrt(P+R)` unless it is given. Keys that no query
    sees hold NaN and infinities: a backend that merely multiplies them by 0 returns NaN.

    `bounds` adds `kv_bounds`, other ones for each request, some of them empty; `sinks` adds sinks.
    `mask` is `kind:shape`: the kinds are `bool`, `float` (additive) and `hidden` (bool, all false);
    the shape has letters of `bhst` for full dimensions, `1` for broadcast ones, and may be short,
    as in `float:hst`. The layout is `contiguous`, `strided` (views into larger buffers full of NaN,
    query and weight transposed, latent and rotary part two slices of one cache), or `shared` (one
    cache expanded over the batch).

    Example:
        >>> import mla_ops
        >>> inputs = attention_inputs(DIMS["odd"], (4, 2, 9), bounds=True)
        >>> out, lse = mla_ops.mla_attention(*inputs[:4], **inputs.options)
        >>> bool(inputs.kv_c.isnan().any()), bool(out.isnan().any())
        (True, False)
    """
    (batch, num_queries, num_keys), heads = sizes, dims.num_heads
    shapes = (
        (batch, heads, num_queries, dims.qk_head_dim),
        (batch, num_keys, dims.kv_lora_rank),
        (batch, num_keys, dims.qk_rope_head_dim),
        (dims.expanded_dim, dims.kv_lora_rank),
    )
    generator = torch.Generator().manual_seed(seed)
    query, kv_c, k_pe, w_kv_b = (torch.randn(shape, generator=generator) for shape in shapes)
    w_kv_b *= dims.kv_lora_rank**-0.5
    named = {"b": batch, "h": heads, "s": num_queries, "t": num_keys}
    options = {
        "softmax_scale": softmax_scale or 0.85 * dims.qk_head_dim**-0.5,
        "attn_mask": None if mask is None else _mask(mask, named, generator),
        "kv_bounds": _bounds(batch, num_keys) if bounds else None,
        "is_causal": is_causal,
        "sinks": torch.randn(heads, generator=generator) if sinks else None,
        "workspace_tokens": workspace_tokens,
    }
    inputs = AttentionInputs(query, kv_c, k_pe, w_kv_b, options)
    unseen = ~inputs.visible().any(dim=1).any(dim=1)[..., None]
    if layout == "shared":
        unseen = unseen.all(dim=0, keepdim=True)
    kv_c.masked_fill_(unseen, float("nan"))
    k_pe.masked_fill_(unseen, float("inf"))
    return _lay_out(inputs.to(dtype).map(lambda tensor: tensor.to(device)), layout)


def _require(holds: bool | Tensor, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def _step(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance between neighbours in `dtype` at the magnitude of each value."""
    if dtype == torch.float64:
        return values.abs().clamp(min=1.0) * _ORACLE_ERROR
    return values.abs().clamp(min=torch.finfo(dtype).tiny) * torch.finfo(dtype).eps


def _largest_error(ordinary: Tensor, fp64: Tensor, name: str) -> float:
    finite = fp64.isfinite()
    _require((ordinary.isfinite() == finite).all(), f"{name}: the ordinary result overflows")
    error = torch.where(finite, ordinary.double() - fp64, 0.0).abs()
    return float(error.max()) if error.numel() else 0.0


def assert_within_budget(
    ours: Tensor,
    fp64: Tensor,
    ordinary: Tensor,
    *,
    name: str = "result",
    dtype: torch.dtype | None = None,
    factor: float = 2.0,
    ordinary_error: float | None = None,
    at_least: float = 0.0,
) -> None:
    """Check a result against the error that an ordinary implementation makes.

    Every element must satisfy `|ours - fp64| <= factor max|ordinary - fp64| + step`, with the
    rounding step of `dtype` at its magnitude. Infinities and NaN must be where fp64 has them.

    Args:
        ours: the result under test, any shape.
        fp64: the same from fp64 copies of the inputs.
        ordinary: the same from a plain implementation in the dtype under test.
        name: what it is, for the message.
        dtype: whose rounding step; None means that of `ours`.
        factor: how many times the ordinary error is allowed.
        ordinary_error: the largest ordinary error, where more inputs than these have shown it.
        at_least: a budget that is granted in any case.

    Raises:
        AssertionError: over budget; the message names the worst element and all three values.
    """
    shapes = [tuple(tensor.shape) for tensor in (ours, fp64, ordinary)]
    _require(len(set(shapes)) == 1, f"{name}: ours, fp64 and ordinary have the shapes {shapes}")
    if ordinary_error is None:
        ordinary_error = _largest_error(ordinary, fp64, name)
    limit = (_step(fp64, dtype or ours.dtype) + factor * ordinary_error).clamp(min=at_least)
    error = (ours.double() - fp64).abs()
    same = (ours.double() == fp64) | (ours.isnan() & fp64.isnan())
    excess = torch.where(same, 0.0, (error - limit).nan_to_num(nan=torch.inf))
    bad = int((excess > 0).sum())
    if bad:
        worst = torch.unravel_index(excess.argmax(), excess.shape)
        values = {"ours": ours, "fp64": fp64, "ordinary": ordinary, "error": error, "budget": limit}
        listed = ", ".join(f"{key} {float(value[worst]):.9g}" for key, value in values.items())
        where = f"{bad} of {ours.numel()} elements, worst at {[int(i) for i in worst]}"
        raise AssertionError(f"{name} is out of budget in {where}: {listed}")


def _run(function: AttentionFunction, inputs: AttentionInputs, pull: bool = True) -> _Results:
    """Return both results of a call and, if asked to, the gradients pulled back through them."""
    leaves = dict(zip(inputs._fields, inputs[:4], strict=False))
    if inputs.options["sinks"] is not None:
        leaves["sinks"] = inputs.options["sinks"]
    leaves = {name: leaf.detach().requires_grad_(pull) for name, leaf in leaves.items()}
    options = {**inputs.options, "sinks": leaves.get("sinks")}
    with torch.set_grad_enabled(pull):
        out, lse = function(*list(leaves.values())[:4], **options)
    results = {"out": out.detach(), "lse": lse.detach()}
    if not pull:
        return results
    batch, heads, num_queries, width = out.shape
    shape = (batch, num_queries, heads, width + 1)
    # Not contiguous, and eighths, so that they are the same numbers in every dtype.
    grad = torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(1)) / 8
    grad = grad.to(out.device).transpose(1, 2)
    pairs = ((out, grad[..., 1:].to(out.dtype)), (lse, grad[..., 0].to(lse.dtype)))
    outputs, upstream = zip(*(pair for pair in pairs if pair[0].requires_grad), strict=True)
    grads = torch.autograd.grad(outputs, list(leaves.values()), upstream, materialize_grads=True)
    return results | {f"gradient of {name}": g for name, g in zip(leaves, grads, strict=True)}


def _check_contract(inputs: AttentionInputs, copies: AttentionInputs, results: _Results) -> None:
    """Results have the right metadata and memory of their own, and the inputs are untouched."""
    query = inputs.query
    for name, result in results.items():
        dtype = stat_dtype(query.dtype) if name == "lse" else query.dtype
        got, want = (result.dtype, result.device), (dtype, query.device)
        _require(got == want, f"{name} must have dtype and device {want}, got {got}")
        if name in ("out", "lse"):
            _require(result.is_contiguous(), f"{name} is not contiguous: strides {result.stride()}")
    memory = {result.untyped_storage().data_ptr() for result in results.values() if result.numel()}
    before = {**copies._asdict(), **copies.options}
    for name, tensor in {**inputs._asdict(), **inputs.options}.items():
        if isinstance(tensor, Tensor):
            same = (tensor == before[name]) | (tensor.isnan() & before[name].isnan())
            _require(same.all(), f"{name} was written to")
            shared = tensor.untyped_storage().data_ptr() in memory
            _require(not shared, f"a result shares the memory of {name}")


@dataclass(frozen=True, eq=False)
class ConformanceCase:
    """One situation that every backend must get right, in every dtype that it takes.

    `sizes` are B, S and T, `options` further arguments of `attention_inputs`.
    """

    name: str
    dims: MLADims
    sizes: tuple[int, int, int]
    options: Mapping[str, Any]

    def __str__(self) -> str:
        return self.name

    def check(
        self,
        backend: str,
        dtype: torch.dtype,
        *,
        device: str = "cpu",
        function: AttentionFunction = mla_attention,
    ) -> None:
        """Check values, gradients where the backend has them, and the contract of a call.

        Gradients may be off by twice as much as results: a backward that recomputes probabilities
        starts from a rounded `out` and `lse`, unlike autograd of the ordinary implementation.
        `function` is called in place of `mla_ops.mla_attention`: a compiled one, for instance.

        Raises:
            AssertionError: something is wrong; the message says what.
        """
        fp64, ordinary, errors = _yardstick(self, dtype, device)
        inputs = attention_inputs(self.dims, self.sizes, dtype=dtype, device=device, **self.options)
        copies = inputs.map(Tensor.clone)
        backward = Call("mla_attention_backward", inputs.query.device.type, dtype)
        pulls = not get_backend(backend).not_supported_reasons(backward)
        visible = inputs.visible()
        blind, unseen = ~visible.any(dim=-1), ~visible.any(dim=1).any(dim=1)
        zero = {"out": blind, "gradient of kv_c": unseen, "gradient of k_pe": unseen}
        runs = []
        for label, pull in (("", False), (" of a second run", False), (" under autograd", pulls)):
            with use_backend(backend):
                results = _run(function, inputs, pull)
            runs.append(results)
            _check_contract(inputs, copies, results)
            for name, result in results.items():
                assert_within_budget(
                    result,
                    fp64[name],
                    ordinary[name],
                    name=name + label,
                    dtype=dtype,
                    factor=4.0 if name.startswith("gradient") else 2.0,
                    ordinary_error=errors[name],
                    at_least=_LSE_BUDGET if (name, dtype) == ("lse", torch.float32) else 0.0,
                )
                if name in zero:
                    exact = (result[zero[name]] == 0).all()
                    _require(exact, f"{name}{label} is not exactly 0 where nothing is seen")
        repeated = all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
        _require(repeated, "two runs of the same call differ")


def _oracle(*tensors: Tensor, workspace_tokens: None, **options: Any) -> tuple[Tensor, Tensor]:
    return reference.mla_attention(*tensors, **options)


@functools.cache
def _yardstick(
    case: ConformanceCase, dtype: torch.dtype, device: str
) -> tuple[_Results, _Results, dict[str, float]]:
    """Return results in fp64, results of an ordinary implementation, and its largest errors.

    The errors are the largest of both forms over a few draws: one small tensor is a poor measure.
    """
    errors: dict[str, float] = {}
    options = {**case.options, "workspace_tokens": None, "dtype": dtype, "device": device}
    for seed in reversed(range(_DRAWS)):
        inputs = attention_inputs(case.dims, case.sizes, seed=seed, **options)
        fp64 = _run(_oracle, inputs.to(torch.float64))
        for form in ("absorbed", "expanded"):
            results = _run(functools.partial(_oracle, form=form), inputs)
            for name, result in results.items():
                error = _largest_error(result, fp64[name], f"{case} {name}")
                errors[name] = max(errors.get(name, 0.0), error)
    return fp64, results, errors


@functools.cache
def conformance_cases() -> tuple[ConformanceCase, ...]:
    """Return the cases of the suite, each with a name of its own."""
    odd, no_rope, rope_only, wide = DIMS.values()
    many = int(odd.expand_threshold) + 4  # new tokens, enough for expanding to pay
    listed: list[tuple[str, MLADims, tuple[int, int, int], dict[str, Any]]] = [
        ("decode", odd, (3, 1, 23), {}),
        ("decode-one-key-tiles", odd, (2, 1, 9), {"workspace_tokens": 1}),
        ("decode-bounds", odd, (8, 1, 23), {"bounds": True, "workspace_tokens": 5}),
        ("decode-key-padding", odd, (2, 1, 23), {"mask": "bool:b11t", "workspace_tokens": 7}),
        ("decode-sinks", odd, (2, 1, 9), {"sinks": True, "workspace_tokens": 4}),
        ("decode-no-rope", no_rope, (4, 1, 11), {"bounds": True}),
        ("decode-rope-only", rope_only, (2, 1, 11), {"sinks": True}),
        ("decode-strided", odd, (8, 1, 11), {"layout": "strided", "bounds": True}),
        ("decode-shared", odd, (2, 1, 11), {"layout": "shared", "mask": "bool:t"}),
        ("extend-causal", odd, (2, 5, 14), {"is_causal": True, "workspace_tokens": 3}),
        ("extend-causal-more-queries", odd, (2, 9, 4), {"is_causal": True}),
        ("extend-causal-bounds", wide, (4, 6, 15), {"is_causal": True, "bounds": True}),
        ("extend-causal-mask", odd, (2, 6, 15), {"is_causal": True, "mask": "bool:b1st"}),
        ("extend-additive", no_rope, (2, 7, 15), {"mask": "float:hst", "workspace_tokens": 4}),
        ("extend-sinks-blind-rows", odd, (2, 7, 5), {"is_causal": True, "sinks": True}),
        ("extend-strided", wide, (2, 40, 45), {"layout": "strided", "workspace_tokens": 8}),
        ("prefill", odd, (2, many, many), {"is_causal": True}),
        ("prefill-tiles", odd, (2, many, many + 9), {"is_causal": True, "workspace_tokens": 7}),
        ("prefill-one-key-tiles", odd, (1, many, 6), {"is_causal": True, "workspace_tokens": 1}),
        ("prefill-bounds", odd, (4, many, 41), {"is_causal": True, "bounds": True, "sinks": True}),
        ("prefill-additive", odd, (2, many, 33), {"mask": "float:st", "layout": "strided"}),
        ("prefill-mask-of-heads", odd, (2, many, 33), {"mask": "bool:1hst", "sinks": True}),
        ("prefill-no-rope", no_rope, (2, 28, 33), {"workspace_tokens": 10}),
        ("prefill-rope-only", rope_only, (2, 20, 33), {"mask": "bool:b1st", "is_causal": True}),
        ("no-requests", odd, (0, 3, 5), {"is_causal": True, "sinks": True}),
        ("no-queries", odd, (2, 0, 5), {"bounds": True, "mask": "bool:b1st"}),
        ("no-keys", odd, (2, 3, 0), {"is_causal": True, "bounds": True}),
        ("no-keys-for-many", odd, (2, many, 0), {"sinks": True, "mask": "float:b1st"}),
        ("all-masked", odd, (2, 3, 5), {"mask": "hidden:b1st", "workspace_tokens": 2}),
        ("all-masked-sinks", odd, (2, many, 5), {"mask": "hidden:1", "sinks": True}),
    ]
    return tuple(itertools.starmap(ConformanceCase, listed))


def check_backend(
    name: str, *, device: str = "cpu", function: AttentionFunction = mla_attention
) -> tuple[str, ...]:
    """Run every case in every dtype that the backend takes, and return what was checked.

    Raises:
        AssertionError: checks failed, all of which are listed, or there was nothing to check.

    Example:
        >>> check_backend("reference")[0]
        'decode in bfloat16'
    """
    passed, failed = [], []
    for dtype in FLOAT_DTYPES:
        call = Call("mla_attention", torch.device(device).type, dtype)
        if get_backend(name).not_supported_reasons(call):
            continue
        for case in conformance_cases():
            label = f"{case} in {str(dtype).removeprefix('torch.')}"
            try:
                case.check(name, dtype, device=device, function=function)
                passed.append(label)
            except AssertionError as error:
                failed.append(f"{label}: {error}")
            except Exception as error:
                error.add_note(f"backend {name}, case {label}")
                raise
    lines = [f"backend {name} fails {len(failed)} of {len(passed) + len(failed)} checks:", *failed]
    _require(not failed, "\n  ".join(lines))
    _require(bool(passed), f"backend {name} takes no dtype on {device}")
    return tuple(passed)
