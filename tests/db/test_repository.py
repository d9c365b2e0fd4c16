from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from pathlib import Path

import numpy
import pytest
from sqlalchemy.engine.default import DefaultDialect

from autoflash.db.repository import Repository
from autoflash.errors import DatabaseError
from autoflash.problem import Feature, Mask, Parallelism, Pass
from autoflash.trial import Level, Stage, Status
from autoflash.variant import Family
from tests.factories import (
    make_cell,
    make_decision,
    make_device,
    make_environment,
    make_measurement,
    make_ranked,
    make_resources,
    make_trial,
    make_variant,
    make_verification,
)


def test_a_trial_comes_back_as_it_went_in(repository: Repository) -> None:
    trial = make_trial(
        cell=make_cell(op=Pass.BACKWARD, mask=Mask.CAUSAL, group=4, k_bucket=12, deterministic=True),
        median_us=0.1 + 0.2,
        resources=make_resources(spill_bytes=64),
        seed=2**40,
    )

    recorded = repository.record(trial)

    assert recorded.id is not None
    assert dataclasses.replace(recorded, id=None) == trial
    assert repository.trials() == [recorded]
    assert repository.trial(recorded.id) == recorded


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.CORRECT])
def test_a_failure_keeps_its_reason_and_has_no_time(repository: Repository, status: Status) -> None:
    repository.record(make_trial(status=status, detail="ptxas: \udcff broke\0"))

    (trial,) = repository.trials()

    assert trial.status is status
    assert trial.detail == "ptxas: ? broke\N{REPLACEMENT CHARACTER}"
    assert trial.measurement is None


def test_a_second_record_of_the_same_trial_returns_the_first(repository: Repository) -> None:
    first = repository.record(make_trial(median_us=100.0))

    second = repository.record(make_trial(median_us=200.0))

    assert second == first
    assert len(repository.trials()) == 1


def test_an_edited_template_makes_a_new_trial(repository: Repository) -> None:
    repository.record(make_trial(source_digest="0" * 16))

    repository.record(make_trial(source_digest="1" * 16))

    assert [trial.source_digest for trial in repository.trials()] == ["0" * 16, "1" * 16]
    assert repository.finished(make_cell(), make_environment()) == 1


def test_a_quarantined_trial_is_not_seen_and_can_be_tried_again(repository: Repository) -> None:
    bad = repository.record(make_trial(median_us=1.0))
    assert bad.id is not None
    repository.mark(bad.id, "does not load")
    repository.mark(bad.id, "a later reason")

    assert repository.trials() == []
    assert repository.quarantined() == {bad.id: "does not load"}
    again = repository.record(make_trial(median_us=100.0))

    assert again.id != bad.id
    assert repository.trials() == [again]
    assert [trial.id for trial in repository.trials(quarantined=True)] == [bad.id, again.id]


def test_marking_an_unknown_trial_is_refused(repository: Repository) -> None:
    with pytest.raises(ValueError, match="no trial 7"):
        repository.mark(7, "?")


@pytest.mark.parametrize("median_us", [math.nan, math.inf, -math.inf, 0.0, -1.0, None])
def test_a_time_that_is_no_time_never_gets_in(repository: Repository, median_us: float) -> None:
    recorded = repository.record(make_trial())
    assert recorded.id is not None

    with pytest.raises(ValueError, match="median_us must be a positive and finite number"):
        repository.add_measurement(
            recorded.id, dataclasses.replace(make_measurement(), stage=Stage.FINAL, median_us=median_us)
        )

    assert repository.measurements(recorded.id) == [recorded.measurement]


@pytest.mark.parametrize("name", ["p20_us", "p80_us"])
def test_a_percentile_that_is_no_time_refuses_the_whole_trial(repository: Repository, name: str) -> None:
    measurement = dataclasses.replace(make_measurement(), **{name: math.inf})

    with pytest.raises(ValueError, match=name):
        repository.record(make_trial(measurement=measurement))

    assert repository.trials() == []


def test_numbers_of_numpy_are_stored_as_numbers(repository: Repository) -> None:
    measurement = make_measurement(median_us=numpy.float32(12.5), samples=numpy.int64(7))
    resources = make_resources(shared_bytes=numpy.int64(1024))

    repository.record(make_trial(measurement=measurement, resources=resources, seed=numpy.int64(3)))

    (trial,) = repository.trials()
    assert trial.measurement is not None
    assert (trial.measurement.median_us, trial.measurement.samples) == (12.5, 7)
    assert trial.resources is not None
    assert (trial.resources.shared_bytes, trial.seed) == (1024, 3)


