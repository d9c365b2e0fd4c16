from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoflash.db.repository import Repository
from autoflash.db.table_format import read_table, table_text
from autoflash.deploy.export import ImportSummary, export_table, import_table, write_table
from autoflash.errors import TableError
from autoflash.trial import Decision
from autoflash.variant import Family
from tests.factories import (
    make_cell,
    make_decision,
    make_device,
    make_environment,
    make_ranked,
    make_trial,
    make_variant,
)

HERE, THERE = make_environment(), make_environment(device=make_device("sm_120"))
DECISIONS = [
    make_decision(cell=make_cell(head_dim=head_dim, q_bucket=bucket), environment=environment)
    for head_dim in (64, 128)
    for bucket in (9, 14)
    for environment in (HERE, THERE)
]


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    with Repository.open(str(tmp_path / "t.sqlite")) as opened:
        yield opened


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Repository]:
    with Repository.open(str(tmp_path / "other.sqlite")) as opened:
        yield opened


def test_export_of_import_of_export_is_byte_equal(repository: Repository, other: Repository) -> None:
    trial = repository.record(make_trial())
    vendor = make_ranked(variant=make_variant(Family.VENDOR), median_us=1 / 3)
    repository.save_decision(make_decision(choices=[make_ranked(trial_id=trial.id)], vendor=vendor))
    repository.save_decisions(DECISIONS)
    text = export_table(repository)

    import_table(text, other)

    assert export_table(other) == text


def test_databases_filled_in_different_order_export_the_same_bytes(repository: Repository, other: Repository) -> None:
    old = make_decision(reason="overruled", decided_at="2025-01-01T00:00:00+00:00")
    new = make_decision(reason="in force", decided_at="2025-01-02T00:00:00+00:00")
    everything = [old, new, *DECISIONS]

    for decision in everything:
        repository.save_decision(decision)
    other.record(make_trial(cell=make_cell(head_dim=256)))
    for decision in random.Random(3).sample(everything, len(everything)):
        other.save_decision(decision)

    assert export_table(repository) == export_table(other)


def test_importing_again_changes_nothing(repository: Repository) -> None:
    text = table_text(DECISIONS)

    first, second = import_table(text, repository), import_table(text, repository)

    assert first == ImportSummary(read=8, added=8, environments=(THERE, HERE))
    assert second == ImportSummary(read=8, added=0, environments=(THERE, HERE))
    assert len(repository.decisions(history=True)) == 8


def test_an_older_decision_does_not_overrule_a_newer_one(repository: Repository) -> None:
    newer = make_decision(reason="newer", decided_at="2026-06-01T00:00:00+00:00")
    older = make_decision(reason="older", decided_at="2026-05-01T00:00:00+00:00")
    repository.save_decision(newer)

    import_table(table_text([older]), repository)

    assert repository.decisions() == [newer]


def test_rows_of_another_device_are_kept_apart(repository: Repository) -> None:
    import_table(table_text(DECISIONS), repository)

    assert {decision.environment for decision in repository.decisions(environment=HERE)} == {HERE}
    assert read_table(export_table(repository, THERE)) == [row for row in DECISIONS if row.environment == THERE]


def test_a_damaged_table_does_not_touch_the_database(repository: Repository) -> None:
    with pytest.raises(TableError, match="checksum"):
        import_table(table_text(DECISIONS).replace('"registers":168', '"registers":32', 1), repository)

    assert repository.decisions() == []


def test_a_quarantined_kernel_is_not_exported(repository: Repository) -> None:
    trial = repository.record(make_trial())
    assert trial.id is not None
    repository.save_decision(make_decision(choices=[make_ranked(trial_id=trial.id)]))

    repository.mark(trial.id, "does not load")

    assert read_table(export_table(repository)) == []


def test_a_table_is_written_and_may_be_written_again(tmp_path: Path) -> None:
    file = tmp_path / "table.json"

    write_table(file, table_text(DECISIONS[:2]))
    write_table(file, table_text(DECISIONS))

    assert file.read_text() == table_text(DECISIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]


@pytest.mark.parametrize(
    ("present", "words"),
    [
        ("my thesis", "is there: not a tuning table.*--force replaces it"),
        (table_text([make_decision(environment=THERE)]), "1 decisions that the new table lacks .*RTX 5090.*--force"),
    ],
)
def test_what_would_be_lost_is_named_and_kept_unless_forced(tmp_path: Path, present: str, words: str) -> None:
    file = tmp_path / "table.json"
    file.write_text(present)
    text = table_text([make_decision(environment=HERE)])

    with pytest.raises(TableError, match=words):
        write_table(file, text)
    assert file.read_text() == present

    write_table(file, text, force=True)
    assert file.read_text() == text


def test_a_read_only_file_is_kept_unless_forced(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    file.write_text(table_text([]))
    file.chmod(0o444)

    with pytest.raises(TableError, match="is read-only; --force replaces it"):
        write_table(file, table_text(DECISIONS))
    assert file.read_text() == table_text([])

    write_table(file, table_text(DECISIONS), force=True)
    assert file.read_text() == table_text(DECISIONS)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="is a folder; name a file"):
        write_table(tmp_path, table_text(DECISIONS), force=True)


def test_an_absent_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"cannot write .*none/table\.json: No such file or directory"):
        write_table(tmp_path / "none" / "table.json", table_text(DECISIONS))


def test_a_full_disk_leaves_the_old_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "table.json"
    write_table(file, table_text(DECISIONS[:1]))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TableError, match="No space left on device"):
        write_table(file, table_text(DECISIONS))

    assert file.read_text() == table_text(DECISIONS[:1])
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]


def test_the_decisions_of_a_table_have_no_trials(repository: Repository) -> None:
    trial = repository.record(make_trial())
    decision: Decision = make_decision(choices=[make_ranked(trial_id=trial.id)])

    (read,) = read_table(table_text([decision]))

    assert [ranked.trial_id for ranked in read.choices] == [None]
