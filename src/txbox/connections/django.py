"""Django's connections: `App(django="default")`, or `django.db.connection` inside the caller's `atomic()`.

A handler runs inside `transaction.atomic(durable=True)` on this thread's connection. Inside Django's
TestCase, the test's own transaction surrounds it: everything works, except that COMMIT becomes the
release of a savepoint. Django's transactions are sync only, and so are its handlers.
"""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from datetime import timezone
from math import inf
from typing import Any

from django.db import Error, InterfaceError, OperationalError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import TransactionManagementError
from django.utils.connection import ConnectionDoesNotExist, ConnectionProxy

from txbox.connections.base import (
    MAX_PACKET,
    PROBE,
    ConnectionSource,
    Database,
    Executor,
    begins_marked,
    check_closed,
    check_committed,
    check_session,
    closes,
    connection_lost,
    cut_off_bytes,
    dbapi_error,
    handler_left,
    is_marked,
    not_in_transaction,
    not_released,
    of_valid_sql,
    packet_too_large,
    plain_rows,
    refused_commit,
    store_error,
    sync_async_mismatch,
)
from txbox.connections.settings import Settings
from txbox.errors import ConfigurationError, Fault, StoreError
from txbox.session import Connection, OnStatement, Raised, Result, Statement, Statements, blocking
from txbox.store.dialect import Dialect, dialect, native

_VENDORS = {"postgresql", "mysql", "sqlite"}


class _RolledBack(Exception):
    """Passed to `atomic` to make it roll back."""


def open_alias(alias: str, *, schema: str | None = None) -> DjangoDatabase:
    """Use a database from Django's settings."""
    return DjangoDatabase(alias, schema)


def open_object(target: Any, *, schema: str | None = None) -> DjangoDatabase:
    """Use a connection's database; each worker thread has its own connection."""
    if isinstance(target, (BaseDatabaseWrapper, ConnectionProxy)):
        return DjangoDatabase(str(target.alias), schema)
    raise ConfigurationError(
        f"App() cannot use this {type(target).__qualname__}: name a database in settings.DATABASES, "
        "App(django='default')."
    )


class DjangoDatabase(Database):
    """Where Django's connections come from, which stay open. Settings are read on first use."""

    check = "settings.DATABASES, and that the server is running"

    def __init__(self, alias: str, schema: str | None) -> None:
        super().__init__(f"the Django database {alias!r}", schema, None)
        self.alias = alias
        self.sync = _Connections(self)

    @property
    def dialect(self) -> Dialect:
        # late, because Django's settings may be configured after the App
        if self._dialect is None:
            self._dialect = _dialect_of(_wrapper(self.alias), self.schema)
        return self._dialect


class _Connections(ConnectionSource):
    def __init__(self, database: DjangoDatabase) -> None:
        super().__init__(is_async=False)
        self._database = database

    @property
    def idle_limit(self) -> Statements:
        # late, as the dialect is
        return self._database.dialect.idle_limit

    async def acquire(self) -> DjangoConnection:
        wrapper = _wrapper(self._database.alias)
        if not wrapper.in_atomic_block:
            _check_autocommit(wrapper)
            # as at the start of a request: an error or CONN_MAX_AGE may have ended this connection
            wrapper.close_if_unusable_or_obsolete()
            _close_broken()
        try:
            # done here, so that a failure is known to be the connection's
            wrapper.ensure_connection()
            check_session(wrapper.connection, dates=True)
        except Error as error:
            cause = error.__cause__ or error
            self._database.hosts = [wrapper.settings_dict["HOST"]]
            code = dbapi_error(cause, self._database.dialect).code
            raise await self._database.unreachable(cause, code) from error
        connection = DjangoConnection(wrapper, self._database.dialect)
        connection.listen(self._database.handler_settings)
        return connection

    async def release(self, connection: DjangoConnection) -> None:
        connection.listen(None)
        if connection.stained and not connection.native.in_atomic_block:
            # what the project's settings and signals have set is not ours to set again
            connection.native.close()
        elif not connection.native.in_atomic_block:
            connection.native.close_if_unusable_or_obsolete()

    def distrust(self, connection: DjangoConnection) -> None:
        # other threads have connections of their own, and Django checks one that reported an error; but its pool
        # of psycopg's would give out one dead connection after the other
        pool = getattr(connection.native, "pool", None)
        if pool is not None:
            from txbox.connections.libpq import close_idle

            idle = pool.get_stats()["pool_available"]
            blocking(close_idle(pool, idle, is_async=False))


