from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoflash.cli import tune as tune_command
from autoflash.cli.application import main
from autoflash.db.repository import Repository
from autoflash.problem import Feature
from autoflash.search.request import CellPlan, CellSummary, TuneRequest, TuneSummary
from autoflash.trial import Status
from autoflash.variant import Family
from tests.cli import faulty
from tests.factories import make_cell, make_problem

CELL = ["--device", "cpu", "--pass", "forward", "--dtype", "fp32", "--head-dim", "16", "--full", "--seqlen", "128"]


def _requests(monkeypatch: pytest.MonkeyPatch) -> list[TuneRequest]:
    """The requests that the command makes, without running them."""
    made: list[TuneRequest] = []

    def tune(request: TuneRequest, repository: object, *, on_event: object) -> TuneSummary:
        made.append(request)
        return TuneSummary(cells=(), unreached=(), seed=0, seconds=0.0)

    monkeypatch.setattr(tune_command, "tune", tune)
    return made


def test_trials_are_a_total_and_the_same_command_completes_them(
    run_json: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *CELL, "--trials", "3"]) == 0
    printed = capsys.readouterr()
    again = run_json("tune", *CELL, "--trials", "3")
    more = run_json("tune", *CELL, "--more", "2")

    assert "forward/fp32/d16/full/q128/k128" in printed.out
    assert "Recorded in" in printed.out
    assert "3 trials" in printed.err
    assert [report["cells"][0]["total"] for report in (again, more)] == [3, 5]
    assert again["cells"][0]["added"] == {}
    assert again["cells"][0]["decision"]["choices"]
    with Repository.open(read_only=True) as repository:
        generated = [trial for trial in repository.trials() if trial.variant.family is not Family.VENDOR]
    assert len(generated) == len({trial.variant for trial in generated}) == 5


def test_a_dry_run_says_what_would_be_done_and_makes_nothing(run_json: Callable[..., Any], tmp_path: Path) -> None:
    database = tmp_path / "none.sqlite"

    planned = run_json("tune", *CELL, "--trials", "5", "--dry-run", "--db", str(database))

    (cell,) = planned["cells"]
    assert (cell["name"], cell["recorded"], cell["to_do"]) == ("forward/fp32/d16/full/q128/k128", 0, 5)
    assert cell["variants"] >= 5
    assert planned["estimated_s"] > 0
    assert not database.exists()


def test_options_make_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _requests(monkeypatch)

    arguments = "--dtype bf16 --dtype fp16 --head-dim 96 --causal --seqlen 200 --budget 2m --seed 5 --trials 9"
    assert main(["tune", "--device", "cpu", *arguments.split()]) == 0

    (request,) = made
    assert (request.trials, request.more, request.budget_s, request.seed) == (9, None, 120.0, 5)
    assert {cell.dtype.value for cell in request.cells} == {"bf16", "fp16"}
    assert {(cell.head_dim, cell.mask.value, cell.q_bucket) for cell in request.cells} == {(96, "causal", 8)}


def test_features_are_asked_of_every_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _requests(monkeypatch)

    arguments = (
        "--window 127,0 --softcap 30 --dropout 0.2 --float-mask --group 2 --group 4 --head-dim 192 --head-dim-v 128"
    )
    assert main(["tune", "--device", "cpu", *arguments.split()]) == 0

    (request,) = made
    assert {(cell.features, cell.window_bucket) for cell in request.cells} == {
        ((Feature.SOFTCAP, Feature.FLOAT_MASK, Feature.WINDOW, Feature.DROPOUT), 7)
    }
    assert {(cell.head_dim, cell.head_dim_v, cell.group) for cell in request.cells} == {(192, 128, 2), (192, 128, 4)}


def test_the_features_preset_is_planned(run_json: Callable[..., Any]) -> None:
    planned = run_json("tune", "--preset", "features", "--dry-run")

    names = {cell["name"] for cell in planned["cells"]}
    assert "forward/fp32/d64/gqa4/causal+softcap+window/w128/q512/k512" in names
    assert all(cell["to_do"] > 0 for cell in planned["cells"])


