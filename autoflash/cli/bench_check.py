"""What `autoflash bench --verify` finds out before it times them: are they right, how large are their errors?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autoflash.device import Device
from autoflash.dispatch.buckets import cell_of
from autoflash.dispatch.ladder import Here, VendorPolicy, inference_ladder
from autoflash.dispatch.table import Table
from autoflash.evaluate.accuracy import Errors, accuracy, accuracy_cases
from autoflash.evaluate.benchmark import device_lock
from autoflash.evaluate.compile_pool import CompilePool
from autoflash.evaluate.grid import Case, full_cases
from autoflash.evaluate.verify import verify
from autoflash.keys import Json
from autoflash.problem import Form, Problem
from autoflash.runtime.bind import bind
from autoflash.runtime.probe import environment
from autoflash.runtime.vendor import BACKENDS
from autoflash.trial import Level, Verification
from autoflash.variant import Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The generated kernel of a row in the gate, and its errors beside those of torch's backends.

    Attributes:
        variant: The kernel.
        verification: By the whole gate; None where the kernel raised.
        errors: Largest ones against float64 on a regular and an irregular case, for each output.
        reason: Why there is nothing else.
    """

    variant: Variant
    verification: Verification | None = None
    errors: tuple[Errors, ...] = ()
    reason: str = ""

    @property
    def passed(self) -> bool:
        """Whether the kernel is right."""
        return self.verification is not None and self.verification.passed

    @property
    def why(self) -> str:
        """What is wrong, or the comparison that came closest to it."""
        return self.reason if self.verification is None else self.verification.detail

    def ratio_to(self, backend: str) -> float | None:
        """The largest of its errors in units of the backend's on the same case and output; None without one."""
        known = [one for one in self.errors if backend in one.torch]
        return max((_ratio(one.kernel, one.torch[backend]) for one in known), default=None)


def _ratio(ours: float, theirs: float) -> float:
    if theirs:
        return ours / theirs
    return math.inf if ours else 1.0


def run(
    problems: Sequence[Problem], device: Device, table: Table, *, on_check: Callable[[Problem], None]
) -> dict[Problem, Check]:
    """Verify the kernels that ``attention(vendor="never")`` runs, each once for all lengths that select the same cases.

    Args:
        problems: What they run on.
        device: Where.
        table: The decisions that say which kernel that is.
        on_check: Called after each problem.
    """
    here = Here(device=device, environment=environment(device))
    chosen = {
        problem: inference_ladder(cell_of(problem, device), here, table, VendorPolicy.NEVER)[0].variant
        for problem in problems
    }
    known: dict[tuple[Variant, tuple[Case, ...]], Check] = {}
    found = {}
    with CompilePool() as pool:
        waits = {
            problem: pool.prepare([*full_cases(problem), *accuracy_cases(problem)], variant, device)
            for problem, variant in chosen.items()
        }
        for problem, variant in chosen.items():
            key = (variant, full_cases(problem))
            if key not in known:
                waits[problem]()
                with device_lock(device):
                    known[key] = _check(problem, variant, device)
            found[problem] = known[key]
            on_check(problem)
    return found


def _check(problem: Problem, variant: Variant, device: Device) -> Check:
    try:
        executable = bind(Form.of(problem), variant, device)
        verification = verify(executable, problem, Level.FULL, device=device)
        errors: list[Errors] = []
        for case in accuracy_cases(problem):
            measured = accuracy(executable, case, device)
            errors += [] if isinstance(measured, str) else measured.errors
    except Exception as error:
        # Whatever torch, Triton or the driver throws: this kernel is not right, and the next one is asked.
        return Check(variant=variant, reason=f"{type(error).__name__}: {error}")
    return Check(variant=variant, verification=verification, errors=tuple(errors))


def backends_of(names: Sequence[str]) -> tuple[str, ...]:
    """Those of a benchmark's peers whose errors are known."""
    return tuple(name for name in names if name in BACKENDS)


def check_json(check: Check, backends: Sequence[str]) -> dict[str, Json]:
    """A check for machines."""
    verification = check.verification
    return {
        "passed": check.passed,
        "checks": 0 if verification is None else verification.checks,
        "worst_ratio": None if verification is None else verification.worst_ratio,
        "detail": check.why,
        "error_to": {name: check.ratio_to(name) for name in backends},
    }


def lines(checks: Mapping[Problem, Check], backends: Sequence[str]) -> list[str]:
    """In words: how many are right, how large their errors are in units of each backend's, and what is wrong."""
    right = sum(check.passed for check in checks.values())
    text = [f"gate: the generated kernels of {right} of {len(checks)} rows passed"]
    for op in dict.fromkeys(problem.op for problem in checks):
        for name in backends:
            ratios = [check.ratio_to(name) for problem, check in checks.items() if problem.op is op]
            finite = [ratio for ratio in ratios if ratio is not None and 0.0 < ratio < math.inf]
            if finite:
                mean = statistics.geometric_mean(finite)
                text.append(
                    f"{op.value}: largest error against float64 to that of {name}, {len(finite)} rows: "
                    f"geometric mean {mean:.2f}, largest {max(finite):.2f}"
                )
    wrong = {f"{check.variant}: {check.why}" for check in checks.values() if not check.passed}
    return text + [f"WRONG: {one}" for one in sorted(wrong)]
