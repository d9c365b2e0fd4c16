"""Processes that use one database at the same time. They are forked, so that a test does not pay for imports."""

from __future__ import annotations

import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from autoflash.db.repository import Repository
from tests.factories import make_trial, make_variant

# Longer than any database waits for another process.
_PATIENCE_S = 400.0


def start(works: Sequence[Callable[[], object]], errors: Path) -> list[int]:
    """Run each function in a process of its own, all from one moment on.

    Args:
        works: What to run.
        errors: File that tracebacks are appended to.

    Returns:
        Process ids, for :func:`wait`.
    """
    moment = time.time() + 0.1
    children = []
    for work in works:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                time.sleep(max(0.0, moment - time.time()))
                work()
                code = 0
            except BaseException:
                with errors.open("a") as file:
                    file.write(traceback.format_exc())
            finally:
                os._exit(code)
        children.append(child)
    return children


def wait(children: Sequence[int]) -> list[int]:
    """Exit status of each process; those that do not end are killed in the end."""
    deadline = time.monotonic() + _PATIENCE_S
    statuses: dict[int, int] = {}
    while len(statuses) < len(children):
        for child in children:
            if child not in statuses and (found := os.waitpid(child, os.WNOHANG))[0]:
                statuses[child] = found[1]
        if time.monotonic() > deadline:
            for child in set(children) - set(statuses):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return [statuses[child] for child in children]


def wait_until(condition: Callable[[], bool]) -> None:
    """Ask again and again, so that a failure elsewhere ends a test."""
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def write(place: Path | str, index: int, each: int) -> None:
    """Do as a tuner does: open, claim and record ``each`` trials of a list that all writers share, close."""
    candidates = [make_variant(num_stages=stages) for stages in range(100)]
    random.Random(index).shuffle(candidates)
    recorded = 0
    with Repository.open(str(place)) as repository:
        for variant in candidates:
            trial = make_trial(variant=variant, seed=index)
            claim = repository.claim(trial.cell, variant, trial.environment)
            if claim is None:
                continue
            with claim:
                assert claim.heartbeat()
                assert repository.record(trial).seed == index, "recorded by two"
            recorded += 1
            if recorded == each:
                return
    raise AssertionError(f"only {recorded} of {each}")
