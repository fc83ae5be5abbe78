"""Compiling the native kernels, once per machine, and loading them.

The library lies in the cache folder under a name that follows from the sources, the flags and the
version of torch, so that no change of these can meet an old one. It is built in a folder of its own
and moved there at once: processes that start together need no lock, and one that is ended leaves
nothing half done.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch

from mla_ops import env

__all__ = ["flags", "library_path", "load", "python_header"]

_SOURCES = Path(__file__).parent
_LOGGER = logging.getLogger(__name__)
_COMMON = ("-O3", "-std=c++20", "-fopenmp", "-fno-math-errno", "-Wno-psabi")
# What the CPU must have is what torch found, so that torch's own switch for it holds here too.
_ARCHITECTURES = {
    "AVX512": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    "AVX2": ("-march=x86-64-v3",),
}


def flags() -> tuple[str, ...]:
    """Return the compiler flags for this machine.

    Raises:
        ImportError: it is no x86-64 CPU with AVX2, on Linux.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise ImportError(f"needs Linux on x86_64, this is {sys.platform} on {platform.machine()}")
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in _ARCHITECTURES:
        raise ImportError(f"needs a CPU with AVX2 or AVX512, torch found {capability}")
    bfloat16 = capability == "AVX512" and torch.cpu._is_avx512_bf16_supported()
    extra = ("-mavx512bf16",) if bfloat16 else ()
    return (*_COMMON, *_ARCHITECTURES[capability], *extra)


def python_header() -> Path:
    """Return where this Python's C header belongs; it may not be installed."""
    return Path(sysconfig.get_paths()["include"]) / "Python.h"


def library_path() -> Path:
    """Return where the library for this machine lies once it is built.

    Raises:
        ImportError: as `flags`.
    """
    digest = hashlib.sha256()
    for part in (*flags(), torch.__version__, sys.implementation.cache_tag):
        digest.update(part.encode() + b"\0")
    for source in sorted(_SOURCES.glob("*.[ch]*")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    name = f"mla_ops_cpu_{digest.hexdigest()[:16]}"
    return env.cache_dir() / "kernels" / f"{name}.so"


def _compile(target: Path) -> None:
    """Build the library at `target`.

    Raises:
        ImportError: something that is needed is missing, or the compiler failed.
    """
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise ImportError(f"needs a C++ compiler, and there is no {compiler} (CXX names another)")
    if not python_header().exists():
        raise ImportError(
            f"needs the headers of Python (python3-dev), there is no {python_header()}"
        )
    try:
        from torch.utils import cpp_extension
    except ImportError as error:
        raise ImportError(f"torch.utils.cpp_extension cannot be imported: {error}") from error
    # No news but a pause of half a minute, in which a user should not be left alone.
    _LOGGER.warning("compiling the native CPU kernels, once for this machine: %s", target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            cpp_extension.load(
                target.stem,
                [str(_SOURCES / "mla.cpp")],
                extra_cflags=list(flags()),
                extra_ldflags=["-fopenmp"],
                build_directory=folder,
                with_cuda=False,
                is_python_module=False,
            )
            os.replace(Path(folder) / target.name, target)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = str(error).strip().splitlines()
        _LOGGER.warning("the native kernels could not be compiled: %s", error)
        raise ImportError(f"could not be compiled: {reason[0] if reason else error}") from error


@functools.cache
def _outcome(path: Path) -> ModuleType | str:
    """Return the module, or why it cannot be had: a compiler that failed is not asked again."""
    try:
        if not path.exists():
            _compile(path)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            return f"{path} is no extension module"
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        return str(error)
    return module


def load() -> ModuleType:
    """Return the native module, compiling it if it isn't there yet.

    Raises:
        ImportError: it cannot be had here; says why.
    """
    outcome = _outcome(library_path())
    if isinstance(outcome, str):
        raise ImportError(outcome)
    return outcome
