"""Operation, cell and device in; search space out. The numbers here say what may be tried, never what is best."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from autoflash.device import Device, DeviceKind
from autoflash.problem import Cell, DType, Feature, Mask, Parallelism, Pass
from autoflash.space import constraint, cost, hopper, softmax
from autoflash.space.knob import Knob, Part, always, spellings, split
from autoflash.variant import Choice, Choices, Family, Variant

# 60 KiB fits every class of shared memory per block: 64 KiB (CDNA 3), 99 KiB (sm_86, sm_89, sm_120), 163 KiB
# (sm_80), 227 KiB (sm_90, sm_100).
SAFE_SHARED_BYTES = 60 * 1024

# Half of the 255 registers for accumulators leaves room for scores and operands without spills.
_MOST_ACCUMULATORS = 128

# The tiles of the fastest backward of D = 256 in plain Triton on an H200 (a prototype in one launch, bf16), and smaller
# ones for 116 KB.
_WIDE_BACKWARD: tuple[dict[str, Choice], ...] = (
    {"BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 2, "BLOCK_M2": 128, "BLOCK_N2": 64, "num_stages2": 1},
    {"BLOCK_M": 32, "BLOCK_N": 64, "num_stages": 1, "BLOCK_M2": 64, "BLOCK_N2": 32, "num_stages2": 1},
)

# 0 takes all heads at once.
_HEADS_PER_STEP = (1, 4, 0)
_PORTABLE_BLOCKS = (64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """All variants of one family for one cell on one device.

    Attributes:
        cell, device, family: What the space is for.
        knobs: In the order in which they depend on each other.
    """

    cell: Cell
    device: Device
    family: Family
    knobs: tuple[Knob, ...]
    _scores: dict[Variant, float] = field(default_factory=dict, compare=False, repr=False)

    def variant(self, choices: Mapping[str, Choice]) -> Variant:
        """The variant that flat choices name; knobs left out take their default."""
        structure, config = split(self.knobs, choices)
        return Variant(family=self.family, structure=structure, config=config)

    def normalise(self, variant: Variant) -> Variant:
        """The one spelling of a variant: inapplicable structure knobs at their default, config knobs absent."""
        return self.variant({**variant.structure, **variant.config})

    def default(self) -> Variant:
        """A variant without preconditions that fits every class of shared memory, or as many as one can.

        Where that leaves a backward of wide heads only tiny tiles, it has larger ones that this device has the memory
        for. Of very long heads none may fit: :meth:`why_no_default` says so.
        """
        if self.family is Family.GLUON_SM90:
            return self.variant(hopper.default(self.cell))
        if self.family is not Family.TRITON:
            return self.variant({})
        safe = self.variant(_safe_blocks(self.cell, self.knobs))
        return next((larger for larger in self._larger_than(safe) if self._fits(larger)), safe)

    def _larger_than(self, safe: Variant) -> Iterator[Variant]:
        """Tilings of a backward of wide heads, fastest first; none where the safe one is not tiny."""
        tiny = self.cell.op is Pass.BACKWARD and safe.config["BLOCK_N"] in (16, 32)
        compact = self.cell.dtype is not DType.FP32 and not cost.mask_bytes(self.cell)
        if tiny and compact and self.device.kind is DeviceKind.CUDA:
            yield from (self.variant({**numbers, "num_warps": 8, "num_warps2": 8}) for numbers in _WIDE_BACKWARD)

    def _fits(self, variant: Variant) -> bool:
        """Whether a variant surely compiles for the device, and fills its blocks and no more than its registers."""
        roomy = cost.most_shared_bytes(variant, self.cell, self.device) <= self.device.shared_bytes
        return roomy and self.why_not(variant) is None and all(map(_suits, cost.tiles(variant, self.cell)))

    def why_no_default(self) -> str | None:
        """Why not even the default is sure to run on the device; None where it is."""
        default = self.default()
        reason = constraint.why_not(default, self.cell, self.device)
        if reason is not None or self.family is not Family.TRITON:
            return reason
        need, there_is = cost.most_shared_bytes(default, self.cell, self.device), self.device.shared_bytes
        if need > there_is:
            return f"the smallest tiles may need {need} bytes of shared memory, {self.device.arch} has {there_is}"
        return None

    def why_not(self, variant: Variant) -> str | None:
        """Why a variant is not in the space; None where it is."""
        if variant.family is not self.family:
            return f"{variant.family.value} is not {self.family.value}"
        flat = {**variant.structure, **variant.config}
        for knob in self.knobs:
            if knob.name in flat and flat[knob.name] not in knob.values:
                return f"{knob.name}={flat[knob.name]} is not one of {', '.join(map(str, knob.values))}"
        if self.normalise(variant) != variant:
            return "a knob that means nothing here is set, or one that is needed is missing"
        return constraint.why_not(variant, self.cell, self.device)

    def variants(self) -> list[Variant]:
        """Every variant that satisfies the constraints, in a fixed order."""
        return list(self.scores())

    def scores(self) -> dict[Variant, float]:
        """The same with the static score of each; made once for all cells that share the space."""
        if not self._scores:
            for structure, config in spellings(self.knobs):
                variant = Variant(family=self.family, structure=structure, config=config)
                if constraint.why_not(variant, self.cell, self.device) is None:
                    self._scores[variant] = cost.score(variant, self.cell, self.device)
        return dict(self._scores)


def families(op: Pass, device: Device, features: tuple[Feature, ...] = ()) -> tuple[Family, ...]:
    """The generated families that can run on a device, best first.

    Args:
        op: Forward or backward.
        device: Where.
        features: What is asked for beyond plain attention, which not every family does.
    """
    if device.kind is DeviceKind.CPU:
        return (Family.TORCH_TILED,)
    if device.arch == "sm_90" and not hopper.lacking(op, features):
        return (Family.GLUON_SM90, Family.TRITON, Family.TORCH_TILED)
    return (Family.TORCH_TILED,) if constraint.is_left_to_torch(features) else (Family.TRITON, Family.TORCH_TILED)


def search_space(cell: Cell, device: Device, family: Family) -> SearchSpace:
    """What may be tried for a cell.

    Raises:
        ValueError: for the vendor family, which has no knobs; see :func:`vendors`.
    """
    # Cells that differ only in what the space does not look at share one enumeration, which takes a second.
    return replace(_search_space(_essentials(cell), device, family), cell=cell)


def _essentials(cell: Cell) -> Cell:
    """The cell without what no knob and no constraint looks at: the longest block is 2048."""
    longest = 11
    return replace(
        cell,
        dtype=DType.BF16 if cell.dtype is DType.FP16 else cell.dtype,
        group=1,
        q_bucket=min(cell.q_bucket, longest),
        k_bucket=min(cell.k_bucket, longest),
        window_bucket=min(cell.window_bucket, longest),
    )


@lru_cache(maxsize=32)
def _search_space(cell: Cell, device: Device, family: Family) -> SearchSpace:
    if family is Family.TORCH_TILED:
        knobs = _portable_knobs(cell)
    elif family is Family.GLUON_SM90:
        knobs = hopper.knobs(cell)
    elif family is Family.TRITON:
        knobs = _forward_knobs(cell, device) if cell.op is Pass.FORWARD else _backward_knobs(cell, device)
    else:
        raise ValueError(f"the family {family.value} has no search space")
    return SearchSpace(cell=cell, device=device, family=family, knobs=knobs)


def vendors(cell: Cell, device: Device) -> tuple[Variant, ...]:
    """Vendor kernels worth asking; whether one can do the problem, its executable says. None is asked for features."""
    if cell.features:
        return ()
    if device.kind is DeviceKind.CPU:
        backends: tuple[str, ...] = ("flash", "math")
    elif cell.dtype is DType.FP32:
        backends = ("efficient", "math")
    else:
        backends = ("cudnn", "flash", "efficient", "math")
    return tuple(
        Variant(family=Family.VENDOR, structure=Choices(backend=backend), config=Choices()) for backend in backends
    )


def has_precondition(variant: Variant) -> bool:
    """Whether a variant asks something of strides or alignment: tensor descriptors do."""
    return variant.family is Family.GLUON_SM90 or variant.structure.get("loads") == "tma"


def _query_outer(choices: Mapping[str, Choice]) -> bool:
    return choices["loop_order"] == "query_outer"


def _holds_p_for_later(choices: Mapping[str, Choice]) -> bool:
    # With vectors in two tiles, `verify --all` found wrong outputs and illegal accesses on an H200 (Triton 3.6, D = 80,
    # bf16, one stage), where the interpreter is right. Why is not known.
    return _query_outer(choices) and choices.get("head_dim_tiles", "padded") == "padded"


def _pv_follows(choices: Mapping[str, Choice]) -> bool:
    return choices["loop_order"] == "query_outer" and choices["pv_order"] == "after_softmax"


def _waits_for_exponentials(choices: Mapping[str, Choice]) -> bool:
    return choices["loop_order"] == "fused" and choices["dot_order"] == "scores_first"


def _has_query_program(choices: Mapping[str, Choice]) -> bool:
    return choices["loop_order"] in ("split", "fused")


def _is_split(choices: Mapping[str, Choice]) -> bool:
    return choices["loop_order"] == "split"


def _is_fused(choices: Mapping[str, Choice]) -> bool:
    return choices["loop_order"] == "fused"


def _columns(cell: Cell) -> int:
    return cost.padded(max(cell.head_dim, cell.head_dim_v))


def _owned(cell: Cell, bucket: int) -> tuple[int, ...]:
    """Lengths of the block that a program owns. Where tiles are few or registers scarce, small ones too."""
    wide = _columns(cell) > 128
    if cell.dtype is DType.FP32:
        return _up_to(bucket, (16, 32) if wide else (32, 64))
    if _columns(cell) > 256:
        return _up_to(bucket, (16, 32, 64))
    if cell.parallelism is not Parallelism.HIGH or bucket < 7:
        return _up_to(bucket, (16, 32, 64, 128))
    return (32, 64, 128) if wide else (64, 128)


def _stepped(cell: Cell, bucket: int) -> tuple[int, ...]:
    """Lengths of one step along the other sequence."""
    wide = _columns(cell) > 128
    if cell.dtype is DType.FP32:
        return _up_to(bucket, (16, 32) if wide else (16, 32, 64))
    return _up_to(bucket, (16, 32, 64) if wide else (32, 64, 128))


def _up_to(bucket: int, blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Those that a sequence of the bucket fills, and at least the smallest."""
    return tuple(block for block in blocks if block <= 2**bucket) or blocks[:1]


