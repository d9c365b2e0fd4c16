"""Dropout of the tiled torch family: the generator to the bit, and one mask whatever computes it."""

from __future__ import annotations

import itertools
from types import ModuleType

import pytest
import torch
from torch import Tensor

from autoflash.codegen.render import render
from autoflash.evaluate.philox import dropout_keep
from autoflash.problem import Form, Pass, Problem
from autoflash.runtime import dropout
from autoflash.runtime.executable import Extras
from autoflash.runtime.load import load
from autoflash.variant import Family
from tests.runtime.tiled import LOOP_ORDERS, RNG, Tensors, Tiles, backward, draw, forward, problem_with, tiled

TILES = [Tiles(10, 7, 3), Tiles(16, 16, 1), Tiles(64, 128)]

# Random123, kat_vectors: philox4x32 with 10 rounds; counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def rendered(op: Pass = Pass.FORWARD) -> ModuleType:
    problem = problem_with(op, dropout_p=0.5)
    return load(render(Form.of(problem), Family.TORCH_TILED, tiled(problem).variant.structure))


@pytest.mark.parametrize("op", Pass)
@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_the_generator_gives_the_published_words(
    op: Pass, counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    module = rendered(op)
    seed = key[1] << 32 | key[0]
    signed = seed - 2**64 if seed >= 2**63 else seed
    stream = module.philox_stream(torch.tensor([signed, counter[3]]))

    given = module.philox(*(torch.tensor(word) for word in counter[:3]), stream)

    assert tuple(int(word) for word in given) == words


def test_words_are_those_of_their_row_head_and_column_wherever_a_tile_begins() -> None:
    module, group, p = rendered(), 3, 0.3
    keep = dropout_keep(RNG, p, 2, 6, slice(0, 20), 41, "cpu")  # [B, H, M, N]
    rows = keep.view(4, group, 20, 41).transpose(1, 2)  # [B * H_KV, M, GROUP, N]
    stream = module.philox_stream(RNG)

    for heads, start_m, start_n in itertools.product([slice(0, 4), slice(1, 3)], [0, 7], [0, 1, 6, 32]):
        tile = rows[heads, start_m : start_m + 13, :, start_n : start_n + 9]
        scores = torch.empty(tile.shape[0], 13 * group, tile.shape[3], dtype=torch.float64)
        factors = module.dropout_factors(
            scores, heads, start_m, start_n, group, 0, stream, dropout.threshold(p), dropout.keep_scale(p)
        )
        assert torch.equal(factors, tile.flatten(1, 2).double() * dropout.keep_scale(p))


def visible_problem() -> tuple[Problem, Tensors]:
    """One where out and dv are the probabilities themselves."""
    problem = problem_with(dropout_p=0.4, seqlen_q=21, seqlen_k=29, head_dim_v=29)
    tensors = draw(problem)
    return problem, tensors._replace(v=torch.eye(29, dtype=torch.float64).expand(2, 2, 29, 29).contiguous())


def expected_keep(problem: Problem) -> Tensor:
    return dropout_keep(RNG, problem.dropout_p, 2, 6, slice(0, 21), 29, "cpu")


@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
@pytest.mark.parametrize("tiles", TILES)
def test_the_forward_drops_what_the_specification_drops(loop_order: str, tiles: Tiles) -> None:
    problem, tensors = visible_problem()

    out, _ = forward(problem, tensors, loop_order, tiles)

    assert torch.equal(out != 0.0, expected_keep(problem))


@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
@pytest.mark.parametrize("tiles", TILES)
def test_the_backward_drops_the_same_in_other_tiles(loop_order: str, tiles: Tiles) -> None:
    problem, tensors = visible_problem()
    problem = problem.replace(kv_heads=6, head_dim_v=21)
    tensors = draw(problem)._replace(dout=torch.eye(21, dtype=torch.float64).expand(2, 6, 21, 21).contiguous())
    out, lse = forward(problem, tensors, "query_outer", Tiles(8, 20))

    _, _, dv = backward(problem, tensors, out, lse, loop_order, tiles)  # dv[j, i] is the probability of (i, j)

    assert torch.equal(dv.mT != 0.0, expected_keep(problem))


def test_the_log_sum_exp_knows_nothing_of_it() -> None:
    problem = problem_with(dropout_p=0.4)
    tensors = draw(problem)

    _, lse = forward(problem, tensors)

    assert torch.equal(lse, forward(problem.replace(dropout_p=0.0), tensors)[1])


@pytest.mark.parametrize("changed", [0, 1])
def test_another_seed_or_offset_drops_others(changed: int) -> None:
    problem, tensors = visible_problem()
    rng = RNG.clone()
    rng[changed] += 1

    out, _ = forward(problem, tensors)
    same, _ = forward(problem, tensors._replace(extras=Extras(rng=RNG.clone())))
    other, _ = forward(problem, tensors._replace(extras=Extras(rng=rng)))

    assert torch.equal(out, same)
    assert not torch.equal(out != 0.0, other != 0.0)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_share_that_is_asked_for_is_dropped(share: float) -> None:
    problem = problem_with(seqlen_q=64, seqlen_k=200, head_dim_v=200, dropout_p=share)
    tensors = draw(problem)._replace(v=torch.eye(200, dtype=torch.float64).expand(2, 2, 200, 200))

    out, _ = forward(problem, tensors)

    assert (out == 0.0).double().mean().item() == pytest.approx(share, abs=0.01)
    assert out.sum(dim=-1).mean().item() == pytest.approx(1.0, abs=0.05)
