"""Backward kernels on a GPU: what the interpreter cannot show (the copy engine, atomics, compiled specialisations)."""

from __future__ import annotations

import gc

import pytest
import torch

from autoflash.device import Device
from autoflash.problem import DType, Form, Mask, Problem
from autoflash.runtime.probe import probe
from autoflash.runtime.triton_backward import TritonBackward
from autoflash.variant import Variant
from tests.gradients import Gradients, Inputs, assert_gradients, backward_problem, make_inputs, make_variant, run

pytestmark = pytest.mark.gpu

STRUCTURES = [(loop_order, loads) for loop_order in ("split", "fused", "key_outer") for loads in ("pointer", "tma")]
TILES = (64, 64, 64, 64)


@pytest.fixture(scope="module")
def device() -> Device:
    return probe("cuda")


def _variant(loop_order: str, loads: str, device: Device, **choices: str) -> Variant:
    if loads == "tma" and not device.has_tma:
        pytest.skip("this device has no copy engine")
    return make_variant(loop_order, loads, tiles=TILES, **choices)


def _inputs(problem: Problem, device: Device, **options: bool) -> Inputs:
    return make_inputs(problem, device=device.torch_device, **options)


def _same(one: Gradients, other: Gradients) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("mask", list(Mask))
@pytest.mark.parametrize(("loop_order", "loads"), STRUCTURES)
@pytest.mark.parametrize("head_dim", [40, 64, 128])
def test_regular_and_irregular_sizes_match_the_specification(
    device: Device, loop_order: str, loads: str, mask: Mask, head_dim: int
) -> None:
    variant = _variant(loop_order, loads, device)
    for seqlen_q, seqlen_k in ((512, 512), (333, 517), (131, 64), (1, 1)):
        problem = backward_problem(
            batch=2, heads=4, kv_heads=2, head_dim=head_dim, seqlen_q=seqlen_q, seqlen_k=seqlen_k, mask=mask
        )
        inputs = _inputs(problem, device)
        assert_gradients(run(variant, problem, inputs, device), problem, inputs)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize(("loop_order", "loads"), STRUCTURES)
def test_every_dtype_matches_the_specification(device: Device, loop_order: str, loads: str, dtype: DType) -> None:
    variant = _variant(loop_order, loads, device, mask_loops="everywhere", dot_order="scores_first")
    variant_of_size = (
        make_variant(loop_order, loads, tiles=(32, 32, 32, 32), stages=1) if dtype is DType.FP32 else variant
    )
    problem = backward_problem(dtype=dtype, heads=8, kv_heads=2, seqlen_q=256, seqlen_k=300, mask=Mask.CAUSAL)
    inputs = _inputs(problem, device)
    assert_gradients(run(variant_of_size, problem, inputs, device), problem, inputs)


@pytest.mark.parametrize("loads", ["pointer", "tma"])
@pytest.mark.parametrize("loop_order", ["split", "fused"])
def test_what_is_deterministic_gives_the_same_bits_ten_times(device: Device, loop_order: str, loads: str) -> None:
    problem = backward_problem(batch=4, heads=16, seqlen_q=1024, mask=Mask.CAUSAL, deterministic=True)
    inputs = _inputs(problem, device, with_dlse=False)
    variant = _variant(loop_order, loads, device)
    first = run(variant, problem, inputs, device)
    assert all(_same(first, run(variant, problem, inputs, device)) for _ in range(10))


@pytest.mark.parametrize(("loop_order", "loads"), STRUCTURES)
def test_a_captured_call_replays_on_new_contents(device: Device, loop_order: str, loads: str) -> None:
    problem = backward_problem(seqlen_q=256, mask=Mask.CAUSAL)
    inputs, others = _inputs(problem, device), _inputs(problem, device)
    executable = TritonBackward(Form.of(problem), _variant(loop_order, loads, device), device)
    scale = problem.head_dim**-0.5
    call = executable.prepare_backward(problem, inputs.q, inputs.k, inputs.v, inputs.out, inputs.dout, scale)
    fields = ("q", "k", "v", "out", "lse", "dout", "dlse")
    call(*(getattr(inputs, name) for name in fields))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call(*(getattr(inputs, name) for name in fields))
    for name in fields:
        getattr(inputs, name).copy_(getattr(others, name))
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert_gradients(got, problem, others)


