"""Peers that need torch and transformers only."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from mla_ops.bench.cases import AttentionCase, Case
from mla_ops.bench.peers import DENSE, Peer, expanded_bytes
from mla_ops.bench.problems import AttentionProblem, Problem, problem_of
from mla_ops.bench.timing import Run

__all__ = ["TorchSDPA", "Transformers", "expand"]


def _sdpa_mask(case: AttentionCase, device: torch.device) -> Tensor | None:
    """Return the mask of new tokens behind cached ones; SDPA's own causal rule is top-left."""
    if case.new == 1 or not case.cached:
        return None
    ones = torch.ones(case.new, case.context, dtype=torch.bool, device=device)
    return ones.tril(case.cached)[None, None]


def _sdpa(problem: AttentionProblem, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    causal = problem.case.new > 1 and mask is None
    return torch.nn.functional.scaled_dot_product_attention(
        problem.query, key, value, attn_mask=mask, is_causal=causal, scale=problem.scale
    )


def expand(problem: AttentionProblem) -> tuple[Tensor, Tensor]:
    """Return keys `[B, T, H, P+R]` and values `[B, T, H, V]`, a view, by `kv_b_proj`.

    Args:
        problem: whose latents.
    """
    dims = problem.case.dims
    both = torch.nn.functional.linear(problem.kv_c, problem.w_kv_b)
    both = both.view(*both.shape[:2], dims.num_heads, -1)
    nope, value = both.split([dims.qk_nope_head_dim, dims.v_head_dim], dim=-1)
    rope = problem.k_pe[:, :, None].expand(-1, -1, dims.num_heads, -1)
    return torch.cat([nope, rope], dim=-1), value


class Transformers(Peer):
    """What stock transformers does between its cache and the output projection, with sdpa."""

    name = "transformers"
    groups = frozenset({"decode", "prefill"})
    against = DENSE

    def backend(self, case: Case) -> str:
        """Return the names of both steps."""
        del case
        return "expand_kv + sdpa"

    def available(self) -> str | None:
        """Return that transformers is missing, if it is."""
        if importlib.util.find_spec("transformers") is None:
            return "transformers is not installed"
        return None

    def memory(self, case: Case) -> int:
        """Return the bytes of the projected latents, of keys and values, and of their copies."""
        return 4 * expanded_bytes(case) if isinstance(case, AttentionCase) else 0

    def prepare(self, problem: Problem) -> Run:
        """Build an attention module around the weight."""
        from transformers import DeepseekV3Config
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

        dense = problem_of(problem)
        dims = dense.case.dims
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
        with torch.device("meta"):  # only one of its weights is used, and that is set
            layer = DeepseekV3Attention(config, layer_idx=0)
        layer.kv_b_proj.weight = torch.nn.Parameter(dense.w_kv_b, requires_grad=False)
        kv_c, k_pe = dense.kv_c[:, None], dense.k_pe[:, None]
        mask = _sdpa_mask(dense.case, dense.query.device)

        def run() -> Tensor:
            key, value = layer.expand_kv(kv_c, k_pe)
            return _sdpa(dense, key, value, mask)

        return run


class TorchSDPA(Peer):
    """torch's SDPA on keys and values that are there already: what attention alone costs."""

    name = "torch SDPA"
    groups = frozenset({"decode", "prefill"})
    against = DENSE

    def backend(self, case: Case) -> str:
        """Say what is not measured."""
        del case
        return "expanded cache, no projection"

    def memory(self, case: Case) -> int:
        """Return the bytes of keys and values, and of what they are made from."""
        return 4 * expanded_bytes(case) if isinstance(case, AttentionCase) else 0

    def prepare(self, problem: Problem) -> Run:
        """Expand the latents beforehand."""
        dense = problem_of(problem)
        key, value = (t.transpose(1, 2).contiguous() for t in expand(dense))
        mask = _sdpa_mask(dense.case, dense.query.device)

        def run() -> Tensor:
            return _sdpa(dense, key, value, mask)

        return run
