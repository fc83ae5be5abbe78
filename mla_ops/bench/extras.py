"""Questions besides speed against peers: mixing decodes with prompts, scattered pages, scratch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from mla_ops.attention import mla_attention
from mla_ops.bench.cases import LITE, AttentionCase
from mla_ops.bench.problems import BLOCK_SIZE, draw
from mla_ops.bench.runner import WrongResultError
from mla_ops.bench.timing import Timing, alternate, peak_bytes
from mla_ops.dims import MLADims
from mla_ops.metadata import MLAMetadata, build_metadata
from mla_ops.paged import mla_paged_attention
from mla_ops.reference import MLAOutput

__all__ = [
    "LAYOUTS",
    "MIXED",
    "SCRATCH",
    "PagedCase",
    "PagedResult",
    "measure_layouts",
    "measure_mixed",
    "measure_scratch",
]

_WORKSPACE = 65536


@dataclass(frozen=True)
class PagedCase:
    """A batch over a paged cache of blocks of 64.

    Attributes:
        model: a preset of `MLADims`.
        decodes: requests with one new token.
        decode_context: tokens that each of them has cached.
        prefills: requests with several new tokens.
        new: how many.
        context: tokens that each of those has cached.
        dtype: of all tensors.
    """

    model: str
    decodes: int
    decode_context: int
    prefills: int = 0
    new: int = 0
    context: int = 0
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        """`mixed/model/decodesx1@context+prefillsxnew@context`, or `scattered/model/...`."""
        decodes = f"{self.model}/{self.decodes}x1@{self.decode_context}"
        if not self.prefills:
            return f"scattered/{decodes}"
        return f"mixed/{decodes}+{self.prefills}x{self.new}@{self.context}"


MIXED = PagedCase(LITE, 24, 2048, 2, 512, 4096)
"""The batch whose cost is compared with that of its halves."""

LAYOUTS = (PagedCase(LITE, 8, 2048), PagedCase(LITE, 4, 8192))
"""The decodes that are run over consecutive and over scattered pages."""

SCRATCH = (AttentionCase(LITE, 1, 512, 4096), AttentionCase(LITE, 1, 512, 32768))
"""The calls whose peak memory is measured."""


@dataclass(frozen=True)
class PagedResult:
    """One case, run in two ways.

    Attributes:
        case: name of what was run.
        name: what is compared, `one / other`.
        one: time of the batch as it is.
        other: seconds of the same work done the other way, or in parts that are added up.
    """

    case: str
    name: str
    one: Timing
    other: float

    @property
    def ratio(self) -> float:
        """Median of the first over the second."""
        return self.one.median / self.other

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "ratio": self.ratio}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PagedResult:
        """Return what `as_dict` came from.

        Args:
            values: plain values.
        """
        return cls(values["case"], values["name"], Timing(**values["one"]), values["other"])


@dataclass(frozen=True)
class _Batch:
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    metadata: MLAMetadata
    scale: float

    def run(self) -> MLAOutput:
        return mla_paged_attention(*self.tensors, self.metadata, softmax_scale=self.scale)


def _make(case: PagedCase, *, scattered: bool, part: slice = slice(None)) -> _Batch:
    """Draw a batch, or the requests of a slice of it; the cache holds the same rows either way."""
    dims, generator = MLADims.preset(case.model), torch.Generator().manual_seed(0)
    lens = [1] * case.decodes + [case.new] * case.prefills
    cached = [case.decode_context] * case.decodes + [case.context] * case.prefills
    seqs = [new + old for new, old in zip(lens, cached, strict=True)]
    pages = [-(-seq // BLOCK_SIZE) for seq in seqs]
    order = torch.arange(sum(pages))
    if scattered:
        order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(1))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    rows = draw(sum(pages), BLOCK_SIZE, dims.latent_dim)
    cache = torch.empty_like(rows)
    cache[order] = rows
    tokens = sum(lens)
    query = draw(tokens, dims.num_heads, dims.qk_head_dim)
    w_kv_b = draw(dims.expanded_dim, dims.kv_lora_rank).mul_(dims.kv_lora_rank**-0.5)
    # New tokens as the cache has them: a prefill reads the activations, a decode the cache.
    flat, begin, new_rows, table = rows.view(-1, dims.latent_dim), 0, [], []
    for new, seq, count in zip(lens, seqs, pages, strict=True):
        new_rows.append(flat[begin * BLOCK_SIZE + seq - new : begin * BLOCK_SIZE + seq])
        table.append(order[begin : begin + count].tolist())
        begin += count
    span = slice(sum(lens[: part.start or 0]), sum(lens[: part.stop]))
    fresh = torch.cat(new_rows)[span]
    kv_c, k_pe = fresh.split([dims.kv_lora_rank, dims.qk_rope_head_dim], -1)
    metadata = build_metadata(
        lens[part], seqs[part], table[part], block_size=BLOCK_SIZE, workspace_tokens=_WORKSPACE
    )
    return _Batch((query[span], kv_c, k_pe, w_kv_b, cache), metadata, dims.qk_head_dim**-0.5)


def _gate(case: PagedCase, one: Tensor, other: Tensor) -> None:
    """Two ways to compute the same must agree within a rounding step."""
    error = (one - other).abs().max() / other.abs().max()
    if not error < 2 * torch.finfo(case.dtype).eps:
        raise WrongResultError(f"{case.name}: two ways to run it differ by {error:.1e}")


def measure_mixed(case: PagedCase = MIXED, *, seconds: float = 1.0) -> PagedResult:
    """Time a mixed batch, and its decodes and its prefills each alone.

    Args:
        case: a batch with both.
        seconds: time to spend on each, about.

    Raises:
        WrongResultError: the results of the halves are not those of the whole.
    """
    whole = _make(case, scattered=True)
    cuts = (slice(0, case.decodes), slice(case.decodes, None))
    halves = [_make(case, scattered=True, part=part) for part in cuts]
    with torch.no_grad():
        _gate(case, whole.run().out, torch.cat([half.run().out for half in halves]))
        one, *parts = alternate([whole.run, *(half.run for half in halves)], seconds=seconds)
    return PagedResult(case.name, "mixed / halves", one, sum(part.median for part in parts))


def measure_layouts(case: PagedCase, *, seconds: float = 1.0) -> PagedResult:
    """Time decodes over scattered pages, and over the same rows in consecutive ones.

    Args:
        case: a batch of decodes.
        seconds: time to spend on each, about.

    Raises:
        WrongResultError: the results differ.
    """
    scattered, consecutive = (_make(case, scattered=s) for s in (True, False))
    with torch.no_grad():
        _gate(case, scattered.run().out, consecutive.run().out)
        one, other = alternate([scattered.run, consecutive.run], seconds=seconds)
    return PagedResult(case.name, "scattered / consecutive", one, other.median)


def measure_scratch(case: AttentionCase) -> int:
    """Return the peak bytes that one call of the dense op allocates, results included.

    Args:
        case: what to run, on the CPU.
    """
    problem = draw(case)
    tensors = (problem.query, problem.kv_c, problem.k_pe, problem.w_kv_b)
    with torch.no_grad():
        return peak_bytes(
            lambda: mla_attention(*tensors, softmax_scale=problem.scale, is_causal=case.new > 1)
        )
