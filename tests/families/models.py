"""The tiny models themselves: their dims, configs and weights."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB_SIZE = 128
HIDDEN_SIZE = 64
NUM_HEADS = 4
NUM_HEADS_ODD = 3
KV_LORA_RANK = 32
Q_LORA_RANK = 24
NOPE_DIM = 16
ROPE_DIM = 8
V_DIM = 12
NUM_EXPERTS = 4
INDEX_TOPK = 64
SMALL_INDEX_TOPK = 4


def _base(num_heads: int = NUM_HEADS, num_layers: int = 2, **extra: Any) -> dict[str, Any]:
    """The dims and special tokens that all families share."""
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "kv_lora_rank": KV_LORA_RANK,
        "qk_nope_head_dim": NOPE_DIM,
        "qk_rope_head_dim": ROPE_DIM,
        "v_head_dim": V_DIM,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | extra


def _moe(**extra: Any) -> dict[str, Any]:
    """A small MoE that routes each token to all experts, so that routing cannot flip."""
    return {
        "moe_intermediate_size": 32,
        "n_routed_experts": NUM_EXPERTS,
        "num_experts_per_tok": NUM_EXPERTS,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
    } | extra


def _dsa(index_topk: int = INDEX_TOPK) -> dict[str, Any]:
    """A small sparse-attention indexer.

    A score is a weighted sum of relu(head); with few heads many scores are exactly 0, and which
    of them `topk` takes depends on the length of the cache. With 16 heads there are no ties.
    """
    return {"index_topk": index_topk, "index_head_dim": 16, "index_n_heads": 16}


def yarn() -> dict[str, Any]:
    """A yarn rope whose `mscale_all_dim` changes the softmax scale."""
    return {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.7,
    }


@torch.no_grad()
def randomize(model: nn.Module, seed: int = 0) -> None:
    """Redraw the weights, scaled by fan-in, so that each part of the model matters.

    Recurrence parameters (`A_log`, `dt_bias`), the gains of hyper-connections and biases keep the
    values of the family's own initialisation.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, param in model.named_parameters():
        drawn = _drawn(name, param.shape, generator)
        if drawn is not None:
            param.copy_(drawn)


def _drawn(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor | None:
    """The random value of one parameter; None where it keeps its own."""
    leaf = name.rsplit(".", 1)[-1]
    mean, std = 0.0, 1.0
    if "embed_tokens" in name or leaf == "sinks":
        pass
    elif leaf == "alpha" or name.endswith("softmax_scaling.scale"):  # rope and query scales
        std = 0.1
    elif name.endswith("softmax_scaling.bias") or ("norm" in name and leaf == "weight"):
        mean, std = 1.0, 0.1
    elif len(shape) >= 2 and leaf not in ("A_log", "dt_bias"):
        # Queries are drawn larger, so that the softmax is far from flat.
        query = name.endswith(("q_proj.weight", "q_b_proj.weight", "q_gate_proj.weight"))
        std = (2.0 if query else 1.0) / math.sqrt(shape[-1])
    else:
        return None
    return mean + std * torch.randn(shape, generator=generator)


def _finish(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Random weights, float32, eval."""
    model = model.float()
    randomize(model, seed)
    return model.eval()


def _causal_lm(model_type: str, **config: Any) -> PreTrainedModel:
    """Build the causal language model of a family through the auto classes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return _finish(AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config)))


