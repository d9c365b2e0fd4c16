"""The grid of the published FlashAttention benchmarks: generated kernels beside torch's SDPA backends, in one run."""

from __future__ import annotations

import itertools
import statistics
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from autoflash.cli.output import Column
from autoflash.device import Device, DeviceKind
from autoflash.dispatch.buckets import cell_of
from autoflash.dispatch.ladder import Here, VendorPolicy, inference_ladder, training_ladders
from autoflash.dispatch.table import Table
from autoflash.evaluate.benchmark import Call, device_lock, interleaved, make_call
from autoflash.evaluate.biased_sdpa import BIASED, BiasedSdpa
from autoflash.evaluate.cost import tflops
from autoflash.evaluate.flex import FLEX, FlexAttention
from autoflash.keys import Json
from autoflash.problem import DType, Form, Mask, Pass, Problem, features_text
from autoflash.runtime.bind import bind
from autoflash.runtime.executable import Executable
from autoflash.runtime.probe import environment
from autoflash.search.presets import Asked
from autoflash.space import catalog
from autoflash.trial import Measurement, Tier
from autoflash.variant import Family, Variant

HEAD_DIMS = (64, 128, 256)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
QUICK_SEQLENS = (1024, 4096)
FLEX_NAME = FLEX.structure.text("backend")
"""Among backends: torch's flex_attention, which dispatch does not know."""
BIASED_NAME = BIASED.structure.text("backend")
"""Likewise torch's SDPA with a bias."""
_OUTSIDERS: dict[Variant, Callable[[], Executable]] = {FLEX: FlexAttention, BIASED: BiasedSdpa}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Which problems are timed.

    Attributes:
        tokens: B * S of each.
        model_dim: H * D of each.
        seqlens, head_dims, dtype, ops, masks: The axes.
        group: Query heads per key/value head.
        asked: What each asks for beyond plain attention.
    """

    tokens: int
    model_dim: int
    seqlens: tuple[int, ...]
    head_dims: tuple[int, ...]
    dtype: DType
    ops: tuple[Pass, ...]
    masks: tuple[Mask, ...]
    group: int = 1
    asked: Asked = field(default_factory=Asked)

    def problems(self) -> Iterator[Problem]:
        """One problem after the other, shortest sequence first within a head dimension, mask and pass."""
        for op, mask, head_dim, seqlen in itertools.product(self.ops, self.masks, self.head_dims, self.seqlens):
            heads = max(1, self.model_dim // (head_dim * self.group)) * self.group
            problem = Problem(
                op=op,
                dtype=self.dtype,
                head_dim=head_dim,
                head_dim_v=head_dim,
                batch=max(1, self.tokens // seqlen),
                heads=heads,
                kv_heads=heads // self.group,
                seqlen_q=seqlen,
                seqlen_k=seqlen,
                mask=mask,
            )
            yield self.asked.of(problem)


def default_grid(device: Device, *, quick: bool) -> Grid:
    """B*S = 16384 and H*D = 2048 on a GPU; a size that a CPU does in seconds there."""
    if device.kind is DeviceKind.CPU:
        return Grid(
            tokens=1024,
            model_dim=512,
            seqlens=(512,) if quick else (256, 512, 1024),
            head_dims=(64,) if quick else (64, 128),
            dtype=DType.FP32,
            ops=tuple(Pass),
            masks=tuple(Mask),
        )
    return Grid(
        tokens=16384,
        model_dim=2048,
        seqlens=QUICK_SEQLENS if quick else SEQLENS,
        head_dims=(64, 128) if quick else HEAD_DIMS,
        dtype=DType.BF16,
        ops=tuple(Pass),
        masks=tuple(Mask),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One kernel of a row.

    Attributes:
        variant: What ran.
        measurement: None where it cannot do the problem.
        tflops: Over the visible part of the scores; None without a measurement.
        reason: Why it did not run; empty where it did.
    """

    variant: Variant
    measurement: Measurement | None
    tflops: float | None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One problem of the grid.

    Attributes:
        problem: What was computed.
        generated: The kernel that ``attention(vendor="never")`` would run.
        tier: Where that kernel comes from.
        dispatched: The kernel that ``attention()`` would run, vendor kernels allowed.
        vendors: By backend.
    """

    problem: Problem
    generated: Timed
    tier: Tier
    dispatched: Timed
    vendors: dict[str, Timed]

    @property
    def ratio(self) -> float | None:
        """Speed of the generated kernel over that of the fastest vendor kernel; above 1 it is faster."""
        return self._to_vendor(self.generated)

    @property
    def dispatched_ratio(self) -> float | None:
        """Likewise of the kernel that ``attention()`` would run: 1 where that is the fastest vendor kernel itself."""
        return self._to_vendor(self.dispatched)

    def ratio_to(self, backend: str) -> float | None:
        """Speed of the generated kernel over that of one vendor kernel."""
        theirs = self.vendors[backend].tflops if backend in self.vendors else None
        return self.generated.tflops / theirs if theirs and self.generated.tflops else None

    def _to_vendor(self, timed: Timed) -> float | None:
        best = max((vendor.tflops or 0.0 for vendor in self.vendors.values()), default=0.0)
        return timed.tflops / best if best and timed.tflops else None


def run(
    grid: Grid, device: Device, table: Table, *, backends: Sequence[str], seed: int, on_row: Callable[[Row], None]
) -> list[Row]:
    """Time the grid.

    Args:
        grid: What to time.
        device: Where.
        table: The decisions that say which generated kernel runs.
        backends: Vendor kernels to time beside it.
        seed: Of the inputs.
        on_row: Called after each row.
    """
    here = Here(device=device, environment=environment(device))
    rows = []
    for problem in grid.problems():
        row = _row(problem, here, table, backends, seed)
        on_row(row)
        rows.append(row)
    return rows


def _row(problem: Problem, here: Here, table: Table, backends: Sequence[str], seed: int) -> Row:
    device = here.device
    cell = cell_of(problem, device)
    generated = inference_ladder(cell, here, table, VendorPolicy.NEVER)[0]
    dispatched = _dispatched(problem, here, table)
    vendors = [v for v in catalog.vendors(cell, device) if v.structure["backend"] in backends]
    vendors += [variant for variant in _OUTSIDERS if variant.structure.text("backend") in backends]
    variants = list(dict.fromkeys([generated.variant, *vendors, dispatched]))
    with device_lock(device):
        timed = dict(zip(variants, time_together(problem, device, variants, seed), strict=True))
    return Row(
        problem=problem,
        generated=timed[generated.variant],
        tier=generated.tier,
        dispatched=timed[dispatched],
        vendors={vendor.structure.text("backend"): timed[vendor] for vendor in vendors},
    )


def _dispatched(problem: Problem, here: Here, table: Table) -> Variant:
    """What ``attention()`` runs for the problem: a backward is that of the forward which a training call chooses."""
    forward = cell_of(problem.replace(op=Pass.FORWARD), here.device)
    if problem.op is Pass.FORWARD:
        return inference_ladder(forward, here, table, VendorPolicy.ALLOW)[0].variant
    backward = cell_of(problem, here.device)
    forwards, backwards = training_ladders(forward, backward, here, table, VendorPolicy.ALLOW)
    first = forwards[0].variant
    return first if first.family is Family.VENDOR else backwards[0].variant


def time_together(
    problem: Problem, device: Device, variants: Sequence[Variant], seed: int, *, min_ms: float = 100.0
) -> list[Timed]:
    """Time several kernels on one problem in turns, so that clocks and heat are the same for all."""

    def maker(variant: Variant) -> Callable[[], Call]:
        return lambda: make_call(_executable(problem, variant, device), problem, device, seed=seed)

    timed = []
    measured = time_calls([maker(variant) for variant in variants], device, min_ms=min_ms)
    for variant, (measurement, reason) in zip(variants, measured, strict=True):
        speed = None if measurement is None else tflops(problem, measurement.median_us)
        timed.append(Timed(variant=variant, measurement=measurement, tflops=speed, reason=reason))
    return timed


def time_calls(
    makers: Sequence[Callable[[], Call]], device: Device, *, min_ms: float = 100.0
) -> list[tuple[Measurement | None, str]]:
    """Time calls in turns: a measurement of each, or None and the reason why it cannot be made or fails."""
    calls: list[Call] = []
    reasons: list[str] = []
    for make in makers:
        try:
            call = make()
            call()
        except Exception as error:
            # A kernel may fail in any way that torch, Triton or the driver has: it is a cell without a number.
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        reasons.append("")
        calls.append(call)
    measured = iter(interleaved(calls, device, run=uuid.uuid4().hex[:12], min_ms=min_ms) if calls else [])
    return [(None if reason else next(measured), reason) for reason in reasons]


def _executable(problem: Problem, variant: Variant, device: Device) -> Executable:
    outsider = _OUTSIDERS.get(variant)
    return bind(Form.of(problem), variant, device) if outsider is None else outsider()


def row_json(row: Row) -> dict[str, Json]:
    """A row for machines."""
    problem = row.problem
    return {
        "pass": problem.op.value,
        "dtype": problem.dtype.value,
        "mask": problem.mask.value,
        "features": features_text(problem.features),
        "head_dim": problem.head_dim,
        "batch": problem.batch,
        "heads": problem.heads,
        "seqlen": problem.seqlen_q,
        "tier": row.tier.value,
        "ratio": row.ratio,
        "dispatched_ratio": row.dispatched_ratio,
        "generated": timed_json(row.generated),
        "dispatched": timed_json(row.dispatched),
        "vendors": {backend: timed_json(timed) for backend, timed in row.vendors.items()},
    }


def timed_json(timed: Timed) -> dict[str, Json]:
    """One kernel of a row for machines."""
    measured = timed.measurement
    return {
        "variant": timed.variant.to_dict(),
        "tflops": timed.tflops,
        "median_us": None if measured is None else measured.median_us,
        "p20_us": None if measured is None else measured.p20_us,
        "p80_us": None if measured is None else measured.p80_us,
        "reason": timed.reason,
    }


def row_columns(backends: Sequence[str]) -> list[Column]:
    """Of the long table, one row for each problem."""
    names = ("pass", "mask", "D", "S", "generated", *backends, "ratio")
    return [Column(title=name, numeric=index >= 2) for index, name in enumerate(names)] + [Column(title="kernel")]


def row_cells(row: Row, backends: Sequence[str]) -> list[str]:
    """The cells of a row of the long table."""
    problem = row.problem
    speeds = [row.generated, *(row.vendors.get(backend) for backend in backends)]
    return [
        problem.op.value,
        _mask(problem),
        str(problem.head_dim),
        str(problem.seqlen_q),
        *(_speed(one) for one in speeds),
        "-" if row.ratio is None else f"{row.ratio:.2f}",
        f"{row.generated.variant} ({row.tier.value})",
    ]


def pivot(rows: Sequence[Row], backends: Sequence[str]) -> tuple[list[Column], list[list[str]]]:
    """The short table of the README: lengths across, one row for each pass, mask and head dimension."""
    seqlens = sorted({row.problem.seqlen_q for row in rows})
    columns = [Column(title="pass"), Column(title="mask"), Column(title="D", numeric=True)]
    columns += [Column(title=f"S={seqlen}", numeric=True) for seqlen in seqlens]
    lines: dict[tuple[str, str, int], dict[int, str]] = {}
    for row in rows:
        problem = row.problem
        speeds = [_speed(one) for one in (row.generated, *(row.vendors.get(backend) for backend in backends))]
        line = lines.setdefault((problem.op.value, _mask(problem), problem.head_dim), {})
        line[problem.seqlen_q] = " / ".join(speeds)
    return columns, [
        [op, mask, str(head_dim), *(line.get(seqlen, "-") for seqlen in seqlens)]
        for (op, mask, head_dim), line in lines.items()
    ]


def summary(rows: Sequence[Row], backends: Sequence[str]) -> list[str]:
    """How fast what ran is in units of each peer, and of the fastest one of each row: geometric mean and lowest."""
    lines = []
    for op in dict.fromkeys(row.problem.op for row in rows):
        of_pass = [row for row in rows if row.problem.op is op]
        ratios = {f"generated to {name}": [row.ratio_to(name) for row in of_pass] for name in backends}
        ratios["generated to the fastest of them"] = [row.ratio for row in of_pass]
        ratios["attention() to the fastest of them"] = [row.dispatched_ratio for row in of_pass]
        for what, some in ratios.items():
            known = [ratio for ratio in some if ratio is not None]
            if known:
                mean = statistics.geometric_mean(known)
                lines.append(
                    f"{op.value}: {what}, {len(known)} rows: geometric mean {mean:.3f}, lowest {min(known):.2f}"
                )
    return lines


def _mask(problem: Problem) -> str:
    """The mask with the features, such as ``causal+softcap``."""
    return "+".join([problem.mask.value, *(feature.value for feature in problem.features)])


def _speed(timed: Timed | None) -> str:
    if timed is None or timed.tflops is None:
        return "-"
    return f"{timed.tflops:.0f}" if timed.tflops >= 10 else f"{timed.tflops:.3f}"
