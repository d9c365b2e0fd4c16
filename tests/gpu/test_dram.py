"""Counted bytes of DRAM are those of the model where the model is exact: nothing fits the L2, or all is moved once."""

from __future__ import annotations

import pytest

from autoflash.device import Device
from autoflash.dispatch.buckets import cell_of
from autoflash.errors import CounterError
from autoflash.evaluate import dram, ncu, systems
from autoflash.evaluate.cost import least_bytes, lse_bytes
from autoflash.evaluate.dram_main import Work
from autoflash.runtime.probe import probe
from tests.factories import make_problem

pytestmark = pytest.mark.gpu

# A matrix of scores of 1 GiB; tensors of 32 MiB.
PROBLEM = make_problem(batch=4, heads=32, kv_heads=32, seqlen_q=2048, head_dim=64)


@pytest.fixture(scope="module")
def device() -> Device:
    try:
        ncu.find()
    except CounterError as error:
        pytest.skip(str(error))
    return probe("cuda")


@pytest.mark.usefixtures("alone")
def test_a_call_reads_its_inputs_from_a_cold_cache_and_all_that_it_writes_is_counted(device: Device) -> None:
    found = {system.name: system for system in systems.systems(cell_of(PROBLEM, device), device)}
    standard, flash = found["standard attention"], found["FlashAttention-2"]

    counts = dram.count([Work(problem=PROBLEM, system=system) for system in (standard, flash)], device, seed=0)

    assert [count.reason for count in counts] == ["", ""]
    whole, fused = (count.moved for count in counts)
    assert whole is not None
    assert fused is not None
    model = systems.model_of(standard, PROBLEM)
    assert model is not None
    assert whole.read_bytes == pytest.approx(model.read_bytes, rel=0.2)
    assert whole.written_bytes == pytest.approx(model.written_bytes, rel=0.2)
    tensor = PROBLEM.batch * PROBLEM.heads * PROBLEM.seqlen_q * PROBLEM.head_dim * PROBLEM.dtype.itemsize
    assert fused.written_bytes == pytest.approx(tensor + lse_bytes(PROBLEM), rel=0.15)
    assert 0.95 * least_bytes(PROBLEM) < fused.total_bytes < 2 * least_bytes(PROBLEM)
