"""Every example runs: README, documentation pages, and docstrings; and the pages are complete."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pathlib
import pkgutil
import re
import types
from typing import Any

import families
import pytest
import torch

import mla_ops
from mla_ops import dispatch, env, errors

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://)([^)#]+)")
GENERATED = re.compile(r"^<!-- generated: (.*) -->$", re.MULTILINE)
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
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_of_a_page_run(page: pathlib.Path) -> None:
    text = page.read_text("utf-8")
    names: dict[str, Any] = {
        "model": families.FAMILIES["deepseek_v3"].build(),
        "input_ids": families.sample_input_ids(batch=1),
        "__name__": "example",
    }
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start(1))
        with families.one_thread():
            exec(compile("\n" * line + match[1], str(page), "exec"), names)
    assert BLOCK.search(text) or page.name != "README.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
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


def _load(path: pathlib.Path) -> types.ModuleType:
    """Import a file that is in no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def hooks() -> types.ModuleType:
    """What the documentation site adds to the pages."""
    return _load(ROOT / "docs" / "hooks.py")


def test_pictures_become_part_of_the_page(hooks: types.ModuleType) -> None:
    shown = hooks.on_page_markdown("Text.\n\n![What it shows.](pictures/slots.svg)\n\nMore.")
    assert '<figure class="picture"><svg role="img" ' in shown
    assert "</svg><figcaption>What it shows.</figcaption></figure>" in shown
    assert "\n\n" not in shown.partition("<figure")[2].partition("</figure>")[0]


def test_every_generated_part_is_in_one_page(hooks: types.ModuleType) -> None:
    used = [name for page in PAGES for name in GENERATED.findall(page.read_text("utf-8"))]
    assert sorted(used) == sorted(hooks.GENERATORS)


def test_generated_parts_say_what_the_code_says(hooks: types.ModuleType) -> None:
    shown = hooks.on_page_markdown("# Title\n\n<!-- generated: environment -->\n\nMore.")
    assert shown.startswith("# Title\n\n| variable |")
    assert all(f"| `{v.name}` |" in shown and v.meaning in shown for v in env.VARIABLES)
    shown = hooks.on_page_markdown("<!-- generated: errors -->")
    assert all(f"\n::: mla_ops.errors.{name}\n" in shown + "\n" for name in errors.__all__)
    shown = hooks.on_page_markdown("<!-- generated: backends -->")
    assert all(f"| `{op}` |" in shown for op in dispatch.OPS)
    assert all(f"`{name}`" in shown for name in mla_ops.available_backends())


def test_every_backend_is_in_the_support_table(hooks: types.ModuleType) -> None:
    assert set(mla_ops.available_backends()) <= set(hooks.BACKENDS)
    for name in set(mla_ops.available_backends()) & set(hooks.BACKENDS):
        module, cls = hooks.BACKENDS[name]
        assert getattr(importlib.import_module(module), cls).name == name


def test_pictures_are_those_of_the_script() -> None:
    script = _load(ROOT / "docs" / "pictures.py")
    drawn = {f"{name}.svg": draw() for name, draw in script.PICTURES.items()}
    folder = ROOT / "docs" / "pictures"
    assert {path.name: path.read_text("utf-8") for path in folder.iterdir()} == drawn


def test_generated_tables_escape_bars(hooks: types.ModuleType) -> None:
    assert hooks.table(["a"], [["x | y"]]) == "| a |\n| --- |\n| x \\| y |"


@pytest.mark.parametrize("module", ["mla_ops", "mla_ops.hf", "mla_ops.passes", "mla_ops.testing"])
def test_every_public_name_is_in_the_reference(module: str) -> None:
    pages = "".join(page.read_text("utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    named = set(re.findall(r"^::: (?:\w+\.)*(\w+)$", pages, re.MULTILINE))
    assert set(importlib.import_module(module).__all__) - named - set(errors.__all__) == set()


def test_every_page_is_in_the_navigation() -> None:
    config = (ROOT / "mkdocs.yml").read_text("utf-8")
    named = re.findall(r"^ +- .*: ([\w/-]+\.md)$", config, re.MULTILINE)
    pages = [str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]]
    assert sorted(named) == sorted(pages)
