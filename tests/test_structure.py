"""The shape of the source: who may import whom, how long things may grow, what must be documented.

Each rule is a function from a module to its faults. `test_library` runs every rule over the
library; `test_rule_finds_its_fault` runs every rule over a module that breaks it, so that a rule
which has gone blind fails too.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"mla_ops": "mla_ops", "kernels": "mla_ops.kernels", "passes": "mla_ops.passes"}

MODULE_LINES = 450
FUNCTION_LINES = 80
KERNEL_LINES = 160
TEST_FILE_LINES = 500

# From the ground up: a module imports from its own layer and from those before it. A name stands
# for the module, or for everything in the package.
ADAPTERS = ("hf", "kernels", "parallel", "passes")
LAYERS = (
    ("dims", "env", "errors"),
    ("chunking", "metadata", "reference", "validation", "validation_paged"),
    ("dispatch", "reference_backend"),
    ("ops",),
    ("attention", "paged", "workspace"),
    ADAPTERS,  # of which none imports another
    ("__init__",),
    ("accuracy", "bench", "cli", "commands", "demo", "kernels_command", "testing"),
)
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
# These see less than the layers below them.
ONLY = {
    "kernels": {"chunking", "dims", "dispatch", "env", "errors"},
    "passes": {"attention", "dims", "env", "errors", "ops"},
}
# The one import that points upwards: the registry loads a backend when it is chosen.
DEFERRED = {"dispatch": {"kernels"}}
# Third-party packages that a part may import; the uppermost layer may import any.
THIRD_PARTY = {"hf": {"transformers"}, "kernels": {"triton"}}
EVERYWHERE = {"mla_ops", "numpy", "torch"} | sys.stdlib_module_names


@dataclass(frozen=True)
class Import:
    """One import of a module of this package, or of another top-level package."""

    name: str
    line: int
    deferred: bool  # inside a function, or for the type checker only


@dataclass(frozen=True)
class Module:
    """A source file under the name that it is imported by."""

    name: str
    path: str
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, self.path)

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")

    @property
    def part(self) -> str:
        """Its name in the layer table: `ops`, or `kernels` for anything in the package."""
        return part_of(self.name)

    @cached_property
    def imports(self) -> list[Import]:
        deferred = {
            id(inner)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            or (isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"))
            for inner in ast.walk(node)
        }
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                names = [f"{base}.{alias.name}" for alias in node.names]
            else:
                continue
            found += [Import(name, node.lineno, id(node) in deferred) for name in names]
        return found

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.name if self.is_package else self.name.rpartition(".")[0]
        parts = package.split(".")
        base = parts[: len(parts) - (node.level - 1)]
        return ".".join([*base, node.module] if node.module else base)


Rule = Callable[[Module], Iterator[str]]


def part_of(name: str) -> str:
    """The part that a dotted name belongs to; `__init__` for the package and its own names."""
    pieces = name.split(".")
    return pieces[1] if len(pieces) > 1 and pieces[1] in RANK else "__init__"


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def decorators(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The last names of the decorators: `jit` for `@triton.jit` and for `@triton.jit(...)`."""
    calls = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
    return {ast.unparse(call).rpartition(".")[2] for call in calls}


