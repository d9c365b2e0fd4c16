from __future__ import annotations

import json

import pytest

from autoflash.cli.output import Column, markdown_table, number, print_json, print_table, size_text

COLUMNS = (Column(title="cell"), Column(title="us", numeric=True))


def test_tables_in_a_pipe_are_never_folded_or_cut(capsys: pytest.CaptureFixture[str]) -> None:
    long = "backward/bf16/d128/gqa8/causal/deterministic/q16384/k16384/" + "x" * 100

    print_table("Decisions", COLUMNS, [(long, "12.5")])

    line = next(line for line in capsys.readouterr().out.splitlines() if "backward" in line)
    assert line.split() == [long, "12.5"]


def test_table_cells_are_not_read_as_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("Decisions", COLUMNS, [("[bold]not markup[/bold]", "1")])

    assert "[bold]not markup[/bold]" in capsys.readouterr().out


def test_json_refuses_what_json_does_not_have() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        print_json({"median_us": float("nan")})


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"b": [1, 2], "a": None})

    assert json.loads(capsys.readouterr().out) == {"b": [1, 2], "a": None}


def test_markdown_aligns_numbers_right() -> None:
    assert markdown_table(COLUMNS, [("x", "1")]) == "| cell | us |\n|---|---:|\n| x | 1 |"


def test_a_missing_number_is_a_dash() -> None:
    assert (number(None), number(1.26), number(2.0, 0)) == ("-", "1.3", "2")


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(None, "-"), (0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (2**32, "4.00 GiB"), (1.5 * 2**20, "1.50 MiB")],
)
def test_bytes_are_given_in_the_largest_unit_that_they_fill(size_bytes: float | None, text: str) -> None:
    assert size_text(size_bytes) == text