def _hides_keys(cell: Cell) -> bool:
    """Whether some tiles are seen in part and some not at all."""
    return cell.mask is Mask.CAUSAL or Feature.WINDOW in cell.features


def _stages(device: Device) -> tuple[int, ...]:
    return (1, 2) if device.kind is DeviceKind.HIP else (1, 2, 3, 4)


def _head_dim_tiles(cell: Cell) -> tuple[Knob, ...]:
    """The knob of vectors in two tiles, where they take fewer columns so."""
    in_parts = cost.tiling_in_parts(cell)
    if in_parts is None:
        return ()
    knob = Knob(
        name="head_dim_tiles",
        part=Part.STRUCTURE,
        values=("padded", in_parts),
        default="padded",
        # A forward with keys outside is there for comparison.
        applies=_query_outer if cell.op is Pass.FORWARD else always,
        came_later=True,
    )
    return (knob,)


def _softmax_knobs(cell: Cell, device: Device) -> tuple[Knob, ...]:
    """What FlashAttention-4 does to the exponentials, and forward to the running maximum, on NVIDIA GPUs."""
    if device.kind is not DeviceKind.CUDA or not softmax.gains(cell):
        return ()
    if cell.op is Pass.BACKWARD:
        return (softmax.exp2_knob(_waits_for_exponentials),)
    # Beside a P that waits in registers, the branch makes the largest tiles spill: 208 bytes at D = 128 on sm_90.
    return softmax.rescale_knob(_pv_follows), softmax.exp2_knob(_query_outer)


