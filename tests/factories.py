"""Nouns with defaults for everything: a test overrides only what it is about."""

from __future__ import annotations

from collections.abc import Sequence

from autoflash.device import CROSS_TARGETS, Device, DeviceKind
from autoflash.problem import Alignment, Cell, DType, Feature, Mask, Parallelism, Pass, Problem
from autoflash.trial import (
    Decision,
    Environment,
    Level,
    Measurement,
    Ranked,
    Resources,
    Stage,
    Status,
    Trial,
    Verification,
)
from autoflash.variant import Choices, Family, Variant

DIGEST = "0123456789abcdef"
TAKEN_AT = "2026-01-02T03:04:05+00:00"

_STRUCTURES: dict[tuple[Family, Pass], Choices] = {
    (Family.TRITON, Pass.FORWARD): Choices(
        loop_order="query_outer",
        loads="pointer",
        pv_order="after_softmax",
        row_sum="each_block",
        mask_loops="split",
        tile_order="rows_first",
    ),
    (Family.TRITON, Pass.BACKWARD): Choices(
        loop_order="split", loads="pointer", mask_loops="branch", dot_order="textbook", tile_order="per_head"
    ),
    (Family.TORCH_TILED, Pass.FORWARD): Choices(loop_order="query_outer"),
    (Family.TORCH_TILED, Pass.BACKWARD): Choices(loop_order="query_outer"),
    (Family.GLUON_SM90, Pass.FORWARD): Choices(
        consumers=2,
        q_operand="registers",
        exponentials="halves",
        ping_pong="off",
        schedule="round_robin",
        output="tma",
    ),
    (Family.GLUON_SM90, Pass.BACKWARD): Choices(dv_issue="after_dp"),
    (Family.VENDOR, Pass.FORWARD): Choices(backend="cudnn"),
    (Family.VENDOR, Pass.BACKWARD): Choices(backend="cudnn"),
}

# Structure knobs whose default is spelled by leaving them out.
_UNSPOKEN = {
    Family.TRITON: {"head_dim_tiles", "rescale", "exp2", "batch_order"},
    Family.GLUON_SM90: {"rescale", "exp2", "consumer_owns", "s_issue", "loop_order"},
}

# Numbers of structures that are not the default.
_UNSPOKEN_NUMBERS = {(Family.GLUON_SM90, Pass.BACKWARD): {"BLOCK_N2", "k_stages2", "v_stages2"}}

_CONFIGS: dict[tuple[Family, Pass], Choices] = {
    (Family.TRITON, Pass.FORWARD): Choices(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2),
    (Family.TRITON, Pass.BACKWARD): Choices(
        BLOCK_M=64,
        BLOCK_N=64,
        BLOCK_M2=64,
        BLOCK_N2=64,
        num_warps=4,
        num_warps2=4,
        num_stages=2,
        num_stages2=2,
    ),
    (Family.GLUON_SM90, Pass.FORWARD): Choices(BLOCK_N=128, num_stages=2, persistent=1),
    (Family.GLUON_SM90, Pass.BACKWARD): Choices(BLOCK_M=64, q_stages=2, do_stages=2),
    (Family.TORCH_TILED, Pass.FORWARD): Choices(block_m=128, block_n=256, heads_per_step=0),
    (Family.TORCH_TILED, Pass.BACKWARD): Choices(block_m=128, block_n=256, heads_per_step=0),
    (Family.VENDOR, Pass.FORWARD): Choices(),
    (Family.VENDOR, Pass.BACKWARD): Choices(),
}


