"""vLLM's CPU kernels, from the op library of an installed vLLM or from a file.

No Python code of vLLM runs: the library registers `torch.ops._C` and its ops are called as vLLM's
own MLA backends call them: queries projected into the latent space, attention, projection back.
Weights are packed and block tables expanded beforehand, as an engine does once.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mla_ops.bench.cases import AttentionCase, Case
from mla_ops.bench.peers import PAGED, Peer, absorbed, expanded_bytes, widths
from mla_ops.bench.peers_torch import expand
from mla_ops.bench.problems import AttentionProblem, Problem, paged, problem_of
from mla_ops.bench.timing import Run
from mla_ops.dims import split_kv_b

__all__ = ["VllmDecode", "VllmDecodeBrgemm", "VllmExpanded", "VllmLibrary", "VllmPrefill"]

_BLOCK = 16  # the only block size of mla_decode_kvcache


class VllmLibrary:
    """The op library, loaded when it is first asked for."""

    def __init__(self, path: Path | None = None) -> None:
        """Name the library.

        Args:
            path: of the file; None: that of the installed package which fits this processor.
        """
        self._path = path
        self._tried = False
        self._missing: str | None = None

    def reason(self, op: str) -> str | None:
        """Return why an op cannot be called, None if it can.

        Args:
            op: its name in `torch.ops._C`.
        """
        if not self._tried:
            self._missing, self._tried = self._load(), True
        if self._missing is not None:
            return self._missing
        return None if hasattr(torch.ops._C, op) else f"the library has no {op}"

    def _load(self) -> str | None:
        path = self._path or _installed()
        if path is None:
            return "vllm is not installed, and no --vllm-library is given"
        try:
            torch.ops.load_library(str(path))
        except OSError as error:
            return f"{path.name}: {error}"
        return None


def _installed() -> Path | None:
    spec = importlib.util.find_spec("vllm")
    places = spec.submodule_search_locations if spec is not None else None
    capability = torch.backends.cpu.get_cpu_capability()
    names = ["_C_AVX2.abi3.so"]
    if capability.startswith("AVX512"):
        names.insert(0, "_C_AVX512.abi3.so")
        if torch.cpu._is_avx512_bf16_supported():
            names.insert(0, "_C.abi3.so")
    found = [Path(place) / name for name in names for place in places or ()]
    return next((path for path in found if path.exists()), None)


class _Vllm(Peer):
    name = "vLLM"
    devices = frozenset({"cpu"})
    against = PAGED
    op: str

    def __init__(self, library: VllmLibrary) -> None:
        """Call the ops of a library.

        Args:
            library: shared by all variants.
        """
        self._library = library

    def backend(self, case: Case) -> str:
        """Return the name of the op."""
        del case
        return self.op

    def available(self) -> str | None:
        """Return why the op cannot be called, None if it can."""
        return self._library.reason(self.op)

    def refuses(self, case: Case) -> str | None:
        """Return which width, dtype or number of new tokens the op does not take."""
        if case.dtype not in (torch.bfloat16, torch.float16):
            return f"{case.dtype} is not taken"
        return widths(case, kv_lora_rank=512, qk_rope_head_dim=64)

    def memory(self, case: Case) -> int:
        """Return the bytes of the paged rows, of packed weights and of latent queries."""
        if not isinstance(case, AttentionCase):
            return 0
        rows = case.batch * case.new * case.dims.num_heads * 2 * case.dims.latent_dim
        return 3 * case.bytes + 2 * rows * case.dtype.itemsize


class VllmDecode(_Vllm):
    """The kernel that vLLM takes without AMX."""

    groups = frozenset({"decode"})
    op = "mla_decode_kvcache"

    def refuses(self, case: Case) -> str | None:
        """Return which width or number of new tokens the op does not take."""
        return _one_token(case) or widths(case, kv_lora_rank=512, qk_rope_head_dim=64)

    def prepare(self, problem: Problem) -> Run:
        """Lay the rows out in blocks of 16."""
        dense = problem_of(problem)
        pages, lengths = paged(dense, _BLOCK), dense.lengths()
        decode, scale = torch.ops._C.mla_decode_kvcache, dense.scale

        def attend(latent: Tensor, rope: Tensor) -> Tensor:
            query = torch.cat([latent, rope], dim=-1).flatten(0, 1)
            out = torch.zeros_like(query[..., : latent.shape[-1]])
            decode(out, query, pages.cache, scale, pages.table, lengths)
            return out[:, None]

        return absorbed(dense, attend)


class VllmDecodeBrgemm(_Vllm):
    """The kernel that vLLM takes with AMX; it runs, on other matrix code, without."""

    groups = frozenset({"decode"})
    op = "decode_attention_cpu"

    def refuses(self, case: Case) -> str | None:
        """Return which width, dtype or number of new tokens the op does not take."""
        return _one_token(case) or super().refuses(case)

    def prepare(self, problem: Problem) -> Run:
        """Pack the weights and list the row of every token."""
        dense = problem_of(problem)
        case, scale = dense.case, dense.scale
        project, project_back = _packed(dense)
        rows, places = _flat(dense)
        values = rows[..., : case.dims.kv_lora_rank]
        requests, lengths = torch.arange(case.batch), dense.lengths(torch.int64)
        decode, splits = torch.ops._C.decode_attention_cpu, _splits(case.context)

        def run() -> Tensor:
            query = project()
            shape = (case.batch, case.dims.num_heads)
            out = query.new_zeros(*shape, values.shape[-1])
            scratch = torch.zeros(*shape, splits, values.shape[-1] + 1)
            decode(
                *(query, rows, values, out, None, None, None, scratch, places, requests, lengths),
                *(scale, 0.0, False, 0, None, None),
            )
            return project_back(out)

        return run


class VllmPrefill(_Vllm):
    """New tokens on a context, absorbed: how vLLM with AMX runs every prompt."""

    groups = frozenset({"prefill"})
    op = "extend_attention_cpu"

    def prepare(self, problem: Problem) -> Run:
        """Pack the weights and list the row of every token."""
        dense = problem_of(problem)
        case = dense.case
        project, project_back = _packed(dense)
        rows, places = _flat(dense)
        fresh = torch.cat([dense.kv_c, dense.k_pe], dim=-1)[:, case.cached :].flatten(0, 1)
        new_rows, rank = fresh[:, None].contiguous(), case.dims.kv_lora_rank
        extend = _extend(dense, places.long())

        def run() -> Tensor:
            query = project()
            out = torch.empty_like(query[..., :rank])
            extend(query, new_rows, new_rows[..., :rank], out, rows, rows[..., :rank])
            return project_back(out)

        return run


class VllmExpanded(_Vllm):
    """The same kernel on expanded keys and values: faster for a prompt without context."""

    groups = frozenset({"prefill"})
    op = "extend_attention_cpu"

    def backend(self, case: Case) -> str:
        """Return the name of the op, and that keys are expanded."""
        return f"{super().backend(case)}, expanded"

    def refuses(self, case: Case) -> str | None:
        """Return that there is a context, or what the op does not take."""
        if isinstance(case, AttentionCase) and case.cached:
            return "takes no context"
        return super().refuses(case)

    def memory(self, case: Case) -> int:
        """Return the bytes of keys and values, with what they are made from."""
        return 3 * expanded_bytes(case) if isinstance(case, AttentionCase) else 0

    def prepare(self, problem: Problem) -> Run:
        """Flatten the queries; keys are expanded by the call."""
        dense = problem_of(problem)
        case = dense.case
        query = dense.query.transpose(1, 2).flatten(0, 1).contiguous()
        places = torch.arange(case.batch * case.new).view(case.batch, case.new)
        # Without a context no row of the cache is read; its one head says how to group queries.
        buffer = query.new_zeros(1, 1, case.dims.qk_head_dim)
        extend = _extend(dense, places)

        def run() -> Tensor:
            key, value = (t.flatten(0, 1) for t in expand(dense))
            out = query.new_empty(value.shape)
            extend(query, key, value, out, buffer, buffer[..., : value.shape[-1]])
            return out.view(case.batch, case.new, *out.shape[1:]).transpose(1, 2)

        return run


def _one_token(case: Case) -> str | None:
    several = isinstance(case, AttentionCase) and case.new > 1
    return "takes one new token per request" if several else None


def _splits(context: int) -> int:
    """Return into how many parts vLLM cuts a context: powers of two, at least 512 tokens each."""
    parts = max(1, -(-context // 512))
    return min(1 << (parts - 1).bit_length(), 2 * torch.get_num_threads())


def _flat(problem: AttentionProblem) -> tuple[Tensor, Tensor]:
    """Return the cache as rows `[N, 1, L+R]`, and the row of every token `[B, T]` int32."""
    pages = paged(problem, _BLOCK)
    places = pages.table[..., None] * _BLOCK + torch.arange(_BLOCK, dtype=torch.int32)
    flat = places.flatten(1)[:, : problem.case.context].contiguous()
    return pages.cache.flatten(0, 1)[:, None], flat


def _packed(
    problem: AttentionProblem,
) -> tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]:
    """Return the projections into and out of the latent space, on packed weights."""
    case, dims, ops = problem.case, problem.case.dims, torch.ops._C
    w_uk, w_uv = split_kv_b(problem.w_kv_b, dims.num_heads, dims.qk_nope_head_dim)
    packed_uk = ops.convert_weight_packed(w_uk.transpose(1, 2).contiguous())
    packed_uv = ops.convert_weight_packed(w_uv.contiguous())
    query = problem.query.transpose(1, 2).flatten(0, 1).contiguous()
    nope, rope = query.split([dims.qk_nope_head_dim, dims.qk_rope_head_dim], dim=-1)

    def project() -> Tensor:
        latent = query.new_empty(*query.shape[:2], dims.kv_lora_rank)
        ops.bmm_cpu(latent.transpose(0, 1), nope.transpose(0, 1), packed_uk, True, None)
        return torch.cat([latent, rope], dim=-1)

    def project_back(out: Tensor) -> Tensor:
        values = out.new_empty(*out.shape[:2], dims.v_head_dim)
        ops.bmm_cpu(values.transpose(0, 1), out.transpose(0, 1), packed_uv, True, None)
        return values.view(case.batch, case.new, *values.shape[1:]).transpose(1, 2)

    return project, project_back


def _extend(problem: AttentionProblem, places: Tensor) -> Any:
    """Return the prefill op with everything but its tensors filled in."""
    case, scale = problem.case, problem.scale
    requests, lengths = torch.arange(case.batch), problem.lengths(torch.int64)
    new = torch.full((case.batch,), case.new)
    starts = torch.arange(case.batch) * case.new
    extend = torch.ops._C.extend_attention_cpu

    def call(*tensors: Tensor) -> None:
        extend(
            *(*tensors, places, requests, lengths, new, starts, case.new),
            *(scale, 0.0, False, 0, None, None, None),
        )

    return call
