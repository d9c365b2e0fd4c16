"""What tests of the runtime share: a GPU that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from autoflash.runtime.libcuda import libcuda
from tests.runtime.fake_gpu import STREAM, FakeGpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """Put a fake GPU where Triton and torch look for a real one; kernels are launched by Triton."""
    from triton.runtime import driver

    fake = FakeGpu()
    utils = SimpleNamespace(load_binary=fake.load_binary, fill_tma_descriptor=fake.encode)
    active = SimpleNamespace(utils=utils, launcher_cls=fake.launcher)
    monkeypatch.setattr(type(driver), "active", active)
    monkeypatch.setenv("AUTOFLASH_LAUNCHER", "triton")
    libcuda.cache_clear()
    monkeypatch.setattr(torch.cuda, "device", fake.make_current)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: fake.current, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM + index, raising=False)
    yield fake
    libcuda.cache_clear()
