"""What the forward of the Hopper family takes from Gluon, in torch; enough to run its rendered text."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from autoflash.codegen.render import render
from autoflash.problem import Form, Problem
from autoflash.runtime import gluon_plan
from autoflash.runtime.layouts import TORCH_TYPES, Operand, strides_in_order_of
from autoflash.variant import Variant
from tests.emulated.machine import Barrier, EmulationError, Machine

_BARRIERS = object()
"""The layout of barriers in shared memory."""


class Number(int):
    """An integer of a kernel."""

    def to(self, dtype: object) -> Number:
        """Any type holds it."""
        return self


class Pointer:
    """An address in a tensor's memory, or a tensor of them."""

    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        """``memory`` is flat."""
        self.memory, self.offset = memory, offset

    def __add__(self, step: Any) -> Pointer:
        """So many elements on."""
        return Pointer(self.memory, self.offset + step)


class Shared:
    """A buffer in shared memory; views of it see what is written later."""

    def __init__(self, data: Tensor) -> None:
        """The data itself."""
        self.data, self.dtype = data, data.dtype

    def index(self, place: int) -> Shared:
        """One of the buffers."""
        return Shared(self.data[place])

    def reshape(self, shape: Sequence[int]) -> Shared:
        """The same elements in another shape."""
        return Shared(self.data.view(*shape))

    def permute(self, order: Sequence[int]) -> Shared:
        """The same elements in another order of dimensions."""
        return Shared(self.data.permute(*order))

    def load(self, layout: object) -> Tensor:
        """What is there now."""
        return self.data.clone()

    def store(self, values: Tensor) -> None:
        """Write it."""
        self.data.copy_(values)


class Barriers:
    """Barriers in shared memory."""

    def __init__(self, count: int) -> None:
        """Not initialised yet."""
        self.each = [Barrier() for _ in range(count)]

    def index(self, place: int) -> Barrier:
        """One of them."""
        return self.each[place]


class Descriptor:
    """A tensor as the copy engine sees it: outside there is 0, and nothing is stored."""

    def __init__(self, tensor: Tensor, rows: int, columns: int) -> None:
        """Blocks are [1, 1, rows, columns]."""
        self.tensor, self.rows, self.columns = tensor, rows, columns
        self.dtype, self.layout = tensor.dtype, None
        self.block_type = SimpleNamespace(nbytes=rows * columns * tensor.element_size())

    def read(self, place: Sequence[int]) -> Tensor:
        """The block at a place."""
        block = torch.zeros(1, 1, self.rows, self.columns, dtype=self.dtype)
        inside = self._inside(place)
        block[0, 0, : inside.shape[0], : inside.shape[1]] = inside
        return block

    def write(self, place: Sequence[int], block: Tensor) -> None:
        """Store a block at a place."""
        inside = self._inside(place)
        inside.copy_(block[0, 0, : inside.shape[0], : inside.shape[1]])

    def _inside(self, place: Sequence[int]) -> Tensor:
        b, h, row, column = place
        assert row >= 0
        return self.tensor[b, h, row : row + self.rows, column : column + self.columns]


class _Products:
    """Asynchronous products of one role: they read their operands when they are waited for."""

    def __init__(self) -> None:
        self.issued: list[SimpleNamespace] = []

    def issue(self, a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool) -> SimpleNamespace:
        product = SimpleNamespace(a=a, b=b, acc=acc if use_acc else None, value=None)
        self.issued.append(product)
        return product

    def wait(self, left: int, deps: Sequence[SimpleNamespace]) -> Tensor:
        while len(self.issued) > left:
            product = self.issued.pop(0)
            a = product.a.data if isinstance(product.a, Shared) else product.a
            value = a.float() @ product.b.data.float()
            product.value = value if product.acc is None else product.acc + value
        (product,) = deps
        assert product.value is not None
        return product.value


Edit = tuple[str, str]
"""What stands in the text of a kernel, and what shall stand there."""


