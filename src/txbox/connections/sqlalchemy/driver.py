"""The driver under an SQLAlchemy engine, and how txbox's own statements reach it.

SQLAlchemy's execution costs more than the statement, so it is used only if somebody watches: when the
engine has listeners or echoes. Otherwise statements go through a driver cursor or, with psycopg, through
libpq's pipeline, where BEGIN and claim, and close and COMMIT, take one round trip each.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import sqlalchemy as sa
from sqlalchemy import exc

from txbox.connections.base import PROBE, check_closed, check_committed, dbapi_error, plain_rows
from txbox.errors import ConfigurationError, Fault, StoreError, StoreUnavailable
from txbox.session import Result, Statement, Statements
from txbox.store.dialect import Dialect, Style, dialect, native

_DIALECTS = {"postgresql": "postgresql", "mysql": "mysql", "mariadb": "mysql", "sqlite": "sqlite"}
_STYLES: dict[str, Style] = {
    "pyformat": "format",
    "format": "format",
    "qmark": "qmark",
    "numeric_dollar": "numeric",
}
_INFO = "txbox"


def dialect_of(bind: sa.Engine | sa.Connection, schema: str | None) -> Dialect:
    name = bind.dialect.name
    if name not in _DIALECTS or bind.dialect.paramstyle not in _STYLES:
        raise ConfigurationError(
            f"txbox does not support {name}+{bind.dialect.driver}: use PostgreSQL, MySQL, MariaDB or SQLite."
        )
    return dialect(_DIALECTS[name], schema)


def style_of(driver: sa.Dialect) -> Style:
    return _STYLES[driver.paramstyle]


def autocommits(raw: sa.Connection) -> bool:
    """Whether each statement would commit by itself. Asks the driver's object, not the server."""
    if raw.closed or raw.invalidated:
        return False
    if raw.dialect.name == "sqlite":
        # engines that send BEGIN themselves run the driver in autocommit, so check for a transaction
        driver: Any = raw.connection.driver_connection
        return driver.isolation_level is None and not driver.in_transaction
    connection = raw.connection.dbapi_connection
    assert connection is not None
    return bool(raw.dialect.detect_autocommit_setting(connection))


def driver_error(driver: sa.Dialect) -> type[Exception]:
    assert driver.dbapi is not None
    kind: type[Exception] = driver.dbapi.Error
    return kind


def translated(error: BaseException, sql_dialect: Dialect, driver: sa.Dialect) -> StoreError | None:
    """Translate an error of SQLAlchemy or its driver; None if it is neither."""
    if isinstance(error, exc.DBAPIError):
        cause = error.orig
        if cause is None:
            return None
        found = dbapi_error(cause, sql_dialect)
        if error.connection_invalidated and found.fault is not Fault.UNAVAILABLE:
            return StoreUnavailable(str(found), fault=Fault.UNAVAILABLE, code=found.code)
        return found
    return dbapi_error(error, sql_dialect) if isinstance(error, driver_error(driver)) else None


def unusable(error: BaseException) -> StoreError:
    return StoreError(
        f"SQLAlchemy: {type(error).__name__}: the transaction cannot be used any more; roll it back.",
        fault=Fault.ABORTED,
    )


class Wire(Protocol):
    """How statements travel. Raises StoreError, or errors of SQLAlchemy or the driver."""

    def begin(self, statements: Statements) -> list[Result]: ...
    def execute(self, statement: Statement) -> Result: ...
    def commit(self, statements: Statements) -> list[Result]:
        """Run the last statements before SQLAlchemy's COMMIT, which is a no-op if it is already sent here."""
        ...

    def is_over(self) -> bool:
        """Whether the transaction has ended, so that the driver's rollback will do nothing."""
        ...

    def rolled_back(self) -> None: ...

    @property
    def taken(self) -> bool:
        """Whether a thread or task that a handler left behind uses the connection; then nobody else may get it."""
        ...

    def give_up(self) -> None: ...

    def end(self, dialect: Dialect) -> None:
        """Send COMMIT where SQLAlchemy's own would hide the server's answer."""
        ...


