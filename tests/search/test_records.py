"""A trial holds as long as its kernel is the one that the templates give."""

from __future__ import annotations

import pytest

from autoflash.codegen.render import render
from autoflash.db.repository import Repository
from autoflash.problem import Form
from autoflash.runtime.probe import environment
from autoflash.search.records import Records, current_digest
from autoflash.space import catalog
from autoflash.trial import Status, Trial
from autoflash.variant import Family, Variant
from tests.factories import make_trial
from tests.search.recorded import CELL, CPU, default

_HERE = environment(CPU)
_STALE = "f" * 16


@pytest.fixture
def records(repository: Repository) -> Records:
    return Records(repository, _HERE)


def _trial(variant: Variant, digest: str, status: Status = Status.CORRECT) -> Trial:
    return make_trial(cell=CELL, variant=variant, environment=_HERE, source_digest=digest, status=status)


def test_the_digest_is_that_of_the_rendered_text() -> None:
    variant = default()

    assert current_digest(CELL, variant) == render(Form.of(CELL), variant.family, variant.structure).digest


def test_what_has_no_text_has_no_digest() -> None:
    unknown = Variant(
        family=Family.TORCH_TILED, structure=default().structure.replace(loop_order="spiral"), config=default().config
    )

    assert current_digest(CELL, unknown) == ""
    assert [current_digest(CELL, vendor) for vendor in catalog.vendors(CELL, CPU)] == ["", ""]


def test_a_trial_of_another_text_does_not_hold(repository: Repository, records: Records) -> None:
    old = repository.record(_trial(default(), _STALE))
    new = repository.record(_trial(default(), current_digest(CELL, default())))

    assert repository.trials() == [old, new]
    assert records.trials(CELL) == records.trials(CELL, family=Family.TORCH_TILED) == [new]


def test_vendors_trials_hold(repository: Repository, records: Records) -> None:
    vendor = repository.record(_trial(catalog.vendors(CELL, CPU)[0], ""))

    assert records.trials(CELL) == records.trials(CELL, family=Family.VENDOR) == [vendor]


@pytest.mark.parametrize("status", [Status.CORRECT, Status.TIMEOUT])
def test_a_variant_whose_text_has_changed_may_be_tried_again(
    repository: Repository, records: Records, status: Status
) -> None:
    repository.record(_trial(default(), _STALE, status))

    claim = records.claim(CELL, default())
    assert claim is not None
    assert records.claim(CELL, default()) is None
    claim.release()
    repository.record(_trial(default(), current_digest(CELL, default()), status))
    assert records.claim(CELL, default()) is None
