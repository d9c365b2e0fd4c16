"""The one way to time a kernel: medians over single calls, each with a cold cache, at a steady clock."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import lru_cache

import torch
from filelock import FileLock
from torch import Tensor

from autoflash import paths
from autoflash.device import Device, DeviceKind
from autoflash.evaluate.timed_inputs import timed_inputs
from autoflash.problem import Pass, Problem
from autoflash.runtime.executable import Executable, TermGradients
from autoflash.runtime.probe import CardState, card_state
from autoflash.trial import Measurement, Stage
from autoflash.variant import Family

Call = Callable[[], object]

_MIN_SAMPLES = 5
_MAX_SAMPLES = 200
_WARM_UP_MS = 5.0
_STEADY_MS = 300.0
_RETRIES = 3
_CPU_CACHE_BYTES = 16 * 2**20


@contextmanager
def device_lock(device: Device) -> Iterator[None]:
    """Hold a device for verification and timing; other processes of this host wait. Compilation takes no lock."""
    folder = paths.writable_cache_dir() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    name = "cpu" if device.kind is DeviceKind.CPU else device.uuid or f"{device.kind.value}-{device.index}"
    with FileLock(folder / f"{name}.lock"):
        yield


def make_call(executable: Executable, problem: Problem, device: Device, *, seed: int = 0, shown: float = 1.0) -> Call:
    """A call of a kernel on tensors of its own, prepared: what remains is the launch.

    The outputs of a generated kernel are allocated once and written again by each call. A vendor's kernel allocates
    its own: to be given others it would have to copy, which is no part of it. Kernels of the same problem and seed are
    given the same inputs; a block mask shows the share ``shown`` of its blocks.
    """
    q, k, v, out, lse, dout, extras = timed_inputs(problem, device, seed, shown)
    scale = 1.0 / math.sqrt(problem.head_dim)
    is_vendor = executable.variant.family is Family.VENDOR
    if problem.op is Pass.FORWARD:
        forward = executable.prepare_forward(problem, q, k, v, scale, extras)
        if is_vendor:
            return lambda: forward(q, k, v)
        new_out, new_lse = torch.empty_like(out), torch.empty_like(lse)
        return lambda: forward(q, k, v, new_out, new_lse, extras)
    backward = executable.prepare_backward(problem, q, k, v, out, dout, scale, extras)
    if is_vendor:
        return lambda: backward(q, k, v, out, lse, dout)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    terms = TermGradients.asked_by(problem, extras)
    return lambda: backward(q, k, v, out, lse, dout, None, dq, dk, dv, extras, terms)


def benchmark(call: Call, device: Device, *, stage: Stage, run: str = "", min_ms: float = 40.0) -> Measurement:
    """Time one kernel.

    Args:
        call: Launches it once.
        device: Where it runs.
        stage: Recorded with the result.
        run: Names the comparison that the timing belongs to.
        min_ms: Time spent in timed calls; at least 5 and at most 200 of them.
    """
    return interleaved([call], device, stage=stage, run=run, min_ms=min_ms)[0]


def interleaved(
    calls: Sequence[Call],
    device: Device,
    *,
    stage: Stage = Stage.FINAL,
    run: str = "",
    min_ms: float = 100.0,
    with_host: bool = False,
) -> list[Measurement]:
    """Time kernels in turn, one call of each in every round, so that drift of the clock meets all alike.

    The round is repeated, a bounded number of times, when the driver reports throttling that was not there before.

    Args:
        calls: Each launches its kernel once.
        device: Where they run.
        stage: Recorded with the results.
        run: Names this comparison.
        min_ms: Time spent in timed calls of each kernel, on average.
        with_host: On a GPU, time from the call to the end of what it has launched, by the host's clock.
    """
    timer: _Timer
    if device.kind is DeviceKind.CPU:
        timer = _HostTimer(device)
    else:
        timer = _WallTimer(device) if with_host else _EventTimer(device)
    estimates = [
        timer.warm_up(call, _STEADY_MS if stage is Stage.FINAL and index == 0 else _WARM_UP_MS)
        for index, call in enumerate(calls)
    ]
    mean_ms = statistics.fmean(estimates) if estimates else 1.0
    rounds = min(_MAX_SAMPLES, max(_MIN_SAMPLES, math.ceil(min_ms / max(mean_ms, 1e-3))))
    before = card_state(device)
    samples: list[list[float]] = []
    for _ in range(_RETRIES):
        samples = timer.rounds(calls, rounds)
        after = card_state(device)
        if not after.throttled or after.throttled == before.throttled:
            break
        before = after
    taken_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return [_measurement(times, timer.policy, after, stage, run, taken_at) for times in samples]


def _measurement(
    times_ms: list[float], policy: str, state: CardState, stage: Stage, run: str, taken_at: str
) -> Measurement:
    ordered = sorted(times_ms)
    last = len(ordered) - 1
    return Measurement(
        stage=stage,
        run=run,
        median_us=1000.0 * statistics.median(ordered),
        p20_us=1000.0 * ordered[round(0.2 * last)],
        p80_us=1000.0 * ordered[round(0.8 * last)],
        samples=len(ordered),
        policy=policy,
        sm_clock_mhz=state.sm_clock_mhz,
        temperature_c=state.temperature_c,
        power_w=state.power_w,
        throttled=state.throttled,
        taken_at=taken_at,
    )


class _Timer:
    """Runs calls with a cold cache and says how long each took, in milliseconds."""

    policy = ""

    def rounds(self, calls: Sequence[Call], count: int) -> list[list[float]]:
        """Times of ``count`` rounds, by call."""
        raise NotImplementedError

    def warm_up(self, call: Call, duration_ms: float) -> float:
        """Call until the clock is steady; milliseconds that one call takes."""
        estimate = self.rounds([call], 1)[0][0]
        repeats = min(_MAX_SAMPLES, max(1, math.ceil(duration_ms / max(estimate, 1e-3))))
        # The first call loads modules and touches memory; only the later ones say how long it takes.
        return statistics.median(self.rounds([call], repeats)[0])


@dataclass(slots=True)
class _EventTimer(_Timer):
    """CUDA events round each call, after a write to a buffer of twice the L2.

    The write also keeps the device busy while the host prepares the launch, so that no host time is measured.
    """

    device: Device
    policy = "events/cold-l2/v1"

    def rounds(self, calls: Sequence[Call], count: int) -> list[list[float]]:
        flush = _flush_buffer(self.device.torch_device, _flushed_bytes(self.device))
        times: list[list[float]] = [[] for _ in calls]
        # Events are read in batches: thousands of open ones slow the driver down.
        for done in range(0, count, 50):
            batch = range(min(50, count - done))
            events = [[_event_pair() for _ in calls] for _ in batch]
            for pairs in events:
                for call, (start, end) in zip(calls, pairs, strict=True):
                    flush.zero_()
                    start.record()
                    call()
                    end.record()
            torch.cuda.synchronize(self.device.index)
            for pairs in events:
                for index, (start, end) in enumerate(pairs):
                    times[index].append(float(start.elapsed_time(end)))
        return times


@dataclass(slots=True)
class _HostTimer(_Timer):
    """The host's clock round each call, after a write to a buffer of twice the last cache level."""

    device: Device
    policy = "perf_counter/cold-cache/v1"

    def rounds(self, calls: Sequence[Call], count: int) -> list[list[float]]:
        flush = _flush_buffer("cpu", min(2 * (self.device.l2_bytes or _CPU_CACHE_BYTES), 4 * _CPU_CACHE_BYTES))
        times: list[list[float]] = [[] for _ in calls]
        for _ in range(count):
            for index, call in enumerate(calls):
                flush.zero_()
                start = time.perf_counter()
                call()
                times[index].append(1000.0 * (time.perf_counter() - start))
        return times


@dataclass(slots=True)
class _WallTimer(_Timer):
    """The host's clock from each call to the end of what it has launched, after a write to a buffer of twice the L2."""

    device: Device
    policy = "perf_counter/cold-l2/v1"

    def rounds(self, calls: Sequence[Call], count: int) -> list[list[float]]:
        flush = _flush_buffer(self.device.torch_device, _flushed_bytes(self.device))
        times: list[list[float]] = [[] for _ in calls]
        for _ in range(count):
            for index, call in enumerate(calls):
                flush.zero_()
                torch.cuda.synchronize(self.device.index)
                start = time.perf_counter()
                call()
                torch.cuda.synchronize(self.device.index)
                times[index].append(1000.0 * (time.perf_counter() - start))
        return times


def _flushed_bytes(device: Device) -> int:
    """Twice the L2 of a GPU."""
    return 2 * max(device.l2_bytes, 32 * 2**20)


def _event_pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    make = torch.cuda.Event
    return make(enable_timing=True), make(enable_timing=True)  # type: ignore[no-untyped-call]  # torch 2.13


@lru_cache(maxsize=2)
def _flush_buffer(device: str, size_bytes: int) -> Tensor:
    return torch.empty(size_bytes // 4, dtype=torch.int32, device=device)