def test_the_latest_timing_counts_and_older_ones_stay(repository: Repository) -> None:
    recorded = repository.record(make_trial(median_us=100.0))
    assert recorded.id is not None
    final = make_measurement(median_us=95.0, stage=Stage.FINAL, run="r1")

    repository.add_measurement(recorded.id, final)

    assert repository.trials()[0].measurement == final
    assert repository.measurements(recorded.id) == [recorded.measurement, final]


def test_a_failed_trial_is_not_timed(repository: Repository) -> None:
    failed = repository.record(make_trial(status=Status.TIMEOUT))
    assert failed.id is not None

    with pytest.raises(ValueError, match="only a correct one is measured"):
        repository.add_measurement(failed.id, make_measurement())


def test_a_verification_serves_all_sizes_of_its_kernel(repository: Repository) -> None:
    small, large = make_cell(q_bucket=9), make_cell(q_bucket=14, group=8, parallelism=Parallelism.LOW)
    screened = make_verification(level=Level.SCREEN, checks=2)
    repository.record(make_trial(cell=small, verification=screened))
    repository.record(make_trial(cell=large, verification=screened))
    trial = repository.trials()[0]

    repository.add_verification(trial.source_digest, trial.variant, large, trial.environment, make_verification())

    assert [trial.level for trial in repository.trials()] == [Level.FULL, Level.FULL]
    assert repository.verification(trial.source_digest, trial.variant, small, trial.environment) == make_verification()


@pytest.mark.parametrize(
    "other",
    [
        make_trial(source_digest="f" * 16),
        make_trial(variant=make_variant(BLOCK_M=128)),
        make_trial(environment=make_environment(triton="3.7")),
        make_trial(cell=make_cell(mask=Mask.CAUSAL)),
        make_trial(cell=make_cell(head_dim=128)),
        make_trial(cell=make_cell(features=(Feature.SOFTCAP,))),
    ],
    ids=["source", "config", "environment", "mask", "head_dim", "features"],
)
def test_a_verification_serves_no_other_kernel(repository: Repository, other: object) -> None:
    repository.record(make_trial())

    assert isinstance(other, type(make_trial()))
    found = repository.verification(other.source_digest, other.variant, other.cell, other.environment)

    assert found is None


def test_a_failure_holds_until_a_later_full_verification_passes(repository: Repository) -> None:
    trial = repository.record(make_trial(verification=make_verification()))

    def verify(level: Level, passed: bool) -> Level:
        repository.add_verification(
            trial.source_digest,
            trial.variant,
            trial.cell,
            trial.environment,
            make_verification(level=level, passed=passed),
        )
        return repository.trials()[0].level

    assert verify(Level.SCREEN, True) is Level.FULL
    assert verify(Level.SCREEN, False) is Level.NONE
    assert verify(Level.SCREEN, True) is Level.NONE
    assert verify(Level.FULL, True) is Level.FULL


def test_an_infinite_error_is_kept_as_a_failure_and_refused_as_a_pass(repository: Repository) -> None:
    failed = make_verification(passed=False, worst_ratio=math.inf)
    repository.record(make_trial(status=Status.CORRECTNESS, verification=failed))

    assert repository.trials()[0].verification == failed
    with pytest.raises(ValueError, match="finite worst_ratio"):
        repository.record(make_trial(source_digest="1" * 16, verification=make_verification(worst_ratio=math.nan)))


def test_trials_are_filtered_by_what_they_are_of(repository: Repository) -> None:
    cell, here = make_cell(head_dim=128), make_environment(torch="2.14.0")
    wanted = repository.record(make_trial(cell=cell))
    repository.record(make_trial(cell=cell, variant=make_variant(Family.VENDOR)))
    repository.record(make_trial(cell=cell, variant=make_variant(BLOCK_M=16), status=Status.COMPILE))
    repository.record(make_trial(cell=cell, environment=make_environment(triton="3.7")))
    repository.record(make_trial())

    found = repository.trials(cell=cell, environment=here, family=Family.TRITON, status=Status.CORRECT)

    assert found == [wanted]
    assert repository.counts(cell=cell, environment=here) == {Status.CORRECT: 2, Status.COMPILE: 1}
    assert repository.finished(cell, here) == 3
    assert repository.finished(cell, here, family=Family.TRITON) == 2
    assert repository.cells(here) == [cell, make_cell()]
    assert repository.environments() == [make_environment(), make_environment(triton="3.7")]


