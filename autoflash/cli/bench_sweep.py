"""An exhaustive sweep of a cell: how good is the recorded winner, and how much was there to win?"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoflash.cli.bench_grid import Timed, time_together
from autoflash.device import Device
from autoflash.evaluate.benchmark import benchmark, device_lock, make_call
from autoflash.evaluate.cost import tflops
from autoflash.problem import Form, Problem
from autoflash.runtime.bind import bind
from autoflash.trial import Stage
from autoflash.variant import Variant

FINALISTS = 6
"""How many of the fastest are timed again, in turns with the winner."""

FINAL_MS = 500.0
"""Timed for each of them: enough for a judgement by a few per cent on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What a sweep found.

    Attributes:
        screened: Every variant, timed briefly, in the order of the space.
        winner, default: Timed in turns with the finalists.
        finalists: The fastest of the sweep, timed in turns, fastest first.
    """

    screened: tuple[Timed, ...]
    winner: Timed
    default: Timed
    finalists: tuple[Timed, ...]

    @property
    def best(self) -> Timed:
        """The fastest of all in the final comparison."""
        return min((self.winner, self.default, *self.finalists), key=_us)

    @property
    def regret(self) -> float:
        """How much slower the winner is than the best, as a fraction: 0.1 is 10 % slower."""
        return _us(self.winner) / _us(self.best) - 1

    @property
    def spread(self) -> float:
        """Slowest over fastest in the sweep."""
        times = [_us(timed) for timed in self.screened if timed.measurement is not None]
        return max(times) / min(times) if times else float("nan")


def sweep(
    problem: Problem,
    device: Device,
    variants: Sequence[Variant],
    *,
    winner: Variant,
    default: Variant,
    seed: int,
    on_variant: Callable[[Timed], None],
) -> Sweep:
    """Time every variant briefly, then the fastest, the winner and the default in turns."""
    screened = []
    with device_lock(device):
        for variant in variants:
            screened.append(_screen(problem, device, variant, seed))
            on_variant(screened[-1])
        fastest = sorted((timed for timed in screened if timed.measurement is not None), key=_us)[:FINALISTS]
        asked = list(dict.fromkeys([winner, default, *(timed.variant for timed in fastest)]))
        timed = time_together(problem, device, asked, seed, min_ms=FINAL_MS)
    final = dict(zip(asked, timed, strict=True))
    finalists = [one for variant, one in final.items() if variant not in (winner, default) and one.measurement]
    return Sweep(
        screened=tuple(screened),
        winner=final[winner],
        default=final[default],
        finalists=tuple(sorted(finalists, key=_us)),
    )


def _screen(problem: Problem, device: Device, variant: Variant, seed: int) -> Timed:
    try:
        call = make_call(bind(Form.of(problem), variant, device), problem, device, seed=seed)
        measurement = benchmark(call, device, stage=Stage.SCREEN, run=uuid.uuid4().hex[:12], min_ms=20.0)
    except Exception as error:
        # As in time_together: a variant that fails has no time, and the sweep goes on.
        return Timed(variant=variant, measurement=None, tflops=None, reason=f"{type(error).__name__}: {error}")
    return Timed(variant=variant, measurement=measurement, tflops=tflops(problem, measurement.median_us))


def _us(timed: Timed) -> float:
    return float("inf") if timed.measurement is None else timed.measurement.median_us
