"""The search space of the Hopper family: what its templates can be asked for, and what is likely to be fast."""

from __future__ import annotations

from collections.abc import Mapping

from autoflash.problem import Cell, DType, Feature, Mask, Pass
from autoflash.space import softmax
from autoflash.space.knob import Knob, Part, always
from autoflash.trial import Resources
from autoflash.variant import Choice, Choices, Variant

MAX_HEAD_DIM = 256

FEATURES = {Pass.FORWARD: frozenset({Feature.SOFTCAP, Feature.WINDOW}), Pass.BACKWARD: frozenset[Feature]()}
"""What the templates do beyond plain attention, alone and together."""

_ROWS = 64
_CONSUMERS = 2
# Of the four warps of a consumer that stores vectors.
_EXCHANGE_BYTES = 4 * 512


def lacking(op: Pass, features: tuple[Feature, ...]) -> tuple[Feature, ...]:
    """Those of the features that the templates of a pass do not have."""
    return tuple(feature for feature in features if feature not in FEATURES[op])


def width(cell: Cell) -> int:
    """Head dimension as a tile sees it: a power of two of at least one swizzled row."""
    return max(64, 1 << (cell.head_dim - 1).bit_length())


def is_split(structure: Mapping[str, Choice]) -> bool:
    """Whether dQ has a kernel of its own; else the one of dK and dV adds it up."""
    return structure.get("loop_order") == "split"


def owns_columns(structure: Mapping[str, Choice]) -> bool:
    """Whether a consumer accumulates half of the columns of dK and dV; else those of half of the keys."""
    return structure.get("consumer_owns") == "columns"


def keys_per_program(structure: Mapping[str, Choice]) -> int:
    """Keys whose gradients a program accumulates: 64 by each consumer, or 64 by both together."""
    return _ROWS if owns_columns(structure) else _CONSUMERS * _ROWS


def knobs(cell: Cell) -> tuple[Knob, ...]:
    """Structure and config knobs of the family for a cell."""
    return _forward_knobs(cell) if cell.op is Pass.FORWARD else _backward_knobs(cell)


def default(cell: Cell) -> dict[str, Choice]:
    """Choices that were fast on an H200 for the head dimension, each by itself if not all together, as a start."""
    large = width(cell) > 128
    if cell.op is Pass.BACKWARD:
        return {
            "loop_order": "split" if cell.deterministic or large else "key_outer",
            "consumer_owns": "columns" if large else "keys",
            "BLOCK_M": 128 if width(cell) == 64 else 64,
            **({"v_stages2": 1} if large else {}),
        }
    return {
        "q_operand": "shared" if large else "registers",
        "exponentials": "halves",
        "output": "vectors" if large else "tma",
        "schedule": "ticketed" if cell.mask is Mask.CAUSAL else "round_robin",
        "BLOCK_N": 64 if large else 128,
    }


def why_not(variant: Variant, cell: Cell, shared_bytes: int) -> str | None:
    """Why a variant cannot be right or fast for a cell, on a device with so much shared memory for a block."""
    if cell.dtype is DType.FP32:
        return "the family computes in fp16 and bf16"
    if cell.head_dim != cell.head_dim_v or cell.head_dim % 8 or cell.head_dim > MAX_HEAD_DIM:
        return f"the family takes equal head dims, multiples of 8 up to {MAX_HEAD_DIM}"
    if cell.op is Pass.BACKWARD:
        return _backward_why_not(variant, cell, shared_bytes)
    return _forward_why_not(variant, cell, shared_bytes)


def shared_need(variant: Variant, cell: Cell) -> int:
    """Bytes of shared memory of the main kernel's tiles, without barriers."""
    config, columns = variant.config, width(cell)
    if cell.op is Pass.BACKWARD:
        need = _key_kernel_bytes(variant, columns)
        return max(need, _query_kernel_bytes(config, columns)) if is_split(variant.structure) else need
    consumers = variant.structure.number("consumers")
    held = 2 if variant.structure["output"] == "tma" else 1
    keys_and_values = 2 * config.number("num_stages") * config.number("BLOCK_N")
    exchanged = consumers * _EXCHANGE_BYTES if variant.structure["output"] == "vectors" else 0
    return (held * consumers * _ROWS + keys_and_values) * columns * 2 + exchanged


