"""Standard attention in plain torch is right, and holds the whole score matrix."""

from __future__ import annotations

import pytest

from autoflash.errors import NoKernelError
from autoflash.evaluate.accuracy import accuracy, accuracy_cases
from autoflash.evaluate.cost import score_matrix_bytes
from autoflash.evaluate.memory import peak_bytes
from autoflash.evaluate.standard import StandardAttention, kept_bytes
from autoflash.evaluate.systems import allocating_call
from autoflash.problem import Alignment, DType, Mask, MaskTensor, Pass, Problem
from tests.factories import make_device, make_problem

CPU = make_device("cpu")

FORMS: dict[str, dict[str, object]] = {
    "full": {},
    "causal": {"mask": Mask.CAUSAL},
    "window": {"window_left": 40, "window_right": 20},
    "softcap": {"softcap": 5.0},
    "bool mask": {"mask_tensor": MaskTensor.BOOL},
    "float mask": {"mask_tensor": MaskTensor.FLOAT},
}


def problem_of(op: Pass, **fields: object) -> Problem:
    return make_problem(op=op, dtype=DType.FP32, heads=4, kv_heads=2, seqlen_q=128, head_dim=32).replace(**fields)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", list(Pass))
def test_it_passes_the_gate(op: Pass, form: str) -> None:
    problem = problem_of(op, **FORMS[form])

    for case in accuracy_cases(problem):
        found = accuracy(StandardAttention(), case, CPU)
        assert not isinstance(found, str)
        assert found.gate <= 1.0


@pytest.mark.parametrize("alignment", list(Alignment))
def test_rows_without_keys_are_zero(alignment: Alignment) -> None:
    problem = problem_of(Pass.FORWARD, mask=Mask.CAUSAL, alignment=alignment, seqlen_q=150, seqlen_k=70)

    found = accuracy(StandardAttention(), accuracy_cases(problem)[0], CPU)
    assert not isinstance(found, str)
    assert found.gate <= 1.0


def test_a_forward_holds_scores_and_probabilities_at_once() -> None:
    problem = problem_of(Pass.FORWARD, seqlen_q=512, seqlen_k=512)

    (peak,) = peak_bytes([allocating_call(StandardAttention(), problem, CPU, 0)], CPU)

    assert 2 * score_matrix_bytes(problem) <= peak < 2.2 * score_matrix_bytes(problem)


def test_a_backward_keeps_the_probabilities() -> None:
    assert kept_bytes(problem_of(Pass.BACKWARD)) == 4 * 128 * 128 * 4
    assert kept_bytes(problem_of(Pass.FORWARD)) == 0


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dropout_p": 0.1}, "dropout"),
        ({"packed_q": 128, "packed_k": 128}, "varlen"),
        ({"seqlen_k": 0}, "no key"),
    ],
)
def test_what_it_is_not_written_for_is_refused(fields: dict[str, object], reason: str) -> None:
    problem = problem_of(Pass.FORWARD, **fields)
    standard = StandardAttention()

    assert reason in str(standard.why_not(problem))
    q = k = v = None
    with pytest.raises(NoKernelError, match=reason):
        standard.prepare_forward(problem, q, k, v, 1.0)  # type: ignore[arg-type]  # refused before it is looked at
