"""The Hopper family on a Hopper GPU: the whole gate, streams, graphs and repeated launches."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autoflash.device import Device
from autoflash.dispatch.buckets import cell_of
from autoflash.problem import DType, Form, Mask, Pass, Problem
from autoflash.runtime.bind import bind
from autoflash.runtime.executable import ForwardCall
from autoflash.runtime.probe import probe
from autoflash.space import catalog
from autoflash.variant import Family, Variant
from tests.factories import make_problem, make_variant
from tests.gpu.conftest import Gate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

NARROW = {"consumers": 3, "q_operand": "shared", "exponentials": "whole", "output": "direct"}
COLUMNS = {"consumer_owns": "columns"}
SPLIT = {"loop_order": "split", "BLOCK_N2": 64, "k_stages2": 2, "v_stages2": 1}
WIDE = {"q_operand": "shared", "exponentials": "whole", "output": "direct", "BLOCK_N": 64}
FEATURES: tuple[dict[str, object], ...] = (
    {"window_left": 255, "window_right": 100},
    {"softcap": 20.0},
    {"softcap": 20.0, "window_left": 255, "window_right": 100},
)


@pytest.fixture(scope="module")
def device() -> Device:
    return probe("cuda")


def tensors(problem: Problem) -> list[Tensor]:
    """q, k and v."""
    sizes = [(problem.heads, problem.seqlen_q), *[(problem.kv_heads, problem.seqlen_k)] * 2]
    return [
        torch.randn(problem.batch, heads, rows, problem.head_dim, device="cuda", dtype=torch.bfloat16)
        for heads, rows in sizes
    ]


def prepared(problem: Problem, variant: Variant, device: Device, inputs: list[Tensor]) -> ForwardCall:
    return bind(Form.of(problem), variant, device).prepare_forward(problem, *inputs, 0.1)


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
@pytest.mark.parametrize("mask", list(Mask))
@pytest.mark.parametrize(
    ("head_dim", "changes"),
    [
        (64, NARROW),
        (80, {}),
        (128, {"ping_pong": "on"}),
        (128, {"consumers": 1, "BLOCK_N": 64, "persistent": 0}),
        (256, WIDE),
        *((head_dim, {**WIDE, "output": output}) for head_dim in (96, 256) for output in ("vectors", "through_q")),
        (128, {"output": "through_q"}),
    ],
)
def test_forward_passes_the_gate(
    device: Device, head_dim: int, changes: dict[str, str | int], mask: Mask, dtype: DType, gate: Gate
) -> None:
    problem = make_problem(dtype=dtype, head_dim=head_dim, batch=4, heads=8, seqlen_q=2048, mask=mask)
    schedule = "ticketed" if mask is Mask.CAUSAL and changes.get("persistent", 1) else "round_robin"

    verification = gate(problem, make_variant(Family.GLUON_SM90, **changes, schedule=schedule), device)

    assert verification.passed, verification.detail


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
@pytest.mark.parametrize("mask", list(Mask))
@pytest.mark.parametrize(
    ("head_dim", "changes"),
    [
        (64, NARROW),
        (64, {"exponentials": "whole", "rescale": "conditional", "exp2": "polynomial"}),
        (96, {"consumers": 1, "BLOCK_N": 64}),
        (128, {}),
        (128, {"ping_pong": "on", "BLOCK_N": 64}),
        (256, WIDE),
    ],
)
@pytest.mark.parametrize("asked", FEATURES, ids=str)
def test_forward_with_features_passes_the_gate(
    device: Device,
    asked: dict[str, object],
    head_dim: int,
    changes: dict[str, str | int],
    mask: Mask,
    dtype: DType,
    gate: Gate,
) -> None:
    problem = make_problem(dtype=dtype, head_dim=head_dim, batch=4, heads=8, seqlen_q=2048, mask=mask).replace(**asked)
    schedule = "ticketed" if mask is Mask.CAUSAL else "round_robin"

    verification = gate(problem, make_variant(Family.GLUON_SM90, **changes, schedule=schedule), device)

    assert verification.passed, verification.detail


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
@pytest.mark.parametrize("mask", list(Mask))
@pytest.mark.parametrize(("head_dim", "block_m"), [(64, 128), (96, 64), (128, 64)])
def test_backward_passes_the_gate(
    device: Device, head_dim: int, block_m: int, mask: Mask, dtype: DType, gate: Gate
) -> None:
    problem = make_problem(op=Pass.BACKWARD, dtype=dtype, head_dim=head_dim, batch=4, heads=8, seqlen_q=2048, mask=mask)
    variant = make_variant(Family.GLUON_SM90, op=Pass.BACKWARD, BLOCK_M=block_m)

    verification = gate(problem, variant, device)

    assert verification.passed, verification.detail


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
@pytest.mark.parametrize("mask", list(Mask))
@pytest.mark.parametrize(
    ("head_dim", "changes"),
    [
        *itertools.product((192, 256), (COLUMNS, {**COLUMNS, **SPLIT}, {**COLUMNS, **SPLIT, "s_issue": "step_before"})),
        (64, {**SPLIT, "BLOCK_M": 128}),
        (96, SPLIT),
        (128, {**SPLIT, "BLOCK_N2": 128, "v_stages2": 2}),
    ],
)
def test_backward_in_columns_and_with_dq_apart_passes_the_gate(
    device: Device, head_dim: int, changes: dict[str, str | int], mask: Mask, dtype: DType, gate: Gate
) -> None:
    # Apart, each dq has one program, and 100 launches must give the same bits.
    problem = make_problem(
        op=Pass.BACKWARD,
        dtype=dtype,
        head_dim=head_dim,
        batch=4,
        heads=8,
        seqlen_q=2048,
        mask=mask,
        deterministic="loop_order" in changes,
    )
    variant = make_variant(Family.GLUON_SM90, op=Pass.BACKWARD, **changes)

    verification = gate(problem, variant, device)

    assert verification.passed, verification.detail


@pytest.mark.parametrize(
    ("head_dim", "output"),
    [
        *((head_dim, output) for head_dim in (64, 80, 96, 128) for output in ("tma", "direct")),
        (128, "vectors"),
        (128, "through_q"),
        *((256, output) for output in ("direct", "vectors", "through_q")),
    ],
)
def test_a_tile_of_one_key_block_is_not_overtaken_by_the_next(device: Device, head_dim: int, output: str) -> None:
    problem = make_problem(
        dtype=DType.FP16, head_dim=head_dim, batch=60, heads=4, kv_heads=4, seqlen_q=1024, seqlen_k=128
    )
    q = torch.randn(60, 1024, 4, head_dim, device="cuda", dtype=torch.float16).transpose(1, 2)
    k, v = (torch.randn(60, 128, 4, head_dim, device="cuda", dtype=torch.float16).transpose(1, 2) for _ in range(2))
    choices = WIDE if head_dim == 256 else {}
    call = prepared(problem, make_variant(Family.GLUON_SM90, **{**choices, "output": output}), device, [q, k, v])
    expected = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), scale=0.1)

    first, first_lse = call(q, k, v)
    torch.testing.assert_close(first.float(), expected, atol=5e-3, rtol=5e-3)
    for _ in range(200):
        out, lse = call(q, k, v)
        assert torch.equal(out, first)
        assert torch.equal(lse, first_lse)


def test_tickets_are_not_shared_between_streams(device: Device) -> None:
    problem = make_problem(head_dim=128, batch=2, heads=16, seqlen_q=1024, mask=Mask.CAUSAL)
    inputs = tensors(problem)
    call = prepared(problem, make_variant(Family.GLUON_SM90, schedule="ticketed"), device, inputs)
    expected, _ = call(*inputs)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()

    results = []
    for launch in range(200):
        with torch.cuda.stream(streams[launch % len(streams)]):
            results.append(call(*inputs)[0])
    torch.cuda.synchronize()

    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize("op", list(Pass))
def test_1000_launches_of_random_shapes_on_concurrent_streams_give_the_same_bits(op: Pass, device: Device) -> None:
    generator = torch.Generator().manual_seed(2)
    jobs = []
    for number in range(20):
        seqlen_q, seqlen_k = (int(x) for x in torch.randint(1, 1500, (2,), generator=generator))
        problem = make_problem(
            op=op,
            head_dim=(64, 128)[number % 2],
            batch=2,
            heads=8,
            kv_heads=(8, 2)[number // 2 % 2],
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            mask=list(Mask)[number // 4 % 2],
            # Without it, a backward adds to dq in any order.
            deterministic=op is Pass.BACKWARD,
        )
        call = launched(problem, device)
        jobs.append((call, call()))
    streams = [torch.cuda.Stream() for _ in range(8)]
    torch.cuda.synchronize()

    wrong = torch.zeros(len(streams), dtype=torch.int64, device="cuda")
    for launch in range(1000):
        call, expected = jobs[int(torch.randint(len(jobs), (), generator=generator))]
        number = launch % len(streams)
        with torch.cuda.stream(streams[number]):
            for one, other in zip(call(), expected, strict=True):
                wrong[number] += (one != other).any()
    torch.cuda.synchronize()

    assert wrong.tolist() == [0] * len(streams)


def launched(problem: Problem, device: Device) -> Callable[[], tuple[Tensor, ...]]:
    """A call of the family's default kernel for a problem, on random tensors of its own."""
    space = catalog.search_space(cell_of(problem, device), device, Family.GLUON_SM90)
    executable = bind(Form.of(problem), space.default(), device)
    q, k, v = tensors(problem)
    if problem.op is Pass.FORWARD:
        forward = executable.prepare_forward(problem, q, k, v, 0.1)
        return lambda: forward(q, k, v)
    forward_problem = problem.replace(op=Pass.FORWARD)
    out, lse = prepared(forward_problem, make_variant(Family.TORCH_TILED), device, [q, k, v])(q, k, v)
    dout = torch.randn_like(out)
    backward = executable.prepare_backward(problem, q, k, v, out, dout, 0.1)
    return lambda: backward(q, k, v, out, lse, dout)


