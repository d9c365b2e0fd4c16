"""The search over the recorded sweep: the figures printed here are the claim that the README makes."""

from __future__ import annotations

import functools
import statistics

import pytest

from autoflash.search.replay import Recording, random_search, replay
from autoflash.trial import Status
from tests.search import sweep

_TRIALS = 32
_SEEDS = 20


@functools.cache
def _recordings() -> tuple[Recording, ...]:
    return tuple(sweep.recordings())


@functools.cache
def _regrets(trials: int, *, seeds: int = _SEEDS, large_only: bool = True) -> tuple[list[float], list[float]]:
    """Regrets of the search and of random search, over problems and seeds."""
    problems = [r for r in _recordings() if len(r.rows) > _TRIALS or not large_only]
    searched = [
        problem.regret(replay(problem, trials=trials, seed=seed, stop_at_best=True))
        for problem in problems
        for seed in range(seeds)
    ]
    drawn = [
        problem.regret(random_search(problem, trials=trials, seed=seed))
        for problem in problems
        for seed in range(seeds)
    ]
    return searched, drawn


def _say(trials: int, searched: list[float], drawn: list[float]) -> None:
    print(
        f"\n{trials} trials, {len(searched)} searches: median regret {statistics.median(searched):.2%}, "
        f"mean {statistics.fmean(searched):.2%}, worst {max(searched):.2%}; random search: "
        f"median {statistics.median(drawn):.2%}, mean {statistics.fmean(drawn):.2%}, worst {max(drawn):.2%}"
    )


def test_the_sweep_is_read_whole() -> None:
    problems = _recordings()

    statuses = [row.outcome.status for problem in problems for row in problem.rows.values()]

    assert len(problems) == 33
    assert len(statuses) > 1350
    assert set(statuses) == {Status.CORRECT, Status.CONSTRAINTS, Status.CORRECTNESS, Status.TIMEOUT}


def test_32_trials_come_within_3_percent_and_beat_random_search() -> None:
    searched, drawn = _regrets(_TRIALS)
    _say(_TRIALS, searched, drawn)

    assert statistics.median(searched) <= 0.03
    assert statistics.fmean(searched) <= 0.03
    assert statistics.median(searched) <= statistics.median(drawn)
    assert statistics.fmean(searched) < statistics.fmean(drawn)


def test_no_problem_of_the_sweep_is_left_beyond_3_percent() -> None:
    searched, _ = _regrets(_TRIALS)
    by_problem = [searched[start : start + _SEEDS] for start in range(0, len(searched), _SEEDS)]

    assert max(statistics.median(regrets) for regrets in by_problem) <= 0.03


def test_8_trials_beat_random_search() -> None:
    searched, drawn = _regrets(8, seeds=5)
    _say(8, searched, drawn)

    assert statistics.median(searched) < statistics.median(drawn)
    assert statistics.fmean(searched) < statistics.fmean(drawn)


def test_a_replay_repeats_itself() -> None:
    problem = next(p for p in _recordings() if p.name == "forward/d128/causal")

    assert replay(problem, trials=24, seed=3) == replay(problem, trials=24, seed=3)


def test_refusals_cost_no_trial() -> None:
    problem = next(p for p in _recordings() if p.name == "forward/d128/full")

    tried = replay(problem, trials=len(problem.rows), seed=0)

    refused = [v for v, row in problem.rows.items() if row.outcome.status is Status.CONSTRAINTS]
    assert refused
    assert len(tried) == len(problem.rows) - len(refused)


@pytest.mark.slow
@pytest.mark.parametrize("trials", [4, 8, 16, 24, 32, 48])
def test_more_trials_leave_less_regret_than_random_search(trials: int) -> None:
    searched, drawn = _regrets(trials, large_only=False)
    _say(trials, searched, drawn)

    assert statistics.fmean(searched) < statistics.fmean(drawn)
