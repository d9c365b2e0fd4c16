"""A search over a recorded table instead of a device, so that search policies can be compared without a GPU."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autoflash.evaluate.evaluator import Outcome
from autoflash.problem import Problem
from autoflash.search.sampler import Feedback, Sampler
from autoflash.space.knob import Knob
from autoflash.trial import Level, Stage, Status
from autoflash.variant import Family, Variant

# Compiling needs no GPU and runs on many cores: so many candidates per trial are compiled before the first is timed.
COMPILED_PER_TRIAL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One recorded variant.

    Attributes:
        outcome: What the trial came to.
        score: Static, from the numbers of the variant alone.
        informed_score: The same with what the compiler said.
    """

    outcome: Feedback
    score: float
    informed_score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A table of one problem: every recorded variant and its outcome.

    Attributes:
        name: Of the problem, for people.
        family, knobs: The space that the variants lie in.
        rows: In a fixed order.
        first: What a search tries before anything else; never chosen by looking at ``rows``.
    """

    name: str
    family: Family
    knobs: tuple[Knob, ...]
    rows: Mapping[Variant, Row]
    first: tuple[Variant, ...] = ()

    @property
    def best_us(self) -> float:
        """The fastest recorded time."""
        return min(_time(row.outcome) for row in self.rows.values())

    def regret(self, asked: list[Variant]) -> float:
        """How much slower than the best of the table the best of these is, as a fraction; infinite for none."""
        return min((_time(self.rows[variant].outcome) for variant in asked), default=math.inf) / self.best_us - 1.0


def replay(recording: Recording, *, trials: int, seed: int, stop_at_best: bool = False) -> list[Variant]:
    """Run the tuner's search over a table.

    Compilation is replayed too: the candidates that the tuner would compile ahead are ranked by what the compiler
    said, and one that does not fit is refused without being counted.

    Args:
        recording: What a trial comes to.
        trials: How many are counted.
        seed: Of the search.
        stop_at_best: End as soon as the best of the table is found, when more trials cannot change the regret.

    Returns:
        The variants that were tried, in order; refused ones excluded.
    """
    sampler = Sampler(
        family=recording.family,
        knobs=recording.knobs,
        scores={variant: row.score for variant, row in recording.rows.items()},
        first=recording.first,
        budget=trials,
        seed=seed,
    )
    for variant in sampler.plan(COMPILED_PER_TRIAL * trials):
        _learn(sampler, variant, recording.rows[variant])
    tried: list[Variant] = []
    while len(tried) < trials and (asked := sampler.ask()) is not None:
        feedback = recording.rows[asked].outcome
        sampler.tell(asked, feedback)
        if feedback.status is not Status.CONSTRAINTS:
            tried.append(asked)
        if stop_at_best and _time(feedback) == recording.best_us:
            break
    return tried


def random_search(recording: Recording, *, trials: int, seed: int) -> list[Variant]:
    """The policy to beat: distinct variants drawn evenly from those that fit."""
    fitting = [v for v, row in recording.rows.items() if row.outcome.status is not Status.CONSTRAINTS]
    return random.Random(seed).sample(fitting, min(trials, len(fitting)))


class RecordedEvaluator:
    """Answers from a table what a device would have said: the tuner runs on it unchanged.

    A variant that the table does not have is refused, as one that the device cannot run.
    """

    def __init__(self, outcomes: Mapping[Variant, Outcome]) -> None:
        self._outcomes = dict(outcomes)
        self.screened: list[Variant] = []

    def screen(self, problem: Problem, variant: Variant) -> Outcome:
        """What was recorded."""
        self.screened.append(variant)
        return self._outcomes.get(variant, Outcome(status=Status.CONSTRAINTS, detail="not in the recording"))

    def verify_full(self, problem: Problem, inside: Problem | None, variant: Variant) -> Outcome:
        """The recorded verification, taken for the full grid."""
        outcome = self._outcomes[variant]
        if outcome.verification is None:
            return outcome
        return replace(outcome, verification=replace(outcome.verification, level=Level.FULL), measurement=None)

    def rerank(self, problem: Problem, variants: Sequence[Variant], run: str) -> list[Outcome]:
        """The recorded times, as of one comparison."""
        return [self._final(self._outcomes[variant], run) for variant in variants]

    def _final(self, outcome: Outcome, run: str) -> Outcome:
        if outcome.measurement is None:
            return outcome
        return replace(outcome, measurement=replace(outcome.measurement, stage=Stage.FINAL, run=run))


def _learn(sampler: Sampler, variant: Variant, row: Row) -> None:
    if row.outcome.status is Status.CONSTRAINTS:
        sampler.warm(variant, row.outcome)
    else:
        sampler.learn(variant, row.informed_score)


def _time(outcome: Feedback) -> float:
    return outcome.median_us if outcome.is_usable and outcome.median_us is not None else math.inf
