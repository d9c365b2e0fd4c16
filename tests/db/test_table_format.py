from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from autoflash import keys
from autoflash.db.table_format import SCHEMA, lines_text, read_table, table_text
from autoflash.errors import TableError
from autoflash.problem import Feature, Mask, Parallelism, Pass
from autoflash.trial import Decision
from autoflash.variant import Family
from tests.factories import make_cell, make_decision, make_device, make_environment, make_ranked, make_variant

DECISIONS = [
    make_decision(vendor=make_ranked(variant=make_variant(Family.VENDOR), median_us=0.1 + 0.2)),
    make_decision(cell=make_cell(op=Pass.BACKWARD, deterministic=True)),
    make_decision(cell=make_cell(features=(Feature.SOFTCAP, Feature.WINDOW), window_bucket=7)),
    make_decision(cell=make_cell(features=(Feature.VARLEN, Feature.WINDOW))),
    make_decision(cell=make_cell(mask=Mask.CAUSAL, k_bucket=12, parallelism=Parallelism.LOW)),
    make_decision(environment=make_environment(device=make_device("sm_80")), reason='quotes " and 显卡'),
    make_decision(environment=make_environment(triton="3.7"), decided_at=""),
    make_decision(cell=make_cell(head_dim=128), choices=[], vendor=make_ranked(variant=make_variant(Family.VENDOR))),
]


def in_some_order(decisions: list[Decision]) -> list[Decision]:
    return sorted(decisions, key=lambda decision: (decision.cell.key, decision.environment.key))


def edited(change: Callable[[dict[str, Any]], object]) -> str:
    """A table whose first decision was changed, with a checksum to match."""
    document = json.loads(table_text(DECISIONS[:1]))
    change(document["decisions"][0])
    content = {"autoflash": document["autoflash"], "decisions": document["decisions"], "table_schema": SCHEMA}
    document["checksum"] = keys.key("table", content)
    return json.dumps(document)


@pytest.mark.parametrize("write", [table_text, lines_text])
def test_decisions_come_back_as_they_went_in(write: Callable[[list[Decision]], str]) -> None:
    assert in_some_order(read_table(write(DECISIONS))) == in_some_order(DECISIONS)


@pytest.mark.parametrize("write", [table_text, lines_text])
def test_the_order_of_the_decisions_does_not_show(write: Callable[[list[Decision]], str]) -> None:
    shuffled = random.Random(1).sample(DECISIONS, len(DECISIONS))

    assert write(shuffled) == write(DECISIONS)
    assert write(read_table(write(DECISIONS))) == write(DECISIONS)


def test_ids_of_trials_stay_in_their_database() -> None:
    here, there = (make_decision(choices=[make_ranked(trial_id=number)]) for number in (7, None))

    assert table_text([here]) == table_text([there])


def test_a_table_is_a_line_for_each_thing_that_a_reviewer_compares() -> None:
    lines = table_text(DECISIONS[:1]).splitlines()

    assert [line.strip()[:14] for line in lines] == [
        "{",
        '"format": "aut',
        '"schema": 1,',
        '"autoflash": "',
        '"checksum": "' + lines[4].strip()[13],
        '"decisions": [',
        "{",
        '"cell": {"dete',
        '"environment":',
        '"reason": "fas',
        '"decided_at": ',
        '"vendor": {"me',
        '"choices": [',
        '{"median_us":9',
        '{"median_us":1',
        "]",
        "}",
        "]",
        "}",
    ]


def test_a_table_without_decisions_is_a_table() -> None:
    assert read_table(table_text([])) == []


def test_white_space_is_not_content() -> None:
    assert read_table(json.dumps(json.loads(table_text(DECISIONS)))) == read_table(table_text(DECISIONS))
    assert read_table(json.dumps(json.loads(table_text(DECISIONS)), indent=4)) == read_table(table_text(DECISIONS))


