"""Faults that users of other attention kernels reported, as tests of the public functions, on a CPU and on a GPU."""

from __future__ import annotations

import itertools
import logging
import math
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import autoflash
from autoflash.errors import InvalidProblemError, NoKernelError
from autoflash.evaluate import reference

pytestmark = pytest.mark.usefixtures("no_records")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def half(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def attend(q: Tensor, k: Tensor, v: Tensor, vendor: str = "never", **options: object) -> Tensor:
    out = autoflash.attention(q, k, v, vendor=vendor, **options)  # type: ignore[arg-type]
    assert isinstance(out, Tensor)
    return out


def with_gradients(q: Tensor, k: Tensor, v: Tensor, **options: object) -> list[Tensor]:
    """Output and gradients of the sum of its squares."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, **options)  # type: ignore[arg-type]
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]


def exact(q: Tensor, k: Tensor, v: Tensor, **options: object) -> list[Tensor]:
    """The same in float64."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = reference.attention(*leaves, **options)  # type: ignore[arg-type]
    assert isinstance(out, Tensor)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def assert_near(found: list[Tensor], wanted: list[Tensor], dtype: torch.dtype) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        size = max(1.0, float(theirs.abs().max()))
        torch.testing.assert_close(ours.double() / size, theirs.double() / size, atol=TOLERANCE[dtype], rtol=0.0)


@pytest.mark.parametrize("what", ["disk I/O error", "locking protocol", "database is locked", "file is not a database"])
def test_case_a04_a_database_that_fails_costs_one_warning_and_no_call(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("AUTOFLASH_DB", str(tmp_path / "t.sqlite"))
    (tmp_path / "t.sqlite").write_bytes(b"SQLite format 3\0" + bytes(4080))

    def fail(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError(what)

    monkeypatch.setattr(sqlite3, "connect", fail)
    monkeypatch.setattr(sqlite3.dbapi2, "connect", fail)
    autoflash.forget()
    q = torch.randn(1, 2, 9, 16)

    with caplog.at_level(logging.WARNING, "autoflash"):
        for length in (9, 8):
            x = q[:, :, :length]
            torch.testing.assert_close(attend(x, x, x).double(), reference.attention(x, x, x), atol=1e-5, rtol=1e-5)
    autoflash.forget()

    assert len([record for record in caplog.records if "tuning database" in record.getMessage()]) == 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72])
@pytest.mark.parametrize("device", DEVICES)
def test_case_a10_what_lies_around_the_tensors_may_be_nan(device: str, head_dim: int, causal: bool) -> None:
    clean = [torch.randn(2, 4, 100, head_dim, device=device, dtype=half(device)) for _ in range(3)]
    views = []
    for tensor in clean:
        buffer = torch.full((2, 4, 256, head_dim), math.nan, device=device, dtype=tensor.dtype)
        buffer[:, :, :100] = tensor
        views.append(buffer[:, :, :100])

    found, wanted = (with_gradients(*three, causal=causal) for three in (views, clean))

    for ours, theirs in zip(found, wanted, strict=True):
        assert not ours.isnan().any()
        torch.testing.assert_close(ours, theirs, atol=1e-6 if device == "cpu" else 0.0, rtol=0.0)


@pytest.mark.parametrize("head_dim", [40, 72, 80, 96, 160])
@pytest.mark.parametrize("device", DEVICES)
def test_case_a12_padded_columns_are_never_read(device: str, head_dim: int) -> None:
    wide = torch.full((3, 1, 4, 128, 192), math.nan, device=device, dtype=half(device))
    wide[..., :head_dim] = torch.randn(3, 1, 4, 128, head_dim, device=device)
    q, k, v = wide[..., :head_dim]

    first = with_gradients(q, k, v, deterministic=True)

    assert_near(first, exact(q, k, v), half(device))
    for _ in range(3):
        assert all(map(torch.equal, with_gradients(q, k, v, deterministic=True), first))


@pytest.mark.parametrize("head_dim", [16, 32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256])
@pytest.mark.parametrize("device", DEVICES)
def test_case_a14_every_column_of_a_head_counts(device: str, head_dim: int) -> None:
    length = 257 if device == "cuda" else 65
    q, k, v = (torch.randn(2, 3, length, head_dim, device=device, dtype=half(device)) for _ in range(3))
    q[..., 64:] *= 10.0

    for causal in (False, True):
        assert_near(with_gradients(q, k, v, causal=causal), exact(q, k, v, causal=causal), half(device))


@pytest.mark.parametrize("device", DEVICES)
def test_case_a16_gradients_of_slices_of_longer_tensors_stay_in_them(device: str) -> None:
    length = 1024 if device == "cuda" else 192
    q, k, v = (torch.randn(1, 4, length, 64, device=device, dtype=half(device)).requires_grad_() for _ in range(3))
    attend(q, k, v).sum().backward()
    k.grad = v.grad = None

    attend(q, k[:, :, :-64], v[:, :, :-64]).square().sum().backward()

    cut = [x[:, :, :-64].detach().clone().requires_grad_() for x in (k, v)]
    attend(q, *cut).square().sum().backward()
    for whole, part in zip((k, v), cut, strict=True):
        assert whole.grad is not None
        assert part.grad is not None
        torch.testing.assert_close(whole.grad[:, :, :-64], part.grad, atol=TOLERANCE[whole.dtype], rtol=1e-2)
        assert not whole.grad[:, :, -64:].any()


@pytest.mark.parametrize("device", DEVICES)
def test_case_a20_a_compiled_call_knows_the_layout_of_its_output(device: str) -> None:
    weight = torch.randn(256, 32, device=device, dtype=half(device))

    def project(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(q, k, v).transpose(1, 2)
        return out.reshape(*out.shape[:2], 256) @ weight

    compiled = torch.compile(project, fullgraph=True, dynamic=True, backend=compiler(device))
    for length in (128, 196, 257):
        q, k, v = (torch.randn(2, length, 4, 64, device=device, dtype=weight.dtype).transpose(1, 2) for _ in range(3))
        torch.testing.assert_close(compiled(q, k, v), project(q, k, v), atol=TOLERANCE[weight.dtype], rtol=1e-2)


def compiler(device: str) -> str:
    """Inductor needs minutes and a C++ compiler on a CPU; strides are checked either way."""
    return "inductor" if device == "cuda" else "aot_eager"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", DEVICES)
def test_case_a24_autocast_brings_mixed_types_together(device: str, dtype: torch.dtype) -> None:
    q, k = (torch.randn(2, 4, 65, 64, device=device).requires_grad_() for _ in range(2))
    v = torch.randn(2, 4, 65, 64, device=device, dtype=dtype).requires_grad_()

    with torch.autocast(device, dtype):
        out = attend(q, k, v)
    out.float().sum().backward()

    assert out.dtype is dtype
    assert [x.grad.dtype if x.grad is not None else None for x in (q, k, v)] == [torch.float32, torch.float32, dtype]
    with pytest.raises(InvalidProblemError, match="dtype"):
        attend(q, k, v)


@pytest.mark.parametrize("vendor", ["never", "allow"])
@pytest.mark.parametrize("device", DEVICES)
def test_case_a29_every_path_has_one_alignment_of_the_causal_mask(device: str, vendor: str) -> None:
    for queries, keys in ((1, 8), (16, 64)):
        q = torch.randn(1, 1, queries, 64, device=device, dtype=half(device))
        k, v = (torch.randn(1, 1, keys, 64, device=device, dtype=half(device)) for _ in range(2))
        above = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)

        for causal, mask in (("bottom_right", above), (True, above), ("top_left", above.new_ones(above.shape).tril())):
            found = attend(q, k, v, causal=causal, vendor=vendor)
            torch.testing.assert_close(
                found.double(), reference.attention(q, k, v, mask=mask), atol=TOLERANCE[q.dtype], rtol=1e-2
            )


@pytest.mark.parametrize(("shape", "causal"), [((1, 2, 128, 32), True), ((2, 4, 257, 64), False)])
@pytest.mark.parametrize("device", DEVICES)
def test_case_a31_float32_is_float32(device: str, shape: tuple[int, ...], causal: bool) -> None:
    q, k, v = (torch.randn(shape, device=device) for _ in range(3))

    found, wanted = with_gradients(q, k, v, causal=causal), exact(q, k, v, causal=causal)

    assert float((found[0] - wanted[0]).abs().max()) <= 1e-5
    for ours, theirs in zip(found[1:], wanted[1:], strict=True):
        assert float((ours - theirs).abs().max()) <= 1e-4


@pytest.mark.parametrize("device", DEVICES)
def test_case_a32_sequences_shorter_than_a_matrix_unit(device: str) -> None:
    dtype = torch.float16 if device == "cuda" else torch.float32
    for causal in (False, True):
        q = torch.randn(2, 4, 1, 128, device=device, dtype=dtype)
        k, v = (torch.randn(2, 4, 20, 128, device=device, dtype=dtype) for _ in range(2))
        assert_near(with_gradients(q, k, v, causal=causal), exact(q, k, v, causal=causal), dtype)
        for length in range(1, 18):
            q, k, v = (torch.randn(1, 1, length, 64, device=device, dtype=dtype) for _ in range(3))
            assert_near(with_gradients(q, k, v, causal=causal), exact(q, k, v, causal=causal), dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_case_a35_compiled_gradients_lie_where_the_compiler_thinks(device: str) -> None:
    def contiguous() -> Tensor:
        return torch.randn(2, 4, 65, 32, device=device, dtype=half(device))

    def transposed() -> Tensor:
        return torch.randn(2, 65, 4, 32, device=device, dtype=half(device)).transpose(1, 2)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v).float().square().sum()

    makers: tuple[Callable[[], Tensor], ...] = (contiguous, transposed)
    for three in itertools.product(makers, repeat=3):
        leaves = [make().requires_grad_() for make in three]
        torch._dynamo.reset()
        compiled = torch.compile(loss, fullgraph=True, backend=compiler(device))

        found = torch.autograd.grad(compiled(*leaves), leaves)

        for ours, theirs in zip(found, torch.autograd.grad(loss(*leaves), leaves), strict=True):
            torch.testing.assert_close(ours, theirs, atol=TOLERANCE[ours.dtype], rtol=1e-2)
            assert ours.stride() == theirs.stride()


_RANK = """
import torch, autoflash
digest = autoflash.freeze()
names = []
for length, width in ((64, 32), (65, 32), (64, 64), (128, 80), (17, 16)):
    q = torch.zeros(1, 2, length, width)
    names.append([str(part.variant) for part in autoflash.explain(q, q, q, vendor="never").passes])
print(digest, names)
"""


def test_case_a45_every_rank_and_restart_makes_the_same_choice() -> None:
    ranks = [subprocess.Popen([sys.executable, "-c", _RANK], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = {rank.communicate(timeout=300)[0] for rank in ranks}
    again = subprocess.run([sys.executable, "-c", _RANK], stdout=subprocess.PIPE, text=True, timeout=300, check=True)

    assert {rank.returncode for rank in ranks} == {0}
    assert said == {again.stdout}
    assert "torch_tiled" in again.stdout


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(320, torch.float16), (384, torch.float16), (512, torch.float16), (256, torch.float32)],
)
@pytest.mark.parametrize("vendor", ["never", "allow"])
@pytest.mark.parametrize("device", DEVICES)
def test_case_a47_a_head_that_no_kernel_fits_is_served_by_another_or_refused(
    device: str, vendor: str, head_dim: int, dtype: torch.dtype
) -> None:
    q, k, v = (torch.randn(1, 2, 64, head_dim, device=device, dtype=dtype) for _ in range(3))

    try:
        found = with_gradients(q, k, v, vendor=vendor)
    except NoKernelError as error:
        refusal = str(error)
    else:
        assert_near(found, exact(q, k, v), dtype)
        return
    assert f"d{head_dim}" in refusal


@pytest.mark.gpu
def test_case_a49_rows_of_the_accumulator_of_dq_beyond_2_to_31_elements() -> None:
    q, k, v = (torch.randn(12000, 16, 128, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    last = [x[-1:].clone() for x in (q, k, v)]
    leaves = [x.requires_grad_() for x in (q, k, v)]

    found = torch.autograd.grad(attend(*leaves), leaves, torch.ones(1, device="cuda", dtype=q.dtype).expand_as(q))

    alone = [x.requires_grad_() for x in last]
    wanted = torch.autograd.grad(attend(*alone), alone, torch.ones_like(last[0]))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours[-1:], theirs, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("shape_q", "shape_k"), [((1, 32, 1, 128), (1, 32, 1, 128)), ((2, 3, 77, 40), (2, 3, 77, 40))])
@pytest.mark.parametrize("device", DEVICES)
def test_case_a53_a_fake_lse_looks_like_a_real_one(
    device: str, shape_q: tuple[int, ...], shape_k: tuple[int, ...]
) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k = torch.empty(shape_q, device=device), torch.empty(shape_k, device=device)
        fake = autoflash.attention(q, k, k, return_lse=True)
    q, k = torch.randn(shape_q, device=device), torch.randn(shape_k, device=device)
    real = autoflash.attention(q, k, k, return_lse=True)

    for ours, theirs in zip(fake, real, strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
    assert real[1].shape == shape_q[:3]
    assert real[1].dtype is torch.float32
