"""Which systems stand side by side, and by which kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from autoflash.device import CROSS_TARGETS
from autoflash.dispatch.buckets import cell_of
from autoflash.evaluate.cost import lse_bytes, score_matrix_bytes
from autoflash.evaluate.io_model import standard
from autoflash.evaluate.systems import kept_for_backward, model_of, systems, times
from autoflash.problem import DType, Feature, Pass
from autoflash.runtime.probe import probe
from autoflash.trial import Measurement
from autoflash.variant import Family
from tests.factories import make_cell, make_device, make_problem, make_variant

H200, A100, CPU = CROSS_TARGETS["sm_90"], CROSS_TARGETS["sm_80"], make_device("cpu")
PROBLEM = make_problem(heads=8, seqlen_q=1024)
CELL = make_cell()


def test_a_cpu_has_standard_attention_both_orders_in_torch_and_two_backends() -> None:
    found = systems(make_cell(dtype=DType.FP32), CPU)

    assert [system.name for system in found] == [
        "standard attention",
        "Rabe-Staats",
        "Rabe-Staats, key outer",
        "SDPA flash",
        "SDPA math",
    ]
    assert [system.variant.structure["loop_order"] for system in found[1:3]] == ["query_outer", "key_outer"]


@pytest.mark.parametrize(("op", "second"), [(Pass.FORWARD, "query_outer"), (Pass.BACKWARD, "split")])
def test_a_hopper_gpu_has_every_system(op: Pass, second: str) -> None:
    found = {system.name: system.variant for system in systems(make_cell(op=op), H200)}

    assert list(found)[3:6] == ["FlashAttention-1", "FlashAttention-2", "FlashAttention-3"]
    assert found["FlashAttention-1"].structure["loop_order"] == "key_outer"
    assert found["FlashAttention-2"].structure["loop_order"] == second
    assert found["FlashAttention-3"].family is Family.GLUON_SM90
    assert {"SDPA cudnn", "SDPA flash", "SDPA efficient", "SDPA math"} <= set(found)


def test_only_a_hopper_gpu_has_its_family() -> None:
    assert "FlashAttention-3" not in {system.name for system in systems(CELL, A100)}


def test_a_recorded_variant_stands_for_its_order() -> None:
    first, second = make_variant(BLOCK_N=32), make_variant(BLOCK_N=128)
    hopper = make_variant(Family.GLUON_SM90)

    found = {system.name: system.variant for system in systems(CELL, H200, (hopper, first, second))}

    assert found["FlashAttention-2"] == first
    assert found["FlashAttention-3"] == hopper
    assert found["FlashAttention-1"].structure["loop_order"] == "key_outer"


@pytest.mark.parametrize(
    ("seqlen", "blocks"), [(1024, (128, 256)), (4096, (128, 256)), (16384, (512, 1024)), (131072, (2048, 2048))]
)
def test_long_sequences_have_large_tiles_in_plain_torch(seqlen: int, blocks: tuple[int, int]) -> None:
    found = systems(cell_of(PROBLEM.replace(seqlen_q=seqlen, seqlen_k=seqlen), A100), A100)

    portable = [system.variant for system in found if system.variant.family is Family.TORCH_TILED]
    assert [variant.structure["loop_order"] for variant in portable] == ["query_outer", "key_outer"]
    assert {(variant.config["block_m"], variant.config["block_n"]) for variant in portable} == {blocks}


def test_torchs_backends_are_not_asked_for_features() -> None:
    found = systems(make_cell(features=(Feature.SOFTCAP,)), A100)

    assert not [system.name for system in found if system.name.startswith("SDPA")]
    # The order of FlashAttention-1 is written for plain attention alone.
    assert "FlashAttention-1" not in {system.name for system in found}
    assert "FlashAttention-2" in {system.name for system in found}


def test_every_system_but_closed_kernels_has_a_model() -> None:
    cell = cell_of(PROBLEM, H200)
    unknown = [system.name for system in systems(cell, H200) if model_of(system, PROBLEM) is None]

    assert unknown == ["SDPA cudnn", "SDPA flash", "SDPA efficient"]
    assert model_of(systems(cell, H200)[0], PROBLEM) == standard(PROBLEM)


def test_standard_attention_keeps_a_matrix_for_its_backward_and_others_a_row() -> None:
    problem = PROBLEM.replace(op=Pass.BACKWARD)
    kept = {system.name: kept_for_backward(system, problem) for system in systems(cell_of(problem, A100), A100)}

    assert kept["standard attention"] == score_matrix_bytes(problem)
    assert kept["FlashAttention-2"] == lse_bytes(problem)
    assert kept["SDPA flash"] is None
    assert kept_for_backward(systems(CELL, A100)[0], PROBLEM) == 0


def test_a_call_that_does_not_fit_even_alone_has_a_reason_for_a_time() -> None:
    def too_large() -> Callable[[], object]:
        raise torch.OutOfMemoryError("32 GiB")

    fits, does_not = times([lambda: lambda: None, too_large], probe("cpu"), run="r")

    assert isinstance(fits, Measurement)
    assert does_not == "not timed: OutOfMemoryError"
