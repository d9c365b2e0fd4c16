"""What the features of a problem add to the backward kernels of the Triton family: tensors, numbers and constants."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from autoflash.errors import InvalidProblemError
from autoflash.problem import Alignment, Feature, Form, MaskTensor, Problem
from autoflash.runtime import dropout
from autoflash.runtime.executable import Extras
from autoflash.runtime.launch import Constant, Number, NumberArgument, TensorArgument
from autoflash.runtime.layouts import ALIGNMENT_BYTES, TORCH_TYPES, Operand

UNBOUNDED = 1 << 30
"""Reach of a window that is open to a side. Positions and reaches are added in int32."""

_LOG2_E = math.log2(math.e)
_MASK_TYPES = {torch.bool: "u8"} | {torch_type: dtype.value for dtype, torch_type in TORCH_TYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskOperand(Operand):
    """A mask tensor [B, H, M, N] as far as kernels look at it.

    Attributes:
        dtype: Its type as kernels see it: ``u8`` for a bool mask.
    """

    dtype: str

    @classmethod
    def of(cls, tensor: Tensor) -> MaskOperand:
        """Look at a mask."""
        seen = Operand.of(tensor)
        return cls(shape=seen.shape, strides=seen.strides, is_dense=seen.is_dense, dtype=_MASK_TYPES[tensor.dtype])

    @classmethod
    def dense(cls, problem: Problem) -> MaskOperand:
        """A mask of which nothing is known: contiguous, and of the type of the problem where it is not bool."""
        is_bool = problem.mask_tensor is MaskTensor.BOOL
        shape = (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
        return cls.of(torch.empty(shape, dtype=torch.bool if is_bool else TORCH_TYPES[problem.dtype], device="meta"))

    def numbers(self) -> Iterator[tuple[NumberArgument, Number]]:
        """The strides that a kernel is given at launch."""
        multiple_of = ALIGNMENT_BYTES // {"u8": 1, "fp32": 4}.get(self.dtype, 2) if self.is_dense else 1
        for dim, stride in zip("bhmn", self.kernel_strides(), strict=True):
            name = f"stride_mask_{dim}"
            if name not in self.constants():
                yield NumberArgument(name=name, type="i64", multiple_of=multiple_of), stride

    def constants(self) -> dict[str, Constant]:
        """What a kernel is compiled with: whether rows differ (a mask of keys has one for all), and a stride of 1."""
        fixed: dict[str, Constant] = {"MASK_HAS_ROWS": self.kernel_strides()[2] != 0}
        return fixed | ({"stride_mask_n": 1} if self.is_dense or self.strides[3] == 1 else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureArguments:
    """Arguments that the features of a problem add to a kernel, each kind in the order of the parameters.

    Attributes:
        tensors: With the name of each among the tensors of a call.
        numbers: With their values.
        constants: By name.
    """

    tensors: tuple[tuple[str, TensorArgument], ...] = ()
    numbers: tuple[tuple[NumberArgument, Number], ...] = ()
    constants: tuple[tuple[str, Constant], ...] = ()


def feature_arguments(problem: Problem, scale: float, mask: Operand | None, padding: int) -> FeatureArguments:
    """What the kernels that visit tiles are given.

    Args:
        problem: Of any form; without features, nothing is added.
        scale: Factor of the scores.
        mask: How the mask tensor lies, if the problem has one.
        padding: Rows that the workspaces of packed sequences are padded to.
    """
    tensors: list[tuple[str, TensorArgument]] = []
    numbers: list[tuple[NumberArgument, Number]] = []
    constants: dict[str, Constant] = {}
    features = problem.features
    if Feature.SOFTCAP in features:
        numbers.append((NumberArgument(name="steepness", type="fp32"), scale / problem.softcap))
    if isinstance(mask, MaskOperand):
        tensors.append(("mask", TensorArgument(name="mask_ptr", dtype=mask.dtype, aligned=mask.is_dense)))
        numbers += mask.numbers()
        constants |= mask.constants()
    if Feature.WINDOW in features:
        left, right = reach(problem)
        numbers += [(NumberArgument(name="window_left"), left), (NumberArgument(name="window_right"), right)]
    if Feature.DROPOUT in features:
        tensors.append(("rng", TensorArgument(name="rng_ptr", dtype="i64", aligned=False)))
        numbers.append((NumberArgument(name="threshold", type="i64"), dropout.threshold(problem.dropout_p)))
        numbers.append((NumberArgument(name="keep_scale", type="fp32"), dropout.keep_scale(problem.dropout_p)))
    if Feature.VARLEN in features:
        tensors += [_lengths("cu_q"), _lengths("cu_k")]
        packed = packed_arguments(problem, padding)
        numbers += packed.numbers
        constants |= dict(packed.constants)
    return FeatureArguments(tensors=tuple(tensors), numbers=tuple(numbers), constants=tuple(constants.items()))


def packed_arguments(problem: Problem, padding: int) -> FeatureArguments:
    """What a kernel that visits rows of queries alone is given of packed sequences."""
    if not problem.is_varlen:
        return FeatureArguments()
    return FeatureArguments(
        tensors=(_lengths("cu_q"),),
        numbers=((NumberArgument(name="n_sequences"), problem.batch),),
        constants=(("PADDING", padding),),
    )


def log2_scale(problem: Problem, scale: float) -> float:
    """What brings products q . k, or what a softcap makes of them, to scores in base 2."""
    return (problem.softcap or scale) * _LOG2_E


def diagonal(problem: Problem) -> int:
    """Where queries stand among the keys; of packed sequences, how often the difference of their lengths is added."""
    return int(problem.alignment is Alignment.BOTTOM_RIGHT) if problem.is_varlen else problem.diagonal


def reach(problem: Problem) -> tuple[int, int]:
    """How many keys a query sees to the left and right of where it stands; a causal mask shows it none to the right."""
    left, right = (
        UNBOUNDED if bound is None else min(bound, UNBOUNDED) for bound in (problem.window_left, problem.window_right)
    )
    return left, 0 if problem.causal else right


def mask_operands(problem: Problem, extras: Extras) -> dict[str, Operand]:
    """How the mask of a call lies, if the problem has one.

    Raises:
        InvalidProblemError: if a tensor is missing that a feature of the problem looks at.
    """
    wanted = {
        "mask": problem.mask_tensor is not MaskTensor.NONE,
        "rng": problem.dropout_p > 0.0,
        "cu_seqlens_q": problem.is_varlen,
        "cu_seqlens_k": problem.is_varlen,
    }
    missing = [name for name, is_wanted in wanted.items() if is_wanted and getattr(extras, name) is None]
    if missing:
        raise InvalidProblemError(f"{' and '.join(missing)} must be given to a kernel of {Form.of(problem)}")
    return {"mask": MaskOperand.of(extras.mask)} if wanted["mask"] and extras.mask is not None else {}


def dense_masks(problem: Problem) -> dict[str, Operand]:
    """As :func:`mask_operands`, of a mask that is not there yet."""
    return {} if problem.mask_tensor is MaskTensor.NONE else {"mask": MaskOperand.dense(problem)}


def in_order(extras: Extras) -> tuple[Tensor | None, ...]:
    """The tensors of the features as :data:`backward_plan.TENSORS` has them; kernels read a bool mask as bytes."""
    mask = extras.mask
    if mask is not None and mask.dtype is torch.bool:
        mask = mask.view(torch.uint8)
    return mask, extras.rng, extras.cu_seqlens_q, extras.cu_seqlens_k


def _lengths(name: str) -> tuple[str, TensorArgument]:
    return name, TensorArgument(name=f"{name}_ptr", dtype="i32", aligned=False)
