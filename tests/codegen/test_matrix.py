"""Every structure in every form: it renders, always to the same bytes, and reads like code written by hand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import jinja2.meta
import pytest

from autoflash import paths
from autoflash.codegen.environment import environment
from autoflash.codegen.render import RenderedSource, render
from autoflash.codegen.store import write
from tests.codegen.structures import FAMILIES, cases

# One process renders them all, for whichever of these tests.
pytestmark = pytest.mark.xdist_group("matrix")

HEADER_LINES = 6
FOLDERS = ("common", "triton", "gluon_sm90", "torch")


@pytest.fixture(scope="module")
def sources() -> list[RenderedSource]:
    return [render(*case) for case in cases()]


@pytest.fixture(scope="module")
def folder(sources: list[RenderedSource], tmp_path_factory: pytest.TempPathFactory) -> Path:
    created = tmp_path_factory.mktemp("rendered")
    for source in sources:
        write(source, created)
    return created


def test_rendering_again_gives_the_same_bytes(sources: list[RenderedSource]) -> None:
    environment.cache_clear()

    for source in sources:
        assert render.__wrapped__(source.form, source.family, source.structure) == source


def test_every_family_has_structures_for_both_passes(sources: list[RenderedSource]) -> None:
    assert {(source.family, source.form.op.value) for source in sources} == {
        (family, op) for family in FAMILIES for op in ("forward", "backward")
    }


def test_header_has_the_same_length_everywhere(sources: list[RenderedSource]) -> None:
    for source in sources:
        lines = source.text.splitlines()
        assert all(line.startswith("# ") for line in lines[:HEADER_LINES]), source.structure
        assert lines[HEADER_LINES].startswith('"""'), source.structure


def test_kernels_use_no_block_pointers(sources: list[RenderedSource]) -> None:
    for source in sources:
        assert not re.search(r"\.(make_block_ptr|advance)\b", source.text), source.structure


@pytest.mark.parametrize(
    "command",
    [["format", "--check", "--line-length", "120"], ["check", "--select", "F"]],
    ids=["formatted", "linted"],
)
def test_rendered_files_need_no_formatter_and_no_linter(command: list[str], folder: Path) -> None:
    outcome = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "--isolated", "--no-cache", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_templates_look_at_the_problem_and_the_structure_alone() -> None:
    allowed = {"problem", "structure", "fail", "expressions"}
    for path in template_files():
        text = path.read_text(encoding="utf-8")
        used = jinja2.meta.find_undeclared_variables(environment().parse(text))
        header = {"template", "digest", "command"} if path.name == "_header.py.j2" else set()
        assert used <= allowed | header, path


def test_every_partial_says_first_what_it_emits() -> None:
    for path in template_files():
        if path.name.startswith("_"):
            assert path.read_text(encoding="utf-8").startswith("{#- Emits "), path


def test_tags_stand_alone_at_the_start_of_their_line() -> None:
    for path in template_files():
        for line in path.read_text(encoding="utf-8").splitlines():
            if "{%" in line:
                assert line.startswith("{% "), f"{path}: {line}"
                assert line.endswith(" %}"), f"{path}: {line}"


def template_files() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (paths.templates_dir() / folder).glob("*.j2"))
