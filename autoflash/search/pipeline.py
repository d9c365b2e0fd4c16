"""From asked to compiled: keeps candidates compiling on the CPU cores while one is measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from autoflash.db.claim import Claim
from autoflash.device import Device
from autoflash.evaluate.compile_pool import CompilePool
from autoflash.evaluate.grid import screen_cases
from autoflash.problem import Cell, Problem
from autoflash.runtime.compile import CompileOutcome
from autoflash.search.claims import Claims
from autoflash.search.replay import COMPILED_PER_TRIAL
from autoflash.search.sampler import Feedback, Sampler
from autoflash.space import cost
from autoflash.trial import Status
from autoflash.variant import Family, Variant

_MOST_IN_FLIGHT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A variant that this process has claimed, with what the compiler said of it."""

    variant: Variant
    compiled: CompileOutcome


@dataclass(slots=True)
class _InFlight:
    variant: Variant
    claim: Claim
    future: Future[CompileOutcome]
    wait: Callable[[], None]


class Pipeline:
    """Candidates of one family and cell, in the order in which the sampler asks for them.

    Args:
        sampler: Knows what was tried.
        pool: Compiles.
        claims: Keep other processes from the same variant.
        cell, problem, device: For what and where.
        refresh: Tells the sampler of trials that other processes recorded.
    """

    def __init__(
        self,
        sampler: Sampler,
        pool: CompilePool,
        claims: Claims,
        *,
        cell: Cell,
        problem: Problem,
        device: Device,
        refresh: Callable[[], None],
    ) -> None:
        self._sampler = sampler
        self._pool = pool
        self._claims = claims
        self._cell = cell
        self._problem = problem
        self._device = device
        self._refresh = refresh
        self._queue: deque[_InFlight] = deque()
        self._current: _InFlight | None = None
        self._ahead: dict[Variant, Future[CompileOutcome]] = {}

    def compile_ahead(self, trials: int) -> None:
        """Compile what the search will probably ask for, and let the compiler's facts rank it.

        Compiling needs no device; a kernel that spills or fills a multiprocessor alone is seldom the fastest.
        """
        each = COMPILED_PER_TRIAL if self._sampler.family is Family.TRITON else 1
        planned = [v for v in self._sampler.plan(each * trials) if v.family.uses_triton]
        self._ahead = {variant: self._pool.submit(self._problem, variant, self._device) for variant in planned}
        for variant, future in self._ahead.items():
            outcome = future.result()
            if outcome.status is Status.CONSTRAINTS:
                self._sampler.warm(variant, Feedback(status=Status.CONSTRAINTS))
            elif outcome.status is Status.CORRECT:
                score = cost.score(variant, self._cell, self._device, outcome.resources)
                self._sampler.learn(variant, score)

    def next(self, remaining: int) -> Candidate | None:
        """The next candidate; the one before it must have been settled.

        Args:
            remaining: How many more trials are wanted, this one included.
        """
        while len(self._queue) < min(remaining, self._depth) and self._ask():
            pass
        if not self._queue:
            return None
        self._current = self._queue.popleft()
        compiled = self._current.future.result()
        if compiled.status is Status.CORRECT:
            self._current.wait()
        return Candidate(variant=self._current.variant, compiled=compiled)

    def settle(self) -> None:
        """The candidate's trial is recorded: give its claim back."""
        if self._current is not None:
            self._claims.release(self._current.claim)
            self._current = None

    def close(self) -> None:
        """Give back everything that was claimed and not tried."""
        self.settle()
        for waiting in self._queue:
            waiting.future.cancel()
            self._claims.release(waiting.claim)
            self._sampler.skip(waiting.variant)
        self._queue.clear()
        for future in self._ahead.values():
            future.cancel()

    @property
    def _depth(self) -> int:
        """How many candidates compile while one is measured; no more than one where there is nothing to compile."""
        return min(self._pool.processes, _MOST_IN_FLIGHT) if self._ahead else 1

    def _ask(self) -> bool:
        self._refresh()
        while (variant := self._sampler.ask()) is not None:
            claim = self._claims.take(self._cell, variant)
            if claim is None:
                self._sampler.skip(variant)
                self._refresh()
                continue
            future = self._ahead.get(variant) or self._pool.submit(self._problem, variant, self._device)
            wait = self._pool.prepare(screen_cases(self._problem), variant, self._device)
            self._queue.append(_InFlight(variant=variant, claim=claim, future=future, wait=wait))
            return True
        return False