def _forward_knobs(cell: Cell, device: Device) -> tuple[Knob, ...]:
    hides = _hides_keys(cell)
    structure = Part.STRUCTURE
    rows, steps = _owned(cell, cell.q_bucket), _stepped(cell, cell.k_bucket)
    loads = ("pointer", "tma") if device.has_tma else ("pointer",)
    mask_loops = ("split", "branch") if hides else ("split",)
    if hides and Feature.BLOCK_MASK in cell.features:
        # The blocks of a list do not stand in the order of what positions hide.
        mask_loops = ("branch",)
    return (
        Knob(name="loop_order", part=structure, values=("query_outer", "key_outer"), default="query_outer"),
        Knob(name="loads", part=structure, values=loads, default="pointer", applies=_query_outer),
        *_head_dim_tiles(cell),
        Knob(
            name="pv_order",
            part=structure,
            values=("after_softmax", "under_next_softmax"),
            default="after_softmax",
            applies=_holds_p_for_later,
        ),
        *_softmax_knobs(cell, device),
        Knob(
            name="row_sum",
            part=structure,
            values=("each_block", "per_thread"),
            default="each_block",
            applies=_query_outer,
        ),
        Knob(
            name="mask_loops",
            part=structure,
            values=mask_loops,
            default=mask_loops[0],
            applies=_query_outer,
        ),
        Knob(
            name="tile_order",
            part=structure,
            # Heads first costs up to a fifth without a mask: it gives up the reuse of K and V in L2.
            values=("rows_first", "heads_first") if hides else ("rows_first",),
            default="rows_first",
            applies=_query_outer,
        ),
        *_batch_order(cell, _query_outer),
        *_schedule("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", rows, steps, _stages(device)),
    )