def make_problem(
    *,
    op: Pass = Pass.FORWARD,
    dtype: DType = DType.BF16,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int | None = None,
    seqlen_q: int = 128,
    seqlen_k: int | None = None,
    mask: Mask = Mask.FULL,
    alignment: Alignment = Alignment.BOTTOM_RIGHT,
    deterministic: bool = False,
    tf32: bool = False,
) -> Problem:
    """A small forward problem; ``head_dim_v``, ``kv_heads`` and ``seqlen_k`` follow their partners."""
    return Problem(
        op=op,
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim if head_dim_v is None else head_dim_v,
        batch=batch,
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_q if seqlen_k is None else seqlen_k,
        mask=mask,
        alignment=alignment,
        deterministic=deterministic,
        tf32=tf32,
    )


def make_cell(
    *,
    op: Pass = Pass.FORWARD,
    dtype: DType = DType.BF16,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    group: int = 1,
    mask: Mask = Mask.FULL,
    deterministic: bool = False,
    tf32: bool = False,
    q_bucket: int = 10,
    k_bucket: int | None = None,
    parallelism: Parallelism = Parallelism.HIGH,
    features: tuple[Feature, ...] = (),
    window_bucket: int = 0,
    score_mod: str = "",
    mask_mod: str = "",
) -> Cell:
    """A plain forward cell with 512 < S <= 1024; ``head_dim_v`` and ``k_bucket`` follow their partners."""
    return Cell(
        op=op,
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim if head_dim_v is None else head_dim_v,
        group=group,
        mask=mask,
        deterministic=deterministic,
        tf32=tf32,
        q_bucket=q_bucket,
        k_bucket=q_bucket if k_bucket is None else k_bucket,
        parallelism=parallelism,
        features=features,
        window_bucket=window_bucket,
        score_mod=score_mod,
        mask_mod=mask_mod,
    )


def make_device(arch: str = "sm_90") -> Device:
    """A GPU that code can be compiled for (a key of CROSS_TARGETS), or ``cpu``."""
    if arch == "cpu":
        return Device(
            kind=DeviceKind.CPU, name="Test CPU", arch="x86_64", multiprocessors=2, shared_bytes=0, warp_size=1
        )
    return CROSS_TARGETS[arch]


def make_environment(
    *,
    device: Device | None = None,
    device_name: str | None = None,
    multiprocessors: int | None = None,
    triton: str = "3.6",
    torch: str = "2.13.0",
    driver: str = "580.65",
    cuda: str = "13.0",
) -> Environment:
    """An H200 with Triton 3.6; the name or the SM count may be spoofed."""
    device = device or make_device()
    return Environment(
        device_kind=device.kind.value,
        device_name=device.name if device_name is None else device_name,
        arch=device.arch,
        multiprocessors=device.multiprocessors if multiprocessors is None else multiprocessors,
        shared_bytes=device.shared_bytes,
        triton=triton,
        torch=torch,
        driver=driver,
        cuda=cuda,
    )


def make_variant(
    family: Family = Family.TRITON,
    *,
    op: Pass = Pass.FORWARD,
    structure: Choices | None = None,
    config: Choices | None = None,
    **changes: str | int | bool,
) -> Variant:
    """A variant that sets all knobs of its family; ``changes`` override knobs in whichever half holds them."""
    structure = structure if structure is not None else _STRUCTURES[family, op]
    config = config if config is not None else _CONFIGS[family, op]
    structural = set(structure) | _UNSPOKEN.get(family, set())
    numbers = set(config) | _UNSPOKEN_NUMBERS.get((family, op), set())
    unknown = sorted(set(changes) - structural - numbers)
    if unknown:
        raise ValueError(f"{family.value} has no knob {unknown}")
    return Variant(
        family=family,
        structure=structure.replace(**{name: value for name, value in changes.items() if name in structural}),
        config=config.replace(**{name: value for name, value in changes.items() if name in numbers}),
    )


