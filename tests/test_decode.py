"""Decodes that are computed together equal the oracle, each by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import in_a_fresh_process
from native import either_backend

import mla_ops
from mla_ops import MLADims

pytestmark = either_backend

DIMS = MLADims(3, 20, 10, 6, 14)


@pytest.mark.parametrize(("requests", "new"), [(70, 1), (23, 3), (2, 40)])
def test_decodes_that_share_the_up_projections(requests: int, new: int) -> None:
    """More tokens than one turn takes, several tokens each, and a request larger than a turn."""
    d, generator = DIMS, torch.Generator().manual_seed(0)
    lengths = [new + 1 + (5 * i) % 19 for i in range(requests)]
    pages = [-(-length // 4) for length in lengths]
    order = torch.randperm(sum(pages), generator=generator).tolist()
    table = [[order.pop() for _ in range(count)] for count in pages]
    metadata = mla_ops.build_metadata(
        [new] * requests, lengths, table, block_size=4, workspace_tokens=8, decode_threshold=new
    )
    assert metadata.num_decodes == requests
    width = d.kv_lora_rank + d.qk_rope_head_dim
    cache = torch.randn(sum(pages), 4, width, generator=generator)
    query = torch.randn(requests * new, d.num_heads, d.qk_head_dim, generator=generator)
    rows = d.num_heads * (d.qk_nope_head_dim + d.v_head_dim)
    w_kv_b = torch.randn(rows, d.kv_lora_rank, generator=generator) / 4

    def decode() -> mla_ops.MLAOutput:
        return mla_ops.mla_decode(
            query, w_kv_b, cache, metadata.block_table, metadata.seq_lens, softmax_scale=0.37
        )

    ours = decode()
    with mla_ops.use_backend("reference"):
        oracle = decode()
    torch.testing.assert_close(ours.out, oracle.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.lse, oracle.lse, rtol=1e-5, atol=1e-5)


WITHOUT = """
import sys
sys.modules["triton"] = None  # any import of it fails
import torch, mla_ops
tensors = torch.randn(2, 3, 4, 16), torch.randn(2, 9, 20), torch.randn(2, 9, 6), torch.randn(72, 20)
results = []
for name in ("auto", "reference"):
    with mla_ops.use_backend(name):
        results.append(mla_ops.mla_attention(*tensors, softmax_scale=0.3).out)
torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
print("same")
"""


def test_a_machine_without_triton_needs_none(tmp_path: Path) -> None:
    """Case 54."""
    assert in_a_fresh_process(WITHOUT, tmp_path).strip() == "same"