class DjangoConnection(Connection):
    """This thread's connection, in transactions that txbox begins and ends."""

    is_async = False

    def __init__(self, wrapper: Any, sql_dialect: Dialect) -> None:
        self.native = wrapper
        self._dialect = sql_dialect
        self._atomic: Any = None
        #: Around handlers whose failures must not affect each other.
        self._within: Any = None
        self._nested = False
        self._claims = False
        self._watched = False
        self._fatal = False
        self._wrapper: Any = None
        self._hears: Any = None
        self._wrappers: list[Any] = []
        self._object: Any = None

    def listen(self, settings: Settings | None) -> None:
        """Hear what the handler sends; without settings, no longer."""
        wrapper = self.native
        if settings is None:
            self.restore()
            if self._hears is not None:
                wrapper.execute_wrappers.remove(self._hears)
            if self._object is not None:
                self._object.leave()
            self._hears = self._object = None
            return

        def hears(execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
            self.sets(settings.of(str(sql)))
            return execute(sql, params, many, context)

        self._hears = hears
        wrapper.execute_wrappers.append(hears)
        self._wrappers = list(wrapper.execute_wrappers)
        if hasattr(wrapper.connection, "adapters"):
            from txbox.connections.libpq import watched_in_pool

            self._object = watched_in_pool(wrapper.connection, settings, self.sets)

    def restore(self) -> None:
        if self._hears is not None and self.native.execute_wrappers != self._wrappers:
            self.native.execute_wrappers[:] = self._wrappers
        if self._object is not None:
            self._object.restore()

    def watch(self, on_statement: OnStatement) -> None:
        def wrapper(execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
            on_statement(str(sql), params)
            return execute(sql, params, many, context)

        self.native.execute_wrappers.append(wrapper)
        self._wrappers.append(wrapper)
        self._wrapper = wrapper

    def has_ended(self) -> bool:
        if self.native.closed_in_transaction:
            # only its user closes it
            return self._watched
        return self._watched and not self.lost and not is_marked(self.native.connection)

    @property
    def lost(self) -> bool:
        if self._fatal or self.native.connection is None or self.native.closed_in_transaction:
            return True
        driver = self.native.connection
        # psycopg has `closed`, the MySQL drivers have `open`
        return bool(getattr(driver, "closed", False)) or not getattr(driver, "open", True)

    def translate(self, error: BaseException) -> StoreError | None:
        return _translated(error, self._dialect, self.native)

    def _check_open(self) -> None:
        if self.native.closed_in_transaction:
            raise handler_left("it closed its connection")

    async def execute(self, statement: Statement) -> Result:
        self._check_open()
        if statement.name == "rollback_to_claim":
            # also allowed in a transaction that Django has marked
            self.native.needs_rollback = False
        try:
            return check_closed(statement, _executed(self.native, statement))
        except (Error, self.native.Database.Error) as error:
            failure = self._failure(error)
            if self._dialect.name == "mysql" and (size := cut_off_bytes(statement, failure)):
                failure = packet_too_large() if size > self._packet_bytes() else failure
            raise failure from error

    def _packet_bytes(self) -> float:
        """The largest statement that the server takes: it may close the connection without saying so."""
        other = self.native.copy()
        try:
            return int(_executed(other, MAX_PACKET).rows[0][0])
        except (Error, self.native.Database.Error):
            # the server is away after all
            return inf
        finally:
            other.close()

    async def begin(self, statements: Statements) -> list[Result]:
        wrapper = self.native
        self._nested = wrapper.in_atomic_block
        atomic = transaction.atomic(using=wrapper.alias, durable=True)
        try:
            wrapper.ensure_connection()
            if (
                not self._nested
                and wrapper.vendor == "mysql"
                and wrapper.isolation_level != "read committed"
            ):
                self._read_committed()
            atomic.__enter__()
            self._atomic = atomic
            if not self._nested:
                self._prepare_transaction()
        except RuntimeError as error:
            raise ConfigurationError(
                "txbox needs a transaction of its own, but was called inside an atomic block",
                "call it outside, or use Inbox.accept(django.db.connection, …).",
            ) from error
        except (Error, wrapper.Database.Error) as error:
            raise self._failure(error) from error
        self._claims = any(statement.name.startswith("claim") for statement in statements)
        results = [await self.execute(statement) for statement in statements]
        self._watched = begins_marked(wrapper.connection, statements)
        self.changed = None
        return results

    def _prepare_transaction(self) -> None:
        if self.native.vendor == "postgresql":
            self._read_committed()
        elif self.native.vendor == "sqlite" and _begins_deferred(self.native):
            # a transaction that reads first cannot become a writer later
            self.native.connection.execute("ROLLBACK")
            self.native.connection.execute("BEGIN IMMEDIATE")

    def _read_committed(self) -> None:
        with self.native.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")

    async def savepoint(self) -> None:
        inner = transaction.atomic(using=self.native.alias)
        try:
            inner.__enter__()
        except (Error, self.native.Database.Error) as error:
            raise self._failure(error) from error
        self._within = inner

    async def release_savepoint(self) -> None:
        self._check_open()
        if self.native.needs_rollback:
            marked = _marked()
            raise Raised(marked, marked, self.lost)
        inner, self._within = self._within, None
        try:
            inner.__exit__(None, None, None)
        except (Error, self.native.Database.Error) as error:
            # atomic() has rolled back to the savepoint
            raise not_released(self._failure(error), self.lost) from error

    async def rollback_to_savepoint(self) -> None:
        self._check_open()
        try:
            self._leave_inner()
        except (Error, self.native.Database.Error) as error:
            raise not_released(self._failure(error), self.lost) from error
        if self.native.needs_rollback and self.lost:
            # the server went away behind the failure; here too, Django says that only a rollback is possible
            raise connection_lost()
        if self.native.needs_rollback:
            raise handler_left("its savepoint is gone")

    def _leave_inner(self) -> None:
        inner, self._within = self._within, None
        if inner is not None:
            rolled_back = _RolledBack()
            inner.__exit__(type(rolled_back), rolled_back, None)

    async def commit(self, statements: Statements) -> list[Result]:
        if self.native.needs_rollback and not self.native.closed_in_transaction:
            raise _marked()
        if self._nested and self._claims and not closes(statements):
            # the claim found nothing new but armed the guard, which must not stay armed in the outer transaction
            results = [await self.execute(statement) for statement in statements]
            await self.rollback()
            return results
        results = [await self.execute(statement) for statement in statements or (PROBE,)]
        if not self._nested:
            # these run after the transaction is committed: Django logs their exceptions, which must not
            # look like a failed COMMIT
            self.native.run_on_commit = [
                (ids, call, True) for ids, call, _ in self.native.run_on_commit
            ]
        try:
            if not self._nested:
                _committed(self.native)
            atomic, self._atomic = self._atomic, None
            atomic.__exit__(None, None, None)
        except (Error, self.native.Database.Error, StoreError) as error:
            failure = error if isinstance(error, StoreError) else self._failure(error)
            failure.definite = refused_commit(failure)
            raise failure from error
        return results if statements else []

    async def rollback(self) -> None:
        try:
            self._leave()
        except (Error, self.native.Database.Error) as error:
            raise self._failure(error) from error

    def discard(self) -> None:
        self.listen(None)
        if self._wrapper is not None:
            # the thread's connection object stays, and opens another connection
            self.native.execute_wrappers.remove(self._wrapper)
            self._wrapper = None
        if self._atomic is None:
            if not self._nested:
                self._close()
            return
        if not self._nested:
            # if closed first, atomic() sends nothing
            self._close()
        self._leave()

    def _close(self) -> None:
        raw = self.native.connection
        if raw is not None and self.native.vendor == "sqlite":
            # see its own adapter: a statement that is not read to its end would keep the transaction
            with suppress(sqlite3.Error):
                raw.rollback()
        self.native.close()

    def _leave(self) -> None:
        self._leave_inner()
        atomic, self._atomic = self._atomic, None
        if atomic is not None:
            rolled_back = _RolledBack()
            atomic.__exit__(type(rolled_back), rolled_back, None)

    def _failure(self, error: BaseException) -> StoreError:
        failure = self.translate(error)
        if failure is None:
            # Django itself refused: the transaction cannot be used any more
            failure = store_error(error, self._dialect, code=None)
            failure.fault = Fault.ABORTED
        self._fatal = self._fatal or failure.fault is Fault.UNAVAILABLE
        return failure


def _marked() -> StoreError:
    return StoreError(
        "Django marked the transaction for rollback: the handler caught a database error that had failed it.",
        fault=Fault.ABORTED,
    )


class Borrowed(Executor):
    """The caller's connection, in the caller's `atomic()`."""

    async def _execute(self, statement: Statement) -> Result:
        try:
            return _executed(self._tx, statement)
        except (Error, self._tx.Database.Error) as error:
            failure = _translated(error, self.dialect, self._tx)
            if failure is None:
                failure = store_error(error, self.dialect, code=None)
                failure.fault = Fault.ABORTED
            raise of_valid_sql(failure) from error


def borrow(tx: Any, *, is_async: bool, schema: str | None = None) -> Borrowed:
    if is_async:
        raise sync_async_mismatch(tx, wants="sync")
    if not isinstance(tx, (BaseDatabaseWrapper, ConnectionProxy)):
        raise ConfigurationError(
            f"This {type(tx).__qualname__} is not a connection: pass django.db.connection, or connections[alias]."
        )
    wrapper = _wrapper(str(tx.alias))
    if not wrapper.in_atomic_block and wrapper.get_autocommit():
        raise not_in_transaction(wrapper)
    check_session(wrapper.connection)
    return Borrowed(wrapper, _dialect_of(wrapper, schema), is_async=False)


def _wrapper(alias: str) -> Any:
    try:
        return connections[alias]
    except ConnectionDoesNotExist as error:
        raise ConfigurationError(
            f"There is no database {alias!r} in settings.DATABASES",
            "pass an existing alias, App(django='default').",
        ) from error


def _check_autocommit(wrapper: Any) -> None:
    connected = wrapper.connection is not None
    if not (wrapper.autocommit if connected else wrapper.settings_dict["AUTOCOMMIT"]):
        raise ConfigurationError(
            f"Django's autocommit is off on the database {wrapper.alias!r}, and its transactions are not txbox's to "
            "commit",
            "remove AUTOCOMMIT from its settings, or end set_autocommit(False) first.",
        )


def _dialect_of(wrapper: Any, schema: str | None) -> Dialect:
    if wrapper.vendor not in _VENDORS:
        raise ConfigurationError(
            f"txbox does not support {wrapper.vendor}: use PostgreSQL, MySQL, MariaDB or SQLite."
        )
    return dialect(wrapper.vendor, schema)


def _begins_deferred(wrapper: Any) -> bool:
    # the mode is a setting since Django 5.1
    return (getattr(wrapper, "transaction_mode", None) or "DEFERRED").upper() == "DEFERRED"


def _close_broken() -> None:
    """Close those of other aliases that an error has ended; Django does so between requests only.

    No others: a caller may be reading from one, or be in a transaction that it began by hand.
    """
    for each in connections.all(initialized_only=True):
        broken = each.errors_occurred and each.connection is not None
        if broken and each.autocommit == each.settings_dict["AUTOCOMMIT"]:
            each.close_if_unusable_or_obsolete()


def _executed(wrapper: Any, statement: Statement) -> Result:
    sql, names = native(statement.sql, "format")
    with wrapper.cursor() as cursor:
        if hasattr(cursor.cursor, "adapters"):
            from txbox.connections.libpq import plain

            plain(cursor.cursor)
        elif wrapper.vendor == "postgresql" and wrapper.timezone is None:
            _keep_offsets(cursor.cursor)
        cursor.execute(sql, [statement.params[name] for name in names])
        rows = plain_rows(cursor.fetchall()) if cursor.description else []
        return Result(rows, cursor.rowcount)


def _keep_offsets(cursor: Any) -> None:
    """Have psycopg2 return aware times, of which Django keeps only the local time if USE_TZ is off."""
    cursor.tzinfo_factory = timezone


def _committed(wrapper: Any) -> None:
    """Send COMMIT here, because Django's own would hide the answer. Django's then has nothing to do."""
    if wrapper.vendor == "mysql":
        return  # MySQL's answer says nothing more
    cursor = wrapper.connection.cursor()
    try:
        cursor.execute("COMMIT")
        check_committed(getattr(cursor, "statusmessage", None))
    finally:
        cursor.close()


def _translated(error: BaseException, sql_dialect: Dialect, wrapper: Any) -> StoreError | None:
    """Translate an error of Django or its driver; None if it is neither."""
    if isinstance(error, TransactionManagementError):
        return None
    if isinstance(error, wrapper.Database.Error):
        return dbapi_error(error, sql_dialect)
    if not isinstance(error, Error):
        return None
    cause = error.__cause__
    if cause is not None and isinstance(cause, wrapper.Database.Error):
        return dbapi_error(cause, sql_dialect)
    # Django's error for a connection that it knows is closed
    return store_error(
        error, sql_dialect, code=None, lost=isinstance(error, (InterfaceError, OperationalError))
    )
