"""The forward on a GPU: every structure against softmax in float64, launches in streams, in graphs, and their cost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autoflash.device import Device
from autoflash.problem import Alignment, DType, Form, Mask, Problem
from autoflash.runtime.probe import probe
from autoflash.runtime.triton_forward import TritonForward
from autoflash.variant import Variant
from tests.factories import make_problem, make_variant

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

TORCH_TYPES = {DType.FP16: torch.float16, DType.BF16: torch.bfloat16, DType.FP32: torch.float32}
TOLERANCE = {DType.FP16: 2e-3, DType.BF16: 1.6e-2, DType.FP32: 1e-5}
CONFIG = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}
STRUCTURES = {
    "plain": {},
    "tma": {"loads": "tma"},
    "under": {"pv_order": "under_next_softmax"},
    "tma_under": {"loads": "tma", "pv_order": "under_next_softmax", "row_sum": "per_thread"},
    "tma_branch": {"loads": "tma", "mask_loops": "branch"},
    "heads_first": {"tile_order": "heads_first", "row_sum": "per_thread"},
    "key_outer": {"loop_order": "key_outer"},
}
FORMS = {
    "full": {},
    "causal": {"mask": Mask.CAUSAL},
    "top_left": {"mask": Mask.CAUSAL, "alignment": Alignment.TOP_LEFT},
}


@pytest.fixture(scope="module")
def device() -> Device:
    return probe("cuda")


def make_inputs(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    dtype = TORCH_TYPES[problem.dtype]

    def tensor(heads: int, rows: int, width: int) -> Tensor:
        return torch.randn(problem.batch, heads, rows, width, device="cuda").to(dtype)

    return (
        tensor(problem.heads, problem.seqlen_q, problem.head_dim),
        tensor(problem.kv_heads, problem.seqlen_k, problem.head_dim),
        tensor(problem.kv_heads, problem.seqlen_k, problem.head_dim_v),
    )


def softmax_in_float64(problem: Problem, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = q.double(), k.double(), v.double()
    k, v = k.repeat_interleave(problem.group, 1), v.repeat_interleave(problem.group, 1)
    scores = q @ k.mT * scale
    if problem.causal:
        queries = torch.arange(problem.seqlen_q, device=q.device)[:, None]
        keys = torch.arange(problem.seqlen_k, device=q.device)[None, :]
        scores = scores.masked_fill(keys > queries + problem.diagonal, -math.inf)
    lse = torch.logsumexp(scores, -1)
    return torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]) @ v, lse


def assert_attention(device: Device, variant: Variant, problem: Problem, scale: float = 0.125) -> None:
    q, k, v = make_inputs(problem)
    executable = TritonForward(Form.of(problem), variant, device)
    out, lse = executable.prepare_forward(problem, q, k, v, scale)(q, k, v)
    expected_out, expected_lse = softmax_in_float64(problem, q, k, v, scale)

    tolerance = TOLERANCE[problem.dtype]
    torch.testing.assert_close(out.double(), expected_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-4)


def structure_of(name: str, device: Device) -> dict[str, str]:
    structure = STRUCTURES[name]
    if structure.get("loads") == "tma" and not device.has_tma:
        pytest.skip("the device has no copy engine")
    return structure


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(256, 256), (257, 257), (100, 300), (300, 100), (1, 257)])
@pytest.mark.parametrize("name", STRUCTURES)
def test_every_structure_at_regular_and_irregular_sizes(
    name: str, seqlen_q: int, seqlen_k: int, form: str, device: Device
) -> None:
    problem = make_problem(
        batch=2, heads=4, kv_heads=2, head_dim=64, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **FORMS[form]
    )

    assert_attention(device, make_variant(**structure_of(name, device), **CONFIG), problem)


@pytest.mark.parametrize("head_dim", [8, 40, 72, 80, 96, 128, 160, 256])
@pytest.mark.parametrize("name", ["plain", "tma", "tma_under"])
def test_head_dims(name: str, head_dim: int, device: Device) -> None:
    problem = make_problem(heads=2, head_dim=head_dim, seqlen_q=200, mask=Mask.CAUSAL)
    config = {**CONFIG, "BLOCK_N": 32}

    assert_attention(device, make_variant(**structure_of(name, device), **config), problem, head_dim**-0.5)


@pytest.mark.parametrize("name", STRUCTURES)
def test_float32_is_exact(name: str, device: Device) -> None:
    problem = make_problem(dtype=DType.FP32, heads=2, head_dim=32, seqlen_q=200, mask=Mask.CAUSAL)
    config = {**CONFIG, "BLOCK_M": 32, "BLOCK_N": 32, "num_stages": 1}

    assert_attention(device, make_variant(**structure_of(name, device), **config), problem)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("name", ["plain", "tma_under"])
def test_scales_that_are_not_positive(name: str, scale: float, device: Device) -> None:
    problem = make_problem(heads=2, head_dim=64, seqlen_q=200, mask=Mask.CAUSAL)

    assert_attention(device, make_variant(**structure_of(name, device), **CONFIG), problem, scale)


@pytest.mark.parametrize("name", STRUCTURES)
def test_nothing_beside_the_tensors_is_read_or_written(name: str, device: Device) -> None:
    problem = make_problem(batch=2, heads=2, head_dim=72, seqlen_q=130, seqlen_k=190, mask=Mask.CAUSAL)
    whole = make_inputs(problem)
    variant = make_variant(**structure_of(name, device), **{**CONFIG, "BLOCK_N": 32})

    def inside(tensor: Tensor, fill: float) -> tuple[Tensor, Tensor]:
        batch, heads, rows, width = tensor.shape
        larger = torch.full((batch, heads + 1, rows + 60, width + 24), fill, dtype=tensor.dtype, device="cuda")
        larger[:, :heads, :rows, :width] = tensor
        return larger, larger[:, :heads, :rows, :width]

    q, k, v = (inside(tensor, math.nan)[1] for tensor in whole)
    buffer, out = inside(torch.zeros_like(whole[0]), 7.0)
    call = TritonForward(Form.of(problem), variant, device).prepare_forward(problem, q, k, v, 0.1)

    call(q, k, v, out)

    expected, _ = softmax_in_float64(problem, *whole, 0.1)
    torch.testing.assert_close(out.double(), expected, rtol=1.6e-2, atol=1.6e-2)
    out.fill_(7.0)
    assert (buffer == 7.0).all()


@pytest.mark.parametrize("name", ["plain", "tma"])
def test_call_runs_in_the_current_stream_and_in_a_graph(name: str, device: Device) -> None:
    problem = make_problem(heads=4, head_dim=64, seqlen_q=512)
    q, k, v = make_inputs(problem)
    variant = make_variant(**structure_of(name, device), **CONFIG)
    call = TritonForward(Form.of(problem), variant, device).prepare_forward(problem, q, k, v, 0.125)
    expected, _ = call(q, k, v)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = call(q, k, v)
    out.zero_()
    graph.replay()

    torch.testing.assert_close(out, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["plain", "tma"])
def test_new_addresses_get_their_own_tensor_maps(name: str, device: Device) -> None:
    problem = make_problem(heads=2, head_dim=64, seqlen_q=256)
    variant = make_variant(**structure_of(name, device), **CONFIG)
    first = make_inputs(problem)
    call = TritonForward(Form.of(problem), variant, device).prepare_forward(problem, *first, 0.125)

    for q, k, v in [first, *(make_inputs(problem) for _ in range(3)), first]:
        out, _ = call(q, k, v)
        expected, _ = softmax_in_float64(problem, q, k, v, 0.125)
        torch.testing.assert_close(out.double(), expected, rtol=1.6e-2, atol=1.6e-2)


@pytest.mark.usefixtures("alone")
@pytest.mark.as_allocated
def test_host_time_of_a_small_call_is_no_more_than_that_of_sdpa(device: Device) -> None:
    problem = make_problem(heads=2, head_dim=64, seqlen_q=64)
    q, k, v = make_inputs(problem)
    structure = {"loads": "tma"} if device.has_tma else {}
    variant = make_variant(**structure, **CONFIG)
    call = TritonForward(Form.of(problem), variant, device).prepare_forward(problem, q, k, v, 0.125)

    with torch.no_grad():
        ours = _host_us(lambda: call(q, k, v))
        vendor = _host_us(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v))

    assert ours <= vendor, f"a call takes {ours:.1f} us of host time, SDPA {vendor:.1f} us"


def _host_us(call: Callable[[], object], calls: int = 200, rounds: int = 9) -> float:
    """Median over rounds of the host's time for one call; the queue is drained between rounds."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return sorted(times)[rounds // 2]
