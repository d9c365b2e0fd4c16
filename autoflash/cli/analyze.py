"""``autoflash analyze``: what a problem costs, and what a device makes of that."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import click

from autoflash.cli.analysis_json import moved_json, problem_json, roofline_json
from autoflash.cli.options import Common, ProblemOptions, common_options, problem_options
from autoflash.cli.output import Column, number, print_json, print_table, size_text
from autoflash.cli.variants import target
from autoflash.device import Device
from autoflash.dispatch import table
from autoflash.dispatch.buckets import cell_of, problem_of
from autoflash.dispatch.ladder import Candidate, Here, VendorPolicy, inference_ladder
from autoflash.errors import InvalidProblemError
from autoflash.evaluate import cost
from autoflash.evaluate.analysis import Analysis, Moved, analyze
from autoflash.evaluate.peaks import Peak, given_peak, known_peak
from autoflash.evaluate.roofline import Roofline
from autoflash.keys import Json
from autoflash.problem import Cell, Form, Problem
from autoflash.runtime.probe import environment
from autoflash.runtime.workspace import total_bytes
from autoflash.trial import Tier

TRAFFIC_COLUMNS = (
    Column(title="algorithm"),
    Column(title="blocks"),
    Column(title="read", numeric=True),
    Column(title="written", numeric=True),
    Column(title="total", numeric=True),
    Column(title="FLOP/byte", numeric=True),
    Column(title="model us", numeric=True),
    Column(title="limit"),
    Column(title="assumption"),
)
FACT_COLUMNS = (Column(title="what"), Column(title="how much"))

UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A time on record for the kernel that a call would run.

    Attributes:
        tier: How near the record is to the problem.
        cell: What was timed.
        problem: The sizes that it was timed at; None where the cell holds no problem here.
        median_us: Microseconds per call.
        roofline: Of that problem.
        vendor_us: Of the fastest vendor kernel of the same run; None without one.
    """

    tier: Tier
    cell: Cell
    problem: Problem | None
    median_us: float
    roofline: Roofline | None
    vendor_us: float | None

    @property
    def tflops(self) -> float | None:
        """Rate in TFLOP/s."""
        return None if self.problem is None else cost.tflops(self.problem, self.median_us)

    @property
    def share(self) -> float | None:
        """The bound over the time: 1 is as fast as the device could be. None where the bound is unknown."""
        bound = None if self.roofline is None else self.roofline.bound_us
        return None if bound is None else bound / self.median_us


@click.command("analyze")
@common_options
@problem_options
@click.option(
    "--on-chip-bytes",
    type=click.IntRange(1),
    help="Fast memory of one processor, M of the IO model (default: the device's shared memory of a block).",
)
@click.option(
    "--peak-tflops",
    type=click.FloatRange(0.0, min_open=True),
    help="Peak rate of matrix products in TFLOP/s (default: as published for the device).",
)
@click.option(
    "--bandwidth",
    type=click.FloatRange(0.0, min_open=True),
    metavar="GB/S",
    help="Peak bandwidth of the main memory in GB/s (default: as published for the device).",
)
def command(
    sizes: ProblemOptions,
    common: Common,
    on_chip_bytes: int | None,
    peak_tflops: float | None,
    bandwidth: float | None,
) -> None:
    """Say what a problem costs: FLOPs, bytes, arithmetic intensity, the roofline's bound and memory.

    Main-memory (HBM) bytes are those of the IO model of the FlashAttention paper, counted exactly for standard
    attention, Rabe-Staats and both FlashAttention orders, with the blocks of the paper's Algorithm 1, and for the
    generated kernel that attention would run; its time is shown where one is recorded. Nothing is compiled or run, so
    --device may name an architecture that is not here, such as sm_90. What is not known of a device is not guessed:
    give it with --on-chip-bytes, --peak-tflops and --bandwidth.
    """
    device = target(common.device, None)
    problem = sizes.problem(device)
    candidate = _candidate(common, problem, device)
    peak = given_peak(known_peak(device, problem), peak_tflops, bandwidth)
    analysis = analyze(problem, candidate.variant, peak, on_chip_bytes or device.shared_bytes or None)
    recorded = _recorded(candidate, device, peak_tflops, bandwidth)
    if common.json:
        print_json(_json(analysis, candidate, recorded, device))
        return
    title = f"{Form.of(problem)}/{problem.dtype.value}, {_sizes(problem)}, on {device.name}"
    print_table(title, FACT_COLUMNS, _facts(analysis, recorded, device))
    print_table(f"Main-memory traffic; blocks of {analysis.blocks_from}", TRAFFIC_COLUMNS, _traffic_rows(analysis))
    print_table("Memory beside inputs and outputs", FACT_COLUMNS, _memory_rows(analysis))


