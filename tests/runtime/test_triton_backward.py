"""Which kernels a backward call launches, and with what. A record of their launches stands in for the kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType

import pytest
import torch
from torch import Tensor

from autoflash.device import Device
from autoflash.errors import InvalidProblemError, NoKernelError, RenderError, UnsupportedError
from autoflash.problem import DType, Form, Mask, MaskTensor, Problem
from autoflash.runtime import launch
from autoflash.runtime.executable import Extras
from autoflash.runtime.launch import KernelPlan, Layout, Number
from autoflash.runtime.triton_backward import TritonBackward, backward_plans
from autoflash.trial import Resources
from autoflash.variant import Variant
from tests.factories import make_device
from tests.gradients import (
    Inputs,
    backward_problem,
    dropout_rng,
    make_inputs,
    make_variant,
    packed_extras,
    packed_problem,
)

pytest.importorskip("triton")


@dataclass
class Record:
    """What a fake kernel was loaded, bound and launched with."""

    loaded: list[KernelPlan] = field(default_factory=list)
    bound: list[tuple[KernelPlan, tuple[Layout | None, ...], tuple[Number, ...], int]] = field(default_factory=list)
    launched: list[tuple[KernelPlan, tuple[Tensor, ...]]] = field(default_factory=list)

    def functions(self) -> list[str]:
        return [plan.function for plan, _ in self.launched]

    def tensor(self, function: str, parameter: str) -> Tensor:
        plan, tensors = next((plan, tensors) for plan, tensors in self.launched if plan.function == function)
        return tensors[[argument.name for argument in plan.tensors].index(parameter)]

    def number(self, function: str, parameter: str) -> Number:
        plan, _, numbers, _ = next(entry for entry in self.bound if entry[0].function == function)
        return numbers[[argument.name for argument in plan.numbers].index(parameter)]


@dataclass
class FakeKernel:
    plan: KernelPlan
    record: Record
    resources: Resources | None

    def bind(self, layouts: Sequence[Layout | None], numbers: Sequence[Number], programs: int) -> Callable[..., None]:
        assert len(layouts) == len(self.plan.tensors)
        assert len(numbers) == len(self.plan.numbers)
        self.record.bound.append((self.plan, tuple(layouts), tuple(numbers), programs))

        def run(*tensors: Tensor) -> None:
            assert len(tensors) == len(self.plan.tensors)
            self.record.launched.append((self.plan, tensors))

        return run


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    record = Record()

    def load_kernel(module: ModuleType, plan: KernelPlan, device: Device) -> FakeKernel:
        record.loaded.append(plan)
        count = len(record.loaded)
        return FakeKernel(plan, record, Resources(shared_bytes=1000 - count, registers=count, spill_bytes=0))

    monkeypatch.setattr(launch, "load_kernel", load_kernel)
    return record


def _executable(problem: Problem, variant: Variant, arch: str = "sm_90") -> TritonBackward:
    return TritonBackward(Form.of(problem), variant, make_device(arch))


def _call(executable: TritonBackward, problem: Problem, inputs: Inputs, **given: Tensor) -> tuple[Tensor, ...]:
    tensors = (inputs.q, inputs.k, inputs.v, inputs.out)
    prepared = executable.prepare_backward(problem, *tensors, inputs.dout, 0.5, inputs.extras)
    return prepared(*tensors, inputs.lse, inputs.dout, inputs.dlse, extras=inputs.extras, **given)


@pytest.mark.parametrize(
    ("loop_order", "functions"),
    [
        ("split", ["backward_preprocess", "backward_keys", "backward_queries"]),
        ("fused", ["backward_preprocess", "backward_fused"]),
        ("key_outer", ["backward_preprocess", "backward_keys", "backward_postprocess"]),
    ],
)
@pytest.mark.parametrize("loads", ["pointer", "tma"])
def test_each_loop_order_launches_its_kernels_in_order(
    record: Record, loop_order: str, functions: list[str], loads: str
) -> None:
    problem = backward_problem(seqlen_q=128)
    variant = make_variant(loop_order, loads)
    _call(_executable(problem, variant), problem, make_inputs(problem))
    assert record.functions() == functions
    assert tuple(record.loaded) == backward_plans(problem, variant)


def test_programs_cover_every_tile_of_every_head(record: Record) -> None:
    problem = backward_problem(batch=2, heads=6, kv_heads=3, seqlen_q=100, seqlen_k=70)
    variant = make_variant("fused", tiles=(32, 64, 16, 32))
    _call(_executable(problem, variant), problem, make_inputs(problem))
    programs = {plan.function: count for plan, _, _, count in record.bound}
    assert programs["backward_fused"] == 2 * (3 * 2 + 6 * 7)
    assert programs["backward_preprocess"] == 2 * 6


def test_a_call_has_nothing_left_to_load(record: Record) -> None:
    problem = backward_problem(seqlen_q=64)
    executable = _executable(problem, make_variant("split"))
    inputs = make_inputs(problem)
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout)
    assert not executable.is_loaded(problem, *tensors)
    assert executable.resources() is None
    _call(executable, problem, inputs)
    assert executable.is_loaded(problem, *tensors)
    loaded = list(record.loaded)
    _call(executable, problem, inputs.replace(dlse=None))
    _call(executable, problem.replace(batch=problem.batch), inputs)
    assert record.loaded == loaded
    assert executable.resources() == Resources(shared_bytes=999, registers=3, spill_bytes=0)


def test_lengths_that_fill_their_tiles_are_promised_to_the_compiler(record: Record) -> None:
    def constants(seqlen_q: int, seqlen_k: int) -> tuple[object, object]:
        plan = backward_plans(backward_problem(seqlen_q=seqlen_q, seqlen_k=seqlen_k), make_variant("split"))[1]
        return dict(plan.constants)["EVEN_M"], dict(plan.constants)["EVEN_N"]

    assert constants(64, 96) == (True, True)
    assert constants(65, 96) == (False, True)
    assert constants(64, 95) == (True, False)


def test_only_a_strided_tensor_is_read_by_strides(record: Record) -> None:
    problem = backward_problem(seqlen_q=64)
    inputs = make_inputs(problem)
    inputs = inputs.replace(dout=torch.stack([inputs.dout, inputs.dout], dim=-1)[..., 0])
    _call(_executable(problem, make_variant("fused")), problem, inputs)
    constants = dict(next(plan for plan in record.loaded if plan.function == "backward_fused").constants)
    assert "stride_dout_d" not in constants
    assert constants["stride_q_d"] == constants["stride_dq_d"] == 1
    assert record.number("backward_fused", "stride_dout_d") == 2


def test_the_scale_is_given_once_as_it_is_and_once_for_powers_of_two(record: Record) -> None:
    problem = backward_problem(seqlen_q=64)
    _call(_executable(problem, make_variant("fused")), problem, make_inputs(problem))
    assert record.number("backward_fused", "scale") == 0.5
    assert record.number("backward_fused", "log2_scale") == pytest.approx(0.5 * 1.4426950408889634)


def test_a_gradient_of_lse_is_passed_where_there_is_one(record: Record) -> None:
    problem = backward_problem(seqlen_q=64)
    inputs = make_inputs(problem)
    executable = _executable(problem, make_variant("fused"))
    _call(executable, problem, inputs)
    assert record.tensor("backward_preprocess", "dlse_ptr") is inputs.dlse
    record.launched.clear()
    _call(executable, problem, inputs.replace(dlse=None))
    assert record.tensor("backward_preprocess", "dlse_ptr") is inputs.lse
    given = [
        dict(zip((argument.name for argument in plan.numbers), numbers, strict=True))["has_dlse"]
        for plan, _, numbers, _ in record.bound
        if plan.function == "backward_preprocess"
    ]
    assert sorted(set(given)) == [0, 1]


def test_gradients_take_the_memory_order_of_their_tensors(record: Record) -> None:
    problem = backward_problem(batch=2, heads=3, seqlen_q=64)
    inputs = make_inputs(problem)
    inputs = inputs.replace(q=inputs.q.transpose(1, 2).contiguous().transpose(1, 2))
    dq, dk, dv = _call(_executable(problem, make_variant("fused")), problem, inputs)
    assert dq.stride() == inputs.q.stride()
    assert dk.is_contiguous()
    assert dv.is_contiguous()
    assert dq.dtype == dk.dtype == dv.dtype == torch.bfloat16


def test_a_given_gradient_is_written_in_place(record: Record) -> None:
    problem = backward_problem(seqlen_q=64)
    inputs = make_inputs(problem)
    target = torch.empty(1, 64, 2, 64, dtype=torch.bfloat16).transpose(1, 2)
    dq, _, _ = _call(_executable(problem, make_variant("fused")), problem, inputs, dq=target)
    assert dq is target
    assert record.tensor("backward_fused", "dq_ptr") is target


@pytest.mark.parametrize("lengths", [(0, 4), (4, 0)])
def test_where_no_query_sees_a_key_nothing_is_launched(record: Record, lengths: tuple[int, int]) -> None:
    problem = backward_problem(seqlen_q=lengths[0], seqlen_k=lengths[1])
    inputs = make_inputs(problem)
    executable = _executable(problem, make_variant("split"))
    assert executable.is_loaded(problem, inputs.q, inputs.k, inputs.v, inputs.dout)
    for gradient, tensor in zip(_call(executable, problem, inputs), (inputs.q, inputs.k, inputs.v), strict=True):
        assert gradient.shape == tensor.shape
        assert (gradient == 0).all()
    assert record.launched == []


def _reason(variant: Variant, problem: Problem, arch: str = "sm_90", **changes: Tensor) -> str | None:
    inputs = make_inputs(problem).replace(**changes)
    executable = _executable(problem, variant, arch)
    reason = executable.why_not(problem, inputs.q, inputs.k, inputs.v, inputs.dout)
    if reason is not None:
        with pytest.raises(NoKernelError, match=r"needs|deterministic"):
            _call(executable, problem, inputs)
    return reason


def test_a_deterministic_problem_is_refused_by_atomics_only(record: Record) -> None:
    problem = backward_problem(seqlen_q=64, deterministic=True)
    assert "not deterministic" in (_reason(make_variant("key_outer"), problem) or "")
    assert _reason(make_variant("fused"), problem) is None


@pytest.mark.parametrize("term", ["bias", "alibi"])
def test_gradients_of_terms_beside_a_block_mask_are_left_to_tiled_torch(term: str) -> None:
    beside = backward_problem(seqlen_q=256, seqlen_k=256).replace(block_size=128, **{term: True})
    asked = beside.replace(**{f"{term}_gradient": True})

    reasons = [_executable(one, make_variant("split")).why_not(one) for one in (beside, asked)]

    assert reasons[0] is None
    assert "left to tiled torch" in (reasons[1] or "")


def test_descriptors_say_what_they_miss(record: Record) -> None:
    problem = backward_problem(seqlen_q=64)
    variant = make_variant("fused", "tma")
    dout = make_inputs(problem).dout
    strided = torch.stack([dout, dout], dim=-1)[..., 0]
    expanded = torch.ones(1, 1, 1, 64, dtype=torch.bfloat16).expand(dout.shape)
    assert _reason(variant, problem) is None
    assert "dout" in (_reason(variant, problem, dout=strided) or "")
    assert "stride is 0" in (_reason(variant, problem, dout=expanded) or "")
    assert "sm_80" in (_reason(variant, problem, "sm_80") or "")
    assert "head_dim_v is 33" in (_reason(variant, backward_problem(head_dim_v=33, seqlen_q=64)) or "")
    assert _reason(make_variant("fused"), problem, dout=expanded) is None


def test_a_tensor_map_is_told_lawful_strides(record: Record) -> None:
    problem = backward_problem(dtype=DType.FP16, head_dim=40, heads=1, seqlen_q=50, mask=Mask.CAUSAL)
    _call(_executable(problem, make_variant("split", "tma")), problem, make_inputs(problem))
    layouts = next(layouts for plan, layouts, _, _ in record.bound if plan.function == "backward_keys")
    described = [layout for layout in layouts if layout is not None]
    assert len(described) == 6
    for layout in described:
        assert layout.shape == (1, 1, 50, 40)
        assert layout.strides[3] == 1
        assert all(stride > 0 and stride * 2 % 16 == 0 for stride in layout.strides[:3])


def test_a_forward_pass_is_refused() -> None:
    problem = backward_problem()
    inputs = make_inputs(problem)
    with pytest.raises(UnsupportedError, match="backward kernel"):
        _executable(problem, make_variant("split")).prepare_forward(problem, inputs.q, inputs.k, inputs.v, 1.0)


def _masked(mask: Tensor | None = None) -> tuple[Problem, Inputs]:
    problem = backward_problem(seqlen_q=64, seqlen_k=96).replace(mask_tensor=MaskTensor.BOOL)
    mask = torch.ones(1, 2, 64, 96, dtype=torch.bool) if mask is None else mask
    return problem, make_inputs(problem, extras=Extras(mask=mask))


def _tensors(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return inputs.q, inputs.k, inputs.v, inputs.dout


def test_a_bool_mask_is_read_as_bytes(record: Record) -> None:
    problem, inputs = _masked()
    _call(_executable(problem, make_variant("fused")), problem, inputs)
    mask = record.tensor("backward_fused", "mask_ptr")
    assert mask.dtype == torch.uint8
    assert inputs.extras.mask is not None
    assert mask.data_ptr() == inputs.extras.mask.data_ptr()


def test_a_mask_that_lies_otherwise_gets_kernels_of_its_own(record: Record) -> None:
    problem, inputs = _masked()
    executable = _executable(problem, make_variant("fused"))
    call = executable.prepare_backward(problem, *_tensors(inputs)[:3], inputs.out, inputs.dout, 0.5, inputs.extras)
    arguments = (inputs.q, inputs.k, inputs.v, inputs.out, inputs.lse, inputs.dout)
    call(*arguments, extras=inputs.extras)
    loaded = len(record.loaded)
    call(*arguments, extras=Extras(mask=torch.zeros(1, 2, 64, 96, dtype=torch.bool)))
    assert len(record.loaded) == loaded
    skewed = torch.ones(1, 2, 64, 97, dtype=torch.bool)[..., 1:]
    call(*arguments, extras=Extras(mask=skewed))
    assert len(record.loaded) == loaded + 1
    assert record.loaded[-1].function == "backward_fused"
    assert not next(tensor for tensor in record.loaded[-1].tensors if tensor.name == "mask_ptr").aligned
    assert record.launched[-1][1][-1].data_ptr() == skewed.data_ptr()


def test_rows_that_are_all_alike_are_read_once(record: Record) -> None:
    problem, inputs = _masked(torch.ones(1, 1, 1, 96, dtype=torch.bool).expand(1, 2, 64, 96))
    _call(_executable(problem, make_variant("fused")), problem, inputs)
    constants = dict(record.loaded[-1].constants)
    assert constants["MASK_HAS_ROWS"] is False
    assert constants["stride_mask_n"] == 1


def test_whether_kernels_for_a_mask_are_loaded_depends_on_the_mask(record: Record) -> None:
    problem, inputs = _masked()
    executable = _executable(problem, make_variant("split"))
    _call(executable, problem, inputs)
    assert executable.is_loaded(problem, *_tensors(inputs), extras=inputs.extras)
    assert not executable.is_loaded(problem, *_tensors(inputs))
    other = torch.ones(1, 2, 96, 64, dtype=torch.bool).transpose(2, 3)
    assert not executable.is_loaded(problem, *_tensors(inputs), extras=Extras(mask=other))


@pytest.mark.parametrize("missing", ["mask", "rng", "cu_seqlens_q", "cu_seqlens_k"])
def test_a_tensor_that_a_feature_needs_is_asked_for_by_name(record: Record, missing: str) -> None:
    lengths = ((20, 30), (5, 7))
    if missing == "mask":
        problem = backward_problem(seqlen_q=20).replace(mask_tensor=MaskTensor.FLOAT, dropout_p=0.5)
        extras = Extras(mask=torch.zeros(1, 2, 20, 20), rng=dropout_rng())
    else:
        problem = packed_problem(lengths).replace(dropout_p=0.5)
        extras = packed_extras(lengths, rng=dropout_rng())
    inputs = make_inputs(problem, extras=extras)
    lacking = inputs.replace(extras=extras._replace(**{missing: None}))
    with pytest.raises(InvalidProblemError, match=missing):
        _call(_executable(problem, make_variant("split")), problem, lacking)


def test_workspaces_of_packed_sequences_are_those_of_one_long_one_with_padding(record: Record) -> None:
    lengths = ((20, 30), (5, 7))
    problem = packed_problem(lengths, tail=(3, 0), heads=2)
    inputs = make_inputs(problem, extras=packed_extras(lengths))
    _call(_executable(problem, make_variant("key_outer")), problem, inputs)
    assert record.tensor("backward_keys", "acc_ptr").shape == (1, 2, 28, 64)
    # Three slots of 128 rows: for both sequences, and for what lies behind them.
    assert record.tensor("backward_keys", "log2_sum_ptr").shape == (2 * 3 * 128,)
    assert record.tensor("backward_keys", "cu_q_ptr") is inputs.extras.cu_seqlens_q
    assert record.tensor("backward_preprocess", "cu_q_ptr") is inputs.extras.cu_seqlens_q


def test_packed_sequences_have_no_descriptors() -> None:
    problem = packed_problem(((20, 30), (5, 7)))
    with pytest.raises(RenderError, match="pointers"):
        _executable(problem, make_variant("split", "tma"))