def emulate(
    problem: Problem,
    variant: Variant,
    tensors: Sequence[Tensor],
    scale: float,
    *,
    programs: int,
    seed: int,
    edit: Edit = ("", ""),
) -> tuple[Tensor, Tensor]:
    """Output and LSE of a forward, whose programs run one after the other, each in a random order of its roles."""
    plan = gluon_plan.forward_plan(problem, variant, (scale > 0) - (scale < 0))
    constants = dict(plan.constants)
    shape = (problem.batch, problem.heads, problem.seqlen_q, problem.head_dim)
    out = torch.full(shape, float("nan"), dtype=TORCH_TYPES[problem.dtype])
    lse = torch.full(shape[:3], float("nan"))
    tickets = torch.zeros(1, dtype=torch.int32)
    numbers = gluon_plan.forward_numbers(
        problem, variant, Operand.planned(shape, strides_in_order_of(shape, out), out.element_size()), scale
    )
    rows = {"q": 64, "k": constants["BLOCK_N"], "v": constants["BLOCK_N"], "o": 64}
    arguments: dict[str, Any] = {
        f"{name}_desc": Descriptor(tensor, rows[name], constants["BLOCK_D"])  # type: ignore[arg-type]  # they are ints
        for name, tensor in zip("qkvo", (*tensors, out), strict=True)
    }
    arguments |= {"o_ptr": Pointer(out.view(-1)), "lse_ptr": Pointer(lse.view(-1)), "ticket_ptr": Pointer(tickets)}
    arguments |= {argument.name: number for argument, number in zip(plan.numbers, numbers, strict=True)}
    for program in range(programs):
        module = load(problem, variant, Machine(seed + program), program, programs, edit)
        module["attention_forward"](**arguments, **constants)
    assert tickets.item() == 0
    return out, lse


def load(
    problem: Problem, variant: Variant, machine: Machine, program: int = 0, programs: int = 1, edit: Edit = ("", "")
) -> dict[str, Any]:
    """The names of the rendered module, with torch in place of Triton and of what is in assembly."""
    text = render(Form.of(problem), variant.family, variant.structure).text
    assert edit[0] in text
    text = text.replace(*edit) if edit[0] else text
    names: dict[str, Any] = {}
    products: dict[int, _Products] = {}
    modules = _modules(machine, products, program, programs)
    with mock.patch.dict(sys.modules, modules):
        # A torch tensor has a type as well, which is another matter.
        exec(compile(text.replace(".type.layout", ".device"), "<rendered>", "exec"), names)
    turns: dict[int, int] = {}

    def pass_turn(consumer: int) -> None:
        turns[consumer] = turns.get(consumer, 0) + 1
        if turns[consumer] > 1:
            raise EmulationError("a turn is passed to who has not taken the last one")

    def wait_turn(consumer: int) -> None:
        machine.wait(lambda: turns.get(consumer, 0) == 1)
        turns[consumer] = 0

    names |= {
        "exp2": torch.exp2,
        "exp2_mixed": lambda x, n: torch.exp2(x),
        "pin": lambda x: x,
        "zero_of": lambda x: 0,
        "reciprocal": lambda x: 1.0 / x,
        "clamped": lambda x: x.clamp(-7.9, 7.9),
        "uniform": lambda x: Number(x),
        "round_to": lambda x, dtype: x.to(dtype),
        "rescaled": lambda acc, alpha, width: acc * alpha[:, None],
        "pass_turn": pass_turn,
        "wait_turn": wait_turn,
        "Rings": _poisoned(names["Rings"]),
    }
    return names


def _poisoned(rings: Callable[..., Any]) -> Callable[..., Any]:
    """Rings whose slots are filled with NaN as soon as they are handed back."""

    def make(*fields: Any) -> Any:
        made = rings(*fields)
        for buffer, empty in ((made.q, made.q_empty), (made.k, made.k_empty), (made.v, made.v_empty)):
            for place, barrier in enumerate(empty.each):
                barrier.on_complete = lambda data=buffer.data[place]: data.fill_(float("nan"))
        return made

    return make


