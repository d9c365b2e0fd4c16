"""Tasks, each with the process of its thread."""

from __future__ import annotations

import atexit
import os
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from autoflash.evaluate.worker import Failure, Worker
from autoflash.evaluate.worker_pool import WorkerPool
from autoflash.trial import Status


def _pid(worker: Worker) -> int | Failure:
    return worker.call(os.getpid, 60.0)


def test_a_thread_keeps_its_process_and_there_are_no_more_than_asked_for() -> None:
    with WorkerPool(1, name="test") as pool:
        found = [future.result() for future in [pool.submit(_pid) for _ in range(3)]]

    assert len(set(found)) == 1
    assert os.getpid() not in found


def test_a_process_that_dies_fails_its_task_alone() -> None:
    with WorkerPool(1, name="test") as pool:
        died = pool.submit(lambda worker: worker.call(os._exit, 60.0, 3))
        after = pool.submit(_pid)

        assert died.result() == Failure(status=Status.RUNTIME, detail="the worker exited with status 3")
        assert isinstance(after.result(), int)


def test_closing_kills_what_runs_and_forgets_what_waits() -> None:
    running = threading.Event()

    def sleep(worker: Worker) -> object:
        worker.start()
        running.set()
        return worker.call(time.sleep, 600.0, 600.0)

    with WorkerPool(1, name="test") as pool:
        first, second = pool.submit(sleep), pool.submit(_pid)
        running.wait(120.0)

    assert isinstance(first.result(), Failure)
    with pytest.raises(CancelledError):
        second.result()


def test_finished_processes_have_ended_by_themselves(tmp_path: Path) -> None:
    note = tmp_path / "note"
    with WorkerPool(2, name="test") as pool:
        for future in [pool.submit(lambda worker: worker.call(_note_at_exit, 60.0, note)) for _ in range(2)]:
            future.result()
        pool.finish()

    assert note.read_text().startswith("ended\n")


def _note_at_exit(path: Path) -> None:
    atexit.register(lambda: path.open("a").write("ended\n"))
