"""The tiled torch family with expressions: results and gradients beside autograd's, of all that people write."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autoflash.codegen.expressions import differentiable
from autoflash.errors import InvalidProblemError
from autoflash.expression.expression import Role, parse
from autoflash.problem import DType, Form, Pass, Problem
from autoflash.runtime.executable import Extras, TermGradients
from autoflash.runtime.layouts import TORCH_TYPES
from autoflash.runtime.probe import probe
from autoflash.runtime.torch_module import TorchTiled
from autoflash.variant import Choices, Family, Variant
from tests.expression.corpus import CASES, B, Case, H, M, N
from tests.factories import make_problem
from tests.modified import formula

TOLERANCE = {DType.FP32: 2e-5, DType.BF16: 4e-2}
D = 16


def problem_of(case: Case, op: Pass, dtype: DType) -> Problem:
    line = str(case.expression)
    sizes = make_problem(op=op, dtype=dtype, head_dim=D, batch=B, heads=H, kv_heads=1, seqlen_q=M, seqlen_k=N)
    if case.role is Role.MASK_MOD:
        return sizes.replace(mask_mod=line)
    return sizes.replace(score_mod=line, params_gradient=op is Pass.BACKWARD and bool(differentiable(line)))


def executable(problem: Problem, loop_order: str) -> TorchTiled:
    structure, config = Choices(loop_order=loop_order), Choices(block_m=3, block_n=5, heads_per_step=1)
    return TorchTiled(
        Form.of(problem), Variant(family=Family.TORCH_TILED, structure=structure, config=config), probe("cpu")
    )


def close(ours: Tensor | None, exact: Tensor, tolerance: float) -> None:
    assert ours is not None
    exact = exact.detach()
    atol = tolerance * max(1.0, float(exact.abs().max()))
    torch.testing.assert_close(ours.double(), exact, atol=atol, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_results_and_gradients_are_those_of_autograd_in_float64(case: Case, dtype: DType) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = ((B, H, M, D), (B, 1, N, D), (B, 1, N, D), (B, H, M, D), (B, H, M))
    q, k, v, dout, dlse = (torch.randn(shape, generator=generator) for shape in shapes)
    q, k, v, dout = (x.to(TORCH_TYPES[dtype]) for x in (q, k, v, dout))
    names = [parameter.name for parameter in case.expression.parameters]
    extras = Extras(params=tuple(case.tensors[name] for name in names))
    leaves = {name: x.double().requires_grad_() if x.is_floating_point() else x for name, x in case.tensors.items()}
    tensors = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, lse = formula(*tensors, case, leaves)
    wanted = [leaves[name] for name in names if leaves[name].requires_grad]
    total = (out * dout.double()).sum() + (lse * dlse).sum()
    found = torch.autograd.grad(total, [*tensors, *wanted], allow_unused=True)
    exact = [torch.zeros_like(x) if g is None else g for x, g in zip([*tensors, *wanted], found, strict=True)]

    loop_order = ("query_outer", "key_outer")[CASES.index(case) % 2]
    forward, backward = (problem_of(case, op, dtype) for op in Pass)
    scale = D**-0.5
    call = executable(forward, loop_order).prepare_forward(forward, q, k, v, scale, extras)
    made, made_lse = call(q, k, v, extras=extras)
    terms = TermGradients.asked_by(backward, extras)
    run = executable(backward, loop_order).prepare_backward(backward, q, k, v, made, dout, scale, extras)
    gradients = run(q, k, v, made, made_lse, dout, dlse, extras=extras, terms=terms)

    tolerance = TOLERANCE[dtype]
    close(made, out, tolerance)
    close(made_lse, lse, 1e-4)
    for ours, theirs in zip((*gradients, *terms.present.values()), exact, strict=False):
        close(ours, theirs, tolerance)
    if backward.params_gradient:
        assert len(terms.present) == len(wanted)


def test_a_call_without_the_parameters_is_refused() -> None:
    case = next(case for case in CASES if case.name == "table")
    problem = problem_of(case, Pass.FORWARD, DType.FP32)
    q = torch.randn(B, H, M, D)

    with pytest.raises(InvalidProblemError, match="needs bias and n"):
        executable(problem, "query_outer").prepare_forward(problem, q, q[:, :1], q[:, :1], 1.0)


def test_what_an_expression_gives_where_nothing_is_seen_has_no_part() -> None:
    # The square root, and its slope, are NaN or infinite wherever the mask_mod hides.
    problem = make_problem(op=Pass.BACKWARD, dtype=DType.FP32, head_dim=D, heads=1, kv_heads=1, seqlen_q=6, seqlen_k=6)
    line = str(parse("sqrt(q_idx - kv_idx) * score"))
    problem = problem.replace(batch=1, score_mod=line, mask_mod=str(parse("kv_idx < q_idx", role=Role.MASK_MOD)))
    q, k, v, dout = torch.randn(4, 1, 1, 6, D).unbind()
    forward = problem.replace(op=Pass.FORWARD)
    out, lse = executable(forward, "query_outer").prepare_forward(forward, q, k, v, 1.0)(q, k, v)

    gradients = executable(problem, "query_outer").prepare_backward(problem, q, k, v, out, dout, 1.0)(
        q, k, v, out, lse, dout
    )

    assert torch.equal(out[:, :, 0], torch.zeros(1, 1, D))
    assert float(lse[0, 0, 0]) == -torch.inf
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
