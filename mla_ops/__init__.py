"""Multi-head latent attention as torch custom ops, graph passes and a transformers drop-in.

Importing this package imports torch and nothing heavier: no triton, no transformers, and no CUDA
initialisation.
"""

from __future__ import annotations

from mla_ops.attention import MLAOutput, mla_attention
from mla_ops.dims import MLADims
from mla_ops.dispatch import (
    Backend,
    Capabilities,
    available_backends,
    get_backend,
    register_backend,
    use_backend,
)
from mla_ops.errors import (
    BackendUnavailableError,
    InvalidInputError,
    MLAOpsError,
    PatchError,
    RewriteError,
    UnsupportedInputError,
)

__version__ = "0.1.0.dev0"

__all__ = [
    "Backend",
    "BackendUnavailableError",
    "Capabilities",
    "InvalidInputError",
    "MLADims",
    "MLAOpsError",
    "MLAOutput",
    "PatchError",
    "RewriteError",
    "UnsupportedInputError",
    "available_backends",
    "get_backend",
    "mla_attention",
    "register_backend",
    "use_backend",
]
