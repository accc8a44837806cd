"""txbox inside a transaction of the test's: what it would commit is released, what it would roll back is undone."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from txbox.app import App
from txbox.connections import borrow, borrow_async, open_database
from txbox.connections.base import Database
from txbox.errors import ConfigurationError
from txbox.processing.attempt import InboxProtocol
from txbox.processing.intake import Intake
from txbox.steps import AsyncConnections, Connections
from txbox.store.dialect import Dialect
from txbox.store.inbox import InboxStore
from txbox.testing.savepoints import AsyncSavepoints, Savepoints


def inside(app: App, tx: Any) -> App:
    """Return a copy of an app that works in savepoints of the transaction that `tx` is in.

    Handlers get `tx` itself. Where txbox would COMMIT it releases a savepoint, where it would roll
    back it rolls back to it; failures are recorded in that transaction too, so a test can read
    every row, and the fixture's rollback takes all of it away.

    Args:
        tx: a connection or session of any kind that `Inbox.accept` takes, its transaction open. Bind
            an SQLAlchemy Session to the fixture's connection with
            join_transaction_mode="create_savepoint". Inside Django's TestCase no copy is needed:
            App(django=…) nests by itself.

    What it cannot show: a COMMIT that the database refuses (the guard stands in it, and the
    outermost COMMIT never comes), a wait for another connection, durability. A handler that commits
    or rolls back `tx` ends the fixture's transaction as well.

    Raises:
        ConfigurationError: `tx` is in no transaction, or on another kind of database.
    """
    if hasattr(tx, "in_atomic_block"):
        # Django nests by itself, and keeps its own account of failed blocks
        return _with(app, open_database(tx, schema=app.database.schema))
    return _with(app, _Inside(tx, app.database.schema))


def another_process(app: App) -> App:
    """Return a copy of an app that knows nothing of the ids which the first one is working on."""
    return _with(app, app.database)


def _with(app: App, database: Database) -> App:
    dialect = app.store.dialect
    if dialect.name != database.dialect.name:
        raise ConfigurationError(
            f"The app is on {dialect.name} and the test's transaction on {database.dialect.name}: use one database."
        )
    if isinstance(database, _Inside):
        # the guard stands in a COMMIT that never comes: nothing to check
        dialect = dataclasses.replace(dialect, queries={**dialect.queries, "guard_check": ""})
    copied = copy.copy(app)
    copied.database = database
    copied.store = InboxStore(dialect, app.store.columns)
    copied.protocol = InboxProtocol(copied.store, app.events, app.limits, app.lease)
    copied.intake = Intake(copied.protocol)
    return copied


class _Inside:
    """A database whose only connection is the test's."""

    name = "the test's transaction"

    def __init__(self, tx: Any, schema: str | None) -> None:
        # a connection of sqlite3 would commit with the outermost RELEASE
        if getattr(tx, "in_transaction", None) is False:
            raise ConfigurationError(
                f"This {type(tx).__qualname__} is in no transaction: begin one, so that the test can roll back."
            )
        self.schema = schema
        self._sync: Connections | None = None
        self._async: AsyncConnections | None = None
        self._dialect: Dialect
        if _is_async(tx):
            self._async = AsyncSavepoints(tx, connection := borrow_async(tx, schema=schema))
            self._dialect = connection.dialect
        else:
            self._sync = Savepoints(tx, lent := borrow(tx, schema=schema))
            self._dialect = lent.dialect

    @property
    def dialect(self) -> Dialect:
        return self._dialect

    @property
    def sync(self) -> Connections | None:
        return self._sync

    @property
    def asynchronous(self) -> AsyncConnections | None:
        return self._async

    def close(self) -> None:
        """Leave the transaction to its owner."""

    async def close_async(self) -> None:
        """Leave the transaction to its owner."""


def _is_async(tx: Any) -> bool:
    return hasattr(tx, "__aenter__") or type(tx).__module__.startswith("asyncpg")
