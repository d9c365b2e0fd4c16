"""Options that ask for more than plain attention."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import click

from autoflash.errors import ExpressionError
from autoflash.expression.expression import Role, of_line, parse
from autoflash.problem import LEAST_BLOCK, Cell, Feature, MaskTensor, Pass
from autoflash.search.presets import Asked

P = ParamSpec("P")
R = TypeVar("R")

FEATURE = click.Choice([member.value for member in Feature])


class Window(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.4
    """Bounds such as ``4095,0`` or ``64,64``: keys to the left and to the right; -1 or nothing is unbounded."""

    name = "window"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int | None, int | None]:
        """Left and right bound; None has no bound there."""
        if isinstance(value, tuple):
            return value
        bounds = [text.strip() for text in str(value).split(",")]
        try:
            numbers = [-1 if text == "" else int(text) for text in bounds]
        except ValueError:
            numbers = []
        if len(numbers) != 2 or min(numbers) < -1:
            self.fail(f"{value!r} is not a window; write L,R such as 4095,0 (-1 or nothing: unbounded)", param, ctx)
        left, right = (None if number == -1 else number for number in numbers)
        if left is None and right is None:
            self.fail(f"{value!r} has no bound on either side: leave --window out", param, ctx)
        return left, right


class Line(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.4
    """An expression such as ``score * 2``; with parameters, a whole line, ``score_mod(t: float 1) = score + t[h]``."""

    name = "line"

    def __init__(self, role: Role) -> None:
        """Of this role."""
        self._role = role

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The canonical line; empty for none."""
        text = str(value)
        try:
            is_line = text.startswith(f"{self._role.value}(")
            return str(of_line(text) if is_line else parse(text, (), self._role)) if text else ""
        except ExpressionError as error:
            self.fail(str(error), param, ctx)


def feature_options(command: Callable[Concatenate[Asked, P], R]) -> Callable[P, R]:
    """Give a command options that ask for features, handed over as its first argument."""

    @click.option("--window", type=Window(), metavar="L,R", help="Keys seen to the left and right (-1: unbounded).")
    @click.option("--softcap", type=click.FloatRange(0.0), default=0.0, metavar="X", help="Scores as X*tanh(score/X).")
    @click.option(
        "--dropout",
        type=click.FloatRange(0.0, 1.0, max_open=True),
        default=0.0,
        metavar="P",
        help="Share of the probabilities that are dropped.",
    )
    @click.option("--bool-mask", is_flag=True, help="With a tensor that says which pairs take part.")
    @click.option("--float-mask", is_flag=True, help="With a tensor that is added to the scores.")
    @click.option("--alibi", is_flag=True, help="With scores that fall with the distance, by a slope of each head.")
    @click.option("--alibi-gradient", is_flag=True, help="With slopes whose gradient the backward gives.")
    @click.option("--bias", is_flag=True, help="With a tensor that is added to the scores and may have a gradient.")
    @click.option("--bias-gradient", is_flag=True, help="With a bias whose gradient the backward gives.")
    @click.option("--sinks", is_flag=True, help="With a score of each head that has no key.")
    @click.option("--score-mod", type=Line(Role.SCORE_MOD), default="", metavar="LINE", help="Scores as it says.")
    @click.option("--mask-mod", type=Line(Role.MASK_MOD), default="", metavar="LINE", help="Keys as it says.")
    @click.option("--block-mask", is_flag=True, help="With a map of blocks that are hidden as a whole.")
    @click.option("--params-gradient", is_flag=True, help="A backward also of the --score-mod's parameters.")
    @click.option("--varlen", is_flag=True, help="Sequences of different lengths, packed one after the other.")
    @functools.wraps(command)
    def with_asked(*args: P.args, **options: P.kwargs) -> R:
        names = ["window", "softcap", "dropout", "bool_mask", "float_mask", "alibi", "alibi_gradient"]
        names += ["bias", "bias_gradient", "sinks", "varlen"]
        names += ["score_mod", "mask_mod", "block_mask", "params_gradient"]
        return command(_asked(**{name: options.pop(name) for name in names}), *args, **options)  # type: ignore[arg-type]  # click has typed them

    return with_asked


def with_features(cell: Cell, names: tuple[str, ...]) -> Cell:
    """A cell that asks for features by their names too. The text of a kernel depends on no number of theirs.

    Raises:
        click.UsageError: for features that do not go together.
    """
    features = tuple(feature for feature in Feature if feature in cell.features or feature.value in names)
    for name, line in (("score_mod", cell.score_mod), ("mask_mod", cell.mask_mod)):
        if name in names and not line:
            raise click.UsageError(f"--feature {name} is asked for by --{name.replace('_', '-')} LINE")
    if Feature.PARAMS_GRADIENT in features and not cell.score_mod:
        raise click.UsageError("--feature params_gradient needs a --score-mod")
    masks = [feature for feature in (Feature.BOOL_MASK, Feature.FLOAT_MASK) if feature in features]
    if len(masks) == 2:
        raise click.UsageError("there is one mask tensor: bool_mask or float_mask, not both")
    if masks and Feature.VARLEN in features:
        raise click.UsageError(f"varlen and {masks[0].value}: packed sequences have no mask tensor")
    for feature in (Feature.BIAS, Feature.BLOCK_MASK):
        if feature in features and Feature.VARLEN in features:
            raise click.UsageError(f"varlen and {feature.value}: packed sequences have no {_words(feature)}")
    for term, gradient in ((Feature.ALIBI, Feature.ALIBI_GRADIENT), (Feature.BIAS, Feature.BIAS_GRADIENT)):
        if gradient in features and (term not in features or cell.op is Pass.FORWARD):
            raise click.UsageError(
                f"{gradient.value} is a feature of backward passes with {term.value}: name that as well"
            )
    return dataclasses.replace(cell, features=features)


def _asked(
    *,
    window: tuple[int | None, int | None] | None,
    softcap: float,
    dropout: float,
    bool_mask: bool,
    float_mask: bool,
    alibi: bool,
    alibi_gradient: bool,
    bias: bool,
    bias_gradient: bool,
    sinks: bool,
    varlen: bool,
    score_mod: str,
    mask_mod: str,
    block_mask: bool,
    params_gradient: bool,
) -> Asked:
    mask_tensor = _mask_tensor(bool_mask, float_mask)
    if varlen and mask_tensor is not MaskTensor.NONE:
        raise click.UsageError(f"--varlen and --{mask_tensor.value}-mask: packed sequences have no mask tensor")
    if varlen and (score_mod or mask_mod):
        raise click.UsageError("--varlen with --score-mod or --mask-mod: packed sequences have no expressions")
    if params_gradient and not score_mod:
        raise click.UsageError("--params-gradient needs a --score-mod")
    bias = bias or bias_gradient
    for feature, is_asked in ((Feature.BIAS, bias), (Feature.BLOCK_MASK, block_mask)):
        if varlen and is_asked:
            words = _words(feature)
            raise click.UsageError(f"--varlen and --{words.replace(' ', '-')}: packed sequences have no {words}")
    return Asked(
        window=window or (None, None),
        softcap=softcap,
        dropout_p=dropout,
        mask_tensor=mask_tensor,
        alibi=alibi or alibi_gradient,
        alibi_gradient=alibi_gradient,
        bias=bias,
        bias_gradient=bias_gradient,
        sinks=sinks,
        score_mod=score_mod,
        mask_mod=mask_mod,
        block_size=LEAST_BLOCK if block_mask else 0,
        params_gradient=params_gradient,
        packed=varlen,
    )


def _words(feature: Feature) -> str:
    return feature.value.replace("_", " ")


def _mask_tensor(is_bool: bool, is_float: bool) -> MaskTensor:
    if is_bool and is_float:
        raise click.UsageError("there is one mask tensor: give --bool-mask or --float-mask, not both")
    return MaskTensor.BOOL if is_bool else MaskTensor.FLOAT if is_float else MaskTensor.NONE
