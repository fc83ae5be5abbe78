"""Transformers integration; importing it makes `attn_implementation="mla_ops"` known.

Needs transformers >= 5.15 (`pip install 'mla-ops[hf]'`), where MLA models cache their latents. No
modeling module is imported: those that are loaded are hooked at once, later ones as they load.
"""

from __future__ import annotations

from mla_ops.hf.install import install
from mla_ops.hf.patch import LayerReport, PatchReport, patch, report, unpatch

__all__ = ["LayerReport", "PatchReport", "install", "patch", "report", "unpatch"]

install()
