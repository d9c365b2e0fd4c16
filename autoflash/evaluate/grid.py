"""Which problems a kernel is verified on: its own specialisation, and the grid that every tuned kernel has passed."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from autoflash.evaluate.inputs import Lengths, Memory
from autoflash.evaluate.masks import MaskForm, Pattern
from autoflash.evaluate.terms import BiasForm
from autoflash.problem import Alignment, DType, Form, MaskTensor, Pass, Problem

_MAX_HEADS = 8

# Longer sequences are brought down to this plus their remainder by the largest block, which keeps every divisibility.
_REDUCED_SEQLEN = 512
_LARGEST_BLOCK = 256

# Prime, and many blocks of any size.
_LONG_SEQLEN = 4099

# Tiles of 128 queries for each multiprocessor.
_CROWD = 6

# The features of a case are taken from these lists in turn. The numbers of entries, but that of block sizes, have no
# common factor, so that the grid sees many pairs of them. None stands for the problem's own.
_WINDOWS: tuple[tuple[int | None, int | None] | None, ...] = (
    None,
    (17, 3),
    (0, 0),
    (None, 5),
    (40, None),
    (128, 128),
    (127, 0),
    (0, 64),
    (5000, 1),
)
_MASKS = (
    MaskForm(),
    MaskForm(dtype=DType.FP32),
    MaskForm(pattern=Pattern.FIRST_KEYS),
    MaskForm(pattern=Pattern.LAST_KEYS, dtype=DType.FP16),
    MaskForm(pattern=Pattern.PADDING),
    MaskForm(memory=Memory.TRANSPOSED, dtype=DType.BF16),
    MaskForm(pattern=Pattern.EACH_HEAD, memory=Memory.STRIDED),
    MaskForm(pattern=Pattern.EACH_BATCH),
    MaskForm(pattern=Pattern.ROWS),
    MaskForm(pattern=Pattern.NOTHING),
    MaskForm(pattern=Pattern.EVERYTHING),
)
_BIASES = (
    BiasForm(),
    BiasForm(own="hmn", dtype=DType.FP32),
    BiasForm(own="bn"),
    BiasForm(own="mn", memory=Memory.TRANSPOSED, has_holes=True),
    BiasForm(own="hm", dtype=DType.BF16),
    BiasForm(own="bmn", memory=Memory.STRIDED, has_holes=True),
    BiasForm(own="", dtype=DType.FP16),
)
# In so many cases one has slopes for each batch entry.
_SLOPES = 2
_SOFTCAPS = (None, 12.0, 1.0, 30.0)
_DROPOUTS = (None, 0.17, 0.9, 0.5, 0.01)
_BLOCK_SIZES = (None, 256, 128, 512)

# The second has bits in the upper halves of both numbers, and a negative sign.
_RNGS = ((20_240_607, 48), (-(2**62) + 5, 2**33 + 17))


# A power of two, so that gradients of one size are exact.
_FLAT_SCALE = 0.125


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem to verify a kernel on.

    Attributes:
        problem: With the sizes of the tensors.
        memory: How the tensors lie.
        scale: Factor of the scores; None is 1/sqrt(D).
        with_dlse: A backward also gets a gradient of the log-sum-exp.
        shared: Keys and values are expanded over the heads, and dout over everything.
        flat: All gradients have one size: see :func:`~autoflash.evaluate.inputs.draw_flat`.
        low: All scores lie far below 0.
        mask: What the problem's mask tensor hides, if it has one.
        bias: What the problem's bias is like, if it has one.
        own_slopes: Each batch entry or sequence has slopes of its own, if the problem has ALiBi.
        rng: Seed and offset of the problem's dropout, if it has one.
        lengths: Queries and keys of each sequence, where they are packed.
    """

    problem: Problem
    memory: Memory = Memory.DENSE
    scale: float | None = None
    with_dlse: bool = False
    shared: bool = False
    flat: bool = False
    low: bool = False
    mask: MaskForm | None = None
    bias: BiasForm | None = None
    own_slopes: bool = False
    rng: tuple[int, int] | None = None
    lengths: Lengths = ()

    @property
    def score_scale(self) -> float:
        """The factor of the scores as a number."""
        return 1.0 / math.sqrt(self.problem.head_dim) if self.scale is None else self.scale

    @property
    def values(self) -> Case:
        """The case without what has no influence on the right results: equal cases have equal ones."""
        mask = None if self.mask is None else dataclasses.replace(self.mask, memory=Memory.DENSE)
        bias = None if self.bias is None else dataclasses.replace(self.bias, memory=Memory.DENSE)
        problem = self.problem.replace(deterministic=False)
        return dataclasses.replace(self, memory=Memory.DENSE, problem=problem, mask=mask, bias=bias)

    def __str__(self) -> str:
        """For people, such as ``113x203 causal, heads 4/2, strided``."""
        problem = self.problem
        sizes = f"{problem.seqlen_q}x{problem.seqlen_k}"
        if self.lengths:
            sequences = [f"{q}x{k}" for q, k in self.lengths]
            named = "+".join(sequences) if len(sequences) < 8 else f"{len(sequences)} sequences"
            sizes = f"packed {named} in {problem.rows_q}x{problem.rows_k}"
        mask = problem.mask.value
        mask += f" {problem.alignment.value}" if problem.causal or problem.has_window else ""
        parts = [f"{sizes} {mask}", f"heads {problem.heads}/{problem.kv_heads}"]
        parts += [f"batch {problem.batch}"] if problem.batch > 1 and not self.lengths else []
        parts += [f"window {problem.window_left},{problem.window_right}"] if problem.has_window else []
        parts += [f"softcap {problem.softcap:g}"] if problem.softcap else []
        parts += [line for line in (problem.score_mod, problem.mask_mod) if line]
        parts += [f"blocks of {problem.block_size}"] if problem.block_size else []
        parts += [str(form) for form in (self.mask, self.bias) if form is not None]
        parts += ["slopes of each batch entry"] if self.own_slopes else []
        parts += [f"dropout {problem.dropout_p:g}"] if problem.dropout_p else []
        parts += [] if self.memory is Memory.DENSE else [self.memory.value]
        parts += [] if self.scale is None else [f"scale {self.scale}"]
        parts += ["with dlse"] if self.with_dlse else []
        parts += ["expanded"] if self.shared else []
        parts += ["gradients of one size"] if self.flat else []
        parts += ["low scores"] if self.low else []
        return ", ".join(parts)


