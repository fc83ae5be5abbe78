"""What a test has to know about each family, and which of them are installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from packaging.version import Version

from families import models
from families.models import SMALL_INDEX_TOPK

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
    _family("deepseek_v2", models.deepseek_v2, notes="complex rope on adjacent pairs"),
    _family(
        "deepseek_v2_lite",
        partial(models.deepseek_v2, q_lora_rank=None),
        notes="no query LoRA",
        model_type="deepseek_v2",
    ),
    _family("deepseek_v3", models.deepseek_v3, notes="interleaved rope"),
    _family(
        "deepseek_v3_half_rope",
        partial(models.deepseek_v3, rope_interleave=False, q_lora_rank=None),
        notes="rotate-half rope, no query LoRA",
        model_type="deepseek_v3",
    ),
    _family(
        "deepseek_v3_yarn",
        partial(models.deepseek_v3, rope_parameters=models.yarn()),
        notes="yarn: scaling is not qk_head_dim**-0.5",
        model_type="deepseek_v3",
    ),
    _family("sarvam_mla", models.sarvam_mla, notes="a config that maps to the deepseek_v3 classes"),
    _family("kimi_k25", models.kimi_k25, notes="multimodal; the text model is deepseek_v3"),
    _family("axk1", models.axk1),
    _family("glm4_moe_lite", models.glm4_moe_lite, notes="3 heads; qk_head_dim == v_head_dim"),
    _family("minicpm3", models.minicpm3, notes="rotate-half rope; scales outside attention"),
    _family("youtu", models.youtu, notes="3 heads; dense MLP"),
    _family("mistral4", models.mistral4, notes="yarn; query times a position-dependent scale"),
    _family(
        "longcat_flash",
        models.longcat_flash,
        mla_layers=4,
        fullgraph_ok=False,
        notes="two attentions per layer; the cached latent is already scaled; MoE loop on data",
    ),
    _family("deepseek_v32", models.deepseek_v32, sparse=True, notes="DSA"),
    _family(
        "deepseek_v32_small_topk",
        partial(models.deepseek_v32, SMALL_INDEX_TOPK),
        sparse=True,
        notes="DSA that leaves keys out: index_topk is below the test lengths",
        model_type="deepseek_v32",
    ),
    _family(
        "glm_moe_dsa",
        models.glm_moe_dsa,
        mla_layers=3,
        sparse=True,
        notes="DSA; layer 1 reuses the indices of layer 0",
    ),
    _family(
        "glm_moe_dsa_small_topk",
        partial(models.glm_moe_dsa, SMALL_INDEX_TOPK),
        mla_layers=3,
        sparse=True,
        notes="as glm_moe_dsa, and DSA leaves keys out, in layer 1 by the indices of layer 0",
        model_type="glm_moe_dsa",
    ),
    _family(
        "axk2", models.axk2, sparse=True, notes="DSA; 3 heads; query and gate from one projection"
    ),
    _family(
        "hy_v4",
        models.hy_v4,
        mla_layers=3,
        sparse=True,
        sinks=True,
        stock_impl="eager",
        notes="DSA; sinks; output gate; layer 2 reuses indices",
    ),
    _family(
        "hy_v4_small_topk",
        partial(models.hy_v4, SMALL_INDEX_TOPK),
        mla_layers=3,
        sparse=True,
        sinks=True,
        stock_impl="eager",
        notes="as hy_v4, and DSA leaves keys out",
        model_type="hy_v4",
    ),
    _family(
        "hy_v4_vl",
        models.hy_v4_vl,
        mla_layers=3,
        sparse=True,
        sinks=True,
        stock_impl="eager",
        notes="multimodal; as hy_v4 with sectioned rope",
    ),
    _family("kimi_linear", models.kimi_linear, notes="hybrid with linear layers; no rope applied"),
    _family(
        "bailing_hybrid", models.bailing_hybrid, notes="hybrid with linear layers; per-head gate"
    ),
    _family(
        "glm5_next",
        models.glm5_next,
        sparse=True,
        notes="multimodal hybrid; rope dim 0; folds its pooled top-k into the mask itself",
    ),
    _family(
        "glm5_next_small_topk",
        partial(models.glm5_next, SMALL_INDEX_TOPK, 2),
        sparse=True,
        notes="as glm5_next, and its mask leaves keys out",
        model_type="glm5_next",
    ),
    _family(
        "dots3_note",
        models.dots3_note,
        mla_layers=3,
        sparse=True,
        notes="DSA layers and a sliding-window layer with its own dims (3 heads); gate",
        model_type="dots3_note_text",
    ),
    _family(
        "dots3_note_small_topk",
        partial(models.dots3_note, SMALL_INDEX_TOPK),
        mla_layers=3,
        sparse=True,
        notes="as dots3_note, and DSA leaves keys out",
        model_type="dots3_note_text",
    ),
    _family(
        "mistral_large4",
        models.mistral_large4,
        mla_layers=4,
        sparse=True,
        notes="multimodal; DSA without query LoRA; layers 1 and 3 have no rope (rope dim 0)",
    ),
    _family(
        "mistral_large4_shared_kv",
        partial(models.mistral_large4, [0, 1, 0, 1]),
        mla_layers=4,
        sparse=True,
        notes="as mistral_large4; layers 2 and 3 use the latents of layers 0 and 1",
        model_type="mistral_large4",
    ),
)

FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}


def available_families() -> list[str]:
    """The names in `FAMILIES` that the installed transformers knows and that cache latents there.

    Sparse families cache expanded keys before 5.18, and before 5.17 their indexer misreads the
    masks of every implementation but eager.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    sparse_too = Version(transformers.__version__) >= Version("5.18")
    return [
        name
        for name, family in FAMILIES.items()
        if family.model_type in CONFIG_MAPPING_NAMES and (sparse_too or not family.sparse)
    ]
