"""What the driver is given by Triton's own launcher, compiled here, and by ours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
COMPILER = shutil.which("gcc") or shutil.which("cc")

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles kernels"),
    pytest.mark.skipif(COMPILER is None, reason="Triton's launcher takes a C compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="has a driver of that name: see tests/gpu/test_native.py"),
]

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, cache_folder: Path) -> dict[str, list[dict[str, Any]]]:
    """By kernel, what the driver was given: by Triton's launcher first, then by ours."""
    folder = tmp_path_factory.mktemp("driver")
    library = folder / "libcuda.so.1"
    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    flags = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{headers}"]
    subprocess.run([str(COMPILER), *flags, str(HERE / "fake_libcuda.c"), "-o", str(library)], check=True)
    environment = os.environ | {
        "PYTHONPATH": str(HERE.parent.parent),
        "TRITON_LIBCUDA_PATH": str(folder),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "AUTOFLASH_CACHE_DIR": str(cache_folder),
    }
    command = [sys.executable, "-m", "tests.runtime.both_launchers", str(library)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=HERE.parent.parent)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("kernel", ["pointers", "descriptors", "gluon"])
def test_native_launch_gives_the_driver_what_tritons_launcher_does(
    kernel: str, seen: dict[str, list[dict[str, Any]]]
) -> None:
    by_triton, native = seen[kernel]

    assert native == by_triton
    assert len(native["parameters"]) == 2 * native["expected_bytes"]
    # The grid and the stream, so that what is equal is not empty.
    assert native["launched"][0] == 5
    assert native["launched"][7] == 2**40 + 77