def test_a_captured_launch_replays_with_tickets_of_its_own(device: Device) -> None:
    problem = make_problem(head_dim=128, batch=2, heads=16, seqlen_q=1024, mask=Mask.CAUSAL)
    inputs = tensors(problem)
    call = prepared(problem, make_variant(Family.GLUON_SM90, schedule="ticketed"), device, inputs)
    expected = call(*inputs)[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = call(*inputs)

    for _ in range(20):
        out.zero_()
        graph.replay()
        call(*inputs)
    torch.cuda.synchronize()

    assert torch.equal(out, expected)


def assert_right(problem: Problem, variant: Variant, device: Device) -> None:
    """A forward gives what tiled torch gives."""
    inputs = tensors(problem)

    out, lse = prepared(problem, variant, device, inputs)(*inputs)

    expected, expected_lse = prepared(problem, make_variant(Family.TORCH_TILED), device, inputs)(*inputs)
    assert torch.allclose(out.float(), expected.float(), atol=2e-2)
    assert torch.allclose(lse, expected_lse, atol=1e-3)


def test_random_shapes_one_after_the_other_stay_right(device: Device) -> None:
    generator = torch.Generator().manual_seed(0)
    variant = make_variant(Family.GLUON_SM90, schedule="ticketed")
    for _ in range(60):
        seqlen_q, seqlen_k = (int(x) for x in torch.randint(1, 700, (2,), generator=generator))
        problem = make_problem(
            head_dim=128, batch=2, heads=4, kv_heads=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, mask=Mask.CAUSAL
        )
        assert_right(problem, variant, device)


@pytest.mark.parametrize("changes", [{}, {"ping_pong": "on", "BLOCK_N": 64}, {**NARROW, "ping_pong": "on"}], ids=str)
def test_random_windows_one_after_the_other_stay_right(device: Device, changes: dict[str, str | int]) -> None:
    generator = torch.Generator().manual_seed(1)
    for number in range(60):
        seqlen_q, seqlen_k, left, right = (int(x) for x in torch.randint(1, 700, (4,), generator=generator))
        mask = list(Mask)[number % 2]
        problem = make_problem(
            head_dim=64, batch=2, heads=4, kv_heads=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, mask=mask
        )
        problem = problem.replace(window_left=left // 2, window_right=right // 2 if number % 5 else None)
        variant = make_variant(
            Family.GLUON_SM90, **changes, schedule="ticketed" if mask is Mask.CAUSAL else "round_robin"
        )
        assert_right(problem, variant, device)
