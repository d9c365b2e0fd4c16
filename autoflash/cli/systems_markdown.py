"""The results of ``autoflash bench --systems`` as Markdown: bytes by sequence length, then a table for each problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoflash.cli import bench_systems
from autoflash.cli.bench_systems import Comparison, Result
from autoflash.cli.output import Column, markdown_table, size_text
from autoflash.keys import Json

_COUNTED = """\
Bytes of main memory in the IO model of `autoflash analyze` / as counted in DRAM by NVIDIA's ncu. The model knows no L2:
what a kernel finds there is in the first number and not in the second. A count is of one call, from a cold L2, with
what it leaves there to be written back. A dash: not known, or not counted."""
_MODELLED = """\
Bytes of main memory in the IO model of `autoflash analyze`, which knows no L2. A dash: the algorithm is not known."""


def text(compared: Sequence[Comparison], about: Mapping[str, Json]) -> str:
    """The whole file.

    Args:
        compared: One for each problem.
        about: What results files say of the machine.
    """
    is_counted = any(result.dram for one in compared for result in one.results)
    triton = f", Triton {about['triton']}" if about["triton"] else ""
    parts = [
        "# Systems for attention side by side",
        f"On {about['device']} (torch {about['torch']}{triton}, {about['date']}); `{about['command']}` remakes it.",
        "## Bytes",
        _COUNTED if is_counted else _MODELLED,
        markdown_table(*bytes_table(compared)),
        "## Times, memory, errors",
    ]
    for one in compared:
        parts += [f"### {bench_systems.title_of(one.problem)}", markdown_table(*bench_systems.table_of(one))]
    return "\n\n".join(parts) + "\n"


def bytes_table(compared: Sequence[Comparison]) -> tuple[list[Column], list[list[str]]]:
    """Lengths across; a line for each pass, mask, head dimension and system."""
    seqlens = sorted({one.problem.seqlen_q for one in compared})
    columns = [Column(title="pass"), Column(title="mask"), Column(title="D", numeric=True), Column(title="system")]
    columns += [Column(title=f"S={seqlen}", numeric=True) for seqlen in seqlens]
    lines: dict[tuple[str, str, int, str], dict[int, str]] = {}
    for one in compared:
        problem = one.problem
        mask = "+".join([problem.mask.value, *(feature.value for feature in problem.features)])
        for result in one.results:
            line = lines.setdefault((problem.op.value, mask, problem.head_dim, result.system.name), {})
            line[problem.seqlen_q] = _bytes(result)
    return columns, [
        [op, mask, str(head_dim), name, *(line.get(seqlen, "-") for seqlen in seqlens)]
        for (op, mask, head_dim, name), line in lines.items()
    ]


def _bytes(result: Result) -> str:
    modelled = size_text(None if result.traffic is None else result.traffic.total_bytes)
    if result.dram is None:
        return modelled
    return f"{modelled} / {size_text(None if result.moved is None else result.moved.total_bytes)}"
