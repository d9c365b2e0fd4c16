"""Numerics of the Triton templates with expressions, both passes, in Triton's interpreter."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autoflash.evaluate.grid import Case
from autoflash.evaluate.masks import MaskForm
from autoflash.evaluate.verify import run_case
from autoflash.expression.expression import Role, parse
from autoflash.problem import DType, Form, Mask, MaskTensor, Pass
from autoflash.runtime.bind import bind
from autoflash.runtime.probe import probe
from tests.expression import corpus
from tests.factories import make_problem, make_variant

# Triton 3.6's interpreter takes arrays of one element for numbers.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning")

NAMES = ("squared", "causal", "head_and_batch_offset", "capped", "table", "switch", "constant", "causal_documents")
FORWARDS = (
    {},
    {"mask_loops": "branch", "row_sum": "per_thread"},
    {"pv_order": "under_next_softmax", "loads": "tma"},
)
BACKWARDS = (
    {},
    {"loop_order": "fused", "dot_order": "scores_first", "loads": "tma"},
    {"loop_order": "key_outer", "mask_loops": "everywhere"},
)
TILES = ("BLOCK_M", "BLOCK_N", "BLOCK_M2", "BLOCK_N2")
TOGETHER = {"softcap": 3.0, "dropout_p": 0.3, "mask_tensor": MaskTensor.FLOAT, "window_left": 20, "window_right": 9}


def assert_passes(op: Pass, structure: dict[str, str], **fields: object) -> None:
    tiles = dict.fromkeys(TILES[:2] if op is Pass.FORWARD else TILES, 16)
    variant = make_variant(op=op, **structure, **tiles)
    sizes = {"head_dim": 16, "batch": 2, "heads": 2, "kv_heads": 1, "seqlen_q": 19, "seqlen_k": 37}
    problem = make_problem(op=op, **sizes).replace(**fields)  # type: ignore[arg-type]  # sizes are integers
    rng = (7, 1) if problem.dropout_p else None
    mask = MaskForm() if problem.mask_tensor is not MaskTensor.NONE else None
    case = Case(problem=problem, with_dlse=op is Pass.BACKWARD, rng=rng, mask=mask)
    with np.errstate(all="ignore"):
        run = run_case(bind(Form.of(problem), variant, probe("cpu")), case, "cpu")
    assert not isinstance(run, str), run
    assert run.finding.ratio <= 1.0, run.finding.words


@pytest.mark.parametrize(("name", "op"), list(itertools.product(NAMES, Pass)))
def test_expressions_match_the_specification(name: str, op: Pass) -> None:
    case = next(case for case in corpus.CASES if case.name == name)
    number = NAMES.index(name)
    structures = FORWARDS if op is Pass.FORWARD else BACKWARDS
    dtype = (DType.FP32, DType.BF16)[number % 2]
    field = "score_mod" if case.role is Role.SCORE_MOD else "mask_mod"
    assert_passes(op, structures[number % 3], dtype=dtype, mask=list(Mask)[number % 2], **{field: str(case.expression)})


@pytest.mark.parametrize("op", Pass)
def test_expressions_stand_beside_other_features(op: Pass) -> None:
    cases = {case.name: str(case.expression) for case in corpus.CASES}
    assert_passes(op, {}, score_mod=cases["table"], mask_mod=cases["documents"], dtype=DType.FP32, **TOGETHER)


@pytest.mark.parametrize("op", Pass)
def test_expressions_stand_beside_slopes(op: Pass) -> None:
    cases = {case.name: str(case.expression) for case in corpus.CASES}
    assert_passes(op, {}, score_mod=cases["squared"], mask_mod=cases["documents"], dtype=DType.FP32, alibi=True)


def test_what_an_expression_gives_where_nothing_is_has_no_part() -> None:
    # Not a number behind the last query, and where the mask_mod hides.
    assert_passes(
        Pass.BACKWARD,
        {},
        score_mod=str(parse("score * sqrt(19 - q_idx) / (19 - q_idx)")),
        mask_mod=str(parse("kv_idx < 30", role=Role.MASK_MOD)),
        dtype=DType.FP32,
    )
