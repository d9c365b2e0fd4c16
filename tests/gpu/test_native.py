"""Launches through the CUDA driver itself give the bits that Triton's launcher gives, wherever they are made."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from autoflash.device import Device
from autoflash.problem import Form, Pass
from autoflash.runtime import launch
from autoflash.runtime.bind import _bound, bind
from autoflash.runtime.libcuda import libcuda
from autoflash.runtime.native import NativeKernel
from autoflash.runtime.probe import probe
from autoflash.variant import Family
from tests.factories import make_problem, make_variant

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.version.hip is not None, reason="needs an NVIDIA GPU"),
]

PROBLEM = {"head_dim": 64, "batch": 2, "heads": 4, "seqlen_q": 256}
SCALE = 0.125
KINDS = ["pointer", "tma", "gluon"]


@pytest.fixture(scope="module")
def device() -> Device:
    return probe("cuda")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    libcuda.cache_clear()
    # A process has one executable of a variant, with the kernels that it loaded first.
    _bound.clear()
    yield
    libcuda.cache_clear()
    _bound.clear()


class Prepared:
    """A forward and a deterministic backward pass of one kind of kernel."""

    def __init__(self, kind: str, device: Device, inputs: list[Tensor], dout: Tensor) -> None:
        passes: dict[Pass, Any] = {}
        for op in (Pass.FORWARD, Pass.BACKWARD):
            family = Family.GLUON_SM90 if kind == "gluon" else Family.TRITON
            choices: dict[str, str | int] = {} if kind == "gluon" else {"loads": kind}
            if op is Pass.BACKWARD:
                choices |= (
                    {"loop_order": "split", "BLOCK_N2": 64, "k_stages2": 2, "v_stages2": 1}
                    if kind == "gluon"
                    else {"loop_order": "split"}
                )
            problem = make_problem(op=op, **PROBLEM)  # type: ignore[arg-type]  # sizes
            variant = make_variant(family, op=op, **choices)
            passes[op] = problem, bind(Form.of(problem), variant, device)
        problem, executable = passes[Pass.FORWARD]
        self.forward = executable.prepare_forward(problem, *inputs, SCALE)
        out, _ = self.forward(*inputs)
        problem, backward = passes[Pass.BACKWARD]
        self.backward = backward.prepare_backward(problem, *inputs, out, dout, SCALE)
        self.kernels: list[launch.Kernel] = [*executable._kernels.values(), *backward._kernels.values()]

    def step(self, inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
        """Out, LSE and the three gradients."""
        out, lse = self.forward(*inputs)
        return [out, lse, *self.backward(*inputs, out, lse, dout)]


def draw() -> tuple[list[Tensor], Tensor]:
    shape = (2, 4, 256, 64)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    return [q, k, v], dout


def needs(kind: str, device: Device) -> None:
    if kind == "tma" and not device.has_tma:
        pytest.skip("needs a copy engine")
    if kind == "gluon" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


def same(made: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(made, expected, strict=True))


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, device: Device, monkeypatch: pytest.MonkeyPatch) -> tuple[Prepared, Prepared]:
    """The same kernels launched natively and by Triton."""
    needs(request.param, device)
    inputs, dout = draw()
    monkeypatch.setenv("AUTOFLASH_LAUNCHER", "native")
    native = Prepared(request.param, device, inputs, dout)
    monkeypatch.setenv("AUTOFLASH_LAUNCHER", "triton")
    libcuda.cache_clear()
    _bound.clear()
    by_triton = Prepared(request.param, device, inputs, dout)
    assert all(isinstance(kernel, NativeKernel) for kernel in native.kernels)
    assert not any(isinstance(kernel, NativeKernel) for kernel in by_triton.kernels)
    return native, by_triton


def test_native_launches_give_the_same_bits(pair: tuple[Prepared, Prepared]) -> None:
    native, by_triton = pair

    for _ in range(3):
        inputs, dout = draw()
        assert same(native.step(inputs, dout), by_triton.step(inputs, dout))

    assert [kernel.resources for kernel in native.kernels] == [kernel.resources for kernel in by_triton.kernels]


def test_native_launches_of_a_graph_give_the_same_bits_at_each_replay(pair: tuple[Prepared, Prepared]) -> None:
    native, by_triton = pair
    inputs, dout = draw()
    native.step(inputs, dout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = native.step(inputs, dout)

    for _ in range(2):
        others, other_dout = draw()
        for into, other in zip([*inputs, dout], [*others, other_dout], strict=True):
            into.copy_(other)
        graph.replay()
        torch.cuda.synchronize()

        assert same(made, by_triton.step(inputs, dout))


def test_native_launches_follow_the_current_stream(pair: tuple[Prepared, Prepared]) -> None:
    native, by_triton = pair
    inputs, dout = draw()
    expected = by_triton.step(inputs, dout)
    late = [torch.zeros_like(x) for x in inputs]
    torch.cuda.synchronize()

    with torch.cuda.stream(torch.cuda.Stream()):
        # On any other stream the kernels would find zeros.
        torch.cuda._sleep(20_000_000)
        for into, x in zip(late, inputs, strict=True):
            into.copy_(x)
        made = native.step(late, dout)
    torch.cuda.synchronize()

    assert same(made, expected)


def test_threads_that_share_native_launches_give_the_same_bits(pair: tuple[Prepared, Prepared]) -> None:
    native, by_triton = pair
    given = [draw() for _ in range(4)]
    expected = [by_triton.step(*one) for one in given]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(first: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for call in range(100):
                index = first + call % 2
                made = native.step(*given[index])
                stream.synchronize()
                if not same(made, expected[index]):
                    wrong.append(index)
        finished.append(first)

    finished: list[int] = []
    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(finished) == [0, 2]
    assert wrong == []
