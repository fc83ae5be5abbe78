"""A transformers config made small, so that a model of its kind is built and run at once.

What decides which code runs is kept: the ratios of the attention's widths, every kind of layer, all
switches. The weights get a scale at which the softmax is far from flat.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["EXPERTS", "VOCABULARY", "shrink"]

VOCABULARY, EXPERTS = 512, 4
_FEWEST_LAYERS, _MOST_LAYERS, _MOST_KINDS = 2, 8, 3

# Field to its divisor, and to what the result is a multiple of unless the field is smaller.
_SIZES = {
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "linear_num_heads"), (8, 1)),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"), (8, 4)),
    **dict.fromkeys(("v_head_dim", "qk_head_dim", "head_dim"), (8, 4)),
    **dict.fromkeys(("index_head_dim", "linear_head_dim"), (8, 8)),
    **dict.fromkeys(("hidden_size", "q_lora_rank", "dim_model_base"), (16, 8)),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), (16, 8)),
    **dict.fromkeys(("ffn_hidden_size", "expert_ffn_hidden_size"), (16, 8)),
    "shared_experts_intermediate_size": (16, 8),
    "first_k_dense_replace": (8, 1),
}
# Every expert gets every token: routing cannot flip on a rounding error, and logits stay a
# continuous function of what attention returns.
_FIXED = {
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token"), EXPERTS),
    **dict.fromkeys(("n_group", "num_expert_group", "topk_group"), 1),
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers"), 0),
    "zero_expert_num": EXPERTS // 2,
    "moe_topk": EXPERTS + EXPERTS // 2,
    "vocab_size": VOCABULARY,
}


def shrink(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a small config of the same kind.

    Args:
        config: a config of a language model, as `PretrainedConfig.to_dict` gives it.

    Example:
        >>> from mla_ops.commands.tiny import shrink
        >>> shrink({"num_attention_heads": 128, "kv_lora_rank": 512, "num_hidden_layers": 61})
        {'num_attention_heads': 16, 'kv_lora_rank': 64, 'num_hidden_layers': 2}
    """
    depth = "num_layers" if "num_layers" in config else "num_hidden_layers"
    layers = config.get(depth) or 0
    kept = _layers_to_keep(config, layers)
    small = {key: _shrunk(key, value) for key, value in config.items()} | {depth: kept}
    for key, value in config.items():
        if isinstance(value, list) and len(value) == layers:
            small[key] = value[:kept]
    if per_layer := small.get("per_layer_config"):
        small["per_layer_config"] = {k: v for k, v in per_layer.items() if int(k) < kept}
    if isinstance(rope := small.get("rope_parameters"), dict):
        small["rope_parameters"] = _fit_rope(rope, config, small)
    if "initializer_range" in small:
        small["initializer_range"] = 2 / small["hidden_size"] ** 0.5
    return small


def _shrunk(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {inner: _shrunk(inner, part) for inner, part in value.items()}
    if str(key).endswith("_token_id"):  # `id2label` has numbers for keys
        ids = value if isinstance(value, list) else [value]
        return value if all(i is None or i < VOCABULARY for i in ids) else 0
    # A family may leave its number of experts per token to the checkpoint.
    if key in _FIXED and (value is not None or key == "num_experts_per_tok"):
        return _FIXED[key]
    if key in _SIZES and value is not None:
        divisor, step = _SIZES[key]
        return max(value // divisor // step * step, min(value, step))
    return value


def _layers_to_keep(config: Mapping[str, Any], layers: int) -> int:
    """Return how many layers from the first one on have every kind of layer among them."""
    kept = _FEWEST_LAYERS
    for value in config.values():
        if isinstance(value, list) and len(value) == layers and len(set(value)) <= _MOST_KINDS:
            kept = max(kept, 1 + max(map(value.index, set(value)), default=0))
    return min(kept, layers, _MOST_LAYERS)


def _fit_rope(
    rope: dict[str, Any], config: Mapping[str, Any], small: Mapping[str, Any]
) -> dict[str, Any]:
    """Cut what holds one number per rotary frequency, and the sections that add up to them all."""
    old, new = (sizes.get("qk_rope_head_dim", 0) // 2 for sizes in (config, small))
    fitted = {
        key: value[:new] if isinstance(value, list) and len(value) == old else value
        for key, value in rope.items()
    }
    if sections := rope.get("mrope_section"):
        fitted["mrope_section"] = _portions(sections, new)
    return fitted


def _portions(parts: list[int], total: int) -> list[int]:
    """Share out `total` in the ratio of `parts`; the first ones get what is left over."""
    shares = [part * total // sum(parts) for part in parts]
    left = total - sum(shares)
    return [share + (i < left) for i, share in enumerate(shares)]
