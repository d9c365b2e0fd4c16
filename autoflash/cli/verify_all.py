"""Every family, structure and feature against float64, beside torch's own attention.

Plain and causal attention go through every combination of choices of a structure, features through every choice.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.progress import Progress, TimeElapsedColumn

from autoflash.cli.options import Common
from autoflash.cli.output import Column, markdown_table, number, print_json, print_table
from autoflash.cli.records import first_line
from autoflash.deploy.export import write_table
from autoflash.device import Device
from autoflash.dispatch.buckets import cell_of
from autoflash.evaluate.accuracy import BACKENDS, PLAIN, Accuracy, Errors, accuracy, accuracy_cases
from autoflash.evaluate.worker import Failure, Worker
from autoflash.evaluate.worker_pool import WorkerPool
from autoflash.keys import Json
from autoflash.problem import LEAST_BLOCK, DType, Feature, Form, Mask, MaskTensor, Pass, Problem
from autoflash.runtime.bind import bind
from autoflash.runtime.probe import environment
from autoflash.space import catalog
from autoflash.space.catalog import SearchSpace
from autoflash.variant import Choice, Choices, Family, Variant

# Compiling what is verified, too.
_TIMEOUT_S = 600.0
# Three of the usual blocks.
_SEQLEN = 384

_WINDOW: dict[str, object] = {"window_left": 127, "window_right": 31}
_PACKED: dict[str, object] = {"batch": 2, "packed_q": 2 * _SEQLEN, "packed_k": 2 * _SEQLEN}
_SCORES: dict[str, object] = {
    "mask": Mask.CAUSAL,
    "window_left": 127,
    "softcap": 20.0,
    "dropout_p": 0.1,
    "sinks": True,
    "alibi": True,
    "alibi_gradient": True,
}

# A table of relative distances, and documents.
_SCORE_MOD = "score_mod(n: int 0, t: float 2) = score + t[h, q_idx - kv_idx + n]"
_MASK_MOD = "mask_mod(doc: int 2) = doc[b, kv_idx] == doc[b, q_idx]"
# Hidden, partial and whole blocks.
_NEAR = "mask_mod(reach: int 0) = abs(kv_idx - q_idx) * 3 < reach"

FORMS: dict[str, dict[str, object]] = {
    Mask.FULL.value: {},
    Mask.CAUSAL.value: {"mask": Mask.CAUSAL},
    Feature.VARLEN.value: _PACKED,
    Feature.SOFTCAP.value: {"softcap": 20.0},
    Feature.SCORE_MOD.value: {"score_mod": _SCORE_MOD},
    Feature.FLOAT_MASK.value: {"mask_tensor": MaskTensor.FLOAT},
    Feature.BOOL_MASK.value: {"mask_tensor": MaskTensor.BOOL},
    Feature.MASK_MOD.value: {"mask_mod": _MASK_MOD},
    Feature.BLOCK_MASK.value: {"block_size": LEAST_BLOCK},
    Feature.WINDOW.value: _WINDOW,
    Feature.ALIBI.value: {"alibi": True},
    Feature.ALIBI_GRADIENT.value: {"alibi": True, "alibi_gradient": True},
    Feature.BIAS.value: {"bias": True},
    Feature.BIAS_GRADIENT.value: {"bias": True, "bias_gradient": True},
    Feature.SINKS.value: {"sinks": True},
    Feature.DROPOUT.value: {"dropout_p": 0.1},
    Feature.PARAMS_GRADIENT.value: {"score_mod": _SCORE_MOD, "params_gradient": True},
    "together": {**_SCORES, "mask_tensor": MaskTensor.FLOAT, "bias": True, "bias_gradient": True},
    "together_expressions": {
        **_SCORES,
        "score_mod": _SCORE_MOD,
        "mask_mod": _MASK_MOD,
        "mask_tensor": MaskTensor.FLOAT,
    },
    "together_blocks": {**_WINDOW, "mask_mod": _NEAR, "block_size": LEAST_BLOCK, "softcap": 20.0, "sinks": True},
    "together_varlen": {**_SCORES, **_PACKED},
}
"""What ``--feature`` may name: each mask, each feature, and as many of them as go together."""

TITLES = ("problem", "kernel", "output", "error", *BACKENDS, PLAIN, "ratio", "gate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What to go through.

    Attributes:
        family: None: every one that runs here.
        features: Keys of :data:`FORMS`.
        dtypes, passes: At least one each.
        head_dim: Of all problems.
        is_quick: Only the default structure of each family, and the irregular case.
        jobs: Processes that share the device, in which a kernel may crash or hang; None for this one.
    """

    family: Family | None
    features: tuple[str, ...]
    dtypes: tuple[DType, ...]
    passes: tuple[Pass, ...]
    head_dim: int
    is_quick: bool
    jobs: int | None = None


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


