"""The tuner: for each cell, search space -> ask -> compile -> verify -> measure -> record -> tell, then decide."""

from __future__ import annotations

import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from types import FrameType

from autoflash import keys
from autoflash.db.repository import Repository
from autoflash.evaluate.compile_pool import CompilePool
from autoflash.evaluate.evaluator import Outcome
from autoflash.evaluate.isolated import Evaluator, IsolatedEvaluator
from autoflash.problem import Cell, Problem
from autoflash.runtime.probe import environment
from autoflash.search.budget import Budget
from autoflash.search.claims import Claims
from autoflash.search.finals import Finals, Verdict
from autoflash.search.goals import count, goals, plan_cell
from autoflash.search.pipeline import Candidate, Pipeline
from autoflash.search.records import Records, current_digest
from autoflash.search.request import (
    CellFinished,
    CellPlan,
    CellStarted,
    CellSummary,
    Event,
    FinalsStarted,
    TrialFinished,
    TuneRequest,
    TuneSummary,
)
from autoflash.search.sampler import Feedback, Sampler
from autoflash.search.seeds import neighbours_winners
from autoflash.space import catalog
from autoflash.trial import Decision, Environment, Status, Trial
from autoflash.variant import Family, Variant

OnEvent = Callable[[Event], None]


def tune(
    request: TuneRequest,
    repository: Repository,
    *,
    on_event: OnEvent = lambda _: None,
    evaluator: Evaluator | None = None,
) -> TuneSummary:
    """Tune cells, one after the other, and record everything that is learnt.

    What is recorded survives an interruption; the same request completes it. An existing decision is kept where
    nothing better can be said.

    Args:
        request: What to tune.
        repository: Where trials and decisions go.
        on_event: Told of everything that happens, in this thread.
        evaluator: Tries the candidates; None for a worker process on the request's device.

    Raises:
        KeyboardInterrupt: on Ctrl-C and on SIGTERM, after the workers were killed and claims given back.
    """
    started = time.monotonic()
    seed = request.seed if request.seed is not None else secrets.randbelow(2**31)
    with ExitStack() as stack:
        stack.enter_context(_interrupted_by_sigterm())
        if evaluator is None:
            evaluator = stack.enter_context(
                IsolatedEvaluator(request.device, binder=request.binder, limits=request.limits)
            )
        pool = stack.enter_context(CompilePool(request.workers))
        records = Records(repository, environment(request.device))
        claims = stack.enter_context(Claims(records))
        tuner = _Tuner(request, repository, records, claims, evaluator, pool, seed, on_event)
        budget = Budget(request.budget_s, len(request.cells))
        summaries: list[CellSummary] = []
        for index, cell in enumerate(request.cells):
            if not budget.begin_cell():
                break
            summaries.append(tuner.tune_cell(cell, index, budget))
            on_event(CellFinished(summary=summaries[-1]))
    return TuneSummary(
        cells=tuple(summaries),
        unreached=request.cells[len(summaries) :],
        seed=seed,
        seconds=time.monotonic() - started,
    )


def plan(request: TuneRequest, repository: Repository | None) -> tuple[CellPlan, ...]:
    """What a request would do; nothing is run, compiled or written."""
    here = environment(request.device)
    families = families_of(request, here)
    records = None if repository is None else Records(repository, here)
    return tuple(plan_cell(request, records, families, cell) for cell in request.cells)


def families_of(request: TuneRequest, here: Environment) -> tuple[Family, ...]:
    """The generated families that a request searches."""
    if request.families is not None:
        return request.families
    if not request.cells:
        return ()
    able = catalog.families(request.cells[0].op, request.device)
    compiled = tuple(family for family in able if family.uses_triton and here.triton)
    return compiled or (Family.TORCH_TILED,)