def _key_kernel_bytes(variant: Variant, columns: int) -> int:
    """Of K, V, the rings of Q and dO, what consumers exchange, and the tiles of dQ that are added up by TMA."""
    config, structure = variant.config, variant.structure
    block_m = config.number("BLOCK_M")
    ring = (config.number("q_stages") + config.number("do_stages")) * block_m
    need = (2 * keys_per_program(structure) + ring) * columns * 2
    if owns_columns(structure) or not is_split(structure):
        need += 4 * _ROWS * block_m * 2
    if not owns_columns(structure) and not is_split(structure):
        need += 2 * (columns // 2 if block_m == _ROWS else columns) * _ROWS * 4
    return need


def _query_kernel_bytes(config: Choices, columns: int) -> int:
    """Of Q and dO of both consumers and the rings of K and V."""
    ring = (config.number("k_stages2") + config.number("v_stages2")) * config.number("BLOCK_N2")
    return (2 * _CONSUMERS * _ROWS + ring) * columns * 2


def score(variant: Variant, cell: Cell, resources: Resources | None) -> float:
    """A rank for candidates before any is timed; the weights follow the paired measurements on an H200."""
    spills = resources.spill_bytes if resources is not None else 0
    rank = -0.2 - 0.002 * spills if spills else 0.0
    config, structure = variant.config, variant.structure
    if cell.op is Pass.BACKWARD:
        rank += 0.5 if config["BLOCK_M"] == (128 if width(cell) == 64 else 64) else 0.0
        rank += 0.1 if structure["dv_issue"] == "after_dp" else 0.0
        # Seven products for five, which pays where additions to dQ are most of the traffic.
        rank += 0.3 if is_split(structure) == (width(cell) > 128) else 0.0
        return rank + 0.02 * (config.number("q_stages") + config.number("do_stages"))
    consumers = structure.number("consumers")
    is_short = cell.q_bucket <= 10
    preferred = 3 if width(cell) == 64 and not is_short else 2
    rank += {0: 0.5, 1: 0.2}.get(abs(consumers - preferred), 0.0)
    rank += 0.5 if config["BLOCK_N"] == (128 if width(cell) <= 128 else 64) else 0.0
    rank += 0.2 if structure["exponentials"] == ("halves" if consumers < 3 else "whole") else 0.0
    rank += 0.2 if structure["output"] == ("tma" if width(cell) <= 128 else "vectors") else 0.0
    rank += 0.2 if structure["q_operand"] == "registers" else 0.0
    rank += 0.3 if structure["schedule"] == "ticketed" else 0.0
    rank += 0.2 if config["persistent"] == 1 else 0.0
    rank += softmax.score(structure)
    return rank + 0.02 * config.number("num_stages")


def _forward_knobs(cell: Cell) -> tuple[Knob, ...]:
    structure, config = Part.STRUCTURE, Part.CONFIG
    causal = cell.mask is Mask.CAUSAL
    return (
        Knob(name="consumers", part=structure, values=(1, 2, 3), default=2),
        Knob(name="q_operand", part=structure, values=("registers", "shared"), default="registers"),
        Knob(name="exponentials", part=structure, values=("whole", "halves"), default="halves"),
        Knob(name="ping_pong", part=structure, values=("off", "on"), default="off", applies=_take_turns),
        Knob(
            name="schedule",
            part=structure,
            # Drawing tickets costs 2 % where all tiles are equal.
            values=("round_robin", "ticketed") if causal else ("round_robin",),
            default="round_robin",
        ),
        Knob(name="output", part=structure, values=("tma", "direct", "vectors", "through_q"), default="tma"),
        *((softmax.rescale_knob(_is_whole), softmax.exp2_knob(always)) if softmax.gains(cell) else ()),
        Knob(name="BLOCK_N", part=config, values=(64, 128), default=128),
        Knob(name="num_stages", part=config, values=(2, 3, 4), default=2),
        Knob(name="persistent", part=config, values=(0, 1), default=1),
    )


def _backward_knobs(cell: Cell) -> tuple[Knob, ...]:
    structure, config = Part.STRUCTURE, Part.CONFIG
    order = Knob(name="loop_order", part=structure, values=("key_outer", "split"), default="key_outer", came_later=True)
    owns = Knob(name="consumer_owns", part=structure, values=("keys", "columns"), default="keys", came_later=True)
    ahead = Knob(
        name="s_issue",
        part=structure,
        values=("own_step", "step_before"),
        default="own_step",
        applies=_owns_columns_split,
        came_later=True,
    )
    return (
        order,
        *((owns, ahead) if width(cell) > 128 else ()),
        Knob(name="dv_issue", part=structure, values=("after_dp", "before_dp"), default="after_dp", applies=_owns_keys),
        Knob(name="BLOCK_M", part=config, values=(64, 128), default=64),
        Knob(name="q_stages", part=config, values=(2, 3), default=2),
        Knob(name="do_stages", part=config, values=(2, 3), default=2),
        Knob(name="BLOCK_N2", part=config, values=(64, 128), default=64, applies=is_split),
        Knob(name="k_stages2", part=config, values=(2, 3), default=2, applies=is_split),
        Knob(name="v_stages2", part=config, values=(1, 2), default=2, applies=is_split),
    )


def _owns_keys(choices: Mapping[str, Choice]) -> bool:
    return not owns_columns(choices)


def _owns_columns_split(choices: Mapping[str, Choice]) -> bool:
    # Scores ahead of their step were 7 % slower beside additions to dQ.
    return owns_columns(choices) and is_split(choices)


def _take_turns(choices: Mapping[str, Choice]) -> bool:
    return choices["consumers"] != 1


def _is_whole(choices: Mapping[str, Choice]) -> bool:
    # In halves, the accumulator is rescaled in the shadow of exponentials.
    return choices["exponentials"] == "whole"


def _forward_why_not(variant: Variant, cell: Cell, shared_bytes: int) -> str | None:
    structure, config, columns = variant.structure, variant.config, width(cell)
    consumers = structure.number("consumers")
    if consumers > 1 and (consumers - 1) * _ROWS >= max(_ROWS, 2**cell.q_bucket):
        return f"{consumers} consumers of {_ROWS} rows for at most {2**cell.q_bucket} queries"
    if structure["schedule"] == "ticketed" and not config.number("persistent"):
        return "tickets are for a grid that stays"
    if config.number("BLOCK_N") * columns > 128 * 128:
        return "scores and output of so large a block are more registers than a consumer has"
    if structure["q_operand"] == "registers" and (columns > 128 or consumers == 3):
        return "there are no registers left for Q"
    if consumers == 3 and columns > 64:
        return "three consumers have registers for head dims up to 64"
    return _too_large(variant, cell, shared_bytes)


def _backward_why_not(variant: Variant, cell: Cell, shared_bytes: int) -> str | None:
    if cell.deterministic and not is_split(variant.structure):
        return "dQ is added up in any order: it is not deterministic"
    by_columns = owns_columns(variant.structure)
    if width(cell) > 128 and not by_columns:
        return "two accumulators of 64 keys leave registers for head dims up to 128"
    if by_columns and variant.config.number("BLOCK_M") != _ROWS:
        return f"a consumer has the {_ROWS} rows of one wgmma"
    if not by_columns and variant.config.number("BLOCK_M") * width(cell) > 128 * 64:
        return "scores of so large a tile are more registers than a consumer has"
    if is_split(variant.structure) and width(cell) // 2 + variant.config.number("BLOCK_N2") > 192:
        return "scores and dQ of so large a block are more registers than a consumer has"
    return _too_large(variant, cell, shared_bytes)


def _too_large(variant: Variant, cell: Cell, shared_bytes: int) -> str | None:
    need = shared_need(variant, cell)
    # Two thread blocks of one consumer are to share a multiprocessor.
    limit = shared_bytes // 2 if variant.structure.get("consumers") == 1 else shared_bytes
    return f"the tiles need {need} bytes of shared memory, there are {limit}" if need + 1024 > limit else None
