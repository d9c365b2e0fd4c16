"""What Alembic runs for each command: migrations on the connection that ``db.migrate`` hands over."""

from __future__ import annotations

from alembic import context

from autoflash.db.migrate import VERSION_TABLE
from autoflash.db.schema import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    version_table=VERSION_TABLE,
    # SQLite cannot alter most of a table in place; Alembic then copies it.
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
