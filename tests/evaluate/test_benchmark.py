from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

from autoflash.device import Device
from autoflash.evaluate import benchmark as module
from autoflash.evaluate import reference
from autoflash.evaluate.benchmark import benchmark, device_lock, interleaved, make_call
from autoflash.evaluate.timed_inputs import TimedInputs, timed_inputs
from autoflash.problem import DType, Form, Mask, MaskTensor, Pass, Problem
from autoflash.runtime.bind import bind
from autoflash.runtime.probe import CardState, probe
from autoflash.trial import Stage
from autoflash.variant import Family
from tests.evaluate.clock import Clock
from tests.factories import make_device, make_problem, make_variant


@pytest.fixture(scope="module")
def cpu() -> Device:
    return probe("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_time_is_a_median_with_its_spread(cpu: Device, clock: Clock) -> None:
    # The first call, three to warm up, then 10 samples: one late, two a little, so that only the spread shows them.
    call = clock.call(0.002, {4: 1.0, 5: 0.001, 6: 0.001})

    measurement = benchmark(call, cpu, stage=Stage.SCREEN, run="r", min_ms=20.0)

    times = (measurement.p20_us, measurement.median_us, measurement.p80_us)
    assert times == pytest.approx((2000.0, 2000.0, 3000.0))
    assert measurement.samples == 10
    assert measurement.policy == "perf_counter/cold-cache/v1"
    assert (measurement.stage, measurement.run) == (Stage.SCREEN, "r")
    assert measurement.taken_at.endswith("+00:00")


def test_the_clock_of_the_host_is_the_one_that_is_read(cpu: Device) -> None:
    measurement = benchmark(lambda: time.sleep(0.002), cpu, stage=Stage.SCREEN, min_ms=0.0)

    assert 2000.0 <= measurement.p20_us <= measurement.median_us <= measurement.p80_us


def test_with_the_host_a_time_ends_when_the_device_has(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    device = make_device()
    busy = clock.call(0.003)
    launched: list[bool] = []

    def wait(index: int) -> None:
        # What was launched takes 3 ms more, of which no one sees anything before somebody waits.
        if launched:
            launched.clear()
            busy()

    host = clock.call(0.001)

    def call() -> None:
        host()
        launched.append(True)

    monkeypatch.setattr(module, "_flush_buffer", lambda place, size: torch.empty(4))
    monkeypatch.setattr(module, "card_state", lambda device: CardState())
    monkeypatch.setattr(torch.cuda, "synchronize", wait)

    (measurement,) = interleaved([call], device, with_host=True)

    assert measurement.median_us == pytest.approx(4000.0)
    assert measurement.policy == "perf_counter/cold-l2/v1"


def test_slow_calls_get_few_samples_and_fast_ones_many(cpu: Device, clock: Clock) -> None:
    slow = benchmark(clock.call(0.02), cpu, stage=Stage.SCREEN, min_ms=1.0)
    fast = benchmark(clock.call(1e-6), cpu, stage=Stage.SCREEN, min_ms=1000.0)

    assert slow.samples == 5
    assert fast.samples == 200


def test_kernels_are_timed_in_turns(cpu: Device) -> None:
    calls: list[str] = []

    measurements = interleaved([lambda: calls.append("a"), lambda: calls.append("b")], cpu, min_ms=0.0)

    timed = calls[-2 * measurements[0].samples :]
    assert timed == ["a", "b"] * measurements[0].samples
    assert measurements[0].taken_at == measurements[1].taken_at
    assert measurements[0].stage is Stage.FINAL


def test_nothing_to_time_is_nothing(cpu: Device) -> None:
    assert interleaved([], cpu) == []


def test_throttling_that_begins_is_repeated_a_bounded_number_of_times(
    cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = iter([CardState(), CardState(throttled="power"), CardState(throttled="heat"), CardState()])
    monkeypatch.setattr(module, "card_state", lambda _: next(states))

    measurement = benchmark(lambda: None, cpu, stage=Stage.SCREEN, min_ms=0.0)

    assert measurement.throttled == ""


def test_throttling_that_stays_is_recorded(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "card_state", lambda _: CardState(sm_clock_mhz=1200, throttled="power"))

    measurement = benchmark(lambda: None, cpu, stage=Stage.SCREEN, min_ms=0.0)

    assert (measurement.sm_clock_mhz, measurement.throttled) == (1200, "power")


@pytest.mark.parametrize("op", list(Pass))
def test_a_prepared_call_runs_the_kernel(cpu: Device, op: Pass) -> None:
    problem = make_problem(op=op, seqlen_q=48, head_dim=16)
    executable = bind(Form(op=op, mask=problem.mask), make_variant(family=Family.TORCH_TILED, op=op), cpu)

    tensors = make_call(executable, problem, cpu)()

    assert isinstance(tensors, tuple)
    assert all(torch.isfinite(tensor).all() for tensor in tensors)


@pytest.mark.parametrize(
    "features",
    [
        {"window_left": 7, "softcap": 30.0},
        {"mask_tensor": MaskTensor.BOOL, "dropout_p": 0.1},
        {"mask_tensor": MaskTensor.FLOAT},
        {"packed_q": 144, "packed_k": 144, "batch": 3},
    ],
    ids=lambda features: "+".join(features),
)
@pytest.mark.parametrize("op", list(Pass))
def test_a_prepared_call_of_features_computes_what_the_reference_does(
    cpu: Device, op: Pass, features: dict[str, object]
) -> None:
    problem = make_problem(op=op, dtype=DType.FP32, seqlen_q=48, head_dim=16, mask=Mask.CAUSAL).replace(**features)
    executable = bind(Form.of(problem), make_variant(family=Family.TORCH_TILED, op=op, block_n=64), cpu)

    results = make_call(executable, problem, cpu, seed=3)()

    assert isinstance(results, tuple)
    for result, exact in zip(results, _expected(problem, timed_inputs(problem, cpu, 3)), strict=True):
        torch.testing.assert_close(result, exact.to(result.dtype), atol=1e-4, rtol=1e-4)


def test_another_process_waits_for_the_device(cpu: Device) -> None:
    program = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from autoflash.evaluate.benchmark import device_lock\n"
        "from autoflash.runtime.probe import probe\n"
        "cpu = probe('cpu'); print('ready', flush=True)\n"
        "with device_lock(cpu): print('in', flush=True)\n"
    )
    with device_lock(cpu):
        other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(timeout=0.5)

    assert other.communicate(timeout=300)[0] == "in\n"


def _expected(problem: Problem, inputs: TimedInputs) -> tuple[torch.Tensor, ...]:
    q, k, v, _, _, dout, extras = inputs
    asked = {
        "causal": True,
        "window": (problem.window_left, problem.window_right),
        "softcap": problem.softcap,
        "dropout_p": problem.dropout_p,
        "rng": extras.rng,
    }
    if not problem.is_varlen:
        asked["mask"] = extras.mask
        if problem.op is Pass.FORWARD:
            return reference.attention(q, k, v, return_lse=True, **asked)  # type: ignore[call-overload,no-any-return]
        return reference.gradients(q, k, v, dout, **asked)  # type: ignore[arg-type]
    (q, k, v, dout), cu_q, cu_k = (
        (x[0].transpose(0, 1) for x in (q, k, v, dout)),
        extras.cu_seqlens_q,
        extras.cu_seqlens_k,
    )
    assert cu_q is not None
    assert cu_k is not None
    if problem.op is Pass.FORWARD:
        out, lse = reference.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, **asked)  # type: ignore[call-overload]
        return out.transpose(0, 1)[None], lse[None]
    found = reference.gradients_varlen(q, k, v, dout, cu_q, cu_k, **asked)  # type: ignore[arg-type]
    return tuple(x.transpose(0, 1)[None] for x in found)