class _Tuner:
    """What stays the same from cell to cell."""

    def __init__(
        self,
        request: TuneRequest,
        repository: Repository,
        records: Records,
        claims: Claims,
        evaluator: Evaluator,
        pool: CompilePool,
        seed: int,
        on_event: OnEvent,
    ) -> None:
        self.request = request
        self.repository = repository
        self.records = records
        self.claims = claims
        self.evaluator = evaluator
        self.pool = pool
        self.seed = seed
        self.on_event = on_event
        self.here = environment(request.device)
        self.families = families_of(request, self.here)
        self.finals = Finals(repository, records, evaluator, pool, request.device, self.here)

    def tune_cell(self, cell: Cell, index: int, budget: Budget) -> CellSummary:
        """Search one cell and decide it."""
        started = time.monotonic()
        plan = plan_cell(self.request, self.records, self.families, cell)
        self.on_event(CellStarted(plan=plan, index=index, cells=len(self.request.cells)))
        log = _CellLog(plan, self.on_event)
        self._try_vendors(log)
        for family in self.families:
            self._search(family, log, budget)
        return self._finish(log, started)

    def _search(self, family: Family, log: _CellLog, budget: Budget) -> None:
        """The loop: ask, compile, verify, measure, record, tell."""
        plan = log.plan
        goal = goals(self.request, self.records, self.families, plan.cell)[family]
        target = goal.counted + goal.to_do
        sampler = self._sampler(plan.cell, family, target)

        def refresh() -> None:
            for trial in self.records.trials(plan.cell, family=family):
                sampler.warm(trial.variant, _feedback(trial))

        refresh()
        pipeline = Pipeline(
            sampler,
            self.pool,
            self.claims,
            cell=plan.cell,
            problem=plan.problem,
            device=self.request.device,
            refresh=refresh,
        )
        with closing(pipeline):
            if target > sampler.counted:
                pipeline.compile_ahead(target - sampler.counted)
            added = 0
            while budget.may_search:
                remaining = goal.to_do - added if self.request.more is not None else target - sampler.counted
                candidate = pipeline.next(remaining) if remaining > 0 else None
                if candidate is None:
                    break
                trial = self._record(plan.cell, candidate.variant, self._try(plan.problem, candidate))
                sampler.tell(candidate.variant, _feedback(trial))
                pipeline.settle()
                added += trial.status is not Status.CONSTRAINTS
                log.add(trial)

    def _try(self, problem: Problem, candidate: Candidate) -> Outcome:
        """Verify and measure what compiled."""
        compiled = candidate.compiled
        if compiled.status is not Status.CORRECT:
            return Outcome(
                status=compiled.status,
                detail=compiled.detail,
                resources=compiled.resources,
                source_digest=compiled.source_digest,
            )
        outcome = self.evaluator.screen(problem, candidate.variant)
        return Outcome(
            status=outcome.status,
            detail=outcome.detail,
            verification=outcome.verification,
            measurement=outcome.measurement,
            resources=outcome.resources or compiled.resources,
            source_digest=outcome.source_digest or compiled.source_digest,
        )

    def _try_vendors(self, log: _CellLog) -> None:
        """Vendor kernels are candidates too; each is tried once for each cell."""
        if not self.request.vendors:
            return
        cell = log.plan.cell
        known = self.records.trials(cell, family=Family.VENDOR)
        for trial in known:
            log.know(trial)
        for variant in catalog.vendors(cell, self.request.device):
            if variant in {trial.variant for trial in known}:
                continue
            claim = self.claims.take(cell, variant)
            if claim is None:
                continue
            try:
                log.add(self._record(cell, variant, self.evaluator.screen(log.plan.problem, variant)))
            finally:
                self.claims.release(claim)

    def _record(self, cell: Cell, variant: Variant, outcome: Outcome) -> Trial:
        return self.repository.record(
            Trial(
                cell=cell,
                variant=variant,
                environment=self.here,
                # Of a process that died nothing was heard: its kernel is what the templates give.
                source_digest=outcome.source_digest or current_digest(cell, variant),
                status=outcome.status,
                detail=outcome.detail,
                resources=outcome.resources,
                verification=outcome.verification,
                measurement=outcome.measurement,
                seed=self.seed,
            )
        )

    def _sampler(self, cell: Cell, family: Family, target: int) -> Sampler:
        space = catalog.search_space(cell, self.request.device, family)
        winners = neighbours_winners(cell, self.repository.decisions(environment=self.here))
        return Sampler(
            family=family,
            knobs=space.knobs,
            scores=space.scores(),
            first=[space.default(), *(space.normalise(v) for v in winners if v.family is family)],
            budget=target,
            seed=int(keys.key("search", [self.seed, cell.key, family.value])[:8], 16),
        )

    def _finish(self, log: _CellLog, started: float) -> CellSummary:
        cell, device = log.plan.cell, self.request.device
        existing = next(iter(self.repository.decisions(environment=self.here, cell=cell)), None)
        trials = self.records.trials(cell)
        if existing is not None and not log.added and not _learnt_since(existing, trials):
            verdict = Verdict(note="nothing was added")
        else:
            defaults = [catalog.search_space(cell, device, family).default() for family in self.families]
            finalists = self.finals.pick(cell, defaults)
            if any(trial.variant.family is not Family.VENDOR for trial in finalists):
                self.on_event(FinalsStarted(cell=cell, finalists=len(finalists)))
                verdict = self.finals.decide(cell, log.plan.problem, finalists, defaults)
            else:
                verdict = Verdict(note=f"no candidate is correct: {log.failures()}")
        return CellSummary(
            plan=log.plan,
            added=dict(log.added),
            total=count(trial for trial in trials if trial.variant.family in self.families),
            decision=verdict.decision or existing,
            is_new=verdict.decision is not None,
            default_us=verdict.default_us,
            note=verdict.note,
            seconds=time.monotonic() - started,
        )


