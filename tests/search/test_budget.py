from __future__ import annotations

from autoflash.search.budget import Budget


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_without_a_limit_nothing_ends() -> None:
    budget = Budget(None, 3)

    assert budget.begin_cell()
    assert budget.may_search


def test_a_cell_searches_for_most_of_its_equal_share() -> None:
    clock = _Clock()
    budget = Budget(100.0, 2, clock=clock)

    assert budget.begin_cell()
    clock.now = 34.0
    assert budget.may_search
    clock.now = 36.0
    assert not budget.may_search


def test_time_that_one_cell_saves_goes_to_the_others() -> None:
    clock = _Clock()
    budget = Budget(100.0, 2, clock=clock)
    budget.begin_cell()
    clock.now = 10.0

    budget.begin_cell()
    clock.now = 10.0 + 0.7 * 90.0 - 1.0

    assert budget.may_search


def test_no_cell_begins_after_the_end() -> None:
    clock = _Clock()
    budget = Budget(100.0, 2, clock=clock)
    budget.begin_cell()
    clock.now = 100.0

    assert not budget.begin_cell()