class Watched:
    """Through SQLAlchemy, whose listeners and log see every statement."""

    def __init__(self, raw: sa.Connection, style: Style) -> None:
        self._raw = raw
        self._style: Style = style

    def begin(self, statements: Statements) -> list[Result]:
        return [self.execute(statement) for statement in statements]

    def execute(self, statement: Statement) -> Result:
        if not statement.sql:
            # nothing to do here on this database
            return Result((), 0)
        sql, names = native(statement.sql, self._style)
        result = self._raw.exec_driver_sql(sql, tuple(statement.params[name] for name in names))
        rows = plain_rows(result.fetchall()) if result.returns_rows else []
        return check_closed(statement, Result(rows, result.rowcount))

    def commit(self, statements: Statements) -> list[Result]:
        results = [self.execute(statement) for statement in statements or (PROBE,)]
        return results if statements else []

    def is_over(self) -> bool:
        return False

    def rolled_back(self) -> None: ...

    @property
    def taken(self) -> bool:
        return False

    def give_up(self) -> None: ...

    def end(self, dialect: Dialect) -> None:
        raw = self._raw
        if dialect.name == "mysql":
            return  # MySQL's answer says nothing more
        if raw.dialect.driver == "asyncpg":
            from asyncpg import InterfaceError, InternalClientError, PostgresError

            adapted: Any = raw.connection.dbapi_connection
            try:
                check_committed(adapted.run_async(_commit))
            except (PostgresError, InterfaceError, InternalClientError) as error:
                raise dbapi_error(error, dialect) from error
            return
        cursor: Any = raw.connection.cursor()
        try:
            cursor.execute("COMMIT")
            check_committed(getattr(cursor, "statusmessage", None))
        finally:
            cursor.close()


def _commit(driver: Any) -> Any:
    return driver.execute("COMMIT")


class Cursors(Watched):
    """Through a cursor of the driver."""

    def execute(self, statement: Statement) -> Result:
        if not statement.sql:
            return Result((), 0)
        sql, names = native(statement.sql, self._style)
        cursor: Any = self._raw.connection.cursor()
        try:
            cursor.execute(sql, tuple(statement.params[name] for name in names))
            rows = plain_rows(cursor.fetchall()) if cursor.description else []
            return check_closed(statement, Result(rows, cursor.rowcount))
        finally:
            cursor.close()


class Libpq:
    """Through libpq's pipeline, on psycopg's connection."""

    def __init__(self, raw: sa.Connection, dialect: Dialect) -> None:
        from txbox.connections.libpq import BEGIN, COMMIT, DEALLOCATE, ExclusiveUse, Pipeline

        self._begin, self._commit, self._deallocate = BEGIN, COMMIT, DEALLOCATE
        self._raw = raw
        pipeline: Pipeline | None = raw.info.get(_INFO)
        if pipeline is None:
            driver: Any = raw.connection.driver_connection
            pipeline = raw.info[_INFO] = Pipeline(
                driver,
                # engines behind a pooler switch off psycopg's prepared statements
                prepare=driver.prepare_threshold is not None,
                translate=lambda error: dbapi_error(error, dialect),
            )
        self._pipeline = pipeline
        self._use = ExclusiveUse(raw.connection.driver_connection)

    def _wait(self, steps: Any) -> list[Result]:
        adapted: Any = self._raw.connection.dbapi_connection
        if not self._raw.dialect.is_async:
            return cast("list[Result]", self._use.wait(steps))

        def wait(_driver: Any) -> Any:
            return self._use.wait_async(steps)

        return cast("list[Result]", adapted.run_async(wait))

    def begin(self, statements: Statements) -> list[Result]:
        return self._wait(self._pipeline.send(statements, before=self._begin))

    def execute(self, statement: Statement) -> Result:
        return self._wait(self._pipeline.send((statement,)))[0]

    def commit(self, statements: Statements) -> list[Result]:
        return self._wait(self._pipeline.send(statements, after=self._commit))

    @property
    def taken(self) -> bool:
        return self._use.taken()

    def give_up(self) -> None:
        if self._raw.dialect.is_async:
            adapted: Any = self._raw.connection.dbapi_connection

            def end(_driver: Any) -> Any:
                return self._use.end_other_async()

            adapted.run_async(end)
        else:
            self._use.end_other()

    def end(self, dialect: Dialect) -> None: ...

    def is_over(self) -> bool:
        driver: Any = self._raw.connection.driver_connection
        # 0 is libpq's PQTRANS_IDLE
        return int(driver.pgconn.transaction_status) == 0

    def rolled_back(self) -> None:
        self._pipeline.forget()
        # psycopg may have deallocated everything or nothing just now: make sure it is everything
        self._wait(self._pipeline.send((), after=self._deallocate))


def wire(raw: sa.Connection, dialect: Dialect, style: Style) -> Wire:
    """Return the fastest way that hides nothing from whoever is watching."""
    engine: Any = raw.engine
    # private attributes; a release without them has every statement watched
    if (
        getattr(raw, "_has_events", True)
        or getattr(engine, "_has_events", True)
        or getattr(raw, "_echo", True)
    ):
        return Watched(raw, style)
    if raw.dialect.driver in ("psycopg", "psycopg_async"):
        return Libpq(raw, dialect)
    return Cursors(raw, style)