def _backward_knobs(cell: Cell, device: Device) -> tuple[Knob, ...]:
    hides = _hides_keys(cell)
    structure, config = Part.STRUCTURE, Part.CONFIG
    key_rows, query_steps = _owned(cell, cell.k_bucket), _stepped(cell, cell.q_bucket)
    query_rows, key_steps = _owned(cell, cell.q_bucket), _stepped(cell, cell.k_bucket)
    stages = _stages(device)[:3]
    loads = ("pointer", "tma") if device.has_tma else ("pointer",)
    return (
        Knob(name="loop_order", part=structure, values=("key_outer", "split", "fused"), default="split"),
        Knob(name="loads", part=structure, values=loads, default="pointer"),
        *_head_dim_tiles(cell),
        Knob(
            name="mask_loops",
            part=structure,
            values=("branch", "everywhere") if hides else ("branch",),
            default="branch",
        ),
        Knob(name="dot_order", part=structure, values=("textbook", "scores_first"), default="textbook"),
        *_softmax_knobs(cell, device),
        Knob(
            name="tile_order",
            part=structure,
            values=("per_head", "per_kind"),
            default="per_head",
            applies=_is_fused,
        ),
        *_batch_order(cell),
        *_schedule("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", query_steps, key_rows, stages),
        Knob(name="BLOCK_M2", part=config, values=query_rows, default=query_rows[0], applies=_has_query_program),
        Knob(name="BLOCK_N2", part=config, values=key_steps, default=key_steps[0], applies=_has_query_program),
        Knob(name="num_warps2", part=config, values=(4, 8), default=4, applies=_is_split),
        Knob(name="num_stages2", part=config, values=stages, default=1, applies=_has_query_program),
        *_term_knobs(cell),
    )


def _batch_order(cell: Cell, applies: Callable[[Mapping[str, Choice]], bool] = always) -> tuple[Knob, ...]:
    """The knob of which programs run at the same time where a bias is read, which the batch may share."""
    order = ("innermost", "outermost")
    knob = Knob(name="batch_order", part=Part.STRUCTURE, values=order, default=order[0], applies=applies)
    return (knob,) if Feature.BIAS in cell.features else ()


