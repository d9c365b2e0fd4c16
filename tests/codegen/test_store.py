"""Rendered files: whole or not there, and left alone where the text is the same."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from autoflash import paths
from autoflash.codegen.render import RenderedSource, render
from autoflash.codegen.store import write
from autoflash.problem import Form, Mask, Pass
from autoflash.variant import Family
from tests.factories import make_variant


@pytest.fixture
def source() -> RenderedSource:
    return render(Form(op=Pass.FORWARD, mask=Mask.FULL), Family.TRITON, make_variant().structure)


def test_file_lies_in_the_cache_and_is_named_by_digest(source: RenderedSource) -> None:
    path = write(source)

    assert path == paths.cache_dir() / "sources" / f"triton_forward_{source.digest}.py"
    assert path.read_text(encoding="utf-8") == source.text


def test_same_text_is_not_written_again(source: RenderedSource, tmp_path: Path) -> None:
    path = write(source, tmp_path)
    before = path.stat()

    assert write(source, tmp_path).stat() == before


def test_damaged_file_is_replaced(source: RenderedSource, tmp_path: Path) -> None:
    path = write(source, tmp_path)
    path.write_text("", encoding="utf-8")

    assert write(source, tmp_path).read_text(encoding="utf-8") == source.text


def test_many_writers_leave_one_whole_file(source: RenderedSource, tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        written = list(pool.map(lambda _: write(source, tmp_path).read_text(encoding="utf-8"), range(32)))

    assert set(written) == {source.text}
    assert [path.name for path in tmp_path.iterdir()] == [f"{source.name}.py"]


def test_failed_write_leaves_nothing_behind(source: RenderedSource, tmp_path: Path) -> None:
    unwritable = dataclasses.replace(source, text="\ud800")

    with pytest.raises(UnicodeEncodeError):
        write(unwritable, tmp_path)

    assert list(tmp_path.iterdir()) == []
