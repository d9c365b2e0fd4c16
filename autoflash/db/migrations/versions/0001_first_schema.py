"""First schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema from the revision before to this one."""
    op.create_table(
        "cell",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("key", sa.String(length=16), nullable=False),
        sa.Column(
            "op",
            sa.Enum("forward", "backward", name="op", native_enum=False, create_constraint=True, length=32),
            nullable=False,
        ),
        sa.Column(
            "dtype",
            sa.Enum("fp16", "bf16", "fp32", name="dtype", native_enum=False, create_constraint=True, length=32),
            nullable=False,
        ),
        sa.Column("head_dim", sa.Integer(), nullable=False),
        sa.Column("head_dim_v", sa.Integer(), nullable=False),
        sa.Column("group_size", sa.Integer(), nullable=False),
        sa.Column(
            "mask",
            sa.Enum("full", "causal", name="mask", native_enum=False, create_constraint=True, length=32),
            nullable=False,
        ),
        sa.Column("deterministic", sa.Boolean(), nullable=False),
        sa.Column("tf32", sa.Boolean(), nullable=False),
        sa.Column("q_bucket", sa.Integer(), nullable=False),
        sa.Column("k_bucket", sa.Integer(), nullable=False),
        sa.Column(
            "parallelism",
            sa.Enum("low", "medium", "high", name="parallelism", native_enum=False, create_constraint=True, length=32),
            nullable=False,
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_cell")),
        sa.UniqueConstraint("key", name=op.f("uq_cell_key")),
    )
    op.create_table(
        "environment",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("key", sa.String(length=16), nullable=False),
        sa.Column("device_kind", sa.String(length=16), nullable=False),
        sa.Column("device_name", sa.Text(), nullable=False),
        sa.Column("arch", sa.String(length=32), nullable=False),
        sa.Column("multiprocessors", sa.Integer(), nullable=False),
        sa.Column("shared_bytes", sa.Integer(), nullable=False),
        sa.Column("triton", sa.String(length=32), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_environment")),
        sa.UniqueConstraint("key", name=op.f("uq_environment_key")),
    )
    op.create_table(
        "software",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("torch", sa.String(length=64), nullable=False),
        sa.Column("driver", sa.String(length=64), nullable=False),
        sa.Column("cuda", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_software")),
        sa.UniqueConstraint("torch", "driver", "cuda", name=op.f("uq_software_torch_driver_cuda")),
    )
    op.create_table(
        "variant",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("key", sa.String(length=16), nullable=False),
        sa.Column(
            "family",
            sa.Enum(
                "torch_tiled",
                "triton",
                "gluon_sm90",
                "vendor",
                name="family",
                native_enum=False,
                create_constraint=True,
                length=32,
            ),
            nullable=False,
        ),
        sa.Column("structure", sa.Text(), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_variant")),
        sa.UniqueConstraint("key", name=op.f("uq_variant_key")),
    )
    op.create_table(
        "claim",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("cell_id", sa.Integer(), nullable=False),
        sa.Column("variant_id", sa.Integer(), nullable=False),
        sa.Column("environment_id", sa.Integer(), nullable=False),
        sa.Column("token", sa.String(length=32), nullable=False),
        sa.Column("host", sa.String(length=255), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("started", sa.BigInteger(), nullable=False),
        sa.Column("heartbeat", sa.Double(), nullable=False),
        sa.Column("expires", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["cell_id"], ["cell.id"], name=op.f("fk_claim_cell_id")),
        sa.ForeignKeyConstraint(["environment_id"], ["environment.id"], name=op.f("fk_claim_environment_id")),
        sa.ForeignKeyConstraint(["variant_id"], ["variant.id"], name=op.f("fk_claim_variant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_claim")),
        sa.UniqueConstraint("cell_id", "variant_id", "environment_id", name="uq_claim_triple"),
    )
    op.create_table(
        "decision",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("cell_id", sa.Integer(), nullable=False),
        sa.Column("environment_id", sa.Integer(), nullable=False),
        sa.Column("software_id", sa.Integer(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("decided_at", sa.String(length=40), nullable=False),
        sa.ForeignKeyConstraint(["cell_id"], ["cell.id"], name=op.f("fk_decision_cell_id")),
        sa.ForeignKeyConstraint(["environment_id"], ["environment.id"], name=op.f("fk_decision_environment_id")),
        sa.ForeignKeyConstraint(["software_id"], ["software.id"], name=op.f("fk_decision_software_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_decision")),
    )
    with op.batch_alter_table("decision", schema=None) as batch_op:
        batch_op.create_index(
            batch_op.f("ix_decision_environment_id_cell_id"), ["environment_id", "cell_id"], unique=False
        )

    op.create_table(
        "trial",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("cell_id", sa.Integer(), nullable=False),
        sa.Column("variant_id", sa.Integer(), nullable=False),
        sa.Column("environment_id", sa.Integer(), nullable=False),
        sa.Column("software_id", sa.Integer(), nullable=False),
        sa.Column("source_digest", sa.String(length=16), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column(
            "status",
            sa.Enum(
                "correct",
                "constraints",
                "compile",
                "runtime",
                "correctness",
                "timeout",
                name="status",
                native_enum=False,
                create_constraint=True,
                length=32,
            ),
            nullable=False,
        ),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("shared_bytes", sa.Integer(), nullable=True),
        sa.Column("registers", sa.Integer(), nullable=True),
        sa.Column("spill_bytes", sa.Integer(), nullable=True),
        sa.Column("seed", sa.BigInteger(), nullable=True),
        sa.Column("recorded_at", sa.String(length=40), nullable=False),
        sa.CheckConstraint("attempt >= 1", name=op.f("ck_trial_attempt")),
        sa.ForeignKeyConstraint(["cell_id"], ["cell.id"], name=op.f("fk_trial_cell_id")),
        sa.ForeignKeyConstraint(["environment_id"], ["environment.id"], name=op.f("fk_trial_environment_id")),
        sa.ForeignKeyConstraint(["software_id"], ["software.id"], name=op.f("fk_trial_software_id")),
        sa.ForeignKeyConstraint(["variant_id"], ["variant.id"], name=op.f("fk_trial_variant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_trial")),
        sa.UniqueConstraint(
            "cell_id", "variant_id", "environment_id", "source_digest", "attempt", name="uq_trial_attempt"
        ),
    )
    with op.batch_alter_table("trial", schema=None) as batch_op:
        batch_op.create_index(
            batch_op.f("ix_trial_environment_id_cell_id"), ["environment_id", "cell_id"], unique=False
        )

    op.create_table(
        "measurement",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("trial_id", sa.Integer(), nullable=False),
        sa.Column(
            "stage",
            sa.Enum("screen", "final", name="stage", native_enum=False, create_constraint=True, length=32),
            nullable=False,
        ),
        sa.Column("run", sa.String(length=64), nullable=False),
        sa.Column("median_us", sa.Double(), nullable=False),
        sa.Column("p20_us", sa.Double(), nullable=False),
        sa.Column("p80_us", sa.Double(), nullable=False),
        sa.Column("samples", sa.Integer(), nullable=False),
        sa.Column("policy", sa.String(length=64), nullable=False),
        sa.Column("sm_clock_mhz", sa.Integer(), nullable=False),
        sa.Column("temperature_c", sa.Integer(), nullable=False),
        sa.Column("power_w", sa.Double(), nullable=False),
        sa.Column("throttled", sa.Text(), nullable=False),
        sa.Column("taken_at", sa.String(length=40), nullable=False),
        sa.CheckConstraint("median_us > 0 AND median_us < 1000000000000", name=op.f("ck_measurement_median_us")),
        sa.CheckConstraint("p20_us > 0 AND p20_us < 1000000000000", name=op.f("ck_measurement_p20_us")),
        sa.CheckConstraint("p80_us > 0 AND p80_us < 1000000000000", name=op.f("ck_measurement_p80_us")),
        sa.CheckConstraint("samples >= 1", name=op.f("ck_measurement_samples")),
        sa.ForeignKeyConstraint(["trial_id"], ["trial.id"], name=op.f("fk_measurement_trial_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_measurement")),
    )
    with op.batch_alter_table("measurement", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_measurement_trial_id"), ["trial_id"], unique=False)

    op.create_table(
        "quarantine",
        sa.Column("trial_id", sa.Integer(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("marked_at", sa.String(length=40), nullable=False),
        sa.ForeignKeyConstraint(["trial_id"], ["trial.id"], name=op.f("fk_quarantine_trial_id")),
        sa.PrimaryKeyConstraint("trial_id", name=op.f("pk_quarantine")),
    )
    op.create_table(
        "ranked",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("decision_id", sa.Integer(), nullable=False),
        sa.Column(
            "role",
            sa.Enum("choice", "vendor", name="role", native_enum=False, create_constraint=True, length=32),
            nullable=False,
        ),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("variant_id", sa.Integer(), nullable=False),
        sa.Column("source_digest", sa.String(length=16), nullable=False),
        sa.Column("trial_id", sa.Integer(), nullable=True),
        sa.Column("median_us", sa.Double(), nullable=False),
        sa.Column("worst_ratio", sa.Double(), nullable=False),
        sa.Column("shared_bytes", sa.Integer(), nullable=True),
        sa.Column("registers", sa.Integer(), nullable=True),
        sa.Column("spill_bytes", sa.Integer(), nullable=True),
        sa.CheckConstraint("median_us > 0 AND median_us < 1000000000000", name=op.f("ck_ranked_median_us")),
        sa.ForeignKeyConstraint(["decision_id"], ["decision.id"], name=op.f("fk_ranked_decision_id")),
        sa.ForeignKeyConstraint(["trial_id"], ["trial.id"], name=op.f("fk_ranked_trial_id")),
        sa.ForeignKeyConstraint(["variant_id"], ["variant.id"], name=op.f("fk_ranked_variant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ranked")),
        sa.UniqueConstraint("decision_id", "role", "position", name=op.f("uq_ranked_decision_id_role_position")),
    )
    op.create_table(
        "verification",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("trial_id", sa.Integer(), nullable=True),
        sa.Column("source_digest", sa.String(length=16), nullable=False),
        sa.Column("variant_id", sa.Integer(), nullable=False),
        sa.Column("environment_id", sa.Integer(), nullable=False),
        sa.Column(
            "op",
            sa.Enum("forward", "backward", name="op", native_enum=False, create_constraint=True, length=32),
            nullable=False,
        ),
        sa.Column(
            "dtype",
            sa.Enum("fp16", "bf16", "fp32", name="dtype", native_enum=False, create_constraint=True, length=32),
            nullable=False,
        ),
        sa.Column("head_dim", sa.Integer(), nullable=False),
        sa.Column("head_dim_v", sa.Integer(), nullable=False),
        sa.Column(
            "mask",
            sa.Enum("full", "causal", name="mask", native_enum=False, create_constraint=True, length=32),
            nullable=False,
        ),
        sa.Column("tf32", sa.Boolean(), nullable=False),
        sa.Column(
            "level",
            sa.Enum("none", "screen", "full", name="level", native_enum=False, create_constraint=True, length=32),
            nullable=False,
        ),
        sa.Column("passed", sa.Boolean(), nullable=False),
        sa.Column("worst_ratio", sa.Double(), nullable=True),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("checks", sa.Integer(), nullable=False),
        sa.CheckConstraint("NOT passed OR worst_ratio IS NOT NULL", name=op.f("ck_verification_passed_has_ratio")),
        sa.ForeignKeyConstraint(["environment_id"], ["environment.id"], name=op.f("fk_verification_environment_id")),
        sa.ForeignKeyConstraint(["trial_id"], ["trial.id"], name=op.f("fk_verification_trial_id")),
        sa.ForeignKeyConstraint(["variant_id"], ["variant.id"], name=op.f("fk_verification_variant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_verification")),
    )
    with op.batch_alter_table("verification", schema=None) as batch_op:
        batch_op.create_index("ix_verification_kernel", ["source_digest", "variant_id", "environment_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_verification_trial_id"), ["trial_id"], unique=False)
