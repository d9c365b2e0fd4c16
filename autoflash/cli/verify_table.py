"""The table of ``autoflash verify --all``: a row for each kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoflash.cli.output import Column, markdown_table, number
from autoflash.cli.records import first_line
from autoflash.cli.verify_kernels import CASES, FORMS, HEAD_DIMS, Selection
from autoflash.device import Device
from autoflash.evaluate.accuracy import PLAIN, Accuracy, Errors
from autoflash.keys import Json
from autoflash.problem import DType, Form, Pass, Problem
from autoflash.runtime.probe import environment
from autoflash.runtime.vendor import BACKENDS
from autoflash.variant import Variant

_PROBLEMS = {
    "regular": "one with sequences of 384, which fill all blocks",
    "irregular": "one with 113 queries and 203 keys, which fill none",
}

_ERRORS = """
Of each, the output whose error is largest beside that of torch's kernels: the largest absolute error of ours, of
torch's backends and of plain torch operations in the same type, and the ratio to the best of those.
"""

TITLES = ("problem", "kernel", "output", "error", *BACKENDS, PLAIN, "ratio", "gate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kernel on the cases of one form and type.

    Attributes:
        problem, variant: Which.
        results: One for each case that it can do.
        reason: Why there is none, or what it raised.
        has_raised: It did not refuse, but failed.
    """

    problem: Problem
    variant: Variant
    results: tuple[Accuracy, ...] = ()
    reason: str = ""
    has_raised: bool = False

    @property
    def is_wrong(self) -> bool:
        """Whether it raised, or the correctness gate rejects it."""
        return self.has_raised or any(one.gate > 1.0 for one in self.results)


def name(problem: Problem) -> str:
    """Form, type and head dimensions of a row."""
    head_dims = _head_dims_text(problem.head_dim, problem.head_dim_v)
    return f"{Form.of(problem)}/{problem.dtype.value}/d{head_dims}"


def _head_dims_text(head_dim: int, head_dim_v: int) -> str:
    return f"{head_dim}" if head_dim == head_dim_v else f"{head_dim}x{head_dim_v}"


def _worst(results: Sequence[Accuracy]) -> Errors | None:
    """The output whose error is largest beside that of torch's kernels; None where those were not asked."""
    return max((errors for one in results for errors in one.errors), key=lambda errors: errors.ratio, default=None)


def columns(rows: Sequence[Row]) -> list[Column]:
    """Those that have something in them."""
    used = {"problem", "kernel", "gate"}.union(*map(_texts, rows))
    return [Column(title=title, numeric=title not in TITLES[:3]) for title in TITLES if title in used]


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """Texts of the rows under :func:`columns`."""
    titles = [column.title for column in columns(rows)]
    return [[_texts(row).get(title, "-") for title in titles] for row in rows]


def markdown(rows: Sequence[Row], wanted: int, device: Device, selection: Selection) -> str:
    """The table for a repository, with what it was made on, what it holds and how to make it again.

    Args:
        rows: Those that there are.
        wanted: How many there are if nothing stops early.
        device: Where.
        selection: Of what.
    """
    here = environment(device)
    on = f"{device.name} ({device.arch}), torch {here.torch}" + (f", Triton {here.triton}" if here.triton else "")
    wrong = sum(row.is_wrong for row in rows)
    of_all = "" if len(rows) == wanted else f" of {wanted} (it was stopped before the others)"
    return (
        f"# Errors against float64\n\n`{_command(selection)}` on {on}: {len(rows)} kernels{of_all}, {wrong} wrong.\n\n"
        f"{_scope(selection)}\n{'' if selection.is_bare else _ERRORS}"
        "The worst finding of the gate is above 1 where a kernel is wrong.\n\n"
        f"{markdown_table(columns(rows), cells(rows))}\n"
    )


def _command(selection: Selection) -> str:
    """What makes the same table, however many processes there are."""
    words = ["autoflash verify --all"]
    words += [] if selection.family is None else [f"--family {selection.family.value}"]
    words += [] if selection.features == tuple(FORMS) else [f"--feature {feature}" for feature in selection.features]
    words += [] if selection.dtypes == tuple(DType) else [f"--dtype {dtype.value}" for dtype in selection.dtypes]
    words += [] if selection.passes == tuple(Pass) else [f"--pass {op.value}" for op in selection.passes]
    words += [] if selection.head_dims == HEAD_DIMS else [f"--head-dim {dim}" for dim, _ in selection.head_dims]
    words += ["--quick"] if selection.is_quick else []
    usual = CASES[-1:] if selection.is_quick else CASES
    words += [] if selection.cases == usual else [f"--case {case}" for case in selection.cases]
    words += ["--bare"] if selection.is_bare else []
    return " ".join(words)


def _scope(selection: Selection) -> str:
    """What of each family there is in the table, in words."""
    first, *others = (_head_dims_text(*dims) for dims in selection.head_dims)
    problems = f"Problems: {', and '.join(_PROBLEMS[case] for case in selection.cases)}."
    if selection.is_quick:
        return f"Of each family the default structure, at {first} elements a head (d).\n{problems}"
    also = f"; at {', '.join(others)}, those that there are not before" if others else ""
    return (
        "Of plain attention (full and causal) in bf16 and fp32 every structure, that is every combination of choices;\n"
        "in fp16, with values of another length, and with each feature, so many that every choice is in one of them.\n"
        f"Plain attention at {first} elements a head (d){also}; features at {first}.\n{problems}"
    )


def _texts(row: Row) -> dict[str, str]:
    texts = {"problem": name(row.problem), "kernel": str(row.variant)}
    if not row.results:
        return {**texts, "output": first_line(row.reason), "gate": "WRONG" if row.is_wrong else "cannot"}
    texts["gate"] = "WRONG" if row.is_wrong else number(max(one.gate for one in row.results), 2)
    errors = _worst(row.results)
    if errors is None:
        return texts
    return {
        **texts,
        "output": errors.output,
        "error": f"{errors.kernel:.2e}",
        **{name: f"{error:.2e}" for name, error in errors.torch.items()},
        "ratio": number(errors.ratio, 2),
    }


def row_json(row: Row) -> dict[str, Json]:
    """A row with what was found in each case, for machines."""
    content: dict[str, Json] = {
        "form": str(Form.of(row.problem)),
        "dtype": row.problem.dtype.value,
        "head_dim": row.problem.head_dim,
        "head_dim_v": row.problem.head_dim_v,
        "variant": row.variant.to_dict(),
    }
    content |= {"passed": not row.is_wrong if row.results or row.has_raised else None, "reason": row.reason}
    return {**content, "cases": [_case_json(one) for one in row.results]}


def _case_json(one: Accuracy) -> dict[str, Json]:
    return {
        "case": str(one.case),
        "gate": one.gate,
        "detail": one.words,
        "errors": [
            {
                "output": errors.output,
                "kernel": _finite(errors.kernel),
                "torch": dict(errors.torch),
                "best": errors.best,
                "ratio": _finite(errors.ratio),
            }
            for errors in one.errors
        ],
    }


def _finite(number: float) -> float | None:
    """JSON has neither infinity nor NaN."""
    return number if abs(number) < float("inf") else None
