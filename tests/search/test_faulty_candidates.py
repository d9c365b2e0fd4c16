"""The whole tuner on the CPU with candidates that raise, exit, hang, and compute or write what they must not."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoflash.db.repository import Repository
from autoflash.evaluate.evaluator import DEFAULT_BINDER
from autoflash.problem import DType, Parallelism
from autoflash.runtime.probe import probe
from autoflash.search.request import TuneRequest
from autoflash.search.tuner import tune
from autoflash.trial import Level, Status
from autoflash.variant import Family
from tests import faults
from tests.factories import make_cell

# One process tunes for all of these tests.
pytestmark = pytest.mark.xdist_group("faulty candidates")

_CELL = make_cell(dtype=DType.FP32, head_dim=16, q_bucket=7, parallelism=Parallelism.HIGH)
_SPACE = 24


def _request(trials: int, binder: str = DEFAULT_BINDER) -> TuneRequest:
    return TuneRequest(cells=(_CELL,), device=probe("cpu"), trials=trials, seed=0, vendors=False, binder=binder)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with every variant of a small space, a third of them faulty."""
    file = tmp_path_factory.mktemp("faults") / "tuning.sqlite"
    with Repository.open(str(file)) as repository, faults.Impatient(probe("cpu")) as evaluator:
        tune(_request(_SPACE), repository, evaluator=evaluator)
    return file


def test_every_fault_is_recorded_with_its_status_and_reason(tuned: Path) -> None:
    with Repository.open(str(tuned), read_only=True) as repository:
        trials = repository.trials()

    found = {fault: t.status for t in trials if (fault := faults.fault_of(t.variant)) is not None}
    assert found == faults.FAULTS
    assert all(trial.detail for trial in trials if trial.status is not Status.CORRECT)


def test_the_run_goes_on_to_its_last_trial(tuned: Path) -> None:
    with Repository.open(str(tuned), read_only=True) as repository:
        trials = repository.trials()

    good = [trial for trial in trials if faults.fault_of(trial.variant) is None]
    assert len(trials) == len({trial.variant for trial in trials}) == _SPACE
    assert {trial.status for trial in good} == {Status.CORRECT}


def test_no_faulty_candidate_is_chosen(tuned: Path) -> None:
    with Repository.open(str(tuned), read_only=True) as repository:
        (decision,) = repository.decisions()
        levels = {trial.id: trial.level for trial in repository.trials()}

    assert decision.choices
    assert [faults.fault_of(ranked.variant) for ranked in decision.choices] == [None] * len(decision.choices)
    assert {levels[ranked.trial_id] for ranked in decision.choices} == {Level.FULL}


def test_where_nothing_works_there_is_no_decision(tmp_path: Path) -> None:
    with Repository.open(str(tmp_path / "tuning.sqlite")) as repository:
        summary = tune(_request(3, "tests.faults:bind_only_failures"), repository)

        assert repository.decisions() == []
        assert [trial.status for trial in repository.trials()] == [Status.RUNTIME] * 3
        assert summary.failed == summary.cells
        assert "3 runtime" in summary.cells[0].note
        assert {trial.variant.family for trial in repository.trials()} == {Family.TORCH_TILED}
