"""Which kernel serves a call, and why, for people and for machines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path

from autoflash.dispatch.buckets import problem_of
from autoflash.dispatch.ladder import Candidate, Here
from autoflash.errors import InvalidProblemError, RenderError
from autoflash.problem import Cell, Form, Problem
from autoflash.trial import Ranked, Tier, Verification
from autoflash.variant import Family, Variant

Rate = Callable[[Problem, float], float]
"""TFLOP/s of a problem done in some microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A recorded time.

    Attributes:
        variant: What was timed.
        median_us: Microseconds per call at ``cell``'s top.
        tflops: The same as a rate, by the usual count of operations.
    """

    variant: Variant
    median_us: float
    tflops: float

    def __str__(self) -> str:
        """For people."""
        return f"{self.median_us:.1f} us, {self.tflops:.3g} TFLOP/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassExplanation:
    """The kernel of one pass.

    Attributes:
        cell: What the problem was looked up under.
        variant: What runs.
        tier: The rung of the ladder.
        reason: Why this kernel, in words.
        has_run: Whether it has run in this process; if not, it is what a first call tries first.
        measured: Its recorded time; None if it was not measured on this device.
        measured_at: The cell that the time belongs to; None without one.
        vendor: Time of the fastest vendor kernel of the same run.
        trial_id: Record behind it in the database; None for a table's or without one.
        decided_at: When the decision was made, UTC; empty without one.
        error_ratio: Largest error in units of what the correctness gate allows; None where it was not verified.
        source: File of the kernel's text; None for a vendor kernel.
        source_digest: Of that text.
        alternatives: What would run without this kernel, with recorded times where there are any.
        passed_over: Why better rungs were not taken.
        ignored: Records for this cell that are of other devices.
    """

    cell: Cell
    variant: Variant
    tier: Tier
    reason: str
    has_run: bool
    measured: Timing | None
    measured_at: Cell | None
    vendor: Timing | None
    trial_id: int | None
    decided_at: str
    error_ratio: float | None
    source: Path | None
    source_digest: str
    alternatives: tuple[tuple[Variant, Tier, float | None], ...]
    passed_over: tuple[str, ...]
    ignored: tuple[str, ...]

    def lines(self, now: datetime) -> list[str]:
        """The explanation for people."""
        rows = [("cell", str(self.cell)), ("tier", f"{self.tier.value}: {self.reason}")]
        if self.measured is None:
            rows.append(("measured", "not measured here"))
        else:
            where = "" if self.measured_at == self.cell else ", not measured here"
            rows.append(("measured", f"{self.measured} at {self.measured_at}{where}"))
        if self.vendor is not None and self.vendor.variant != self.variant:
            rows.append(("vendor", f"{self.vendor} by {_short(self.vendor.variant)} in the same run"))
        if self.decided_at:
            record = f"trial {self.trial_id}" if self.trial_id is not None else "an imported table"
            rows.append(("record", f"{record}, {_age(self.decided_at, now)}"))
        if self.error_ratio is not None:
            rows.append(("error", f"{self.error_ratio:.2f} of what the correctness gate allows"))
        if self.source is not None:
            rows.append(("source", str(self.source)))
        rows += [("otherwise", _alternative(*alternative)) for alternative in self.alternatives[:3]]
        rows += [("not used", reason) for reason in (*self.passed_over, *self.ignored)]
        if not self.has_run:
            rows.append(("state", "has not run in this process yet"))
        head = f"{self.cell.op.value}: {self.variant}"
        return [head, *(f"  {name:<10} {text}" for name, text in rows)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Which kernels serve a call of ``autoflash.attention``. Prints well.

    Attributes:
        device: Name of the device.
        passes: The forward, and the backward where a gradient would be taken by a generated kernel.
    """

    device: str
    passes: tuple[PassExplanation, ...]

    def __str__(self) -> str:
        """For people."""
        now = datetime.now(timezone.utc)
        return "\n".join([f"on {self.device}", *(line for part in self.passes for line in part.lines(now))])

    def to_dict(self) -> dict[str, object]:
        """Plain JSON content."""
        passes = []
        for part in self.passes:
            content = {name: _plain(value) for name, value in _shallow(part).items()}
            content["op"] = part.cell.op.value
            content["alternatives"] = [
                {"variant": variant.to_dict(), "tier": tier.value, "median_us": median_us}
                for variant, tier, median_us in part.alternatives
            ]
            passes.append(content)
        return {"device": self.device, "passes": passes}


