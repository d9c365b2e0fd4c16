"""The choices that the scripts make on a fresh machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


def _shell(command: str, path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/bash", "-c", f"set -euo pipefail; SCRIPTS={SCRIPTS}; source {SCRIPTS}/venv.sh; {command}"],
        env={"PATH": f"{path}:/usr/bin:/bin", "HOME": str(path), **variables},
        capture_output=True,
        text=True,
    )


def _program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_an_interpreter_that_does_not_work_is_passed_over(tmp_path: Path) -> None:
    _program(tmp_path / "python3", "echo 'command not found' >&2; exit 127")
    _program(tmp_path / "python3.12", "exit 1")
    (tmp_path / "python3.11").symlink_to(sys.executable)

    done = _shell("find_python", tmp_path)

    assert done.stdout.strip() == "python3.11"


def test_the_interpreter_that_was_asked_for_goes_first(tmp_path: Path) -> None:
    done = _shell("find_python", tmp_path, PYTHON=sys.executable)

    assert done.stdout.strip() == sys.executable


def test_without_a_usable_interpreter_the_script_says_what_to_do(tmp_path: Path) -> None:
    for name in ("python3", "python3.10", "python3.11", "python3.12", "python3.13"):
        _program(tmp_path / name, "exit 1")

    done = _shell("make_venv venv", tmp_path)

    assert done.returncode == 2
    assert "set PYTHON" in done.stderr


@pytest.mark.skipif(Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists(), reason="there is a GPU")
def test_the_cpu_build_is_tried_first_then_its_own_index_then_the_default(tmp_path: Path) -> None:
    log = tmp_path / "log"
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    _program(tmp_path / "venv" / "bin" / "python", f'echo "$@" >> {log}; case "$*" in *constraints-cpu*) exit 1;; esac')

    done = _shell(f"install_into {tmp_path}/venv .", tmp_path)

    assert done.returncode == 0
    calls = log.read_text().splitlines()
    assert ["constraints-cpu" in call for call in calls] == [True, True, False]
    assert ["whl/cpu" in call for call in calls] == [False, True, False]
    assert "default build" in done.stdout
