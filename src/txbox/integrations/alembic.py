"""Alembic: the tables of txbox in your migrations, and out of autogenerate's way.

context.configure(..., include_name=include_name, include_object=include_object)    # env.py

import txbox.integrations.alembic    # a migration; it registers the operation

def upgrade():
    op.txbox_upgrade(1)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from alembic.operations import MigrateOperation, Operations
from sqlalchemy.engine import Connection

from txbox.connections import borrow
from txbox.errors import ConfigurationError
from txbox.session import run
from txbox.store import schema as tables
from txbox.store.dialect import dialect

_DIALECTS = {"postgresql": "postgresql", "mysql": "mysql", "mariadb": "mysql", "sqlite": "sqlite"}


def include_name(
    name: str | None, type_: str, parent_names: Any, *, then: Callable[..., bool] | None = None
) -> bool:
    """Keep autogenerate away from txbox's tables in the database: it would drop them.

    Args:
        then: an `include_name` of your own, for everything else; by functools.partial.
    """
    if type_ == "table" and (name or "").startswith("txbox_"):
        return False
    return then is None or then(name, type_, parent_names)


def include_object(
    target: Any,
    name: str | None,
    type_: str,
    reflected: bool,
    compare_to: Any,
    *,
    then: Callable[..., bool] | None = None,
) -> bool:
    """As `include_name`, for tables that were reflected into your metadata, and for what belongs to them."""
    table = target if type_ == "table" else getattr(target, "table", None)
    if (getattr(table, "name", None) or "").startswith("txbox_"):
        return False
    return then is None or then(target, name, type_, reflected, compare_to)


@Operations.register_operation("txbox_upgrade")
class TxboxUpgrade(MigrateOperation):
    """The tables at a version, in the migration's transaction."""

    def __init__(self, version: int, schema: str | None, after: int) -> None:
        self.version = version
        self.schema = schema
        self.after = after

    @classmethod
    def txbox_upgrade(
        cls, operations: Operations, version: int, *, schema: str | None = None, after: int = 0
    ) -> None:
        """Migrate the tables of txbox to a version, from whatever version they are at.

        Write the version as a number: a migration does the same thing tomorrow. `txbox schema check` and
        `txbox.store.schema.VERSION` say which one a release has.

        Args:
            schema: of the tables, as of App(schema=…), on PostgreSQL.
            after: with `--sql`, where no database says it: the version that there is; 0, no tables.

        Raises:
            ConfigurationError: a version that this release does not know, or a database that it does not support.

        There is no way back: the rows say what has been processed. Leave `downgrade` empty.

        Guarantee: where DDL is transactional, a migration that fails leaves the tables as they were.
        """
        operations.invoke(cls(version, schema, after))


@Operations.implementation_for(TxboxUpgrade)
def _upgrade(operations: Operations, operation: TxboxUpgrade) -> None:
    context = operations.get_context()
    if not 1 <= operation.version <= tables.VERSION:
        raise ConfigurationError(
            f"This release knows the tables up to version {tables.VERSION}, not {operation.version}: upgrade txbox."
        )
    name = context.dialect.name
    if name not in _DIALECTS:
        raise ConfigurationError(
            f"txbox does not support {name}: use PostgreSQL, MySQL, MariaDB or SQLite."
        )
    sql_dialect = dialect(_DIALECTS[name], operation.schema)
    if context.as_sql:
        text = tables.migration_text(
            sql_dialect, operation.schema, after=operation.after, upto=operation.version
        )
        for statement in tables.split(text):
            # as it stands: `execute` would take a :name or a % for a parameter
            context.impl.static_output(f"{statement};")
        return
    connection = context.connection
    assert isinstance(connection, Connection)
    run(
        borrow(connection, schema=operation.schema),
        tables.migrate,
        sql_dialect,
        operation.schema,
        upto=operation.version,
    )
