"""What every test gets: a seed, a place of its own for files, and outputs that are NaN until a kernel writes them."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

# Tests run side by side, and start processes that compute: more threads than cores only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for the whole run: it is addressed by content, and compiling anew for each test takes minutes."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _private_files(tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the home of the person who runs it, or heeds their settings."""
    for name in ("AUTOFLASH_TABLE", "AUTOFLASH_VENDOR", "AUTOFLASH_LOG", "AUTOFLASH_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AUTOFLASH_DB", str(tmp_path / "autoflash" / "tuning.sqlite"))
    monkeypatch.setenv("AUTOFLASH_CACHE_DIR", str(cache_folder))


@pytest.fixture(autouse=True)
def _shared_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test gives a GPU's memory back: those that run beside it need some too."""
    yield
    if request.node.get_closest_marker("gpu") is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _empty_is_nan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what torch.empty and its kin return with NaN: an element that no kernel wrote cannot pass unseen.

    Tests of what a call costs are marked ``as_allocated``: filling is another launch.
    """
    if request.node.get_closest_marker("as_allocated") is not None:
        return
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ):
        monkeypatch.setattr(owner, name, _filled_with_nan(getattr(owner, name)))


@pytest.fixture(scope="module")
def no_records() -> Iterator[None]:
    """Choices are made anew, and kept for the whole module: each form is verified once."""
    import autoflash

    autoflash.forget()
    yield
    autoflash.forget()


def _filled_with_nan(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocate_nan(*args: object, **options: object) -> torch.Tensor:
        tensor = allocate(*args, **options)
        if tensor.is_floating_point():
            # Not in place on the tensor itself: a leaf that requires gradients refuses that.
            tensor.detach().fill_(float("nan"))
        return tensor

    return allocate_nan
