"""Which recorded trials hold today. The tuner looks at trials, and claims new ones, through here alone."""

from __future__ import annotations

from autoflash.codegen.render import render
from autoflash.db.claim import Claim
from autoflash.db.repository import Repository
from autoflash.errors import RenderError
from autoflash.problem import Cell, Form
from autoflash.trial import Environment, Trial
from autoflash.variant import Family, Variant


class Records:
    """Trials of one environment whose kernels are what today's templates give.

    A trial of another text says nothing about today's: it is kept, but neither counted, nor told to a search, nor
    ranked, and its variant is free to be tried anew.
    """

    def __init__(self, repository: Repository, environment: Environment) -> None:
        self._repository = repository
        self._environment = environment

    def trials(self, cell: Cell, *, family: Family | None = None) -> list[Trial]:
        """Trials of a cell that hold, by id.

        Args:
            cell: Of the trials.
            family: Only variants of it.
        """
        found = self._repository.trials(cell=cell, environment=self._environment, family=family)
        return [trial for trial in found if trial.source_digest == current_digest(cell, trial.variant)]

    def claim(self, cell: Cell, variant: Variant) -> Claim | None:
        """Claim a trial; None where there is one that holds, or a live process has claimed it."""
        return self._repository.claim(cell, variant, self._environment, source_digest=current_digest(cell, variant))


def current_digest(cell: Cell, variant: Variant) -> str:
    """Digest of the text that the templates give for a variant; empty where they give none, as for vendor kernels."""
    if variant.family is Family.VENDOR:
        return ""
    try:
        return render(Form.of(cell), variant.family, variant.structure).digest
    except RenderError:
        return ""
