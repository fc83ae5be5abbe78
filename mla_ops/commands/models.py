"""From what a user names to a model: a folder, a config file, or a kind of model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

import mla_ops.hf
from mla_ops.commands.tiny import shrink
from mla_ops.errors import InvalidInputError

__all__ = ["LoadedModel", "in_dtype", "load_model"]

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True)
class LoadedModel:
    """A model with its stock attention, in eval mode.

    Attributes:
        model: the model.
        tiny: whether it was scaled down and has random weights.
    """

    model: PreTrainedModel
    tiny: bool

    def __str__(self) -> str:
        """Describe it in one line."""
        model = self.model
        millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        kind = "scaled down, random weights" if self.tiny else "its own weights"
        dtype = str(model.dtype).removeprefix("torch.")
        where = f"{dtype} on {model.device}"
        return f"{type(model).__name__}: {kind}, {millions:.1f} M parameters, {where}"

    def prompt(self, length: int, seed: int) -> Tensor:
        """Draw token ids `[1, length]`, none of them 0, where a tiny model has its special tokens.

        Args:
            length: number of tokens.
            seed: of the draw.
        """
        size = self.model.get_input_embeddings().num_embeddings
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(1, size, (1, length), generator=generator).to(self.model.device)


def load_model(
    name: str,
    *,
    real: bool | None = None,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> LoadedModel:
    """Load a model, or build a small one of its kind with random weights.

    Nothing is fetched: a name on the hub works when its files are in the local cache.

    Args:
        name: a folder with `config.json`, a config file, a model type or a class of transformers
            (`deepseek_v3`, `DeepseekV3ForCausalLM`), or a name on the hub.
        real: load the weights (True), build a small model (False), or load them if they are there.
        dtype: of the weights; None means float32 for a small model, what is stored for a real one.
        device: where to put it.
        seed: of the random weights.

    Raises:
        InvalidInputError: there is no such model here, or it has no MLA layer.
    """
    config, folder = _find_config(name)
    has_weights = folder is not None and any(
        True for pattern in _WEIGHTS for _ in folder.glob(pattern)
    )
    if real and not has_weights:
        raise InvalidInputError(
            f"expected weights ({' or '.join(_WEIGHTS)}) beside the config, got {name!r}"
        )
    tiny = folder is None or not has_weights or real is False
    if folder is None or tiny:
        model = _build_small(config, dtype or torch.float32, seed)
    else:
        model = _load(folder, config, dtype)
    if not mla_ops.hf.report(model).layers:
        raise InvalidInputError(
            f"expected a model with multi-head latent attention, got {type(model).__name__}: "
            "none of its layers has kv_b_proj and expand_kv"
        )
    try:
        model = model.to(torch.device(device))
    except (RuntimeError, AssertionError) as error:  # torch without CUDA raises the latter
        raise InvalidInputError(f"the model cannot be moved to {device!r}: {error}") from error
    return LoadedModel(model.eval(), tiny)


def _find_config(name: str) -> tuple[PreTrainedConfig, Path | None]:
    """Return the config that a name stands for, and the folder that may hold weights."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InvalidInputError(f"expected a folder with config.json, got {name!r}")
        return _read_config(path), path
    if path.is_file():
        return _read_config(path), path.parent
    if name in CONFIG_MAPPING_NAMES:
        return AutoConfig.for_model(name), None
    if (model_type := _type_of_class(name)) is not None:
        return AutoConfig.for_model(model_type), None
    if name.endswith(".json") or name.startswith((".", "/", "~")) or os.sep not in name:
        raise InvalidInputError(
            "expected an existing folder or config file, or a model type that transformers "
            f"{transformers.__version__} knows, got {name!r}"
        )
    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        cached = None
    if not isinstance(cached, str):
        raise InvalidInputError(
            f"{name!r} is neither here nor in the cache of huggingface_hub, and nothing is "
            "fetched: give the folder of a download"
        )
    return _read_config(Path(cached)), Path(cached).parent


def _read_config(path: Path) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, TypeError, ValueError, StrictDataclassError) as error:
        first = " ".join(str(error).split("\n\n")[0].split())
        raise InvalidInputError(f"cannot read a config from {path}: {first}") from error


def _type_of_class(name: str) -> str | None:
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return next((model_type for model_type, cls in names.items() if cls == name), None)


def _load(folder: Path, config: PreTrainedConfig, dtype: torch.dtype | None) -> PreTrainedModel:
    named = (getattr(transformers, name, None) for name in config.architectures or ())
    cls = next((cls for cls in named if cls is not None), AutoModelForCausalLM)
    try:
        model = cls.from_pretrained(folder, dtype=dtype or "auto", local_files_only=True)
    except (OSError, RuntimeError, SafetensorError, ValueError) as error:
        raise InvalidInputError(f"cannot load the weights in {folder}: {error}") from error
    return in_dtype(model, model.dtype)


def _build_small(config: PreTrainedConfig, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """Build the language model alone: the vision tower of a composite model is left out."""
    text = config.get_text_config()
    auto = AutoModelForCausalLM if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            small = type(text).from_dict(shrink(text.to_dict()))
            model = auto.from_config(small, dtype=torch.float32)
        except (LookupError, RuntimeError, TypeError, ValueError, StrictDataclassError) as error:
            raise InvalidInputError(
                f"a small {text.model_type} model cannot be built, only a real one: {error}"
            ) from error
    return in_dtype(model, dtype)


def in_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Convert a model in place, so that it runs in that dtype too, and return it.

    Args:
        model: any model of transformers.
        dtype: of all its weights.
    """
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped product has no fp64
    return model.to(dtype)
