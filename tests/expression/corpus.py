"""Expressions that people write, and what they read: shared by the tests of every printer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from autoflash.expression.expression import Expression, Role, parse
from autoflash.expression.nodes import Kind, Parameter, Variable

B, H, M, N = 2, 3, 8, 16

_KINDS = {torch.float32: Kind.FLOAT, torch.int32: Kind.INT, torch.bool: Kind.BOOL}


@dataclass(frozen=True, kw_only=True)
class Case:
    """An expression with the tensors that it reads, for scores [B, H, M, N]."""

    name: str
    source: str
    role: Role = Role.SCORE_MOD
    tensors: dict[str, Tensor]

    @property
    def expression(self) -> Expression:
        return parse(self.source, declared(self.tensors), self.role)


def declared(tensors: dict[str, Tensor]) -> list[Parameter]:
    """Declarations of some parameters: float32, int32 and bool are the kinds."""
    return [Parameter(name=name, kind=_KINDS[tensor.dtype], rank=tensor.dim()) for name, tensor in tensors.items()]


def inputs(role: Role = Role.SCORE_MOD, dtype: torch.dtype = torch.float64, shift: int = 0) -> dict[Variable, Tensor]:
    """Scores of every size, [B, H, M, N], and where they stand; the first query is ``shift``."""
    generator = torch.Generator().manual_seed(7)
    score = 3.0 * torch.randn(B, H, M, N, generator=generator, dtype=torch.float64)
    places = {
        Variable.B: torch.arange(B).view(-1, 1, 1, 1),
        Variable.H: torch.arange(H).view(1, -1, 1, 1),
        Variable.Q_IDX: shift + torch.arange(M).view(1, 1, -1, 1),
        Variable.KV_IDX: torch.arange(N).view(1, 1, 1, -1),
    }
    given = {variable: tensor.int() for variable, tensor in places.items()}
    return given if role is Role.MASK_MOD else {Variable.SCORE: score.to(dtype), **given}


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _t5_buckets(distances: Tensor, buckets: int = 32, far: int = 128) -> Tensor:
    """The bucket of each distance, as transformers' T5 has it for a decoder."""
    near = buckets // 2
    ratio = torch.log(distances.clamp(min=1).double() / near) / torch.log(torch.tensor(far / near).double())
    return torch.where(distances < near, distances, (near + (ratio * (buckets - near)).int()).clamp(max=buckets - 1))


_T5 = (
    "score + bias[h, where(q_idx - kv_idx < 1, 0, where(30 * (q_idx - kv_idx) < 16, 30 * (q_idx - kv_idx), "
    "minimum(31, 16 + floor(log(30 * (q_idx - kv_idx) / 16) / log(8) * 16))))]"
)
_BIASES, _SLOPES = {"bias": _random(H, 2 * N)}, {"slopes": 2.0 ** -torch.arange(1.0, H + 1.0)}
_DOCUMENTS = {"doc": torch.tensor([[0] * 5 + [1] * 11, [0] * 9 + [1] * 4 + [2] * 3], dtype=torch.int32)}

CASES = [
    Case(name="identity", source="score", tensors={}),
    Case(name="times_two", source="score * 2", tensors={}),
    Case(name="squared", source="score * score", tensors={}),
    Case(name="causal", source="where(q_idx >= kv_idx, score, -inf)", tensors={}),
    Case(name="inverse_causal", source="where(q_idx <= kv_idx, score, -inf)", tensors={}),
    Case(name="relative_bias", source="score + (q_idx - kv_idx)", tensors={}),
    Case(
        name="relative_causal",
        source="where(q_idx >= kv_idx, score + (q_idx - kv_idx), -inf)",
        tensors={},
    ),
    Case(name="alibi", source="score - slopes[h] * abs(q_idx - kv_idx)", tensors=_SLOPES),
    Case(name="trigonometric", source="sin(cos(score))", tensors={}),
    Case(name="head_offset", source="score * offset[h]", tensors={"offset": _random(H)}),
    Case(name="head_and_batch_offset", source="score + offset[b, h]", tensors={"offset": _random(B, H)}),
    Case(name="every_other_head", source="where(h % 2 == 0, score + (q_idx - kv_idx) / 4, score)", tensors={}),
    Case(name="capped", source="cap * tanh(score / cap)", tensors={"cap": torch.tensor(2.5)}),
    Case(name="table", source="score + bias[h, q_idx - kv_idx + n]", tensors={**_BIASES, "n": torch.tensor(N).int()}),
    Case(name="table_too_small", source="score + bias[h, 3 * (q_idx - kv_idx)]", tensors=_BIASES),
    Case(
        name="t5_buckets_by_formula",
        source=_T5,
        tensors={"bias": _random(H, 32)},
    ),
    Case(
        name="t5_buckets_by_table",
        source="score + bias[h, bucket[maximum(30 * (q_idx - kv_idx), 0)]]",
        tensors={"bias": _random(H, 32), "bucket": _t5_buckets(torch.arange(300)).int()},
    ),
    Case(name="gate", source="score * sigmoid(gate[b, h, q_idx, kv_idx])", tensors={"gate": _random(B, H, M, N)}),
    Case(name="logarithm_of_distance", source="score - log(1 + abs(q_idx - kv_idx)) * t", tensors={"t": _random()}),
    Case(
        name="cosine_decay",
        source="score * cos(1.5707963 * minimum(abs(q_idx - kv_idx) / n, 1))",
        tensors={"n": _random()},
    ),
    Case(
        name="soft_clip",
        source="maximum(-lim, minimum(score, lim)) + sqrt(abs(score)) / 8",
        tensors={"lim": _random().abs()},
    ),
    Case(
        name="only_some",
        source="where(flags[q_idx], score**3 / 9, -score)",
        tensors={"flags": torch.arange(M) % 3 == 0},
    ),
    Case(name="switch", source="where(on, score * 2, score + 1)", tensors={"on": torch.tensor(True)}),
    Case(name="root_of_the_positive", source="where(score > 0, sqrt(score), log(1 - score))", tensors={}),
    Case(name="constant", source="exp(1)", tensors={}),
    Case(name="causal_mask", role=Role.MASK_MOD, source="q_idx >= kv_idx", tensors={}),
    Case(name="sliding_window", role=Role.MASK_MOD, source="0 <= q_idx - kv_idx < 4", tensors={}),
    Case(
        name="prefix_lm",
        role=Role.MASK_MOD,
        source="kv_idx < prefix[b] or q_idx >= kv_idx",
        tensors={"prefix": torch.tensor([3, 6]).int()},
    ),
    Case(name="documents", role=Role.MASK_MOD, source="doc[b, q_idx] == doc[b, kv_idx]", tensors=_DOCUMENTS),
    Case(
        name="causal_documents",
        role=Role.MASK_MOD,
        source="(q_idx >= kv_idx) & (doc[b, q_idx] == doc[b, kv_idx]) | ~(h < 2)",
        tensors=_DOCUMENTS,
    ),
    Case(
        name="padding",
        role=Role.MASK_MOD,
        source="keep[b, kv_idx]",
        tensors={"keep": torch.arange(2 * N).view(2, N) % 5 < 3},
    ),
    Case(name="dilated", role=Role.MASK_MOD, source="(q_idx - kv_idx) % 3 == 0", tensors={}),
    Case(name="everything", role=Role.MASK_MOD, source="True", tensors={}),
]
