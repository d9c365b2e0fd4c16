"""Sizes into buckets and back: the one place that says which cell a problem belongs to.

Tuning, recording and lookup all come here, so that what was tuned under one key is never looked up under another.
"""

from __future__ import annotations

from autoflash.device import Device, DeviceKind
from autoflash.errors import InvalidProblemError
from autoflash.problem import LEAST_BLOCK, Cell, Feature, Mask, MaskTensor, Parallelism, Problem

TILE_ROWS = 128
"""Query rows that one unit of parallelism stands for."""

# The grid of the published FlashAttention benchmarks: B * S = 16384 tokens, H * D = 2048.
_TOKENS = 16384
_MODEL_DIM = 2048
# What one call may cost a CPU, so that a search there takes seconds: about 0.1 s on two cores.
_CPU_TOKENS = 1024
_CPU_MODEL_DIM = 512
_CPU_FLOPS = 4 * 2**30
# What stands for features whose numbers no cell holds: speed does not depend on them.
_SOFTCAP = 30.0
_DROPOUT_P = 0.1


def bucket(n: int) -> int:
    """Bucket of a sequence length: b holds 2**(b-1) < n <= 2**b; 0 holds 0 and 1."""
    return (n - 1).bit_length() if n > 0 else 0


def parallelism(problem: Problem, device: Device) -> Parallelism:
    """How many query tiles of the problem there are per multiprocessor; an empty problem counts as one row."""
    tiles = max(1, problem.batch) * problem.heads * _tiles(problem.seqlen_q)
    if tiles < device.multiprocessors:
        return Parallelism.LOW
    return Parallelism.MEDIUM if tiles <= 4 * device.multiprocessors else Parallelism.HIGH


def window_bucket(problem: Problem) -> int:
    """Bucket of the number of keys that a window leaves a query: at least 1, and 0 where it is open to a side.

    The query's own position is not counted, for what people call a window of 4096 is (4096, 0) or (4095, 0); and a
    window leaves no more keys than there are, so that all that are as wide as the sequence are one.
    """
    left, right = problem.window_left, problem.window_right
    if problem.causal:
        right = 0
    if not problem.has_window or left is None or right is None:
        return 0
    return max(1, bucket(min(left + right, problem.seqlen_k)))


def cell_of(problem: Problem, device: Device) -> Cell:
    """The cell that a problem is tuned, recorded and looked up under on a device."""
    return Cell(
        op=problem.op,
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        group=problem.group,
        mask=problem.mask,
        deterministic=problem.deterministic,
        tf32=problem.tf32,
        q_bucket=bucket(problem.seqlen_q),
        k_bucket=bucket(problem.seqlen_k),
        parallelism=parallelism(problem, device),
        features=problem.features,
        window_bucket=window_bucket(problem),
        score_mod=problem.score_mod,
        mask_mod=problem.mask_mod,
    )


def problem_of(cell: Cell, device: Device) -> Problem:
    """The problem that stands for a cell: lengths at the top of their buckets, B and H of the cell's parallelism.

    A query bucket that is too long for the parallelism at its top is represented by its longest length that is not.
    On a GPU a cell of high parallelism gives B * S = 16384 tokens and H * D = 2048 wherever that is high enough.
    Packed sequences are B of that length, with no row to spare.

    Raises:
        InvalidProblemError: for a cell that no problem on this device falls into.
    """
    seqlen_q, seqlen_k = _longest_queries(cell, device), 1 << cell.k_bucket
    batch, kv_heads = _rows(cell, device, seqlen_q, seqlen_k)
    left, right = _window(cell, (1 << cell.window_bucket) - 1)
    is_varlen = Feature.VARLEN in cell.features
    return Problem(
        op=cell.op,
        dtype=cell.dtype,
        head_dim=cell.head_dim,
        head_dim_v=cell.head_dim_v,
        batch=batch,
        heads=kv_heads * cell.group,
        kv_heads=kv_heads,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        mask=cell.mask,
        deterministic=cell.deterministic,
        tf32=cell.tf32,
        window_left=left,
        window_right=right,
        softcap=_SOFTCAP if Feature.SOFTCAP in cell.features else 0.0,
        score_mod=cell.score_mod,
        mask_mod=cell.mask_mod,
        params_gradient=Feature.PARAMS_GRADIENT in cell.features,
        block_size=LEAST_BLOCK if Feature.BLOCK_MASK in cell.features else 0,
        mask_tensor=_mask_tensor(cell),
        alibi=Feature.ALIBI in cell.features,
        alibi_gradient=Feature.ALIBI_GRADIENT in cell.features,
        bias=Feature.BIAS in cell.features,
        bias_gradient=Feature.BIAS_GRADIENT in cell.features,
        sinks=Feature.SINKS in cell.features,
        dropout_p=_DROPOUT_P if Feature.DROPOUT in cell.features else 0.0,
        packed_q=batch * seqlen_q if is_varlen else None,
        packed_k=batch * seqlen_k if is_varlen else None,
    )


