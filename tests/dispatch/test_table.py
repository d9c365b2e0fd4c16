"""Decisions as dispatch looks them up: nearest first, this device only, never an exception."""

from __future__ import annotations

import logging
import shutil
import sqlite3
from pathlib import Path

import pytest

from autoflash.db.repository import Repository
from autoflash.db.table_format import table_text
from autoflash.dispatch.table import Origin, Table, load
from autoflash.problem import Cell, DType, Feature, Mask, Parallelism
from tests.factories import make_cell, make_decision, make_environment

HERE = make_environment()


def test_the_cell_itself_comes_before_its_neighbours() -> None:
    decisions = [make_decision(cell=make_cell(q_bucket=b)) for b in (12, 10, 11)]

    hits = Table.from_decisions(decisions).hits(make_cell(q_bucket=11), HERE)

    assert hits[0].decision.cell.q_bucket == 11
    assert hits[0].is_exact
    assert [hit.distance for hit in hits] == [0, 2, 2]


def test_the_nearest_is_nearest_in_log_space() -> None:
    """1024 is nearer to 600 than 8192 is, though 8192 is the next one up."""
    table = Table.from_decisions([make_decision(cell=make_cell(q_bucket=b)) for b in (9, 13)])

    hits = table.hits(make_cell(q_bucket=10), HERE)

    assert [hit.decision.cell.q_bucket for hit in hits] == [9, 13]


def test_another_group_serves_only_after_every_cell_of_this_one() -> None:
    table = Table.from_decisions([make_decision(cell=make_cell(group=4)), make_decision(cell=make_cell(q_bucket=14))])

    hits = table.hits(make_cell(), HERE)

    assert [hit.decision.cell.group for hit in hits] == [1, 4]
    assert not hits[1].is_exact


@pytest.mark.parametrize(
    "cell",
    [
        make_cell(dtype=DType.FP16),
        make_cell(head_dim=128),
        make_cell(head_dim_v=128),
        make_cell(mask=Mask.CAUSAL),
        make_cell(dtype=DType.FP32, tf32=True),
        make_cell(features=(Feature.SOFTCAP,)),
        make_cell(features=(Feature.WINDOW,), window_bucket=7),
    ],
)
def test_what_must_match_exactly_is_never_borrowed(cell: object) -> None:
    table = Table.from_decisions([make_decision(cell=cell)])  # type: ignore[arg-type]

    assert table.hits(make_cell(), HERE) == []


@pytest.mark.parametrize(
    ("name", "multiprocessors"),
    [
        ("NVIDIA H100 80GB HBM3", 132),
        ("NVIDIA H100 PCIe", 114),
        ("NVIDIA H200 MIG 1g.18gb", 16),
        ("NVIDIA H200", 16),
        ("weird/näme ", 132),
    ],
)
def test_records_of_another_device_are_ignored_with_the_reason(name: str, multiprocessors: int) -> None:
    elsewhere = make_environment(device_name=name, multiprocessors=multiprocessors)
    table = Table.from_decisions([make_decision(environment=elsewhere)])

    assert table.hits(make_cell(), HERE) == []
    (reason,) = table.ignored(make_cell(), HERE)
    assert "here, the record is for" in reason


def test_a_record_of_another_triton_comes_after_one_of_this() -> None:
    table = Table.from_decisions(
        [
            make_decision(environment=make_environment(triton="3.5"), decided_at="2027-01-01T00:00:00+00:00"),
            make_decision(),
        ]
    )

    hits = table.hits(make_cell(), HERE)

    assert [hit.decision.environment.triton for hit in hits] == ["3.6", "3.5"]


def test_the_database_lies_over_the_shipped_tables() -> None:
    table = Table.from_decisions([make_decision(reason="shipped")], Origin.SHIPPED)
    table.add([make_decision(reason="mine")], Origin.DATABASE)

    assert [hit.decision.reason for hit in table.hits(make_cell(), HERE)] == ["mine", "shipped"]


