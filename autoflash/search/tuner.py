"""The tuner: for each cell, search space -> ask -> compile -> verify -> measure -> record -> tell, then decide."""

from __future__ import annotations

import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from types import FrameType

from autoflash import keys
from autoflash.db.repository import Repository
from autoflash.dispatch.buckets import problem_of
from autoflash.evaluate.compile_pool import CompilePool
from autoflash.evaluate.evaluator import Outcome
from autoflash.evaluate.isolated import Evaluator, IsolatedEvaluator
from autoflash.problem import Cell, Problem
from autoflash.runtime.probe import environment
from autoflash.search.budget import Budget
from autoflash.search.finals import Finals
from autoflash.search.pipeline import Candidate, Pipeline
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
from autoflash.trial import Decision, Environment, Stage, Status, Trial
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
        tuner = _Tuner(request, repository, evaluator, pool, seed, on_event)
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
    return tuple(_plan_cell(request, repository, here, families, cell) for cell in request.cells)


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
        evaluator: Evaluator,
        pool: CompilePool,
        seed: int,
        on_event: OnEvent,
    ) -> None:
        self.request = request
        self.repository = repository
        self.evaluator = evaluator
        self.pool = pool
        self.seed = seed
        self.on_event = on_event
        self.here = environment(request.device)
        self.families = families_of(request, self.here)
        self.finals = Finals(repository, evaluator, pool, request.device, self.here)

    def tune_cell(self, cell: Cell, index: int, budget: Budget) -> CellSummary:
        """Search one cell and decide it."""
        started = time.monotonic()
        plan = _plan_cell(self.request, self.repository, self.here, self.families, cell)
        self.on_event(CellStarted(plan=plan, index=index, cells=len(self.request.cells)))
        log = _CellLog(plan, self.on_event)
        self._try_vendors(log)
        for family in self.families:
            self._search(family, log, budget)
        return self._finish(log, started)

    def _search(self, family: Family, log: _CellLog, budget: Budget) -> None:
        """The loop: ask, compile, verify, measure, record, tell."""
        plan = log.plan
        goal = _goals(self.request, self.repository, self.here, self.families, plan.cell)[family]
        target = goal.counted + goal.to_do
        sampler = self._sampler(plan.cell, family, target)

        def refresh() -> None:
            for trial in self.repository.trials(cell=plan.cell, environment=self.here, family=family):
                sampler.warm(trial.variant, _feedback(trial))

        refresh()
        pipeline = Pipeline(
            sampler,
            self.pool,
            self.repository,
            cell=plan.cell,
            problem=plan.problem,
            environment=self.here,
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
        known = self.repository.trials(cell=cell, environment=self.here, family=Family.VENDOR)
        for trial in known:
            log.know(trial)
        for variant in catalog.vendors(cell, self.request.device):
            if variant in {trial.variant for trial in known}:
                continue
            claim = self.repository.claim(cell, variant, self.here)
            if claim is None:
                continue
            with claim:
                log.add(self._record(cell, variant, self.evaluator.screen(log.plan.problem, variant)))

    def _record(self, cell: Cell, variant: Variant, outcome: Outcome) -> Trial:
        return self.repository.record(
            Trial(
                cell=cell,
                variant=variant,
                environment=self.here,
                source_digest=outcome.source_digest,
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

    def _counted(self, cell: Cell, family: Family) -> int:
        return _counted(self.repository.trials(cell=cell, environment=self.here, family=family))

    def _finish(self, log: _CellLog, started: float) -> CellSummary:
        cell, device = log.plan.cell, self.request.device
        existing = next(iter(self.repository.decisions(environment=self.here, cell=cell)), None)
        decision, note = None, ""
        if existing is not None and not log.added:
            note = "nothing was added"
        else:
            defaults = [catalog.search_space(cell, device, family).default() for family in self.families]
            finalists = self.finals.pick(cell, defaults)
            if any(trial.variant.family is not Family.VENDOR for trial in finalists):
                self.on_event(FinalsStarted(cell=cell, finalists=len(finalists)))
                decision = self.finals.decide(cell, log.plan.problem, finalists, defaults)
                note = "" if decision is not None else "no candidate passed the full verification"
            else:
                note = f"no candidate is correct: {log.failures()}"
        counted = sum(self._counted(cell, family) for family in self.families)
        return CellSummary(
            plan=log.plan,
            added=dict(log.added),
            total=counted,
            decision=decision or existing,
            is_new=decision is not None,
            default_us=self._default_us(cell, decision),
            note=note,
            seconds=time.monotonic() - started,
        )

    def _default_us(self, cell: Cell, decision: Decision | None) -> float | None:
        """The default's time in the comparison behind a decision."""
        if decision is None:
            return None
        defaults = {catalog.search_space(cell, self.request.device, family).default() for family in self.families}
        times = [
            trial.measurement.median_us
            for trial in self.repository.trials(cell=cell, environment=self.here)
            if trial.variant in defaults and trial.measurement is not None and trial.measurement.stage is Stage.FINAL
        ]
        return min(times, default=None)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Goal:
    """What a run adds to one family of a cell: variants in its space, those that count already, trials to do."""

    variants: int
    counted: int
    to_do: int


def _goals(
    request: TuneRequest, repository: Repository | None, here: Environment, families: Sequence[Family], cell: Cell
) -> dict[Family, _Goal]:
    """Trials to do, shared alike among the families; what a small space cannot use goes to the others.

    Asked again when a family's turn comes, it leaves out what others have done since.
    """
    sizes = {family: len(catalog.search_space(cell, request.device, family).variants()) for family in families}
    counted = dict.fromkeys(families, 0)
    if repository is not None:
        for family in families:
            counted[family] = _counted(repository.trials(cell=cell, environment=here, family=family))
    if request.more is None:
        totals = _shared_out(request.trials, sizes)
        to_do = {family: max(0, totals[family] - counted[family]) for family in families}
    else:
        to_do = _shared_out(request.more, {family: max(0, sizes[family] - counted[family]) for family in families})
    return {family: _Goal(variants=sizes[family], counted=counted[family], to_do=to_do[family]) for family in families}


def _shared_out(trials: int, room: Mapping[Family, int]) -> dict[Family, int]:
    """Equal shares of a number of trials, as far as there is room; the earlier families get what is left over."""
    shares = dict.fromkeys(room, 0)
    while trials > 0 and (open_ones := [family for family in room if shares[family] < room[family]]):
        each = max(1, trials // len(open_ones))
        for family in open_ones:
            given = min(each, room[family] - shares[family], trials)
            shares[family] += given
            trials -= given
    return shares


def _plan_cell(
    request: TuneRequest, repository: Repository | None, here: Environment, families: Sequence[Family], cell: Cell
) -> CellPlan:
    goals = _goals(request, repository, here, families, cell).values()
    return CellPlan(
        cell=cell,
        problem=problem_of(cell, request.device),
        variants=sum(goal.variants for goal in goals),
        recorded=sum(goal.counted for goal in goals),
        to_do=sum(goal.to_do for goal in goals),
    )


def _counted(trials: Sequence[Trial]) -> int:
    """Distinct variants that were really tried: a static refusal costs nothing and counts nothing."""
    return len({trial.variant for trial in trials if trial.status is not Status.CONSTRAINTS})


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
