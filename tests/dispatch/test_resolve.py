"""Down the ladder until a kernel has run: what fails is noted, quarantined and passed over."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from torch import Tensor

import autoflash
from autoflash.dispatch.buckets import cell_of
from autoflash.errors import NoKernelError
from autoflash.ops import CALLS
from autoflash.problem import Pass
from autoflash.trial import Decision, Tier
from autoflash.variant import Family, Variant
from tests.dispatch.fakes import CPU, FakeKernels, cpu_environment, dispatching, exact
from tests.factories import make_decision, make_problem, make_ranked, make_variant

BEST = make_variant(Family.TORCH_TILED, block_m=64)
SECOND = make_variant(Family.TORCH_TILED, block_m=256)
FLASH = make_variant(Family.VENDOR, backend="flash")

PROBLEM = make_problem(heads=4, seqlen_q=40)
CELL = cell_of(PROBLEM, CPU)


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(1, 4, 40, 64, dtype=torch.bfloat16) for _ in range(3))
    return q, k, v


def tuned(op: Pass = Pass.FORWARD, us: float = 50.0, digest: str | None = None, **options: object) -> Decision:
    named = {} if digest is None else {"source_digest": digest}
    return make_decision(
        cell=cell_of(PROBLEM.replace(op=op), CPU),
        environment=options.pop("environment", cpu_environment()),  # type: ignore[arg-type]
        choices=[
            make_ranked(variant=BEST, median_us=us, **named),  # type: ignore[arg-type]
            make_ranked(variant=SECOND, median_us=us + 1.0),
        ],
        vendor=make_ranked(variant=FLASH, median_us=60.0),
        **options,  # type: ignore[arg-type]
    )


def call(kernels: FakeKernels, *decisions: Decision, **options: object) -> Tensor:
    q, k, v = tensors()
    with dispatching(kernels, *decisions):
        out = autoflash.attention(q, k, v, **options)  # type: ignore[arg-type]
    assert isinstance(out, Tensor)
    torch.testing.assert_close(out, exact(q, k, v), atol=2e-2, rtol=2e-2)
    return out


def test_the_recorded_winner_runs_without_verification() -> None:
    kernels = FakeKernels()

    call(kernels, tuned())

    assert kernels.ran() == [BEST]
    assert kernels.verified == []


def test_the_vendor_runs_where_the_record_says_it_is_faster() -> None:
    kernels = FakeKernels()

    call(kernels, tuned(us=70.0))

    assert kernels.ran() == [FLASH]


def test_an_empty_table_runs_a_vendor_kernel() -> None:
    kernels = FakeKernels()

    call(kernels)

    assert kernels.ran() == [FLASH]


def test_without_vendors_a_default_runs_after_one_verification() -> None:
    kernels = FakeKernels()
    q, k, v = tensors()

    with dispatching(kernels):
        autoflash.attention(q, k, v, vendor="never")
        autoflash.attention(q[:, :, :30], k, v, vendor="never")

    assert len(kernels.verified) == 1
    assert [variant.family for variant in kernels.ran()] == [Family.TORCH_TILED]


def test_a_default_that_fails_its_verification_is_refused() -> None:
    kernels = FakeKernels(passes=False)
    q, k, v = tensors()

    with dispatching(kernels), pytest.raises(NoKernelError, match="wrong results: last row is wrong"):
        autoflash.attention(q, k, v, vendor="never")


@pytest.mark.parametrize(
    "script",
    [
        {"breaks": RuntimeError("out of resource: shared memory, required 300000")},
        {"unbindable": "no such template"},
        {"breaks": ValueError("anything")},
    ],
)
def test_case_a33_a_record_that_does_not_run_is_quarantined_with_one_warning(
    caplog: pytest.LogCaptureFixture, script: dict[str, object]
) -> None:
    kernels = FakeKernels(scripts={BEST: script})
    q, k, v = tensors()

    with dispatching(kernels, tuned()) as resolver, caplog.at_level(logging.WARNING, "autoflash"):
        for length in (40, 39, 38):
            out = autoflash.attention(q[:, :, :length], k, v, vendor="never")
            torch.testing.assert_close(out, exact(q[:, :, :length], k, v), atol=2e-2, rtol=2e-2)
        quarantined = resolver.quarantined()

    assert kernels.ran() == [SECOND]
    assert [variant for _, variant in quarantined] == [BEST]
    assert len(caplog.records) == 1
    assert str(BEST) in caplog.text


def test_out_of_memory_is_not_the_kernels_fault() -> None:
    kernels = FakeKernels(scripts={BEST: {"breaks": torch.OutOfMemoryError("CUDA out of memory")}})
    q, k, v = tensors()

    with dispatching(kernels, tuned()) as resolver, pytest.raises(torch.OutOfMemoryError):
        autoflash.attention(q, k, v, vendor="never")

    assert resolver.quarantined() == {}


def test_a_missed_precondition_takes_the_next_choice_and_quarantines_nothing() -> None:
    kernels = FakeKernels(scripts={BEST: {"refuses": "k is not aligned"}})
    q, k, v = tensors()

    with dispatching(kernels, tuned()) as resolver:
        autoflash.attention(q, k, v, vendor="never")

    assert kernels.ran() == [SECOND]
    assert resolver.quarantined() == {}


def test_a_record_of_another_kernel_text_is_stale_and_verified_first() -> None:
    kernels = FakeKernels()
    q, k, v = tensors()

    with dispatching(kernels, tuned(digest="feedfeedfeedfeed")):
        autoflash.attention(q, k, v)
        resolution = next(iter(CALLS.prepared.values())).resolution

    assert kernels.verified == [BEST]
    assert resolution is not None
    assert resolution.candidate.tier is Tier.STALE
    assert "the record is for feedfeedfeedfeed" in resolution.candidate.reason


def test_a_record_of_another_device_is_not_used() -> None:
    kernels = FakeKernels()

    call(kernels, tuned(environment=cpu_environment(device_name="Another CPU")), vendor="never")

    assert BEST not in kernels.ran()


def test_only_refuses_where_no_vendor_kernel_can() -> None:
    refusing: dict[Variant, dict[str, object]] = {
        make_variant(Family.VENDOR, backend=backend): {"refuses": "too wide"} for backend in ("flash", "math")
    }
    q, k, v = tensors()

    with dispatching(FakeKernels(scripts=refusing), tuned()), pytest.raises(NoKernelError, match="too wide"):
        autoflash.attention(q, k, v, vendor="only")


def test_an_unmeasured_math_kernel_does_not_hold_a_large_score_matrix() -> None:
    kernels = FakeKernels(scripts={FLASH: {"refuses": "not here"}})
    q = torch.randn(1, 1, 8200, 8).expand(1, 8, 8200, 8)

    with dispatching(kernels):
        explanation = autoflash.explain(q, q, q)

    assert explanation.passes[0].variant.family is Family.TORCH_TILED
    assert any("whole score matrix" in reason for reason in explanation.passes[0].passed_over)


def test_while_capturing_only_a_loaded_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoflash.calls.is_capturing", lambda tensor: True)
    kernels = FakeKernels(scripts={BEST: {"loaded": False}, SECOND: {"loaded": False}})

    call(kernels, tuned())

    assert kernels.ran() == [FLASH]


def test_case_a28_while_capturing_nothing_loaded_names_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoflash.calls.is_capturing", lambda tensor: True)
    kernels = FakeKernels(scripts={BEST: {"loaded": False}, SECOND: {"loaded": False}})
    q, k, v = tensors()

    with dispatching(kernels, tuned()), pytest.raises(NoKernelError, match=r"autoflash\.warmup\(\.\.\.\)"):
        autoflash.attention(q, k, v, vendor="never")

    assert kernels.verified == []


def test_case_a39_many_threads_resolve_each_key_once() -> None:
    kernels = FakeKernels()
    q, k, v = tensors()
    barrier, failures = threading.Barrier(8), []
    expected = {length: exact(q[:, :, :length], k, v) for length in (37, 38, 39, 40)}

    def work(index: int) -> None:
        length = 37 + index % 4
        barrier.wait()
        for _ in range(5):
            out = autoflash.attention(q[:, :, :length], k, v, vendor="never")
            if not torch.allclose(out, expected[length], atol=2e-2):  # type: ignore[arg-type]
                failures.append(length)

    with dispatching(kernels, tuned()):
        threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        prepared = len(CALLS.prepared)

    assert failures == []
    assert prepared == 4
    assert sum(made.prepared for made in kernels.made.values()) == 4


def test_prepared_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoflash.calls.MOST_CALLS", 3)
    q, k, v = tensors()

    with dispatching(FakeKernels()):
        for length in range(1, 8):
            autoflash.attention(q[:, :, :length], k, v)
        prepared = len(CALLS.prepared)

    assert prepared == 3


def test_records_of_another_device_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = tensors()
    elsewhere = tuned(environment=cpu_environment(device_name="Another CPU"))

    with caplog.at_level(logging.INFO, "autoflash"), dispatching(FakeKernels(), elsewhere):
        autoflash.attention(q, k, v)
        autoflash.attention(q[:, :, :39], k, v)

    assert len([record for record in caplog.records if "Another CPU" in record.getMessage()]) == 1
