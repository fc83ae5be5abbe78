"""What an installed package must do: import cheaply, from anywhere, whole, and as itself."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import mla_ops

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
FOLDERS = {"mla_ops": "mla_ops", "kernels": "mla_ops.kernels", "passes": "mla_ops.passes"}


@dataclass(frozen=True)
class Environment:
    """A virtual environment that has the package of its own and borrows everything else."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    @property
    def purelib(self) -> Path:
        base = {"base": str(self.folder), "platbase": str(self.folder)}
        return Path(sysconfig.get_path("purelib", "venv", vars=base))

    @classmethod
    def create(cls, folder: Path, *install: str) -> Environment:
        """Make the environment and install a wheel or a source tree into it, nothing fetched."""
        venv.create(folder, with_pip=False)
        self = cls(folder)
        # A folder named in a .pth file is searched, but its own .pth files are not read: the
        # editable install that these tests may run from does not come along.
        borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        (self.purelib / "borrowed.pth").write_text("\n".join(sorted(borrowed)), "utf-8")
        offline = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation")
        pip(folder, "--python", str(self.python), "install", *offline, *install)
        return self

    def run(self, code: str, *, path: Path | None = None) -> str:
        """Run code in a fresh process and in an empty folder; `path` goes first on `sys.path`."""
        prelude = f"import sys; sys.path.insert(0, {str(path)!r})\n" if path else ""
        return run_python(self.python, prelude + textwrap.dedent(code), self.folder)


def run_python(python: Path | str, code: str, cwd: Path) -> str:
    environ = {key: os.environ[key] for key in os.environ if not key.startswith("PYTHON")}
    environ["PYTHONSAFEPATH"] = "1"
    done = subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, cwd=cwd, env=environ, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(cwd: Path, *args: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *args], capture_output=True, text=True, cwd=cwd, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def source_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what goes into a distribution: builds leave nothing in the working tree."""
    tree = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    return tree


@pytest.fixture(scope="module")
def wheel(source_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    pip(out, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", ".", str(source_tree))
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def from_wheel(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment.create(tmp_path_factory.mktemp("wheel-env"), str(wheel))


@pytest.fixture(scope="module")
def from_source(source_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("editable-env")
    return Environment.create(folder, "--editable", str(source_tree))


def packages_on_disk() -> set[str]:
    found = set()
    for folder, package in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join([package, *init.parent.relative_to(ROOT / folder).parts]))
    return found


def test_package_list_is_complete() -> None:
    assert sorted(packages_on_disk()) == sorted(SETUPTOOLS["packages"])


def test_every_module_folder_is_a_package() -> None:
    folders = {path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert {folder for folder in folders if not (folder / "__init__.py").is_file()} == set()


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
    sources = {
        "/".join([*package.split("."), *path.relative_to(ROOT / folder).parts])
        for folder, package in FOLDERS.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {file for file in files if file.endswith(".py")} == sources
    assert "mla_ops/py.typed" in files
    assert "mla_ops/accuracy/word_problems.yaml" in files
    assert "mla_ops/accuracy/data/word_problems.jsonl" in files
    assert {file.split("/")[0].split("-")[0] for file in files} == {"mla_ops"}


def test_wheel_metadata(wheel: Path, from_wheel: Environment) -> None:
    (info,) = from_wheel.purelib.glob("mla_ops-*.dist-info")
    dist = importlib.metadata.Distribution.at(info)
    assert dist.version == mla_ops.__version__
    assert dist.metadata["Requires-Python"] == PYPROJECT["project"]["requires-python"]
    assert (info / "licenses" / "LICENSE").is_file()
    assert {(e.name, e.value) for e in dist.entry_points.select(group="console_scripts")} == {
        ("mla-ops", "mla_ops.cli:main")
    }
    bare = {req.split(">")[0] for req in dist.requires or () if "extra ==" not in req}
    assert bare == {"numpy", "torch"}


WHERE = """
    import importlib, json
    names = {names!r}
    print(json.dumps([importlib.import_module(name).__file__ for name in names]))
