"""What an adapter of a driver provides, and the idle connections of adapters that open their own."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable
from urllib.parse import urlsplit, urlunsplit

from txbox.errors import ConfigurationError, Fault, StoreError, StoreUnavailable
from txbox.steps import (
    AsyncConnections,
    AsyncExecutor,
    Connections,
    Executor,
    Raised,
    Result,
    Statement,
)
from txbox.store.dialect import Dialect

C = TypeVar("C", bound="Owned")

_MARK = "default_transaction_read_only"

_PRODUCTS = {"postgresql": "PostgreSQL", "mysql": "MySQL", "sqlite": "SQLite"}


class Database(Protocol):
    """Where the connections of one app come from.

    `sync` serves `def` handlers and `asynchronous` serves `async def` handlers; None where the
    object the user gave cannot. Nothing here connects before the first `acquire`.
    """

    @property
    def dialect(self) -> Dialect: ...
    @property
    def schema(self) -> str | None: ...
    @property
    def name(self) -> str:
        """The database for people: a URL without its password, or the kind of object given."""
        ...

    @property
    def sync(self) -> Connections | None: ...
    @property
    def asynchronous(self) -> AsyncConnections | None: ...
    def close(self) -> None: ...
    async def close_async(self) -> None: ...


class Listening(Protocol):
    """A thread that waits for notifications."""

    def start(self) -> None: ...
    def stop(self) -> None: ...


@runtime_checkable
class Notifies(Protocol):
    """A Database that can tell of what other processes commit."""

    def listener(self, channel: str, heard: Callable[[], None]) -> Listening | None: ...


class CallersConnection(Executor, Protocol):
    """A connection whose transaction is the caller's."""

    @property
    def dialect(self) -> Dialect: ...


class CallersAsyncConnection(AsyncExecutor, Protocol):
    """The awaitable twin of `CallersConnection`."""

    @property
    def dialect(self) -> Dialect: ...


class Owned(Protocol):
    """A connection that an adapter opened itself."""

    @property
    def lost(self) -> bool: ...
    def discard(self) -> None: ...


class Idle(Generic[C]):
    """Connections that wait for their next transaction, newest first.

    A connection never crosses a fork: a child process starts with none.
    """

    def __init__(self, kept: int = 16) -> None:
        self._kept = kept
        self._waiting: deque[C] = deque()
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def take(self, usable: Callable[[C], bool] = lambda _: True) -> C | None:
        with self._lock:
            if self._pid != os.getpid():
                # the parent still uses these sockets: forget them without a goodbye
                self._pid = os.getpid()
                self._inherited = list(self._waiting)
                self._waiting.clear()
            while self._waiting:
                connection = self._waiting.pop()
                if not connection.lost and usable(connection):
                    return connection
                connection.discard()
        return None

    def give(self, connection: C) -> None:
        if connection.lost:
            connection.discard()
            return
        with self._lock:
            if len(self._waiting) < self._kept:
                self._waiting.append(connection)
                return
        connection.discard()

    def clear(self) -> None:
        with self._lock:
            while self._waiting:
                self._waiting.pop().discard()


def without_password(url: str) -> str:
    """Return a URL fit for messages and logs."""
    parts = urlsplit(url)
    if parts.password is None and "password=" not in parts.query.lower():
        return url
    query = "&".join(
        "password=***" if option.partition("=")[0].lower() == "password" else option
        for option in parts.query.split("&")
    )
    host = parts.netloc.rpartition("@")[2]
    shown = parts.netloc if parts.password is None else f"{parts.username}:***@{host}"
    return urlunsplit(parts._replace(netloc=shown, query=query))


def wrong_colour(tx: Any, *, wants: str) -> ConfigurationError:
    """The error for a sync object in an async call, or the reverse."""
    verb = (
        "accept_async / stage_async / process_async"
        if wants == "async"
        else "accept / stage / process"
    )
    return ConfigurationError(
        f"A {type(tx).__module__}.{type(tx).__qualname__} is {wants}: call the {wants} verb ({verb})."
    )


def not_in_transaction(tx: Any) -> ConfigurationError:
    """The error for a caller's connection that would commit each statement by itself."""
    return ConfigurationError(
        f"This {type(tx).__qualname__} is in autocommit mode and in no transaction: begin one, so that the inbox row "
        "and your writes commit together."
    )


def store_error(
    error: BaseException,
    own: Dialect,
    *,
    code: str | None,
    constraint: str | None = None,
    lost: bool = False,
) -> StoreError:
    """Put a driver's error into txbox's words: its class, code and constraint, never its text, which may quote rows."""
    fault = Fault.UNAVAILABLE if lost else own.fault(code)
    if fault is Fault.OTHER and code is not None and code.startswith("SQLITE_"):
        # an extended code means at least what its primary code means
        fault = own.fault("_".join(code.split("_")[:2]))
    kind = StoreUnavailable if fault is Fault.UNAVAILABLE else StoreError
    text = f"{_PRODUCTS[own.name]}: {type(error).__name__}" + (f" ({code})" if code else "")
    return kind(
        text + (f" on {constraint}" if constraint else ""),
        fault=fault,
        code=code,
        constraint=constraint,
    )


