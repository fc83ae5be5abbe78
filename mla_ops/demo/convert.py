"""Write a grouped-query (GQA) Llama model exactly as an MLA model.

With G kv heads of width D, one MLA layer can hold what the G heads hold:

- The latent carries the G * D value channels and one constant channel. `kv_a_layernorm` would scale
  the values by their own norm; the constant (a bias far larger than any value) decides that norm,
  so that the layer divides by a constant, which its weight multiplies back. `kv_b_proj` then picks
  for each query head the channels of its group.
- The shared rotary key carries the G keys side by side. Rotary pairs are (i, i + G * D / 2); pair
  i belongs to group i // (D / 2) and turns with the frequency i mod (D / 2) of the source model,
  which `longrope` factors express. A query head is zero outside the slots of its group.
- The nope part is zero: a GQA model has no part of the key without a rotary position.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from mla_ops.errors import InvalidInputError

if TYPE_CHECKING:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

__all__ = ["LogitCheck", "compare_logits", "convert", "convert_config"]

NOPE_HEAD_DIM = 32
NORM_WEIGHT = 2.0**11
"""`kv_a_layernorm.weight` on the value channels, a power of two: it rounds nothing in any dtype."""


class LogitCheck(NamedTuple):
    """How far two models' logits are apart.

    Attributes:
        max_difference: largest absolute difference.
        scale: largest absolute logit of the first model.
    """

    max_difference: float
    scale: float


def convert(source: LlamaForCausalLM) -> DeepseekV3ForCausalLM:
    """Return a DeepSeek-V3 model that computes what a Llama model computes.

    Weights that both architectures share are not copied: the models hold the same tensors.

    Args:
        source: a Llama model with plain rotary positions and no biases.

    Raises:
        InvalidInputError: the source has a feature that the recipe does not cover.
    """
    from transformers import DeepseekV3ForCausalLM

    converted = DeepseekV3ForCausalLM(convert_config(source.config)).to(dtype=source.dtype)
    state = _convert_state(source.state_dict(), source.config, converted.config)
    converted.load_state_dict(state, strict=True, assign=True)
    converted.tie_weights()
    converted.generation_config = source.generation_config
    return converted.eval()


def convert_config(source: LlamaConfig) -> DeepseekV3Config:
    """Return the DeepSeek-V3 config that `convert` fills.

    Args:
        source: config of the Llama model.

    Raises:
        InvalidInputError: the source has a feature that the recipe does not cover.
    """
    from transformers import DeepseekV3Config

    _refuse_uncovered(source)
    groups, head_dim = source.num_key_value_heads, source.head_dim
    return DeepseekV3Config(
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size,
        num_hidden_layers=source.num_hidden_layers,
        num_attention_heads=source.num_attention_heads,
        num_key_value_heads=source.num_attention_heads,
        hidden_act=source.hidden_act,
        max_position_embeddings=source.max_position_embeddings,
        rms_norm_eps=source.rms_norm_eps,
        tie_word_embeddings=source.tie_word_embeddings,
        bos_token_id=source.bos_token_id,
        eos_token_id=source.eos_token_id,
        pad_token_id=source.pad_token_id,
        q_lora_rank=None,
        kv_lora_rank=_latent_rank(groups * head_dim),
        qk_nope_head_dim=NOPE_HEAD_DIM,
        qk_rope_head_dim=groups * head_dim,
        v_head_dim=head_dim,
        attention_bias=True,
        rope_interleave=False,
        rope_parameters=_rope_parameters(source),
        first_k_dense_replace=source.num_hidden_layers,
        num_mtp_layers=0,
    )


@torch.inference_mode()
def compare_logits(
    source: torch.nn.Module, converted: torch.nn.Module, input_ids: torch.Tensor
) -> LogitCheck:
    """Run both models on the same tokens and compare their logits.

    Args:
        source: the model to compare with.
        converted: the model to check.
        input_ids: token ids, `[B, S]`.

    Returns:
        The largest difference, and the scale to judge it by.
    """
    expected, got = (model(input_ids=input_ids).logits.float() for model in (source, converted))
    return LogitCheck((expected - got).abs().max().item(), expected.abs().max().item())


def _refuse_uncovered(source: LlamaConfig) -> None:
    rope_type = source.rope_parameters.get("rope_type", "default")
    has_biases = source.attention_bias or getattr(source, "mlp_bias", False)
    reasons = [
        reason
        for wrong, reason in (
            (source.model_type != "llama", f"model_type is {source.model_type!r}, not 'llama'"),
            (has_biases, "it has biases"),
            (rope_type != "default", f"rope_type is {rope_type!r}"),
        )
        if wrong
    ]
    if reasons:
        raise InvalidInputError(
            f"expected a Llama model with plain rotary positions and no biases; "
            f"this one cannot be written as an MLA model: {'; '.join(reasons)}"
        )


def _latent_rank(value_channels: int) -> int:
    """Smallest power of four that holds the values and the constant: its root is exact."""
    rank = 4
    while rank < value_channels + 1:
        rank *= 4
    return rank


def _rope_parameters(source: LlamaConfig) -> dict[str, object]:
    """Frequencies of the source model, once per group, as factors of the plain ones."""
    theta, head_dim = source.rope_parameters["rope_theta"], source.head_dim
    rope_dim = source.num_key_value_heads * head_dim
    half = head_dim // 2
    factors = [
        theta ** (2 * (pair % half) / head_dim - 2 * pair / rope_dim)
        for pair in range(rope_dim // 2)
    ]
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "factor": 1.0,
        "attention_factor": 1.0,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": source.max_position_embeddings,
    }


def _convert_state(
    state: dict[str, torch.Tensor], source: LlamaConfig, config: DeepseekV3Config
) -> dict[str, torch.Tensor]:
    converted: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        prefix, is_attention, projection = name.partition("self_attn.")
        if not is_attention:
            converted[name] = tensor
        elif projection == "q_proj.weight":
            converted[name] = _spread_queries(tensor, source, config)
        elif projection == "v_proj.weight":
            key = state[f"{prefix}self_attn.k_proj.weight"]
            attention = _latent_weights(key, tensor, source, config)
            converted |= {f"{prefix}self_attn.{part}": w for part, w in attention.items()}
        elif projection == "o_proj.weight":
            converted[name] = tensor
            converted[name.replace("weight", "bias")] = tensor.new_zeros(tensor.shape[0])
    return converted


def _head_counts(source: LlamaConfig) -> tuple[int, int, int]:
    return source.num_attention_heads, source.num_key_value_heads, source.head_dim


def _rope_slots(groups: int, head_dim: int) -> torch.Tensor:
    """Slots `[G, D]` of the shared rotary key that hold each group's key."""
    half = head_dim // 2
    first = torch.arange(groups * half).view(groups, half)
    return torch.cat((first, first + groups * half), dim=-1)


