"""The rules of the layout that no type checker sees."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "autoflash"
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = MODULES + sorted((ROOT / "tests").rglob("*.py"))

# Which parts of the package may import what, by path below autoflash/.
HOMES = {
    "jinja2": ("codegen/",),
    "optuna": ("search/sampler.py",),
    "sqlalchemy": ("db/",),
    "alembic": ("db/",),
    "triton": ("runtime/",),
    "torch": (
        "attention.py",
        "arguments.py",
        "autograd.py",
        "calls.py",
        "control.py",
        "ops.py",
        "extras.py",
        "evaluate/",
        "runtime/",
        "dispatch/resolve.py",
    ),
    "click": ("cli/",),
    "rich": ("cli/",),
    "platformdirs": ("paths.py",),
}


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _imported(tree: ast.AST) -> Iterator[str]:
    """Top-level packages that a module imports, wherever in it, unless for type checkers only."""
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_each_dependency_is_imported_only_at_its_home(path: Path) -> None:
    below = path.relative_to(PACKAGE).as_posix()

    strays = {
        dependency
        for dependency in _imported(ast.parse(path.read_text()))
        if dependency in HOMES and not below.startswith(HOMES[dependency])
    }

    assert strays == set()


def test_the_language_of_expressions_takes_the_standard_library_alone() -> None:
    modules = [path for path in MODULES if path.parent.name == "expression"]

    imported = {name for path in modules for name in _imported(ast.parse(path.read_text()))}

    assert modules
    assert imported <= {*sys.stdlib_module_names, "autoflash"}


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_environment_variables_are_read_in_paths_alone(path: Path) -> None:
    reads = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        and node.attr in ("environ", "getenv", "environb")
    ]

    assert not reads or path == PACKAGE / "paths.py"


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_no_module_is_longer_than_500_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 500


def test_imports_flow_one_way() -> None:
    checker = Path(sys.executable).with_name("lint-imports")

    done = subprocess.run([checker, "--no-cache"], cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "statement",
    [
        "import autoflash; autoflash.attention",
        "import autoflash.attention; autoflash.attention",
        "from autoflash import attention",
        "from autoflash.attention import attention",
    ],
)
def test_importing_the_package_loads_no_tuner(statement: str) -> None:
    heavy = "('optuna', 'sqlalchemy', 'alembic', 'jinja2', 'triton', 'torch._dynamo', 'torch._inductor')"

    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\nimport sys\nprint([name for name in {heavy} if name in sys.modules])"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_importing_the_package_touches_no_file(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import autoflash, torch; assert not torch.cuda.is_initialized()"],
        env={"HOME": str(tmp_path), "PATH": "/nowhere", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )

    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
