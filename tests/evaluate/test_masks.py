from __future__ import annotations

import math

import pytest
import torch

from autoflash.evaluate.inputs import Memory
from autoflash.evaluate.masks import MaskForm, Pattern, draw_mask
from autoflash.problem import DType, MaskTensor
from tests.factories import make_problem


def problem_of(kind=MaskTensor.BOOL, **changes):
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "seqlen_q": 113, "seqlen_k": 600, **changes}
    return make_problem(dtype=DType.BF16, **sizes).replace(mask_tensor=kind)


def visible(pattern, kind=MaskTensor.BOOL, **changes):
    problem = problem_of(kind, **changes)
    mask = draw_mask(problem, MaskForm(pattern=pattern))
    shape = (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
    return (mask if mask.dtype is torch.bool else mask > -1e4).expand(shape)


def test_a_mixed_mask_has_rows_without_keys_rows_of_one_key_and_hidden_tiles():
    mask = visible(Pattern.MIXED)

    counts = mask.sum(dim=-1)
    assert (counts == 0).any()
    assert (counts == 1).any()
    assert ((counts > 300) & (counts < 500)).any()
    usual = torch.arange(113) % 7 == 0
    assert not mask[:, 1, usual, :64].any()
    assert not mask[:, 2, usual, -64:].any()
    assert not torch.equal(mask[0, 0], mask[1, 0])
    assert not torch.equal(mask[0, 0], mask[0, 3])


@pytest.mark.parametrize(
    ("pattern", "hidden"), [(Pattern.FIRST_KEYS, slice(0, 256)), (Pattern.LAST_KEYS, slice(-256, None))]
)
def test_more_than_a_block_is_hidden_at_an_end(pattern, hidden):
    mask = visible(pattern)

    assert not mask[..., hidden].any()
    assert mask.any(dim=-1).all()


@pytest.mark.parametrize(
    ("pattern", "shape"),
    [
        (Pattern.PADDING, (2, 1, 1, 600)),
        (Pattern.ROWS, (2, 1, 113, 1)),
        (Pattern.EACH_HEAD, (1, 4, 113, 600)),
        (Pattern.EACH_BATCH, (2, 1, 113, 600)),
        (Pattern.NOTHING, (1, 1, 1, 1)),
        (Pattern.EVERYTHING, (1, 1, 1, 1)),
    ],
)
@pytest.mark.parametrize("kind", [MaskTensor.BOOL, MaskTensor.FLOAT])
def test_a_mask_is_broadcast_over_what_its_pattern_says(kind, pattern, shape):
    assert draw_mask(problem_of(kind), MaskForm(pattern=pattern)).shape == shape


def test_padding_hides_the_last_keys_of_an_entry_and_all_of_another():
    mask = visible(Pattern.PADDING)

    assert mask[0, 0, 0].sum() == 201
    assert mask[0, ..., :201].all()
    assert not mask[1].any()


@pytest.mark.parametrize("pattern", Pattern)
def test_a_float_mask_is_of_its_type_and_is_minus_infinity_where_a_pair_is_hidden(pattern):
    problem = problem_of(MaskTensor.FLOAT)

    own = draw_mask(problem, MaskForm(pattern=pattern))
    other = draw_mask(problem, MaskForm(pattern=pattern, dtype=DType.FP16))

    assert (own.dtype, other.dtype) == (torch.bfloat16, torch.float16)
    assert not own.isnan().any()
    assert bool((own == -math.inf).any()) == (pattern not in (Pattern.NOTHING, Pattern.EACH_BATCH))


def test_a_mask_without_infinity_has_the_least_number_but_where_a_row_might_see_nothing_else():
    form = MaskForm(pattern=Pattern.EACH_BATCH)

    free = draw_mask(problem_of(MaskTensor.FLOAT), form)
    bound = draw_mask(problem_of(MaskTensor.FLOAT).replace(window_left=3), form)

    assert free.min() == torch.finfo(torch.bfloat16).min
    assert -1.1e4 < bound.min() < -9e3


def test_the_same_mask_is_drawn_whatever_its_memory():
    problem = problem_of()

    assert torch.equal(draw_mask(problem, MaskForm()), draw_mask(problem, MaskForm(memory=Memory.STRIDED)))