def _spread_queries(
    query: torch.Tensor, source: LlamaConfig, config: DeepseekV3Config
) -> torch.Tensor:
    """Move each head's rows to the slots of its group, scaled for the wider softmax scale."""
    heads, groups, head_dim = _head_counts(source)
    rescale = math.sqrt((config.qk_nope_head_dim + config.qk_rope_head_dim) / head_dim)
    slots = config.qk_nope_head_dim + _rope_slots(groups, head_dim)
    slots = slots.repeat_interleave(heads // groups, dim=0)  # [H, D]
    spread = query.new_zeros(heads, config.qk_head_dim, query.shape[1])
    spread[torch.arange(heads)[:, None], slots] = query.view(heads, head_dim, -1) * rescale
    return spread.flatten(0, 1)


def _latent_weights(
    key: torch.Tensor, value: torch.Tensor, source: LlamaConfig, config: DeepseekV3Config
) -> dict[str, torch.Tensor]:
    """Everything between the hidden state and the expanded values of one layer."""
    heads, groups, head_dim = _head_counts(source)
    rank, channels, nope = config.kv_lora_rank, value.shape[0], config.qk_nope_head_dim

    down = value.new_zeros(rank + channels, value.shape[1])
    down[:channels] = value
    down[rank + _rope_slots(groups, head_dim).flatten()] = key
    bias = value.new_zeros(rank + channels)
    bias[channels] = NORM_WEIGHT * math.sqrt(rank)  # the constant channel

    norm = value.new_zeros(rank)
    norm[:channels] = NORM_WEIGHT

    up = value.new_zeros(heads, nope + head_dim, rank)
    group = torch.arange(heads) // (heads // groups)
    lanes = torch.arange(head_dim)
    up[torch.arange(heads)[:, None], nope + lanes, group[:, None] * head_dim + lanes] = 1.0
    return {
        "kv_a_proj_with_mqa.weight": down,
        "kv_a_proj_with_mqa.bias": bias,
        "kv_a_layernorm.weight": norm,
        "kv_b_proj.weight": up.flatten(0, 1),
    }