def _candidate(common: Common, problem: Problem, device: Device) -> Candidate:
    here = Here(device=device, environment=environment(device))
    decisions = table.load(common.db, common.table)
    return inference_ladder(cell_of(problem, device), here, decisions, VendorPolicy.NEVER)[0]


def _recorded(
    candidate: Candidate, device: Device, peak_tflops: float | None, bandwidth: float | None
) -> Recorded | None:
    if candidate.ranked is None or candidate.hit is None:
        return None
    cell = candidate.hit.decision.cell
    problem: Problem | None = None
    roofline: Roofline | None = None
    # A cell of a record made under another number of threads may hold no problem here.
    with contextlib.suppress(InvalidProblemError):
        problem = problem_of(cell, device)
    if problem is not None:
        peak = given_peak(known_peak(device, problem), peak_tflops, bandwidth)
        roofline = Roofline(flops=cost.flops(problem), bytes_moved=cost.least_bytes(problem), peak=peak)
    return Recorded(
        tier=candidate.tier,
        cell=cell,
        problem=problem,
        median_us=candidate.ranked.median_us,
        roofline=roofline,
        vendor_us=candidate.vendor_us,
    )


def _sizes(problem: Problem) -> str:
    heads = str(problem.heads) if problem.group == 1 else f"{problem.heads}/{problem.kv_heads}"
    widths = f"D{problem.head_dim}" + ("" if problem.head_dim == problem.head_dim_v else f" D_V{problem.head_dim_v}")
    return f"B{problem.batch} H{heads} Sq{problem.seqlen_q} Sk{problem.seqlen_k} {widths}"


def _facts(analysis: Analysis, recorded: Recorded | None, device: Device) -> list[list[str]]:
    least = analysis.least
    peak = least.peak
    rows = [
        ["FLOPs", f"{least.flops:.4g}, of {analysis.pairs:.4g} visible pairs of each head"],
        ["bytes at least", f"{size_text(least.bytes_moved)}: every input read and every output written once"],
        ["arithmetic intensity", f"{_per_byte(least.intensity)}, of the bytes at least"],
        ["peak", _peak_text(peak)],
        ["machine balance", _per_byte(peak.balance)],
        ["roofline bound", _bound_text(least)],
        ["L2 cache", _l2_text(analysis.problem, device)],
        ["on-chip memory M", size_text(analysis.on_chip_bytes) if analysis.on_chip_bytes else _unknown_chip()],
        ["Theta(Nd + N^2)", f"{size_text(analysis.theta.standard_bytes)}, standard attention"],
        ["Theta(N^2 d^2 / M)", _theta_flash(analysis)],
        ["kernel", str(analysis.variant)],
    ]
    if recorded is None:
        return [*rows, ["recorded time", "not measured here"]]
    rate = "" if recorded.tflops is None else f", {recorded.tflops:.4g} TFLOP/s"
    share = "" if recorded.share is None else f", {100 * recorded.share:.0f} % of the roofline there"
    where = f"{recorded.cell} ({recorded.tier.value})"
    if recorded.problem is not None:
        where += f", {_sizes(recorded.problem)}"
    rows.append(["recorded time", f"{recorded.median_us:.1f} us{rate}{share}, at {where}"])
    if recorded.vendor_us is not None:
        rows.append(["vendor's time", f"{recorded.vendor_us:.1f} us in the same run"])
    return rows


def _peak_text(peak: Peak) -> str:
    if peak.tflops is None and peak.bandwidth_gb_s is None:
        return f"{UNKNOWN}: give --peak-tflops and --bandwidth"
    return f"{_known(peak.tflops, 1)} TFLOP/s, {_known(peak.bandwidth_gb_s, 0)} GB/s ({peak.source})"


def _bound_text(roofline: Roofline) -> str:
    if roofline.bound_us is None:
        return f"{UNKNOWN} (compute {_known(roofline.compute_us, 2)} us, memory {_known(roofline.memory_us, 2)} us)"
    rate = "" if roofline.attainable_tflops is None else f", {roofline.attainable_tflops:.4g} TFLOP/s"
    return f"{roofline.bound_us:.2f} us{rate}, bound by {roofline.limit}"