def test_two_decisions_for_one_place_are_refused() -> None:
    twice = [make_decision(reason="first"), make_decision(reason="second")]

    with pytest.raises(ValueError, match="two decisions for forward/bf16/d64/full/q1024/k1024 on NVIDIA H200"):
        table_text(twice)
    with pytest.raises(TableError, match="two decisions"):
        read_table(lines_text(twice[:1]) + lines_text(twice[1:]))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the table is empty"),
        (" \n ", "the table is empty"),
        ("garbage", "not a tuning table: the table is not JSON"),
        ("[]", "does not say that its format"),
        ("7", "does not say that its format"),
        ('{"format": "other"}', "does not say that its format"),
        ('{"format": "autoflash-table"}', "schema None, this autoflash reads 1"),
        ('{"format": "autoflash-table", "schema": 2}', "schema 2, this autoflash reads 1"),
        ('{"format": "autoflash-table", "schema": true}', "schema True, this autoflash reads 1"),
        ('{"format": "autoflash-table", "schema": 1}', "lacks the field 'autoflash'"),
        ("[" * 100_000, "not JSON"),
        (table_text(DECISIONS)[:-40], "not JSON"),
        (lines_text(DECISIONS)[:-40], "line 8 is not JSON"),
        (lines_text(DECISIONS) + "7\n", "line 9 is not a JSON object"),
        (table_text(DECISIONS).replace("0.4", "0.3", 1), "the checksum of the table is .* damaged or edited"),
        (table_text(DECISIONS).replace('"sm_80"', '"sm_90"', 1), "the checksum of the table"),
        (lines_text(DECISIONS).replace('"sm_80"', '"sm_90"', 1), "line 1: its digest is not that of its content"),
    ],
)
def test_damage_is_named(text: str, words: str) -> None:
    with pytest.raises(TableError, match=words):
        read_table(text)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda row: row.pop("reason"), r"decisions\[0\] lacks the field 'reason'"),
        (lambda row: row.update(run="import os"), r"decisions\[0\] has the unknown field 'run'"),
        (lambda row: row.update(cell=[]), r"decisions\[0\].cell must be an object"),
        (lambda row: row.update(choices={}), r"decisions\[0\].choices must be a list"),
        (lambda row: row.update(choices=[], vendor=None), r"neither choices nor a vendor"),
        (lambda row: row.update(choices=[row["vendor"]]), r"choices holds a vendor kernel"),
        (lambda row: row.update(reason=7), r"decisions\[0\].reason must be a string, got 7"),
        (lambda row: row.update(decided_at="yesterday"), r"decided_at must be a UTC time"),
        (lambda row: row.update(decided_at="2026-01-01T00:00:00+02:00"), r"decided_at must be a UTC time"),
        (lambda row: row["cell"].update(head_dim="64"), r"cell: head_dim of a cell must be int, got '64'"),
        (lambda row: row["cell"].update(head_dim=-64), r"cell.head_dim must be an integer of at least 1"),
        (lambda row: row["cell"].update(q_bucket=10**9), r"cell.q_bucket must be at most 63"),
        (lambda row: row["cell"].update(dtype="fp8"), r"cell: 'fp8' is not a valid DType"),
        (lambda row: row["cell"].pop("mask"), r"cell: a cell has the fields"),
        (lambda row: row["cell"].update(features="softcap"), r"cell: a cell has the fields"),
        (lambda row: row["cell"].update(features="", window_bucket=0), r"cell.features must name a feature"),
        (lambda row: row["cell"].update(features="tanh", window_bucket=0), r"'tanh' is not a valid Feature"),
        (lambda row: row["cell"].update(features="window,softcap", window_bucket=0), r"features stand once each"),
        (lambda row: row["cell"].update(features="window", window_bucket=64), r"window_bucket must be at most 63"),
        (lambda row: row["cell"].update(features="window", window_bucket=11), r"must be at most k_bucket 10, got 11"),
        (lambda row: row["cell"].update(features="window", window_bucket=-1), r"window_bucket must be an integer"),
        (lambda row: row["cell"].update(features="softcap", window_bucket=3), r"window_bucket must be 0 without"),
        (lambda row: row["environment"].pop("arch"), r"environment lacks the field 'arch'"),
        (lambda row: row["environment"].update(multiprocessors=True), r"multiprocessors must be an integer"),
        (lambda row: row["environment"].update(torch=None), r"environment.torch must be a string"),
        (lambda row: row["choices"][1].update(median_us=0), r"choices\[1\].median_us must be finite and positive"),
        (lambda row: row["choices"][1].update(median_us="1"), r"choices\[1\].median_us must be a number"),
        (lambda row: row["choices"][0].update(variant="x"), r"choices\[0\].variant must be an object"),
        (lambda row: row["choices"][0]["variant"].update(family="cuda"), r"'cuda' is not a valid Family"),
        (lambda row: row["choices"][0]["variant"].update(config={"BLOCK_M": [1]}), r"choices must map names to"),
        (lambda row: row["choices"][0]["verification"].update(level="screen"), r"level must be 'full'"),
        (lambda row: row["choices"][0]["verification"].update(worst_ratio=-1.0), r"worst_ratio must be finite"),
        (lambda row: row["choices"][0]["resources"].update(registers=1.5), r"resources.registers must be an integer"),
        (lambda row: row["vendor"].update(resources=7), r"vendor.resources must be an object"),
    ],
)
def test_a_field_that_is_not_what_it_should_be_is_named(change: Callable[[dict[str, Any]], object], words: str) -> None:
    with pytest.raises(TableError, match=words):
        read_table(edited(change))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_numbers_that_json_does_not_have_are_refused(number: str) -> None:
    text = table_text(DECISIONS[:1]).replace('"median_us":90.0', f'"median_us":{number}')

    with pytest.raises(TableError, match=r"not a number|a number that JSON does not have"):
        read_table(text)
