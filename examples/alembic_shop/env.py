"""Alembic's environment: autogenerate leaves the tables of txbox alone, and `op.txbox_upgrade` is known.

pip install alembic "txbox[sqlalchemy,postgresql]"
createdb shop && alembic upgrade head    # or elsewhere: SHOP_URL=postgresql+psycopg://…
alembic upgrade head --sql
"""

import os

from alembic import context
from sqlalchemy import create_engine
from tables import metadata

from txbox.integrations.alembic import include_name, include_object

url = os.environ.get("SHOP_URL", "postgresql+psycopg://localhost/shop")
options = {
    "target_metadata": metadata,
    "include_name": include_name,
    "include_object": include_object,
}

if context.is_offline_mode():
    context.configure(url=url, literal_binds=True, **options)
    with context.begin_transaction():
        context.run_migrations()
else:
    engine = create_engine(url)
    with engine.connect() as connection:
        context.configure(connection=connection, **options)
        with context.begin_transaction():
            context.run_migrations()
    engine.dispose()