class _CellLog:
    """Counts what a run adds to a cell, and says it."""

    def __init__(self, plan: CellPlan, on_event: OnEvent) -> None:
        self.plan = plan
        self.added: Counter[Status] = Counter()
        self._on_event = on_event
        self._done = plan.recorded
        self._best_us: float | None = None
        self._vendor_us: float | None = None

    def know(self, trial: Trial) -> None:
        """Take note of a trial that was there before."""
        if trial.measurement is None:
            return
        if trial.variant.family is Family.VENDOR:
            self._vendor_us = min(self._vendor_us or float("inf"), trial.measurement.median_us)
        else:
            self._best_us = min(self._best_us or float("inf"), trial.measurement.median_us)

    def add(self, trial: Trial) -> None:
        """Count a new trial."""
        self.know(trial)
        self.added[trial.status] += 1
        self._done += trial.variant.family is not Family.VENDOR and trial.status is not Status.CONSTRAINTS
        self._on_event(
            TrialFinished(
                cell=trial.cell,
                variant=trial.variant,
                status=trial.status,
                detail=trial.detail,
                median_us=trial.measurement.median_us if trial.measurement is not None else None,
                best_us=self._best_us,
                vendor_us=self._vendor_us,
                done=self._done,
                total=self.plan.recorded + self.plan.to_do,
            )
        )

    def failures(self) -> str:
        """Kinds of failure with their numbers."""
        kinds = [f"{count} {status.value}" for status, count in self.added.items() if status is not Status.CORRECT]
        return ", ".join(kinds) or "none was tried"


def _learnt_since(decision: Decision, trials: Iterable[Trial]) -> bool:
    """Whether something was timed after a decision: by another process, or by a run that did not come to its end."""
    return any(trial.measurement is not None and trial.measurement.taken_at > decision.decided_at for trial in trials)


def _feedback(trial: Trial) -> Feedback:
    median_us = trial.measurement.median_us if trial.measurement is not None else None
    return Feedback(status=trial.status, median_us=median_us)


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt, as Ctrl-C does. Only the main thread may handle signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