def test_parallelism_counts_as_distance() -> None:
    table = Table.from_decisions([make_decision(cell=make_cell(parallelism=Parallelism.LOW))])

    (hit,) = table.hits(make_cell(parallelism=Parallelism.HIGH), HERE)

    assert hit.distance == 2


def windowed(window_bucket: int, **sizes: int) -> Cell:
    return make_cell(features=(Feature.WINDOW,), window_bucket=window_bucket, **sizes)  # type: ignore[arg-type]


def test_the_nearest_window_serves() -> None:
    table = Table.from_decisions([make_decision(cell=cell) for cell in (windowed(3), windowed(9), windowed(8))])

    hits = table.hits(windowed(7), HERE)

    assert [(hit.decision.cell.window_bucket, hit.distance) for hit in hits] == [(8, 1), (9, 2), (3, 4)]
    assert not hits[0].is_exact


@pytest.mark.parametrize(
    ("asked", "tuned", "distance"),
    [
        (windowed(0), windowed(0), 0),
        (windowed(0), windowed(0, q_bucket=12), 4),
        (windowed(0), windowed(10), 1),
        (windowed(8), windowed(0), 3),
    ],
)
def test_a_window_open_to_a_side_is_like_one_as_wide_as_the_sequence(asked: Cell, tuned: Cell, distance: int) -> None:
    (hit,) = Table.from_decisions([make_decision(cell=tuned)]).hits(asked, HERE)

    assert hit.distance == distance


def test_decisions_of_the_database_are_read(tmp_path: Path) -> None:
    with Repository.open(str(tmp_path / "t.sqlite")) as repository:
        repository.save_decision(make_decision(reason="from the database"))

    hits = load(str(tmp_path / "t.sqlite")).hits(make_cell(), HERE)

    assert hits[0].decision.reason == "from the database"
    assert hits[0].origin is Origin.DATABASE


def test_a_database_of_the_schema_before_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = Path(__file__).parents[1] / "db" / "assets" / "schema_0002.sqlite"
    file = shutil.copyfile(old, tmp_path / "t.sqlite")

    with caplog.at_level(logging.WARNING, "autoflash"):
        cell = make_cell(features=(Feature.SOFTCAP, Feature.WINDOW), window_bucket=7)
        hits = load(str(file)).hits(cell, HERE)

    assert hits[0].decision.reason == "kept over upgrades"
    assert caplog.records == []
    assert file.read_bytes() == old.read_bytes()


def test_an_exported_table_replaces_the_database(tmp_path: Path) -> None:
    with Repository.open(str(tmp_path / "t.sqlite")) as repository:
        repository.save_decision(make_decision(reason="from the database"))
    (tmp_path / "table.json").write_text(table_text([make_decision(reason="from the table")]))

    hits = load(str(tmp_path / "t.sqlite"), str(tmp_path / "table.json")).hits(make_cell(), HERE)

    assert [hit.decision.reason for hit in hits if hit.origin is not Origin.SHIPPED] == ["from the table"]


def test_reading_makes_no_file(tmp_path: Path) -> None:
    load(str(tmp_path / "absent" / "t.sqlite"))

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"not a database, but long enough to be taken for one" * 50])
def test_a_database_that_cannot_be_read_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    path = tmp_path / "t.sqlite"
    path.write_bytes(content)

    with caplog.at_level(logging.WARNING, "autoflash"):
        table = load(str(path))

    assert table.hits(make_cell(), HERE) == [] or all(
        hit.origin is Origin.SHIPPED for hit in table.hits(make_cell(), HERE)
    )
    assert [record for record in caplog.records if str(path) in record.getMessage()]
    assert len(caplog.records) == 1


def test_a_foreign_sqlite_file_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("create table trials (a int)")
    connection.close()

    with caplog.at_level(logging.WARNING, "autoflash"):
        load(str(path))

    assert len(caplog.records) == 1


@pytest.mark.parametrize("text", ["", "{", '{"schema": 99}', "[]"])
def test_a_damaged_table_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)

    with caplog.at_level(logging.WARNING, "autoflash"):
        load(table_file=str(path))

    assert len(caplog.records) == 1
    assert "is not used" in caplog.text