def _query_program_loads_ahead(choices: Mapping[str, Choice]) -> bool:
    return choices.get("num_stages2") == 2


def _term_knobs(cell: Cell) -> tuple[Knob, ...]:
    """Of the kernels of the gradients of a bias, of slopes and of parameters.

    Their tiles are fixed: of 128 rows, three float32 tiles of scores spill by hundreds of bytes in 8 warps.
    """
    if constraint.TERM_GRADIENTS.isdisjoint(cell.features):
        return ()
    # With every other choice, it would double the largest of spaces.
    knob = Knob(
        name="num_stages_term",
        part=Part.CONFIG,
        values=(1, 2),
        default=1,
        applies=_query_program_loads_ahead,
        came_later=True,
    )
    return (knob,)


def _schedule(
    rows_name: str,
    step_name: str,
    warps_name: str,
    stages_name: str,
    rows: tuple[int, ...],
    steps: tuple[int, ...],
    stages: tuple[int, ...],
) -> tuple[Knob, ...]:
    config = Part.CONFIG
    return (
        Knob(name=rows_name, part=config, values=rows, default=rows[0]),
        Knob(name=step_name, part=config, values=steps, default=steps[0]),
        Knob(name=warps_name, part=config, values=(4, 8), default=4),
        Knob(name=stages_name, part=config, values=stages, default=1),
    )


def _portable_knobs(cell: Cell) -> tuple[Knob, ...]:
    config = Part.CONFIG
    rows = tuple(block for block in _PORTABLE_BLOCKS if block <= max(64, 2**cell.q_bucket))
    steps = tuple(block for block in _PORTABLE_BLOCKS if block <= max(64, 2**cell.k_bucket))
    return (
        Knob(name="loop_order", part=Part.STRUCTURE, values=("query_outer", "key_outer"), default="query_outer"),
        Knob(name="block_m", part=config, values=rows, default=min(128, rows[-1])),
        Knob(name="block_n", part=config, values=steps, default=min(256, steps[-1])),
        Knob(name="heads_per_step", part=config, values=_HEADS_PER_STEP, default=0),
    )


def _safe_blocks(cell: Cell, knobs: tuple[Knob, ...]) -> dict[str, Choice]:
    """The largest of a few plain tilings whose shared memory fits everywhere; else the smallest."""
    sizes = (64, 32, 16)
    chosen: dict[str, Choice] = {}
    for rows, step in ((rows, step) for rows in sizes for step in sizes if step <= rows):
        owned = {"BLOCK_M": rows, "BLOCK_N": step}
        if cell.op is Pass.BACKWARD:
            # The key program owns BLOCK_N rows, the query program BLOCK_M2.
            owned = {"BLOCK_M": step, "BLOCK_N": rows, "BLOCK_M2": rows, "BLOCK_N2": step}
        structure, config = split(knobs, owned)
        chosen = dict(owned)
        variant = Variant(family=Family.TRITON, structure=structure, config=config)
        if _is_safe(variant, cell):
            break
        if max(tile.accumulator_registers(32) for tile in cost.tiles(variant, cell)) >= _MOST_ACCUMULATORS:
            # Twice the threads have room for the accumulators of the smallest tiles.
            chosen |= {"num_warps": 8, "num_warps2": 8}
    return chosen


def _is_safe(variant: Variant, cell: Cell) -> bool:
    roomy = cost.shared_bytes(variant, cell) <= SAFE_SHARED_BYTES
    return roomy and all(
        _suits(tile) and (cell.dtype is not DType.FP32 or tile.rows * tile.accumulated <= 64 * 64 * tile.accumulators)
        for tile in cost.tiles(variant, cell)
    )


def _suits(tile: cost.Tile) -> bool:
    """Whether the accumulators leave registers, and the sequences fill the blocks."""
    return (
        tile.accumulator_registers(32) <= _MOST_ACCUMULATORS
        and tile.rows <= max(16, tile.rows_there_are)
        and tile.step <= max(16, tile.steps_there_are)
    )
