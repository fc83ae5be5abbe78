"""Multi-head latent attention as torch custom ops, graph passes and a transformers drop-in.

Importing this package imports torch and nothing heavier: no triton, no transformers, and no CUDA
initialisation.
"""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any

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
from mla_ops.metadata import BatchOrder, MLAMetadata, build_metadata, reorder_batch
from mla_ops.paged import (
    gather_kv_cache,
    merge_attn_states,
    mla_chunked_prefill,
    mla_decode,
    mla_paged_attention,
    mla_prefill,
    update_kv_cache,
)
from mla_ops.workspace import (
    ServingLimits,
    Workspace,
    WorkspaceBytes,
    profile,
    reserve_workspace,
    workspace_bytes,
    workspace_tokens,
)

if TYPE_CHECKING:
    from mla_ops.hf.patch import patch, report, unpatch

_HERE = pathlib.Path(__file__).parent
if not (_HERE / "kernels").is_dir():
    # A checkout: its other two folders lie beside this one, and no other install's may be taken.
    __path__.append(str(_HERE.parent))

__version__ = "0.1.0.dev0"

__all__ = [
    "Backend",
    "BackendUnavailableError",
    "BatchOrder",
    "Capabilities",
    "InvalidInputError",
    "MLADims",
    "MLAMetadata",
    "MLAOpsError",
    "MLAOutput",
    "PatchError",
    "RewriteError",
    "ServingLimits",
    "UnsupportedInputError",
    "Workspace",
    "WorkspaceBytes",
    "available_backends",
    "build_metadata",
    "gather_kv_cache",
    "get_backend",
    "merge_attn_states",
    "mla_attention",
    "mla_chunked_prefill",
    "mla_decode",
    "mla_paged_attention",
    "mla_prefill",
    "patch",
    "profile",
    "register_backend",
    "reorder_batch",
    "report",
    "reserve_workspace",
    "unpatch",
    "update_kv_cache",
    "use_backend",
    "workspace_bytes",
    "workspace_tokens",
]


def __dir__() -> list[str]:
    """List the lazy names too."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Load the names that need transformers when they are asked for."""
    if name in ("patch", "report", "unpatch"):
        from mla_ops import hf

        return getattr(hf, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
