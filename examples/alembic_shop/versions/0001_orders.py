"""The orders, and the tables of txbox."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table("orders", sa.Column("number", sa.Integer, primary_key=True))
    op.txbox_upgrade(1)


def downgrade() -> None:
    """The rows of txbox say what has been processed: they stay."""
    op.drop_table("orders")
