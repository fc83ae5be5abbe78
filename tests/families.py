"""Tiny random models of every MLA family in transformers, for tests.

`FAMILIES` maps a name to a `Family`: a builder plus the facts that a test needs in order to
choose its checks. Every model is built from its real class, in float32 on the CPU, in eval mode,
from a fixed seed. The weights are drawn so that

* attention matters: logits change clearly when the attention output is dropped,
* logits are a continuous function of the attention output: each MoE routes every token to every
  expert, and (unless a family says so) `index_topk` is longer than any test sequence.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

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


@dataclass(frozen=True)
class Family:
    """One tiny MLA model and what a test has to know about it.

    Attributes:
        name: key in `FAMILIES`.
        build: returns a fresh model: float32, eval, CPU, the same weights on every call.
        mla_layers: number of MLA attention modules in the model.
        sparse: some layer hands `indices` to a custom attention function, or folds its own
            top-k selection into the mask.
        sinks: attention has learned sink logits (`s_aux`).
        static_ok: stock prefill and decode with a `StaticCache` equal the forward without a cache.
        generate_ok: `model.generate` works for text, with a dynamic cache.
        fullgraph_ok: a forward without a cache compiles with `fullgraph=True`.
        stock_impl: the fastest implementation of the stock model ("sdpa", or "eager" where the
            family has nothing better).
        notes: what is special about the attention of this family.
        model_type: `model_type` of the outer config, for `available_families`.
    """

    name: str
    build: Callable[[], PreTrainedModel]
    mla_layers: int
    sparse: bool
    sinks: bool
    static_ok: bool
    generate_ok: bool
    fullgraph_ok: bool
    stock_impl: str
    notes: str
    model_type: str


# --------------------------------------------------------------------------------------
# Configs
# --------------------------------------------------------------------------------------


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


def _yarn() -> dict[str, Any]:
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


# --------------------------------------------------------------------------------------
# Models
# --------------------------------------------------------------------------------------


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


def _deepseek_v2(**extra: Any) -> PreTrainedModel:
    return _causal_lm(
        "deepseek_v2",
        **_base(q_lora_rank=Q_LORA_RANK) | _moe(first_k_dense_replace=1) | extra,
    )


def _deepseek_v3(**extra: Any) -> PreTrainedModel:
    base = _base(q_lora_rank=Q_LORA_RANK)
    return _causal_lm("deepseek_v3", **base | _moe(first_k_dense_replace=1) | extra)


def _sarvam_mla() -> PreTrainedModel:
    return _causal_lm("sarvam_mla", **_base() | _moe(first_k_dense_replace=1))


def _kimi_k25() -> PreTrainedModel:
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


def _axk1() -> PreTrainedModel:
    base = _base(q_lora_rank=Q_LORA_RANK)
    return _causal_lm("axk1", **base | _moe(mlp_layer_types=["dense", "sparse"]))


def _glm4_moe_lite(**extra: Any) -> PreTrainedModel:
    base = _base(num_heads=NUM_HEADS_ODD, q_lora_rank=Q_LORA_RANK, v_head_dim=NOPE_DIM + ROPE_DIM)
    return _causal_lm("glm4_moe_lite", **base | _moe(mlp_layer_types=["dense", "sparse"]) | extra)


def _minicpm3() -> PreTrainedModel:
    base = _base(q_lora_rank=Q_LORA_RANK)
    return _causal_lm(
        "minicpm3", **base, scale_emb=1.0, scale_depth=1.4, dim_model_base=HIDDEN_SIZE
    )


def _youtu() -> PreTrainedModel:
    base = _base(num_heads=NUM_HEADS_ODD, q_lora_rank=Q_LORA_RANK)
    return _causal_lm("youtu", **base)


def _mistral4() -> PreTrainedModel:
    rope = _yarn() | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 4}
    base = _base(q_lora_rank=Q_LORA_RANK, rope_parameters=rope)
    # The family has no entry in AutoModelForCausalLM: it is the text model of another family.
    from transformers import Mistral4Config, Mistral4ForCausalLM

    config = Mistral4Config(**base | _moe(first_k_dense_replace=1))
    torch.manual_seed(0)
    return _finish(Mistral4ForCausalLM(config))


def _longcat_flash() -> PreTrainedModel:
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


def _deepseek_v32(index_topk: int = INDEX_TOPK) -> PreTrainedModel:
    base = _base(q_lora_rank=Q_LORA_RANK) | _dsa(index_topk)
    return _causal_lm("deepseek_v32", **base | _moe(mlp_layer_types=["dense", "sparse"]))


def _glm_moe_dsa(index_topk: int = INDEX_TOPK) -> PreTrainedModel:
    base = _base(num_layers=3, q_lora_rank=Q_LORA_RANK) | _dsa(index_topk)
    return _causal_lm(
        "glm_moe_dsa",
        **base | _moe(mlp_layer_types=["dense", "sparse", "sparse"]),
        indexer_types=["full", "shared", "full"],
    )


def _axk2() -> PreTrainedModel:
    base = _base(num_heads=NUM_HEADS_ODD, q_lora_rank=Q_LORA_RANK) | _dsa()
    moe = _moe(mlp_layer_types=["dense", "sparse"], n_group=None, topk_group=None)
    return _causal_lm("axk2", **base | moe, gated_norm_rank=4)


def _hy_v4_text(index_topk: int = INDEX_TOPK) -> dict[str, Any]:
    base = _base(num_layers=3, q_lora_rank=Q_LORA_RANK) | _dsa(index_topk)
    moe = _moe(mlp_layer_types=["dense", "sparse", "sparse"])
    return base | moe | {"indexer_types": ["full", "full", "shared"], "hc_mult": 2}


def _hy_v4(index_topk: int = INDEX_TOPK) -> PreTrainedModel:
    return _causal_lm("hy_v4", **_hy_v4_text(index_topk))


def _hy_v4_vl() -> PreTrainedModel:
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
        _hy_v4_text() | {"rope_parameters": rope, "model_type": "hy_v4_vl_text"},
        vision_config=vision,
        image_token_id=120,
        video_token_id=121,
    )


def _kimi_linear() -> PreTrainedModel:
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


def _bailing_hybrid() -> PreTrainedModel:
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


def _glm5_next(index_topk: int = INDEX_TOPK, index_kpool: int = 4) -> PreTrainedModel:
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


def _dots3_note(index_topk: int = INDEX_TOPK) -> PreTrainedModel:
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


def _mistral_large4(kv_source_layers: list[int] | None = None) -> PreTrainedModel:
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


# --------------------------------------------------------------------------------------
# Registry
# --------------------------------------------------------------------------------------


def _family(
    name: str,
    build: Callable[[], PreTrainedModel],
    *,
    mla_layers: int = 2,
    sparse: bool = False,
    sinks: bool = False,
    static_ok: bool = True,
    generate_ok: bool = True,
    fullgraph_ok: bool = True,
    stock_impl: str = "sdpa",
    notes: str = "",
    model_type: str | None = None,
) -> Family:
    """A `Family` with the values that most of them share."""
    return Family(
        name=name,
        build=build,
        mla_layers=mla_layers,
        sparse=sparse,
        sinks=sinks,
        static_ok=static_ok,
        generate_ok=generate_ok,
        fullgraph_ok=fullgraph_ok,
        stock_impl=stock_impl,
        notes=notes,
        model_type=model_type or name,
    )


_ALL = (
    _family("deepseek_v2", _deepseek_v2, notes="complex rope on adjacent pairs"),
    _family(
        "deepseek_v2_lite",
        partial(_deepseek_v2, q_lora_rank=None),
        notes="no query LoRA",
        model_type="deepseek_v2",
    ),
    _family("deepseek_v3", _deepseek_v3, notes="interleaved rope"),
    _family(
        "deepseek_v3_half_rope",
        partial(_deepseek_v3, rope_interleave=False, q_lora_rank=None),
        notes="rotate-half rope, no query LoRA",
        model_type="deepseek_v3",
    ),
    _family(
        "deepseek_v3_yarn",
        partial(_deepseek_v3, rope_parameters=_yarn()),
        notes="yarn: scaling is not qk_head_dim**-0.5",
        model_type="deepseek_v3",
    ),
    _family("sarvam_mla", _sarvam_mla, notes="a config that maps to the deepseek_v3 classes"),
    _family("kimi_k25", _kimi_k25, notes="multimodal; the text model is deepseek_v3"),
    _family("axk1", _axk1),
    _family("glm4_moe_lite", _glm4_moe_lite, notes="3 heads; qk_head_dim == v_head_dim"),
    _family("minicpm3", _minicpm3, notes="rotate-half rope; scales outside attention"),
    _family("youtu", _youtu, notes="3 heads; dense MLP"),
    _family("mistral4", _mistral4, notes="yarn; query times a position-dependent scale"),
    _family(
        "longcat_flash",
        _longcat_flash,
        mla_layers=4,
        fullgraph_ok=False,
        notes="two attentions per layer; the cached latent is already scaled; MoE loop on data",
    ),
    _family("deepseek_v32", _deepseek_v32, sparse=True, notes="DSA"),
    _family(
        "deepseek_v32_small_topk",
        partial(_deepseek_v32, SMALL_INDEX_TOPK),
        sparse=True,
        notes="DSA that leaves keys out: index_topk is below the test lengths",
        model_type="deepseek_v32",
    ),
    _family(
        "glm_moe_dsa",
        _glm_moe_dsa,
        mla_layers=3,
        sparse=True,
        notes="DSA; layer 1 reuses the indices of layer 0",
    ),
    _family("axk2", _axk2, sparse=True, notes="DSA; 3 heads; query and gate from one projection"),
    _family(
        "hy_v4",
        _hy_v4,
        mla_layers=3,
        sparse=True,
        sinks=True,
        stock_impl="eager",
        notes="DSA; sinks; output gate; layer 2 reuses indices",
    ),
    _family(
        "hy_v4_small_topk",
        partial(_hy_v4, SMALL_INDEX_TOPK),
        mla_layers=3,
        sparse=True,
        sinks=True,
        stock_impl="eager",
        notes="as hy_v4, and DSA leaves keys out",
        model_type="hy_v4",
    ),
    _family(
        "hy_v4_vl",
        _hy_v4_vl,
        mla_layers=3,
        sparse=True,
        sinks=True,
        stock_impl="eager",
        notes="multimodal; as hy_v4 with sectioned rope",
    ),
    _family("kimi_linear", _kimi_linear, notes="hybrid with linear layers; no rope applied"),
    _family("bailing_hybrid", _bailing_hybrid, notes="hybrid with linear layers; per-head gate"),
    _family(
        "glm5_next",
        _glm5_next,
        sparse=True,
        notes="multimodal hybrid; rope dim 0; folds its pooled top-k into the mask itself",
    ),
    _family(
        "dots3_note",
        _dots3_note,
        mla_layers=3,
        sparse=True,
        notes="DSA layers and a sliding-window layer with its own dims (3 heads); gate",
        model_type="dots3_note_text",
    ),
    _family(
        "mistral_large4",
        _mistral_large4,
        mla_layers=4,
        sparse=True,
        notes="multimodal; DSA without query LoRA; layers 1 and 3 have no rope (rope dim 0)",
    ),
    _family(
        "mistral_large4_shared_kv",
        partial(_mistral_large4, [0, 1, 0, 1]),
        mla_layers=4,
        sparse=True,
        notes="as mistral_large4; layers 2 and 3 use the latents of layers 0 and 1",
        model_type="mistral_large4",
    ),
)

FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}


def available_families() -> list[str]:
    """The names in `FAMILIES` that the installed transformers knows."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return [name for name, family in FAMILIES.items() if family.model_type in CONFIG_MAPPING_NAMES]


# --------------------------------------------------------------------------------------
# Helpers
# --------------------------------------------------------------------------------------


def attention_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The MLA attention modules of a model, with their names, in order."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if hasattr(module, "kv_b_proj") and hasattr(module, "expand_kv")
    ]


def sample_input_ids(batch: int = 2, length: int = 11, seed: int = 0) -> torch.Tensor:
    """Random token ids `[batch, length]` without any special token of the tiny models."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 120, (batch, length), generator=generator)


@torch.no_grad()
def forward_logits(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    cache: Cache | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Logits `[B, S, vocab]` of one forward, without a cache unless one is given.

    The keyword that takes the cache has two names over the versions of transformers.
    """
    if cache is not None:
        names = inspect.signature(model.forward).parameters
        kwargs["cache" if "cache" in names else "past_key_values"] = cache
    logits: torch.Tensor = model(input_ids=input_ids, use_cache=cache is not None, **kwargs).logits
    return logits
