"""The shape of the repository: imports point one way, modules are small and say what they are.

Reads source text only (no import of the code under test), so a broken module is reported by what is
wrong with it. The order of the layers is the one of docs/architecture.md.
"""

from __future__ import annotations

import ast
import fnmatch
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "dit_graphs": "dit_graphs",
    "pipelines": "dit_graphs.pipelines",
    "app": "dit_graphs.app",
}
MAX_LINES = 400
NOT_INSTALLED = (ROOT / "app" / "demo_model" / "training", ROOT / "app" / "space")

# Lowest first; modules on one line may know each other, one way.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("dit_graphs.errors",),
    ("dit_graphs.signature", "dit_graphs.breaks"),
    ("dit_graphs.observer", "dit_graphs.memory"),
    ("dit_graphs.backends",),
    ("dit_graphs.cache",),
    ("dit_graphs.runner",),
    ("dit_graphs.llm",),
    ("dit_graphs.pipelines",),
    ("dit_graphs.app",),
)
FOREIGN_TO_CORE = {"diffusers", "transformers", "accelerate", "peft", "gradio", "typer", "fastapi"}
EXTRAS = (
    "gradio",
    "imageio",
    "imageio_ffmpeg",
    "matplotlib",
    "prometheus_client",
    "fastapi",
    "uvicorn",
)


def _sources() -> list[Path]:
    return [path for folder in PACKAGES for path in sorted((ROOT / folder).rglob("*.py"))]


def _module_name(path: Path) -> str:
    top, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([PACKAGES[top], *(part for part in rest if part != "__init__")])


@cache
def _modules() -> dict[str, Path]:
    return {_module_name(path): path for path in _sources()}


def _imported_names(path: Path) -> Iterator[str]:
    """Every dotted name the file imports anywhere, also inside functions and TYPE_CHECKING."""
    package = _module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{stem}.{alias.name}" for alias in node.names)


def _resolve(name: str) -> str | None:
    """The module of ours that an imported dotted name lives in, or None."""
    while name:
        if name in _modules():
            return name
        name = name.rpartition(".")[0]
    return None


@cache
def _graph() -> dict[str, frozenset[str]]:
    """module -> the modules of ours that it imports; the facade `dit_graphs` is no layer."""
    edges = {}
    for name, path in _modules().items():
        if name != "dit_graphs":
            found = {_resolve(imported) for imported in _imported_names(path)}
            edges[name] = frozenset(found - {None, name, "dit_graphs"})
    return edges


def _reachable(start: str) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        for other in _graph().get(todo.pop(), ()):
            if other not in seen:
                seen.add(other)
                todo.append(other)
    return seen


def _layer(name: str) -> int | None:
    best = None
    for rank, members in enumerate(LAYERS):
        if any(name == member or name.startswith(f"{member}.") for member in members):
            best = rank
    return best


def test_there_are_modules_to_check() -> None:
    assert {"dit_graphs.errors", "dit_graphs.pipelines", "dit_graphs.app"} <= set(_modules())


def test_imports_point_one_way() -> None:
    wrong = [
        f"{name} reaches {other}"
        for name in _modules()
        for other in _reachable(name)
        if (low := _layer(name)) is not None and (high := _layer(other)) is not None and low < high
    ]
    assert not wrong, wrong


def test_no_module_reaches_itself() -> None:
    cycles = [name for name in _graph() if name in _reachable(name)]
    assert not cycles, cycles


def test_layers_without_a_rank_stay_in_the_core() -> None:
    """A module outside the table (config, stats, …) is core: it never reaches beyond it."""
    outer = _layer("dit_graphs.llm")
    assert outer is not None
    wrong = [
        f"{name} reaches {other}"
        for name in _modules()
        if name != "dit_graphs" and _layer(name) is None
        for other in _reachable(name)
        if (rank := _layer(other)) is not None and rank >= outer
    ]
    assert not wrong, wrong


def test_core_never_imports_the_facade() -> None:
    """`from dit_graphs import X` inside the core would import the package that imports it."""
    wrong = [
        f"{name}: {imported}"
        for name, path in _modules().items()
        if path.is_relative_to(ROOT / "dit_graphs") and name != "dit_graphs"
        for imported in _imported_names(path)
        if _resolve(imported) == "dit_graphs"
    ]
    assert not wrong, wrong


def test_core_knows_nothing_of_diffusers() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {imported}"
        for path in sorted((ROOT / "dit_graphs").rglob("*.py"))
        for imported in _imported_names(path)
        if imported.split(".")[0] in FOREIGN_TO_CORE
    ]
    assert not wrong, wrong


def test_sources_use_the_installed_names() -> None:
    """`import pipelines` works in the repository and breaks in every user's folder of that name."""
    wrong = [
        f"{path.relative_to(ROOT)}: {imported}"
        for path in [*_sources(), *ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/**/*.py")]
        for imported in (_imported_names(path) if path in _sources() else _absolute_imports(path))
        if imported.split(".")[0] in {"pipelines", "app"}
    ]
    assert not wrong, wrong


def _absolute_imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _checked_files() -> list[Path]:
    folders = (*PACKAGES, "tests", "benchmarks")
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", _checked_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_module_is_small_and_has_a_docstring(path: Path) -> None:
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)), "a module opens with what it owns"
    num_lines = text.count("\n")
    assert num_lines <= MAX_LINES, f"{num_lines} lines > {MAX_LINES}: split it"


def test_tests_are_not_a_package() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


@cache
def _setuptools_table() -> dict[str, dict[str, list[str]]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_every_folder_of_modules_is_installed() -> None:
    folders = {
        _module_name(path.parent / "__init__.py")
        for path in _sources()
        if not any(map(path.is_relative_to, NOT_INSTALLED))
    }
    assert folders == set(_setuptools_table()["packages"])


def test_every_data_file_is_installed() -> None:
    patterns = _setuptools_table()["package-data"]["dit_graphs.app"]
    left_out = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "app").rglob("*")
        if path.is_file()
        and path.suffix not in {".py", ".pyc"}
        and not any(map(path.is_relative_to, NOT_INSTALLED))
        # setuptools' ** also matches no folder at all; fnmatch's does not.
        and not any(
            fnmatch.fnmatch(str(path.relative_to(ROOT / "app")), form)
            for pattern in patterns
            for form in (pattern, pattern.replace("**/", ""))
        )
    ]
    assert not left_out, left_out


def _run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)


def test_importing_dit_graphs_does_not_import_diffusers() -> None:
    done = _run("import sys, dit_graphs; print([m for m in sys.argv[1:] if m in sys.modules])",
                "diffusers", "transformers", "gradio", "typer")  # fmt: skip
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_help_works_without_the_extras() -> None:
    code = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {EXTRAS!r}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
sys.argv = ["dit-graphs", "--help"]
from dit_graphs.app.cli import main
main()
"""
    done = _run(code)
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout
