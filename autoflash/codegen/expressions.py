"""A form's score_mod and mask_mod as the functions that templates call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoflash.errors import ExpressionError
from autoflash.expression.derivative import Gradient, parameter_gradients, score_derivative
from autoflash.expression.expression import Expression, Role, of_line
from autoflash.expression.nodes import Parameter
from autoflash.expression.program import Function
from autoflash.expression.sharing import Sharing, sharing_of
from autoflash.expression.torch_text import to_torch
from autoflash.expression.triton_text import to_triton
from autoflash.problem import Feature, Form, Pass

_Printer = Callable[[Role, Sequence[Function], Sequence[Parameter]], str]
_Gradients = Callable[[int, Gradient], list[Function]]


@functools.lru_cache(maxsize=256)
def expression_of(line: str) -> Expression:
    """The expression that a problem holds as a line.

    Raises:
        ExpressionError: for what is no canonical line.
    """
    return of_line(line)


@functools.lru_cache(maxsize=256)
def parameters_of(score_mod: str, mask_mod: str) -> tuple[Parameter, ...]:
    """What two lines, or one beside an empty one, read together, by name.

    Raises:
        ExpressionError: where one name is declared in two ways.
    """
    found: dict[str, Parameter] = {}
    for line in filter(None, (score_mod, mask_mod)):
        for parameter in expression_of(line).parameters:
            if found.setdefault(parameter.name, parameter) != parameter:
                raise ExpressionError(f"score_mod and mask_mod read {parameter.name} as of different kinds or ranks")
    return tuple(found[name] for name in sorted(found))


@functools.lru_cache(maxsize=256)
def differentiable(score_mod: str) -> frozenset[str]:
    """Names of the parameters that a score_mod's line has gradients by; none for an empty line."""
    if not score_mod:
        return frozenset()
    return frozenset(gradient.parameter.name for gradient in parameter_gradients(expression_of(score_mod)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LookUp:
    """A look-up of a parameter that a score_mod has a gradient by.

    Attributes:
        number: Among the look-ups of the score_mod.
        place: Of the parameter, among those of both expressions.
        rank: Of the parameter.
        sharing: Which pairs read one element.
    """

    number: int
    place: int
    rank: int
    sharing: Sharing


@functools.lru_cache(maxsize=256)
def look_ups_of(score_mod: str, mask_mod: str) -> tuple[LookUp, ...]:
    """Every look-up that a score_mod has a gradient by, in the order of evaluation.

    Args:
        score_mod: A line.
        mask_mod: A line, or empty for none.
    """
    places = [parameter.name for parameter in parameters_of(score_mod, mask_mod)]
    return tuple(
        LookUp(
            number=number,
            place=places.index(gradient.parameter.name),
            rank=gradient.parameter.rank,
            sharing=sharing_of(gradient),
        )
        for number, gradient in enumerate(parameter_gradients(expression_of(score_mod)))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Expressions:
    """What templates ask about the expressions of a form.

    Attributes:
        parameters: Of both, in the order of ``params``.
        form: Whose expressions they are.
    """

    parameters: tuple[Parameter, ...]
    form: Form

    @property
    def torch(self) -> str:
        """Functions of torch tensors; with gradients of parameters, also the table ``PARAMETER_GRADIENTS``."""
        text = self._printed(to_torch, _with_indices)
        if Feature.PARAMS_GRADIENT not in self.form.features:
            return text
        rows = [f"    ({each.place}, parameter_gradient_{each.number}),\n" for each in self.look_ups]
        return f"{text}\n\n\nPARAMETER_GRADIENTS = [\n{''.join(rows)}]"

    @property
    def triton(self) -> str:
        """Device functions."""
        return self._printed(to_triton, _beside_indices)

    @property
    def look_ups(self) -> tuple[LookUp, ...]:
        """Those whose gradients the form gives."""
        if Feature.PARAMS_GRADIENT not in self.form.features:
            return ()
        return look_ups_of(self.form.score_mod, self.form.mask_mod)

    def _printed(self, printer: _Printer, gradients: _Gradients) -> str:
        functions = [(Role.SCORE_MOD, self._of_scores(gradients)), (Role.MASK_MOD, self._of_pairs())]
        texts = [printer(role, each, self.parameters).rstrip("\n") for role, each in functions if each]
        # What both call is printed with each of them.
        return "\n\n\n".join(dict.fromkeys(block for text in texts for block in text.split("\n\n\n")))

    def _of_scores(self, gradients: _Gradients) -> list[Function]:
        if not self.form.score_mod:
            return []
        expression = expression_of(self.form.score_mod)
        if self.form.op is Pass.FORWARD:
            docstring = "What takes the place of each score."
            return [Function(name="score_mod", docstring=docstring, results=(expression.root,))]
        functions = [
            Function(
                name="score_mod_with_slope",
                docstring="What takes the place of each score, and its derivative by the score.",
                results=(expression.root, score_derivative(expression)),
            )
        ]
        if Feature.PARAMS_GRADIENT in self.form.features:
            for number, gradient in enumerate(parameter_gradients(expression)):
                functions += gradients(number, gradient)
        return functions

    def _of_pairs(self) -> list[Function]:
        if not self.form.mask_mod:
            return []
        docstring = "Whether each key takes part."
        root = expression_of(self.form.mask_mod).root
        return [Function(name="mask_mod", docstring=docstring, results=(root,))]


def _with_indices(number: int, gradient: Gradient) -> list[Function]:
    """One function that gives a derivative, and which element it is by."""
    return [
        Function(
            name=f"parameter_gradient_{number}",
            docstring=f"Derivative of the modified score by an element of {gradient.parameter.name}; which.",
            results=(gradient.derivative, *gradient.indices),
        )
    ]


def _beside_indices(number: int, gradient: Gradient) -> list[Function]:
    """A function that gives a derivative, and, if there are indices, one that says which element it is by."""
    name = gradient.parameter.name
    functions = [
        Function(
            name=f"parameter_gradient_{number}",
            docstring=f"Derivative of the modified score by an element of {name}.",
            results=(gradient.derivative,),
        )
    ]
    if gradient.indices:
        docstring = f"Which element of {name} that is."
        functions.append(Function(name=f"parameter_index_{number}", docstring=docstring, results=gradient.indices))
    return functions


@functools.lru_cache(maxsize=256)
def expressions(form: Form) -> Expressions:
    """The expressions of a form, for templates.

    Raises:
        ExpressionError: where a line is not canonical, or two contradict each other.
    """
    return Expressions(parameters=parameters_of(form.score_mod, form.mask_mod), form=form)
