"""Kernels that other packages have for GPUs, where they are installed.

Decode kernels get latent queries, so their sides project as `mla_decode` does; the prefill kernel
gets keys that its side expands, as an engine does. Plans and schedules are made beforehand.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor

from mla_ops.bench.cases import AttentionCase, Case
from mla_ops.bench.peers import PAGED, Peer, absorbed, expanded_bytes, missing, widths
from mla_ops.bench.peers_torch import expand
from mla_ops.bench.problems import BLOCK_SIZE, Problem, paged, problem_of
from mla_ops.bench.timing import Run

__all__ = ["FlashAttention", "FlashInfer", "FlashMLA", "VllmTriton"]

_WORKSPACE = 128 * 2**20  # what FlashInfer's documentation asks for
_SPLITS = 8


class _Package(Peer):
    """A side that is one function of an installed package."""

    devices = frozenset({"cuda"})
    against = PAGED
    module: str
    function: str

    def backend(self, case: Case) -> str:
        """Return the name of the function."""
        del case
        return self.function

    def available(self) -> str | None:
        """Return why the module cannot be imported, None if it can."""
        return missing(self.module)

    def refuses(self, case: Case) -> str | None:
        """Return which width or dtype the kernel was not built for."""
        if case.dtype not in (torch.bfloat16, torch.float16):
            return f"{case.dtype} is not taken"
        return widths(case, kv_lora_rank=512, qk_rope_head_dim=64)

    def imported(self) -> Any:
        """Return the module."""
        return importlib.import_module(self.module)


class FlashMLA(_Package):
    """FlashMLA's dense decode: https://github.com/deepseek-ai/FlashMLA."""

    name = "FlashMLA"
    groups = frozenset({"decode"})
    module, function = "flash_mla", "flash_mla_with_kvcache"

    def prepare(self, problem: Problem) -> Run:
        """Lay the rows out in blocks of 64, the only size that it takes, and make its schedule."""
        dense, flash = problem_of(problem), self.imported()
        case, scale = dense.case, dense.scale
        pages, lengths = paged(dense, BLOCK_SIZE), dense.lengths()
        cache = pages.cache[:, :, None]
        rows = case.new * case.dims.num_heads
        # Older versions return tensors; newer ones an empty schedule, filled by the first call.
        schedule, splits = flash.get_mla_metadata(lengths, rows, 1)

        def attend(latent: Tensor, rope: Tensor) -> Tensor:
            out, _ = flash.flash_mla_with_kvcache(
                torch.cat([latent, rope], dim=-1),
                *(cache, pages.table, lengths, latent.shape[-1], schedule, splits),
                softmax_scale=scale,
                causal=case.new > 1,
            )
            result: Tensor = out
            return result

        return absorbed(dense, attend)


class FlashInfer(_Package):
    """FlashInfer's paged MLA: https://docs.flashinfer.ai/api/mla.html."""

    name = "FlashInfer"
    groups = frozenset({"decode"})
    module, function = "flashinfer.mla", "BatchMLAPagedAttentionWrapper"

    def prepare(self, problem: Problem) -> Run:
        """Plan the batch."""
        dense = problem_of(problem)
        case, dims, device = dense.case, dense.case.dims, dense.query.device
        pages, lengths = paged(dense, BLOCK_SIZE), dense.lengths()
        batch, blocks = pages.table.shape
        starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
        wrapper = self.imported().BatchMLAPagedAttentionWrapper(
            torch.empty(_WORKSPACE, dtype=torch.int8, device=device)
        )
        wrapper.plan(
            *(starts * case.new, starts * blocks, pages.table.flatten(), lengths),
            *(dims.num_heads, dims.kv_lora_rank, dims.qk_rope_head_dim, BLOCK_SIZE),
            *(case.new > 1, dense.scale, case.dtype, case.dtype),
        )
        kv_c, k_pe = pages.cache.split([dims.kv_lora_rank, dims.qk_rope_head_dim], dim=-1)

        def attend(latent: Tensor, rope: Tensor) -> Tensor:
            out: Tensor = wrapper.run(
                latent.flatten(0, 1), rope.reshape(-1, *rope.shape[2:]), kv_c, k_pe
            )
            return out.view(case.batch, case.new, *out.shape[1:])

        return absorbed(dense, attend)


