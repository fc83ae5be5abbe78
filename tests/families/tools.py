"""What tests do with the tiny models."""

from __future__ import annotations

import inspect
import math
import os
import subprocess
import sys
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from families.registry import FAMILIES, available_families

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache


def each_family(
    *names: str, without: Iterable[str] = (), fast: Container[str] | None = None
) -> pytest.MarkDecorator:
    """Parametrize a test over families that are installed, as `family`.

    Args:
        names: which; all of them when none is named.
        without: which not.
        fast: those that a default run takes; the others are marked slow.
    """
    return pytest.mark.parametrize(
        "family",
        [
            pytest.param(
                FAMILIES[name],
                id=name,
                marks=() if fast is None or name in fast else pytest.mark.slow,
            )
            for name in available_families()
            if (not names or name in names) and name not in without
        ],
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """The models are so small that a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def attention_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The MLA attention modules of a model, with their names, in order."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if hasattr(module, "kv_b_proj") and hasattr(module, "expand_kv")
    ]


def sample_input_ids(batch: int = 2, length: int = 11, seed: int = 0) -> Tensor:
    """Random token ids `[batch, length]` without any special token of the tiny models."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 120, (batch, length), generator=generator)


@torch.no_grad()
def forward(
    model: PreTrainedModel, input_ids: Tensor, *, cache: Cache | None = None, **kwargs: Any
) -> Any:
    """The output of one forward, without a cache unless one is given.

    The keyword that takes the cache has two names over the versions of transformers.
    """
    if cache is not None:
        kwargs[cache_keyword(model)] = cache
    return model(input_ids=input_ids, use_cache=cache is not None, **kwargs)


def forward_logits(
    model: PreTrainedModel, input_ids: Tensor, *, cache: Cache | None = None, **kwargs: Any
) -> Tensor:
    """Logits `[B, S, vocab]` of one forward, without a cache unless one is given."""
    logits: Tensor = forward(model, input_ids, cache=cache, **kwargs).logits
    return logits


def cache_keyword(model: nn.Module) -> str:
    """The name under which the forward of a model, wrapped or not, takes its cache."""
    from transformers import PreTrainedModel

    inner = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    return "cache" if "cache" in inspect.signature(inner.forward).parameters else "past_key_values"


def in_a_fresh_process(code: str, folder: Path) -> str:
    """Run code that may import this package; its standard output, or a failure with its errors."""
    path = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@contextmanager
def op_calls() -> Iterator[list[dict[str, Any]]]:
    """Record the keyword arguments of every call that the transformers hook makes of the op."""
    from mla_ops.hf import attention

    calls: list[dict[str, Any]] = []
    original = attention.mla_attention

    def recorded(*tensors: Tensor, **options: Any) -> Any:
        calls.append(options)
        return original(*tensors, **options)

    attention.mla_attention = recorded
    try:
        yield calls
    finally:
        attention.mla_attention = original


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest value; infinite where `actual` is not finite."""
    if not actual.isfinite().all():
        return math.inf
    return float((actual - expected).abs().max() / expected.abs().max())
