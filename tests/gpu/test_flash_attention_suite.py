"""A sample of FlashAttention's own tests, which have to be fetched: see tests/flash_attention/suite.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def test_a_sample_of_flash_attentions_tests_passes() -> None:
    pytest.importorskip("einops", reason="FlashAttention's tests import it")

    done = subprocess.run(
        [sys.executable, "-m", "tests.flash_attention.suite", "--cases", "200", "--jobs", "4", "--quiet"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=3000,
    )

    assert done.returncode == 0, done.stdout + done.stderr
