from __future__ import annotations

import threading
from typing import cast

import pytest

from autoflash.db.repository import Repository
from autoflash.errors import DatabaseError
from autoflash.runtime.probe import environment
from autoflash.search.claims import Claims
from autoflash.search.records import Records
from tests.search.recorded import CELL, CPU, default

_PATIENCE_S = 300.0


class _Claim:
    """Counts its renewals."""

    def __init__(self, *, fails: bool = False) -> None:
        self.beats = 0
        self.renewed_twice = threading.Event()
        self.is_released = False
        self._fails = fails

    def heartbeat(self) -> bool:
        self.beats += 1
        if self.beats >= 2:
            self.renewed_twice.set()
        if self._fails:
            raise DatabaseError("database is locked")
        return True

    def release(self) -> None:
        self.is_released = True


class _Records:
    """Grants these claims, one after the other."""

    def __init__(self, *claims: _Claim) -> None:
        self._claims = list(claims)

    def claim(self, *_: object) -> _Claim:
        return self._claims.pop(0)


def _claims(*claims: _Claim) -> Claims:
    return Claims(cast(Records, _Records(*claims)), heartbeat_s=0.001)


def test_a_claim_is_taken_once_and_given_back(repository: Repository) -> None:
    with Claims(Records(repository, environment(CPU))) as claims:
        claim = claims.take(CELL, default())

        assert claim is not None
        assert claims.take(CELL, default()) is None
        claims.release(claim)
        assert claims.take(CELL, default()) is not None


def test_what_is_held_is_renewed_while_its_holder_does_something_else() -> None:
    claim = _Claim()

    with _claims(claim) as claims:
        claims.take(CELL, default())

        assert claim.renewed_twice.wait(_PATIENCE_S)
    assert not claim.is_released


def test_what_was_given_back_is_not_renewed() -> None:
    given_back, held = _Claim(), _Claim()
    claims = _claims(given_back, held)
    claim = claims.take(CELL, default())
    assert claim is not None
    claims.release(claim)

    with claims:
        claims.take(CELL, default())
        assert held.renewed_twice.wait(_PATIENCE_S)

    assert given_back.is_released
    assert given_back.beats == 0


def test_a_database_that_is_locked_for_a_while_ends_no_renewal(caplog: pytest.LogCaptureFixture) -> None:
    claim = _Claim(fails=True)

    with _claims(claim) as claims:
        claims.take(CELL, default())

        assert claim.renewed_twice.wait(_PATIENCE_S)
    assert "claims are not renewed: database is locked" in caplog.text
