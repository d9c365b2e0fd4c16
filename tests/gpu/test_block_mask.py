"""Block masks on a GPU: the gate, what the host waits for, graphs, and time that falls with what is shown."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import autoflash
from autoflash import BlockMask, block_mask
from autoflash.device import Device
from autoflash.dispatch.buckets import cell_of
from autoflash.evaluate.benchmark import interleaved, make_call
from autoflash.expression.expression import Role, parse
from autoflash.problem import DType, Form, Mask, MaskTensor, Pass, Problem
from autoflash.runtime.bind import bind
from autoflash.runtime.probe import probe
from autoflash.space import catalog
from autoflash.variant import Family, Variant
from tests.factories import make_problem, make_variant
from tests.gpu.conftest import Gate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

NEAR = str(parse("kv_idx <= q_idx + 100 + 40 * b - 130 * h", role=Role.MASK_MOD))
FORMS: dict[str, dict[str, Any]] = {
    "blocks": {},
    "causal-blocks": {"mask": Mask.CAUSAL},
    "mask_mod": {"mask_mod": NEAR},
    "causal-mask_mod": {"mask": Mask.CAUSAL, "mask_mod": NEAR},
    "window-mask_mod": {"window_left": 150, "window_right": 40, "mask_mod": NEAR},
    "together": {
        "mask": Mask.CAUSAL,
        "mask_mod": NEAR,
        "score_mod": str(parse("score * 1.5 + 0.01 * q_idx")),
        "softcap": 20.0,
        "mask_tensor": MaskTensor.FLOAT,
        "sinks": True,
        "dropout_p": 0.2,
    },
}
BACKWARDS = list(itertools.product(["split", "fused", "key_outer"], ["pointer", "tma"]))


@pytest.fixture(scope="module")
def device() -> Device:
    return probe("cuda")


@pytest.fixture(scope="module", autouse=True)
def _no_records() -> Iterator[None]:
    autoflash.forget()
    yield
    autoflash.forget()


def problem_of(op: Pass, dtype: DType, **fields: Any) -> Problem:
    sizes = {"head_dim": 64, "batch": 2, "heads": 4, "kv_heads": 2, "seqlen_q": 512}
    return make_problem(op=op, dtype=dtype, **sizes).replace(block_size=128, **fields)  # type: ignore[arg-type]  # sizes are integers


def default_of(problem: Problem, device: Device) -> Variant:
    return catalog.search_space(cell_of(problem, device), device, Family.TRITON).default()


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("op", list(Pass))
@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_inside_the_gate(name: str, op: Pass, dtype: DType, device: Device, gate: Gate) -> None:
    problem = problem_of(op, dtype, **FORMS[name])

    verification = gate(problem, default_of(problem, device), device)

    assert verification.passed, verification.detail


@pytest.mark.parametrize(("loop_order", "loads"), BACKWARDS)
def test_every_order_of_the_backward_is_inside_the_gate(
    loop_order: str, loads: str, device: Device, gate: Gate
) -> None:
    if loads == "tma" and not device.has_tma:
        pytest.skip("no copy engine for tensor descriptors")
    problem = problem_of(Pass.BACKWARD, DType.BF16, **FORMS["causal-mask_mod"])
    tiles = {"BLOCK_M": 64, "BLOCK_N": 64}
    tiles |= {} if loop_order == "key_outer" else {"BLOCK_M2": 128, "BLOCK_N2": 64}
    variant = make_variant(op=Pass.BACKWARD, loop_order=loop_order, loads=loads, **tiles)

    verification = gate(problem, variant, device)

    assert verification.passed, verification.detail


@pytest.mark.parametrize("row_sum", ["each_block", "per_thread"])
def test_a_forward_by_descriptors_is_inside_the_gate(row_sum: str, device: Device, gate: Gate) -> None:
    if not device.has_tma:
        pytest.skip("no copy engine for tensor descriptors")
    problem = problem_of(Pass.FORWARD, DType.BF16, **FORMS["causal-mask_mod"])
    variant = make_variant(loads="tma", row_sum=row_sum, mask_loops="branch", BLOCK_M=128, BLOCK_N=128, num_warps=8)

    verification = gate(problem, variant, device)

    assert verification.passed, verification.detail


def tensors(b: int, h: int, s: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(b, h, s, d, device="cuda", dtype=torch.bfloat16).requires_grad_(True) for _ in range(3))
    return q, k, v


def documents(s: int, device: str) -> BlockMask:
    doc = (torch.arange(s) // 300).int().to(device)
    return block_mask(
        "doc[q_idx] == doc[kv_idx] and kv_idx <= q_idx", None, None, s, s, params={"doc": doc}, device=device
    )


def step(q: Tensor, k: Tensor, v: Tensor, blocks: BlockMask) -> tuple[Tensor, ...]:
    out = autoflash.attention(q, k, v, block_mask=blocks, vendor="never")
    assert isinstance(out, Tensor)
    # A graph of autograd that outlives the call would tie a capture to the stream that it was made in.
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))


def test_a_map_is_the_same_on_every_device() -> None:
    ours, theirs = documents(1000, "cuda"), documents(1000, "cpu")

    for one, other in zip(ours.lists, theirs.lists, strict=True):
        assert torch.equal(one.cpu(), other)
    assert torch.equal(ours.dense().cpu(), theirs.dense())


def test_the_host_waits_for_nothing() -> None:
    q, k, v = tensors(2, 4, 1000, 64)
    doc = (torch.arange(1000, device="cuda") // 300).int()
    shown = torch.rand(8, 8, device="cuda") < 0.5

    def everything() -> None:
        of_mask = block_mask("doc[q_idx] == doc[kv_idx]", None, None, 1000, 1000, params={"doc": doc}, device="cuda")
        step(q, k, v, of_mask)
        step(q, k, v, BlockMask.from_blocks(shown, 1000, 1000))

    everything()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_results_are_those_of_the_dense_mask() -> None:
    q, k, v = tensors(2, 4, 1000, 64)
    blocks = documents(1000, "cuda")

    found = step(q, k, v, blocks)

    out = autoflash.attention(q, k, v, mask=blocks.dense(), vendor="never")
    assert isinstance(out, Tensor)
    for ours, theirs in zip(found, (out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)


def test_a_graph_and_a_compiled_call_give_the_same() -> None:
    q, k, v = tensors(1, 4, 1000, 64)
    blocks = documents(1000, "cuda")
    eager = step(q, k, v, blocks)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(q, k, v, blocks)
    graph.replay()
    compiled = torch.compile(lambda q, k, v: autoflash.attention(q, k, v, block_mask=blocks, vendor="never"))

    assert all(torch.equal(*pair) for pair in zip(eager, captured, strict=True))
    torch.testing.assert_close(compiled(q, k, v), eager[0])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("op", list(Pass))
def test_time_falls_with_what_is_shown(op: Pass, device: Device) -> None:
    problem = make_problem(op=op, dtype=DType.BF16, head_dim=64, batch=2, heads=16, seqlen_q=8192)
    problem = problem.replace(block_size=128)
    make = functools.partial(make_call, bind(Form.of(problem), default_of(problem, device), device), problem, device)

    times = [one.median_us for one in interleaved([make(shown=share) for share in (1.0, 0.5, 0.25, 0.125)], device)]

    # In proportion they would be 0.5, 0.25 and 0.125.
    for taken, most in zip(times[1:], (0.65, 0.4, 0.28), strict=True):
        assert taken < most * times[0], times
