"""Dispatch on a GPU: graphs, training, fallbacks, and what a call costs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import autoflash
from autoflash.dispatch.table import Table
from autoflash.errors import NoKernelError
from autoflash.evaluate import reference
from autoflash.ops import CALLS
from autoflash.trial import Tier
from autoflash.variant import Family

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    CALLS.reset()
    yield
    CALLS.reset()


def tensors(
    *shape: int, kv_heads: int | None = None, grad: bool = False, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    batch, heads, length, width = shape
    shapes = [shape] + 2 * [(batch, kv_heads or heads, length, width)]
    return [torch.randn(s, device="cuda", dtype=dtype, requires_grad=grad) for s in shapes]


def close(out: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: object) -> None:
    expected = reference.attention(q, k, v, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(out.double(), expected.double(), atol=2e-2, rtol=2e-2)  # type: ignore[union-attr]


@pytest.mark.parametrize("vendor", ["allow", "never", "only"])
@pytest.mark.parametrize("causal", [False, "bottom_right", "top_left"])
def test_every_policy_computes_the_same(vendor: str, causal: bool | str) -> None:
    q, k, v = tensors(2, 4, 200, 64, kv_heads=2)
    if (causal, vendor) == ("bottom_right", "only"):
        with pytest.raises(NoKernelError, match="top-left"):
            autoflash.attention(q, k[:, :, :130], v[:, :, :130], causal=causal, vendor=vendor)
        return

    out = autoflash.attention(q, k[:, :, :130], v[:, :, :130], causal=causal, vendor=vendor)

    close(out, q, k[:, :, :130], v[:, :, :130], causal=causal)  # type: ignore[arg-type]


def test_one_query_under_a_causal_mask_sees_every_key() -> None:
    q, k, v = tensors(1, 1, 8, 64)

    for vendor in ("allow", "never"):
        out = autoflash.attention(q[:, :, -1:], k, v, causal=True, vendor=vendor)
        close(out, q[:, :, -1:], k, v)  # type: ignore[arg-type]


def test_training_matches_float64() -> None:
    for vendor in ("allow", "never"):
        q, k, v = tensors(2, 4, 200, 64, kv_heads=2, grad=True)
        dout = torch.randn_like(q)

        found = torch.autograd.grad(autoflash.attention(q, k, v, causal=True, vendor=vendor), (q, k, v), dout)

        copies = [x.detach().double().requires_grad_() for x in (q, k, v)]
        expected = torch.autograd.grad(reference.attention(*copies, causal=True), copies, dout.double())
        for gradient, exact in zip(found, expected, strict=True):
            torch.testing.assert_close(gradient.double(), exact, atol=5e-2, rtol=5e-2)


def test_with_nothing_recorded_a_vendor_kernel_runs_and_is_named() -> None:
    CALLS.reset(Table())
    q, k, v = tensors(1, 2, 128, 64)

    autoflash.attention(q, k, v)
    explanation = autoflash.explain(q, k, v)

    assert explanation.passes[0].tier is Tier.VENDOR
    assert "not measured here" in str(explanation)


@pytest.mark.parametrize("width", [256, 320, 384, 512])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_wide_head_is_right_or_refused(width: int, dtype: torch.dtype) -> None:
    q, k, v = tensors(1, 2, 64, width, dtype=dtype, grad=True)

    for vendor in ("allow", "never"):
        out = autoflash.attention(q, k, v, vendor=vendor)
        out.float().sum().backward()  # type: ignore[union-attr]
        close(out, q, k, v)  # type: ignore[arg-type]
        assert q.grad is not None
        assert not q.grad.isnan().any()


@pytest.mark.parametrize("vendor", ["allow", "never"])
def test_case_a28_a_warmed_up_call_is_captured_and_replays(vendor: str) -> None:
    q, k, v = tensors(2, 4, 512, 64)
    autoflash.warmup(q, k, v, causal=True, vendor=vendor)
    graph = torch.cuda.CUDAGraph()

    with torch.cuda.graph(graph), torch.no_grad():
        out = autoflash.attention(q, k, v, causal=True, vendor=vendor)
    for tensor in (q, k, v):
        tensor.copy_(torch.randn_like(tensor))
    graph.replay()

    close(out, q, k, v, causal=True)  # type: ignore[arg-type]


def test_case_a28_an_unknown_kernel_in_a_capture_names_warmup() -> None:
    q, k, v = tensors(1, 2, 192, 104)
    graph, caught = torch.cuda.CUDAGraph(), []

    with torch.cuda.graph(graph):
        try:
            autoflash.attention(q, k, v, vendor="never")
        except NoKernelError as error:
            caught.append(str(error))

    assert len(caught) == 1
    assert "autoflash.warmup(...)" in caught[0]


CAPTURE_FIRST = """
import torch, autoflash

