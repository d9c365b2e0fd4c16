"""Processes that tune into one database, without the tuning: run as ``python -m tests.db.writers FILE PROCESSES EACH``.

Each process opens the database by itself, claims and records EACH trials out of a list that all of them share, and
closes it. They are forked, so that a test pays for the imports once; the parent never opens the database.
"""

from __future__ import annotations

import os
import random
import sys
import time

from autoflash.db.repository import Repository
from tests.factories import make_trial, make_variant


def write(file: str, index: int, each: int) -> None:
    """Record ``each`` trials that no other process records."""
    candidates = [make_variant(num_stages=stages) for stages in range(4 * 16 * each)]
    random.Random(index).shuffle(candidates)
    recorded = 0
    with Repository.open(file) as repository:
        for variant in candidates:
            trial = make_trial(variant=variant, seed=index)
            claim = repository.claim(trial.cell, variant, trial.environment)
            if claim is None:
                continue
            with claim:
                assert claim.heartbeat()
                mine = repository.record(trial)
            assert mine.seed == index, "recorded by two"
            recorded += 1
            if recorded == each:
                break
    assert recorded == each


def main() -> int:
    """Fork the writers at one moment; the result is how many failed."""
    file, processes, each = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    start = time.time() + 0.2
    children = []
    for index in range(processes):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                time.sleep(max(0.0, start - time.time()))
                write(file, index, each)
                code = 0
            finally:
                if code:
                    sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]  # there is an error here
                    sys.stderr.flush()
                os._exit(code)
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


if __name__ == "__main__":
    sys.exit(main())
