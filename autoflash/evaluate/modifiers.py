"""A score_mod and a mask_mod on blocks of scores, as the specification and the yardstick apply them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autoflash.codegen.expressions import expression_of, parameters_of
from autoflash.errors import InvalidProblemError
from autoflash.evaluate.expression_values import value_of
from autoflash.expression.derivative import parameter_gradients
from autoflash.expression.expression import Expression
from autoflash.expression.nodes import Kind, Node, Variable
from autoflash.problem import Problem
from autoflash.runtime.modifiers import UNMODIFIED, modified_by

Source = str | Callable[..., object] | None
"""An expression, as text or a lambda."""

Params = Mapping[str, Tensor | float] | None
"""What expressions read, by name."""

_Seen = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Modifiers:
    """The expressions of an attention with what they read.

    Scores are [B, H, m, N] of the queries from ``start`` on, in any floating type. Expressions are evaluated in float64
    where scores are, else in float32, and only for pairs that are not hidden: what they would give elsewhere, be it
    NaN, has no part in anything.

    Attributes:
        score_mod, mask_mod: None for none.
        params: What they read, by name.
    """

    score_mod: Expression | None = None
    mask_mod: Expression | None = None
    params: Mapping[str, Tensor]

    @classmethod
    def of_problem(cls, problem: Problem, params: tuple[Tensor, ...]) -> Modifiers | None:
        """Those of a problem; None where it has none."""
        if not problem.score_mod and not problem.mask_mod:
            return None
        return cls.of_lines(problem.score_mod, problem.mask_mod, params)

    @classmethod
    def of_call(
        cls, score_mod: Source, mask_mod: Source, score_params: Params, device: torch.device
    ) -> Modifiers | None:
        """Those of a caller; None where there is none.

        Raises:
            InvalidProblemError: for what is not of the language, and parameters that do not fit.
        """
        asked = modified_by(score_mod, mask_mod, score_params, device)
        return None if asked == UNMODIFIED else cls.of_lines(asked.score_mod, asked.mask_mod, asked.params)

    @classmethod
    def of_lines(cls, score_mod: str, mask_mod: str, params: tuple[Tensor, ...]) -> Modifiers:
        """Those that are written so, with what they read in order."""
        names = [parameter.name for parameter in parameters_of(score_mod, mask_mod)]
        if len(names) != len(params):
            raise InvalidProblemError(f"the expressions read {', '.join(names)}, got {len(params)} parameters")
        return cls(
            score_mod=expression_of(score_mod) if score_mod else None,
            mask_mod=expression_of(mask_mod) if mask_mod else None,
            params=dict(zip(names, params, strict=True)),
        )

    def hidden(self, s: Tensor, start: int) -> Tensor | None:
        """Where the mask_mod says that the key takes no part, of the shape of scores; None without one."""
        if self.mask_mod is None:
            return None
        batch, heads, rows, keys = s.shape
        places = {
            Variable.B: torch.arange(batch, device=s.device).view(-1, 1, 1, 1),
            Variable.H: torch.arange(heads, device=s.device).view(-1, 1, 1),
            Variable.Q_IDX: torch.arange(start, start + rows, device=s.device).view(-1, 1),
            Variable.KV_IDX: torch.arange(keys, device=s.device),
        }
        return ~value_of(self.mask_mod.root, places, self.params)

    def modified(self, s: Tensor, start: int, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What takes the place of scores, and where they are hidden then: also where that is -inf. There, scores are 0.

        Differentiable by scores and parameters.
        """
        if self.score_mod is None:
            return s, hidden
        seen = _seen(s, hidden)
        made = s.new_zeros(s.shape).index_put(seen, self._value(self.score_mod.root, s, start, seen).to(s.dtype))
        gone = made == -torch.inf
        if not bool(gone.any()):
            return made, hidden
        return made.masked_fill(gone, 0.0), gone if hidden is None else hidden | gone

    def slope(self, s: Tensor, start: int, hidden: Tensor | None) -> Tensor | float:
        """Derivative of the modified scores by the scores; 0 where they are hidden."""
        if self.score_mod is None:
            return 1.0
        with torch.enable_grad():
            leaf = s.detach().requires_grad_()
            made, _ = self.modified(leaf, start, hidden)
            if not made.requires_grad:
                return torch.zeros_like(s)
            (slope,) = torch.autograd.grad(made, leaf, torch.ones_like(made), allow_unused=True)
        return torch.zeros_like(s) if slope is None else slope

    @property
    def differentiable(self) -> tuple[str, ...]:
        """Names of the float parameters of the score_mod, in order."""
        if self.score_mod is None:
            return ()
        return tuple(each.name for each in self.score_mod.parameters if each.kind is Kind.FLOAT)

    def gradients(self, s: Tensor, start: int, hidden: Tensor | None, ds: Tensor) -> dict[str, Tensor]:
        """Gradients of the differentiable parameters, from those of the modified scores, in the type of the scores."""
        leaves = {name: self.params[name].detach().to(s.dtype).requires_grad_() for name in self.differentiable}
        with torch.enable_grad():
            made, _ = replace(self, params={**self.params, **leaves}).modified(s, start, hidden)
        if not made.requires_grad:
            return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        found = torch.autograd.grad(made, list(leaves.values()), ds, allow_unused=True)
        return {
            name: torch.zeros_like(leaf) if gradient is None else gradient
            for (name, leaf), gradient in zip(leaves.items(), found, strict=True)
        }

    def magnitudes(self, s: Tensor, start: int, hidden: Tensor | None, ds: Tensor) -> dict[str, Tensor]:
        """As :func:`gradients`, with the absolute value of each term, for ``ds`` that are none below 0."""
        sums = {name: torch.zeros_like(self.params[name], dtype=s.dtype) for name in self.differentiable}
        if self.score_mod is None:
            return sums
        seen = _seen(s, hidden)
        for gradient in parameter_gradients(self.score_mod):
            terms = (self._value(gradient.derivative, s, start, seen) * ds[seen]).abs().nan_to_num(0.0, 0.0)
            total = sums[gradient.parameter.name]
            if not gradient.indices:
                total += terms.sum()
                continue
            indices = [self._value(index, s, start, seen).long() for index in gradient.indices]
            inside = torch.stack(
                [(index >= 0) & (index < size) for index, size in zip(indices, total.shape, strict=True)]
            ).all(dim=0)
            total.index_put_(tuple(index[inside] for index in indices), terms[inside], accumulate=True)
        return sums

    def _value(self, node: Node, s: Tensor, start: int, seen: _Seen) -> Tensor:
        places = dict(zip(tuple(Variable)[1:], seen, strict=True))
        places[Variable.Q_IDX] = places[Variable.Q_IDX] + start
        inputs = {Variable.SCORE: s[seen], **places}
        return value_of(node, inputs, self.params, torch.promote_types(s.dtype, torch.float32))


def _seen(s: Tensor, hidden: Tensor | None) -> _Seen:
    """Where scores are not hidden: b, h, row and key of each."""
    whole = torch.ones_like(s, dtype=torch.bool)
    return (whole if hidden is None else whole & ~hidden).nonzero(as_tuple=True)