def inside_of(cell: Cell, device: Device) -> Problem:
    """As :func:`problem_of`, with the largest prime lengths inside the buckets: nothing there divides by a tile."""
    top = problem_of(cell, device)
    seqlen_q, seqlen_k = _prime_up_to(top.seqlen_q), _prime_up_to(top.seqlen_k)
    left, right = _window(cell, _prime_up_to((1 << cell.window_bucket) - 1))
    return top.replace(
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        window_left=left,
        window_right=right,
        packed_q=top.batch * seqlen_q if top.is_varlen else None,
        packed_k=top.batch * seqlen_k if top.is_varlen else None,
    )


def _window(cell: Cell, keys: int) -> tuple[int | None, int | None]:
    """Bounds of a window of so many keys beside the query's own, as even as can be; open to the left in bucket 0."""
    if Feature.WINDOW not in cell.features:
        if cell.window_bucket:
            raise InvalidProblemError(f"the cell {cell} has no window for its window bucket {cell.window_bucket}")
        return None, None
    if cell.window_bucket > max(1, cell.k_bucket):
        raise InvalidProblemError(f"no window leaves more keys than there are: no problem falls into the cell {cell}")
    if not cell.window_bucket:
        return None, 0
    if cell.mask is Mask.CAUSAL:
        return keys, None
    return keys - keys // 2, keys // 2


def _mask_tensor(cell: Cell) -> MaskTensor:
    if Feature.FLOAT_MASK in cell.features:
        return MaskTensor.FLOAT
    return MaskTensor.BOOL if Feature.BOOL_MASK in cell.features else MaskTensor.NONE


def _tiles(seqlen_q: int) -> int:
    return max(1, -(-seqlen_q // TILE_ROWS))


def _most_tiles(cell: Cell, device: Device) -> int | None:
    """Largest number of query tiles that the parallelism admits; None without a limit."""
    if cell.parallelism is Parallelism.HIGH:
        return None
    return device.multiprocessors - 1 if cell.parallelism is Parallelism.LOW else 4 * device.multiprocessors


def _longest_queries(cell: Cell, device: Device) -> int:
    top, most = 1 << cell.q_bucket, _most_tiles(cell, device)
    longest = top if most is None else min(top, most // cell.group * TILE_ROWS)
    if longest <= top // 2:
        raise InvalidProblemError(f"no problem on {device.name} falls into the cell {cell}")
    return longest


def _rows(cell: Cell, device: Device, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """B and H_KV, so that B * H_KV * group query tiles are in the class of the cell."""
    tiles = cell.group * _tiles(seqlen_q)
    batch, kv_heads = _grid(cell, device, seqlen_q, seqlen_k)
    most = _most_tiles(cell, device)
    if most is None:
        fewest = 4 * device.multiprocessors // (tiles * kv_heads) + 1
        return max(batch, fewest), kv_heads
    fewest = 1 if cell.parallelism is Parallelism.LOW else -(-device.multiprocessors // tiles)
    wanted = max(fewest, most // 2 // tiles)
    rows = max(1 << (wanted.bit_length() - 1), fewest)
    kv_heads = max(n for n in range(1, min(rows, kv_heads) + 1) if rows % n == 0)
    return rows // kv_heads, kv_heads


def _grid(cell: Cell, device: Device, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """B and H_KV of the benchmark grid, or of a small one on a CPU."""
    on_cpu = device.kind is DeviceKind.CPU
    longer = max(seqlen_q, seqlen_k)
    batch = max(1, (_CPU_TOKENS if on_cpu else _TOKENS) // longer)
    kv_heads = max(1, (_CPU_MODEL_DIM if on_cpu else _MODEL_DIM) // cell.head_dim // cell.group)
    if on_cpu:
        flops_per_row = 4 * cell.group * seqlen_q * seqlen_k * cell.head_dim
        rows = max(1, _CPU_FLOPS // flops_per_row)
        kv_heads = min(kv_heads, rows)
        batch = max(1, min(batch, rows // kv_heads))
    return batch, kv_heads


def _prime_up_to(n: int) -> int:
    """Largest prime that is at most n; n itself below 2."""
    while n > 3 and any(n % divisor == 0 for divisor in range(2, int(n**0.5) + 1)):
        n -= 1
    return n
