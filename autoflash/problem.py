"""What is to be computed, and the cell that it is tuned and looked up under. Nothing about how."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import cast

from autoflash import keys
from autoflash.errors import InvalidProblemError


class Pass(str, Enum):
    """Which computation: a backward pass recomputes the probabilities from LSE."""

    FORWARD = "forward"
    BACKWARD = "backward"


class DType(str, Enum):
    """Element type of query, key, value and output. Accumulation is always float32."""

    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return 4 if self is DType.FP32 else 2


class Mask(str, Enum):
    """Which keys a query sees. The alignment of ``causal`` is the problem's."""

    FULL = "full"
    CAUSAL = "causal"


class Alignment(str, Enum):
    """Where query i stands among the keys: at i + Sk - Sq (bottom-right) or at i (top-left)."""

    BOTTOM_RIGHT = "bottom_right"
    TOP_LEFT = "top_left"


class Feature(str, Enum):
    """What a problem asks for beyond plain attention. Each is a partial of the templates, and part of a kernel's form.

    The order is that of a score's life: soft-capped, modified, added to, hidden; it becomes a probability beside its
    sink; then probabilities are dropped.
    """

    VARLEN = "varlen"
    """Sequences of different lengths, packed one after the other."""
    SOFTCAP = "softcap"
    """Scores become cap * tanh(score / cap)."""
    SCORE_MOD = "score_mod"
    """Scores become what an expression makes of them."""
    ALIBI = "alibi"
    """Scores fall with the distance of the key from the query's position, for each head by a slope of its own."""
    BIAS = "bias"
    """A tensor is added to the scores, and may have a gradient."""
    FLOAT_MASK = "float_mask"
    """A tensor is added to the scores. It has no gradient."""
    BOOL_MASK = "bool_mask"
    """A tensor says which pairs take part."""
    MASK_MOD = "mask_mod"
    """An expression says which pairs take part."""
    BLOCK_MASK = "block_mask"
    """Blocks of pairs are hidden as a whole, and never visited; beside a mask_mod, others are known to be whole."""
    WINDOW = "window"
    """Keys too far to the left or right of the query's position are hidden."""
    SINKS = "sinks"
    """Each head has a score that takes its share of the softmax, and has no key."""
    DROPOUT = "dropout"
    """Probabilities are dropped at random, and the others scaled up."""
    PARAMS_GRADIENT = "params_gradient"
    """The backward also gives the gradients of the score_mod's parameters."""
    ALIBI_GRADIENT = "alibi_gradient"
    """The backward also gives the gradient of the slopes."""
    BIAS_GRADIENT = "bias_gradient"
    """The backward also gives the gradient of the bias."""


LEAST_BLOCK = 128
"""Queries and keys of the smallest block of a block mask: every tile of a kernel divides it."""


class MaskTensor(str, Enum):
    """The kind of a mask that is given as a tensor, broadcastable to [B, H, M, N]."""

    NONE = "none"
    BOOL = "bool"
    FLOAT = "float"


