"""What happened when a variant was tried on a cell, and the decision that follows from many trials."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum

from autoflash import keys
from autoflash.device import Device, DeviceKind
from autoflash.problem import Cell
from autoflash.variant import Family, Variant


class Status(str, Enum):
    """Outcome of a trial, in the words of the T4 auto-tuning results schema."""

    CORRECT = "correct"
    CONSTRAINTS = "constraints"
    COMPILE = "compile"
    RUNTIME = "runtime"
    CORRECTNESS = "correctness"
    TIMEOUT = "timeout"


class Level(IntEnum):
    """How far a kernel was verified. Nothing below FULL is dispatched as tuned."""

    NONE = 0
    SCREEN = 1
    FULL = 2


class Stage(str, Enum):
    """Which timing a measurement is: the first look at a candidate, or the interleaved comparison of finalists."""

    SCREEN = "screen"
    FINAL = "final"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where results hold.

    Attributes:
        device_kind, device_name, arch, multiprocessors, shared_bytes: Must match exactly.
        triton: ``major.minor`` of Triton; must match for families that are compiled by it. Empty without Triton.
        torch, driver, cuda: Noted, never compared.
    """

    device_kind: str
    device_name: str
    arch: str
    multiprocessors: int
    shared_bytes: int
    triton: str = ""
    torch: str = ""
    driver: str = ""
    cuda: str = ""

    @classmethod
    def of(cls, device: Device, *, triton: str = "", torch: str = "", driver: str = "", cuda: str = "") -> Environment:
        """The environment of a device with the given versions."""
        return cls(
            device_kind=device.kind.value,
            device_name=device.name,
            arch=device.arch,
            multiprocessors=device.multiprocessors,
            shared_bytes=device.shared_bytes,
            triton=triton,
            torch=torch,
            driver=driver,
            cuda=cuda,
        )

    @property
    def device(self) -> Device:
        """The device as far as the environment describes it."""
        return Device(
            kind=DeviceKind(self.device_kind),
            name=self.device_name,
            arch=self.arch,
            multiprocessors=self.multiprocessors,
            shared_bytes=self.shared_bytes,
        )

    def identity(self) -> dict[str, str | int]:
        """The fields that decide whether a result holds here."""
        return {
            "device_kind": self.device_kind,
            "device_name": self.device_name,
            "arch": self.arch,
            "multiprocessors": self.multiprocessors,
            "shared_bytes": self.shared_bytes,
            "triton": self.triton,
        }

    @property
    def key(self) -> str:
        """Identity over the fields that must match."""
        return keys.key("environment", self.identity())

    def mismatch(self, here: Environment, family: Family) -> str | None:
        """Why a result from this environment does not hold in ``here``; None where it does.

        Triton's version counts only for the families that Triton compiles.
        """
        ours = here.identity()
        for name, value in self.identity().items():
            if name == "triton" and not family.uses_triton:
                continue
            if ours[name] != value:
                return f"{name} is {ours[name]!r} here, the record is for {value!r}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What the compiler says a kernel needs; the largest of its launches, sums for spills.

    Attributes:
        shared_bytes: Static and dynamic shared memory per block.
        registers: Per thread.
        spill_bytes: Stored to local memory by the compiler.
    """

    shared_bytes: int = 0
    registers: int = 0
    spill_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One timing: the median over samples with a cold L2, and the state of the card around it.

    Attributes:
        stage: Screening, or interleaved re-rank.
        run: Names the interleaved comparison that a FINAL timing belongs to; only times of one run are compared.
        median_us, p20_us, p80_us: Microseconds per call.
        samples: How many timed calls.
        policy: Method of the timing, for example ``events/cold-l2/v1``.
        sm_clock_mhz, temperature_c, power_w: Around the timing; 0 where unknown.
        throttled: Reason the driver gives for reduced clocks, or empty.
        taken_at: UTC time, ISO 8601.
    """

    stage: Stage
    run: str = ""
    median_us: float
    p20_us: float
    p80_us: float
    samples: int
    policy: str
    sm_clock_mhz: int = 0
    temperature_c: int = 0
    power_w: float = 0.0
    throttled: str = ""
    taken_at: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Outcome of the correctness gate at one level.

    Attributes:
        level: SCREEN (the timed specialisation and one irregular shape) or FULL (the whole grid).
        passed: Whether every comparison was inside the gate.
        worst_ratio: Largest error in units of what the gate allows; above 1 means failed.
        detail: The worst comparison in words, or why it failed.
        checks: How many problems were compared; 0 where the kernel refused all of them, or there was no answer.
    """

    level: Level
    passed: bool
    worst_ratio: float
    detail: str
    checks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One variant tried on one cell in one environment. Recorded once, when finished.

    Attributes:
        cell, variant, environment: What was tried, and where.
        source_digest: Of the rendered kernel text; empty for vendor kernels.
        status: What came of it.
        detail: The reason, for every status but CORRECT.
        resources: As compiled; None where nothing was.
        verification: The highest level reached; None where nothing was compared.
        measurement: The latest timing; None unless CORRECT.
        seed: Of the search that asked for it; None when not asked by a search.
        id: Given by the database; None before.
    """

    cell: Cell
    variant: Variant
    environment: Environment
    source_digest: str
    status: Status
    detail: str = ""
    resources: Resources | None = None
    verification: Verification | None = None
    measurement: Measurement | None = None
    seed: int | None = None
    id: int | None = None

    def __post_init__(self) -> None:
        """A correct trial has a positive, finite time; no other status has one."""
        timed = self.measurement is not None
        if timed != (self.status is Status.CORRECT):
            raise ValueError(f"a trial with status {self.status.value} {'has' if timed else 'lacks'} a measurement")
        if self.measurement is not None and not 0.0 < self.measurement.median_us < float("inf"):
            raise ValueError(f"a measured time must be positive and finite, got {self.measurement.median_us}")

    @property
    def level(self) -> Level:
        """How far this kernel was verified."""
        return self.verification.level if self.verification is not None and self.verification.passed else Level.NONE


class Tier(str, Enum):
    """Which rung of the dispatch ladder a kernel came from."""

    EXACT = "exact"
    NEAREST = "nearest"
    BORROWED = "borrowed"
    STALE = "stale"
    VENDOR = "vendor"
    DEFAULT = "default"
    PORTABLE = "portable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """One entry of a decision: a variant with the facts that ranked it.

    Attributes:
        variant: What to run.
        source_digest: Of the text that was verified; empty for vendor kernels.
        trial_id: The trial behind it in this database; None in an imported table.
        median_us: Time at the top of the cell's buckets.
        worst_ratio: Of its full verification.
        resources: As compiled.
    """

    variant: Variant
    source_digest: str
    trial_id: int | None = None
    median_us: float
    worst_ratio: float
    resources: Resources | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The ranked variants that dispatch uses for a cell, and why the first is first.

    Attributes:
        cell: What it is for.
        environment: Where it holds.
        choices: Best first; the generated ones end with one that has no precondition on strides or alignment.
        vendor: The fastest vendor kernel timed in the same run; None where there is none.
        reason: The policy's words.
        decided_at: UTC time, ISO 8601.
    """

    cell: Cell
    environment: Environment
    choices: tuple[Ranked, ...]
    vendor: Ranked | None
    reason: str
    decided_at: str