def make_measurement(
    *,
    median_us: float = 100.0,
    p20_us: float | None = None,
    p80_us: float | None = None,
    stage: Stage = Stage.SCREEN,
    run: str = "",
    samples: int = 50,
    policy: str = "events/cold-l2/v1",
    sm_clock_mhz: int = 1980,
    temperature_c: int = 45,
    power_w: float = 350.0,
    throttled: str = "",
    taken_at: str = TAKEN_AT,
) -> Measurement:
    """A screening time of 100 us; the percentiles lie 1 % beside the median."""
    return Measurement(
        stage=stage,
        run=run,
        median_us=median_us,
        p20_us=0.99 * median_us if p20_us is None else p20_us,
        p80_us=1.01 * median_us if p80_us is None else p80_us,
        samples=samples,
        policy=policy,
        sm_clock_mhz=sm_clock_mhz,
        temperature_c=temperature_c,
        power_w=power_w,
        throttled=throttled,
        taken_at=taken_at,
    )


def make_verification(
    *,
    level: Level = Level.FULL,
    passed: bool = True,
    worst_ratio: float | None = None,
    detail: str = "O of bf16/d64/causal",
    checks: int = 12,
) -> Verification:
    """A passed full verification; a failed one has a ratio above 1."""
    return Verification(
        level=level,
        passed=passed,
        worst_ratio=(0.4 if passed else 17.0) if worst_ratio is None else worst_ratio,
        detail=detail,
        checks=checks,
    )


def make_resources(*, shared_bytes: int = 64 * 1024, registers: int = 168, spill_bytes: int = 0) -> Resources:
    """What a middle-sized kernel needs."""
    return Resources(shared_bytes=shared_bytes, registers=registers, spill_bytes=spill_bytes)


def make_trial(
    *,
    cell: Cell | None = None,
    variant: Variant | None = None,
    environment: Environment | None = None,
    source_digest: str = DIGEST,
    status: Status = Status.CORRECT,
    detail: str | None = None,
    median_us: float = 100.0,
    measurement: Measurement | None = None,
    verification: Verification | None = None,
    resources: Resources | None = None,
    seed: int | None = 0,
) -> Trial:
    """A correct, fully verified trial of 100 us; any other status comes with a reason and without a time."""
    correct = status is Status.CORRECT
    cell = cell or make_cell()
    variant = variant or make_variant(op=cell.op)
    vendor = variant.family is Family.VENDOR
    return Trial(
        cell=cell,
        variant=variant,
        environment=environment or make_environment(),
        source_digest="" if vendor else source_digest,
        status=status,
        detail=("" if correct else f"made to fail: {status.value}") if detail is None else detail,
        resources=resources or (make_resources() if correct and not vendor else None),
        verification=verification or (make_verification() if correct else None),
        measurement=(measurement or make_measurement(median_us=median_us)) if correct else None,
        seed=seed,
    )


def make_ranked(
    *,
    variant: Variant | None = None,
    source_digest: str = DIGEST,
    trial_id: int | None = None,
    median_us: float = 100.0,
    worst_ratio: float = 0.4,
    resources: Resources | None = None,
) -> Ranked:
    """One entry of a decision."""
    variant = variant or make_variant()
    vendor = variant.family is Family.VENDOR
    return Ranked(
        variant=variant,
        source_digest="" if vendor else source_digest,
        trial_id=trial_id,
        median_us=median_us,
        worst_ratio=worst_ratio,
        resources=resources or (None if vendor else make_resources()),
    )


def make_decision(
    *,
    cell: Cell | None = None,
    environment: Environment | None = None,
    choices: Sequence[Ranked] | None = None,
    vendor: Ranked | None = None,
    reason: str = "fastest of 2 within the noise band",
    decided_at: str = TAKEN_AT,
) -> Decision:
    """A decision for two generated kernels, without a vendor."""
    cell = cell or make_cell()
    if choices is None:
        choices = (
            make_ranked(variant=make_variant(op=cell.op, loads="tma"), median_us=90.0),
            make_ranked(variant=make_variant(op=cell.op), median_us=100.0),
        )
    return Decision(
        cell=cell,
        environment=environment or make_environment(),
        choices=tuple(choices),
        vendor=vendor,
        reason=reason,
        decided_at=decided_at,
    )
