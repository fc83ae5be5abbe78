"""Tiny random models of every MLA family in transformers, for tests.

`FAMILIES` maps a name to a `Family`: a builder plus the facts that a test needs in order to
choose its checks. Every model is built from its real class, in float32 on the CPU, in eval mode,
from a fixed seed. The weights are drawn so that

* attention matters: logits change clearly when the attention output is dropped,
* logits are a continuous function of the attention output: each MoE routes every token to every
  expert, and (unless a family says so) `index_topk` is longer than any test sequence.
"""

from __future__ import annotations

from families.models import (
    HIDDEN_SIZE,
    INDEX_TOPK,
    KV_LORA_RANK,
    NOPE_DIM,
    NUM_EXPERTS,
    NUM_HEADS,
    NUM_HEADS_ODD,
    Q_LORA_RANK,
    ROPE_DIM,
    SMALL_INDEX_TOPK,
    V_DIM,
    VOCAB_SIZE,
    randomize,
)
from families.registry import FAMILIES, Family, available_families
from families.tools import (
    attention_modules,
    cache_keyword,
    each_family,
    forward,
    forward_logits,
    in_a_fresh_process,
    one_thread,
    op_calls,
    relative_error,
    sample_input_ids,
)

__all__ = [
    "FAMILIES",
    "HIDDEN_SIZE",
    "INDEX_TOPK",
    "KV_LORA_RANK",
    "NOPE_DIM",
    "NUM_EXPERTS",
    "NUM_HEADS",
    "NUM_HEADS_ODD",
    "Q_LORA_RANK",
    "ROPE_DIM",
    "SMALL_INDEX_TOPK",
    "VOCAB_SIZE",
    "V_DIM",
    "Family",
    "attention_modules",
    "available_families",
    "cache_keyword",
    "each_family",
    "forward",
    "forward_logits",
    "in_a_fresh_process",
    "one_thread",
    "op_calls",
    "randomize",
    "relative_error",
    "sample_input_ids",
]
