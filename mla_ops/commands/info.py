"""The verb `mla-ops info`: versions, this machine, and which backend runs what."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from dataclasses import asdict, dataclass
from typing import Annotated, Protocol, runtime_checkable

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import mla_ops
from mla_ops import env
from mla_ops.commands.options import JsonPath, float_dtype
from mla_ops.commands.output import check_outputs, table, write_json
from mla_ops.dispatch import OPS, Call, available_backends, get_backend, select
from mla_ops.errors import BackendUnavailableError, InvalidInputError, MLAOpsError

__all__ = ["BackendChoice", "DescribedBackend", "backend_choice", "info"]

_PACKAGES = ("torch", "triton", "transformers", "numpy")
_CPU_UNITS = ("avx2", "avx512_f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_fp16")


@runtime_checkable
class DescribedBackend(Protocol):
    """A backend that says more about itself: how it was built, or why it could not be."""

    def describe(self) -> str:
        """Return one line."""
        ...


@dataclass(frozen=True)
class BackendChoice:
    """Which backend takes which op, for one device and dtype.

    Attributes:
        device: device type.
        dtype: name of the dtype.
        chosen: op to the name of the backend that runs it now, None where nobody does.
        refusals: backend to op to its reasons; an empty list means that it takes the op.
        notes: backend to what it says about itself.
    """

    device: str
    dtype: str
    chosen: dict[str, str | None]
    refusals: dict[str, dict[str, list[str]]]
    notes: dict[str, str]


def backend_choice(device: str, dtype: torch.dtype) -> BackendChoice:
    """Ask every backend about every op.

    Args:
        device: device type, `cpu` for instance; it need not be there.
        dtype: of the computation.

    Example:
        >>> import torch
        >>> from mla_ops.commands.info import backend_choice
        >>> backend_choice("cpu", torch.float64).chosen["mla_decode"]
        'tiled'
    """
    calls = [Call(op, device, dtype) for op in sorted(OPS)]
    refusals: dict[str, dict[str, list[str]]] = {}
    notes = {}
    for name in available_backends():
        try:
            backend = get_backend(name)
        except BackendUnavailableError as error:
            refusals[name] = {call.op: [str(error)] for call in calls}
            continue
        refusals[name] = {call.op: backend.not_supported_reasons(call) for call in calls}
        if isinstance(backend, DescribedBackend):
            notes[name] = backend.describe()
    chosen = {call.op: _chosen(call) for call in calls}
    return BackendChoice(device, str(dtype).removeprefix("torch."), chosen, refusals, notes)


def _chosen(call: Call) -> str | None:
    try:
        return select(call).name
    except MLAOpsError:
        return None


def info(
    device: Annotated[
        list[str] | None,
        typer.Option(help="Device type; may be repeated.", show_default="cpu, and cuda if there"),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="Dtype; may be repeated.", show_default="bfloat16"),
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Show versions, devices, and which backend runs each op, or why it does not."""
    check_outputs(json_path)
    dtypes = [float_dtype(name) for name in dtype or ["bfloat16"]]
    devices = device or ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for name in devices:
        _check_device(name)
    choices = [backend_choice(where, what) for where in devices for what in dtypes]
    versions, machine, variables = _versions(), _machine(), _variables()

    console = Console()
    for title, pairs in (("Versions", versions), ("Machine", machine)):
        console.print(_pairs(title, pairs))
        console.print()
    for choice in choices:
        console.print(_choice_table(choice))
        console.print(_reasons_table(choice))
    console.print(_variables_table(variables))
    document = {
        "schema": 1,
        "versions": versions,
        "machine": machine,
        "backends": [asdict(choice) for choice in choices],
        "environment": variables,
    }
    write_json(json_path, document)


def _check_device(name: str) -> None:
    try:
        given = torch.device(name)
    except RuntimeError:
        raise InvalidInputError(
            f"expected a device type such as cpu or cuda, got {name!r}"
        ) from None
    if given.index is not None:
        raise InvalidInputError(f"expected a device type without an index, got {name!r}")