def screen_cases(problem: Problem) -> tuple[Case, ...]:
    """The specialisation that is about to be timed, on sequences as short as it allows, and one irregular shape.

    A backward in bf16 also gets the smallest problem that has gradients of one size: of the other cases, none shows an
    error of one percent there. In the other types each does. (A dropout or an expression leaves no gradients of one
    size.)
    """
    irregular = _irregular(problem)
    cases = [_own(problem), _with_features(irregular, 1)]
    has_flat = not problem.dropout_p and not problem.score_mod and not problem.mask_mod
    if problem.op is Pass.BACKWARD and problem.dtype is DType.BF16 and has_flat:
        flat = _case(problem, 1, 2, flat=True, scale=_FLAT_SCALE, lengths=((1, 2),))
        bounds = {"window_left": 4, "window_right": 4} if problem.has_window else {}
        mask = MaskForm(pattern=Pattern.NOTHING)
        flat = dataclasses.replace(flat, problem=flat.problem.replace(**bounds))
        cases.append(_with_features(flat, 0, mask=mask, bias=BiasForm(is_zero=True)))
    return _checked(problem, cases)


def full_cases(problem: Problem) -> tuple[Case, ...]:
    """The grid: every specialisation that dispatch can select, and every border that a kernel can get wrong.

    All cases have the problem's form. Those of a problem with features take a window, a mask, a softcap and a dropout
    from lists of them; packed sequences have cases of their own.
    """
    bare = _packed_cases(problem) if problem.is_varlen else _dense_cases(problem)
    # Features shift against the cases by two: the screening has had the first ones.
    cases = [_with_features(case, number) for number, case in enumerate(bare, start=2)]
    if problem.mask_tensor is not MaskTensor.NONE or (problem.has_window and not problem.softcap):
        low = _case(problem, 88, 448, low=problem.mask_tensor is not MaskTensor.FLOAT)
        cases.append(_with_features(low, 1, mask=MaskForm(pattern=Pattern.FAR_BELOW)))
    return _checked(problem, [*screen_cases(problem), *cases])


