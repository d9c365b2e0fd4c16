"""Rendered text becomes a module once, from a file that Triton can read."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from autoflash import paths
from autoflash.codegen.render import RenderedSource, render
from autoflash.problem import Form, Mask, Pass
from autoflash.runtime import load as loading
from autoflash.runtime.load import load
from autoflash.variant import Family
from tests.factories import make_variant


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> RenderedSource:
    monkeypatch.setattr(loading, "_modules", {})
    return render(Form(op=Pass.FORWARD, mask=Mask.FULL), Family.TRITON, make_variant().structure)


def test_module_comes_from_the_cache_folder(source: RenderedSource) -> None:
    module = load(source)

    assert module.__file__ == str(paths.cache_dir() / "sources" / f"{source.name}.py")
    assert inspect.getsource(module) == source.text


def test_module_is_imported_once_by_many_threads(source: RenderedSource) -> None:
    with ThreadPoolExecutor(8) as pool:
        modules = set(pool.map(load, [source] * 32))

    assert len(modules) == 1


def test_module_that_fails_to_import_is_not_kept(source: RenderedSource) -> None:
    broken = dataclasses.replace(source, text="raise RuntimeError('broken')\n", name="triton_forward_broken")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            load(broken)

    assert "autoflash_generated.triton_forward_broken" not in sys.modules
