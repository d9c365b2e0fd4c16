"""A problem's analysis put together."""

from __future__ import annotations

from autoflash.device import CROSS_TARGETS
from autoflash.evaluate.analysis import analyze
from autoflash.evaluate.cost import flops, least_bytes
from autoflash.evaluate.peaks import Peak, known_peak
from autoflash.evaluate.tiles import Blocks
from autoflash.problem import Pass
from autoflash.runtime.workspace import total_bytes
from autoflash.variant import Choices, Family, Variant
from tests.factories import make_problem, make_variant

H200 = CROSS_TARGETS["sm_90"]
HANDBOOK = make_problem(heads=32, seqlen_q=8192, head_dim=128)
UNKNOWN = Peak(tflops=None, bandwidth_gb_s=None, source="")


def test_the_handbooks_problem_on_an_h200() -> None:
    found = analyze(HANDBOOK, make_variant(), known_peak(H200, HANDBOOK), H200.shared_bytes)

    assert found.memory.score_matrix_bytes == 4 * 2**30
    assert found.memory.standard_bytes == 8 * 2**30
    assert found.memory.lse_bytes == 2**20
    assert found.memory.workspace == ()
    assert (found.least.flops, found.least.bytes_moved) == (flops(HANDBOOK), least_bytes(HANDBOOK))
    assert found.least.limit == "compute"
    blocks = {moved.traffic.blocks for moved in found.published if "order" in moved.traffic.algorithm}
    assert blocks == {Blocks(rows=128, keys=227)}
    totals = {moved.traffic.algorithm: moved.traffic.total_bytes for moved in found.published}
    assert totals["FlashAttention-2 order, L2"] < totals["FlashAttention-1 order"] < totals["standard attention"]


def test_a_backward_holds_more() -> None:
    problem = HANDBOOK.replace(op=Pass.BACKWARD)
    found = analyze(problem, make_variant(op=Pass.BACKWARD), UNKNOWN, None)

    assert found.memory.standard_bytes == 12 * 2**30
    assert found.memory.workspace is not None
    # Two float32 of each row.
    assert total_bytes(found.memory.workspace) == 2 * 4 * 32 * 8192


def test_without_a_chip_the_blocks_are_the_kernels() -> None:
    found = analyze(HANDBOOK, make_variant(BLOCK_M=128, BLOCK_N=64), UNKNOWN, None)

    blocks = {moved.traffic.blocks for moved in found.published if "order" in moved.traffic.algorithm}
    assert blocks == {Blocks(rows=128, keys=64)}
    assert (found.theta.flash_bytes, found.theta.flash_holds) == (None, False)
    assert {moved.roofline.bound_us for moved in found.published} == {None}


def test_of_a_vendors_kernel_nothing_is_known() -> None:
    variant = Variant(family=Family.VENDOR, structure=Choices(backend="flash"), config=Choices())
    found = analyze(HANDBOOK, variant, UNKNOWN, None)

    assert found.kernel is None
    assert found.memory.workspace is None
    assert [moved.traffic.algorithm for moved in found.published] == ["standard attention", "Rabe-Staats"]
