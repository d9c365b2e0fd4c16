"""Choices and variants as values: equality, order, text, JSON."""

from __future__ import annotations

import pickle

import pytest

from autoflash.variant import Choices, Family, Variant
from tests.factories import make_variant


def test_the_order_in_which_choices_are_made_does_not_matter() -> None:
    one, other = Choices(a=1, b="x"), Choices({"b": "x", "a": 1})

    assert one == other
    assert hash(one) == hash(other)
    assert list(one) == ["a", "b"]


def test_true_is_not_one() -> None:
    assert Choices(a=True) != Choices(a=1)


def test_a_choice_of_another_type_is_refused_where_it_is_read() -> None:
    choices = Choices(number=1, text="x", flag=True)

    assert (choices.number("number"), choices.text("text"), choices.flag("flag")) == (1, "x", True)
    for read, name in ((choices.number, "flag"), (choices.text, "number"), (choices.flag, "text")):
        with pytest.raises(TypeError, match=name):
            read(name)


def test_choices_survive_pickling_and_replacing() -> None:
    choices = Choices(a=1, b="x")

    assert pickle.loads(pickle.dumps(choices)) == choices
    assert choices.replace(a=2) == Choices(a=2, b="x")
    assert choices["a"] == 1


@pytest.mark.parametrize("family", [Family.TRITON, Family.TORCH_TILED, Family.GLUON_SM90, Family.VENDOR])
def test_a_variant_survives_the_way_through_json(family: Family) -> None:
    variant = make_variant(family)

    assert Variant.from_dict(variant.to_dict()) == variant


def test_content_that_is_no_variant_is_refused() -> None:
    with pytest.raises(ValueError, match="choices must map names"):
        Variant.from_dict({"family": "triton", "structure": {"loads": None}, "config": {}})


def test_every_choice_is_part_of_the_key() -> None:
    variant = make_variant(Family.TRITON)

    assert make_variant(Family.TRITON, BLOCK_M=32).key != variant.key
    assert make_variant(Family.TRITON, loads="tma").key != variant.key
