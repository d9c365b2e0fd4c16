"""The registered operators: what tracing sees is what eager calls compute."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import autoflash
from autoflash.runtime.executable import SINGLE, SINGLE_TERMS
from tests.dispatch.fakes import FakeKernels, dispatching

# Dynamo itself warns of its own deprecations, which filterwarnings=error would make failures of ours.
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning")]

FORWARD = torch.ops.autoflash.attention_forward.default
BACKWARD = torch.ops.autoflash.attention_backward.default
PLAIN = (*(None,) * len(SINGLE), [])
NOT_WANTED = (*(False,) * len(SINGLE_TERMS), [])
NO_FEATURES = (-1, -1, 0.0, 0.0, 0, 0, 0, "", "")
LAYOUTS = list(itertools.product([False, True], repeat=3))
# Tracing through AOTAutograd takes seconds; which strides it sees is the business of the fake tensors' check.
QUICK_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
CHECKED = [
    (layouts, (*QUICK_CHECKS, "test_aot_dispatch_dynamic") if layouts == (True, False, True) else QUICK_CHECKS)
    for layouts in LAYOUTS
]


@pytest.fixture(autouse=True)
def kernels() -> Iterator[FakeKernels]:
    torch.compiler.reset()
    fakes = FakeKernels()
    with dispatching(fakes):
        yield fakes


def make(transposed: bool, *, heads: int = 4, s: int = 13, d: int = 16, grad: bool = False) -> Tensor:
    """[2, heads, s, d], heads outside the positions or inside."""
    tensor = torch.randn(2, s, heads, d).transpose(1, 2) if transposed else torch.randn(2, heads, s, d)
    return tensor.requires_grad_(grad)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = autoflash.attention(q, k, v, causal=True, vendor="never")
    assert isinstance(out, Tensor)
    return out


def compiled(function: Callable[..., Tensor], **options: object) -> Callable[..., Tensor]:
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(("layouts", "checks"), CHECKED)
def test_opcheck_accepts_the_forward(layouts: tuple[bool, bool, bool], checks: tuple[str, ...]) -> None:
    q, k, v = (make(transposed, grad=True) for transposed in layouts)
    arguments = (q, k, v, *PLAIN, 0.25, "bottom_right", False, "never", True, True, *NO_FEATURES)

    result = torch.library.opcheck(FORWARD, arguments, test_utils=checks)

    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize(("layouts", "checks"), CHECKED)
def test_opcheck_accepts_the_backward(layouts: tuple[bool, bool, bool], checks: tuple[str, ...]) -> None:
    q, k, v = (make(transposed) for transposed in layouts)
    options = (0.25, "bottom_right", False, "never", False, True, *NO_FEATURES)
    out, lse = FORWARD(q, k, v, *PLAIN, *options)
    arguments = (torch.randn(out.shape), None, q, k, v, out, lse, *PLAIN, *NOT_WANTED, *options)

    result = torch.library.opcheck(BACKWARD, arguments, test_utils=checks)

    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_both_routes_agree_bitwise(layouts: tuple[bool, bool, bool]) -> None:
    eager = [make(transposed, grad=True) for transposed in layouts]
    traced = [x.detach().clone().requires_grad_() for x in eager]
    weights = torch.randn(2, 4, 13, 16)

    expected = attend(*eager)
    (expected * weights).sum().backward()
    found = compiled(attend)(*traced)
    (found * weights).sum().backward()

    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    for ours, theirs in zip(traced, eager, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def test_a_transposed_module_compiles_whole_and_recompiles_at_most_once() -> None:
    """Tensors as a fused projection makes them; the length is dynamic after the second shape."""
    weight = torch.randn(64, 64)
    from torch._dynamo.testing import CompileCounterWithBackend  # torch imports it only where asked

    counter = CompileCounterWithBackend("aot_eager")

    def block(x: Tensor) -> Tensor:
        q = x.unflatten(-1, (4, 16)).transpose(1, 2)
        return attend(q, q, q).transpose(1, 2).reshape(x.shape) @ weight

    run = torch.compile(block, fullgraph=True, backend=counter)
    for length in (96, 33, 57):
        x = torch.randn(2, length, 64)
        torch.testing.assert_close(run(x), block(x))

    assert counter.frame_count <= 2


def test_the_layout_argument_compiles() -> None:
    q = torch.randn(2, 13, 4, 16)

    def call(q: Tensor) -> Tensor:
        return autoflash.attention(q, q, q, layout="bshd", vendor="never")  # type: ignore[return-value]

    found = compiled(call)(q)

    assert torch.equal(found, call(q))
    assert found.stride() == call(q).stride()


def test_autocast_compiles() -> None:
    q, k, v = make(False), make(True).bfloat16(), make(False)

    with torch.autocast("cpu", torch.bfloat16):
        found = compiled(attend)(q, k, v)
        expected = attend(q, k, v)

    assert found.dtype is torch.bfloat16
    assert torch.equal(found, expected)


def test_a_differentiable_lse_compiles() -> None:
    q, k, v = (make(False, grad=True) for _ in range(3))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = autoflash.attention(q, k, v, return_lse=True, vendor="never")
        return out.sum() + lse.square().sum()

    found = torch.autograd.grad(compiled(call)(q, k, v), (q, k, v))
    expected = torch.autograd.grad(call(q, k, v), (q, k, v))

    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("shape", [((1, 32, 1, 128), (1, 32, 1, 128)), ((2, 3, 77, 40), (2, 1, 50, 40))])
def test_fake_outputs_look_like_real_ones(shape: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with FakeTensorMode():
        q, k = torch.empty(shape[0]), torch.empty(shape[1])
        fake_out, fake_lse = autoflash.attention(q, k, k, return_lse=True)
    q, k = torch.randn(shape[0]), torch.randn(shape[1])

    out, lse = autoflash.attention(q, k, k, return_lse=True)

    assert (fake_out.shape, fake_out.stride(), fake_out.dtype) == (out.shape, out.stride(), out.dtype)
    assert (fake_lse.shape, fake_lse.stride(), fake_lse.dtype) == (lse.shape, lse.stride(), torch.float32)


def test_tracing_with_real_tensors_records_the_operator() -> None:
    q = make(False)

    graph = make_fx(lambda x: attend(x, x, x))(q)

    assert FORWARD in {node.target for node in graph.graph.nodes}


def test_export_keeps_the_operator_whole() -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return attend(x, x, x)

    q = make(False)

    program = torch.export.export(Module(), (q,))

    assert FORWARD in {node.target for node in program.graph.nodes}
    assert torch.equal(program.module()(q), attend(q, q, q))


def test_functorch_takes_gradients() -> None:
    q, k, v = (make(False, grad=True) for _ in range(3))

    found = torch.func.grad(lambda x: attend(x, k, v).square().sum())(q.detach())

    (expected,) = torch.autograd.grad(attend(q, k, v).square().sum(), q)
    torch.testing.assert_close(found, expected)


def test_vmap_maps_over_a_new_dimension() -> None:
    stacked, k = torch.randn(2, 4, 3, 13, 16), make(False)

    def loss(x: Tensor) -> Tensor:
        return attend(x, k, k).square().sum()

    outputs = torch.vmap(lambda x: attend(x, k, k), in_dims=2)(stacked)
    gradients = torch.vmap(torch.func.grad(loss), in_dims=2)(stacked)

    for i in range(3):
        torch.testing.assert_close(outputs[i], attend(stacked[:, :, i], k, k))
        torch.testing.assert_close(gradients[i], torch.func.grad(loss)(stacked[:, :, i]))


def test_a_vendor_kernel_trains_under_the_compiler(kernels: FakeKernels) -> None:
    q, k, v = (make(False, grad=True) for _ in range(3))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return autoflash.attention(q, k, v, vendor="allow").square().sum()  # type: ignore[union-attr]

    found = torch.autograd.grad(compiled(call)(q, k, v), (q, k, v))
    expected = torch.autograd.grad(call(q, k, v), (q, k, v))

    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert {variant.family.value for _, _, variant in kernels.made} == {"vendor"}


def test_a_second_derivative_is_refused_when_compiled() -> None:
    q = make(False, grad=True)
    (dq,) = torch.autograd.grad(compiled(attend)(q, q, q).square().sum(), q, create_graph=True)

    with pytest.raises(RuntimeError, match="aot_autograd does not currently support double backward"):
        dq.sum().backward()
