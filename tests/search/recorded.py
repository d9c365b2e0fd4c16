"""A small cell on a CPU whose every outcome is known, so that the tuner runs on it without running a kernel."""

from __future__ import annotations

from autoflash.db.repository import Repository
from autoflash.device import Device, DeviceKind
from autoflash.evaluate.evaluator import Outcome
from autoflash.problem import Cell, DType
from autoflash.search.records import current_digest
from autoflash.search.replay import RecordedEvaluator
from autoflash.search.request import TuneRequest
from autoflash.space import catalog
from autoflash.trial import Level, Status
from autoflash.variant import Family, Variant
from tests.factories import make_cell, make_measurement, make_verification

CPU = Device(kind=DeviceKind.CPU, name="test cpu", arch="x86_64", multiprocessors=2, shared_bytes=0, warp_size=1)
CELL = make_cell(dtype=DType.FP32, q_bucket=7)
FASTEST = {"block_m": 128, "block_n": 128, "heads_per_step": 1}


def good(variant: Variant, median_us: float, cell: Cell = CELL) -> Outcome:
    """A correct outcome of the text that the templates give."""
    return Outcome(
        status=Status.CORRECT,
        verification=make_verification(level=Level.SCREEN),
        measurement=make_measurement(median_us=median_us),
        source_digest=current_digest(cell, variant),
    )


def time_of(variant: Variant) -> float:
    """Microseconds in the recording: 150 for vendor kernels, 100 for the fastest and more by how it differs."""
    if variant.family is Family.VENDOR:
        return 150.0
    distance = sum(variant.config[name] != value for name, value in FASTEST.items())
    return 100.0 * (1 + distance) + 50.0 * (variant.structure["loop_order"] != "query_outer")


def outcomes(cell: Cell = CELL) -> dict[Variant, Outcome]:
    """Of every variant of a cell, and the vendor's."""
    variants = [*catalog.search_space(cell, CPU, Family.TORCH_TILED).variants(), *catalog.vendors(cell, CPU)]
    return {variant: good(variant, time_of(variant), cell) for variant in variants}


def recorded(cell: Cell = CELL) -> RecordedEvaluator:
    """Answers what the recording says."""
    return RecordedEvaluator(outcomes(cell))


def request(cells: tuple[Cell, ...] = (CELL,), *, trials: int = 12, more: int | None = None) -> TuneRequest:
    """A run of the tuner on the CPU of the recording."""
    return TuneRequest(cells=cells, device=CPU, trials=trials, more=more, seed=0)


def default() -> Variant:
    """Of the cell."""
    return catalog.search_space(CELL, CPU, Family.TORCH_TILED).default()


def generated(repository: Repository) -> list[Variant]:
    """What was tried, without the vendor's kernels."""
    return [trial.variant for trial in repository.trials() if trial.variant.family is not Family.VENDOR]
