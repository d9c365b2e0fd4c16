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


def _sanitize(path: Path, log: str, *arguments: str, rc: int = 0) -> subprocess.CompletedProcess[str]:
    """Run scripts/sanitize with a sanitizer that notes its command and writes a log."""
    told = 'for word; do case "$word" in */%p) log=${word%/%p};; esac; done'
    _program(path / "compute-sanitizer", f'echo "$@" > {path}/command; {told}; {log}; exit {rc}')
    return subprocess.run(
        ["/bin/bash", str(SCRIPTS / "sanitize"), *arguments],
        env={"PATH": f"{path}:/usr/bin:/bin", "HOME": str(path)},
        capture_output=True,
        text=True,
    )


def test_a_clean_run_of_the_sanitizer_says_so(tmp_path: Path) -> None:
    done = _sanitize(tmp_path, 'echo "= ERROR SUMMARY: 0 errors" > $log/1', "memcheck", "--jobs", "8")

    assert (done.returncode, done.stdout) == (0, "memcheck: nothing found\n")
    assert "--tool memcheck" in (command := (tmp_path / "command").read_text())
    assert command.endswith("verify --all --bare --jobs 8\n")


def test_races_are_asked_of_the_triton_family_alone(tmp_path: Path) -> None:
    done = _sanitize(tmp_path, 'echo "= RACECHECK SUMMARY: 0 hazards displayed" > $log/1', "racecheck")

    assert done.returncode == 0
    assert (tmp_path / "command").read_text().endswith("verify --all --bare --family triton\n")


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ('echo "= ERROR SUMMARY: 0 errors" > $log/1; echo "= ERROR SUMMARY: 3 errors" > $log/2', "3 errors"),
        ('echo "= RACECHECK SUMMARY: 2 hazards displayed (2 errors)" > $log/1', "2 hazards"),
        (":", "no kernel ran"),
        ('echo "= ERROR SUMMARY: 0 errors" > $log/1; echo "= Invalid __global__ read" > $log/2', "Invalid"),
    ],
)
def test_what_the_sanitizer_finds_is_shown_and_fails(tmp_path: Path, log: str, words: str) -> None:
    done = _sanitize(tmp_path, log, "memcheck")

    assert done.returncode == 1
    assert words in done.stderr


def test_wrong_kernels_fail_a_clean_run_too(tmp_path: Path) -> None:
    assert _sanitize(tmp_path, 'echo "= ERROR SUMMARY: 0 errors" > $log/1', "memcheck", rc=1).returncode == 1


def test_the_sanitizer_needs_a_tool_and_itself(tmp_path: Path) -> None:
    assert "usage" in _sanitize(tmp_path, ":", "valgrind").stderr
    done = subprocess.run(
        ["/bin/bash", str(SCRIPTS / "sanitize"), "memcheck"],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, "CUDA toolkit" in done.stderr) == (2, True)