def _multimodal(model_type: str, text: dict[str, Any], **config: Any) -> PreTrainedModel:
    """Build a multimodal model with a tiny vision tower, for use with text only."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(0)
    outer = AutoConfig.for_model(model_type, text_config=text, **config)
    return _finish(AutoModelForImageTextToText.from_config(outer))


def deepseek_v2(**extra: Any) -> PreTrainedModel:
    return _causal_lm(
        "deepseek_v2",
        **_base(q_lora_rank=Q_LORA_RANK) | _moe(first_k_dense_replace=1) | extra,
    )


def deepseek_v3(**extra: Any) -> PreTrainedModel:
    base = _base(q_lora_rank=Q_LORA_RANK)
    return _causal_lm("deepseek_v3", **base | _moe(first_k_dense_replace=1) | extra)


def sarvam_mla() -> PreTrainedModel:
    return _causal_lm("sarvam_mla", **_base() | _moe(first_k_dense_replace=1))


def kimi_k25() -> PreTrainedModel:
    text = _base(q_lora_rank=Q_LORA_RANK) | _moe(first_k_dense_replace=1)
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "patch_size": 4,
        "pos_emb_height": 8,
        "pos_emb_width": 8,
    }
    return _multimodal(
        "kimi_k25",
        text | {"model_type": "deepseek_v3"},
        vision_config=vision,
        projection_hidden_size=32,
        image_token_id=120,
        video_token_id=121,
        vision_start_token_id=122,
        vision_end_token_id=123,
        tie_word_embeddings=False,
    )


def axk1() -> PreTrainedModel:
    base = _base(q_lora_rank=Q_LORA_RANK)
    return _causal_lm("axk1", **base | _moe(mlp_layer_types=["dense", "sparse"]))


def glm4_moe_lite(**extra: Any) -> PreTrainedModel:
    base = _base(num_heads=NUM_HEADS_ODD, q_lora_rank=Q_LORA_RANK, v_head_dim=NOPE_DIM + ROPE_DIM)
    return _causal_lm("glm4_moe_lite", **base | _moe(mlp_layer_types=["dense", "sparse"]) | extra)


def minicpm3() -> PreTrainedModel:
    base = _base(q_lora_rank=Q_LORA_RANK)
    return _causal_lm(
        "minicpm3", **base, scale_emb=1.0, scale_depth=1.4, dim_model_base=HIDDEN_SIZE
    )


def youtu() -> PreTrainedModel:
    base = _base(num_heads=NUM_HEADS_ODD, q_lora_rank=Q_LORA_RANK)
    return _causal_lm("youtu", **base)


def mistral4() -> PreTrainedModel:
    rope = yarn() | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 4}
    base = _base(q_lora_rank=Q_LORA_RANK, rope_parameters=rope)
    # The family has no entry in AutoModelForCausalLM: it is the text model of another family.
    from transformers import Mistral4Config, Mistral4ForCausalLM

    config = Mistral4Config(**base | _moe(first_k_dense_replace=1))
    torch.manual_seed(0)
    return _finish(Mistral4ForCausalLM(config))


def longcat_flash() -> PreTrainedModel:
    base = _base(q_lora_rank=Q_LORA_RANK)
    del base["num_hidden_layers"], base["intermediate_size"]
    return _causal_lm(
        "longcat_flash",
        **base,
        num_layers=2,
        ffn_hidden_size=96,
        expert_ffn_hidden_size=32,
        n_routed_experts=NUM_EXPERTS,
        zero_expert_num=2,
        moe_topk=NUM_EXPERTS + 2,
        routed_scaling_factor=1.0,
        head_dim=ROPE_DIM,
    )


def deepseek_v32(index_topk: int = INDEX_TOPK) -> PreTrainedModel:
    base = _base(q_lora_rank=Q_LORA_RANK) | _dsa(index_topk)
    return _causal_lm("deepseek_v32", **base | _moe(mlp_layer_types=["dense", "sparse"]))


def glm_moe_dsa(index_topk: int = INDEX_TOPK) -> PreTrainedModel:
    base = _base(num_layers=3, q_lora_rank=Q_LORA_RANK) | _dsa(index_topk)
    return _causal_lm(
        "glm_moe_dsa",
        **base | _moe(mlp_layer_types=["dense", "sparse", "sparse"]),
        indexer_types=["full", "shared", "full"],
    )


def axk2() -> PreTrainedModel:
    base = _base(num_heads=NUM_HEADS_ODD, q_lora_rank=Q_LORA_RANK) | _dsa()
    moe = _moe(mlp_layer_types=["dense", "sparse"], n_group=None, topk_group=None)
    return _causal_lm("axk2", **base | moe, gated_norm_rank=4)


def hy_v4_text(index_topk: int = INDEX_TOPK) -> dict[str, Any]:
    base = _base(num_layers=3, q_lora_rank=Q_LORA_RANK) | _dsa(index_topk)
    moe = _moe(mlp_layer_types=["dense", "sparse", "sparse"])
    return base | moe | {"indexer_types": ["full", "full", "shared"], "hc_mult": 2}


def hy_v4(index_topk: int = INDEX_TOPK) -> PreTrainedModel:
    return _causal_lm("hy_v4", **hy_v4_text(index_topk))


def hy_v4_vl() -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "patch_size": 4,
        "out_hidden_size": HIDDEN_SIZE,
        "max_image_size": 16,
    }
    return _multimodal(
        "hy_v4_vl",
        hy_v4_text() | {"rope_parameters": rope, "model_type": "hy_v4_vl_text"},
        vision_config=vision,
        image_token_id=120,
        video_token_id=121,
    )


def kimi_linear() -> PreTrainedModel:
    base = _base(num_layers=4) | _moe(
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        num_local_experts=NUM_EXPERTS,
    )
    del base["n_routed_experts"]
    return _causal_lm(
        "kimi_linear",
        **base,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
        linear_head_dim=16,
        linear_num_heads=2,
        linear_conv_kernel_dim=4,
    )


def bailing_hybrid() -> PreTrainedModel:
    base = _base(num_layers=4) | _moe(
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        num_local_experts=NUM_EXPERTS,
    )
    del base["n_routed_experts"]
    return _causal_lm(
        "bailing_hybrid",
        **base,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
        head_dim=16,
        num_mtp_layers=0,
    )


def glm5_next(index_topk: int = INDEX_TOPK, index_kpool: int = 4) -> PreTrainedModel:
    text = _base(
        num_layers=4, q_lora_rank=Q_LORA_RANK, qk_rope_head_dim=0, qk_nope_head_dim=NOPE_DIM
    )
    text |= _dsa(index_topk) | _moe(mlp_layer_types=["dense", "sparse", "sparse", "sparse"])
    text |= {
        "index_kpool": index_kpool,
        "linear_head_dim": 16,
        "linear_num_heads": 2,
        "hc_mult": 2,
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "indexer_types": ["full", "full", "full", "full"],
        "model_type": "glm5_next_text",
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "depth": 1,
        "num_heads": 2,
        "image_size": 8,
        "patch_size": 2,
        "out_hidden_size": HIDDEN_SIZE,
        "projection_intermediate_size": 32,
    }
    return _multimodal(
        "glm5_next",
        text,
        vision_config=vision,
        image_token_id=120,
        video_token_id=121,
        image_start_token_id=122,
        image_end_token_id=123,
        video_start_token_id=124,
        video_end_token_id=125,
    )


def dots3_note(index_topk: int = INDEX_TOPK) -> PreTrainedModel:
    base = _base(num_layers=3, q_lora_rank=Q_LORA_RANK, head_dim=NOPE_DIM + ROPE_DIM)
    base |= _dsa(index_topk) | _moe(first_k_dense_replace=1)
    return _causal_lm(
        "dots3_note_text",
        **base,
        layer_types=["indexed_attention", "sliding_attention", "indexed_attention"],
        sliding_window=6,
        shared_experts_intermediate_size=32,
        swa_num_attention_heads=NUM_HEADS_ODD,
        swa_num_key_value_heads=NUM_HEADS_ODD,
        swa_q_lora_rank=Q_LORA_RANK,
        swa_kv_lora_rank=48,
        swa_head_dim=NOPE_DIM + 4 + ROPE_DIM,
        swa_qk_nope_head_dim=NOPE_DIM + 4,
        swa_v_head_dim=V_DIM,
    )


def mistral_large4(kv_source_layers: list[int] | None = None) -> PreTrainedModel:
    text = _base(num_layers=4) | _dsa()
    text |= _moe(first_k_dense_replace=1)
    text |= {
        "no_rope_layers": [1, 0, 1, 0],
        "indexer_types": ["full", "full", "shared", "full"],
        "kv_source_layers": kv_source_layers,
        "model_type": "mistral_large4_text",
    }
    vision = {
        "model_type": "pixtral",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
    }
    return _multimodal(
        "mistral_large4",
        text,
        vision_config=vision,
        image_token_index=120,
        spatial_merge_size=2,
    )
