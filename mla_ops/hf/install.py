"""Putting the hooks in place, however a model is loaded.

An attention class is hooked when its modeling module is imported, by an import hook that lets the
usual finders do their work and looks at the module afterwards. So `from_pretrained`, a constructor,
`torch.load` and layers that `generate` builds late all meet hooked classes, before the first
forward and also under `torch.compile`. transformers' own `monkey_patching` is not enough: it acts
on `from_pretrained` and `from_config` alone, and would need every class name in advance.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import re
import sys
from collections.abc import Sequence
from types import ModuleType

from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from mla_ops.hf.attention import IMPLEMENTATION, hook_class, mla_attention_forward
from mla_ops.hf.masks import mla_mask

__all__ = ["hook_module", "install"]

_MODELING = re.compile(r"transformers\.models\.\w+\.modeling_\w+")


def hook_module(module: ModuleType) -> None:
    """Hook every class that a module defines and that has an `expand_kv` of its own.

    Args:
        module: a modeling module.
    """
    for member in list(vars(module).values()):
        if isinstance(member, type) and member.__module__ == module.__name__:
            hook_class(member)


class _HookingLoader(importlib.abc.Loader):
    """Loads a modeling module as its own loader would, then hooks it."""

    def __init__(self, spec: importlib.machinery.ModuleSpec, loader: importlib.abc.Loader) -> None:
        self._spec, self._loader = spec, loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # From here on the module is its own loader's: inspect and reload see nothing of us.
        self._spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        hook_module(module)


class _HookingFinder(importlib.abc.MetaPathFinder):
    """Finds modeling modules through the other finders and wraps their loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not _MODELING.fullmatch(fullname):
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _HookingFinder):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _HookingLoader(spec, spec.loader)
                return spec
        return None


def install() -> None:
    """Register the implementation and hook modeling modules, loaded and yet to come; idempotent.

    Example:
        >>> import mla_ops.hf
        >>> from transformers import AttentionInterface
        >>> mla_ops.hf.install()
        >>> "mla_ops" in AttentionInterface().valid_keys()
        True
    """
    AttentionInterface.register(IMPLEMENTATION, mla_attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, mla_mask)
    if not any(isinstance(finder, _HookingFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _HookingFinder())
    for name, module in list(sys.modules.items()):
        if _MODELING.fullmatch(name):
            hook_module(module)
