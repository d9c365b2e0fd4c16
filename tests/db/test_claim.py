from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoflash.db import claim as claims
from autoflash.db.repository import Repository
from tests.db.processes import start, wait
from tests.factories import make_cell, make_environment, make_trial, make_variant

CELL, VARIANT, ENVIRONMENT = make_cell(), make_variant(), make_environment()


def test_one_claim_at_a_time(repository: Repository) -> None:
    claim = repository.claim(CELL, VARIANT, ENVIRONMENT)

    assert claim is not None
    assert repository.claim(CELL, VARIANT, ENVIRONMENT) is None
    assert repository.claimed(CELL, ENVIRONMENT) == [VARIANT]
    claim.release()
    assert repository.claimed(CELL, ENVIRONMENT) == []
    assert repository.claim(CELL, VARIANT, ENVIRONMENT) is not None


def test_other_trials_are_free(repository: Repository) -> None:
    repository.claim(CELL, VARIANT, ENVIRONMENT)

    assert repository.claim(make_cell(head_dim=128), VARIANT, ENVIRONMENT) is not None
    assert repository.claim(CELL, make_variant(BLOCK_M=128), ENVIRONMENT) is not None
    assert repository.claim(CELL, VARIANT, make_environment(triton="3.7")) is not None


def test_a_finished_trial_is_not_claimed_again(repository: Repository) -> None:
    trial = repository.record(make_trial(source_digest="0" * 16))

    assert repository.claim(CELL, VARIANT, ENVIRONMENT) is None
    assert repository.claim(CELL, VARIANT, ENVIRONMENT, source_digest=trial.source_digest) is None
    assert repository.claim(CELL, VARIANT, ENVIRONMENT, source_digest="1" * 16) is not None


def test_a_quarantined_trial_may_be_claimed(repository: Repository) -> None:
    trial = repository.record(make_trial())
    assert trial.id is not None

    repository.mark(trial.id, "does not load")

    assert repository.claim(CELL, VARIANT, ENVIRONMENT) is not None


def test_an_expired_claim_is_taken_over_and_its_owner_learns_of_it(repository: Repository) -> None:
    old = repository.claim(CELL, VARIANT, ENVIRONMENT, ttl_s=-1.0)
    assert old is not None

    new = repository.claim(CELL, VARIANT, ENVIRONMENT)

    assert new is not None
    assert not old.heartbeat()
    old.release()
    assert new.heartbeat()


def test_a_heartbeat_renews(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(claims.time, "time", lambda: clock[0])
    claim = repository.claim(CELL, VARIANT, ENVIRONMENT, ttl_s=60.0)
    assert claim is not None

    clock[0] = 1050.0
    assert claim.heartbeat()
    clock[0] = 1100.0

    assert repository.claim(CELL, VARIANT, ENVIRONMENT) is None
    clock[0] = 1111.0
    assert repository.claim(CELL, VARIANT, ENVIRONMENT) is not None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_the_claim_of_a_dead_process_is_taken_over_at_once(repository: Repository, tmp_path: Path) -> None:
    def claim() -> None:
        assert repository.claim(CELL, VARIANT, ENVIRONMENT, ttl_s=3600.0) is not None

    assert wait(start([claim], tmp_path / "errors")) == [0]

    assert repository.claim(CELL, VARIANT, ENVIRONMENT) is not None


def test_the_claim_of_another_host_holds_until_it_expires(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as there:
        there.setattr(claims, "host_name", lambda: "elsewhere")
        there.setattr(claims.os, "getpid", lambda: 2**22 + 1)
        assert repository.claim(CELL, VARIANT, ENVIRONMENT) is not None

    assert repository.claim(CELL, VARIANT, ENVIRONMENT) is None


def test_a_reused_process_id_is_another_process() -> None:
    started = claims.process_start(os.getpid())

    assert started > 0
    assert claims.is_running(os.getpid(), started)
    assert not claims.is_running(os.getpid(), started - 1)


def test_a_zombie_is_dead() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

        assert not claims.is_running(process.pid, 0)
