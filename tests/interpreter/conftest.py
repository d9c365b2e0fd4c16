"""Make kernels interpreted.

Triton decides when a kernel's module is imported, so this suite runs in a pytest process of its own:
``TRITON_INTERPRET=1 pytest tests/interpreter``. In any other process its tests are skipped.
"""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def _interpreted() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("run on its own: TRITON_INTERPRET=1 pytest tests/interpreter")