def _l2_text(problem: Problem, device: Device) -> str:
    size = size_text(device.l2_bytes) if device.l2_bytes else UNKNOWN
    return f"{size}; K and V of one head are {size_text(cost.head_bytes(problem))}"


def _unknown_chip() -> str:
    return f"{UNKNOWN}: give --on-chip-bytes"


def _theta_flash(analysis: Analysis) -> str:
    if analysis.theta.flash_bytes is None:
        return _unknown_chip()
    outside = "" if analysis.theta.flash_holds else "; the theorem asks for d <= M <= Nd, which does not hold here"
    return f"{size_text(analysis.theta.flash_bytes)}, FlashAttention{outside}"


def _per_byte(value: float | None) -> str:
    return UNKNOWN if value is None else f"{number(value)} FLOP/byte"


def _known(value: float | None, digits: int) -> str:
    return UNKNOWN if value is None else number(value, digits)


def _traffic_rows(analysis: Analysis) -> list[list[str]]:
    rows = [_traffic_row(moved, moved.traffic.algorithm) for moved in analysis.published]
    if analysis.kernel is not None:
        name = f"autoflash {analysis.variant.family.value}: {analysis.kernel.traffic.algorithm}"
        rows.append(_traffic_row(analysis.kernel, name))
    return rows


def _traffic_row(moved: Moved, name: str) -> list[str]:
    traffic, roofline = moved.traffic, moved.roofline
    return [
        name,
        "-" if traffic.blocks is None else str(traffic.blocks),
        size_text(traffic.read_bytes),
        size_text(traffic.written_bytes),
        size_text(traffic.total_bytes),
        number(roofline.intensity),
        _known(roofline.bound_us, 1),
        roofline.limit or UNKNOWN,
        traffic.assumption,
    ]


def _memory_rows(analysis: Analysis) -> list[list[str]]:
    memory = analysis.memory
    rows = [
        ["one N x N tensor", size_text(memory.score_matrix_bytes)],
        ["standard attention", size_text(memory.standard_bytes)],
        ["log-sum-exp, kept for the backward", size_text(memory.lse_bytes)],
    ]
    name = f"autoflash {analysis.variant.family.value}"
    if memory.workspace is None:
        return [*rows, [name, UNKNOWN]]
    rows += [[f"{name}: {buffer.name}", size_text(buffer.size_bytes)] for buffer in memory.workspace]
    return [*rows, [f"{name}, in all", size_text(memory.lse_bytes + total_bytes(memory.workspace))]]


def _json(analysis: Analysis, candidate: Candidate, recorded: Recorded | None, device: Device) -> dict[str, Json]:
    problem, memory = analysis.problem, analysis.memory
    return {
        "device": device.name,
        "arch": device.arch,
        "cell": cell_of(problem, device).to_dict(),
        "problem": problem_json(problem),
        "visible_pairs": analysis.pairs,
        "flops": analysis.least.flops,
        "least_bytes": analysis.least.bytes_moved,
        "peak": {
            "tflops": analysis.least.peak.tflops,
            "bandwidth_gb_s": analysis.least.peak.bandwidth_gb_s,
            "source": analysis.least.peak.source,
        },
        "roofline": roofline_json(analysis.least),
        "on_chip_bytes": analysis.on_chip_bytes,
        "theta": {
            "standard_bytes": analysis.theta.standard_bytes,
            "flash_bytes": analysis.theta.flash_bytes,
            "flash_holds": analysis.theta.flash_holds,
        },
        "blocks_from": analysis.blocks_from,
        "published": [moved_json(moved) for moved in analysis.published],
        "kernel": {
            "variant": analysis.variant.to_dict(),
            "tier": candidate.tier.value,
            "traffic": None if analysis.kernel is None else moved_json(analysis.kernel),
        },
        "memory": {
            "score_matrix_bytes": memory.score_matrix_bytes,
            "standard_bytes": memory.standard_bytes,
            "lse_bytes": memory.lse_bytes,
            "workspace": None
            if memory.workspace is None
            else [{"name": buffer.name, "bytes": buffer.size_bytes} for buffer in memory.workspace],
        },
        "recorded": None if recorded is None else _recorded_json(recorded),
    }


def _recorded_json(recorded: Recorded) -> dict[str, Json]:
    return {
        "tier": recorded.tier.value,
        "cell": recorded.cell.to_dict(),
        "problem": None if recorded.problem is None else problem_json(recorded.problem),
        "median_us": recorded.median_us,
        "tflops": recorded.tflops,
        "share_of_roofline": recorded.share,
        "vendor_us": recorded.vendor_us,
    }
