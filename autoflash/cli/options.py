"""Options that commands share, each defined once."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import click
from rich.console import Console
from rich.logging import RichHandler

from autoflash import paths
from autoflash.cli.features import feature_options
from autoflash.device import Device, DeviceKind
from autoflash.dispatch.table import load_decisions
from autoflash.errors import TableError
from autoflash.problem import Alignment, DType, Mask, Pass, Problem
from autoflash.search.presets import Asked

P = ParamSpec("P")
R = TypeVar("R")

# Kernels count rows in 32 bits.
_COUNT, _LENGTH = click.IntRange(0, 2**31 - 1), click.IntRange(1, 2**31 - 1)

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """The options that every command takes.

    Attributes:
        db: Path or URL of the tuning database; None for the default.
        table: Exported table to use in place of the database; None for the default.
        device: Name for :func:`autoflash.runtime.probe.probe`; None for the best one here.
        json: Print one JSON document on standard output and nothing else.
        seed: Of everything that is drawn at random; None where nobody asked for one.
    """

    db: str | None
    table: str | None
    device: str | None
    json: bool
    seed: int | None

    @property
    def progress(self) -> Console:
        """Where progress and remarks go: standard error, so that standard output can be piped."""
        return Console(stderr=True)


def common_options(command: Callable[Concatenate[Common, P], R]) -> Callable[P, R]:
    """Give a command the common options, handed over as its first argument."""

    @click.option("--db", metavar="PATH|URL", help="Tuning database (default: AUTOFLASH_DB, or in the user's data).")
    @click.option("--table", metavar="FILE", help="Exported table that replaces the database (AUTOFLASH_TABLE).")
    @click.option("--device", metavar="NAME", help="cpu, cuda or cuda:N (default: the best one here).")
    @click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
    @click.option("--seed", type=int, help="Seed of all random choices (tune: by default one of its own).")
    @click.option("-v", "--verbose", count=True, help="Say more; -vv for debugging.")
    @functools.wraps(command)
    def with_common(*args: P.args, **options: P.kwargs) -> R:
        taken = {name: options.pop(name) for name in ("db", "table", "device", "as_json", "seed", "verbose")}
        _configure_log(int(str(taken.pop("verbose"))))
        common = Common(json=bool(taken.pop("as_json")), **taken)  # type: ignore[arg-type]  # click has typed them
        if common.table is not None and click.get_current_context().info_name not in _JUDGES_TABLES:
            _check_table(common.table)
        return command(common, *args, **options)

    return with_common


_JUDGES_TABLES = ("doctor",)
"""Commands to which a damaged table is a finding."""


def _check_table(file: str) -> None:
    """Refuse a table that was named and cannot be used; one of the environment is warned of, and passed over."""
    try:
        load_decisions(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, TableError) as error:
        words = getattr(error, "strerror", None) or error
        raise click.BadParameter(f"{file}: {words}", param_hint="'--table'") from error


def _configure_log(verbose: int) -> None:
    level = paths.log_level() if not verbose else "INFO" if verbose == 1 else "DEBUG"
    logger = logging.getLogger("autoflash")
    if level not in LOG_LEVELS:
        raise click.UsageError(f"AUTOFLASH_LOG must be one of {', '.join(LOG_LEVELS)}, got {level!r}")
    logger.setLevel(level)
    if not logger.handlers:
        logger.addHandler(RichHandler(console=Console(stderr=True), show_path=False, show_time=False))


class Retold(click.Command):
    """A command that knows with which options it was given, for results that say what made them."""

    _words = "autoflash.words"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does, which keeps nothing but values."""
        given, _, order = self.make_parser(ctx).parse_args(args=list(args))
        words: dict[str, list[str]] = {}
        for parameter in dict.fromkeys(order):
            name = str(parameter.name)
            value = given[name]
            if isinstance(value, bool):
                words[name] = [parameter.opts[0] if value else parameter.secondary_opts[0]]
            else:
                values = value if isinstance(value, list) else [value]
                words[name] = [word for one in values for word in (parameter.opts[0], str(one))]
        ctx.meta[self._words] = words
        return super().parse_args(ctx, args)

    @classmethod
    def words(cls, ctx: click.Context, *, leave_out: Container[str] = ()) -> list[str]:
        """The options of this call as they would be written again, without those of these parameters."""
        return [word for name, some in ctx.meta[cls._words].items() if name not in leave_out for word in some]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemOptions:
    """A problem as the command line gives it; what is None follows the device or another size.

    Attributes:
        op, causal: As given.
        dtype: None: bf16 on a GPU, fp32 on a CPU.
        head_dim, batch, heads, seqlen: As given; of packed sequences, ``batch`` is their number.
        head_dim_v, kv_heads, seqlen_k: None: as ``head_dim``, ``heads`` and ``seqlen``.
        asked: What is asked for beyond plain attention.
    """

    op: Pass
    dtype: DType | None
    head_dim: int
    head_dim_v: int | None
    batch: int
    heads: int
    kv_heads: int | None
    seqlen: int
    seqlen_k: int | None
    causal: bool
    top_left: bool
    asked: Asked = field(default_factory=Asked)

    def problem(self, device: Device) -> Problem:
        """The problem on a device.

        Raises:
            InvalidProblemError: for sizes that mean nothing, and for features that do not go together.
        """
        default = DType.FP32 if device.kind is DeviceKind.CPU else DType.BF16
        problem = Problem(
            op=self.op,
            dtype=self.dtype or default,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim if self.head_dim_v is None else self.head_dim_v,
            batch=self.batch,
            heads=self.heads,
            kv_heads=self.heads if self.kv_heads is None else self.kv_heads,
            seqlen_q=self.seqlen,
            seqlen_k=self.seqlen if self.seqlen_k is None else self.seqlen_k,
            mask=Mask.CAUSAL if self.causal or self.top_left else Mask.FULL,
            alignment=Alignment.TOP_LEFT if self.top_left else Alignment.BOTTOM_RIGHT,
        )
        return self.asked.of(problem)


