"""The device functions that both passes share, each on its own, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from autoflash.codegen.environment import environment
from autoflash.evaluate.reference import dropout_keep
from autoflash.problem import Feature, Form, Mask, Pass
from autoflash.runtime.dropout import keep_scale, threshold

# Triton 3.6's interpreter takes arrays of one element for numbers.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning")

KERNELS = '''"""Kernels around the shared partials."""

from typing import NamedTuple

import triton
import triton.language as tl

{% include "triton/_softcap.py.j2" %}

{% include "triton/_dropout.py.j2" %}

{% include "triton/_sequences.py.j2" %}


@triton.jit
def saturation(x_ptr, t_ptr, slope_ptr, steepness, COUNT: tl.constexpr):
    offs = tl.arange(0, COUNT)
    t = saturate(tl.load(x_ptr + offs), Softcap(steepness, 1.0))
    tl.store(t_ptr + offs, t)
    tl.store(slope_ptr + offs, saturation_slope(t))


@triton.jit
def keep(
    rng_ptr,
    out_ptr,
    threshold,
    off_b,
    off_h,
    n_heads,
    start_m,
    start_n,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    KEYS_DOWN: tl.constexpr,
):
    dropout = dropout_of(rng_ptr, threshold, off_b, off_h, n_heads)
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    places = cols[:, None] + rows[None, :] * COLS if KEYS_DOWN else rows[:, None] * COLS + cols[None, :]
    tl.store(out_ptr + places, kept(dropout, start_m, start_n, ROWS, COLS, KEYS_DOWN).to(tl.int8))


@triton.jit
def slot_of(cu_ptr, out_ptr, n_sequences, n_rows, slot, BLOCK: tl.constexpr):
    index, tile = find_sequence(cu_ptr, n_sequences, slot, BLOCK)
    begin, length = rows_of(cu_ptr, n_sequences, index, n_rows)
    _, partners = rows_of(cu_ptr, n_sequences, index, 0)
    tl.store(out_ptr, index)
    tl.store(out_ptr + 1, tile)
    tl.store(out_ptr + 2, begin)
    tl.store(out_ptr + 3, length)
    tl.store(out_ptr + 4, partners)
'''


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    form = Form(op=Pass.BACKWARD, mask=Mask.FULL, features=(Feature.VARLEN, Feature.SOFTCAP, Feature.DROPOUT))
    path: Path = tmp_path_factory.mktemp("kernels") / "shared_partials.py"
    path.write_text(environment().from_string(KERNELS).render(problem=form, structure={}), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_hyperbolic_tangent_has_all_its_digits_at_every_size(kernels: ModuleType) -> None:
    x = torch.cat([torch.linspace(-1.5, 1.5, 768), torch.logspace(-20, 4, 192), -torch.logspace(-8, 3, 64)])
    t, slope = torch.empty_like(x), torch.empty_like(x)

    with np.errstate(over="ignore"):
        kernels.saturation[(1,)](x, t, slope, 2.0, len(x))

    exact = torch.tanh(2.0 * x.double())
    torch.testing.assert_close(t.double(), exact, rtol=4e-7, atol=0.0)
    torch.testing.assert_close(slope.double(), 1.0 - exact**2, rtol=0.0, atol=6e-7)


@pytest.mark.parametrize("keys_down", [False, True])
@pytest.mark.parametrize(("seed", "offset"), [(0, 0), (-(2**62) + 12345, 2**33 + 2**32 - 1)])
def test_kept_pairs_are_those_of_the_specification(
    kernels: ModuleType, keys_down: bool, seed: int, offset: int
) -> None:
    rng = torch.tensor([seed, offset])
    for batch, head, start_m, start_n in ((0, 0, 0, 0), (3, 1, 48, 64)):
        out = torch.zeros(16, 32, dtype=torch.int8)
        kernels.keep[(1,)](rng, out, threshold(0.4), batch, head, 2, start_m, start_n, 16, 32, keys_down)

        expected = dropout_keep(rng, 0.4, batch + 1, 2, slice(start_m, start_m + 16), start_n + 32, "cpu")
        assert torch.equal(out.bool(), expected[batch, head, :, start_n:])
        assert 0.3 < out.float().mean() < 0.9


def test_packed_heads_are_counted_beyond_31_bits(kernels: ModuleType) -> None:
    rng, out = torch.tensor([1, 2]), torch.zeros(2, 16, 16, dtype=torch.int8)

    # The number of a head is taken modulo 2**32, and not of int32.
    kernels.keep[(1,)](rng, out[0], threshold(0.5), 2**20, 5, 2**12, 0, 0, 16, 16, False)
    kernels.keep[(1,)](rng, out[1], threshold(0.5), 0, 5, 2**12, 0, 0, 16, 16, False)

    assert torch.equal(out[0], out[1])


def test_every_slot_finds_its_sequence_and_tile(kernels: ModuleType) -> None:
    block, rows = 16, 120
    cu = torch.tensor([0, 0, 5, 5, 40, 41, 41, 105], dtype=torch.int32)
    sequences = len(cu) - 1
    tiles: dict[int, list[int]] = {}

    for slot in range(rows // block + sequences + 1):
        out = torch.zeros(5, dtype=torch.int32)
        kernels.slot_of[(1,)](cu, out, sequences, rows, slot, block)
        index, tile, begin, length, partners = out.tolist()
        assert begin == cu[index]
        assert length == (rows if index == sequences else cu[index + 1]) - begin
        assert partners == (0 if index == sequences else length)
        tiles.setdefault(index, []).append(tile)

    for index, found in tiles.items():
        end = rows if index == sequences else cu[index + 1]
        assert found == list(range(len(found)))
        assert len(found) * block >= end - cu[index]
    assert sorted(tiles) == list(range(sequences + 1))


def test_one_of_very_many_sequences_is_found(kernels: ModuleType) -> None:
    sequences = 100_000
    cu = torch.arange(sequences + 1, dtype=torch.int32) * 3
    out = torch.zeros(5, dtype=torch.int32)

    for index in (0, 1, 65_535, 65_536, 99_999, 100_000):
        kernels.slot_of[(1,)](cu, out, sequences, 3 * sequences + 7, int(cu[index]) // 64 + index, 64)
        assert out.tolist()[:3] == [index, 0, 3 * index]


def test_threshold_and_scale_of_dropout() -> None:
    assert (threshold(0.0), threshold(0.5), threshold(1.0 - 2.0**-40)) == (0, 2**31, 2**32 - 1)
    assert keep_scale(0.75) == 4.0
