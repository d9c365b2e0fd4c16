from __future__ import annotations

from autoflash.search.goals import shared_out
from autoflash.variant import Family


def test_families_share_the_trials_and_a_small_space_leaves_its_share_to_the_others() -> None:
    assert shared_out(32, {Family.GLUON_SM90: 100, Family.TRITON: 100}) == {
        Family.GLUON_SM90: 16,
        Family.TRITON: 16,
    }
    assert shared_out(32, {Family.GLUON_SM90: 0, Family.TRITON: 100}) == {
        Family.GLUON_SM90: 0,
        Family.TRITON: 32,
    }
    assert shared_out(33, {Family.GLUON_SM90: 5, Family.TRITON: 20}) == {
        Family.GLUON_SM90: 5,
        Family.TRITON: 20,
    }
    assert sum(shared_out(7, {Family.GLUON_SM90: 9, Family.TRITON: 9}).values()) == 7