def _dense_cases(problem: Problem) -> tuple[Case, ...]:
    top_left = Alignment.TOP_LEFT
    return (
        # Sequences that fill every block; one head for each key head, and several.
        _case(problem, 256, 256, batch=2, kv_heads=2, group=1, with_dlse=True),
        _case(problem, 256, 512, batch=2, kv_heads=2, group=2, memory=Memory.BSHD),
        _case(problem, 256, 256, memory=Memory.PACKED),
        _case(problem, 256, 256, memory=Memory.STRIDED, with_dlse=True),
        # Sequences that fill none; rows without keys under a causal mask where Sq > Sk.
        _case(problem, 331, 331, kv_heads=1, group=3),
        _case(problem, 203, 113, with_dlse=True),
        _case(problem, 203, 113, alignment=top_left, memory=Memory.BSHD),
        _case(problem, 113, 203, alignment=top_left, group=1),
        _case(problem, 131, 197, memory=Memory.STRIDED, group=2),
        _case(problem, 97, 160, memory=Memory.TRANSPOSED),
        _case(problem, 96, 65, shared=True, kv_heads=2),
        # One visible key, one row, nothing at all.
        _case(problem, 70, 1, group=2),
        _case(problem, 1, 300, memory=Memory.BSHD),
        _case(problem, 1, 1),
        _case(problem, 5, 0),
        _case(problem, 0, 5),
        # Many blocks one way or the other.
        _case(problem, 48, _LONG_SEQLEN, kv_heads=1),
        _case(problem, _LONG_SEQLEN, 48, alignment=top_left, kv_heads=1),
        # Other scales than the usual one.
        _case(problem, 64, 128, scale=-0.15),
        _case(problem, 64, 128, scale=0.0),
    )


def _packed_cases(problem: Problem) -> tuple[Case, ...]:
    top_left = Alignment.TOP_LEFT
    return (
        # Sequences that fill every block; one head for each key head, and several; views of a packed q, k, v.
        _packed(problem, ((256, 256), (512, 256)), kv_heads=2, group=1, with_dlse=True),
        _packed(problem, ((256, 512), (128, 128)), kv_heads=2, group=2, memory=Memory.PACKED),
        # Sequences that fill none, of one query or one key, with rows behind the last.
        _packed(problem, ((5, 5), (63, 63), (65, 65), (1, 1), (130, 130)), tail=(7, 7), kv_heads=1, group=3),
        _packed(problem, ((203, 113), (1, 300), (70, 1), (113, 203)), tail=(0, 300), with_dlse=True),
        _packed(problem, ((203, 113), (31, 97), (113, 203)), tail=(300, 0), alignment=top_left, memory=Memory.STRIDED),
        # Sequences without queries, without keys and without both: at the start, in the middle and at the end.
        _packed(problem, ((0, 0), (40, 50), (0, 0), (0, 0), (50, 40), (0, 0)), alignment=top_left),
        _packed(problem, ((0, 60), (60, 0), (17, 17), (0, 9), (9, 0)), tail=(3, 0), memory=Memory.BSHD),
        _packed(problem, ((60, 0), (17, 33), (0, 60)), tail=(0, 5), memory=Memory.TRANSPOSED, with_dlse=True),
        _packed(problem, ((5, 0),)),
        _packed(problem, ((0, 5),), tail=(6, 0)),
        _packed(problem, ((0, 0), (0, 0)), tail=(20, 30)),
        # More sequences than rows of a block.
        _packed(problem, tuple((n * 7 % 5, n * 5 % 4) for n in range(80)), tail=(1, 2), kv_heads=1),
        # Many blocks one way or the other.
        _packed(problem, ((3, 3), (48, _LONG_SEQLEN)), kv_heads=1),
        _packed(problem, ((_LONG_SEQLEN, 48), (3, 3)), alignment=top_left, kv_heads=1),
        _packed(problem, ((96, 65), (65, 96)), shared=True, kv_heads=2),
        # Other scales than the usual one.
        _packed(problem, ((64, 128), (30, 20)), scale=-0.15),
        _packed(problem, ((64, 128), (30, 20)), scale=0.0),
    )