def _modules(
    machine: Machine, products: dict[int, _Products], program: int, programs: int
) -> dict[str, ModuleType | SimpleNamespace]:
    def own() -> _Products:
        return products.setdefault(threading.get_ident(), _Products())

    def same(x: Any, *_: Any, **__: Any) -> Any:
        return x

    def either(of_tensors: Callable[..., Tensor], of_numbers: Callable[..., int]) -> Callable[..., Any]:
        def chosen(a: Any, b: Any) -> Any:
            if isinstance(a, Tensor) or isinstance(b, Tensor):
                return of_tensors(torch.as_tensor(a), torch.as_tensor(b))
            return of_numbers(a, b)

        return chosen

    def allocate(dtype: torch.dtype, shape: Sequence[int], layout: object) -> Any:
        return Barriers(shape[0]) if layout is _BARRIERS else Shared(torch.zeros(*shape, dtype=dtype))

    def store(pointer: Pointer, values: Any, mask: Tensor | None = None) -> None:
        offset = torch.as_tensor(pointer.offset)
        values = torch.as_tensor(values, dtype=pointer.memory.dtype).expand(offset.shape)
        kept = torch.ones(offset.shape, dtype=torch.bool) if mask is None else mask.expand(offset.shape)
        pointer.memory[offset[kept]] = values[kept]

    def atomic_add(pointer: Pointer, step: int) -> int:
        before = int(pointer.memory[0])
        pointer.memory[0] += step
        return before

    def specialize(roles: Sequence[tuple[Callable[..., object], Sequence[Any]]], *_: object) -> None:
        machine.run([lambda role=role, args=args: role(*args) for role, args in roles])  # type: ignore[misc]  # a default

    def to_shared(desc: Descriptor, place: Sequence[int], barrier: Barrier, buffer: Shared) -> None:
        def copy() -> None:
            buffer.store(desc.read(place))
            barrier.receive(desc.block_type.nbytes)

        machine.copy(copy)

    def wait(barrier: Barrier, parity: int) -> None:
        machine.wait(lambda: barrier.has_completed(parity))

    def arrive(barrier: Barrier, count: int) -> None:
        barrier.arrive(count)
        machine.wait()

    layouts = ("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "BlockedLayout", "SwizzledSharedLayout")
    layouts += ("DistributedLinearLayout",)
    gl = SimpleNamespace(
        **dict.fromkeys(layouts, lambda *_: None),
        tensor=Tensor,
        shared_memory_descriptor=Shared,
        constexpr=same,
        float32=torch.float32,
        int32=torch.int32,
        int64=torch.int64,
        bfloat16=torch.bfloat16,
        float16=torch.float16,
        static_range=range,
        num_warps=lambda: 4,
        program_id=lambda axis: program,
        num_programs=lambda axis: programs,
        cdiv=lambda a, b: -(-a // b),
        minimum=either(torch.minimum, min),
        maximum=either(torch.maximum, max),
        arange=lambda start, end, layout: torch.arange(start, end),
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        where=torch.where,
        max=lambda x, axis: torch.amax(x, axis),
        sum=lambda x, axis: torch.sum(x, axis),
        log2=torch.log2,
        reshape=lambda x, shape: x.reshape(*shape),
        permute=lambda x, order: x.permute(*order),
        split=lambda x: (x[..., 0], x[..., 1]),
        join=lambda x, y: torch.stack((x, y), -1),
        convert_layout=same,
        allocate_shared_memory=allocate,
        store=store,
        atomic_add=atomic_add,
        warp_specialize=specialize,
        inline_asm_elementwise=None,
    )
    mbarrier = SimpleNamespace(
        MBarrierLayout=lambda: _BARRIERS,
        init=lambda barrier, count: barrier.init(count),
        expect=lambda barrier, size: barrier.expect(size),
        arrive=arrive,
        wait=wait,
    )
    tma = SimpleNamespace(
        async_load=to_shared,
        async_store=lambda desc, place, buffer: desc.write(place, buffer.data),
        store_wait=lambda left: None,
    )
    hopper = SimpleNamespace(
        mbarrier=mbarrier,
        tma=tma,
        fence_async_shared=lambda: None,
        warpgroup_mma=lambda *args, **kwargs: own().issue(*args, **kwargs),
        warpgroup_mma_wait=lambda left, deps: own().wait(left, deps),
    )
    gluon = SimpleNamespace(jit=same, constexpr_function=same, language=gl)
    core = SimpleNamespace()
    language = SimpleNamespace(core=core)
    triton = SimpleNamespace(aggregate=same, language=language)
    prefix = "triton.experimental"
    return {
        "triton": triton,
        "triton.language": language,
        "triton.language.core": core,
        prefix: SimpleNamespace(gluon=gluon),
        f"{prefix}.gluon": gluon,
        f"{prefix}.gluon.language": gl,
        f"{prefix}.gluon.language.nvidia": SimpleNamespace(hopper=hopper),
        f"{prefix}.gluon.language.nvidia.hopper": hopper,
    }