def verify_all(common: Common, device: Device, selection: Selection, out: Path | None = None) -> None:
    """Measure and print, and write the table to a file; exit code 1 if the gate rejects a kernel."""
    kernels = list(_kernels(device, selection))
    rows = []
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=common.progress) as progress:
        task = progress.add_task("verifying", total=len(kernels))
        for row in _measured(kernels, device, selection):
            rows.append(row)
            progress.update(task, advance=1, description=f"verifying {_name(row.problem)}")
    if out is not None:
        write_table(out, _markdown(rows, device), force=True)
    if common.json:
        print_json([_json(row) for row in rows])
    else:
        print_table(f"{len(rows)} kernels: largest errors against float64", _columns(rows), _cells(rows))
    if any(row.is_wrong for row in rows):
        raise click.exceptions.Exit(1)


def _measured(kernels: Sequence[tuple[Problem, Variant]], device: Device, selection: Selection) -> Iterator[Row]:
    """Rows in the order of the kernels, whichever process is done first."""
    if selection.jobs is None:
        yield from (_measure(*kernel, device, selection.is_quick) for kernel in kernels)
        return
    with WorkerPool(selection.jobs, name="verify") as pool:
        futures = [
            pool.submit(functools.partial(_measure_in, *kernel, device, selection.is_quick)) for kernel in kernels
        ]
        yield from (future.result() for future in futures)
        pool.finish()


def _measure_in(problem: Problem, variant: Variant, device: Device, is_quick: bool, worker: Worker) -> Row:
    found = worker.call(_measure, _TIMEOUT_S, problem, variant, device, is_quick)
    if isinstance(found, Failure):
        return Row(problem=problem, variant=variant, reason=found.detail, has_raised=True)
    return found


def structures(space: SearchSpace) -> list[Variant]:
    """One variant of each structure: the default config, or the one that has most in common with it."""
    wanted = space.default().config
    chosen: dict[Choices, tuple[int, Variant]] = {}
    for variant in space.variants():
        common = sum(wanted.get(name) == value for name, value in variant.config.items())
        if variant.structure not in chosen or common > chosen[variant.structure][0]:
            chosen[variant.structure] = (common, variant)
    return [variant for _, variant in chosen.values()]


def covering(space: SearchSpace) -> list[Variant]:
    """Of the structures, so many that every choice of every knob is in one of them, each as usual as may be."""
    usual = space.default().structure

    def changes(variant: Variant) -> int:
        return sum(usual.get(name) != value for name, value in variant.structure.items())

    seen: set[tuple[str, Choice]] = set()
    chosen = []
    for variant in sorted(structures(space), key=changes):
        if not seen.issuperset(variant.structure.items()):
            seen.update(variant.structure.items())
            chosen.append(variant)
    return chosen