"""


@pytest.mark.parametrize("kind", ["from_wheel", "from_source"])
def test_every_package_imports_from_another_folder(
    kind: str, source_tree: Path, request: pytest.FixtureRequest
) -> None:
    environment: Environment = request.getfixturevalue(kind)
    names = sorted(packages_on_disk())
    files = [Path(file) for file in ast.literal_eval(environment.run(WHERE.format(names=names)))]
    home = environment.folder if kind == "from_wheel" else source_tree
    assert [file for file in files if home not in file.parents] == []


IMPORTS = {
    "mla_ops": "import mla_ops, mla_ops.kernels, mla_ops.passes",
    "transformers": "from transformers.models.deepseek_v3 import modeling_deepseek_v3",
}


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("from_source", "mla_ops", "transformers"),
        ("from_source", "transformers", "mla_ops"),
        ("from_wheel", "transformers", "mla_ops"),  # mla_ops comes from the checkout here too
    ],
)
def test_checkout_first_on_sys_path_harms_nobody(
    kind: str, first: str, second: str, source_tree: Path, request: pytest.FixtureRequest
) -> None:
    # transformers looks for a package named `kernels` and may import ours under that name.
    environment: Environment = request.getfixturevalue(kind)
    environment.run(
        f"""
        {IMPORTS[first]}
        {IMPORTS[second]}
        import torch
        import kernels, passes
        assert kernels.__file__ == {str(source_tree / "kernels" / "__init__.py")!r}
        assert modeling_deepseek_v3.DeepseekV3ForCausalLM
        assert torch.ops.mla_ops.mla_attention.default
        """,
        path=source_tree,
    )


def test_import_is_cheap(tmp_path: Path) -> None:
    added = run_python(
        sys.executable,
        textwrap.dedent(
            """
            import sys
            import numpy, torch
            before = set(sys.modules)
            import mla_ops
            added = {name.partition(".")[0] for name in set(sys.modules) - before}
            print(sorted(added - sys.stdlib_module_names))
            print("torch._dynamo" in sys.modules, torch.cuda.is_initialized())
            """
        ),
        tmp_path,
    )
    names, flags = added.splitlines()
    assert set(ast.literal_eval(names)) - {"torch", "numpy"} == {"mla_ops"}
    assert flags == "False False"


def test_ops_run_where_only_torch_is_installed(tmp_path: Path) -> None:
    run_python(
        sys.executable,
        textwrap.dedent(
            """
            import sys

            class OnlyTorch:
                absent = {"transformers", "triton", "matplotlib", "rich", "typer", "gguf"}

                def find_spec(self, name, path=None, target=None):
                    if name.partition(".")[0] in self.absent:
                        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

            sys.meta_path.insert(0, OnlyTorch())
            import torch
            import mla_ops

            query, w_kv_b = torch.randn(1, 3, 2, 12), torch.randn(3 * (8 + 6), 16)
            kv_c, k_pe = torch.randn(1, 5, 16), torch.randn(1, 5, 4)
            out, lse = mla_ops.mla_attention(query, kv_c, k_pe, w_kv_b, softmax_scale=0.3)
            assert out.shape == (1, 3, 2, 6), out.shape
            assert out.isfinite().all() and lse.isfinite().all()
            """
        ),
        tmp_path,
    )


@pytest.mark.parametrize("name", mla_ops.__all__)
def test_public_name_is_documented(name: str) -> None:
    value = getattr(mla_ops, name)
    assert (inspect.getdoc(value) or "").strip()
    assert inspect.getdoc(value) != inspect.getdoc(type(value)), "only its class is documented"


def test_public_names_are_visible() -> None:
    # A name that is loaded on demand has to be listed by __dir__ as well.
    assert set(mla_ops.__all__) - set(dir(mla_ops)) == set()


def test_version_stands_in_one_place_and_in_the_changelog() -> None:
    assert "version" in PYPROJECT["project"]["dynamic"]
    assert SETUPTOOLS["dynamic"]["version"] == {"attr": "mla_ops.__version__"}
    tree = ast.parse((ROOT / "mla_ops" / "__init__.py").read_text("utf-8"))
    literal = [
        node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
        if isinstance(node.value, ast.Constant)
    ]
    assert literal == [mla_ops.__version__], "setuptools reads a literal, once, without importing"
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    is_release = re.fullmatch(r"\d+\.\d+\.\d+", mla_ops.__version__)
    assert mla_ops.__version__ in headings if is_release else headings[0] == "Unreleased"


def test_constraints_pin_every_development_package() -> None:
    pins = {}
    for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            pins[re.sub(r"[-_.]+", "-", name).lower()] = version
    assert not [pin for pin in pins.items() if "+" in pin[1]], "a local version ties to one build"
    named = {
        re.sub(r"[-_.]+", "-", re.split(r"[\[>;= ]", requirement)[0]).lower()
        for extra in ("bench", "demo", "dev", "hf", "test")
        for requirement in PYPROJECT["project"]["optional-dependencies"][extra]
    }
    assert named - {"mla-ops"} - set(pins) == set()