class VllmTriton(_Package):
    """vLLM's Triton MLA decode."""

    name = "vLLM Triton"
    groups = frozenset({"decode"})
    module, function = "vllm.v1.attention.ops.triton_decode_attention", "decode_attention_fwd"

    def refuses(self, case: Case) -> str | None:
        """Return that there is more than one new token, or what the kernel does not take."""
        if isinstance(case, AttentionCase) and case.new > 1:
            return "takes one new token per request"
        return super().refuses(case)

    def prepare(self, problem: Problem) -> Run:
        """Allocate its partial results."""
        dense = problem_of(problem)
        case, dims, scale = dense.case, dense.case.dims, dense.scale
        pages, lengths = paged(dense, BLOCK_SIZE), dense.lengths()
        cache = pages.cache[:, :, None]
        decode = self.imported().decode_attention_fwd
        shape = (case.batch, dims.num_heads)
        parts = cache.new_empty(*shape, _SPLITS, dims.kv_lora_rank + 1, dtype=torch.float32)
        one = torch.ones((), device=cache.device)
        newer = {"k_scale": one, "v_scale": one, "is_mla": True}
        known = inspect.signature(decode).parameters
        options = {name: value for name, value in newer.items() if name in known}

        def attend(latent: Tensor, rope: Tensor) -> Tensor:
            query = torch.cat([latent, rope], dim=-1).flatten(0, 1)
            out, lse = query.new_zeros(*shape, dims.kv_lora_rank), query.new_zeros(shape)
            decode(
                *(query, cache, cache[..., : dims.kv_lora_rank], out, lse, pages.table, lengths),
                *(parts, _SPLITS, scale, BLOCK_SIZE),
                **options,
            )
            return out[:, None]

        return absorbed(dense, attend)


class FlashAttention(_Package):
    """flash-attn's ragged prefill on keys and values that the call expands."""

    name = "flash-attn"
    groups = frozenset({"prefill"})
    function = "flash_attn_varlen_func"

    def __init__(self, module: str) -> None:
        """Choose the generation.

        Args:
            module: `flash_attn_interface` is the third; `flash_attn` the second, which wants
                values as wide as keys.
        """
        self.module = module

    def backend(self, case: Case) -> str:
        """Return the module and the function."""
        return f"{self.module}.{super().backend(case)}"

    def refuses(self, case: Case) -> str | None:
        """Return which dtype it does not take."""
        if case.dtype not in (torch.bfloat16, torch.float16):
            return f"{case.dtype} is not taken"
        return None

    def memory(self, case: Case) -> int:
        """Return the bytes of keys and values, with what they are made from."""
        return 3 * expanded_bytes(case) if isinstance(case, AttentionCase) else 0

    def prepare(self, problem: Problem) -> Run:
        """Flatten the queries; keys and values are expanded by the call."""
        dense, attend = problem_of(problem), self.imported().flash_attn_varlen_func
        case, dims, scale = dense.case, dense.case.dims, dense.scale
        query = dense.query.transpose(1, 2).flatten(0, 1).contiguous()
        starts = torch.arange(case.batch + 1, dtype=torch.int32, device=query.device)
        lengths = (starts * case.new, starts * case.context, case.new, case.context)
        padding = dims.qk_head_dim - dims.v_head_dim if self.module == "flash_attn" else 0

        def run() -> Tensor:
            key, value = (t.flatten(0, 1) for t in expand(dense))
            if padding:
                value = torch.nn.functional.pad(value, (0, padding))
            out = attend(query, key, value, *lengths, softmax_scale=scale, causal=True)
            values: Tensor = out[0] if isinstance(out, tuple) else out
            values = values[..., : dims.v_head_dim]
            return values.view(case.batch, case.new, dims.num_heads, -1).transpose(1, 2)

        return run
