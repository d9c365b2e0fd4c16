"""What tests of the runtime share: a GPU that is not there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.runtime.fake_gpu import STREAM, FakeGpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Put a fake GPU where Triton and torch look for a real one."""
    from triton.runtime import driver

    fake = FakeGpu()
    utils = SimpleNamespace(load_binary=fake.load_binary, fill_tma_descriptor=fake.encode)
    active = SimpleNamespace(utils=utils, launcher_cls=fake.launcher)
    monkeypatch.setattr(type(driver), "active", active)
    monkeypatch.setattr(torch.cuda, "device", fake.make_current)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: fake.current, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM + index, raising=False)
    return fake