def explain_pass(
    cell: Cell,
    candidate: Candidate,
    here: Here,
    *,
    rate: Rate,
    has_run: bool,
    source_digest: str,
    verification: Verification | None,
    alternatives: tuple[Candidate, ...],
    passed_over: tuple[str, ...],
    ignored: tuple[str, ...],
) -> PassExplanation:
    """Put together what the resolver, the record and the templates say of one kernel."""
    ranked, hit = candidate.ranked, candidate.hit
    decision = hit.decision if hit is not None else None
    error = verification.worst_ratio if verification is not None else (ranked.worst_ratio if ranked else None)
    return PassExplanation(
        cell=cell,
        variant=candidate.variant,
        tier=candidate.tier,
        reason=candidate.reason,
        has_run=has_run,
        measured=_timing(ranked, decision.cell if decision else cell, here, rate),
        measured_at=decision.cell if decision is not None and ranked is not None else None,
        vendor=_timing(decision.vendor, decision.cell, here, rate) if decision is not None else None,
        trial_id=ranked.trial_id if ranked is not None else None,
        decided_at=decision.decided_at if decision is not None else "",
        error_ratio=error,
        source=_source(cell, candidate.variant),
        source_digest=source_digest,
        alternatives=tuple(
            (other.variant, other.tier, other.ranked.median_us if other.ranked is not None else None)
            for other in alternatives
        ),
        passed_over=passed_over,
        ignored=ignored,
    )


def _timing(ranked: Ranked | None, cell: Cell, here: Here, rate: Rate) -> Timing | None:
    if ranked is None:
        return None
    try:
        tflops = rate(problem_of(cell, here.device), ranked.median_us)
    except InvalidProblemError:
        # A cell of a record made under another number of threads may hold no problem here.
        tflops = 0.0
    return Timing(variant=ranked.variant, median_us=ranked.median_us, tflops=tflops)


def _source(cell: Cell, variant: Variant) -> Path | None:
    if variant.family is Family.VENDOR:
        return None
    # Rendering loads Jinja, which importing autoflash must not.
    from autoflash.codegen.render import render
    from autoflash.codegen.store import write

    try:
        return write(render(Form.of(cell), variant.family, variant.structure))
    except (RenderError, OSError):
        return None


def _alternative(variant: Variant, tier: Tier, median_us: float | None) -> str:
    time = f"{median_us:.1f} us" if median_us is not None else "not measured here"
    return f"{_short(variant)} ({tier.value}, {time})"


def _short(variant: Variant) -> str:
    return str(variant.structure["backend"]) if variant.family is Family.VENDOR else str(variant)


def _age(decided_at: str, now: datetime) -> str:
    try:
        then = datetime.fromisoformat(decided_at.replace("Z", "+00:00"))
    except ValueError:
        return f"decided at {decided_at}"
    if then.tzinfo is None:
        then = then.replace(tzinfo=timezone.utc)
    hours = (now - then).total_seconds() / 3600.0
    return f"{hours / 24.0:.0f} days old" if hours >= 48.0 else f"{max(hours, 0.0):.0f} hours old"


def _shallow(part: PassExplanation) -> dict[str, object]:
    return {name: getattr(part, name) for name in part.__slots__}


def _plain(value: object) -> object:
    if isinstance(value, (Cell, Variant)):
        return value.to_dict()
    if isinstance(value, Timing):
        return {**asdict(value), "variant": value.variant.to_dict()}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
