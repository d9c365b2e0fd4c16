"""The gate on problems with features: honest kernels pass it in every type, and each way to be wrong is rejected."""

from __future__ import annotations

import itertools

import pytest
import torch

from autoflash.evaluate.verify import verify
from autoflash.problem import DType, Feature, Mask, MaskTensor, Pass
from autoflash.trial import Level
from tests.evaluate.candidates import Kernel
from tests.factories import make_problem

FEATURES = {
    Feature.VARLEN: {"packed_q": 256, "packed_k": 256, "batch": 2},
    Feature.SOFTCAP: {"softcap": 50.0},
    Feature.FLOAT_MASK: {"mask_tensor": MaskTensor.FLOAT},
    Feature.BOOL_MASK: {"mask_tensor": MaskTensor.BOOL},
    Feature.WINDOW: {"window_left": 63, "window_right": 15},
    Feature.ALIBI: {"alibi": True},
    Feature.ALIBI_GRADIENT: {"alibi": True, "alibi_gradient": True},
    Feature.BIAS: {"bias": True},
    Feature.BIAS_GRADIENT: {"bias": True, "bias_gradient": True},
    Feature.SINKS: {"sinks": True},
    Feature.DROPOUT: {"dropout_p": 0.1},
}
EVERYTHING = {
    "softcap": 15.0,
    "mask_tensor": MaskTensor.FLOAT,
    "window_left": 90,
    "window_right": 9,
    "alibi": True,
    "alibi_gradient": True,
    "bias": True,
    "bias_gradient": True,
    "sinks": True,
    "dropout_p": 0.3,
}
NOT_PACKED = {"mask_tensor": MaskTensor.NONE, "bias": False, "bias_gradient": False}
PACKED = {**FEATURES[Feature.VARLEN], **EVERYTHING, **NOT_PACKED}