def test_versions_that_are_only_noted_are_kept_with_each_trial(repository: Repository) -> None:
    old, new = make_environment(torch="2.12.0"), make_environment(torch="2.13.0")

    repository.record(make_trial(environment=old))
    repository.record(make_trial(environment=new, variant=make_variant(BLOCK_M=16)))

    assert [trial.environment for trial in repository.trials(environment=new)] == [old, new]


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H100 PCIe",
        "NVIDIA H20-3e",
        "Orin (nvgpu)",
        "NVIDIA H200 MIG 1g.18gb",
        "a/b\\c..%2e",
        "Grafikkarte Ü-9000 显卡 🚀",
        "trailing space ",
        "'; DROP TABLE trial; --",
        "",
    ],
)
def test_case_a27_any_device_name_is_found_again_and_only_by_itself(database: Path, name: str) -> None:
    file = str(database)
    mine = make_environment(device_name=name)
    with Repository.open(file) as repository:
        repository.record(make_trial(environment=make_environment()))
        repository.record(make_trial(environment=mine))
        repository.save_decision(make_decision(environment=mine))

    with Repository.open(file, read_only=True) as repository:
        assert [trial.environment for trial in repository.trials(environment=mine)] == [mine]
        assert repository.decisions(environment=mine) == [make_decision(environment=mine)]
        assert repository.decisions(environment=make_environment()) == []


def test_a_slice_of_a_card_is_another_device(repository: Repository) -> None:
    whole, part = make_environment(), make_environment(multiprocessors=16)

    repository.save_decision(make_decision(environment=whole))

    assert repository.decisions(environment=part) == []


def test_a_decision_comes_back_as_it_went_in(repository: Repository) -> None:
    trial = repository.record(make_trial())
    decision = make_decision(
        choices=[make_ranked(trial_id=trial.id, median_us=1 / 3), make_ranked(variant=make_variant(BLOCK_M=16))],
        vendor=make_ranked(variant=make_variant(Family.VENDOR)),
    )

    assert repository.save_decision(decision)

    assert repository.decisions() == [decision]


def test_the_latest_decision_of_a_cell_counts(repository: Repository) -> None:
    first = make_decision(reason="first", decided_at="2026-01-01T00:00:00+00:00")
    second = make_decision(reason="second", decided_at="2026-01-02T00:00:00+00:00")
    elsewhere = make_decision(reason="elsewhere", environment=make_environment(device=make_device("sm_80")))

    assert repository.save_decisions([second, first, elsewhere]) == 3
    assert repository.save_decisions([second, first, elsewhere]) == 0

    assert repository.decisions(environment=make_environment()) == [second]
    assert repository.decisions(cell=make_cell(), history=True) == [first, second, elsewhere]


def test_of_decisions_of_one_second_the_one_saved_last_counts(repository: Repository) -> None:
    first, second = make_decision(reason="first"), make_decision(reason="second")

    repository.save_decisions([first, second, first])

    assert repository.decisions() == [first]


def test_a_quarantined_winner_leaves_its_decision(repository: Repository) -> None:
    best, good = (repository.record(make_trial(variant=make_variant(BLOCK_M=rows))) for rows in (64, 128))
    choices = [make_ranked(variant=trial.variant, trial_id=trial.id) for trial in (best, good)]
    repository.save_decision(make_decision(choices=choices))
    assert best.id is not None
    assert good.id is not None

    repository.mark(best.id, "hangs")
    assert [decision.choices for decision in repository.decisions()] == [(choices[1],)]

    repository.mark(good.id, "hangs too")
    assert repository.decisions() == []


@pytest.mark.parametrize(
    ("decision", "words"),
    [
        (make_decision(choices=[]), "neither a choice nor a vendor"),
        (make_decision(choices=[make_ranked(median_us=math.nan)]), "median_us"),
        (make_decision(choices=[make_ranked(worst_ratio=math.inf)]), "worst_ratio"),
        (make_decision(choices=[make_ranked(trial_id=99)]), "no trial 99"),
    ],
)
def test_a_decision_that_says_nothing_is_refused_with_all_beside_it(
    repository: Repository, decision: object, words: str
) -> None:
    assert isinstance(decision, type(make_decision()))

    with pytest.raises(ValueError, match=words):
        repository.save_decisions([make_decision(cell=make_cell(head_dim=128)), decision])

    assert repository.decisions() == []


def test_a_reader_cannot_write(database: Path) -> None:
    with (
        Repository.open(str(database), read_only=True) as reader,
        pytest.raises(DatabaseError, match="opened for reading"),
    ):
        reader.record(make_trial())


def test_threads_share_a_repository(repository: Repository) -> None:
    errors: list[BaseException] = []

    def record(block: int) -> None:
        try:
            for stages in range(5):
                repository.record(make_trial(variant=make_variant(BLOCK_M=block, num_stages=stages)))
                repository.trials(cell=make_cell())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=record, args=(block,)) for block in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert errors == []
    assert [trial.id for trial in repository.trials()] == list(range(1, 21))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupt_at_the_end_of_a_connection_is_not_logged_as_an_error(
    repository: Repository,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: type[BaseException],
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(DefaultDialect, "do_close", fail)

    with contextlib.suppress(KeyboardInterrupt):
        repository.decisions()

    assert ("Exception closing" in caplog.text) is (error is ValueError)
