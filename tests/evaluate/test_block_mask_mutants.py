"""The gate on problems with block masks: an honest kernel passes it, and each way to be wrong is rejected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autoflash.evaluate.verify import verify
from autoflash.expression.expression import Role, parse
from autoflash.problem import DType, Form, Pass, Problem
from autoflash.runtime.block_map import HEADER
from autoflash.runtime.executable import NO_EXTRAS, Extras
from autoflash.runtime.load import load
from autoflash.runtime.probe import probe
from autoflash.runtime.torch_module import TorchTiled
from autoflash.trial import Level
from autoflash.variant import Choices, Family, Variant
from tests.factories import make_problem

NEAR = str(parse("kv_idx <= q_idx + 100 - 130 * h", role=Role.MASK_MOD))
DTYPES = (DType.FP32, DType.BF16)
VARIANT = Variant(
    family=Family.TORCH_TILED,
    structure=Choices(loop_order="query_outer"),
    config=Choices(block_m=64, block_n=64, heads_per_step=0),
)


def problem_of(op: Pass, dtype: DType, mask_mod: str) -> Problem:
    sizes = {"head_dim": 32, "batch": 2, "heads": 4, "kv_heads": 2, "seqlen_q": 280, "seqlen_k": 400}
    return make_problem(op=op, dtype=dtype, **sizes).replace(block_size=128, mask_mod=mask_mod)  # type: ignore[arg-type]  # sizes are integers


def shown_but_not(lists: Tensor) -> Tensor:
    """The last of the blocks that each list shows is left out."""
    changed = lists.clone()
    changed[..., 0] = torch.minimum(changed[..., 0], changed[..., 1] - 1).clamp(min=0)
    changed[..., 1] = (changed[..., 1] - 1).clamp(min=0)
    return changed


def hidden_too(lists: Tensor) -> Tensor:
    """The first of the blocks that each list hides is shown as well."""
    changed = lists.clone()
    changed[..., 1] = (changed[..., 1] + 1).clamp(max=lists.shape[-1] - HEADER)
    return changed


FAULTS = {
    "a block is left out": shown_but_not,
    "a hidden block is visited": hidden_too,
    "lists of the next row": lambda lists: lists.roll(1, dims=2),
    "lists of the next head": lambda lists: lists.roll(1, dims=1),
    "lists of the next batch entry": lambda lists: lists.roll(1, dims=0),
    "every list is the first": lambda lists: lists[:, :, :1].expand_as(lists),
}


class Kernel(TorchTiled):
    """The tiled torch family, given other lists than there are, or deaf to the expression where a block is partial."""

    def __init__(self, problem: Problem, fault: str = "") -> None:
        super().__init__(Form.of(problem), VARIANT, probe("cpu"))
        self.fault = fault

    def _given(self, extras: Extras, q: Tensor, k: Tensor) -> dict[str, Any]:
        if self.fault in FAULTS and extras.query_blocks is not None:
            extras = extras._replace(query_blocks=FAULTS[self.fault](extras.query_blocks).contiguous())
        return super()._given(extras, q, k)

    def _module(self) -> Any:
        module = load(self._source)
        if self.fault != "partial blocks are taken for whole":
            return module
        changed = type(module)(module.__name__)
        exec(compile(self._source.text, "changed", "exec"), changed.__dict__)
        changed.__dict__["hide_by_mask_mod"] = lambda s, places, group: None
        return changed


@pytest.mark.parametrize("mask_mod", ["", NEAR], ids=["blocks", "mask_mod"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", Pass)
def test_an_honest_kernel_passes(op: Pass, dtype: DType, mask_mod: str) -> None:
    problem = problem_of(op, dtype, mask_mod)

    verification = verify(Kernel(problem), problem, Level.SCREEN)

    assert verification.passed, verification.detail


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", Pass)
@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_lists_are_rejected(fault: str, op: Pass, dtype: DType) -> None:
    problem = problem_of(op, dtype, "")

    assert not verify(Kernel(problem, fault), problem, Level.SCREEN).passed


@pytest.mark.parametrize("op", Pass)
def test_a_kernel_that_hides_nothing_within_blocks_is_rejected(op: Pass) -> None:
    problem = problem_of(op, DType.BF16, NEAR)

    assert not verify(Kernel(problem, "partial blocks are taken for whole"), problem, Level.SCREEN).passed


def test_extras_that_are_missing_are_named() -> None:
    problem = problem_of(Pass.FORWARD, DType.FP32, "")
    q, k = torch.zeros(2, 4, 280, 32), torch.zeros(2, 2, 400, 32)

    with pytest.raises(ValueError, match="query_blocks"):
        Kernel(problem).prepare_forward(problem, q, k, k, 1.0, NO_EXTRAS)
