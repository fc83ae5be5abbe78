"""What the tests know of the native CPU kernels: whether this machine can have them.

A file that says `pytestmark = either_backend` runs each of its tests with what `auto` takes on a
CPU: the native kernels, and without them the tiled backend.
"""

from __future__ import annotations

import functools
import shutil

import pytest

from mla_ops.kernels.cpu import build

__all__ = ["either_backend", "has_native", "needs_native", "one_thread"]


@functools.cache
def has_native() -> bool:
    """Whether the kernels can be had. With a supported CPU, compiler and headers they must be."""
    try:
        build.library_path()
    except ImportError:
        return False
    if shutil.which("c++") is None or not build.python_header().exists():
        return False
    build.load()
    return True


needs_native = pytest.mark.skipif(
    "not __import__('native').has_native()", reason="no C++ compiler, or no headers of Python"
)
either_backend = pytest.mark.usefixtures("either_cpu_backend")
one_thread = pytest.mark.usefixtures("with_one_thread")