q, k, v = (torch.randn(1, 2, 224, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph), torch.no_grad():
    out = autoflash.attention(q, k, v)
graph.replay()
wanted = autoflash.reference.attention(q, k, v)
torch.testing.assert_close(out.double(), wanted.double(), atol=2e-2, rtol=2e-2)
"""


def test_an_unknown_kernel_in_a_capture_falls_back_to_a_vendor(tmp_path: Path) -> None:
    environment = {**os.environ, "AUTOFLASH_DB": str(tmp_path / "none.sqlite")}

    # In a process where nothing ran before, as libraries are set up at their first use.
    done = subprocess.run(
        [sys.executable, "-c", CAPTURE_FIRST], capture_output=True, text=True, env=environment, timeout=300
    )

    assert done.returncode == 0, done.stderr


def test_case_a39_cold_threads_with_their_own_streams_are_right() -> None:
    barrier, failures = threading.Barrier(8), []

    def work(index: int) -> None:
        try:
            q, k, v = tensors(1, 2, 128 + 16 * (index % 4), 64)
            with torch.cuda.stream(torch.cuda.Stream()):
                barrier.wait()
                out = autoflash.attention(q, k, v, causal=bool(index % 2), vendor="never")
                torch.cuda.current_stream().synchronize()
            close(out, q, k, v, causal=bool(index % 2))  # type: ignore[arg-type]
        except Exception as error:
            failures.append(error)

    for _ in range(3):
        CALLS.reset()
        threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert failures == []


@pytest.mark.parametrize("shape", [(10923, 6, 32, 16), (65536, 1, 16, 16), (1, 65536, 16, 16)])
def test_many_heads_and_batches_exceed_no_grid_limit(shape: tuple[int, int, int, int]) -> None:
    q, k, v = tensors(*shape, dtype=torch.float16, grad=True)
    last = [x.detach()[-1:, -1:].clone().requires_grad_() for x in (q, k, v)]

    out = autoflash.attention(q, k, v, vendor="never")
    out.sum().backward()  # type: ignore[union-attr]

    expected = reference.attention(*last)
    torch.testing.assert_close(out[-1:, -1:].double(), expected.double(), atol=1e-2, rtol=1e-2)  # type: ignore[union-attr]
    assert v.grad is not None
    torch.testing.assert_close(
        v.grad.float().sum(2), torch.full_like(v.grad[:, :, 0].float(), shape[2]), atol=0.1, rtol=0
    )


def test_a_compiled_call_agrees_with_an_eager_one() -> None:
    q, k, v = tensors(2, 4, 200, 64)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return autoflash.attention(q, k, v, causal=True, vendor="never")  # type: ignore[return-value]

    assert torch.equal(torch.compile(call, fullgraph=True)(q, k, v), call(q, k, v))


def test_never_runs_only_generated_kernels() -> None:
    q, k, v = tensors(1, 2, 128, 64)

    explanation = autoflash.warmup(q, k, v, vendor="never", backward=True)

    assert all(part.variant.family is not Family.VENDOR for part in explanation.passes)
    assert len(explanation.passes) == 2
