"""What a run leaves behind: one document, as JSON and as CSV."""

from __future__ import annotations

import csv
import json
import os
import pathlib
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import mla_ops
from mla_ops.bench.extras import PagedResult
from mla_ops.bench.limits import Limits
from mla_ops.bench.runner import LeftOut, Row
from mla_ops.bench.timing import Timing
from mla_ops.errors import InvalidInputError

__all__ = ["FORMAT", "Document", "Machine", "this_machine"]

FORMAT = 2
"""Version of the JSON; a file of another one is refused."""

_PACKAGES = (
    *("torch", "transformers", "triton"),
    *("vllm", "flash_mla", "flashinfer-python", "flash_attn"),
)


@dataclass(frozen=True)
class Machine:
    """Where a run took place.

    Attributes:
        device: `cpu` or `cuda`.
        name: of the processor or GPU.
        capability: instruction set of a CPU, compute capability of a GPU.
        threads: CPU threads, the same for all sides.
        dtype: of the run.
        versions: of `mla_ops` and of the packages that are installed.
    """

    device: str
    name: str
    capability: str
    threads: int
    dtype: str
    versions: Mapping[str, str]

    def __str__(self) -> str:
        """Describe the machine in one line."""
        threads = f", {self.threads} threads" if self.device == "cpu" else ""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.name} ({self.capability}){threads}, {self.dtype}; {versions}"


def this_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """Describe where this process runs.

    Args:
        device: what is measured.
        dtype: of the run.
    """
    versions = {"mla_ops": mla_ops.__version__}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        capability = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
        versions["cuda"] = str(torch.version.cuda)
    else:
        name, capability = _processor(), torch.backends.cpu.get_cpu_capability()
    return Machine(
        device=device.type,
        name=name,
        capability=capability,
        threads=torch.get_num_threads(),
        dtype=str(dtype).removeprefix("torch."),
        versions=versions,
    )


def _processor() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@dataclass
class Document:
    """A run, whole or cut short.

    Attributes:
        machine: where it took place.
        limits: of that machine, from the same run.
        rows: what was measured.
        left_out: what was not.
        absent: sides that cannot be measured there, with the reason.
        paged: mixed batches and scattered pages.
        scratch: peak bytes of one call of the dense op, by the name of its case.
    """

    machine: Machine
    limits: Limits
    absent: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    paged: list[PagedResult] = field(default_factory=list)
    scratch: dict[str, int] = field(default_factory=dict)

    def add(self, result: Row | LeftOut) -> None:
        """Take up what the runner yields.

        Args:
            result: a row, or what was left out.
        """
        if isinstance(result, Row):
            self.rows.append(result)
        else:
            self.left_out.append(result)

    @property
    def cases(self) -> list[str]:
        """Names of the cases that have rows, in their order."""
        return list(dict.fromkeys(row.case for row in self.rows))

    def fastest(self, case: str, side: str) -> Row | None:
        """Return the fastest variant of a side, None if it was not measured.

        Args:
            case: its name.
            side: its name.
        """
        rows = [row for row in self.rows if (row.case, row.side) == (case, side)]
        return min(rows, key=lambda row: row.timing.median, default=None)

    def gain(self, row: Row) -> float | None:
        """Return how many times ours a side takes, None where ours was not measured.

        Args:
            row: of somebody else.
        """
        ours = self.fastest(row.case, row.against) if row.against is not None else None
        return None if ours is None else row.timing.median / ours.timing.median

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "format": FORMAT,
            "machine": asdict(self.machine),
            "limits": asdict(self.limits),
            "absent": self.absent,
            "rows": [{**row.as_dict(), "gain": self.gain(row)} for row in self.rows],
            "left_out": [asdict(left) for left in self.left_out],
            "paged": [result.as_dict() for result in self.paged],
            "scratch": self.scratch,
        }

    def write_json(self, path: Path) -> None:
        """Write all of it; a reader finds the old file or the new one, never a part.

        Args:
            path: of the file; its folder is made.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(path.name + ".part")
        draft.write_text(json.dumps(self.as_dict(), indent=1) + "\n", "utf-8")
        os.replace(draft, path)

    def write_csv(self, path: Path) -> None:
        """Write one line per row.

        Args:
            path: of the file; its folder is made.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        names = [f.name for f in fields(Row) if f.name != "timing"]
        names += [*(f.name for f in fields(Timing)), "gain"]
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            for row in self.rows:
                writer.writerow({**row.as_dict(), "gain": self.gain(row)})

    @classmethod
    def read(cls, path: Path) -> Document:
        """Read what `write_json` has written.

        Args:
            path: of the file.

        Raises:
            InvalidInputError: it is not such a file, or one of another version.
        """
        try:
            values = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidInputError(f"{path}: expected the JSON of a run: {error}") from error
        found = values.get("format") if isinstance(values, dict) else None
        if found != FORMAT:
            raise InvalidInputError(
                f"{path}: expected format {FORMAT} of mla-ops bench, got {found!r}"
            )
        try:
            return cls(
                machine=Machine(**values["machine"]),
                limits=Limits(**values["limits"]),
                absent=values["absent"],
                rows=[_row(row) for row in values["rows"]],
                left_out=[LeftOut(**left) for left in values["left_out"]],
                paged=[PagedResult.from_dict(result) for result in values["paged"]],
                scratch=values["scratch"],
            )
        except (KeyError, TypeError) as error:
            raise InvalidInputError(f"{path}: not a whole document: {error}") from error


def _row(values: dict[str, Any]) -> Row:
    timing = Timing(**{f.name: values.pop(f.name) for f in fields(Timing)})
    values.pop("gain")
    return Row(**values, timing=timing)