def test_a_cell_with_features_is_tuned_and_its_winner_dispatched(run_json: Callable[..., Any]) -> None:
    features = ["--window", "15,0", "--softcap", "30"]
    tiny = [*CELL[:-2], "--seqlen", "64", "--group", "2"]

    (cell,) = run_json("tune", *tiny, *features, "--trials", "2")["cells"]

    assert cell["name"].startswith("forward/fp32/d16/gqa2/causal+softcap+window/w16/q64/k64")
    assert cell["added"] == {"correct": 2}
    winner = cell["decision"]["choices"][0]["variant"]
    assert cell["decision"]["vendor"] is None
    sizes = ["--head-dim", "16", "--heads", "32", "--kv-heads", "16", "--seqlen", "64", "--batch", "16"]
    (explained,) = run_json("explain", *sizes, *features)["passes"]
    assert (explained["tier"], explained["variant"]) == ("exact", winner)


def test_without_options_a_preset_with_a_budget_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _requests(monkeypatch)

    assert main(["tune", "--device", "cpu"]) == 0

    (request,) = made
    assert len(request.cells) > 1
    assert request.budget_s is not None
    assert request.seed is None


def test_a_total_and_an_addition_contradict_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--device", "cpu", "--trials", "3", "--more", "2"]) == 2

    assert "give one of them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("total", "code", "words"), [(0, 0, "The budget ended before 1 cells"), (3, 1, "No kernel for")]
)
def test_a_cell_that_the_budget_left_untried_is_no_failure(
    total: int, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = CellPlan(cell=make_cell(), problem=make_problem(), variants=90, recorded=0, to_do=10)
    cell = CellSummary(
        plan=plan, added={}, total=total, decision=None, is_new=False, default_us=None, note="none", seconds=1.0
    )
    summary = TuneSummary(cells=(cell,), unreached=(), seed=0, seconds=1.0)
    monkeypatch.setattr(tune_command, "tune", lambda *_, **__: summary)

    assert main(["tune", *CELL]) == code

    output = capsys.readouterr()
    assert words in output.out + output.err


def test_case_a44_a_run_without_a_correct_candidate_fails_and_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = tune_command.TuneRequest
    monkeypatch.setattr(
        tune_command, "TuneRequest", lambda **fields: real(**fields, binder="tests.cli.faulty:always", vendors=False)
    )

    assert main(["tune", *CELL, "--trials", "3"]) == 1

    assert "no candidate is correct: 3 runtime" in capsys.readouterr().err
    with Repository.open(read_only=True) as repository:
        assert repository.decisions() == []


def test_case_a19_some_bad_candidates_do_not_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_json: Callable[..., Any]
) -> None:
    # Times differ from run to run, and with them what a search asks for: bad is every second variant, not a known one.
    seen = tmp_path / "seen"
    seen.mkdir()
    monkeypatch.setenv(faulty.SEEN, str(seen))
    real = tune_command.TuneRequest
    monkeypatch.setattr(
        tune_command, "TuneRequest", lambda **fields: real(**fields, binder="tests.cli.faulty:every_second")
    )

    report = run_json("tune", *CELL, "--trials", "8")

    (cell,) = report["cells"]
    with Repository.open(read_only=True) as repository:
        trials = [trial for trial in repository.trials() if trial.variant.family is not Family.VENDOR]
        decision = repository.decisions()[0]
    assert cell["total"] == 8
    assert [trial.status for trial in trials] == [Status.CORRECT, Status.RUNTIME] * 4
    assert cell["added"]["runtime"] == 4
    assert cell["added"]["correct"] >= 4
    bad = {trial.variant for trial in trials if trial.status is Status.RUNTIME}
    assert decision.choices
    assert bad.isdisjoint(ranked.variant for ranked in decision.choices)


def test_case_a23_a_database_that_cannot_be_made_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *CELL, "--db", "/proc/autoflash/tuning.sqlite"]) == 2

    assert "/proc/autoflash" in capsys.readouterr().err
