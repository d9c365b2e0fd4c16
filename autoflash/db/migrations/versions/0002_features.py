"""What a cell asks for beyond plain attention; a verification belongs to a kernel of that form."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema from the revision before to this one: what was recorded before is plain attention."""
    op.add_column("cell", sa.Column("features", sa.Text(), server_default="", nullable=False))
    op.add_column("cell", sa.Column("window_bucket", sa.Integer(), server_default=sa.text("0"), nullable=False))
    op.add_column("verification", sa.Column("features", sa.Text(), server_default="", nullable=False))
