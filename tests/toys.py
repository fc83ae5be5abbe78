"""A latent attention small enough to vary in one place, and what the passes make of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from mla_ops.passes import RewriteReport, make_backend
from mla_ops.passes.fuse_attention import ATTENTION
from mla_ops.passes.nodes import kind

B, H, S, T, P, R, V, L = 2, 3, 4, 6, 5, 4, 7, 8
SCALE = 0.37


def inputs(s: int = S, t: int = T, r: int = R, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Query `[B, H, s, P+r]`, latent `[B, 1, t, L]`, rotary key `[B, 1, t, r]`."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, H, s, P + r), (B, 1, t, L), (B, 1, t, r))
    query, latent, k_pe = (torch.randn(shape, generator=generator) for shape in shapes)
    return query, latent, k_pe


class Toy(nn.Module):
    """Stock latent attention, as transformers writes it; subclasses change one step."""

    dropout = 0.0

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.kv_b_proj = nn.Linear(L, H * (P + V), bias=bias)

    def forward(
        self, query: Tensor, latent: Tensor, k_pe: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        key, value = self.expand_kv(latent, k_pe)
        return self.attend(query, key, value, mask)

    def expand_kv(self, latent: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
        batch, _, length, _ = latent.shape
        kv = self.project(latent).view(batch, length, -1, P + V).transpose(1, 2)
        k_nope, value = torch.split(kv, [P, V], dim=-1)
        k_pe = k_pe.expand(-1, k_nope.shape[1], -1, -1)
        return self.join(kv, k_nope, k_pe), value

    def project(self, latent: Tensor) -> Tensor:
        return self.kv_b_proj(latent)

    def join(self, kv: Tensor, k_nope: Tensor, k_pe: Tensor) -> Tensor:
        key = kv.new_empty(*kv.shape[:-1], P + k_pe.shape[-1])
        key[..., :P].copy_(k_nope)
        key[..., P:].copy_(k_pe)
        return key

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=self.dropout, scale=SCALE
        )


class Eager(Toy):
    """The product, softmax, product form."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        scores = torch.matmul(query, key.transpose(2, 3)) * SCALE
        if mask is not None:
            scores = scores + mask
        probs = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        probs = F.dropout(probs, p=self.dropout, training=self.training)
        return torch.matmul(probs, value)


class Cat(Toy):
    def join(self, kv: Tensor, k_nope: Tensor, k_pe: Tensor) -> Tensor:
        return torch.cat((k_nope, k_pe), dim=-1)


class Sinks(Eager):
    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(H))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        scores = torch.matmul(query, key.transpose(2, 3)) * SCALE
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[-2], -1)
        joined = torch.cat([scores, sinks], dim=-1)
        joined = joined - joined.max(dim=-1, keepdim=True).values
        probs = F.softmax(joined, dim=-1, dtype=joined.dtype)
        return torch.matmul(probs[..., :-1], value)


class Prefix(Toy):
    """A static cache's buffer, cut to what is filled, as sdpa does it at prefill."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        length = query.shape[2]
        key, value = key[:, :, :length], value[:, :, :length, :]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=SCALE)


def with_bias() -> Toy:
    return Toy(bias=True)


def compiled(
    module: Callable[..., Any], *args: Any, dynamic: bool | None = None, **options: Any
) -> tuple[Any, RewriteReport, GraphModule]:
    """Output of a module behind the passes, their report, and the rewritten graph."""
    reports: list[RewriteReport] = []
    graphs: list[GraphModule] = []

    def keep(gm: GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    backend = make_backend(keep, on_report=reports.append, **options)
    out = torch.compile(module, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    (report,), (gm,) = reports, graphs
    return out, report, gm


def check(module: nn.Module, *args: Any, **options: Any) -> tuple[RewriteReport, GraphModule]:
    """One attention, rewritten, with the same result and no expansion left."""
    expected = module(*args)
    out, report, gm = compiled(module, *args, **options)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    assert (len(report.matched), report.missed) == (1, [])
    assert [n.target for n in gm.graph.nodes].count(ATTENTION) == 1
    assert not {"linear", "copy_", "softmax", "sdpa"} & set(map(kind, gm.graph.nodes))
    return report, gm


class Outer(nn.Module):
    """A model around an attention: the graph knows the modules inside a model only."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, *args: Tensor) -> Any:
        return self.attention(*args)
