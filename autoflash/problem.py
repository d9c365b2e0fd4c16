"""What is to be computed, and the cell that it is tuned and looked up under. Nothing about how."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum

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
        batch, heads, kv_heads: B, H, H_KV; H is a multiple of H_KV.
        seqlen_q, seqlen_k: Sq (M) and Sk (N); both may be 0.
        mask: Which keys a query sees.
        alignment: Of a causal mask; irrelevant (and normalised to bottom-right) where Sq == Sk or nothing is causal.
        deterministic: The backward must give the same bits on every launch. Always False forward.
        tf32: float32 products may be computed in TF32. Always False for fp16 and bf16.
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

    def __post_init__(self) -> None:
        """Refuse sizes that mean nothing; normalise the fields that this problem does not look at."""
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
        if self.mask is Mask.FULL or self.seqlen_q == self.seqlen_k:
            object.__setattr__(self, "alignment", Alignment.BOTTOM_RIGHT)
        if self.op is Pass.FORWARD:
            object.__setattr__(self, "deterministic", False)
        if self.dtype is not DType.FP32:
            object.__setattr__(self, "tf32", False)

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def causal(self) -> bool:
        """Whether the mask is causal, in either alignment."""
        return self.mask is Mask.CAUSAL

    @property
    def is_empty(self) -> bool:
        """Whether there is no query, or no key to see."""
        return self.batch * self.seqlen_q * self.seqlen_k == 0

    @property
    def diagonal(self) -> int:
        """Query i may see key j when j <= i + diagonal (causal only)."""
        return self.seqlen_k - self.seqlen_q if self.alignment is Alignment.BOTTOM_RIGHT else 0

    def replace(self, **changes: object) -> Problem:
        """A copy with some fields changed, checked and normalised again."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]  # dataclasses.replace is untyped by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A problem with its sizes in buckets: the unit that is tuned, recorded and looked up.

    Attributes:
        op, dtype, head_dim, head_dim_v, mask, deterministic, tf32: As in :class:`Problem`.
        group: Query heads per key/value head.
        q_bucket, k_bucket: ``(S - 1).bit_length()`` of Sq and Sk; bucket b holds 2**(b-1) < S <= 2**b.
        parallelism: How many query tiles there are per multiprocessor.
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

    def to_dict(self) -> dict[str, str | int | bool]:
        """Plain JSON content; :meth:`from_dict` reads it back."""
        content: dict[str, str | int | bool] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            content[field.name] = value.value if isinstance(value, Enum) else value
        return content

    @classmethod
    def from_dict(cls, content: dict[str, str | int | bool]) -> Cell:
        """Read what :meth:`to_dict` wrote.

        Raises:
            ValueError, KeyError, TypeError: for content that is not a cell.
        """
        enums = {"op": Pass, "dtype": DType, "mask": Mask, "parallelism": Parallelism}
        names = {field.name for field in dataclasses.fields(cls)}
        if set(content) != names:
            raise ValueError(f"a cell has the fields {sorted(names)}, got {sorted(content)}")
        values = {name: enums[name](value) if name in enums else value for name, value in content.items()}
        for name, value in values.items():
            expected = bool if name in ("deterministic", "tf32") else int
            if name not in enums and type(value) is not expected:
                raise ValueError(f"{name} of a cell must be {expected.__name__}, got {value!r}")
        return cls(**values)  # type: ignore[arg-type]  # each value was checked above

    @property
    def key(self) -> str:
        """Identity of the cell."""
        return keys.key("cell", self.to_dict())

    def __str__(self) -> str:
        """Short form for people, such as ``forward/bf16/d128/causal/q4096/k4096``."""
        parts = [self.op.value, self.dtype.value + ("+tf32" if self.tf32 else "")]
        parts.append(f"d{self.head_dim}" + ("" if self.head_dim_v == self.head_dim else f"-{self.head_dim_v}"))
        parts += [f"gqa{self.group}"] if self.group > 1 else []
        parts += [self.mask.value]
        parts += ["deterministic"] if self.deterministic else []
        parts += [f"q{2**self.q_bucket}", f"k{2**self.k_bucket}"]
        parts += [self.parallelism.value] if self.parallelism is not Parallelism.HIGH else []
        return "/".join(parts)
