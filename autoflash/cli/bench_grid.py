"""The grid of the published FlashAttention benchmarks: generated kernels beside their peers, in one run."""

from __future__ import annotations

import functools
import itertools
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoflash.cli import peers
from autoflash.cli.peers import Peers
from autoflash.device import Device, DeviceKind
from autoflash.dispatch.buckets import cell_of
from autoflash.dispatch.ladder import Candidate, Here, VendorPolicy, inference_ladder, training_ladders
from autoflash.dispatch.table import Table
from autoflash.errors import NoKernelError
from autoflash.evaluate.agreement import disagreement
from autoflash.evaluate.benchmark import Call, device_lock, interleaved, make_call
from autoflash.evaluate.cost import tflops
from autoflash.problem import DType, Mask, Pass, Problem
from autoflash.runtime.probe import environment
from autoflash.search.presets import Asked
from autoflash.trial import Measurement, Tier
from autoflash.variant import Family, Variant

HEAD_DIMS = (64, 128, 256)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
QUICK_SEQLENS = (1024, 4096)
GENERATED = "generated"
NAMES = ("fa",)
"""Grids that there are: that of FlashAttention's papers."""


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


def narrowed(grid: Grid, whole: Grid) -> list[str]:
    """What tells a grid from the whole one of its device, in words for the name of a file."""
    words = [op.value for op in grid.ops if grid.ops != whole.ops]
    words += [grid.dtype.value] if grid.dtype is not whole.dtype else []
    words += [mask.value for mask in grid.masks if grid.masks != whole.masks]
    words += [f"d{head_dim}" for head_dim in grid.head_dims if grid.head_dims != whole.head_dims]
    return words + [f"s{seqlen}" for seqlen in grid.seqlens if grid.seqlens != whole.seqlens]


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
        vendors: The peers by name.
        is_step: What was timed are both passes, through autograd and with the host's part; ``problem`` is the backward.
    """

    problem: Problem
    generated: Timed
    tier: Tier
    dispatched: Timed
    vendors: dict[str, Timed]
    is_step: bool = False

    @property
    def kind(self) -> str:
        """The pass, or ``step`` for both."""
        return "step" if self.is_step else self.problem.op.value

    @property
    def ratio(self) -> float | None:
        """Speed of the generated kernel over that of the fastest peer; above 1 it is faster."""
        return self._to_vendor(self.generated)

    @property
    def dispatched_ratio(self) -> float | None:
        """Likewise of the kernel that ``attention()`` would run: 1 where that is the fastest peer itself."""
        return self._to_vendor(self.dispatched)

    def ratio_to(self, backend: str) -> float | None:
        """Speed of the generated kernel over that of one peer."""
        theirs = self.vendors[backend].tflops if backend in self.vendors else None
        return self.generated.tflops / theirs if theirs and self.generated.tflops else None

    def _to_vendor(self, timed: Timed) -> float | None:
        best = max((vendor.tflops or 0.0 for vendor in self.vendors.values()), default=0.0)
        return timed.tflops / best if best and timed.tflops else None


MakeRow = Callable[[Problem, Here, Table, Peers, int, Callable[[Problem, str], None]], Row]
"""Of a problem, the device, the decisions, the peers, a seed, and what is called before a kernel is prepared."""


def run(
    grid: Grid,
    device: Device,
    table: Table,
    *,
    beside: Peers,
    seed: int,
    on_kernel: Callable[[Problem, str], None],
    on_row: Callable[[Row], None],
    make_row: MakeRow | None = None,
) -> list[Row]:
    """Time the grid.

    Args:
        grid: What to time.
        device: Where.
        table: The decisions that say which generated kernel runs.
        beside: Peers to time beside it.
        seed: Of the inputs.
        on_kernel: Called before a kernel is prepared, which may compile it, with its problem and name.
        on_row: Called after each row.
        make_row: Times one problem; None times its pass.
    """
    here = Here(device=device, environment=environment(device))
    rows = []
    for problem in grid.problems():
        row = (make_row or _row)(problem, here, table, beside, seed, on_kernel)
        on_row(row)
        rows.append(row)
    return rows


def _row(
    problem: Problem, here: Here, table: Table, beside: Peers, seed: int, on_kernel: Callable[[Problem, str], None]
) -> Row:
    device = here.device
    generated, dispatched = chosen_for(problem, here, table)
    others = beside.variants(cell_of(problem, device), device)
    names = {generated.variant: GENERATED} | {variant: name for name, variant in others.items()}
    variants = list(dict.fromkeys([*names, dispatched]))

    def tell(variant: Variant) -> None:
        on_kernel(problem, names.get(variant, str(variant)))

    with device_lock(device):
        timed = dict(
            zip(variants, time_together(problem, device, variants, seed, agree=True, on_variant=tell), strict=True)
        )
    return Row(
        problem=problem,
        generated=timed[generated.variant],
        tier=generated.tier,
        dispatched=timed[dispatched],
        vendors={name: timed[variant] for name, variant in others.items()},
    )


def chosen_for(problem: Problem, here: Here, table: Table) -> tuple[Candidate, Variant]:
    """What ``attention(vendor="never")`` runs for the problem, and what ``attention()`` does."""
    generated = inference_ladder(cell_of(problem, here.device), here, table, VendorPolicy.NEVER)[0]
    return generated, _dispatched(problem, here, table)


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
    problem: Problem,
    device: Device,
    variants: Sequence[Variant],
    seed: int,
    *,
    min_ms: float = 100.0,
    agree: bool = False,
    on_variant: Callable[[Variant], None] | None = None,
) -> list[Timed]:
    """Time several kernels on one problem in turns, so that clocks and heat are the same for all.

    Args:
        problem: What they compute.
        device: Where.
        variants: Which.
        seed: Of the inputs, which are the same for all.
        min_ms: Time spent in timed calls of each, on average.
        agree: One that computes something else than the first has the reason for its result, and no time.
        on_variant: Called before each is prepared.
    """

    def maker(variant: Variant) -> Callable[[], Call]:
        def make() -> Call:
            if on_variant is not None:
                on_variant(variant)
            return make_call(peers.executable(problem, variant, device), problem, device, seed=seed)

        return make

    timed = []
    compare = functools.partial(disagreement, problem) if agree else None
    measured = time_calls([maker(variant) for variant in variants], device, min_ms=min_ms, compare=compare)
    for variant, (measurement, reason) in zip(variants, measured, strict=True):
        speed = None if measurement is None else tflops(problem, measurement.median_us)
        timed.append(Timed(variant=variant, measurement=measurement, tflops=speed, reason=reason))
    return timed


def time_calls(
    makers: Sequence[Callable[[], Call]],
    device: Device,
    *,
    min_ms: float = 100.0,
    compare: Callable[[Any, Any], str | None] | None = None,
    with_host: bool = False,
) -> list[tuple[Measurement | None, str]]:
    """Time calls in turns: a measurement of each, or None and the reason why it cannot be made or fails.

    Args:
        makers: Each makes a call, which is made once before any is timed.
        device: Where they run.
        min_ms: Time spent in timed calls of each, on average.
        compare: Of what a call and the first one give: why the call is not timed, or None.
        with_host: Times are from the call to the end of what it has launched, the host's part with them.
    """
    calls: list[Call] = []
    reasons: list[str] = []
    first: object = None
    for index, make in enumerate(makers):
        call, reason = None, ""
        try:
            call = make()
            made = call()
            if index == 0:
                first = made
            elif compare is not None and first is not None:
                reason = compare(made, first) or ""
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            # A kernel may fail in any way that torch, Triton, another's compiler (which may raise what is no Exception)
            # or the driver has: it is a cell without a number.
            reason = _words(error)
        reasons.append(reason)
        if call is not None and not reason:
            calls.append(call)
    try:
        run = uuid.uuid4().hex[:12]
        measured = iter(interleaved(calls, device, run=run, min_ms=min_ms, with_host=with_host) if calls else [])
    except Exception as error:
        # Whose fault it is cannot be told: the row has no numbers, and the other rows keep theirs.
        return [(None, reason or f"when timed: {_words(error)}") for reason in reasons]
    return [(None if reason else next(measured), reason) for reason in reasons]


def _words(error: BaseException) -> str:
    return str(error) if isinstance(error, NoKernelError) else f"{type(error).__name__}: {error}"
