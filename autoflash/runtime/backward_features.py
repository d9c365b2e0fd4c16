"""What the features of a problem add to the backward kernels of the Triton family: tensors, numbers and constants."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from autoflash.errors import InvalidProblemError
from autoflash.problem import Alignment, Feature, Form, MaskTensor, Problem
from autoflash.runtime import dropout
from autoflash.runtime.executable import Extras
from autoflash.runtime.launch import Constant, Number, NumberArgument, TensorArgument
from autoflash.runtime.layouts import MaskOperand, Operand, reach, usual_bias_shape
from autoflash.runtime.params import ParamOperand, as_kernels_read, has_params, param_operands, usual_params

_LOG2_E = math.log2(math.e)
_BLOCKS = ("query_blocks", "key_blocks")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedMask(Operand):
    """A mask tensor or a bias among the operands of a call.

    Attributes:
        mask: What its kernels look at.
    """

    mask: MaskOperand


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedParam(Operand):
    """A parameter of an expression among the operands of a call.

    Attributes:
        param: What its kernels look at.
    """

    param: ParamOperand


def feature_arguments(problem: Problem, scale: float, placed: Mapping[str, Operand], padding: int) -> FeatureArguments:
    """What the kernels that visit tiles are given.

    Args:
        problem: Of any form; without features, nothing is added.
        scale: Factor of the scores.
        placed: The operands of the call; the mask tensor, the bias and the parameters among them are looked at.
        padding: Rows that the workspaces of packed sequences are padded to.
    """
    tensors: list[tuple[str, TensorArgument]] = []
    numbers: list[tuple[NumberArgument, Number]] = []
    constants: dict[str, Constant] = {}
    features = problem.features
    if Feature.SOFTCAP in features:
        numbers.append((NumberArgument(name="steepness", type="fp32"), scale / problem.softcap))
    for name in ("mask", "bias"):
        operand = placed.get(name)
        if isinstance(operand, PlacedMask):
            mask = operand.mask
            tensors.append((name, TensorArgument(name=f"{name}_ptr", dtype=mask.dtype, aligned=mask.is_aligned)))
            numbers += mask.numbers().items()
            constants |= mask.constants()
    if Feature.ALIBI in features:
        tensors.append(("slopes", TensorArgument(name="slopes_ptr", dtype="fp32", aligned=False)))
        slopes = placed.get("slopes")
        numbers.append((NumberArgument(name="stride_slopes_b"), 0 if slopes is None else slopes.strides[0]))
    for param in placed_params(placed.values()):
        tensors.append((param.name, param.tensor))
        numbers += param.numbers().items()
        constants |= param.constants()
    if Feature.WINDOW in features:
        left, right = reach(problem)
        numbers += [(NumberArgument(name="window_left"), left), (NumberArgument(name="window_right"), right)]
    if Feature.DROPOUT in features:
        tensors.append(("rng", TensorArgument(name="rng_ptr", dtype="i64", aligned=False)))
        numbers.append((NumberArgument(name="threshold", type="i64"), dropout.threshold(problem.dropout_p)))
        numbers.append((NumberArgument(name="keep_scale", type="fp32"), dropout.keep_scale(problem.dropout_p)))
    if Feature.BLOCK_MASK in features:
        for name in _BLOCKS:
            tensors.append((name, TensorArgument(name=f"{name}_ptr", dtype="i32", aligned=False)))
            strides = placed[name].strides if name in placed else (0, 0)
            numbers += [
                (NumberArgument(name=f"stride_{name}_{dim}"), stride) for dim, stride in zip("bh", strides, strict=True)
            ]
        constants["SPARSE_BLOCK"] = problem.block_size
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


def mask_operands(problem: Problem, extras: Extras) -> dict[str, Operand]:
    """How the mask, the bias and the parameters of a call lie, as far as the problem has them.

    Raises:
        InvalidProblemError: if a tensor is missing that a feature of the problem looks at.
    """
    wanted = {
        "mask": problem.mask_tensor is not MaskTensor.NONE,
        "rng": problem.dropout_p > 0.0,
        "cu_seqlens_q": problem.is_varlen,
        "cu_seqlens_k": problem.is_varlen,
        "sinks": problem.sinks,
        "bias": problem.bias,
        "alibi_slopes": problem.alibi,
        **dict.fromkeys(_BLOCKS, problem.block_size > 0),
    }
    missing = [name for name, is_wanted in wanted.items() if is_wanted and getattr(extras, name) is None]
    if missing:
        raise InvalidProblemError(f"{' and '.join(missing)} must be given to a kernel of {Form.of(problem)}")
    placed: dict[str, Operand] = {name: mask for name, mask in placed_masks(extras).items() if wanted[name]}
    if problem.alibi and extras.alibi_slopes is not None:
        stride = slopes_stride(problem, extras)
        placed["slopes"] = Operand(shape=tuple(extras.alibi_slopes.shape), strides=(stride, 1), is_dense=False)
    for name in _BLOCKS:
        lists = getattr(extras, name)
        if problem.block_size and lists is not None:
            placed[name] = Operand(shape=tuple(lists.shape), strides=blocks_strides(lists), is_dense=False)
    return placed | {param.name: _placed_param(param) for param in param_operands(problem, extras)}


def placed_masks(extras: Extras) -> dict[str, PlacedMask]:
    """How the mask [B, H, M, N] and the bias of a call lie, by name; those that it has."""
    given = {"mask": extras.mask, "bias": extras.bias}
    return {name: _placed(x, name) for name, x in given.items() if x is not None}


def slopes_stride(problem: Problem, extras: Extras) -> int:
    """From the slopes of one batch entry to those of the next, in elements."""
    slopes = extras.alibi_slopes
    return 0 if slopes is None or slopes.shape[0] == 1 else problem.heads


def blocks_strides(lists: Tensor) -> tuple[int, int]:
    """From the lists of one batch entry, or head, to those of the next, in elements; 0 where they are shared."""
    batch, heads, rows, width = lists.shape
    return 0 if batch == 1 else heads * rows * width, 0 if heads == 1 else rows * width


def knows_layouts(problem: Problem, extras: Extras) -> bool:
    """Whether there is each tensor whose layout decides which kernels a problem needs."""
    has_mask = problem.mask_tensor is MaskTensor.NONE or extras.mask is not None
    has_all_params = bool(extras.params) or not has_params(problem)
    return has_mask and has_all_params and (not problem.bias or extras.bias is not None)


def usual_masks(problem: Problem) -> dict[str, Operand]:
    """As :func:`mask_operands`, of what is not at hand."""
    shape = (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
    usual = {
        "mask": (MaskOperand.usual(problem), shape),
        "bias": (MaskOperand.usual_bias(problem), usual_bias_shape(problem)),
    }
    params: dict[str, Operand] = {param.name: _placed_param(param) for param in usual_params(problem)}
    return params | {
        name: PlacedMask(shape=sizes, strides=mask.strides, is_dense=mask.is_aligned, mask=mask)
        for name, (mask, sizes) in usual.items()
        if mask is not None
    }


def in_order(extras: Extras) -> tuple[Tensor | None, ...]:
    """The tensors of the features as :data:`backward_plan.TENSORS` has them; kernels read a bool mask as bytes."""
    mask, params = extras.mask, as_kernels_read(extras.params)
    if mask is not None and mask.dtype is torch.bool:
        mask = mask.view(torch.uint8)
    single = (mask, extras.bias, extras.alibi_slopes, extras.rng, extras.cu_seqlens_q, extras.cu_seqlens_k)
    return *single, extras.query_blocks, extras.key_blocks, *params


def _lengths(name: str) -> tuple[str, TensorArgument]:
    return name, TensorArgument(name=f"{name}_ptr", dtype="i32", aligned=False)


def placed_params(operands: Iterable[Operand]) -> tuple[ParamOperand, ...]:
    """The parameters among the operands of a call, in order."""
    return tuple(operand.param for operand in operands if isinstance(operand, PlacedParam))


def _placed_param(param: ParamOperand) -> PlacedParam:
    return PlacedParam(shape=param.sizes, strides=param.strides, is_dense=False, param=param)


def _placed(mask: Tensor, name: str) -> PlacedMask:
    seen, looked_at = Operand.of(mask), MaskOperand.of(mask, name)
    return PlacedMask(shape=seen.shape, strides=seen.strides, is_dense=seen.is_dense, mask=looked_at)
