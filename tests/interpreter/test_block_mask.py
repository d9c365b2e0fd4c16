"""Numerics of the Triton templates with block masks, both passes, in Triton's interpreter."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from autoflash.evaluate.grid import Case
from autoflash.evaluate.masks import MaskForm
from autoflash.evaluate.verify import run_case
from autoflash.expression.expression import Role, parse
from autoflash.problem import DType, Form, Mask, MaskTensor, Pass, Problem
from autoflash.runtime.bind import bind
from autoflash.runtime.block_map import lists_of
from autoflash.runtime.executable import NO_EXTRAS, Executable, Extras
from autoflash.runtime.probe import probe
from autoflash.runtime.triton_backward import TritonBackward
from tests.factories import make_problem, make_variant

# Triton 3.6's interpreter takes arrays of one element for numbers.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning")

# Hidden, partial and whole blocks, other ones for each batch entry and head.
NEAR = str(parse("kv_idx <= q_idx + 100 + 40 * b - 130 * h", role=Role.MASK_MOD))
WINDOW: dict[str, object] = {"window_left": 150, "window_right": 40}
TILES = ("BLOCK_M", "BLOCK_N", "BLOCK_M2", "BLOCK_N2")
TOGETHER: dict[str, object] = {
    "softcap": 3.0,
    "dropout_p": 0.3,
    "mask_tensor": MaskTensor.FLOAT,
    "sinks": True,
    "score_mod": str(parse("score * 1.5 + 0.01 * q_idx")),
}
SIZES = {"head_dim": 16, "batch": 2, "heads": 2, "kv_heads": 1, "seqlen_q": 300, "seqlen_k": 420}


def problem_of(op: Pass, **fields: object) -> Problem:
    return make_problem(op=op, **SIZES).replace(block_size=128, **fields)  # type: ignore[arg-type]  # sizes are integers


def kernel_of(problem: Problem, structure: dict[str, str], tiles: tuple[int, ...] = (64, 64, 64, 64)) -> Executable:
    names = TILES[:2] if problem.op is Pass.FORWARD or structure.get("loop_order") == "key_outer" else TILES
    variant = make_variant(op=problem.op, **structure, **dict(zip(names, tiles, strict=False)))
    return bind(Form.of(problem), variant, probe("cpu"))


def ratio_of(problem: Problem, kernel: Executable) -> float:
    rng = (7, 1) if problem.dropout_p else None
    mask = MaskForm() if problem.mask_tensor is not MaskTensor.NONE else None
    case = Case(problem=problem, with_dlse=problem.op is Pass.BACKWARD, rng=rng, mask=mask)
    with np.errstate(all="ignore"):
        run = run_case(kernel, case, "cpu")
    assert not isinstance(run, str), run
    return run.finding.ratio


FORMS: dict[str, dict[str, object]] = {
    "blocks": {},
    "causal blocks": {"mask": Mask.CAUSAL},
    "blocks in a window": WINDOW,
    "mask_mod": {"mask_mod": NEAR, "dtype": DType.FP32},
    "causal mask_mod": {"mask": Mask.CAUSAL, "mask_mod": NEAR},
    "mask_mod in a window": {"mask_mod": NEAR, **WINDOW},
    "all together": {"mask": Mask.CAUSAL, "mask_mod": NEAR, "dtype": DType.FP32, **TOGETHER},
}


@pytest.mark.parametrize(("name", "op"), list(itertools.product(FORMS, Pass)))
def test_block_masks_match_the_specification(name: str, op: Pass) -> None:
    problem = problem_of(op, **FORMS[name])

    assert ratio_of(problem, kernel_of(problem, {})) <= 1.0


@pytest.mark.parametrize(
    ("structure", "tiles"),
    [
        ({"loads": "tma", "mask_loops": "split", "row_sum": "per_thread"}, (128, 32)),
        ({"mask_loops": "branch"}, (32, 128)),
    ],
)
def test_the_structures_of_the_forward_match(structure: dict[str, str], tiles: tuple[int, int]) -> None:
    problem = problem_of(Pass.FORWARD, mask=Mask.CAUSAL, mask_mod=NEAR)

    assert ratio_of(problem, kernel_of(problem, structure, tiles)) <= 1.0


@pytest.mark.parametrize(
    ("structure", "tiles"),
    [
        ({"loop_order": "fused", "loads": "tma", "dot_order": "scores_first"}, (128, 64, 64, 128)),
        ({"loop_order": "key_outer", "mask_loops": "everywhere"}, (32, 128)),
    ],
)
def test_the_structures_of_the_backward_match(structure: dict[str, str], tiles: tuple[int, ...]) -> None:
    problem = problem_of(Pass.BACKWARD, mask=Mask.CAUSAL, mask_mod=NEAR)

    assert ratio_of(problem, kernel_of(problem, structure, tiles)) <= 1.0


@pytest.mark.parametrize("block_size", [256, 512])
@pytest.mark.parametrize("op", Pass)
def test_larger_blocks_match_with_the_same_kernel(op: Pass, block_size: int) -> None:
    problem = problem_of(op, mask_mod=NEAR).replace(block_size=block_size)

    assert ratio_of(problem, kernel_of(problem, {})) <= 1.0


class Corrupted(TritonBackward):
    """A backward that is given other lists of keys than there are."""

    def prepare_backward(self, *arguments: Any, **named: Any) -> Any:
        call = super().prepare_backward(*arguments, **named)

        def run(*given: Any, extras: Extras = NO_EXTRAS, **rest: Any) -> Any:
            assert extras.key_blocks is not None
            shifted = extras._replace(key_blocks=extras.key_blocks.roll(1, dims=2).contiguous())
            return call(*given, extras=shifted, **rest)

        return run


def test_wrong_lists_of_keys_are_rejected() -> None:
    problem = problem_of(Pass.BACKWARD)
    right = kernel_of(problem, {})

    wrong = Corrupted(Form.of(problem), right.variant, probe("cpu"))

    assert ratio_of(problem, wrong) > 1.0


def tensors(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(problem.batch, problem.heads, problem.seqlen_q, problem.head_dim)]
    shapes += [(problem.batch, problem.kv_heads, problem.seqlen_k, problem.head_dim)] * 2
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v


def forward_of(problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> tuple[Tensor, Tensor]:
    call = kernel_of(problem, {}).prepare_forward(problem, q, k, v, 0.25, extras)
    return call(q, k, v, extras=extras)


def gradients_of(problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> tuple[Tensor, ...]:
    out, lse = forward_of(problem.replace(op=Pass.FORWARD), q, k, v, extras)
    dout = torch.ones_like(out)
    call = kernel_of(problem, {}).prepare_backward(problem, q, k, v, out, dout, 0.25, extras)
    return call(q, k, v, out, lse, dout, extras=extras)


def extras_of(shown: Tensor) -> Extras:
    lists = lists_of(shown, torch.ones_like(shown), SIZES["seqlen_k"], 128)
    return Extras(query_blocks=lists.queries, key_blocks=lists.keys)


def test_hidden_blocks_are_not_visited() -> None:
    # Not a number where nobody may look: a product with it would show.
    shown = torch.ones(1, 1, 3, 4, dtype=torch.bool)
    shown[:, :, 1], shown[:, :, :, 2] = False, False
    problem = problem_of(Pass.BACKWARD, dtype=DType.FP32)
    q, k, v = tensors(problem)
    q[:, :, 128:256], k[:, :, 256:384], v[:, :, 256:384] = math.nan, math.nan, math.nan

    with np.errstate(all="ignore"):
        out, lse = forward_of(problem.replace(op=Pass.FORWARD), q, k, v, extras_of(shown))
        dq, dk, dv = gradients_of(problem, q, k, v, extras_of(shown))

    assert all(bool(x.isfinite().all()) for x in (out, dq, dk, dv))
    assert bool((out[:, :, 128:256] == 0.0).all())
    assert bool((lse[:, :, 128:256] == -math.inf).all())
    assert bool((dq[:, :, 128:256] == 0.0).all())
    assert all(bool((x[:, :, 256:384] == 0.0).all()) for x in (dk, dv))


def test_whole_blocks_are_not_asked_for_their_pairs() -> None:
    # The expression hides everything; the lists say that every block is whole.
    nothing = str(parse("kv_idx < 0", role=Role.MASK_MOD))
    shown = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    lists = lists_of(shown, shown, 384, 128)
    extras = Extras(query_blocks=lists.queries, key_blocks=lists.keys)
    plain = problem_of(Pass.BACKWARD, dtype=DType.FP32, seqlen_k=384)
    asked = plain.replace(mask_mod=nothing)
    q, k, v = tensors(plain)

    for results in zip(
        *(
            (
                *forward_of(problem.replace(op=Pass.FORWARD), q, k, v, extras),
                *gradients_of(problem, q, k, v, extras),
            )
            for problem in (plain, asked)
        ),
        strict=True,
    ):
        assert torch.equal(*results)
