"""What an adapter of a driver provides, and the idle connections of adapters that open their own."""

from __future__ import annotations

import asyncio
import re
import socket
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from txbox.errors import ConfigurationError, Fault, StoreError, StoreUnavailable, redacted
from txbox.forks import forgets_parent
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
        self._lock = threading.Lock()
        self._inherited: list[C] = []
        forgets_parent(self)

    def forget_parent(self) -> None:
        # the parent still uses these sockets: keep them without a goodbye
        self._inherited += self._waiting
        self._waiting.clear()
        self._lock = threading.Lock()

    def take(self, usable: Callable[[C], bool] = lambda _: True) -> C | None:
        with self._lock:
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


def sync_async_mismatch(tx: Any, *, wants: str) -> ConfigurationError:
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


# what a wrong user, password or database name brings: SQLSTATE, or MySQL's number
_REFUSALS = frozenset({"28P01", "28000", "3D000", "1044", "1045", "1049", "1698"})
# no server said anything: no code, or one of MySQL's client
_NO_ANSWER = frozenset({None, "2003", "2005"})
# the values that MySQL, and syntax errors of all, quote: a value may hold quotes itself
_QUOTED_VALUE = re.compile(
    r"""'.*'(?= for (?:key|column|function)| at line)|(?<=near )(?:"[^"]*"|'.*')"""
)


def store_error(
    error: BaseException,
    dialect: Dialect,
    *,
    code: str | None,
    constraint: str | None = None,
    lost: bool = False,
) -> StoreError:
    """Put a driver's error into txbox's words: its class, code and constraint, and what the server said.

    Of the server's words only the primary message, without the values that it quotes: never its detail.
    """
    fault = Fault.UNAVAILABLE if lost else dialect.fault(code)
    if fault is Fault.OTHER and code is not None and code.startswith("SQLITE_"):
        # an extended code means at least what its primary code means
        fault = dialect.fault("_".join(code.split("_")[:2]))
    kind = StoreUnavailable if fault is Fault.UNAVAILABLE else StoreError
    said = server_message(error)
    text = f"{_PRODUCTS[dialect.name]}: {type(error).__name__}" + (f" ({code})" if code else "")
    return kind(
        text + (f" on {constraint}" if constraint else "") + (f": {said}" if said else ""),
        fault=fault,
        code=code,
        constraint=constraint,
    )


def server_message(error: BaseException) -> str:
    """The first line of what the server said, with no value that it quotes and no password; "" for nothing."""
    told: object = getattr(getattr(error, "diag", None), "message_primary", None)
    cause = error.__cause__
    if told is None and cause is not None and hasattr(cause, "sqlstate") and cause.args:
        told = cause.args[0]  # asyncpg's, behind SQLAlchemy
    if told is None and error.args:
        numbered = len(error.args) > 1 and isinstance(error.args[0], int)
        told = error.args[1 if numbered else 0]
    line = str(told or "").strip().partition("\n")[0]
    state = str(getattr(error, "sqlstate", None) or getattr(cause, "sqlstate", None) or "")
    if state.startswith("22"):
        # data exceptions quote what could not be read
        line = re.sub(r'".*"', '"…"', line)
    return redacted(_QUOTED_VALUE.sub("'…'", line))


def unreachable(
    name: str, error: BaseException, check: str, *, code: str | None, host: str | None = None
) -> StoreUnavailable:
    """The error for a database that no connection was made to.

    Args:
        name: the database, without its password.
        check: what the user may look at.
        host: which is looked up, to tell a wrong name from a server that is away.
    """
    said = server_message(error) or type(error).__name__
    # libpq gives no SQLSTATE for a connection that fails, but says whether the server asked for a password
    tried = getattr(error, "pgconn", None)
    refused = tried is not None and (tried.used_password or tried.needs_password)
    return StoreUnavailable(
        f"Cannot connect to {name} ({said}{f', {code}' if code else ''}): check {check}.",
        fault=Fault.UNAVAILABLE,
        code=code,
        misconfigured=refused or code in _REFUSALS or (code in _NO_ANSWER and _is_unknown(host)),
    )


def _is_unknown(host: str | None) -> bool:
    if not host or host.startswith(("/", "@")):
        return False
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror as error:
        # EAI_AGAIN and others are trouble with the name server
        return error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
    except (OSError, UnicodeError):
        return False
    return False


def dbapi_error(error: BaseException, dialect: Dialect) -> StoreError:
    """`store_error` for any DB-API driver, for the adapters that stand on drivers of the user's choice."""
    if error.args and isinstance(error.args[0], int):
        # MySQL's number says more than its SQLSTATE; 0 is the driver's, for a connection it lost
        code = str(error.args[0]) if error.args[0] else None
    else:
        code = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
        code = code or getattr(error, "sqlite_errorname", None)
    reports = (getattr(error, "diag", None), error, error.__cause__)
    constraint = next(
        (found for report in reports if (found := getattr(report, "constraint_name", None))), None
    )
    # without any code the driver never got an answer from the server
    lost = code is None and type(error).__name__ in ("OperationalError", "InterfaceError")
    return store_error(error, dialect, code=code, constraint=constraint, lost=lost)


def of_own(error: StoreError) -> StoreError:
    """The error of a statement of txbox's, which is known to be right: SQLite has no code for a missing table."""
    if error.code == "SQLITE_ERROR":
        error.fault = Fault.SCHEMA
    return error


def check_committed(answer: str | None) -> None:
    """Look at the server's answer to COMMIT; None where a driver does not show it.

    Raises:
        StoreError: it was ROLLBACK, since the transaction had failed (SEMANTICS 2.2).
    """
    if answer is not None and answer != "COMMIT":
        raise StoreError(
            "The transaction had failed before its COMMIT; nothing was persisted.",
            fault=Fault.ABORTED,
            code="25P02",
        )


def refused_commit(error: StoreError) -> bool:
    """Say whether an error of COMMIT proves that nothing was persisted (SEMANTICS 2.6)."""
    if error.fault in (Fault.GUARD, Fault.ABORTED, Fault.CONFLICT, Fault.DUPLICATE):
        return True
    code = error.code or ""
    return code.startswith("SQLITE_CONSTRAINT") or (len(code) == 5 and code.startswith("23"))


#: A statement that succeeds last proves that the transaction has not failed: a driver does not show that
#: its COMMIT was answered with ROLLBACK (SEMANTICS 2.2).
PROBE = Statement("probe", "SELECT 1", {})
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


def begins_marked(driver: Any, statements: Sequence[Statement]) -> bool:
    """Say whether a transaction that has begun with these statements is one that `is_marked` knows."""
    if isinstance(getattr(driver, "_conn", driver), sqlite3.Connection):
        # not asked: it would be one more statement, and there may be no tables yet
        return any(statement.name == "arm" for statement in statements)
    return is_marked(driver)


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
    tasks = [task for task in closing if task.get_loop() is loop]
    if tasks:
        await asyncio.wait(tasks)