def dbapi_error(error: BaseException, own: Dialect) -> StoreError:
    """`store_error` for any DB-API driver, for the adapters that stand on drivers of the user's choice."""
    if error.args and isinstance(error.args[0], int):
        # MySQL's number says more than its SQLSTATE; 0 is the driver's, for a connection it lost
        code = str(error.args[0]) if error.args[0] else None
    else:
        code = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
        code = code or getattr(error, "sqlite_errorname", None)
    reports = (getattr(error, "diag", None), error, error.__cause__)
    constraint = next(
        (found for own in reports if (found := getattr(own, "constraint_name", None))), None
    )
    # without any code the driver never got an answer from the server
    lost = code is None and type(error).__name__ in ("OperationalError", "InterfaceError")
    return store_error(error, own, code=code, constraint=constraint, lost=lost)


def of_own(error: StoreError) -> StoreError:
    """The error of a statement of txbox's, which is known to be right: SQLite has no code for a missing table."""
    if error.code == "SQLITE_ERROR":
        error.fault = Fault.SCHEMA
    return error


def refused_commit(error: StoreError) -> bool:
    """Say whether an error of COMMIT proves that nothing was persisted (SEMANTICS 2.6)."""
    if error.fault in (Fault.GUARD, Fault.ABORTED, Fault.CONFLICT, Fault.DUPLICATE):
        return True
    code = error.code or ""
    return code.startswith("SQLITE_CONSTRAINT") or (len(code) == 5 and code.startswith("23"))


#: Around handlers of one batch whose failures are to stay apart.
SAVEPOINT = Statement("savepoint", "SAVEPOINT txbox_handler", {})
RELEASE = Statement("release_savepoint", "RELEASE SAVEPOINT txbox_handler", {})
ROLLBACK_TO = Statement("rollback_to_savepoint", "ROLLBACK TO SAVEPOINT txbox_handler", {})
# there is no such savepoint, or no transaction, any more: SQLSTATE, MySQL's number, SQLite's code
# for every wrong statement
_NO_SAVEPOINT = frozenset({"3B001", "25P01", "1305", "SQLITE_ERROR"})


def not_released(error: StoreError, lost: bool) -> StoreError | Raised:
    """What it means that a savepoint could not be released or rolled back to.

    A transaction that a swallowed error has failed is the failure of the handler's last calls alone.
    """
    if error.code in _NO_SAVEPOINT:
        return handler_left("its savepoint is gone")
    return Raised(error, error, lost) if error.fault is Fault.ABORTED else error


def savepoint_is_gone(error: StoreError) -> bool:
    return error.code in _NO_SAVEPOINT


def is_marked(driver: Any) -> bool:
    """Say without a round trip whether a driver's connection is in the transaction of a batch that txbox claimed.

    PostgreSQL reports `default_transaction_read_only`, which such a claim sets to `on` for its own transaction,
    by itself. SQLite shows a guard that cannot be committed to no other transaction. MySQL has nothing alike.
    A connection that is closed counts as marked: its next statement says so.
    """
    pgconn = getattr(driver, "pgconn", None)
    if pgconn is not None:
        # 0 is libpq's CONNECTION_OK
        return bool(pgconn.status) or pgconn.parameter_status(_MARK.encode()) == b"on"
    if hasattr(driver, "get_settings"):
        return driver.is_closed() or getattr(driver.get_settings(), _MARK, None) == "on"
    raw = getattr(driver, "_conn", driver)
    if not isinstance(raw, sqlite3.Connection):
        return False
    try:
        return bool(raw.execute("SELECT 1 FROM txbox_guard WHERE never = 1").fetchall())
    except sqlite3.ProgrammingError:
        return True


def plain_rows(rows: Iterable[Iterable[Any]]) -> list[tuple[Any, ...]]:
    """Rows as tuples, with the buffers that some drivers return for bytes read out."""
    return [
        tuple(bytes(value) if type(value) is memoryview else value for value in row) for row in rows
    ]


def check_closed(statement: Statement, result: Result) -> Result:
    """Pass a result on, unless it is that of a close which names its guard and found none.

    Raises:
        StoreError: the handler left the transaction that claimed its message.
    """
    if statement.name == "close" and not result.rows and "RETURNING" in statement.sql:
        raise handler_left("close found another transaction")
    return result


def handler_left(how: str) -> StoreError:
    """The error for a handler that ended the transaction or the connection txbox gave it."""
    return StoreError(
        f"The handler left the transaction that claimed its message: {how}.", fault=Fault.GUARD
    )


async def finished(closing: set[asyncio.Task[None]]) -> None:
    """Wait for connections that are being closed on this event loop."""
    loop = asyncio.get_running_loop()
    own = [task for task in closing if task.get_loop() is loop]
    if own:
        await asyncio.wait(own)