class Parallelism(str, Enum):
    """B * H * ceil(Sq / 128) tiles per multiprocessor: below 1, up to 4, above 4."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One attention computation with all its sizes.

    Attributes:
        op: Forward or backward.
        dtype: Type of query, key, value, output and gradients.
        head_dim: Length of a query and key vector (D).
        head_dim_v: Length of a value and output vector (D_V).
        batch, heads, kv_heads: B, H, H_KV; H is a multiple of H_KV. Of packed sequences, B is their number.
        seqlen_q, seqlen_k: Sq (M) and Sk (N); both may be 0. Of packed sequences, lengths that stand for all of them:
            the longest where it is known, else the mean. Nothing but speed depends on them.
        mask: Which keys a query sees.
        alignment: Where a query stands among the keys, for a causal mask, a window and ALiBi; irrelevant (and
            normalised to bottom-right) where Sq == Sk or nothing asks for it.
        deterministic: The backward must give the same bits on every launch. Always False forward.
        tf32: float32 products may be computed in TF32. Always False for fp16 and bf16.
        window_left, window_right: A query at position p sees the keys from p - left to p + right, both included; None
            has no bound there. A causal mask takes its part as well.
        softcap: Scores become softcap * tanh(score / softcap); 0 leaves them alone.
        score_mod, mask_mod: Expressions in one line, as :class:`autoflash.expression.expression.Expression` is written;
            empty for none. A score_mod follows the softcap.
        params_gradient: The backward gives the gradients of the score_mod's parameters. Always False forward.
        block_size: Queries and keys of a block of the block mask, a power of two from 128 on; 0 without one.
        mask_tensor: Whether each pair also has an element of a tensor, and of which kind.
        alibi: Scores fall with the distance of the key from the query's position.
        alibi_gradient: The backward gives the gradient of the slopes. Always False forward.
        bias: Each pair has an element of a tensor that is added to its score, and may have a gradient.
        bias_gradient: The backward gives it. Always False forward.
        sinks: Each head has a score without a key.
        dropout_p: Share of the probabilities that are dropped, 0 <= p < 1.
        packed_q, packed_k: Rows of packed tensors [1, H, T, D], those behind the last sequence included; None where
            nothing is packed.
    """

    op: Pass
    dtype: DType
    head_dim: int
    head_dim_v: int
    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    mask: Mask = Mask.FULL
    alignment: Alignment = Alignment.BOTTOM_RIGHT
    deterministic: bool = False
    tf32: bool = False
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0.0
    score_mod: str = ""
    mask_mod: str = ""
    params_gradient: bool = False
    block_size: int = 0
    mask_tensor: MaskTensor = MaskTensor.NONE
    alibi: bool = False
    alibi_gradient: bool = False
    bias: bool = False
    bias_gradient: bool = False
    sinks: bool = False
    dropout_p: float = 0.0
    packed_q: int | None = None
    packed_k: int | None = None

    def __post_init__(self) -> None:
        """Refuse sizes that mean nothing; normalise the fields that this problem does not look at."""
        self._check_features()
        for name in ("head_dim", "head_dim_v", "heads", "kv_heads"):
            if getattr(self, name) < 1:
                raise InvalidProblemError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("batch", "seqlen_q", "seqlen_k"):
            if getattr(self, name) < 0:
                raise InvalidProblemError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise InvalidProblemError(
                f"query heads must be a multiple of key/value heads, got {self.heads} and {self.kv_heads}"
            )
        if not self.is_varlen and (
            not (self.causal or self.has_window or self.alibi) or self.seqlen_q == self.seqlen_k
        ):
            object.__setattr__(self, "alignment", Alignment.BOTTOM_RIGHT)
        if self.op is Pass.FORWARD:
            object.__setattr__(self, "deterministic", False)
            object.__setattr__(self, "params_gradient", False)
            object.__setattr__(self, "alibi_gradient", False)
            object.__setattr__(self, "bias_gradient", False)
        if self.dtype is not DType.FP32:
            object.__setattr__(self, "tf32", False)

    def _check_features(self) -> None:
        for name in ("window_left", "window_right", "packed_q", "packed_k"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise InvalidProblemError(f"{name} must be None or not negative, got {value}")
        if (self.packed_q is None) != (self.packed_k is None):
            raise InvalidProblemError("packed_q and packed_k belong together: give both or neither")
        if self.is_varlen and self.mask_tensor is not MaskTensor.NONE:
            raise InvalidProblemError("packed sequences have no mask tensor: leave mask_tensor at none")
        if self.is_varlen and (self.score_mod or self.mask_mod):
            raise InvalidProblemError("packed sequences have no score_mod and no mask_mod: leave them empty")
        if self.block_size and (self.block_size < LEAST_BLOCK or self.block_size & (self.block_size - 1)):
            raise InvalidProblemError(f"block_size must be a power of two from {LEAST_BLOCK} on, got {self.block_size}")
        if self.is_varlen and self.block_size:
            raise InvalidProblemError("packed sequences have no block mask: leave block_size at 0")
        if self.params_gradient and not self.score_mod:
            raise InvalidProblemError("params_gradient needs a score_mod")
        if self.is_varlen and self.bias:
            raise InvalidProblemError("packed sequences have no bias: leave it False")
        if (self.bias_gradient and not self.bias) or (self.alibi_gradient and not self.alibi):
            raise InvalidProblemError("bias_gradient needs a bias, and alibi_gradient needs alibi")
        if not (0.0 <= self.softcap < math.inf):
            raise InvalidProblemError(f"softcap must be a finite number, at least 0, got {self.softcap}")
        if not 0.0 <= self.dropout_p < 1.0:
            raise InvalidProblemError(f"dropout_p must be at least 0 and less than 1, got {self.dropout_p}")

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def is_varlen(self) -> bool:
        """Whether sequences are packed one after the other."""
        return self.packed_q is not None

    @property
    def has_window(self) -> bool:
        """Whether a window has a bound that the causal mask does not imply."""
        return self.window_left is not None or self.window_right is not None

    @property
    def features(self) -> tuple[Feature, ...]:
        """What it asks for beyond plain attention, in the order of :class:`Feature`."""
        asked = {
            Feature.VARLEN: self.is_varlen,
            Feature.SOFTCAP: self.softcap > 0.0,
            Feature.SCORE_MOD: bool(self.score_mod),
            Feature.ALIBI: self.alibi,
            Feature.BIAS: self.bias,
            Feature.FLOAT_MASK: self.mask_tensor is MaskTensor.FLOAT,
            Feature.BOOL_MASK: self.mask_tensor is MaskTensor.BOOL,
            Feature.MASK_MOD: bool(self.mask_mod),
            Feature.BLOCK_MASK: self.block_size > 0,
            Feature.WINDOW: self.has_window,
            Feature.SINKS: self.sinks,
            Feature.DROPOUT: self.dropout_p > 0.0,
            Feature.PARAMS_GRADIENT: self.params_gradient,
            Feature.ALIBI_GRADIENT: self.alibi_gradient,
            Feature.BIAS_GRADIENT: self.bias_gradient,
        }
        return tuple(feature for feature in Feature if asked[feature])

    @property
    def tensor_batch(self) -> int:
        """First size of the tensors: packed sequences share one."""
        return 1 if self.is_varlen else self.batch

    @property
    def rows_q(self) -> int:
        """Length of the queries' tensors."""
        return self.seqlen_q if self.packed_q is None else self.packed_q

    @property
    def rows_k(self) -> int:
        """Length of the keys' tensors."""
        return self.seqlen_k if self.packed_k is None else self.packed_k

    @property
    def causal(self) -> bool:
        """Whether the mask is causal, in either alignment."""
        return self.mask is Mask.CAUSAL

    @property
    def is_empty(self) -> bool:
        """Whether there is no query, or no key to see."""
        return self.tensor_batch * self.rows_q * self.rows_k == 0

    @property
    def diagonal(self) -> int:
        """Query i stands at key i + diagonal. Of packed sequences, each has its own."""
        return self.seqlen_k - self.seqlen_q if self.alignment is Alignment.BOTTOM_RIGHT else 0

    def without_idle_bounds(self) -> Problem:
        """The same problem by the plainest mask and window, so that equal problems are served by one kernel.

        A window with nothing to the right is a causal mask, and a bound that hides no key is none.
        """
        if not self.has_window:
            return self
        left, right, mask = self.window_left, self.window_right, self.mask
        if right == 0 and mask is Mask.FULL:
            mask = Mask.CAUSAL
        first, last = self.diagonal, self.diagonal + self.seqlen_q - 1
        if self.is_varlen:
            # Nothing is known of a sequence but that it is no longer than all of them.
            first, last = -self.rows_q, max(self.rows_q, self.rows_k)
        if mask is Mask.CAUSAL or (right is not None and first + right >= self.rows_k - 1):
            right = None
        if left is not None and left >= last:
            left = None
        return self.replace(mask=mask, window_left=left, window_right=right)

    def replace(self, **changes: object) -> Problem:
        """A copy with some fields changed, checked and normalised again."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]  # dataclasses.replace is untyped by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The part of a problem that the text of a kernel depends on. Sizes and types are arguments of the kernel.

    Attributes:
        op: Forward or backward.
        mask: Which keys a query sees.
        features: What is asked for beyond that, in the order of :class:`Feature`.
        score_mod, mask_mod: As in :class:`Problem`.
    """

    op: Pass
    mask: Mask
    features: tuple[Feature, ...] = ()
    score_mod: str = ""
    mask_mod: str = ""

    @classmethod
    def of(cls, problem: Problem | Cell) -> Form:
        """The form of a problem or cell."""
        return cls(
            op=problem.op,
            mask=problem.mask,
            features=problem.features,
            score_mod=problem.score_mod,
            mask_mod=problem.mask_mod,
        )

    def has(self, *names: str) -> bool:
        """Whether it has one of these features.

        Raises:
            ValueError: for a name that no feature has.
        """
        return any(Feature(name) in self.features for name in names)

    @property
    def tile_features(self) -> tuple[Feature, ...]:
        """The features that kernels look at where they visit a tile of scores.

        A forward resolves packed sequences before that. A backward has nothing to do with sinks: they are in the LSE.
        Gradients of terms are kernels of their own.
        """
        elsewhere = {Feature.VARLEN if self.op is Pass.FORWARD else Feature.SINKS}
        elsewhere |= {Feature.ALIBI_GRADIENT, Feature.BIAS_GRADIENT, Feature.PARAMS_GRADIENT}
        return tuple(feature for feature in self.features if feature not in elsewhere)

    def __str__(self) -> str:
        """Short form such as ``forward/causal`` or ``forward/causal+softcap+window``."""
        return f"{self.op.value}/{'+'.join([self.mask.value, *(feature.value for feature in self.features)])}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A problem with its sizes in buckets: the unit that is tuned, recorded and looked up.

    Attributes:
        op, dtype, head_dim, head_dim_v, mask, deterministic, tf32, features, score_mod, mask_mod: As in
            :class:`Problem`.
        group: Query heads per key/value head.
        q_bucket, k_bucket: ``(S - 1).bit_length()`` of Sq and Sk; bucket b holds 2**(b-1) < S <= 2**b.
        parallelism: How many query tiles there are per multiprocessor.
        window_bucket: Likewise of the number of keys that a window leaves a query beside its own position, at least
            1; 0 without a window, or with one that is open to a side.
    """

    op: Pass
    dtype: DType
    head_dim: int
    head_dim_v: int
    group: int
    mask: Mask
    deterministic: bool
    tf32: bool
    q_bucket: int
    k_bucket: int
    parallelism: Parallelism
    features: tuple[Feature, ...] = ()
    window_bucket: int = 0
    score_mod: str = ""
    mask_mod: str = ""

    def without(self, dropped: Sequence[Feature]) -> Cell:
        """The cell that does not ask for some features."""
        return dataclasses.replace(
            self,
            features=tuple(feature for feature in self.features if feature not in dropped),
            score_mod="" if Feature.SCORE_MOD in dropped else self.score_mod,
            mask_mod="" if Feature.MASK_MOD in dropped else self.mask_mod,
        )

    def to_dict(self) -> dict[str, str | int | bool]:
        """Plain JSON content; :meth:`from_dict` reads it back. Features and expressions are named where there are some.

        So the keys of cells are those that they had before there was what they do not ask for.
        """
        content: dict[str, str | int | bool] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            content[field.name] = value.value if isinstance(value, Enum) else value
        features = content.pop("features")
        if features:
            content["features"] = features_text(self.features)
        else:
            del content["window_bucket"]
        for name in _LINES:
            if not content[name]:
                del content[name]
        return content

    @classmethod
    def from_dict(cls, content: dict[str, str | int | bool]) -> Cell:
        """Read what :meth:`to_dict` wrote.

        Raises:
            ValueError, KeyError, TypeError: for content that is not a cell.
        """
        enums = {"op": Pass, "dtype": DType, "mask": Mask, "parallelism": Parallelism}
        names = {field.name for field in dataclasses.fields(cls)}
        optional = {"features", "window_bucket"}
        plain = names - optional - set(_LINES)
        if set(content) != plain and set(content) - set(_LINES) != plain | optional:
            raise ValueError(f"a cell has the fields {sorted(names)}, got {sorted(content)}")
        values: dict[str, object] = {
            name: enums[name](value) if name in enums else value for name, value in content.items()
        }
        for name, value in values.items():
            is_text = name == "features" or name in _LINES
            expected = str if is_text else bool if name in ("deterministic", "tf32") else int
            if name not in enums and type(value) is not expected:
                raise ValueError(f"{name} of a cell must be {expected.__name__}, got {value!r}")
        if "features" in values:
            values["features"] = features_of(str(values["features"]))
        for name, line in _LINES.items():
            if bool(values.get(name)) != (line in cast("tuple[Feature, ...]", values.get("features", ()))):
                raise ValueError(f"a cell with the feature {name} has a line of that name, and no other has")
        return cls(**values)  # type: ignore[arg-type]  # each value was checked above

    @property
    def key(self) -> str:
        """Identity of the cell."""
        return keys.key("cell", self.to_dict())

    def __str__(self) -> str:
        """Short form for people, such as ``forward/bf16/d128/causal/q4096/k4096``; different for different cells."""
        parts = [self.op.value, self.dtype.value + ("+tf32" if self.tf32 else "")]
        parts.append(f"d{self.head_dim}" + ("" if self.head_dim_v == self.head_dim else f"-{self.head_dim_v}"))
        parts += [f"gqa{self.group}"] if self.group > 1 else []
        lines = {feature: f"({_short(getattr(self, name))})" for name, feature in _LINES.items()}
        parts += ["+".join([self.mask.value, *(feature.value + lines.get(feature, "") for feature in self.features)])]
        parts += [f"w{2**self.window_bucket}"] if self.window_bucket else []
        parts += ["deterministic"] if self.deterministic else []
        parts += [f"q{2**self.q_bucket}", f"k{2**self.k_bucket}"]
        parts += [self.parallelism.value] if self.parallelism is not Parallelism.HIGH else []
        return "/".join(parts)


_LINES = {"score_mod": Feature.SCORE_MOD, "mask_mod": Feature.MASK_MOD}
"""Fields of a cell that hold an expression, and the features that they stand for."""


def _short(line: str, most: int = 24) -> str:
    """The expression of a line where that is short and all; else how it begins, and a digest of the line."""
    head, _, expression = line.partition(" = ")
    if head.endswith("()") and len(expression) <= most:
        return expression
    return f"{expression[:most].rstrip()}~{keys.digest(line)[:6]}"


def features_text(features: tuple[Feature, ...]) -> str:
    """Features as records hold them, such as ``softcap,window``; :func:`features_of` reads it back."""
    return ",".join(feature.value for feature in features)


def features_of(text: str) -> tuple[Feature, ...]:
    """Read what :func:`features_text` wrote.

    Raises:
        ValueError: for an unknown feature, or another order than that of :class:`Feature`.
    """
    features = tuple(Feature(name) for name in text.split(",")) if text else ()
    if features != tuple(feature for feature in Feature if feature in features):
        raise ValueError(f"features stand once each, in the order {features_text(tuple(Feature))}, got {text!r}")
    return features
