"""What the tests on a GPU share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from autoflash.device import Device
from autoflash.evaluate.compile_pool import CompilePool, default_processes
from autoflash.evaluate.grid import full_cases
from autoflash.evaluate.verify import verify
from autoflash.problem import Form, Problem
from autoflash.runtime.bind import bind
from autoflash.trial import Level, Verification
from autoflash.variant import Variant

Gate = Callable[[Problem, Variant, Device], Verification]


@pytest.fixture
def alone() -> None:
    """For a test that times a GPU or counts what it moves: other processes of the run would disturb it."""
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        pytest.skip("needs the GPU for itself: run it without -n")


@pytest.fixture(scope="session")
def gate() -> Iterator[Gate]:
    """The whole gate for a variant. Its kernels, dozens, are compiled in parallel first, as before a tuner's finals."""
    processes = default_processes() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    with CompilePool(max(1, processes), timeout_s=600.0) as pool:

        def verified(problem: Problem, variant: Variant, device: Device) -> Verification:
            pool.prepare(full_cases(problem), variant, device)()
            return verify(bind(Form.of(problem), variant, device), problem, Level.FULL, device=device)

        yield verified
