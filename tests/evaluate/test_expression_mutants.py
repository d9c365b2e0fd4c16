"""The gate on problems with expressions: an honest kernel passes it, and each way to be wrong is rejected."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoflash.evaluate.verify import verify
from autoflash.problem import DType, Form, Pass, Problem
from autoflash.runtime.executable import NO_EXTRAS, NO_TERMS, Extras, TermGradients
from autoflash.runtime.load import load
from autoflash.runtime.probe import probe
from autoflash.runtime.torch_module import TorchTiled
from autoflash.trial import Level
from autoflash.variant import Choices, Family, Variant
from tests.factories import make_problem

SCORE_MOD = "score_mod(n: int 0, t: float 2) = score * 1.5 + t[h, q_idx - kv_idx + n]"
MASK_MOD = "mask_mod(doc: int 2) = doc[b, kv_idx] == doc[b, q_idx]"
PARAMS = {"score_mod": SCORE_MOD, "params_gradient": True}
DTYPES = (DType.FP32, DType.BF16)
VARIANT = Variant(
    family=Family.TORCH_TILED,
    structure=Choices(loop_order="query_outer"),
    config=Choices(block_m=64, block_n=64, heads_per_step=0),
)


def problem_of(op: Pass, dtype: DType, **fields: Any) -> Problem:
    sizes = {"head_dim": 32, "heads": 4, "kv_heads": 2, "seqlen_q": 70, "seqlen_k": 90}
    return make_problem(op=op, dtype=dtype, **sizes).replace(**fields)  # type: ignore[arg-type]  # sizes are integers


class Kernel(TorchTiled):
    """The tiled torch family, or with a fault."""

    def __init__(self, problem: Problem, fault: str = "") -> None:
        super().__init__(Form.of(problem), VARIANT, probe("cpu"))
        self.fault = fault

    def _module(self) -> Any:
        module = load(self._source)
        if not self.fault:
            return module
        changed = type(module)(module.__name__)
        exec(compile(self._source.text, "changed", "exec"), changed.__dict__)
        made: dict[str, Any] = changed.__dict__
        if self.fault == "score_mod ignored" and "modify" in made:
            made["modify"] = lambda s, places, group: s
        if self.fault == "mask_mod ignored":
            made["hide_by_mask_mod"] = lambda s, places, group: None
        if self.fault == "slope ignored":
            honest = made["modify_with_slope"]
            made["modify_with_slope"] = lambda *a: (honest(*a)[0], torch.ones_like(a[0]))
        if self.fault == "tile of a parameter's gradient skipped":
            adding = made["add_parameter_gradients"]
            made["add_parameter_gradients"] = lambda *a: None if int(a[3][2].flatten()[0]) else adding(*a)
        if self.fault == "parameter gradient behind the score's derivative":
            added = made["add_parameter_gradients"]
            made["add_parameter_gradients"] = lambda dparams, ds, *rest: added(dparams, ds * 1.5, *rest)
        return changed

    def prepare_backward(self, *arguments: Any, **named: Any) -> Any:
        call = super().prepare_backward(*arguments, **named)

        def run(*given: Any, extras: Extras = NO_EXTRAS, terms: TermGradients = NO_TERMS, **rest: Any) -> Any:
            made = call(*given, extras=extras, terms=terms, **rest)
            for gradient in terms.present.values():
                gradient *= 1.01 if self.fault == "parameter gradient x 1.01" else 1.0
                if self.fault == "parameter gradient one place on":
                    gradient.copy_(gradient.roll(1, -1))
            return made

        return run


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", Pass)
def test_an_honest_kernel_passes(op: Pass, dtype: DType) -> None:
    problem = problem_of(op, dtype, score_mod=SCORE_MOD, mask_mod=MASK_MOD, params_gradient=True)

    verification = verify(Kernel(problem), problem, Level.SCREEN)

    assert verification.passed, verification.detail


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("fault", "op", "fields"),
    [
        ("score_mod ignored", Pass.FORWARD, {"score_mod": SCORE_MOD}),
        ("mask_mod ignored", Pass.FORWARD, {"mask_mod": MASK_MOD}),
        ("mask_mod ignored", Pass.BACKWARD, {"mask_mod": MASK_MOD}),
        ("slope ignored", Pass.BACKWARD, {"score_mod": SCORE_MOD}),
        ("parameter gradient x 1.01", Pass.BACKWARD, PARAMS),
        ("parameter gradient one place on", Pass.BACKWARD, PARAMS),
        ("parameter gradient behind the score's derivative", Pass.BACKWARD, PARAMS),
        ("tile of a parameter's gradient skipped", Pass.BACKWARD, PARAMS),
    ],
)
def test_a_wrong_kernel_is_rejected(fault: str, op: Pass, fields: dict[str, Any], dtype: DType) -> None:
    problem = problem_of(op, dtype, **fields)

    assert not verify(Kernel(problem, fault), problem, Level.SCREEN).passed