# Wrong in both passes.
FAULTS = {
    Feature.VARLEN: [
        "sequence ends one key too late",
        "sequence ends one key too early",
        "sequence begins one key too early",
        "last query of a sequence is of the next",
        "the beginnings of sequences changed",
    ],
    Feature.SOFTCAP: ["softcap ignored"],
    Feature.ALIBI: [
        "slopes ignored",
        "slopes of the next head",
        "slopes of the first batch entry",
        "distance from one query on",
        "distance without its absolute value",
        "slopes with the other sign",
    ],
    Feature.BIAS: [
        "bias ignored",
        "bias of the first head",
        "bias of the first batch entry",
        "bias transposed",
        "bias one key to the right",
        "bias one query down",
    ],
    Feature.FLOAT_MASK: ["mask ignored", "mask of the first head", "mask of the first batch entry"],
    Feature.BOOL_MASK: [
        "mask ignored",
        "mask inverted",
        "mask of the first head",
        "mask of the first batch entry",
        "mask one key to the right",
        "a mask changed",
    ],
    Feature.WINDOW: [
        "window ignored",
        *(f"window one too {how} to the {side}" for how in ("far", "near") for side in ("left", "right")),
        *(f"diagonal one too {how}" for how in ("far", "near")),
    ],
    Feature.DROPOUT: [
        "dropout ignored",
        "dropout scaled by p",
        "dropout not scaled",
        "dropout of the first head",
        "the offset of the dropout advanced",
    ],
}
FORWARD_FAULTS = {
    Feature.VARLEN: ["out of rows of no sequence not written", "lse of rows of no sequence not written"],
    Feature.SOFTCAP: [],
    Feature.FLOAT_MASK: ["lse finite in blind rows", "average in blind rows"],
    Feature.BOOL_MASK: ["lse finite in blind rows", "average in blind rows"],
    Feature.WINDOW: [],
    Feature.SINKS: ["sink ignored", "sink left out of the lse", "sink of the next head", "sink in base 2"],
    Feature.DROPOUT: ["dropout in the normaliser"],
}
BACKWARD_FAULTS = {
    Feature.VARLEN: [f"{name} of rows of no sequence not written" for name in ("dq", "dk", "dv")],
    Feature.SOFTCAP: ["softcap without its derivative"],
    Feature.FLOAT_MASK: [],
    Feature.BOOL_MASK: [],
    Feature.WINDOW: [],
    Feature.ALIBI_GRADIENT: [
        "dalibi_slopes a little too large",
        "dalibi_slopes of the first batch entry alone",
        "last element of dalibi_slopes not written",
        "dalibi_slopes of the next head",
        "dlse ignored",
    ],
    Feature.BIAS_GRADIENT: [
        "dbias a little too large",
        "dbias of the first batch entry alone",
        "last element of dbias not written",
        "dbias of the next key",
        "dlse ignored",
    ],
    Feature.SINKS: [
        *(f"d{name} a little too large" for name in ("q", "k", "v", "sinks")),
        "last element of dsinks not written",
        "dsinks of the next head",
        "dlse ignored",
    ],
    Feature.DROPOUT: ["another dropout in the backward", "dv without dropout"],
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """The tensors are small: a second thread costs more than it gives."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def problem_of(op, dtype, mask=Mask.FULL, features=None, **changes):
    sizes = {"batch": 1, "heads": 4, "kv_heads": 2, "head_dim": 32, "seqlen_q": 128, "seqlen_k": 128, **changes}
    return make_problem(op=op, dtype=dtype, mask=mask, **sizes).replace(**(features or {}))


@pytest.mark.parametrize("features", [EVERYTHING, PACKED], ids=["everything", "packed"])
@pytest.mark.parametrize(("dtype", "mask"), list(zip(DType, [Mask.CAUSAL, Mask.FULL, Mask.CAUSAL], strict=True)))
@pytest.mark.parametrize("op", Pass)
def test_a_kernel_with_honest_roundings_passes_the_whole_grid_with_all_features(op, dtype, mask, features):
    verification = verify(Kernel(), problem_of(op, dtype, mask, features, head_dim=64), Level.FULL)

    assert verification.passed, verification.detail
    assert 0.0 < verification.worst_ratio <= 1.0
    assert verification.checks > 15


@pytest.mark.parametrize(("feature", "dtype"), list(zip(FEATURES, itertools.cycle(DType))))
@pytest.mark.parametrize("op", Pass)
def test_a_kernel_with_honest_roundings_passes_the_whole_grid_with_each_feature(op, feature, dtype):
    verification = verify(Kernel(), problem_of(op, dtype, Mask.FULL, FEATURES[feature], head_dim=64), Level.FULL)

    assert verification.passed, verification.detail


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("mask", Mask)
@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("op", Pass)
def test_a_kernel_with_honest_roundings_is_timed(op, dtype, mask, feature):
    verification = verify(Kernel(), problem_of(op, dtype, mask, FEATURES[feature]), Level.SCREEN)

    assert verification.passed, verification.detail
    assert verification.checks >= 2


def cases_of(*faults):
    return [(feature, fault) for table in faults for feature, names in table.items() for fault in names]


@pytest.mark.parametrize(("feature", "fault"), cases_of(FAULTS, FORWARD_FAULTS))
@pytest.mark.parametrize("dtype", DType)
def test_a_wrong_forward_is_rejected_before_it_is_timed(dtype, feature, fault):
    problem = problem_of(Pass.FORWARD, dtype, features=FEATURES[feature])

    assert not verify(Kernel(fault), problem, Level.SCREEN).passed


@pytest.mark.parametrize(("feature", "fault"), cases_of(FAULTS, BACKWARD_FAULTS))
@pytest.mark.parametrize("dtype", DType)
def test_a_wrong_backward_is_rejected_before_it_is_timed(dtype, feature, fault):
    problem = problem_of(Pass.BACKWARD, dtype, features=FEATURES[feature])

    assert not verify(Kernel(fault), problem, Level.SCREEN).passed


@pytest.mark.parametrize("features", [FEATURES[Feature.FLOAT_MASK] | {"softcap": 20.0}])
@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("op", Pass)
def test_a_mask_that_is_added_before_the_softcap_is_rejected(op, dtype, features):
    problem = problem_of(op, dtype, features=features)

    assert not verify(Kernel("float mask before the softcap"), problem, Level.SCREEN).passed


@pytest.mark.parametrize("feature", [Feature.BOOL_MASK, Feature.FLOAT_MASK, Feature.WINDOW])
def test_a_maximum_that_begins_at_0_is_rejected_by_the_grid(feature):
    problem = problem_of(Pass.FORWARD, DType.BF16, features=FEATURES[feature])

    assert not verify(Kernel("maximum begins at 0"), problem, Level.FULL).passed


@pytest.mark.parametrize(
    ("fault", "features"),
    [
        ("upper half of the seed ignored", FEATURES[Feature.DROPOUT]),
        ("dropout of the first sequence", FEATURES[Feature.DROPOUT] | FEATURES[Feature.VARLEN]),
    ],
)
@pytest.mark.parametrize("op", Pass)
def test_a_dropout_of_the_wrong_numbers_is_rejected(op, fault, features):
    assert not verify(Kernel(fault), problem_of(op, DType.BF16, features=features), Level.SCREEN).passed


@pytest.mark.parametrize("op", Pass)
def test_a_diagonal_that_is_not_the_sequence_s_own_is_rejected(op):
    problem = problem_of(op, DType.BF16, Mask.CAUSAL, FEATURES[Feature.VARLEN])

    assert not verify(Kernel("diagonal of the longest sequence"), problem, Level.SCREEN).passed
