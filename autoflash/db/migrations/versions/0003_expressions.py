"""The expressions that a cell asks for."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema from the revision before to this one: nothing that was recorded before has an expression."""
    op.add_column("cell", sa.Column("score_mod", sa.Text(), nullable=True))
    op.add_column("cell", sa.Column("mask_mod", sa.Text(), nullable=True))
