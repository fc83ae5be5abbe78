"""Running cases: the gate first, then each side in the same process with the same threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from mla_ops.attention import mla_attention
from mla_ops.bench.cases import Case
from mla_ops.bench.timing import Limits, Timing, measure, peak_bytes
from mla_ops.errors import MLAOpsError
from mla_ops.reference import mla_attention as oracle

__all__ = ["Result", "WrongResultError", "measure_case", "measure_scratch"]

_COLD_BYTES = 96 * 1024 * 1024
_GATE_KEYS = 1024


class WrongResultError(MLAOpsError, RuntimeError):
    """A backend's numbers are off, so its speed means nothing."""


@dataclass(frozen=True)
class Result:
    """One case, measured.

    Attributes:
        case: what was run.
        ours: time of `mla_ops.mla_attention`.
        stock: time of transformers' `expand_kv` and `sdpa` on the same cache, None if not run.
        error: largest error against fp64 on a shortened context, relative to the largest output.
        of_matmul: FLOPs that are needed, per second, as a fraction of the matmul rate.
        of_bandwidth: bytes that are needed, per second, as a fraction of the read bandwidth.
    """

    case: Case
    ours: Timing
    stock: Timing | None
    error: float
    of_matmul: float
    of_bandwidth: float

    @property
    def speedup(self) -> float | None:
        """Stock's median over ours."""
        return None if self.stock is None else self.stock.median / self.ours.median

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        values = asdict(self)
        values["case"] = {**values["case"], "dtype": str(self.case.dtype), "name": str(self.case)}
        return {**values, "speedup": self.speedup}


def _scale(case: Case) -> float:
    return float(case.dims.qk_head_dim**-0.5)


def check_case(case: Case) -> float:
    """Compare with the oracle in fp64 on at most 1024 keys and return the relative error.

    Args:
        case: widths, dtype and new tokens are taken from it.

    Raises:
        WrongResultError: the error is above twice that of the same computation in plain torch.
    """
    new = min(case.new, _GATE_KEYS // 4)
    short = Case(case.model, 1, new, min(case.cached, _GATE_KEYS - new), case.dtype)
    tensors = short.tensors()
    scale = _scale(case)
    ours = mla_attention(*tensors, softmax_scale=scale, is_causal=True).out.double()
    plain = oracle(*tensors, softmax_scale=scale, is_causal=True).out.double()
    query, kv_c, k_pe, w_kv_b = (t.double() for t in tensors)
    exact = oracle(query, kv_c, k_pe, w_kv_b, softmax_scale=scale, is_causal=True).out
    size = exact.abs().max()
    error, ordinary = (((x - exact).abs().max() / size).item() for x in (ours, plain))
    if error > 2 * ordinary + torch.finfo(case.dtype).eps:
        raise WrongResultError(
            f"{case}: error {error:.1e}, expected at most twice that of plain torch, {ordinary:.1e}"
        )
    return error


def _stock(case: Case) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return what transformers does between cache and output projection."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    dims = case.dims
    config = DeepseekV3Config(
        hidden_size=64,
        num_attention_heads=dims.num_heads,
        num_key_value_heads=dims.num_heads,
        q_lora_rank=None,
        kv_lora_rank=dims.kv_lora_rank,
        qk_nope_head_dim=dims.qk_nope_head_dim,
        qk_rope_head_dim=dims.qk_rope_head_dim,
        v_head_dim=dims.v_head_dim,
    )
    config._attn_implementation = "sdpa"
    layer = DeepseekV3Attention(config, layer_idx=0).to(case.dtype)
    mask = None
    if case.new > 1 and case.cached:
        ones = torch.ones(case.new, case.context, dtype=torch.bool)
        mask = ones.tril(case.cached)[None, None]

    def run(query: Tensor, kv_c: Tensor, k_pe: Tensor, w_kv_b: Tensor) -> Tensor:
        layer.kv_b_proj.weight.data = w_kv_b
        key, value = layer.expand_kv(kv_c[:, None], k_pe[:, None])
        causal = case.new > 1 and mask is None
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=_scale(case)
        )

    return run


def measure_case(case: Case, limits: Limits, *, stock: bool = True, seconds: float = 1.0) -> Result:
    """Check one case, then time both sides on caches that are cold.

    Args:
        case: what to run.
        limits: of this machine, from the same run.
        stock: whether to time transformers too.
        seconds: time to spend per side, about.

    Raises:
        WrongResultError: the numbers are off; nothing is timed then.
    """
    error = check_case(case)
    query, kv_c, k_pe, w_kv_b = case.tensors()
    copies = max(1, min(32, _COLD_BYTES // max(1, case.bytes)))
    caches = itertools.cycle([(kv_c.clone(), k_pe.clone(), w_kv_b.clone()) for _ in range(copies)])
    with torch.no_grad():
        ours = measure(
            lambda: mla_attention(
                query, *next(caches), softmax_scale=_scale(case), is_causal=case.new > 1
            ),
            seconds=seconds,
        )
        theirs = None
        if stock:
            run = _stock(case)
            theirs = measure(lambda: run(query, *next(caches)), seconds=seconds)
    return Result(
        case=case,
        ours=ours,
        stock=theirs,
        error=error,
        of_matmul=case.flops / ours.median / limits.matmul,
        of_bandwidth=case.bytes / ours.median / limits.bandwidth,
    )


def measure_scratch(case: Case) -> int:
    """Return the peak bytes that one call allocates, results included.

    Args:
        case: what to run.
    """
    tensors = case.tensors()
    with torch.no_grad():
        return peak_bytes(
            lambda: mla_attention(*tensors, softmax_scale=_scale(case), is_causal=case.new > 1)
        )