def _kernels(device: Device, selection: Selection) -> Iterator[tuple[Problem, Variant]]:
    for feature in selection.features:
        for op in selection.passes:
            for dtype in selection.dtypes:
                problem = _problem(op, dtype, selection.head_dim).replace(**FORMS[feature])
                cell = cell_of(problem, device)
                for family in catalog.families(op, device, problem.features):
                    if selection.family in (None, family):
                        space = catalog.search_space(cell, device, family)
                        every = covering if problem.features else structures
                        some = [space.default()] if selection.is_quick else every(space)
                        yield from ((problem, variant) for variant in some)


def _problem(op: Pass, dtype: DType, head_dim: int) -> Problem:
    return Problem(
        op=op,
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim,
        batch=1,
        heads=4,
        kv_heads=2,
        seqlen_q=_SEQLEN,
        seqlen_k=_SEQLEN,
    )


def _measure(problem: Problem, variant: Variant, device: Device, is_quick: bool) -> Row:
    cases = accuracy_cases(problem)
    results, refusal = [], ""
    try:
        executable = bind(Form.of(problem), variant, device)
        for case in cases[-1:] if is_quick else cases:
            result = accuracy(executable, case, device)
            if isinstance(result, str):
                refusal = result
            else:
                results.append(result)
    except Exception as error:
        # Whatever torch, Triton or the driver throws is this kernel's result, and the next one is still asked.
        return Row(problem=problem, variant=variant, reason=f"{type(error).__name__}: {error}", has_raised=True)
    return Row(problem=problem, variant=variant, results=tuple(results), reason="" if results else refusal)


def _name(problem: Problem) -> str:
    return f"{Form.of(problem)}/{problem.dtype.value}/d{problem.head_dim}"


def _worst(results: Sequence[Accuracy]) -> Errors:
    return max((errors for one in results for errors in one.errors), key=lambda errors: errors.ratio)


def _columns(rows: Sequence[Row]) -> list[Column]:
    return [Column(title=title, numeric=title not in TITLES[:3]) for title in TITLES if title in _used(rows)]


def _used(rows: Sequence[Row]) -> set[str]:
    """Titles of the columns that have something in them."""
    backends = {name for row in rows for one in row.results for errors in one.errors for name in errors.torch}
    return (set(TITLES) - set(BACKENDS)) | backends


def _cells(rows: Sequence[Row]) -> list[list[str]]:
    titles = [column.title for column in _columns(rows)]
    return [[_texts(row).get(title, "-") for title in titles] for row in rows]


def _markdown(rows: Sequence[Row], device: Device) -> str:
    """The table for a repository, with what it was made on and how to make it again."""
    here = environment(device)
    on = f"{device.name} ({device.arch}), torch {here.torch}" + (f", Triton {here.triton}" if here.triton else "")
    wrong = sum(row.is_wrong for row in rows)
    return (
        f"# Errors against float64\n\n`autoflash verify --all` on {on}: {len(rows)} kernels, {wrong} wrong.\n\n"
        "Of each, the output whose error is largest beside that of torch's kernels: the largest absolute error of\n"
        "ours, of torch's backends and of plain torch operations in the same type; the ratio to the best of those;\n"
        f"and the worst finding of the gate, above 1 is wrong.\n\n{markdown_table(_columns(rows), _cells(rows))}\n"
    )


def _texts(row: Row) -> dict[str, str]:
    texts = {"problem": _name(row.problem), "kernel": str(row.variant)}
    if not row.results:
        return {**texts, "output": first_line(row.reason), "gate": "WRONG" if row.is_wrong else "cannot"}
    errors = _worst(row.results)
    return {
        **texts,
        "output": errors.output,
        "error": f"{errors.kernel:.2e}",
        **{name: f"{error:.2e}" for name, error in errors.torch.items()},
        "ratio": number(errors.ratio, 2),
        "gate": "WRONG" if row.is_wrong else number(max(one.gate for one in row.results), 2),
    }


def _json(row: Row) -> dict[str, Json]:
    content: dict[str, Json] = {
        "form": str(Form.of(row.problem)),
        "dtype": row.problem.dtype.value,
        "head_dim": row.problem.head_dim,
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
