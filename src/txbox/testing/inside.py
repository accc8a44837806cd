"""txbox inside a test's transaction: where it would commit or roll back, it releases or rolls back a savepoint."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from txbox.app import App
from txbox.connections import borrow, open_database
from txbox.connections.base import Database
from txbox.errors import ConfigurationError
from txbox.processing.attempt import InboxProtocol
from txbox.processing.intake import Intake
from txbox.store.inbox import InboxStore
from txbox.testing.savepoints import Savepoints


def inside(app: App, tx: Any) -> App:
    """Return a copy of an app that works in savepoints of the transaction `tx` is in.

    Handlers get `tx` itself. Where txbox would COMMIT, it releases a savepoint; where it would roll back,
    it rolls back to one. Failures are recorded in that transaction too, so a test can read every row, and
    the fixture's rollback removes everything.

    Args:
        tx: any kind of connection or session that `Inbox.accept` takes, with its transaction open.
            Bind an SQLAlchemy Session to the fixture's connection with
            join_transaction_mode="create_savepoint". Inside Django's TestCase no copy is needed:
            App(django=…) nests by itself.

    It cannot show a COMMIT that the database refuses (the guard fires in COMMIT, and the outermost one
    never comes), waiting for another connection, or durability. A handler that commits or rolls back
    `tx` ends the fixture's transaction as well.

    Raises:
        ConfigurationError: `tx` is not in a transaction, or on another kind of database.
    """
    if hasattr(tx, "in_atomic_block"):
        # Django nests by itself, and keeps track of failed blocks
        return _with(app, open_database(tx, schema=app.database.schema))
    return _with(app, _Inside(tx, app.database.schema))


def another_process(app: App) -> App:
    """Return a copy of an app that does not know which ids the first one is working on."""
    return _with(app, app.database)


def _with(app: App, database: Database) -> App:
    dialect = app.store.dialect
    if dialect.name != database.dialect.name:
        raise ConfigurationError(
            f"The app is on {dialect.name}, but the test's transaction is on {database.dialect.name}: use one database."
        )
    if isinstance(database, _Inside):
        # the guard fires in a COMMIT that never comes, so there is nothing to check
        dialect = dataclasses.replace(dialect, queries={**dialect.queries, "guard_check": ""})
    copied = copy.copy(app)
    copied.database = database
    copied.store = InboxStore(dialect, app.store.columns)
    copied.protocol = InboxProtocol(copied.store, app.events, app.limits, app.lease)
    copied.protocol.checked = app.protocol.checked
    copied.intake = Intake(copied.protocol)
    return copied


class _Inside:
    """A database whose only connection is the test's."""

    name = "the test's transaction"

    def __init__(self, tx: Any, schema: str | None) -> None:
        # a sqlite3 connection would commit with the outermost RELEASE
        if getattr(tx, "in_transaction", None) is False:
            raise ConfigurationError(
                f"This {type(tx).__qualname__} is not in a transaction: begin one, so that the test can roll back."
            )
        lent = borrow(tx, is_async=_is_async(tx), schema=schema)
        connections = Savepoints(tx, lent)
        self.schema = schema
        self.dialect = lent.dialect
        self.sync = None if lent.is_async else connections
        self.asynchronous = connections if lent.is_async else None

    def close(self) -> None:
        """Leave the transaction to its owner."""

    async def close_async(self) -> None:
        """Leave the transaction to its owner."""


def _is_async(tx: Any) -> bool:
    return hasattr(tx, "__aenter__") or type(tx).__module__.startswith("asyncpg")
