"""Where the elements of a [B, H, S, D] tensor lie: what kernels may be promised, and what outputs look like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autoflash.problem import DType, MaskTensor, Problem
from autoflash.runtime.launch import Constant, Layout, Number, NumberArgument
from autoflash.space.cost import Side, column_blocks, padded, splits_heads
from autoflash.variant import Choices

TORCH_TYPES = {DType.FP16: torch.float16, DType.BF16: torch.bfloat16, DType.FP32: torch.float32}
"""What torch calls the element types."""

ALIGNMENT_BYTES = 16
"""What vector loads and tensor maps want of addresses and strides."""

UNBOUNDED = 2**30
"""Reach of a window that is open to a side: more keys than there are, and int32 holds it beside a position."""

_MASK_TYPES = {torch.bool: "u8", **{torch_type: dtype.value for dtype, torch_type in TORCH_TYPES.items()}}
_MASK_BYTES = {"u8": 1, **{dtype.value: dtype.itemsize for dtype in DType}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A tensor of a call as far as its kernels look at it.

    Attributes:
        shape, strides: Of [B, H, S, D], strides in elements.
        is_dense: The last stride is 1; the address and the other strides are multiples of 16 bytes.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_dense: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Operand:
        """Look at a tensor."""
        shape, strides = tuple(tensor.shape), tensor.stride()
        is_aligned = tensor.data_ptr() % ALIGNMENT_BYTES == 0
        dense = is_aligned and has_dense_strides(shape, strides, tensor.element_size())
        return cls(shape=shape, strides=strides, is_dense=dense)

    @classmethod
    def planned(cls, shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> Operand:
        """A tensor that torch has yet to allocate: its address is aligned."""
        return cls(shape=tuple(shape), strides=tuple(strides), is_dense=has_dense_strides(shape, strides, item_bytes))

    @property
    def overlaps(self) -> bool:
        """Whether a dimension is expanded: several elements share an address."""
        return any(stride == 0 and size > 1 for size, stride in zip(self.shape, self.strides, strict=True))

    def kernel_strides(self) -> tuple[int, ...]:
        """The strides as a kernel is given them: 0 where there is one element, whatever torch says."""
        return tuple(0 if size == 1 else stride for size, stride in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskOperand:
    """A mask tensor or bias [B, H, M, N] of a call as far as its kernels look at it.

    Attributes:
        name: ``mask`` or ``bias``, by which kernels call it.
        dtype: As kernels name it; they read a boolean mask as bytes.
        strides: In elements, 0 where there is one element.
        is_aligned: The address and the strides but the last are multiples of 16 bytes.
    """

    name: str
    dtype: str
    strides: tuple[int, ...]
    is_aligned: bool

    @classmethod
    def of(cls, mask: Tensor, name: str = "mask") -> MaskOperand:
        """Look at a mask or bias."""
        strides = Operand.of(mask).kernel_strides()
        places = (mask.data_ptr(), *(stride * mask.element_size() for stride in strides[:3]))
        return cls(
            name=name,
            dtype=_MASK_TYPES[mask.dtype],
            strides=strides,
            is_aligned=all(place % ALIGNMENT_BYTES == 0 for place in places),
        )

    @classmethod
    def usual(cls, problem: Problem) -> MaskOperand | None:
        """What is compiled for where no mask is at hand: contiguous, of the problem's type if it is added."""
        if problem.mask_tensor is MaskTensor.NONE:
            return None
        is_bool = problem.mask_tensor is MaskTensor.BOOL
        shape = (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
        return cls.of(torch.empty(shape, dtype=torch.bool if is_bool else TORCH_TYPES[problem.dtype], device="meta"))

    @classmethod
    def usual_bias(cls, problem: Problem) -> MaskOperand | None:
        """Likewise of a bias: one that all sequences share."""
        if not problem.bias:
            return None
        return cls.of(torch.empty(usual_bias_shape(problem), dtype=TORCH_TYPES[problem.dtype], device="meta"), "bias")

    @property
    def has_rows(self) -> bool:
        """Whether queries have rows of their own; else one row serves them all."""
        return self.strides[2] != 0

    def constants(self) -> dict[str, Constant]:
        """What kernels are compiled with."""
        constants: dict[str, Constant] = {f"{self.name.upper()}_HAS_ROWS": self.has_rows}
        return constants | ({f"stride_{self.name}_n": 1} if self.strides[3] == 1 else {})

    def numbers(self) -> dict[NumberArgument, Number]:
        """The strides that kernels are given at launch, in the order of their parameters."""
        multiple_of = ALIGNMENT_BYTES // _MASK_BYTES[self.dtype] if self.is_aligned else 1
        arguments = [
            NumberArgument(name=f"stride_{self.name}_{dim}", type="i64", multiple_of=1 if dim == "n" else multiple_of)
            for dim in "bhmn"
        ]
        given = zip(arguments, self.strides, strict=True)
        return {argument: stride for argument, stride in given if argument.name not in self.constants()}


def usual_bias_shape(problem: Problem) -> tuple[int, int, int, int]:
    """What a bias is taken to be where none is at hand."""
    return 1, problem.heads, problem.seqlen_q, problem.seqlen_k


def reach(problem: Problem) -> tuple[int, int]:
    """How many keys a query sees to the left and right of its position, in the window form."""
    left, right = (
        UNBOUNDED if bound is None else min(bound, UNBOUNDED) for bound in (problem.window_left, problem.window_right)
    )
    return left, 0 if problem.causal else right


def slots(rows: int, sequences: int, block: int) -> int:
    """How many tiles the grid has room for where sequences are packed: see ``templates/triton/_sequences.py.j2``."""
    return rows // block + sequences + 1


def block_dim(head_dim: int, least: int = 16) -> int:
    """Columns of the tile that holds vectors of this length: a power of two, at least what a matrix unit can take."""
    return max(least, padded(head_dim))


def why_not_structure(problem: Problem, structure: Choices) -> str | None:
    """Why kernels of a structure cannot hold the vectors of a problem, or are not as exact as its type; None if fit."""
    dims = {Side.QK: problem.head_dim, Side.V: problem.head_dim_v}
    shortest = min((dim for side, dim in dims.items() if splits_heads(structure, side)), default=None)
    if shortest is not None and shortest <= 16:
        tiles = structure["head_dim_tiles"]
        return f"head_dim_tiles={tiles} needs vectors of more than 16 elements, some have {shortest}"
    if structure.get("exp2") == "polynomial" and problem.dtype is DType.FP32:
        return "exp2=polynomial is exact to 3e-6, which is for fp16 and bf16"
    return None


def width_constants(problem: Problem, structure: Choices) -> dict[str, Constant]:
    """What kernels are told of the length of vectors, and of their tiles: two have so many columns together."""
    return {
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_D": sum(column_blocks(problem.head_dim, structure, Side.QK)),
        "BLOCK_DV": sum(column_blocks(problem.head_dim_v, structure, Side.V)),
    }


def has_dense_strides(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> bool:
    """Last stride 1, the others multiples of 16 bytes; where there is one element, its stride is of no account."""
    return (strides[3] == 1 or shape[3] == 1) and all(
        size == 1 or stride * item_bytes % ALIGNMENT_BYTES == 0
        for size, stride in zip(shape[:3], strides[:3], strict=True)
    )


def strides_in_order_of(shape: Sequence[int], model: Tensor) -> tuple[int, ...]:
    """Strides of a dense tensor in the memory order of another; its last dimension is always innermost."""
    strides = [0, 0, 0, 1]
    step = shape[3]
    for dim in sorted(range(3), key=lambda dim: (model.stride(dim), -dim)):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def descriptor_layout(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> Layout:
    """What a tensor map may be told: strides of dimensions with one element are made lawful."""
    multiple = ALIGNMENT_BYTES // item_bytes
    lawful = [1] * 4
    above = -(-shape[3] // multiple) * multiple
    for dim in (2, 1, 0):
        lawful[dim] = above if shape[dim] == 1 else strides[dim]
        above = max(above, lawful[dim] * shape[dim])
    return Layout(shape=tuple(shape), strides=tuple(lawful))