def test_an_expanded_upstream_gradient_counts_like_its_copy(device: Device) -> None:
    problem = backward_problem(seqlen_q=200, seqlen_k=200)
    inputs = _inputs(problem, device)
    inputs = inputs.replace(dout=torch.ones((), dtype=torch.bfloat16, device=inputs.q.device).expand(inputs.dout.shape))
    copied = inputs.replace(dout=inputs.dout.contiguous())
    variant = _variant("split", "pointer", device)
    got = run(variant, problem, inputs, device)
    assert_gradients(got, problem, inputs)
    assert _same(got, run(variant, problem, copied, device))


@pytest.mark.parametrize("loop_order", ["fused", "key_outer"])
def test_more_heads_than_a_grid_dimension_are_computed(device: Device, loop_order: str) -> None:
    problem = backward_problem(head_dim=16, batch=10923, heads=6, seqlen_q=32)
    inputs = _inputs(problem, device, with_dlse=False)
    variant = make_variant(loop_order, tiles=(32, 32, 32, 32))
    got = run(variant, problem, inputs, device)
    last = slice(problem.batch - 1, problem.batch)
    alone = problem.replace(batch=1)
    part = Inputs(**{name: getattr(inputs, name)[last] for name in ("q", "k", "v", "out", "lse", "dout")}, dlse=None)
    dq, dk, dv = (gradient[last] for gradient in got)
    assert_gradients((dq, dk, dv), alone, part)


def test_strides_beyond_32_bits_reach_the_last_row(device: Device) -> None:
    problem = backward_problem(head_dim=128, batch=2, heads=1, seqlen_q=128)
    # The second batch entry lies this many elements behind the first, in four tensors of 4 GiB.
    far = 1 << 31
    _skip_without_memory(24 << 30)

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        buffer = torch.empty(far + tensor[0].numel(), dtype=tensor.dtype, device=tensor.device)
        return buffer.as_strided(tensor.shape, (far, *tensor.stride()[1:])).copy_(tensor)

    inputs = _inputs(problem, device, with_dlse=False)
    far_inputs = inputs.replace(q=spread(inputs.q), k=spread(inputs.k))
    dq, dk = spread(inputs.q), spread(inputs.k)
    for loads in ("pointer", "tma"):
        got = run(_variant("fused", loads, device), problem, far_inputs, device, dq=dq, dk=dk)
        assert_gradients(got, problem, inputs)


def test_an_accumulator_of_more_than_two_billion_elements_is_added_to_in_every_row(device: Device) -> None:
    one = backward_problem(head_dim=128, heads=1, seqlen_q=128)
    many = one.replace(batch=(1 << 31) // (128 * 128) + 3)
    # Eight tensors in half precision, and the accumulator.
    _skip_without_memory(56 << 30)
    inputs = _inputs(one, device, with_dlse=False)
    repeated = Inputs(
        **{
            name: getattr(inputs, name).repeat(many.batch, *[1] * (getattr(inputs, name).dim() - 1))
            for name in ("q", "k", "v", "out", "lse", "dout")
        },
        dlse=None,
    )
    dq, dk, dv = run(_variant("key_outer", "pointer", device), many, repeated, device)
    for index in (0, many.batch - 1):
        entry = slice(index, index + 1)
        assert_gradients((dq[entry], dk[entry], dv[entry]), one, inputs)


def _skip_without_memory(needed_bytes: int) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < needed_bytes:
        pytest.skip(f"needs {needed_bytes >> 30} GiB of free GPU memory")
