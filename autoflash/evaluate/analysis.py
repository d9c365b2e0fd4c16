"""What a problem costs, and what a device makes of that: operations, bytes, bounds and memory. Nothing is run."""

from __future__ import annotations

from dataclasses import dataclass

from autoflash.evaluate import cost
from autoflash.evaluate.io_model import Traffic, holds_theta_flash, published, theta_flash, theta_standard
from autoflash.evaluate.peaks import Peak
from autoflash.evaluate.roofline import Roofline
from autoflash.evaluate.tiles import Blocks, algorithm_1_blocks
from autoflash.evaluate.variant_io import blocks_of, traffic_of
from autoflash.problem import Pass, Problem
from autoflash.runtime.bind import workspace
from autoflash.runtime.workspace import Workspace
from autoflash.variant import Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What one algorithm moves, and how fast that lets the device be."""

    traffic: Traffic
    roofline: Roofline


@dataclass(frozen=True, slots=True, kw_only=True)
class Theta:
    """The asymptotic counts of the IO model, in bytes, their constants taken to be 1.

    Attributes:
        standard_bytes: N d + N^2, of standard attention.
        flash_bytes: N^2 d^2 / M, of FlashAttention; None where the on-chip memory M is unknown.
        flash_holds: d <= M <= N d, as the theorem asks; False where M is unknown.
    """

    standard_bytes: float
    flash_bytes: float | None
    flash_holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What is held beside inputs and outputs, in bytes.

    Attributes:
        score_matrix_bytes: One matrix [B, H, M, N] in the inputs' type.
        standard_bytes: Standard attention: scores and probabilities forward; backward the probabilities, and the
            gradients of both.
        lse_bytes: The log-sum-exp: what a forward keeps for its backward.
        workspace: What the kernel allocates for itself; None where that is not known.
    """

    score_matrix_bytes: int
    standard_bytes: int
    lse_bytes: int
    workspace: Workspace | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """A problem on a device.

    Attributes:
        problem: What is analysed.
        variant: The kernel that would compute it.
        pairs: Visible pairs of one head of one sequence, as kernels are rated.
        on_chip_bytes: Fast memory of one processor; None where unknown.
        blocks_from: Where the blocks of the published algorithms come from, in words.
        theta: Asymptotic counts.
        least: The problem's operations on the bytes that any algorithm must move: its bound is that of the problem.
        published: Published algorithms.
        kernel: The variant's own traffic; None where its algorithm is not known.
        memory: What is held beside inputs and outputs.
    """

    problem: Problem
    variant: Variant
    pairs: float
    on_chip_bytes: int | None
    blocks_from: str
    theta: Theta
    least: Roofline
    published: tuple[Moved, ...]
    kernel: Moved | None
    memory: Memory


def analyze(problem: Problem, variant: Variant, peak: Peak, on_chip_bytes: int | None) -> Analysis:
    """Analyse a problem.

    Args:
        problem: Of either pass.
        variant: The kernel that would compute it.
        peak: Rates of the device; what is None there leaves bounds unknown.
        on_chip_bytes: Fast memory of one processor, from which the blocks of the published algorithms follow; None
            where unknown: then they are the variant's.

    Raises:
        InvalidProblemError: for an on-chip memory that does not hold one vector.
    """
    flops = cost.flops(problem)

    def bounded(traffic: Traffic) -> Moved:
        return Moved(traffic=traffic, roofline=Roofline(flops=flops, bytes_moved=traffic.total_bytes, peak=peak))

    blocks, blocks_from = _blocks(problem, variant, on_chip_bytes)
    own = traffic_of(problem, variant)
    return Analysis(
        problem=problem,
        variant=variant,
        pairs=cost.visible_pairs(problem),
        on_chip_bytes=on_chip_bytes,
        blocks_from=blocks_from,
        theta=Theta(
            standard_bytes=theta_standard(problem),
            flash_bytes=None if on_chip_bytes is None else theta_flash(problem, on_chip_bytes),
            flash_holds=on_chip_bytes is not None and holds_theta_flash(problem, on_chip_bytes),
        ),
        least=Roofline(flops=flops, bytes_moved=cost.least_bytes(problem), peak=peak),
        published=tuple(map(bounded, published(problem, blocks))),
        kernel=None if own is None else bounded(own),
        memory=memory(problem, variant),
    )


def memory(problem: Problem, variant: Variant) -> Memory:
    """What is held beside inputs and outputs."""
    matrix = cost.score_matrix_bytes(problem)
    return Memory(
        score_matrix_bytes=matrix,
        standard_bytes=matrix * (2 if problem.op is Pass.FORWARD else 3),
        lse_bytes=cost.lse_bytes(problem),
        workspace=workspace(problem, variant),
    )


def _blocks(problem: Problem, variant: Variant, on_chip_bytes: int | None) -> tuple[Blocks | None, str]:
    if on_chip_bytes is not None:
        return algorithm_1_blocks(problem, on_chip_bytes), f"Algorithm 1, {on_chip_bytes} bytes on the chip"
    return blocks_of(variant), "the kernel, since the on-chip memory is unknown"
