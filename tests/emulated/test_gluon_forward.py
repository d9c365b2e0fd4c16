"""The forward of the Hopper family gives what it should, and no role waits in vain, whoever goes first."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from autoflash.evaluate import reference
from autoflash.problem import Alignment, DType, Mask, Problem
from autoflash.runtime import gluon_plan
from autoflash.variant import Family
from tests.emulated.gluon import Edit, emulate, load
from tests.emulated.machine import Barrier, EmulationError, Machine
from tests.factories import make_problem, make_variant

NARROW = {"consumers": 3, "q_operand": "shared", "exponentials": "whole", "output": "direct"}

STRUCTURES: tuple[dict[str, Any], ...] = (
    {},
    {"consumers": 1, "BLOCK_N": 64},
    {"ping_pong": "on", "BLOCK_N": 64},
    {**NARROW, "ping_pong": "on", "num_stages": 3},
    {**NARROW, "rescale": "conditional", "BLOCK_N": 64},
    {"output": "vectors"},
    {"output": "through_q"},
    {**NARROW, "output": "through_q", "ping_pong": "on"},
)

WINDOWS: tuple[dict[str, int | None], ...] = (
    {},
    {"window_left": 100, "window_right": 30},
    {"window_left": 0, "window_right": 0},
    {"window_left": None, "window_right": 64},
    {"window_left": 200},
    {"window_left": 3, "window_right": 200},
)

SIZES: tuple[dict[str, Any], ...] = (
    {"seqlen_q": 320, "seqlen_k": 320},
    {"seqlen_q": 70, "seqlen_k": 513},
    {"seqlen_q": 400, "seqlen_k": 90},
    {"seqlen_q": 500, "seqlen_k": 130, "alignment": Alignment.TOP_LEFT},
)


def visible(problem: Problem) -> Tensor:
    """Which keys each query sees, [M, N]."""
    distance = torch.arange(problem.seqlen_k) - torch.arange(problem.seqlen_q)[:, None] - problem.diagonal
    seen = torch.ones_like(distance, dtype=torch.bool)
    if problem.causal:
        seen &= distance <= 0
    if problem.window_left is not None:
        seen &= distance >= -problem.window_left
    if problem.window_right is not None:
        seen &= distance <= problem.window_right
    return seen


def assert_right(
    problem: Problem, changes: dict[str, Any], seed: int, scale: float = 0.25, edit: Edit = ("", "")
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, problem.heads, problem.seqlen_q, 64), *[(1, problem.kv_heads, problem.seqlen_k, 64)] * 2]
    q, k, v = (torch.randn(shape, generator=generator).half() for shape in shapes)

    variant = make_variant(Family.GLUON_SM90, **changes)
    out, lse = emulate(problem, variant, (q, k, v), scale, programs=2, seed=seed, edit=edit)

    expected, expected_lse = reference.attention(
        q, k, v, mask=visible(problem), scale=scale, softcap=problem.softcap, return_lse=True
    )
    torch.testing.assert_close(out.double(), expected.double(), atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse.double(), expected_lse.double(), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("changes", STRUCTURES, ids=str)
@pytest.mark.parametrize("mask", list(Mask))
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_every_structure_gives_what_it_should(
    window: dict[str, int | None], mask: Mask, changes: dict[str, Any]
) -> None:
    for seed, sizes in enumerate(SIZES):
        problem = make_problem(dtype=DType.FP16, mask=mask, **sizes).replace(**window)
        schedule = "ticketed" if problem.causal and seed % 2 else "round_robin"
        assert_right(problem, {**changes, "schedule": schedule}, seed)


@pytest.mark.parametrize("changes", STRUCTURES, ids=str)
@pytest.mark.parametrize("window", [{}, {"window_left": 100}], ids=str)
def test_scores_are_capped_before_they_are_hidden(window: dict[str, int | None], changes: dict[str, Any]) -> None:
    problem = make_problem(dtype=DType.FP16, seqlen_q=250, seqlen_k=200).replace(**window, softcap=2.0)

    for seed, (mask, scale) in enumerate([(Mask.FULL, 0.25), (Mask.CAUSAL, -0.5), (Mask.FULL, 0.0)]):
        assert_right(problem.replace(mask=mask), changes, seed, scale)


def test_hyperbolic_tangent_has_its_digits_at_every_size() -> None:
    problem = make_problem().replace(softcap=1.0)
    tanh = load(problem, make_variant(Family.GLUON_SM90), Machine(0))["tanh"]
    x = torch.cat([torch.linspace(-9.0, 9.0, 20001), torch.logspace(-30, 6, 2001), -torch.logspace(-8, 3, 501)])

    for values, digits in ((x, 5e-7), (x.double(), 3e-7)):
        torch.testing.assert_close(tanh(values).double(), torch.tanh(values.double()), rtol=digits, atol=0.0)


# Off the borders of blocks, so that both edges of the window cross blocks behind the first.
WINDOW = make_problem(dtype=DType.FP16, mask=Mask.CAUSAL, seqlen_q=320, seqlen_k=339).replace(window_left=100)


@pytest.mark.parametrize(
    "edit",
    [
        ("range(first_loaded, first_block)", "range(0)"),
        ("range(end_block, end_loaded)", "range(0)"),
        ("range(first_loaded, first_block)", "range(first_loaded, first_block + 1)"),
        ("end_block - 1 - i", "end_block - i"),
        ("((loaded // STAGES) & 1) ^ 1", "(loaded // STAGES) & 1"),
        ("is_cut_left | is_cut_right", "is_cut_right"),
        ("is_cut_left | is_cut_right", "is_cut_left"),
        ("mbarrier.arrive(rings.v_empty.index(stage), count=1)", "pass"),
        ("sizes.left_diagonal, 0), sizes.n_k", "sizes.left_diagonal + 64, 0), sizes.n_k"),
        ("sizes.right_diagonal, 1)", "sizes.right_diagonal - 64, 1)"),
    ],
    ids=str,
)
@pytest.mark.parametrize("ping_pong", ["off", "on"])
def test_faults_are_found(ping_pong: str, edit: Edit) -> None:
    changes = {"BLOCK_N": 64, "ping_pong": ping_pong}
    assert_right(WINDOW, changes, 0)

    with pytest.raises(AssertionError):
        assert_right(WINDOW, changes, 0, edit=edit)


@pytest.mark.parametrize("q_operand", ["registers", "shared"])
def test_a_query_that_is_loaded_before_its_buffer_is_free_is_found(q_operand: str) -> None:
    problem = make_problem(dtype=DType.FP16, heads=4, seqlen_q=600, seqlen_k=128)
    changes = {"output": "through_q", "q_operand": q_operand, "BLOCK_N": 64}
    arrival = "mbarrier.arrive(rings.q_empty.index(CONSUMER), count=1)"
    assert_right(problem, changes, 0)

    with pytest.raises((AssertionError, EmulationError)):
        assert_right(
            problem, changes, 0, edit=("out = o_shared.index(CONSUMER)", f"out = o_shared.index(CONSUMER); {arrival}")
        )
    with pytest.raises(EmulationError):
        assert_right(problem, changes, 0, edit=(arrival, "pass"))


def test_a_turn_that_is_not_taken_is_found() -> None:
    # Of 128 keys, the second consumer skips a block that the first looks at.
    problem = make_problem(dtype=DType.FP16, mask=Mask.CAUSAL, seqlen_q=320).replace(window_left=40)
    changes = {"ping_pong": "on"}
    assert_right(problem, changes, 0)

    turn = "            wait_turn(CONSUMER)\n            pass_turn(NEXT)\n"
    with pytest.raises(EmulationError):
        assert_right(problem, changes, 0, edit=(f"{turn}            used += 1", "            used += 1"))


def test_a_barrier_counts_arrivals_and_bytes() -> None:
    barrier = Barrier()
    barrier.init(2)
    assert barrier.has_completed(1)
    assert not barrier.has_completed(0)
    barrier.expect(8)
    barrier.arrive()
    assert not barrier.has_completed(0)
    barrier.receive(8)
    assert barrier.has_completed(0)
    barrier.arrive(2)
    with pytest.raises(EmulationError, match="more arrivals"):
        barrier.arrive(3)


def test_roles_that_wait_for_each_other_are_found() -> None:
    machine = Machine(0)
    with pytest.raises(EmulationError, match="wait for each other"):
        machine.run([lambda: machine.wait(lambda: False), lambda: machine.wait(lambda: True)])


def random_problem(draw: random.Random) -> Problem:
    """A problem with a window, of which long ones hide little and others everything."""
    bounds = (None, 0, 1, 31, 63, 64, 100, 127, 128, 300)
    left, right = draw.choice(bounds), draw.choice(bounds)
    mask = draw.choice(list(Mask))
    return make_problem(
        mask=mask,
        seqlen_q=draw.randint(1, 400),
        seqlen_k=draw.choice((64, 128, 256, draw.randint(1, 400))),
        alignment=draw.choice(list(Alignment)),
    ).replace(window_left=left if right is not None else left or 0, window_right=right)


@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("consumers", [1, 2, 3])
def test_ranges_hold_exactly_the_pairs_that_are_seen(consumers: int, block_n: int) -> None:
    draw = random.Random(consumers + block_n)
    cheap = 0
    for _ in range(150):
        problem = random_problem(draw)
        variant = make_variant(Family.GLUON_SM90, consumers=consumers, BLOCK_N=block_n)
        names = load(problem, variant, Machine(0))
        plan = dict(gluon_plan.forward_plan(problem, variant).constants)
        sizes = SimpleNamespace(n_k=problem.seqlen_k, **gluon_plan.diagonals(problem))
        seen = visible(problem)
        n_blocks = -(-problem.seqlen_k // block_n)
        cheap += plan["EVERY_ROW_SEES"] is True
        for tile in range(0, problem.seqlen_q, consumers * 64):
            first_loaded, end_loaded = names["key_range"](tile, tile + consumers * 64, sizes, block_n)
            assert 0 <= first_loaded < end_loaded <= n_blocks
            for start in range(tile, tile + consumers * 64, 64):
                first, end = names["key_range"](start, start + 64, sizes, block_n)
                assert first_loaded <= first < end <= end_loaded
                rows = torch.arange(start, start + 64)
                real = rows < problem.seqlen_q
                for block in range(n_blocks):
                    cols = torch.arange(block * block_n, (block + 1) * block_n)
                    inside = seen[start : start + 64, block * block_n : (block + 1) * block_n]
                    if not first <= block < end:
                        assert not inside.any()
                        continue
                    is_first = block == end - 1
                    if is_first and plan["EVERY_ROW_SEES"]:
                        assert inside.any(dim=1).all()
                    if is_first or names["is_partial"](start, block * block_n, sizes, 64, block_n):
                        ragged = is_first and plan["RAGGED_N"]
                        shown = names["mask_scores"](torch.zeros(64, block_n), rows, cols, sizes, ragged) == 0.0
                        assert not shown[:, inside.shape[1] :].any()
                        assert torch.equal(shown[real][:, : inside.shape[1]], inside)
                    else:
                        assert inside.shape[1] == block_n
                        assert inside.all()
    assert cheap > 10
