"""Which variant to try next. The only module that imports Optuna.

The study lives in memory and holds nothing that the database does not: it is filled again from recorded trials.
"""

from __future__ import annotations

import heapq
import math
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import TrialState

from autoflash.space.knob import Knob, split
from autoflash.trial import Status
from autoflash.variant import Choice, Choices, Family, Variant

# How many suggestions in a row may be known or impossible before the ranking decides instead.
_PATIENCE = 2
# What a tiling loses in the ranking each time that a variant with the same numbers was asked for.
_SAME_CONFIG_PENALTY = 0.35


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """What a trial tells the search.

    Attributes:
        status: Of the trial.
        median_us: Its time; None unless correct.
    """

    status: Status
    median_us: float | None = None

    @property
    def is_usable(self) -> bool:
        """Whether there is a time to learn from: positive and finite."""
        return self.status is Status.CORRECT and self.median_us is not None and 0.0 < self.median_us < math.inf


class Sampler:
    """Asks for variants of one cell, one at a time, and learns from what they did.

    First come the variants it was given (the default, winners of neighbouring cells), then the best by score, then
    Optuna's suggestions in turn with the neighbours of the fastest variant so far. When no more variants are left
    than may be tried, all of them are asked, best score first. The order depends only on the seed and on what is told.

    Args:
        family: Of all variants.
        knobs: The space as Optuna sees it.
        scores: Every variant that may be asked, with its static score: higher is asked earlier.
        first: To be asked before all others, in this order; those not in ``scores`` are skipped.
        budget: How many distinct variants will be asked in all, those told by :meth:`warm` included.
        seed: Of Optuna's sampler.
    """

    def __init__(
        self,
        *,
        family: Family,
        knobs: Sequence[Knob],
        scores: Mapping[Variant, float],
        first: Iterable[Variant] = (),
        budget: int,
        seed: int,
    ) -> None:
        self._family = family
        self._knobs = tuple(knobs)
        self._open = dict(scores)
        self._index = {variant: index for index, variant in enumerate(scores)}
        self._first = [variant for variant in dict.fromkeys(first) if variant in self._open]
        self._budget = budget
        self._told: dict[Variant, Feedback] = {}
        self._asked: set[Variant] = set()
        self._pending: dict[Variant, optuna.Trial] = {}
        self._same_config: Counter[Choices] = Counter()
        self._facts: set[Variant] = set()
        self._places: dict[Variant, tuple[Choice | None, ...]] = {}
        self._turn = 0
        self._outside = 0
        with warnings.catch_warnings():
            # Options of the sampler are experimental in some of the supported releases.
            warnings.simplefilter("ignore")
            self._study = optuna.create_study(sampler=_quiet_sampler(seed))

    @property
    def family(self) -> Family:
        """Of all variants."""
        return self._family

    @property
    def outside(self) -> int:
        """Recorded variants that today's space does not have: noted, not lost."""
        return self._outside

    @property
    def counted(self) -> int:
        """Distinct variants with an outcome that counts towards the budget: static refusals do not."""
        return sum(outcome.status is not Status.CONSTRAINTS for outcome in self._told.values())

    @property
    def best(self) -> tuple[Variant, float] | None:
        """The fastest variant so far and its time in microseconds."""
        timed = [(v, o.median_us) for v, o in self._told.items() if o.is_usable and o.median_us is not None]
        return min(timed, key=lambda pair: pair[1], default=None)

    def warm(self, variant: Variant, outcome: Feedback) -> None:
        """Learn from a recorded trial, before or during the search; other processes may have made it."""
        if variant in self._told:
            return
        if variant not in self._open:
            self._outside += 1
            return
        self.tell(variant, outcome)

    def learn(self, variant: Variant, score: float) -> None:
        """Replace a variant's score by one that knows what the compiler said."""
        if variant in self._open:
            self._open[variant] = score
            self._facts.add(variant)

    def plan(self, count: int) -> list[Variant]:
        """The variants worth compiling ahead: the first ones, then the best by score, spread over tilings."""
        chosen = [variant for variant in self._first if variant in self._open][:count]
        seen = Counter(variant.config for variant in chosen)
        by_config: dict[Choices, deque[Variant]] = {}
        for variant in sorted(self._open.keys() - set(chosen), key=self._order):
            by_config.setdefault(variant.config, deque()).append(variant)
        # One entry for each tiling: its best variant, at what that is worth after those chosen before it.
        heap = [self._entry(queue[0], seen) for queue in by_config.values()]
        heapq.heapify(heap)
        while heap and len(chosen) < count:
            variant = heapq.heappop(heap)[2]
            chosen.append(variant)
            seen[variant.config] += 1
            queue = by_config[variant.config]
            queue.popleft()
            if queue:
                heapq.heappush(heap, self._entry(queue[0], seen))
        return chosen

    def _order(self, variant: Variant) -> tuple[float, int]:
        """Best score first; of equals, in the order of the space."""
        return (-self._open[variant], self._index[variant])

    def _entry(self, variant: Variant, seen: Counter[Choices]) -> tuple[float, int, Variant]:
        return (
            _SAME_CONFIG_PENALTY * seen[variant.config] - self._open[variant],
            self._index[variant],
            variant,
        )

    def skip(self, variant: Variant) -> None:
        """Take back what was asked, untried: another process is at it, or has done it and will be heard of."""
        self._open.pop(variant, None)
        self._asked.discard(variant)
        pending = self._pending.pop(variant, None)
        if pending is not None:
            self._study.tell(pending, state=TrialState.FAIL)

    def ask(self) -> Variant | None:
        """The next variant, never one that was asked or told before; None when there is none left."""
        if not self._open:
            return None
        variant = self._choose()
        del self._open[variant]
        self._asked.add(variant)
        self._same_config[variant.config] += 1
        return variant

    def tell(self, variant: Variant, outcome: Feedback) -> None:
        """Say what became of a variant."""
        self._open.pop(variant, None)
        self._asked.discard(variant)
        self._told[variant] = outcome
        pending = self._pending.pop(variant, None)
        if pending is not None:
            self._finish(pending, outcome)
            return
        params, distributions = self._encode(variant)
        usable = outcome.is_usable and outcome.median_us is not None
        self._study.add_trial(
            optuna.create_trial(
                state=TrialState.COMPLETE if usable else TrialState.PRUNED,
                value=math.log(outcome.median_us) if usable and outcome.median_us is not None else None,
                params=params,
                distributions=distributions,
                user_attrs={"status": outcome.status.value},
            )
        )

    def _choose(self) -> Variant:
        while self._first:
            variant = self._first.pop(0)
            if variant in self._open:
                return variant
        tried = len(self._told) + len(self._asked)
        if len(self._open) <= self._budget - tried or 2 * tried < self._budget or self.best is None:
            return self._by_score([v for v in self._open if v in self._facts] or self._open)
        self._turn += 1
        if self._turn % 2:
            return self._suggested() or self._neighbour() or self._by_score(self._open)
        return self._neighbour() or self._suggested() or self._by_score(self._open)

    def _by_score(self, variants: Iterable[Variant]) -> Variant:
        # Of equals the first wins, and the order of the space is fixed.
        return max(variants, key=self._rank)

    def _rank(self, variant: Variant) -> float:
        return self._open[variant] - _SAME_CONFIG_PENALTY * self._same_config[variant.config]

    def _neighbour(self) -> Variant | None:
        """The best-ranked untried variant one step from the fastest few."""
        timed = sorted(
            (
                (outcome.median_us, variant)
                for variant, outcome in self._told.items()
                if outcome.is_usable and outcome.median_us is not None
            ),
            key=lambda pair: pair[0],
        )
        for _, centre in timed[:3]:
            if near := [variant for variant in self._open if self._steps(centre, variant) == 1]:
                return self._by_score(near)
        return None

    def _steps(self, one: Variant, other: Variant) -> int:
        """How many steps lie between two variants; 2 stands for any larger number."""
        steps = 0
        for knob, a, b in zip(self._knobs, self._place(one), self._place(other), strict=True):
            if a != b and a is not None and b is not None:
                steps += knob.distance(a, b)
                if steps > 1:
                    return 2
        return steps

    def _place(self, variant: Variant) -> tuple[Choice | None, ...]:
        """A variant's choices in the order of the knobs; None for one that it lacks."""
        place = self._places.get(variant)
        if place is None:
            flat = {**variant.structure, **variant.config}
            place = self._places[variant] = tuple(knob.of(flat) for knob in self._knobs)
        return place

    def _suggested(self) -> Variant | None:
        """Optuna's suggestion, when it is one that may be tried."""
        for _ in range(_PATIENCE):
            trial = self._study.ask()
            choices: dict[str, Choice] = {}
            for knob in self._knobs:
                if not knob.applies(choices):
                    choices[knob.name] = knob.default
                elif len(knob.values) == 1:
                    choices[knob.name] = knob.values[0]
                else:
                    value = trial.suggest_categorical(knob.name, knob.values)
                    assert value is not None
                    choices[knob.name] = knob.values[knob.values.index(value)]
            structure, config = split(self._knobs, choices)
            variant = Variant(family=self._family, structure=structure, config=config)
            if variant in self._open:
                self._pending[variant] = trial
                return variant
            self._finish(trial, self._told.get(variant, Feedback(status=Status.CONSTRAINTS)))
        return None

    def _finish(self, trial: optuna.Trial, outcome: Feedback) -> None:
        trial.set_user_attr("status", outcome.status.value)
        if outcome.is_usable and outcome.median_us is not None:
            self._study.tell(trial, math.log(outcome.median_us))
        else:
            self._study.tell(trial, state=TrialState.PRUNED)

    def _encode(self, variant: Variant) -> tuple[dict[str, object], dict[str, BaseDistribution]]:
        flat = {**variant.structure, **variant.config}
        params: dict[str, object] = {}
        distributions: dict[str, BaseDistribution] = {}
        for knob in self._knobs:
            if len(knob.values) == 1 or not knob.applies(flat):
                continue
            params[knob.name] = knob.of(flat)
            distributions[knob.name] = CategoricalDistribution(knob.values)
        return params, distributions


def _quiet_sampler(seed: int) -> optuna.samplers.BaseSampler:
    """Optuna's tree-structured Parzen estimator; its log about every study is not for our users.

    It sees every knob as a category: with four values each, an order says little, and costs most of its time.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.samplers.TPESampler(seed=seed, n_startup_trials=1, constant_liar=True)