def extent(node: ast.stmt) -> int:
    """The number of lines from the first to the last one of a statement."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def known_part(module: Module) -> Iterator[str]:
    """Every module has a place in the layer table."""
    pieces = module.name.split(".")
    if len(pieces) > 1 and pieces[1] not in RANK:
        yield f"{module.path}: {pieces[1]} is in no layer of LAYERS"


def layers(module: Module) -> Iterator[str]:
    """Imports point downwards."""
    part = module.part
    for found in module.imports:
        if found.name.partition(".")[0] != "mla_ops":
            continue
        target = part_of(found.name)
        if target == part or (found.deferred and target in DEFERRED.get(part, ())):
            continue
        sibling = part in ADAPTERS and target in ADAPTERS
        if RANK[target] > RANK[part] or sibling or target not in ONLY.get(part, RANK):
            yield f"{module.path}:{found.line} {part} imports {found.name}"


def full_names(module: Module) -> Iterator[str]:
    """The folders `passes` and `kernels` are reached by their installed names only."""
    for found in module.imports:
        if found.name.partition(".")[0] in ("kernels", "passes"):
            yield f"{module.path}:{found.line} imports {found.name} without mla_ops."


def third_party(module: Module) -> Iterator[str]:
    """Heavy packages are imported where they are at home."""
    if module.part in LAYERS[-1]:
        return
    for found in module.imports:
        package = found.name.partition(".")[0]
        if package not in EVERYWHERE | THIRD_PARTY.get(module.part, set()):
            yield f"{module.path}:{found.line} imports {found.name}"


def one_registrar(module: Module) -> Iterator[str]:
    """Only `ops` registers with torch.library; `testing` may run its opcheck."""
    allowed = {"torch.library", "torch.library.opcheck"} if module.part == "testing" else set()
    used = [(found.name, found.line) for found in module.imports]
    used += [
        (ast.unparse(node), node.lineno)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute)
    ]
    for name, line in used:
        registers = name == "torch.library" or name.startswith("torch.library.")
        if registers and module.part != "ops" and name not in allowed:
            yield f"{module.path}:{line} uses {name}"


def module_length(module: Module) -> Iterator[str]:
    """A module stays readable in one sitting."""
    lines = module.source.count("\n")
    if lines > MODULE_LINES:
        yield f"{module.path}: {lines} lines, at most {MODULE_LINES}"


def function_length(module: Module) -> Iterator[str]:
    """A function, its docstring aside, fits on a screen or two; a kernel may take twice that."""
    for node in functions(module.tree):
        limit = KERNEL_LINES if "jit" in decorators(node) else FUNCTION_LINES
        lines = extent(node)
        if ast.get_docstring(node) is not None:
            lines -= extent(node.body[0])
        if lines > limit:
            yield f"{module.path}:{node.lineno} {node.name} has {lines} lines, at most {limit}"


def no_assert(module: Module) -> Iterator[str]:
    """A user gets an error of errors.py; `python -O` would drop an assert."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Assert):
            yield f"{module.path}:{node.lineno} assert"


def no_broad_except(module: Module) -> Iterator[str]:
    """A handler names what it expects, or raises again."""
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = [] if node.type is None else ast.unparse(node.type).strip("()").split(", ")
        broad = node.type is None or {"Exception", "BaseException"} & set(caught)
        if broad and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node)):
            yield f"{module.path}:{node.lineno} broad except"


def public_docstrings(module: Module) -> Iterator[str]:
    """Public modules, classes, functions and methods say what they do."""
    if ast.get_docstring(module.tree) is None:
        yield f"{module.path}: the module has no docstring"

    def visit(body: list[ast.stmt]) -> Iterator[str]:
        for node in body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if node.name.startswith("_"):
                continue
            if isinstance(node, ast.ClassDef):
                yield from visit(node.body)
            elif decorators(node) & {"overload", "override", "setter", "jit"}:
                continue
            if ast.get_docstring(node) is None:
                yield f"{module.path}:{node.lineno} {node.name} has no docstring"

    yield from visit(module.tree.body)


def documented_arguments(module: Module) -> Iterator[str]:
    """A docstring describes no argument that the function does not have."""
    for node in functions(module.tree):
        section = re.search(
            r"^Args:\n((?:[ ]+.*\n|\n)*)", (ast.get_docstring(node) or "") + "\n", re.MULTILINE
        )
        if section is None:
            continue
        args = node.args
        every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
        names = {arg.arg for arg in every if arg is not None}
        for line in re.findall(r"^    (\S.*?)(?: \(.*\))?:", section[1], re.MULTILINE):
            for described in re.split(r",\s*", line):
                if described.strip("`*") not in names:
                    yield f"{module.path}:{node.lineno} {node.name} has no argument {described}"


def no_banner(module: Module) -> Iterator[str]:
    """Modules are divided by files and names, not by lines of dashes."""
    for line, text in comments(module.source):
        if re.search(r"[-=#*~_]{4,}", text):
            yield f"{module.path}:{line} banner comment"


def todo_has_link(module: Module) -> Iterator[str]:
    """What is left to do is written down where it can be followed."""
    for line, text in comments(module.source):
        if re.search(r"\b(TODO|FIXME|XXX|HACK)\b", text) and "https://" not in text:
            yield f"{module.path}:{line} {text}"


RULES: tuple[Rule, ...] = (
    known_part,
    layers,
    full_names,
    third_party,
    one_registrar,
    module_length,
    function_length,
    no_assert,
    no_broad_except,
    public_docstrings,
    documented_arguments,
    no_banner,
    todo_has_link,
)

