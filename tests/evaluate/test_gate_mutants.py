from __future__ import annotations

import pytest
import torch

from autoflash.evaluate.verify import verify
from autoflash.problem import DType, Mask, Pass
from autoflash.trial import Level
from tests.evaluate.candidates import Kernel
from tests.factories import make_problem

FAULTS = [
    "last key dropped",
    "last key doubled",
    "a tile skipped",
    "first key of a tile dropped",
    "last key of a tile dropped",
    "an input changed",
    "written before the output",
    "NaN written behind the output",
]
DIAGONAL_FAULTS = ["diagonal one too far", "diagonal one too near"]
FORWARD_FAULTS = [
    *FAULTS,
    "lse a little too large",
    "lse in base 2",
    "output a little too large",
    "last row of out not written",
    "last row of lse not written",
    "last block of out wrong",
    "last block of lse wrong",
]
BACKWARD_FAULTS = [
    *FAULTS,
    "delta left out",
    "one head of each group only",
    "dlse ignored",
    *(f"{name} a little too large" for name in ("dq", "dk", "dv")),
    *(f"last row of {name} not written" for name in ("dq", "dk", "dv")),
    *(f"last block of {name} wrong" for name in ("dq", "dk", "dv")),
]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """The tensors are small: a second thread costs more than it gives."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def problem_of(op, dtype, mask, **changes):
    sizes = {"batch": 1, "heads": 4, "kv_heads": 2, "head_dim": 32, "seqlen_q": 128, "seqlen_k": 128, **changes}
    return make_problem(op=op, dtype=dtype, mask=mask, **sizes)


@pytest.mark.parametrize("mask", Mask)
@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("op", Pass)
def test_a_kernel_with_honest_roundings_passes_the_whole_grid(op, dtype, mask):
    verification = verify(Kernel(), problem_of(op, dtype, mask, head_dim=64), Level.FULL)

    assert verification.passed, verification.detail
    assert verification.level is Level.FULL
    assert 0.0 < verification.worst_ratio <= 1.0
    assert verification.checks > 15


@pytest.mark.parametrize("fault", FORWARD_FAULTS)
@pytest.mark.parametrize("mask", Mask)
@pytest.mark.parametrize("dtype", DType)
def test_a_wrong_forward_is_rejected_before_it_is_timed(dtype, mask, fault):
    verification = verify(Kernel(fault), problem_of(Pass.FORWARD, dtype, mask), Level.SCREEN)

    assert not verification.passed
    assert verification.worst_ratio > 1.0


@pytest.mark.parametrize("fault", BACKWARD_FAULTS)
@pytest.mark.parametrize("mask", Mask)
@pytest.mark.parametrize("dtype", DType)
def test_a_wrong_backward_is_rejected_before_it_is_timed(dtype, mask, fault):
    verification = verify(Kernel(fault), problem_of(Pass.BACKWARD, dtype, mask), Level.SCREEN)

    assert not verification.passed
    assert verification.worst_ratio > 1.0


@pytest.mark.parametrize("fault", DIAGONAL_FAULTS)
@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("op", Pass)
def test_a_diagonal_that_is_off_by_one_is_rejected_before_it_is_timed(op, dtype, fault):
    verification = verify(Kernel(fault), problem_of(op, dtype, Mask.CAUSAL), Level.SCREEN)

    assert not verification.passed


@pytest.mark.parametrize("head_dim", [8, 40, 128, 256])
@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("op", Pass)
def test_the_gate_is_as_sharp_for_other_head_dims(op, dtype, head_dim):
    problem = problem_of(op, dtype, Mask.CAUSAL, head_dim=head_dim)

    verdicts = {
        fault: verify(Kernel(fault), problem, Level.SCREEN).passed
        for fault in (None, "last key dropped", "first key of a tile dropped", *DIAGONAL_FAULTS)
    }

    assert [fault for fault, passed in verdicts.items() if passed] == [None]


@pytest.mark.parametrize(("head_dim", "group"), [(224, 1), (32, 6), (128, 3)])
def test_the_gate_is_as_sharp_for_sizes_that_are_no_powers_of_two(head_dim, group):
    sizes = {"head_dim": head_dim, "heads": 2 * group, "kv_heads": 2}
    problem = problem_of(Pass.BACKWARD, DType.BF16, Mask.FULL, **sizes)
    faults = [f"{name} a little too large" for name in ("dq", "dk", "dv")]

    verdicts = {fault: verify(Kernel(fault), problem, Level.SCREEN).passed for fault in (None, *faults)}

    assert [fault for fault, passed in verdicts.items() if passed] == [None]


@pytest.mark.parametrize("fault", ["lse finite in blind rows", "average in blind rows"])
@pytest.mark.parametrize("dtype", DType)
def test_a_forward_that_is_wrong_in_rows_without_keys_is_rejected_by_the_grid(dtype, fault):
    verification = verify(Kernel(fault), problem_of(Pass.FORWARD, dtype, Mask.CAUSAL), Level.FULL)

    assert not verification.passed
    assert "no key" in verification.detail


@pytest.mark.parametrize("level", [Level.SCREEN, Level.FULL])
def test_a_backward_that_varies_is_rejected_where_determinism_is_asked_for(level):
    problem = problem_of(Pass.BACKWARD, DType.FP32, Mask.FULL)

    free = verify(Kernel("not deterministic"), problem, level)
    bound = verify(Kernel("not deterministic"), problem.replace(deterministic=True), level)

    assert free.passed
    assert not bound.passed
    assert "differs between launches" in bound.detail
