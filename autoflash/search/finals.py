"""The end of a cell: full verification of the best, an interleaved comparison, and the decision."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence

from autoflash.db.repository import Repository
from autoflash.device import Device, DeviceKind
from autoflash.dispatch.buckets import inside_of
from autoflash.dispatch.decide import decide
from autoflash.evaluate.compile_pool import CompilePool
from autoflash.evaluate.grid import full_cases
from autoflash.evaluate.isolated import Evaluator
from autoflash.problem import Cell, Problem
from autoflash.space.catalog import has_precondition
from autoflash.trial import Decision, Environment, Level, Trial, Verification
from autoflash.variant import Family, Variant

# Generated kernels that are compared in the end, besides the default. The full grid takes a CPU seconds for each.
_FINALISTS, _CPU_FINALISTS = 6, 4
_WITHOUT_PRECONDITION = 2
_VENDORS = 3
# A vendor kernel so much slower than the fastest one only takes time from the others.
_VENDOR_SPREAD = 2.0


class Finals:
    """Decides cells of one run."""

    def __init__(
        self,
        repository: Repository,
        evaluator: Evaluator,
        pool: CompilePool,
        device: Device,
        environment: Environment,
    ) -> None:
        self._repository = repository
        self._evaluator = evaluator
        self._pool = pool
        self._device = device
        self._environment = environment

    def pick(self, cell: Cell, defaults: Iterable[Variant]) -> list[Trial]:
        """Who takes part: the fastest by screening that are not known to be wrong, defaults, and vendors."""
        trials = self._timed(cell)
        generated = [trial for trial in trials if trial.variant.family is not Family.VENDOR]
        vendors = [trial for trial in trials if trial.variant.family is Family.VENDOR]
        plain = [trial for trial in generated if not has_precondition(trial.variant)]
        wanted = set(defaults)
        most = _CPU_FINALISTS if self._device.kind is DeviceKind.CPU else _FINALISTS
        chosen = {trial.variant: trial for trial in generated[:most] + plain[:_WITHOUT_PRECONDITION]}
        chosen |= {trial.variant: trial for trial in generated if trial.variant in wanted}
        limit = _time(vendors[0]) * _VENDOR_SPREAD if vendors else 0.0
        chosen |= {trial.variant: trial for trial in vendors[:_VENDORS] if _time(trial) <= limit}
        return list(chosen.values())

    def decide(
        self, cell: Cell, problem: Problem, finalists: Sequence[Trial], defaults: Iterable[Variant]
    ) -> Decision | None:
        """Verify, compare and choose; the decision is saved. None where nobody passed: nothing is saved."""
        for trial in finalists:
            if self._known(cell, trial) is None:
                self._pool.prepare(full_cases(problem), trial.variant, self._device)
        passed = [trial for trial in finalists if self._passes(cell, problem, trial)]
        if not any(trial.variant.family is not Family.VENDOR for trial in passed):
            return None
        run = uuid.uuid4().hex[:12]
        outcomes = self._evaluator.rerank(problem, [trial.variant for trial in passed], run)
        for trial, outcome in zip(passed, outcomes, strict=True):
            if outcome.measurement is not None and trial.id is not None:
                self._repository.add_measurement(trial.id, outcome.measurement)
        trials = self._repository.trials(cell=cell, environment=self._environment)
        decision = decide(
            cell,
            self._environment,
            [trial for trial in trials if trial.variant.family is not Family.VENDOR],
            [trial for trial in trials if trial.variant.family is Family.VENDOR],
            neighbours=self._repository.decisions(environment=self._environment),
            defaults=set(defaults),
        )
        if decision is not None:
            self._repository.save_decision(decision)
        return decision

    def _passes(self, cell: Cell, problem: Problem, trial: Trial) -> bool:
        """Whether a kernel passes the full grid; asked once for all cells that it serves."""
        known = self._known(cell, trial)
        if known is not None:
            return known
        self._pool.prepare(full_cases(problem), trial.variant, self._device)()
        outcome = self._evaluator.verify_full(problem, inside_of(cell, self._device), trial.variant)
        verification = outcome.verification or Verification(
            level=Level.FULL, passed=False, worst_ratio=float("inf"), detail=outcome.detail, checks=0
        )
        self._repository.add_verification(trial.source_digest, trial.variant, cell, self._environment, verification)
        return verification.passed

    def _known(self, cell: Cell, trial: Trial) -> bool | None:
        """What the recorded verifications say; None where the full grid is still to be asked."""
        known = self._repository.verification(trial.source_digest, trial.variant, cell, self._environment)
        return None if known is None or (known.passed and known.level is not Level.FULL) else known.passed

    def _timed(self, cell: Cell) -> list[Trial]:
        """Correct trials of the cell, fastest first."""
        trials = self._repository.trials(cell=cell, environment=self._environment)
        right = [trial for trial in trials if trial.measurement is not None and not _is_refuted(trial)]
        return sorted(right, key=_time)


def _is_refuted(trial: Trial) -> bool:
    return trial.verification is not None and not trial.verification.passed


def _time(trial: Trial) -> float:
    return trial.measurement.median_us if trial.measurement is not None else float("inf")