# A module that breaks the rule, as (rule, module name, source).
FAULTS: tuple[tuple[Rule, str, str], ...] = (
    (known_part, "mla_ops.stray", ""),
    (layers, "mla_ops.errors", "from mla_ops.dispatch import select"),
    (layers, "mla_ops.dims", "from mla_ops import MLADims"),
    (layers, "mla_ops.dims", "def f():\n    import mla_ops.ops"),
    (layers, "mla_ops.dispatch", "from mla_ops.kernels import tiled"),
    (layers, "mla_ops.ops", "from mla_ops.attention import mla_attention"),
    (layers, "mla_ops.attention", "def f():\n    from mla_ops.kernels import tiled"),
    (layers, "mla_ops.kernels.tiled", "from mla_ops.validation import check"),
    (layers, "mla_ops.kernels.tiled", "from ..ops import mla_decode"),
    (layers, "mla_ops.passes.match", "from mla_ops.kernels.tiled import attend"),
    (layers, "mla_ops.passes.match", "from mla_ops.hf import patch"),
    (layers, "mla_ops.passes.match", "from .. import hf"),
    (layers, "mla_ops.hf.patch", "import mla_ops.cli"),
    (layers, "mla_ops.hf.patch", "from mla_ops.passes import rewrite"),
    (layers, "mla_ops.passes.match", "from mla_ops.metadata import MLAMetadata"),
    (layers, "mla_ops", "from mla_ops.cli import main"),
    (full_names, "mla_ops.dispatch", "def f():\n    import kernels.tiled"),
    (full_names, "mla_ops.passes.fuse", "from passes.match import sites"),
    (third_party, "mla_ops.passes.match", "import transformers"),
    (third_party, "mla_ops.hf.patch", "import peft"),
    (third_party, "mla_ops.attention", "def f():\n    from triton import language"),
    (one_registrar, "mla_ops.attention", "import torch.library"),
    (one_registrar, "mla_ops.attention", "from torch.library import Library"),
    (one_registrar, "mla_ops.attention", "import torch\nmine = torch.library"),
    (one_registrar, "mla_ops.kernels.tiled", "from torch import library"),
    (one_registrar, "mla_ops.testing", "import torch\nlib = torch.library.Library('a', 'DEF')"),
    (module_length, "mla_ops.ops", "\n" * (MODULE_LINES + 1)),
    (function_length, "mla_ops.ops", "def f():\n" + "    x = 1\n" * FUNCTION_LINES),
    (
        function_length,
        "mla_ops.kernels.triton.decode",
        "@triton.jit(debug=True)\ndef f():\n" + "    x = 1\n" * KERNEL_LINES,
    ),
    (no_assert, "mla_ops.ops", "assert True"),
    (no_broad_except, "mla_ops.ops", "try:\n    f()\nexcept:\n    pass"),
    (no_broad_except, "mla_ops.ops", "try:\n    f()\nexcept (OSError, Exception):\n    pass"),
    (public_docstrings, "mla_ops.ops", "x = 1"),
    (public_docstrings, "mla_ops.ops", '"""Ops."""\nclass A:\n    """A."""\n    def f(self): ...'),
    (
        documented_arguments,
        "mla_ops.ops",
        'def f(x):\n    """Do.\n\n    Args:\n        x: that.\n        y: this.\n    """',
    ),
    (no_banner, "mla_ops.ops", "# ---- helpers"),
    (no_banner, "mla_ops.ops", "##########"),
    (todo_has_link, "mla_ops.ops", "x = 1  # TODO: later"),
)


def library() -> list[Module]:
    found = []
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            pieces = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            name = ".".join(pieces).removesuffix(".__init__")
            found.append(Module(name, str(path.relative_to(ROOT)), path.read_text("utf-8")))
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_library(rule: Rule) -> None:
    faults = [fault for module in library() for fault in rule(module)]
    assert not faults, f"{rule.__doc__}\n" + "\n".join(faults)


@pytest.mark.parametrize(
    ("rule", "name", "source"), FAULTS, ids=[f"{rule.__name__}-{name}" for rule, name, _ in FAULTS]
)
def test_rule_finds_its_fault(rule: Rule, name: str, source: str) -> None:
    path = name.replace(".", "/") + ("/__init__.py" if name == "mla_ops" else ".py")
    assert list(rule(Module(name, path, source + "\n")))


def test_every_rule_has_a_fault() -> None:
    assert {rule for rule, _, _ in FAULTS} == set(RULES)


def test_library_is_found() -> None:
    names = {module.name for module in library()}
    assert {"mla_ops", "mla_ops.ops", "mla_ops.kernels", "mla_ops.passes"} <= names


def test_no_import_cycle() -> None:
    names = {module.name for module in library()}
    graph = {
        module.name: {
            target
            for found in module.imports
            if not found.deferred
            for target in (found.name, found.name.rpartition(".")[0])
            if target in names and target not in (module.name, "mla_ops")
        }
        for module in library()
        if module.name != "mla_ops"
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_test_files_stay_short() -> None:
    lengths = {
        path.name: path.read_text("utf-8").count("\n") for path in ROOT.glob("tests/test_*.py")
    }
    assert {name: n for name, n in lengths.items() if n > TEST_FILE_LINES} == {}
