"""Options that ask for more than plain attention."""

from __future__ import annotations

import shlex

import click
import pytest
from click.testing import CliRunner

from autoflash.cli.application import main
from autoflash.cli.features import Window, feature_options, with_features
from autoflash.codegen.render import render
from autoflash.problem import Feature, Form, Mask, MaskTensor, Pass
from autoflash.search.presets import Asked
from autoflash.variant import Choices, Family
from tests.factories import make_cell, make_variant


def asked(*arguments: str) -> Asked:
    made: list[Asked] = []

    @click.command()
    @feature_options
    def command(wanted: Asked) -> None:
        made.append(wanted)

    command.main(list(arguments), standalone_mode=False)
    return made[0]


def complaint(*arguments: str) -> str:
    @click.command()
    @feature_options
    def command(wanted: Asked) -> None:
        pass

    outcome = CliRunner().invoke(command, list(arguments))
    assert outcome.exit_code == 2
    return outcome.output


def test_without_options_nothing_is_asked_for() -> None:
    assert asked() == Asked()


def test_each_option_asks_for_its_feature() -> None:
    arguments = "--window 127,0 --softcap 30 --dropout 0.1 --bool-mask"

    assert asked(*arguments.split()) == Asked(window=(127, 0), softcap=30.0, dropout_p=0.1, mask_tensor=MaskTensor.BOOL)
    assert asked("--varlen") == Asked(packed=True)
    assert asked("--sinks") == Asked(sinks=True)
    assert asked("--block-mask") == Asked(block_size=128)
    assert asked("--alibi") == Asked(alibi=True)
    assert asked("--alibi-gradient") == Asked(alibi=True, alibi_gradient=True)
    assert asked("--bias") == Asked(bias=True)
    assert asked("--bias-gradient") == Asked(bias=True, bias_gradient=True)
    assert asked("--float-mask").mask_tensor is MaskTensor.FLOAT


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        ("127,0", (127, 0)),
        ("-1,64", (None, 64)),
        ("64,-1", (64, None)),
        (",64", (None, 64)),
        ("64,", (64, None)),
        (" 0 , 0 ", (0, 0)),
    ],
)
def test_a_bound_that_is_left_out_or_negative_is_none(text: str, bounds: tuple[int | None, int | None]) -> None:
    assert asked("--window", text).window == bounds


@pytest.mark.parametrize("text", ["64", "64,64,64", "64;64", "a,b", "-2,0", "1.5,0", ""])
def test_what_is_no_window_is_named(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a window; write L,R") as raised:
        Window().convert(text, None, None)

    assert repr(text) in raised.value.message


def test_a_window_without_bounds_is_refused() -> None:
    with pytest.raises(click.BadParameter, match="'-1,-1' has no bound on either side"):
        Window().convert("-1,-1", None, None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--bool-mask --float-mask", "give --bool-mask or --float-mask, not both"),
        ("--varlen --float-mask", "--varlen and --float-mask: packed sequences have no mask tensor"),
        ("--varlen --block-mask", "--varlen and --block-mask: packed sequences have no block mask"),
        ("--varlen --bias", "--varlen and --bias: packed sequences have no bias"),
        ("--dropout 1", "1.0 is not in the range"),
        ("--softcap -3", "-3.0 is not in the range"),
    ],
)
def test_what_means_nothing_is_refused(arguments: str, words: str) -> None:
    assert words in complaint(*arguments.split())


def test_a_softcap_that_is_no_number_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--device", "cpu", "--softcap", "nan"]) == 2

    assert "softcap must be a finite number, at least 0, got nan" in capsys.readouterr().err


def test_features_by_name_come_to_those_that_are_there_in_their_order() -> None:
    cell = with_features(make_cell(features=(Feature.SOFTCAP,)), ("dropout", "varlen", "softcap"))

    assert cell.features == (Feature.VARLEN, Feature.SOFTCAP, Feature.DROPOUT)


@pytest.mark.parametrize(
    ("names", "words"), [(("float_mask",), "not both"), (("varlen",), "packed sequences have no mask tensor")]
)
def test_features_that_do_not_go_together_are_refused_by_name_too(names: tuple[str, ...], words: str) -> None:
    with pytest.raises(click.UsageError, match=words):
        with_features(make_cell(features=(Feature.BOOL_MASK,)), names)


@pytest.mark.parametrize("mask", list(Mask))
@pytest.mark.parametrize(
    "features",
    [
        (Feature.WINDOW,),
        (Feature.SOFTCAP, Feature.FLOAT_MASK, Feature.WINDOW, Feature.DROPOUT),
        (Feature.VARLEN, Feature.DROPOUT),
        (Feature.BOOL_MASK,),
    ],
    ids=lambda features: "+".join(features),
)
def test_the_command_in_a_kernels_header_prints_that_kernel(
    features: tuple[Feature, ...], mask: Mask, capsys: pytest.CaptureFixture[str]
) -> None:
    variant = make_variant(Family.TORCH_TILED, op=Pass.BACKWARD)
    form = Form(op=Pass.BACKWARD, mask=mask, features=features)
    source = render(form, variant.family, Choices(loop_order="key_outer"))
    line = next(line for line in source.text.splitlines() if line.startswith("# Regenerate: "))

    assert main(shlex.split(line.partition("autoflash ")[2])) == 0

    assert capsys.readouterr().out == source.text
