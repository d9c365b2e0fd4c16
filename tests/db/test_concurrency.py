"""Many processes on one file: none of their trials is lost, doubled or numbered twice."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autoflash.db.repository import Repository
from tests.db.processes import start, wait, wait_until, write
from tests.factories import make_cell, make_decision, make_environment, make_trial, make_variant

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    # The children run nothing but SQLite and leave by os._exit.
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

PROCESSES, EACH = 16, 3


def start_writers(file: Path, processes: int, each: int) -> list[int]:
    works = [functools.partial(write, file, index, each) for index in range(processes)]
    return start(works, file.with_name("errors"))


def expect_success(children: list[int], file: Path) -> None:
    statuses = wait(children)
    errors = file.with_name("errors")
    assert (errors.read_text() if errors.exists() else "") == ""
    assert statuses == [0] * len(children)


def integrity(file: Path) -> str:
    with contextlib.closing(sqlite3.connect(file)) as connection:
        return str(connection.execute("PRAGMA integrity_check").fetchone()[0])


def expect_cold_start(file: Path) -> None:
    """Start all writers at once on a file that is empty."""
    file.touch()

    expect_success(start_writers(file, PROCESSES, EACH), file)

    with Repository.open(str(file), read_only=True) as repository:
        trials = repository.trials()
        assert repository.claimed(make_cell(), make_environment()) == []
    assert [trial.id for trial in trials] == list(range(1, PROCESSES * EACH + 1))
    assert len({trial.variant for trial in trials}) == PROCESSES * EACH
    assert integrity(file) == "ok"


@pytest.mark.parametrize("attempt", range(3))
def test_a_cold_start_of_many_loses_and_doubles_nothing(tmp_path: Path, attempt: int) -> None:
    expect_cold_start(tmp_path / "t.sqlite")


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(30))
def test_a_cold_start_of_many_loses_and_doubles_nothing_for_long(tmp_path: Path, attempt: int) -> None:
    expect_cold_start(tmp_path / "t.sqlite")


def test_case_a38_a_reader_that_dawdles_is_in_nobodys_way(repository: Repository, database: Path) -> None:
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as dawdler:
        dawdler.execute("BEGIN")
        dawdler.execute("SELECT count(*) FROM trial").fetchone()

        expect_success(start_writers(database, 2, 3), database)
        dawdler.execute("COMMIT")

    assert len(repository.trials()) == 6


def test_a_writer_outwaits_a_reader_that_keeps_the_file_out_of_wal_mode(database: Path) -> None:
    with contextlib.closing(sqlite3.connect(database, isolation_level=None, check_same_thread=False)) as dawdler:
        dawdler.execute("BEGIN")
        dawdler.execute("SELECT count(*) FROM trial").fetchone()
        timer = threading.Timer(3.0, lambda: dawdler.execute("COMMIT"))
        timer.start()

        with Repository.open(str(database)) as repository:
            recorded = repository.record(make_trial())
        timer.join()

    assert recorded.id == 1


def test_readers_see_whole_trials_while_others_write(database: Path) -> None:
    children = start_writers(database, 2, 5)
    seen: list[int] = []

    def all_seen() -> bool:
        with Repository.open(str(database), read_only=True) as reader:
            seen.append(len(reader.trials()))
        return seen[-1] == 10

    wait_until(all_seen)

    expect_success(children, database)
    assert seen == sorted(seen)


def kill_when_ready(work: Callable[[], object], errors: Path) -> None:
    """Kill a process that has done something, and would go on."""
    ready, told = os.pipe()

    def tell() -> None:
        work()
        os.write(told, b"x")
        time.sleep(600.0)

    (child,) = start([tell], errors)
    os.close(told)
    with os.fdopen(ready, "rb") as pipe:
        said = pipe.read(1)
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert said == b"x", errors.read_text()


def test_a_killed_process_loses_at_most_the_trial_in_flight(database: Path) -> None:
    def record_and_claim(index: int) -> None:
        repository = Repository.open(str(database))
        finished, unfinished = make_variant(num_stages=2 * index), make_variant(num_stages=2 * index + 1)
        repository.record(make_trial(variant=finished))
        repository.claim(make_cell(), unfinished, make_environment(), ttl_s=3600.0)

    for index in range(3):
        kill_when_ready(functools.partial(record_and_claim, index), database.with_name("errors"))

    with Repository.open(str(database)) as repository:
        assert repository.finished(make_cell(), make_environment()) == 3
        assert repository.claimed(make_cell(), make_environment()) == []
        assert repository.claim(make_cell(), make_variant(num_stages=1), make_environment()) is not None
        assert repository.record(make_trial(variant=make_variant(num_stages=1))).id == 4
    assert integrity(database) == "ok"


def test_a_process_killed_in_a_transaction_leaves_nothing_of_it(database: Path) -> None:
    open_ones = []

    def write_half() -> None:
        connection = sqlite3.connect(database, isolation_level=None)
        open_ones.append(connection)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO software (torch, driver, cuda) VALUES ('half', 'a', 'transaction')")

    kill_when_ready(write_half, database.with_name("errors"))

    with Repository.open(str(database)) as repository:
        repository.record(make_trial())
        assert len(repository.trials()) == 1
    with contextlib.closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT count(*) FROM software WHERE torch = 'half'").fetchone() == (0,)


def test_case_a46_children_of_a_fork_share_an_open_repository(repository: Repository, database: Path) -> None:
    repository.save_decision(make_decision())

    def use(index: int) -> None:
        for step in range(10):
            assert repository.decisions(environment=make_environment()) == [make_decision()]
            if step % 2 == 0:
                repository.record(make_trial(variant=make_variant(BLOCK_M=index, num_stages=step)))

    children = start([functools.partial(use, index) for index in range(8)], database.with_name("errors"))
    use(8)

    expect_success(children, database)
    assert [trial.id for trial in repository.trials()] == list(range(1, 46))
    assert integrity(database) == "ok"


def test_a_fork_waits_for_the_transaction_of_another_thread(repository: Repository, database: Path) -> None:
    stop = threading.Event()

    def write_on() -> None:
        stages = 0
        while not stop.is_set():
            repository.record(make_trial(variant=make_variant(num_stages=stages)))
            stages += 1

    def record(index: int) -> None:
        assert repository.record(make_trial(variant=make_variant(BLOCK_M=1000 + index))).id is not None

    writer = threading.Thread(target=write_on)
    writer.start()
    for index in range(5):
        expect_success(start([functools.partial(record, index)], database.with_name("errors")), database)
    stop.set()
    writer.join()

    assert integrity(database) == "ok"
