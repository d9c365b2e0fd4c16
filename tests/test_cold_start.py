"""Whole tuners, each a process of its own, on one database: cold, all at once, and killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from autoflash.db.repository import Repository
from autoflash.trial import Trial
from autoflash.variant import Family

ROOT = Path(__file__).parents[1]
PROCESSES = 16
# One cell that is cheap to verify, whose space has room for what all processes want.
CELL = ["--device", "cpu", "--pass", "forward", "--dtype", "fp32", "--head-dim", "16", "--full", "--seqlen", "256"]


def _start(arguments: Sequence[str], database: Path, cache: Path) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "AUTOFLASH_DB": str(database),
        "AUTOFLASH_CACHE_DIR": str(cache),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "autoflash.cli", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _generated(database: Path) -> list[Trial]:
    with Repository.open(str(database), read_only=True) as repository:
        return [trial for trial in repository.trials() if trial.variant.family is not Family.VENDOR]


def _cold_round(database: Path, cache: Path, each: int) -> None:
    tuners = [
        _start(["tune", *CELL, "--more", str(each), "--seed", str(seed)], database, cache) for seed in range(PROCESSES)
    ]
    outcomes = [(tuner.communicate(timeout=560), tuner.returncode) for tuner in tuners]

    assert [(code, error[-2000:]) for (_, error), code in outcomes if code != 0] == []
    trials = _generated(database)
    assert len(trials) == PROCESSES * each
    assert len({trial.variant for trial in trials}) == len(trials)
    assert len({trial.id for trial in trials}) == len(trials)


@pytest.mark.parametrize("number", range(3))
def test_case_a01_a36_cold_tuners_share_one_empty_database(number: int, tmp_path: Path) -> None:
    _cold_round(tmp_path / "tuning.sqlite", tmp_path / "cache", each=1)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(30))
def test_case_a01_cold_tuners_share_one_empty_database_for_long(number: int, tmp_path: Path) -> None:
    _cold_round(tmp_path / "tuning.sqlite", tmp_path / "cache", each=3)


def test_case_a21_a_killed_tuner_loses_at_most_the_trial_in_flight(tmp_path: Path) -> None:
    database, cache = tmp_path / "tuning.sqlite", tmp_path / "cache"
    arguments = ["tune", *CELL, "--trials", "12", "--json"]
    killed = _start(arguments, database, cache)
    deadline = time.monotonic() + 240
    while not (Repository.exists(str(database)) and len(_generated(database)) >= 3):
        assert killed.poll() is None, killed.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)

    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    before = _generated(database)
    resumed = _start(arguments, database, cache)
    printed, complaints = resumed.communicate(timeout=500)

    after = _generated(database)
    assert killed.returncode == -signal.SIGKILL
    assert resumed.returncode == 0, complaints
    assert {trial.id for trial in before} <= {trial.id for trial in after}
    assert len(after) == len({trial.variant for trial in after}) == 12
    assert json.loads(printed)


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_tuner_keeps_what_it_found_and_says_so(sign: signal.Signals, tmp_path: Path) -> None:
    database, cache = tmp_path / "tuning.sqlite", tmp_path / "cache"
    tuner = _start(["tune", *CELL, "--trials", "90"], database, cache)
    deadline = time.monotonic() + 240
    while not (Repository.exists(str(database)) and len(_generated(database)) >= 2):
        assert tuner.poll() is None, tuner.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)

    tuner.send_signal(sign)
    _, complaints = tuner.communicate(timeout=60)

    assert tuner.returncode == 130
    assert "Traceback" not in complaints
    assert len(_generated(database)) >= 2
