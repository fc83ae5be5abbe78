"""What the documentation site adds to the pages when it is built.

* `<!-- generated: NAME -->` in a page becomes what the function NAME of `GENERATORS` returns:
  tables that are read from the code, so that they cannot say anything else than the code does.
* A picture of `pictures.py` is put into the page itself, where it takes the colours of the site.
* The API pages read the sources laid out as they are installed.
"""

from __future__ import annotations

import importlib
import pathlib
import re
import shutil
from collections.abc import Callable
from typing import Any

BACKENDS = {
    "triton": ("mla_ops.kernels.triton.backend", "TritonBackend"),
    "cpu": ("mla_ops.kernels.cpu.backend", "CpuBackend"),
    "tiled": ("mla_ops.kernels.tiled", "TiledBackend"),
    "reference": ("mla_ops.reference_backend", "ReferenceBackend"),
}
"""Where the classes are: to load the CPU backend would mean to compile it."""

ROOT = pathlib.Path(__file__).parents[1]
_MARK = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.MULTILINE)
_EXAMPLE = re.compile(r"(?<=^    )Example:$|(?<=^        )Example:$", re.MULTILINE)
_PICTURE = re.compile(r"^!\[([^\]]*)\]\((pictures/[\w-]+\.svg)\)$", re.MULTILINE)


def on_startup(**_: Any) -> None:
    """Lay out the three source folders as one package, as setuptools does, for the API pages.

    At the start, since a folder that is not there when the plugins are configured is not searched.
    """
    package = ROOT / "build" / "docs" / "mla_ops"
    shutil.rmtree(package, ignore_errors=True)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "mla_ops", package, ignore=ignore)
    for folder in ("kernels", "passes"):
        shutil.copytree(ROOT / folder, package / folder, ignore=ignore)
    for path in package.rglob("*.py"):  # mkdocstrings sets `Examples:` as code, `Example:` as prose
        path.write_text(_EXAMPLE.sub("Examples:", path.read_text("utf-8")), "utf-8")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in what is generated, and the pictures."""
    return _PICTURE.sub(_inline, _MARK.sub(lambda mark: GENERATORS[mark[1]](), markdown))


def _inline(picture: re.Match[str]) -> str:
    svg = (ROOT / "docs" / picture[2]).read_text("utf-8")
    svg = re.sub(r"\n\s*", " ", svg.replace("<svg ", '<svg role="img" ', 1)).strip()
    return f'<figure class="picture">{svg}<figcaption>{picture[1]}</figcaption></figure>'


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table; bars in cells are escaped."""
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in r] for r in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def environment() -> str:
    """Every environment variable."""
    from mla_ops import env

    rows = [
        [
            f"`{variable.name}`",
            f"`{variable.default}`" if variable.default else "",
            variable.meaning,
        ]
        for variable in env.VARIABLES
    ]
    return table(["variable", "default", "meaning"], rows)


def errors() -> str:
    """Every error class: a table, and a section for each."""
    from mla_ops import errors as module

    found = [getattr(module, name) for name in module.__all__]
    own = set(found)
    found.sort(key=lambda cls: (len(cls.__mro__), cls.__name__))
    rows = [
        [
            f"[`{cls.__name__}`][mla_ops.errors.{cls.__name__}]",
            ", ".join(f"`{base.__name__}`" for base in cls.__bases__ if base not in own),
            (cls.__doc__ or "").strip().splitlines()[0],
        ]
        for cls in found
    ]
    sections = [f"::: mla_ops.errors.{cls.__name__}" for cls in found]
    return "\n\n".join([table(["error", "also a", "when"], rows), *sections])


def backends() -> str:
    """Which backend takes which op in which dtype, by what each declares; none is loaded."""
    from mla_ops.dispatch import OPS, available_backends

    names = available_backends()
    parts = []
    for device in ("cpu", "cuda"):
        rows = [
            [f"`{op}`", *(_dtypes_of(name, op, device) for name in names)] for op in sorted(OPS)
        ]
        parts.append(f"On `{device}`:\n\n{table(['op', *(f'`{name}`' for name in names)], rows)}")
    return "\n\n".join(parts)


def _dtypes_of(backend: str, op: str, device: str) -> str:
    import torch

    from mla_ops.dispatch import Call

    short = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    short["fp64"] = torch.float64
    module, cls = BACKENDS[backend]
    declared = getattr(importlib.import_module(module), cls).capabilities
    taken = [
        name
        for name, dtype in short.items()
        if not declared.not_supported_reasons(Call(op, device, dtype))
    ]
    return "all four" if len(taken) == len(short) else ", ".join(taken) or "-"


def commands() -> str:
    """Every verb of the console script, with its options."""
    import typer

    from mla_ops.cli import build_app

    verbs = typer.main.get_command(build_app()).commands
    return "\n\n".join(_command(name, verb) for name, verb in sorted(verbs.items()))


def _command(name: str, command: Any) -> str:
    rows, arguments = [], []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            arguments.append(parameter.metavar or parameter.name.upper())
        elif parameter.name != "help":
            options = ", ".join(f"`{o}`" for o in [*parameter.opts, *parameter.secondary_opts])
            rows.append([options, _default(parameter), parameter.help or ""])
    usage = " ".join(["mla-ops", name, "[OPTIONS]", *arguments])
    options = table(["option", "default", ""], rows)
    return f"## mla-ops {name}\n\n{command.help}\n\n```\n{usage}\n```\n\n{options}"


def _default(parameter: Any) -> str:
    shown = parameter.show_default
    if isinstance(shown, str):
        return shown
    default = parameter.default
    if default is True:
        return f"`{parameter.opts[0]}`"
    return "" if default in (None, False, []) else f"`{default}`"


GENERATORS: dict[str, Callable[[], str]] = {
    "backends": backends,
    "commands": commands,
    "environment": environment,
    "errors": errors,
}
