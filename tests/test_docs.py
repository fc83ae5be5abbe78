"""Every example runs: README, documentation pages, and docstrings."""

from __future__ import annotations

import doctest
import importlib
import pathlib
import pkgutil
import re
from typing import Any

import families
import pytest
import torch

import mla_ops
from mla_ops import dispatch

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://)([^)#]+)")
SKIPPED = ("mla_ops.demo", "mla_ops.cli")


def _modules() -> list[str]:
    folders = {"mla_ops.": "mla_ops", "mla_ops.kernels.": "kernels", "mla_ops.passes.": "passes"}
    found = (
        module.name
        for prefix, folder in folders.items()
        for module in pkgutil.walk_packages([str(ROOT / folder)], prefix)
    )
    return sorted(name for name in found if not name.startswith(SKIPPED))


@pytest.fixture
def backends_restored():
    before = dict(dispatch._registry)
    yield
    dispatch._registry.clear()
    dispatch._registry.update(before)
    dispatch._select.cache_clear()


@pytest.mark.usefixtures("backends_restored")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_of_a_page_run(page: pathlib.Path) -> None:
    text = page.read_text("utf-8")
    names: dict[str, Any] = {
        "model": families.FAMILIES["deepseek_v3"].build(),
        "input_ids": families.sample_input_ids(batch=1),
        "__name__": "example",
    }
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start(1))
        exec(compile("\n" * line + match[1], str(page), "exec"), names)
    assert BLOCK.search(text) or page.name != "README.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page: pathlib.Path) -> None:
    for target in LINK.findall(page.read_text("utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.usefixtures("backends_restored")
@pytest.mark.parametrize("name", _modules())
def test_docstring_examples_run(name: str) -> None:
    torch.manual_seed(0)
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


@pytest.mark.parametrize("name", ["mla_attention", "patch", "report", "use_backend"])
def test_public_functions_have_an_example(name: str) -> None:
    documented = {"patch": "report"}.get(name, name)
    assert ">>> " in (getattr(mla_ops, documented).__doc__ or "")


def test_readme_reaches_code_and_commands_on_its_first_screen() -> None:
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    assert next(i for i, line in enumerate(lines) if line == "```python") < 25
    assert next(i for i, line in enumerate(lines) if line.startswith("make test")) < 40