def determinism_case(problem: Problem, multiprocessors: int) -> Case:
    """Enough heads that there are more tiles of 128 queries or keys than multiprocessors, so that the order varies."""
    heads = _case(problem, 512, 512).problem.heads
    batch = multiprocessors // (heads * 4) + 1
    case = _case(problem, 512, 512, batch=batch, lengths=((512, 512),) * batch)
    return _checked(problem, [_with_features(case, 0)])[0]


def crowded_case(problem: Problem, multiprocessors: int) -> Case:
    """Many tiles of one key block for each multiprocessor: where programs stay, the next tile presses on the last."""
    queries, keys = 1024, 128
    heads = _case(problem, queries, keys).problem.heads
    batch = multiprocessors * _CROWD // (heads * 8) + 1
    lengths = ((queries, keys),) * batch
    case = _case(problem, queries, keys, batch=batch, alignment=Alignment.TOP_LEFT, lengths=lengths)
    return _checked(problem, [_with_features(case, 0)])[0]


def _checked(problem: Problem, cases: list[Case]) -> tuple[Case, ...]:
    """The cases without repetitions, of which each must be served by the kernel of the problem."""
    for case in cases:
        if Form.of(case.problem) != Form.of(problem):
            raise AssertionError(f"{case} has the form {Form.of(case.problem)}, and not {Form.of(problem)}")
    return tuple(dict.fromkeys(cases))


_LEAST_ELEMENTS = 16
"""Of an output of a problem's own case."""


