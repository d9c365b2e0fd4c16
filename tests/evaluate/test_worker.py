from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autoflash.evaluate.worker import Failure, Worker, WorkerClosedError
from autoflash.trial import Status
from tests.evaluate import slow_to_import

_LONG_S = 300.0


def add(one: int, other: int) -> int:
    return one + other


def pid() -> int:
    return os.getpid()


def shout(text: str) -> str:
    print(text)
    os.write(1, b"raw bytes on standard output")
    return text


def leave(code: int) -> None:
    os._exit(code)


def crash() -> None:
    os.write(2, b"illegal memory access\n")
    os.kill(os.getpid(), signal.SIGSEGV)


def hang() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def fail() -> None:
    raise ValueError("no such tile")


def start_a_child() -> int:
    return subprocess.Popen(["sleep", "600"]).pid


def large(count: int) -> bytes:
    return bytes(count)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """Shared, since a start takes seconds: it replaces its process after each test that kills it."""
    with Worker() as worker:
        yield worker


def test_a_result_comes_back(worker: Worker) -> None:
    assert worker.call(add, _LONG_S, 2, 3) == 5
    assert worker.call(large, _LONG_S, 3_000_000) == bytes(3_000_000)


def test_one_process_serves_many_requests(worker: Worker) -> None:
    assert worker.call(pid, _LONG_S) == worker.call(pid, _LONG_S) == worker.pid != os.getpid()


def test_what_it_prints_does_not_disturb_the_answers(worker: Worker) -> None:
    assert worker.call(shout, _LONG_S, "x" * 100_000) == "x" * 100_000
    assert worker.call(add, _LONG_S, 1, 1) == 2


def test_an_exception_is_a_failure_and_the_process_goes_on(worker: Worker) -> None:
    before = worker.call(pid, _LONG_S)

    reply = worker.call(fail, _LONG_S)

    assert reply == Failure(status=Status.RUNTIME, detail="ValueError: no such tile")
    assert worker.call(pid, _LONG_S) == before


def test_an_exit_is_a_failure_with_its_status_and_the_process_is_replaced(worker: Worker) -> None:
    reply = worker.call(leave, _LONG_S, 3)

    assert isinstance(reply, Failure)
    assert (reply.status, reply.detail) == (Status.RUNTIME, "the worker exited with status 3")
    assert worker.call(add, _LONG_S, 1, 1) == 2


def test_a_crash_is_explained_by_the_signal_and_the_last_words(worker: Worker) -> None:
    reply = worker.call(crash, _LONG_S)

    assert isinstance(reply, Failure)
    assert reply.detail == "the worker was killed by SIGSEGV: illegal memory access"


def test_a_hang_is_killed_after_its_time(worker: Worker) -> None:
    worker.start()
    before = worker.pid

    reply = worker.call(hang, 0.5)

    assert isinstance(reply, Failure)
    assert (reply.status, reply.detail) == (Status.TIMEOUT, "no answer within 0.5 s; killed")
    assert worker.pid is None
    assert before is not None
    assert not _is_running(before)


def test_the_time_for_imports_is_not_the_requests() -> None:
    """The module that this function lies in is imported first, and takes longer than the function may."""
    with Worker() as worker:
        reply = worker.call(slow_to_import.answer, 2.0)

        assert reply == 42
        assert worker.call(slow_to_import.answer, 2.0) == 42


def test_a_worker_that_is_interrupted_before_it_starts_never_does() -> None:
    worker = Worker()

    worker.interrupt()

    with pytest.raises(WorkerClosedError):
        worker.start()
    assert worker.pid is None


def test_a_worker_that_is_interrupted_while_it_starts_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    started: list[subprocess.Popen[bytes]] = []

    def popen(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(*arguments, **options))
        worker.interrupt()
        return started[0]

    monkeypatch.setattr(
        "autoflash.evaluate.worker.subprocess", SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL)
    )

    with pytest.raises(WorkerClosedError):
        worker.start()
    assert worker.pid is None
    assert started[0].poll() is not None


def test_closing_kills_everything_that_it_started_for_good() -> None:
    worker = Worker()
    grandchild = worker.call(start_a_child, _LONG_S)
    child = worker.pid

    worker.close()

    assert isinstance(grandchild, int)
    assert child is not None
    assert not _is_running(child)
    # Killed at the same time, and collected by whoever inherits it.
    assert _ends(grandchild)
    with pytest.raises(WorkerClosedError):
        worker.call(add, _LONG_S, 1, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux's")
def test_the_child_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = (
        f"import sys, os, threading; sys.path[:] = {sys.path!r}\n"
        "from autoflash.evaluate.worker import Worker\n"
        "from tests.evaluate.test_worker import hang\n"
        "worker = Worker(); worker.start(); print(worker.pid, flush=True)\n"
        "worker.call(hang, 600.0)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())

    parent.kill()
    parent.communicate()

    assert _ends(child)


def _is_running(process: int) -> bool:
    """Whether a process exists and is not a zombie."""
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def _ends(process: int) -> bool:
    deadline = time.monotonic() + 120.0
    while _is_running(process) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not _is_running(process)
