"""Memory of the tiled torch family beside its outputs: linear in the sequence, whatever is asked for."""

from __future__ import annotations

import pytest
import torch

from autoflash.problem import Mask, MaskTensor, Pass
from tests.runtime.live_bytes import peak_bytes
from tests.runtime.tiled import LOOP_ORDERS, SCALE, Tiles, draw, packed, problem_with, tiled

SHORT = 256
FEATURES: dict[str, dict[str, object]] = {
    "plain": {},
    "softcap": {"softcap": 5.0},
    "float mask": {"mask_tensor": MaskTensor.FLOAT},
    "bool mask": {"mask_tensor": MaskTensor.BOOL},
    "window": {"window_left": 40, "window_right": 20},
    "dropout": {"dropout_p": 0.2},
    "varlen": {"mask": Mask.CAUSAL},
    "all": {
        "mask": Mask.CAUSAL,
        "softcap": 5.0,
        "mask_tensor": MaskTensor.BOOL,
        "window_left": 100,
        "dropout_p": 0.2,
    },
}
# In none may what is expanded be stored.
MASK_SHAPES = {"padding": (1, 1, 1), "heads alike": (1, 1, None), "padding of each head": (1, 2, 1)}


def test_live_bytes_count_what_is_held_and_nothing_twice() -> None:
    x = torch.zeros(1000, dtype=torch.uint8)

    def two_at_once() -> None:
        first = x + 1
        second = first.view(10, 100).add(1)
        del first
        second.mT.reshape(-1).add_(1)[5:] *= 2

    assert peak_bytes(two_at_once) == 2000
    assert peak_bytes(lambda: x[3:].view(-1).add_(1)) == 0


def peak_of(
    op: Pass, loop_order: str, features: dict[str, object], seqlen: int, mask_shape: str, *, varlen: bool
) -> int:
    rows = {"packed_q": seqlen, "packed_k": seqlen} if varlen else {}
    sizes = {"seqlen_q": seqlen, "seqlen_k": seqlen, "batch": 1, "heads": 2, "kv_heads": 1, "head_dim_v": 8, **rows}
    problem = problem_with(op, **sizes, **features)
    batch, heads, queries = MASK_SHAPES[mask_shape]
    tensors = draw(problem, torch.float32, (batch, heads, queries or seqlen, seqlen))
    if varlen:
        tensors = packed(tensors, [(seqlen // 2, seqlen // 2)] + [(8, 8)] * (seqlen // 32))
    q, k, v, dout, lse, extras = tensors
    kernel = tiled(problem, loop_order, Tiles(64, 32))
    if op is Pass.FORWARD:
        forward = kernel.prepare_forward(problem, q, k, v, SCALE, extras)
        return peak_bytes(lambda: forward(q, k, v, extras=extras))
    backward = kernel.prepare_backward(problem, q, k, v, dout, dout, SCALE, extras)
    return peak_bytes(lambda: backward(q, k, v, dout, lse, dout, extras=extras))


CASES = [(name, "padding") for name in FEATURES]
CASES += [(name, shape) for name in ("float mask", "bool mask") for shape in MASK_SHAPES if shape != "padding"]


@pytest.mark.parametrize(("feature", "mask_shape"), CASES)
@pytest.mark.parametrize("op", Pass)
@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
def test_twice_the_sequence_takes_twice_the_memory(feature: str, mask_shape: str, op: Pass, loop_order: str) -> None:
    short, long = (
        peak_of(op, loop_order, FEATURES[feature], seqlen, mask_shape, varlen=feature == "varlen")
        for seqlen in (SHORT, 2 * SHORT)
    )

    assert long <= 2.05 * short
