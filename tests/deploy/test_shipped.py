from __future__ import annotations

from pathlib import Path

import pytest

from autoflash import paths
from autoflash.codegen.render import render
from autoflash.db.repository import Repository
from autoflash.db.table_format import read_table, table_text
from autoflash.deploy.export import export_table, import_table
from autoflash.deploy.shipped import device_slug, export_shipped, read_shipped, write_shipped
from autoflash.errors import TableError
from autoflash.problem import Feature, Form, Pass
from autoflash.variant import Family
from tests.factories import make_cell, make_decision, make_device, make_environment

H200, RTX = make_environment(), make_environment(device=make_device("sm_120"))


def test_tables_are_filed_by_device_and_pass(tmp_path: Path) -> None:
    decisions = [
        make_decision(),
        make_decision(cell=make_cell(op=Pass.BACKWARD)),
        make_decision(environment=RTX),
    ]

    files = write_shipped(decisions, tmp_path)

    assert [file.relative_to(tmp_path).as_posix() for file in files] == [
        "nvidia-geforce-rtx-5090/forward.jsonl",
        "nvidia-h200/backward.jsonl",
        "nvidia-h200/forward.jsonl",
    ]
    assert {(row.cell, row.environment) for row in read_shipped(tmp_path)} == {
        (row.cell, row.environment) for row in decisions
    }


def test_new_decisions_replace_those_of_their_cell_and_keep_the_rest(tmp_path: Path) -> None:
    kept = make_decision(cell=make_cell(head_dim=128))
    other_triton = make_decision(environment=make_environment(triton="3.7"))
    write_shipped([make_decision(reason="old"), kept, other_triton], tmp_path)

    write_shipped([make_decision(reason="new")], tmp_path)

    assert read_shipped(tmp_path) == [make_decision(reason="new"), kept, other_triton]


def test_writing_again_gives_the_same_bytes(tmp_path: Path) -> None:
    decisions = [make_decision(cell=make_cell(head_dim=head_dim)) for head_dim in (256, 64, 128)]
    (file,) = write_shipped(decisions, tmp_path)
    first = file.read_bytes()

    write_shipped(reversed(decisions), tmp_path)

    assert file.read_bytes() == first


def test_a_database_is_exported_for_one_device_or_all(tmp_path: Path) -> None:
    with Repository.open(str(tmp_path / "t.sqlite")) as repository:
        repository.save_decisions([make_decision(environment=H200), make_decision(environment=RTX)])

        assert len(export_shipped(repository, tmp_path / "one", H200)) == 1
        assert len(export_shipped(repository, tmp_path / "all")) == 2


def test_damage_is_named_with_its_file_and_not_written_over(tmp_path: Path) -> None:
    (file,) = write_shipped([make_decision()], tmp_path)
    damaged = file.read_text().replace("sm_90", "sm_80")
    file.write_text(damaged)

    with pytest.raises(TableError, match=r"nvidia-h200/forward\.jsonl: line 1: its digest"):
        read_shipped(tmp_path)
    with pytest.raises(TableError, match=r"nvidia-h200/forward\.jsonl: line 1: its digest"):
        write_shipped([make_decision(cell=make_cell(head_dim=128))], tmp_path)

    assert file.read_text() == damaged


def test_a_folder_without_tables_is_empty(tmp_path: Path) -> None:
    assert read_shipped(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"),
        ("NVIDIA H200 MIG 1g.18gb", "nvidia-h200-mig-1g-18gb"),
        ("../../etc/passwd", "etc-passwd"),
        ("Orin (nvgpu) ", "orin-nvgpu"),
        ("Grafikkarte Ü", "grafikkarte-u"),
        ("显卡", "device"),
    ],
)
def test_a_device_gets_a_folder_whatever_its_name(name: str, slug: str) -> None:
    assert device_slug(name) == slug


def test_devices_of_one_folder_do_not_mix(tmp_path: Path) -> None:
    first, second = (make_environment(device_name=name) for name in ("显卡", "Видеокарта"))
    decisions = [make_decision(environment=environment) for environment in (first, second)]

    assert len(write_shipped(decisions, tmp_path)) == 1

    assert {row.environment for row in read_shipped(tmp_path)} == {first, second}


def test_shipped_rows_name_the_source_that_the_templates_render() -> None:
    stale = [
        f"{decision.environment.device_name} {decision.cell}: {ranked.variant}"
        for decision in read_shipped(paths.tuning_db_dir())
        for ranked in decision.choices
        if ranked.variant.family is not Family.VENDOR
        and render(Form.of(decision.cell), ranked.variant.family, ranked.variant.structure).digest
        != ranked.source_digest
    ]

    assert stale == []


def test_shipped_tables_go_through_a_database_byte_by_byte(tmp_path: Path) -> None:
    folder = paths.tuning_db_dir()
    files = sorted(folder.glob("*/*.jsonl"))

    with Repository.open(str(tmp_path / "t.sqlite")) as repository:
        for file in files:
            import_table(file.read_text(), repository)
        export_shipped(repository, tmp_path / "again")

    assert files
    for file in files:
        assert (tmp_path / "again" / file.relative_to(folder)).read_bytes() == file.read_bytes()


def test_decisions_with_features_go_through_a_database_and_leave_the_others_as_they_were(tmp_path: Path) -> None:
    plain = make_decision()
    window = make_decision(cell=make_cell(features=(Feature.SOFTCAP, Feature.WINDOW), window_bucket=7))
    text = table_text([plain, window])

    with Repository.open(str(tmp_path / "t.sqlite")) as repository:
        assert import_table(text, repository).added == 2
        assert export_table(repository) == text
        assert repository.decisions(cell=window.cell) == [window]
    assert table_text([plain]).splitlines()[7] == text.splitlines()[7]
    assert "features" not in table_text([plain])
    assert read_table(text) == [plain, window]
