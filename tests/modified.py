"""Attention with expressions as a formula for autograd: of the specification, it shares the values of expressions."""

from __future__ import annotations

import torch
from torch import Tensor

from autoflash.evaluate.expression_values import value_of
from autoflash.expression.expression import Role
from autoflash.expression.nodes import Variable
from tests.expression.corpus import Case


def formula(q: Tensor, k: Tensor, v: Tensor, case: Case, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Out [B, H, M, D_V] and LSE [B, H, M] in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    s = q.double() @ k.mT * q.shape[3] ** -0.5
    lengths = {Variable.B: 0, Variable.H: 1, Variable.Q_IDX: 2, Variable.KV_IDX: 3}
    places = {
        variable: torch.arange(s.shape[dim], dtype=torch.int32).view([-1 if dim == axis else 1 for axis in range(4)])
        for variable, dim in lengths.items()
    }
    if case.role is Role.SCORE_MOD:
        s = value_of(case.expression.root, {Variable.SCORE: s, **places}, tensors)
    else:
        s = s.masked_fill(~value_of(case.expression.root, places, tensors), -torch.inf)
    return torch.softmax(s, dim=-1) @ v, torch.logsumexp(s, dim=-1)
