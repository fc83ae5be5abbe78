"""All sides that a run may have."""

from __future__ import annotations

from pathlib import Path

from mla_ops.bench.ours import CacheOps, Dense, Paged
from mla_ops.bench.peers import Peer
from mla_ops.bench.peers_cuda import FlashAttention, FlashInfer, FlashMLA, VllmTriton
from mla_ops.bench.peers_torch import TorchSDPA, Transformers
from mla_ops.bench.peers_vllm import (
    VllmDecode,
    VllmDecodeBrgemm,
    VllmExpanded,
    VllmLibrary,
    VllmPrefill,
)

__all__ = ["sides"]


def sides(device: str, *, peers: bool = True, vllm_library: Path | None = None) -> list[Peer]:
    """Return our sides, and those of other people.

    Args:
        device: type of the device.
        peers: whether the others are wanted.
        vllm_library: file of vLLM's CPU ops, None for that of an installed vLLM.
    """
    ours: list[Peer] = [Dense(device), Paged(device), CacheOps(device)]
    if not peers:
        return ours
    library = VllmLibrary(vllm_library)
    return [
        *ours,
        Transformers(),
        TorchSDPA(),
        VllmDecode(library),
        VllmDecodeBrgemm(library),
        VllmPrefill(library),
        VllmExpanded(library),
        FlashMLA(),
        FlashInfer(),
        VllmTriton(),
        FlashAttention("flash_attn_interface"),
        FlashAttention("flash_attn"),
    ]