PASS = click.Choice([member.value for member in Pass])
DTYPE = click.Choice([member.value for member in DType])


def problem_options(command: Callable[Concatenate[ProblemOptions, P], R]) -> Callable[P, R]:
    """Give a command options that name one problem, handed over as its first argument."""

    @click.option("--pass", "op", type=PASS, default="forward", show_default=True, help="Which computation.")
    @click.option("--dtype", type=DTYPE, help="Of query, key and value (default: bf16; fp32 on a CPU).")
    @click.option("--head-dim", type=_LENGTH, default=64, show_default=True, help="Length of a query vector.")
    @click.option("--head-dim-v", type=_LENGTH, help="Length of a value vector (default: as --head-dim).")
    @click.option("--batch", type=_COUNT, default=1, show_default=True, help="Batch size.")
    @click.option("--heads", type=_LENGTH, default=8, show_default=True, help="Query heads.")
    @click.option("--kv-heads", type=_LENGTH, help="Key and value heads (default: as --heads).")
    @click.option("--seqlen", type=_COUNT, default=1024, show_default=True, help="Number of queries.")
    @click.option("--seqlen-k", type=_COUNT, help="Number of keys (default: as --seqlen).")
    @click.option("--causal", is_flag=True, help="Causal mask, aligned to the bottom right.")
    @click.option("--top-left", is_flag=True, help="Causal mask, aligned to the top left.")
    @feature_options
    @functools.wraps(command)
    def with_problem(asked: Asked, /, *args: P.args, **options: P.kwargs) -> R:
        names = ("head_dim", "head_dim_v", "batch", "heads", "kv_heads", "seqlen", "seqlen_k", "causal", "top_left")
        sizes = {name: options.pop(name) for name in names}
        op, dtype = Pass(options.pop("op")), options.pop("dtype")
        wanted = ProblemOptions(op=op, dtype=DType(dtype) if dtype else None, asked=asked, **sizes)  # type: ignore[arg-type]  # click has typed them
        return command(wanted, *args, **options)

    return with_problem


vendor_option = click.option(
    "--vendor",
    type=click.Choice(["allow", "never", "only"]),
    help="Whether torch's own kernels may run (default: AUTOFLASH_VENDOR, else allow).",
)


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.4
    """A length of time such as ``90``, ``90s``, ``10m`` or ``1h30m``, in seconds."""

    name = "duration"
    _pattern = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?")

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds as a float."""
        if isinstance(value, (int, float)):
            return float(value)
        match = self._pattern.fullmatch(str(value).strip())
        hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0)
        total = 3600 * hours + 60 * minutes + seconds
        if not total:
            self.fail(f"{value!r} is not a length of time; write 90s, 10m or 1h30m", param, ctx)
        return float(total)