def _versions() -> dict[str, str]:
    found = {"mla_ops": mla_ops.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _machine() -> dict[str, str]:
    # The names that torch gives to what it finds; older versions have no such function.
    get_capabilities = getattr(torch.cpu, "get_capabilities", dict)
    has: dict[str, object] = get_capabilities()
    units = [unit for unit in _CPU_UNITS if has.get(unit)]
    cores = has.get("num_physical_cores")
    found = {
        "system": platform.platform(terse=True),
        "cpu": _cpu_name() or str(has.get("cpu_name") or platform.machine()),
        "cores": f"{cores or 'unknown'} physical, {os.cpu_count()} logical",
        "threads": f"{torch.get_num_threads()} in use by torch",
        "kernels of torch": torch.backends.cpu.get_cpu_capability(),
        "instructions": ", ".join(units) or "unknown",
    }
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        found[f"cuda:{index}"] = (
            f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, "
            f"{gpu.total_memory / 2**30:.0f} GiB, {gpu.multi_processor_count} multiprocessors"
        )
    if not torch.cuda.device_count():
        found["cuda"] = "no device"
    return found


def _cpu_name() -> str:
    """Return the CPU's model where Linux tells it, else an empty string."""
    if sys.platform != "linux":
        return platform.processor()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = [line for line in file if line.startswith("model name")]
    except OSError:
        return ""
    return lines[0].partition(":")[2].strip() if lines else ""


def _variables() -> list[dict[str, object]]:
    return [
        {
            "name": variable.name,
            "set": variable.name in os.environ,
            "value": os.environ.get(variable.name, "").strip() or variable.default,
            "default": variable.default,
            "meaning": variable.meaning,
        }
        for variable in env.VARIABLES
    ]


def _pairs(title: str, pairs: dict[str, str]) -> Table:
    shown = table(title, "name", "value", header=False)
    for name, value in pairs.items():
        shown.add_row(name, escape(value))
    return shown


def _choice_table(choice: BackendChoice) -> Table:
    names = list(choice.refusals)
    how = env.backend()
    shown = table(f"Backends for {choice.dtype} on {choice.device}", "op", how, *names)
    for op, chosen in choice.chosen.items():
        cells = ["[dim]-[/]" if choice.refusals[name][op] else "[green]yes[/]" for name in names]
        shown.add_row(op, f"[bold]{chosen}[/]" if chosen else "[red]nobody[/]", *cells)
    return shown


def _reasons_table(choice: BackendChoice) -> Table:
    shown = table("What backends say", "backend", "ops", "reason")
    for name, note in choice.notes.items():
        shown.add_row(name, "", escape(note))
    for name, by_op in choice.refusals.items():
        ops_of: dict[str, list[str]] = {}
        for op, reasons in by_op.items():
            if reasons:
                ops_of.setdefault("; ".join(reasons), []).append(op)
        for reason, ops in ops_of.items():
            shown.add_row(name, _which(ops, list(by_op)), escape(reason))
    if not shown.row_count:
        shown.add_row("all", "all", "no objections")
    return shown


def _which(ops: list[str], every: list[str]) -> str:
    """Name some of all ops in few words."""
    others = [op for op in every if op not in ops]
    if len(others) < len(ops):
        return f"all but {', '.join(others)}" if others else "all"
    return ", ".join(ops)


def _variables_table(variables: list[dict[str, object]]) -> Table:
    shown = table("Environment", "variable", "value", "meaning")
    for variable in variables:
        value = escape(str(variable["value"])) or "[dim]empty[/]"
        mark = f"[bold]{value}[/]" if variable["set"] else f"{value} [dim](default)[/]"
        shown.add_row(str(variable["name"]), mark, escape(str(variable["meaning"])))
    return shown
