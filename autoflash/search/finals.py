"""The end of a cell: full verification of the best, an interleaved comparison, and the decision."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoflash.db.repository import Repository
from autoflash.device import Device, DeviceKind
from autoflash.dispatch.buckets import inside_of
from autoflash.dispatch.decide import decide
from autoflash.evaluate.compile_pool import CompilePool
from autoflash.evaluate.evaluator import Outcome
from autoflash.evaluate.grid import full_cases
from autoflash.evaluate.isolated import Evaluator
from autoflash.problem import Cell, Problem
from autoflash.search.records import Records
from autoflash.space.catalog import has_precondition
from autoflash.trial import Decision, Environment, Level, Trial, Verification
from autoflash.variant import Family, Variant

# Generated kernels that are compared in the end, besides the default. The full grid takes a CPU seconds for each.
_FINALISTS, _CPU_FINALISTS = 6, 4
_WITHOUT_PRECONDITION = 2
_VENDORS = 3
# A vendor kernel so much slower than the fastest one only takes time from the others.
_VENDOR_SPREAD = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of a comparison.

    Attributes:
        decision: As it was saved; None where there is none.
        default_us: The default's time in the comparison; None where it was not in it.
        note: Why there is no decision; empty where there is one.
    """

    decision: Decision | None = None
    default_us: float | None = None
    note: str = ""


class Finals:
    """Decides cells of one run."""

    def __init__(
        self,
        repository: Repository,
        records: Records,
        evaluator: Evaluator,
        pool: CompilePool,
        device: Device,
        environment: Environment,
    ) -> None:
        self._repository = repository
        self._records = records
        self._evaluator = evaluator
        self._pool = pool
        self._device = device
        self._environment = environment

    def pick(self, cell: Cell, defaults: Iterable[Variant]) -> list[Trial]:
        """Who takes part: the fastest by screening that are not known to be wrong, defaults, and vendors."""
        trials = self._timed(cell)
        generated = [trial for trial in trials if _is_generated(trial)]
        vendors = [trial for trial in trials if not _is_generated(trial)]
        plain = [trial for trial in generated if not has_precondition(trial.variant)]
        wanted = set(defaults)
        most = _CPU_FINALISTS if self._device.kind is DeviceKind.CPU else _FINALISTS
        chosen = {trial.variant: trial for trial in generated[:most] + plain[:_WITHOUT_PRECONDITION]}
        chosen |= {trial.variant: trial for trial in generated if trial.variant in wanted}
        limit = _time(vendors[0]) * _VENDOR_SPREAD if vendors else 0.0
        chosen |= {trial.variant: trial for trial in vendors[:_VENDORS] if _time(trial) <= limit}
        return list(chosen.values())

    def decide(self, cell: Cell, problem: Problem, finalists: Sequence[Trial], defaults: Iterable[Variant]) -> Verdict:
        """Verify, compare and choose; a decision is saved. Without one, that of an earlier run stays."""
        passed = self._verified(cell, problem, finalists)
        if not any(_is_generated(trial) for trial in passed):
            return Verdict(note="no candidate passed the full verification")
        run = uuid.uuid4().hex[:12]
        outcomes = self._compare(problem, passed, run)
        for trial, outcome in zip(passed, outcomes, strict=True):
            if outcome.measurement is not None and trial.id is not None:
                self._repository.add_measurement(trial.id, outcome.measurement)
        compared = [
            trial
            for trial in self._records.trials(cell)
            if trial.measurement is not None and trial.measurement.run == run
        ]
        wanted = set(defaults)
        decision = decide(
            cell,
            self._environment,
            [trial for trial in compared if _is_generated(trial)],
            [trial for trial in compared if not _is_generated(trial)],
            neighbours=self._repository.decisions(environment=self._environment),
            defaults=wanted,
        )
        if decision is None:
            why = next((outcome.detail for outcome in outcomes if outcome.detail), "no reason was given")
            return Verdict(note=f"no candidate could be timed again: {why}")
        self._repository.save_decision(decision)
        default_us = min((_time(trial) for trial in compared if trial.variant in wanted), default=None)
        return Verdict(decision=decision, default_us=default_us)

    def _verified(self, cell: Cell, problem: Problem, finalists: Sequence[Trial]) -> list[Trial]:
        """The finalists that pass the full grid, and for each generated one that does not, the next that does.

        No more are asked in their stead than there were, so that a family that is wrong throughout comes to an end.
        """
        for trial in finalists:
            if self._known(cell, trial) is None:
                self._pool.prepare(full_cases(problem), trial.variant, self._device)
        passed = [trial for trial in finalists if self._passes(cell, problem, trial)]
        wanted = _seats(finalists)
        asked = {trial.variant for trial in finalists}
        reserve = [trial for trial in self._timed(cell) if _is_generated(trial) and trial.variant not in asked]
        for _ in range(wanted.generated):
            seats = _seats(passed)
            plain = [trial for trial in reserve if not has_precondition(trial.variant)]
            if seats.generated >= wanted.generated or not reserve:
                break
            needs_plain = seats.plain < min(wanted.plain, _WITHOUT_PRECONDITION)
            following = plain[0] if needs_plain and plain else reserve[0]
            reserve.remove(following)
            if self._passes(cell, problem, following):
                passed.append(following)
        return passed

    def _compare(self, problem: Problem, trials: Sequence[Trial], run: str) -> list[Outcome]:
        """Time kernels in turns; where one takes the worker down with it, the others are still timed.

        Which one did is known only where the device says so. Otherwise all are tried again, since another program may
        have been the cause, and then each by itself, and those that live together once more.
        """
        outcomes: dict[Variant, Outcome] = {}
        variants = [trial.variant for trial in trials]
        for _ in range(2):
            outcomes |= self._rerank(problem, variants, run)
            if any(outcomes[variant].measurement is not None for variant in variants):
                break
            variants = [variant for variant in variants if not outcomes[variant].poisoned]
        else:
            for variant in variants:
                outcomes |= self._rerank(problem, [variant], run)
            alive = [variant for variant in variants if outcomes[variant].measurement is not None]
            together = self._rerank(problem, alive, run) if len(alive) > 1 else {}
            if any(outcome.measurement is not None for outcome in together.values()):
                outcomes |= together
        return [outcomes[trial.variant] for trial in trials]

    def _rerank(self, problem: Problem, variants: Sequence[Variant], run: str) -> dict[Variant, Outcome]:
        return dict(zip(variants, self._evaluator.rerank(problem, variants, run), strict=True)) if variants else {}

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
        trials = self._records.trials(cell)
        right = [trial for trial in trials if trial.measurement is not None and not _is_refuted(trial)]
        return sorted(right, key=_time)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seats:
    """How many generated kernels there are, and how many of them have no precondition."""

    generated: int
    plain: int


def _seats(trials: Iterable[Trial]) -> _Seats:
    generated = [trial.variant for trial in trials if _is_generated(trial)]
    return _Seats(generated=len(generated), plain=sum(not has_precondition(variant) for variant in generated))


def _is_generated(trial: Trial) -> bool:
    return trial.variant.family is not Family.VENDOR


def _is_refuted(trial: Trial) -> bool:
    return trial.verification is not None and not trial.verification.passed


def _time(trial: Trial) -> float:
    return trial.measurement.median_us if trial.measurement is not None else float("inf")