def _own(problem: Problem) -> Case:
    batch, kv_heads = min(problem.batch, 2), min(problem.kv_heads, 2)
    if problem.group * kv_heads > _MAX_HEADS:
        batch, kv_heads = min(batch, 1), 1
    seqlen_q, seqlen_k = reduced_seqlen(problem.seqlen_q), reduced_seqlen(problem.seqlen_k)
    if not problem.is_varlen:
        # The limit of a mean is for one of several errors: of a single row, all elements share one.
        fewest = kv_heads * max(min(seqlen_q, seqlen_k), 1) * min(problem.head_dim, problem.head_dim_v)
        batch = max(batch, _LEAST_ELEMENTS // fewest)
    case = Case(
        problem=problem.replace(
            batch=batch, heads=problem.group * kv_heads, kv_heads=kv_heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k
        )
    )
    # A window that hides nothing at this length gives way to one that does.
    left, right = (
        bound if bound is None or bound < seqlen_k else seqlen_k // 3
        for bound in (problem.window_left, problem.window_right)
    )
    case = dataclasses.replace(case, problem=case.problem.replace(window_left=left, window_right=right))
    if problem.is_varlen:
        case = _pack(case, ((seqlen_q, seqlen_k), (seqlen_q // 3, seqlen_k // 3)), (0, 0))
    return _with_features(case, 0)


def _irregular(problem: Problem) -> Case:
    if problem.is_varlen:
        lengths = ((0, 33), (113, 203), (1, 0), (64, 64), (5, 9), (0, 0))
        return _packed(problem, lengths, tail=(9, 4), with_dlse=True)
    # A mask may be another one for each batch entry, and so may what an expression says; a bias the same.
    differs = problem.mask_tensor is not MaskTensor.NONE or problem.bias or problem.alibi or problem.block_size
    batch = 2 if differs or problem.score_mod or problem.mask_mod else 1
    return _case(problem, 113, 203, batch=batch, with_dlse=True)


def reduced_seqlen(seqlen: int) -> int:
    """A short sequence length that fills the same blocks: longer ones keep their remainder by the largest block."""
    return min(seqlen, _REDUCED_SEQLEN + seqlen % _LARGEST_BLOCK)


def _case(
    problem: Problem,
    seqlen_q: int,
    seqlen_k: int,
    *,
    batch: int = 1,
    kv_heads: int = 2,
    group: int | None = None,
    alignment: Alignment = Alignment.BOTTOM_RIGHT,
    memory: Memory = Memory.DENSE,
    scale: float | None = None,
    with_dlse: bool = False,
    shared: bool = False,
    flat: bool = False,
    low: bool = False,
    lengths: Lengths = (),
    tail: tuple[int, int] = (0, 0),
) -> Case:
    """A case with the problem's own type, head dims, mask and (unless given) group; bare of features' values.

    Where the problem is of packed sequences, so is the case: of ``lengths``, or else of one sequence.
    """
    group = min(problem.group, _MAX_HEADS) if group is None else group
    case = Case(
        problem=problem.replace(
            batch=batch,
            heads=kv_heads * group,
            kv_heads=kv_heads,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            alignment=alignment,
        ),
        memory=memory,
        scale=scale,
        with_dlse=with_dlse and problem.op is Pass.BACKWARD,
        shared=shared,
        flat=flat,
        low=low,
    )
    return _pack(case, lengths or ((seqlen_q, seqlen_k),), tail) if problem.is_varlen else case


def _packed(problem: Problem, lengths: Lengths, **options: object) -> Case:
    """A case of packed sequences; ``options`` are those of :func:`_case`, and ``tail``: rows behind the last one."""
    longest = (max(length[side] for length in lengths) for side in (0, 1))
    return _case(problem, *longest, lengths=lengths, **options)  # type: ignore[arg-type]  # typed there


def _pack(case: Case, lengths: Lengths, tail: tuple[int, int]) -> Case:
    packed_q, packed_k = (sum(length[side] for length in lengths) + tail[side] for side in (0, 1))
    problem = case.problem.replace(batch=len(lengths), packed_q=packed_q, packed_k=packed_k)
    return dataclasses.replace(case, problem=problem, lengths=lengths)


def _with_features(case: Case, number: int, *, mask: MaskForm | None = None, bias: BiasForm | None = None) -> Case:
    """The case with values for the features of its problem: the ``number``-th of each list."""
    problem = case.problem
    window = _WINDOWS[number % len(_WINDOWS)]
    if problem.has_window and window is not None:
        problem = problem.replace(window_left=window[0], window_right=window[1])
    if problem.softcap:
        problem = problem.replace(softcap=_SOFTCAPS[number % len(_SOFTCAPS)] or problem.softcap)
    if problem.dropout_p:
        problem = problem.replace(dropout_p=_DROPOUTS[number % len(_DROPOUTS)] or problem.dropout_p)
    if problem.block_size:
        problem = problem.replace(block_size=_BLOCK_SIZES[number % len(_BLOCK_SIZES)] or problem.block_size)
    if problem.mask_tensor is not MaskTensor.NONE:
        mask = mask or _MASKS[number % len(_MASKS)]
        if problem.mask_tensor is MaskTensor.BOOL:
            mask = dataclasses.replace(mask, dtype=None)
        if mask.pattern in (Pattern.PADDING, Pattern.EACH_BATCH):
            problem = problem.replace(batch=max(problem.batch, 2))
    if problem.bias:
        bias = bias or _BIASES[number % len(_BIASES)]
        if "b" in bias.own and not bias.is_zero:
            problem = problem.replace(batch=max(problem.batch, 2))
    own_slopes = problem.alibi and number % _SLOPES == 0
    if own_slopes and not case.flat:
        problem = problem if problem.is_varlen else problem.replace(batch=max(problem.batch, 2))
    return dataclasses.replace(
        case,
        own_slopes=own_slopes,
        problem=problem,
        bias=bias if problem.bias else None,
        mask=None if problem.mask_tensor is MaskTensor.NONE else mask,
        rng=_RNGS[number % len(_RNGS)] if problem.dropout_p else None,
    )
