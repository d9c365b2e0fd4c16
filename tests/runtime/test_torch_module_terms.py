"""Terms of scores with gradients in the tiled torch family: the gate, with tiles that fit and tiles that do not."""

from __future__ import annotations

import pytest

from autoflash.evaluate.verify import verify
from autoflash.problem import DType, Mask, MaskTensor, Pass
from autoflash.trial import Level
from tests.factories import make_device
from tests.runtime.tiled import LOOP_ORDERS, Tiles, problem_with, tiled

SIZES: dict[str, object] = {"heads": 4, "kv_heads": 2, "head_dim": 16, "head_dim_v": 8, "seqlen_q": 40, "seqlen_k": 56}
TERMS: dict[str, dict[str, object]] = {
    "sinks": {"sinks": True},
    "bias": {"bias": True, "bias_gradient": True},
    "alibi": {"alibi": True, "alibi_gradient": True},
}
PACKED = {name: TERMS[name] for name in ("sinks", "alibi")}
ROWS: dict[str, object] = {"batch": 2, "packed_q": 80, "packed_k": 112}


def assert_passes(fields: dict[str, object], op: Pass, loop_order: str, tiles: Tiles, level: Level) -> None:
    problem = problem_with(op, **{**SIZES, **fields})

    verification = verify(tiled(problem, loop_order, tiles), problem, level, device=make_device("cpu"))

    assert verification.passed, verification.detail


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("op", Pass)
def test_each_term_passes_the_whole_gate(op: Pass, dtype: DType, term: str) -> None:
    loop_order = LOOP_ORDERS[list(DType).index(dtype) % 2]
    tiles = Tiles(block_m=32, block_n=64, heads_per_step=3)

    assert_passes({"dtype": dtype, **TERMS[term]}, op, loop_order, tiles, Level.FULL)


@pytest.mark.parametrize("term", PACKED)
@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
@pytest.mark.parametrize("op", Pass)
def test_terms_of_packed_sequences_pass_the_gate(op: Pass, loop_order: str, term: str) -> None:
    fields = {"dtype": DType.BF16, **ROWS, **PACKED[term]}

    assert_passes(fields, op, loop_order, Tiles(block_m=64, block_n=64), Level.FULL)


@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
@pytest.mark.parametrize("op", Pass)
def test_all_terms_and_features_pass_the_gate(op: Pass, loop_order: str) -> None:
    terms = {name: value for fields in TERMS.values() for name, value in fields.items()}
    others = {"softcap": 15.0, "mask_tensor": MaskTensor.BOOL, "window_left": 33, "dropout_p": 0.2}
    fields = {"dtype": DType.BF16, "mask": Mask.CAUSAL, **others, **terms}

    assert_passes(fields, op, loop_order, Tiles(block_m=16, block_n=64, heads_per_step=1), Level.SCREEN)
