"""What a driver's adapter provides, the pool behind most of them, and the translation of drivers' errors."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit
from weakref import WeakSet

from txbox.connections.settings import Settings
from txbox.errors import (
    FULL,
    UNANSWERED,
    ConfigurationError,
    Fault,
    StoreError,
    StoreUnavailable,
    redacted,
)
from txbox.session import Connection, Connections, Raised, Result, Statement, Statements, at
from txbox.store.dialect import Dialect

C = TypeVar("C", bound=Connection)

_MARK = "default_transaction_read_only"

_PRODUCTS = {"postgresql": "PostgreSQL", "mysql": "MySQL", "sqlite": "SQLite"}


# -- forks ------------------------------------------------------------------------------------


class Inherited(Protocol):
    """Holds locks, connections or work of threads that a forked child must not take over from its parent."""

    def forget_parent(self) -> None:
        """Start afresh. Called in a child before anything else runs there."""
        ...


_inherited: WeakSet[Inherited] = WeakSet()


def forgets_parent(inherited: Inherited) -> None:
    """Register an object to start afresh in every child forked while it lives."""
    _inherited.add(inherited)


def _forked() -> None:
    for inherited in list(_inherited):
        inherited.forget_parent()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forked)


# -- databases --------------------------------------------------------------------------------


class Database:
    """Where an app's connections come from. Nothing connects before the first `acquire`.

    Attributes:
        name: the database for people: a URL without its password, or the kind of object.
        sync: for `def` handlers; None if the user's object does not support it.
        asynchronous: the same for `async def` handlers.
        hosts: looked up, if a connection fails, to tell a wrong name from a server that is down.
        check: what the user should check then.
        closing: the discarded connections that are being closed on their event loop.
    """

    sync: Connections | None = None
    asynchronous: Connections | None = None
    hosts: Sequence[str | None] = ()
    check = "the URL, and that the server is running"

    def __init__(self, name: str, schema: str | None, dialect: Dialect | None) -> None:
        self.name = name
        self.schema = schema
        self._dialect: Dialect | None = dialect
        self.closing: set[asyncio.Task[None]] = set()

    def waited_s(self) -> float:
        """For how many seconds the oldest statement that txbox sent has been without an answer."""
        sources = (self.sync, self.asynchronous)
        sent = [at for each in sources if each is not None for at in list(each.waits.values())]
        return time.monotonic() - min(sent) if sent else 0.0

    @cached_property
    def handler_settings(self) -> Settings | None:
        """What the statements of handlers set; None where nothing watches them."""
        return Settings(self.dialect.name)

    @property
    def dialect(self) -> Dialect:
        assert self._dialect is not None
        return self._dialect

    def listener(self, heard: Callable[[], None]) -> Listening | None:
        """What hears of staged messages from other processes; None where nothing can."""
        del heard
        return None

    def close(self) -> None:
        """Close the idle connections that txbox opened itself."""
        for connections in (self.sync, self.asynchronous):
            if isinstance(connections, Pool):
                connections.clear()

    async def close_async(self) -> None:
        """`close`, and wait for connections being closed on this event loop."""
        self.close()
        loop = asyncio.get_running_loop()
        if tasks := [task for task in self.closing if task.get_loop() is loop]:
            await asyncio.wait(tasks)

    async def leave_loop(self) -> None:
        """Before an event loop of txbox ends: close what the user's pool would keep for the next one."""

    async def unreachable(
        self, error: BaseException, code: str | None, *, is_async: bool = False
    ) -> StoreUnavailable:
        """Return the error for a failed attempt to connect."""
        if is_async:
            # looking the host up blocks
            return await asyncio.to_thread(self._unreachable, error, code)
        return self._unreachable(error, code)

    def _unreachable(self, error: BaseException, code: str | None) -> StoreUnavailable:
        said = server_message(error) or type(error).__name__
        if code in FULL:
            return StoreUnavailable(
                f"Cannot connect to {self.name} ({said}, {code}): the server, or the limit of this user, has no free "
                "connection. Run fewer processes or smaller pools, put a pooler between, or raise the limit.",
                fault=Fault.UNAVAILABLE,
                code=code,
            )
        # libpq gives no SQLSTATE for a failed connection, and the server's text may be in any language. It does tell
        # whether a password was requested: then that is wrong, or there is no free connection
        tried = getattr(error, "pgconn", None)
        refused = tried is not None and (tried.used_password or tried.needs_password)
        full = " If it runs, it may have no free connection." if tried is not None else ""
        return StoreUnavailable(
            f"Cannot connect to {self.name} ({said}{f', {code}' if code else ''}): check {self.check}.{full}",
            fault=Fault.UNAVAILABLE,
            code=code,
            misconfigured=refused
            or code in _REFUSALS
            or (code in UNANSWERED and bool(self.hosts) and all(map(_is_unknown, self.hosts))),
        )


class Listening(Protocol):
    """A thread that waits for notifications."""

    def start(self) -> None: ...
    def stop(self) -> None: ...


class Executor(ABC):
    """A connection in the caller's transaction. It executes statements and nothing else."""

    def __init__(self, tx: Any, dialect: Dialect, *, is_async: bool) -> None:
        self._tx = tx
        self.dialect = dialect
        self.is_async = is_async

    async def execute(self, statement: Statement) -> Result:
        """Run one statement.

        Raises:
            StoreError: the driver's error, translated.
        """
        at(f"before:{statement.name}")
        result = await self._execute(statement)
        at(f"after:{statement.name}")
        return result

    async def send(self, statement: Statement) -> None:
        """`execute` for a statement whose result is not read.

        While the statements of a handler are deferred, so is this one, and fails as they do: at the next one that
        waits, or with the transaction.
        """
        at(f"before:{statement.name}")
        await self._send(statement)
        at(f"after:{statement.name}")

    @abstractmethod
    async def _execute(self, statement: Statement) -> Result: ...

    async def _send(self, statement: Statement) -> None:
        await self._execute(statement)


class ConnectionSource:
    """What every kind of `Connections` has."""

    def __init__(self, *, is_async: bool, idle_limit: Statements = ()) -> None:
        self.is_async = is_async
        self._idle_limit = idle_limit
        self.waits: dict[object, float] = {}
        forgets_parent(self)

    def forget_parent(self) -> None:
        self.waits.clear()

    @property
    def idle_limit(self) -> Statements:
        return self._idle_limit

    def distrust(self, connection: Any) -> None:
        """See `Connections.distrust`; here there are no idle ones."""


class Pool(ConnectionSource, ABC, Generic[C]):
    """Connections that txbox opens itself. The most recently used idle one comes first.

    Connections never cross a fork: a child process starts with none.
    """

    def __init__(self, *, is_async: bool, kept: int = 16, idle_limit: Statements = ()) -> None:
        super().__init__(is_async=is_async, idle_limit=idle_limit)
        self._kept = kept
        self._idle: deque[C] = deque()
        self._lock = threading.Lock()
        self._inherited: list[C] = []
        self._generation = 0

    def forget_parent(self) -> None:
        super().forget_parent()
        # the parent still uses these sockets: keep the objects alive, so that nothing closes them
        self._inherited += self._idle
        self._idle.clear()
        self._lock = threading.Lock()

    async def acquire(self) -> C:
        connection = self._taken() or await self._opened()
        connection.generation = self._generation
        return connection

    def distrust(self, connection: Connection) -> None:
        with self._lock:
            if connection.generation != self._generation:
                # acquired before the last time, so it says nothing about those opened since
                return
            self._generation += 1
        self._drop_idle()

    def _drop_idle(self) -> None:
        self.clear()

    async def release(self, connection: C) -> None:
        if not connection.lost:
            connection.restore()
            clean = connection.changed is None or not connection.stained
            if clean or await connection.reset():
                connection.changed = None
                with self._lock:
                    if len(self._idle) < self._kept:
                        self._idle.append(connection)
                        return
        connection.discard()

    @abstractmethod
    async def _opened(self) -> C:
        """Connect.

        Raises:
            StoreUnavailable: it failed.
        """

    def _taken(self) -> C | None:
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                # a stray task of a handler may have used it, or set something, since
                stained = connection.changed is not None and connection.stained
                if connection.usable() and not stained:
                    return connection
                connection.discard()
        return None

    def clear(self) -> None:
        """Close the idle connections."""
        with self._lock:
            idle = list(self._idle)
            self._idle.clear()
        for connection in idle:
            connection.discard()


def sync_async_mismatch(tx: Any, *, wants: str) -> ConfigurationError:
    """Return the error for a sync object in an async call, or the reverse."""
    verb = (
        "accept_async / stage_async / process_async"
        if wants == "async"
        else "accept / stage / process"
    )
    return ConfigurationError(
        f"This {type(tx).__module__}.{type(tx).__qualname__} is {wants}: call the {wants} verb ({verb})."
    )


def not_in_transaction(tx: Any) -> ConfigurationError:
    """Return the error for a caller's connection that would commit each statement separately."""
    return ConfigurationError(
        f"This {type(tx).__qualname__} is in autocommit mode and not in a transaction: begin one, so that the inbox "
        "row and your writes commit together."
    )


# a wrong user, password or database name: SQLSTATE, or MySQL's number
_REFUSALS = frozenset({"28P01", "28000", "3D000", "1044", "1045", "1049", "1698"})


def is_refusal(code: str | None) -> bool:
    """Whether an error of connecting says that the URL is wrong: other hosts would say the same."""
    return code in _REFUSALS


# values quoted in MySQL's messages, and in anyone's syntax errors; a value may itself contain quotes, so the first is
# where it begins, and only one match is tried
_QUOTED_VALUE = re.compile(r"^([^']*+)'.*'(?= for (?:key|column|function)| at line)")
_NEAR = re.compile(r"""(?<=near )(?:"[^"]*+"|'.*')""")
# of a longer message only what precedes the first of these is kept: a value or a password may go on behind the cut
_LINE_MAX = 8 * 1024
_OPENING = re.compile(r"""['"=]|://""")


def store_error(
    error: BaseException,
    dialect: Dialect,
    *,
    code: str | None,
    constraint: str | None = None,
    lost: bool = False,
) -> StoreError:
    """Translate a driver's error: its class, code and constraint, and what the server said.

    Only the server's primary message is kept, without the values it quotes; never its detail.
    """
    fault = Fault.UNAVAILABLE if lost else dialect.fault(code)
    if fault is Fault.OTHER and code is not None and code.startswith("SQLITE_"):
        # an extended code implies its primary code
        fault = dialect.fault("_".join(code.split("_")[:2]))
    # SQLite has used up its busy timeout: another connection holds the file
    away = fault is Fault.UNAVAILABLE or (code or "").startswith("SQLITE_BUSY")
    kind = StoreUnavailable if away else StoreError
    said = server_message(error)
    text = f"{_PRODUCTS[dialect.name]}: {type(error).__name__}" + (f" ({code})" if code else "")
    return kind(
        text + (f" on {constraint}" if constraint else "") + (f": {said}" if said else ""),
        fault=fault,
        code=code,
        constraint=constraint,
    )


def server_message(error: BaseException) -> str:
    """Return the first line of the server's message without quoted values and passwords; "" without a message."""
    message: object = getattr(getattr(error, "diag", None), "message_primary", None)
    cause = error.__cause__
    if message is None and cause is not None and hasattr(cause, "sqlstate") and cause.args:
        message = cause.args[0]  # asyncpg's, wrapped by SQLAlchemy
    if message is None and error.args:
        numbered = len(error.args) > 1 and isinstance(error.args[0], int)
        message = error.args[1 if numbered else 0]
    line = str(message or "").strip().partition("\n")[0]
    if len(line) > _LINE_MAX:
        line = _OPENING.split(line[:_LINE_MAX], maxsplit=1)[0] + "…"
    state = str(getattr(error, "sqlstate", None) or getattr(cause, "sqlstate", None) or "")
    if state.startswith("22"):
        # data exceptions quote the value they could not parse
        line = re.sub(r'".*"', '"…"', line)
    return redacted(_NEAR.sub("'…'", _QUOTED_VALUE.sub(r"\1'…'", line)))


def _is_unknown(host: str | None) -> bool:
    if not host or host.startswith(("/", "@")):
        return False
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror as error:
        # EAI_AGAIN and others mean trouble with the name server
        return error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
    except (OSError, UnicodeError):
        return False
    return False


def dbapi_error(error: BaseException, dialect: Dialect) -> StoreError:
    """`store_error` for any DB-API driver, used by adapters on top of a driver of the user's choice."""
    if error.args and isinstance(error.args[0], int):
        # MySQL's number is more specific than its SQLSTATE; the driver uses 0 for a connection it lost
        code = str(error.args[0]) if error.args[0] else None
    else:
        code = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
        code = code or getattr(error, "sqlite_errorname", None)
    reports = (getattr(error, "diag", None), error, error.__cause__)
    constraint = next(
        (named for report in reports if (named := getattr(report, "constraint_name", None))), None
    )
    # without any code, the driver never got an answer from the server
    lost = code is None and type(error).__name__ in ("OperationalError", "InterfaceError")
    return store_error(error, dialect, code=code, constraint=constraint, lost=lost)


def of_valid_sql(error: StoreError) -> StoreError:
    """Our own SQL is valid, so SQLite's generic error means a missing table or column."""
    if error.code == "SQLITE_ERROR":
        error.fault = Fault.SCHEMA
    return error


def check_committed(answer: str | None) -> None:
    """Check the server's answer to COMMIT; None if the driver does not expose it.

    Raises:
        StoreError: it was ROLLBACK, because the transaction had failed (promise 2.2).
    """
    if answer is not None and answer != "COMMIT":
        raise StoreError(
            "The transaction had failed before its COMMIT; nothing was persisted.",
            fault=Fault.ABORTED,
            code="25P02",
        )


def refused_commit(error: StoreError) -> bool:
    """Whether an error of COMMIT proves that nothing was persisted (promise 2.6)."""
    if error.fault in (Fault.GUARD, Fault.ABORTED, Fault.CONFLICT, Fault.DUPLICATE):
        return True
    code = error.code or ""
    return code.startswith("SQLITE_CONSTRAINT") or (len(code) == 5 and code.startswith("23"))


#: On PostgreSQL, outside a transaction, undoes what statements have set in the session; what the server and the
#: connection string set stays. DISCARD ALL would also forget the plans.
RESET = (
    "SET SESSION AUTHORIZATION DEFAULT; RESET ROLE; RESET ALL; CLOSE ALL; UNLISTEN *; "
    "SELECT pg_advisory_unlock_all(); DISCARD TEMP; DISCARD SEQUENCES"
)
#: If this succeeds as the last statement, the transaction has not failed. Needed where a driver does not show that
#: COMMIT was answered with ROLLBACK (promise 2.2).
PROBE = Statement("probe", "SELECT 1", {})
#: Around the handlers of one batch whose failures must not affect each other.
SAVEPOINT = Statement("savepoint", "SAVEPOINT txbox_handler", {})
RELEASE = Statement("release_savepoint", "RELEASE SAVEPOINT txbox_handler", {})
ROLLBACK_TO = Statement("rollback_to_savepoint", "ROLLBACK TO SAVEPOINT txbox_handler", {})
#: Around code that must not end its transaction. If it did, by whatever means, releasing this fails on every database.
BLOCK = Statement("savepoint", "SAVEPOINT txbox_block", {})
BLOCK_ENDS = Statement("release_savepoint", "RELEASE SAVEPOINT txbox_block", {})
# the savepoint, or the transaction, no longer exists: SQLSTATE, MySQL's number, and SQLite's code
# for any invalid statement
_NO_SAVEPOINT = frozenset({"3B001", "25P01", "1305", "SQLITE_ERROR"})


def not_released(error: StoreError, lost: bool) -> StoreError | Raised:
    """Classify the failure to release a savepoint or roll back to it.

    If the transaction failed because of a swallowed error, only the handler calls since the savepoint are to blame.
    """
    if error.code in _NO_SAVEPOINT:
        return handler_left("its savepoint is gone")
    return Raised(error, error, lost) if error.fault is Fault.ABORTED else error


def savepoint_is_gone(error: StoreError) -> bool:
    return error.code in _NO_SAVEPOINT


def block_left(error: StoreError) -> StoreError:
    """Classify the failure of `BLOCK_ENDS`."""
    if error.fault is Fault.ABORTED:
        return StoreError(
            "A statement of the block had failed, and with it the transaction; nothing was persisted.",
            fault=Fault.ABORTED,
            code=error.code,
        )
    if error.fault is not Fault.GUARD and not savepoint_is_gone(error):
        return error
    return StoreError(
        "The block ended its transaction, and part of what it wrote may be kept: leave commit and rollback to its "
        "end, and undo a part with a savepoint.",
        fault=Fault.GUARD,
        definite=False,
    )


def reported(driver: Any, name: str) -> str | None:
    """Return what PostgreSQL last reported of a setting to a driver's connection, without a round trip."""
    pgconn = getattr(driver, "pgconn", None)
    if pgconn is not None:
        value = pgconn.parameter_status(name.encode())
        return None if value is None else str(value.decode())
    if hasattr(driver, "get_settings"):
        return getattr(driver.get_settings(), name, None)
    # psycopg2
    status = getattr(driver, "get_parameter_status", None)
    return None if status is None else status(name)


def check_session(driver: Any, *, dates: bool = False) -> None:
    """Check, without a round trip, that a connection which is not ours carries texts and bytes as they are.

    Otherwise an id would be stored as other characters than on a connection with another setting, and run twice.

    Args:
        dates: the driver must also be able to read times.

    Raises:
        ConfigurationError: it does not; the message names the setting.
    """
    if (encoding := reported(driver, "client_encoding")) is not None:
        style = reported(driver, "DateStyle") if dates else None
        if encoding.upper().replace("-", "") != "UTF8":
            raise _unfit(
                driver,
                "client_encoding",
                encoding,
                "ids become others",
                "connect with client_encoding=UTF8",
            )
        if style is not None and not style.startswith("ISO"):
            raise _unfit(
                driver, "DateStyle", style,
                "its driver cannot read times",
                "connect with options='-c DateStyle=ISO', or ALTER ROLE … SET DateStyle = ISO",
            )  # fmt: skip
    elif (charset := getattr(driver, "character_set_name", None)) is not None:
        if charset() != "utf8mb4":
            raise _unfit(
                driver, "charset", charset(), "ids become others", "connect with charset=utf8mb4"
            )
        if not getattr(driver, "use_unicode", True):
            raise _unfit(
                driver, "use_unicode", "False", "ids come back as bytes", "leave use_unicode out"
            )
        if getattr(driver, "server_status", 0) & _UNESCAPED:
            raise _unfit(
                driver, "sql_mode", "NO_BACKSLASH_ESCAPES",
                "its driver would send payloads as other bytes, or as SQL", "remove it from sql_mode",
            )  # fmt: skip
    elif getattr(driver, "text_factory", str) is not str:
        raise _unfit(
            driver, "text_factory", "not str", "ids come back as other values", "leave it at str"
        )


# what a MySQL server reports of its sql_mode
_UNESCAPED = 512


def _unfit(driver: Any, name: str, value: str, so: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(
        f"The {name} of this {type(driver).__qualname__} is {value}, so {so}", f"{remedy}."
    )


def is_marked(driver: Any) -> bool:
    """Whether a driver's connection is in the transaction of a batch that txbox claimed, without a round trip.

    A claim on PostgreSQL sets `default_transaction_read_only` to `on` for its own transaction, and the server
    reports that setting on every change. On SQLite the guard row, which cannot be committed, is visible to no
    other transaction. MySQL offers nothing similar. Treat a closed connection as marked; its next
    statement fails.
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
    """Whether a transaction begun with these statements is one that `is_marked` recognises."""
    if isinstance(getattr(driver, "_conn", driver), sqlite3.Connection):
        # no query: that would be one more statement, and there may be no tables yet
        return any(statement.name == "arm" for statement in statements)
    return is_marked(driver)


def plain_rows(rows: Iterable[Iterable[Any]]) -> list[tuple[Any, ...]]:
    """Return rows as tuples, with the buffers some drivers return for bytes converted."""
    return [
        tuple(bytes(value) if type(value) is memoryview else value for value in row) for row in rows
    ]


def closes(statements: Statements) -> bool:
    """Whether the last statements of a transaction close its claim; one that won nothing has no close."""
    return any(statement.name == "close" for statement in statements)


def check_closed(statement: Statement, result: Result) -> Result:
    """Return the result, unless it is of a close whose guard is missing.

    Raises:
        StoreError: the handler ended the transaction that claimed its message.
    """
    if statement.name == "close" and not result.rows and "RETURNING" in statement.sql:
        raise handler_left("close found another transaction")
    return result


def connection_lost(code: str | None = None, *, definite: bool = True) -> StoreUnavailable:
    """Return the error for a connection that is gone; `definite`: no COMMIT was on its way."""
    return StoreUnavailable("The database connection was lost.", code=code, definite=definite)


# how a connection ends on which a statement was larger than max_allowed_packet, if the answer to that was lost; asyncmy
# loses count of the packets, and raises an error without a number
_CUT_OFF = frozenset({None, "2006", "2013", "2055"})
# no server accepts less, as it is set up for payloads
_LARGE_BYTES = 256 * 1024
_ESCAPED = b"\\'\"\0\n\r\x1a"
MAX_PACKET = Statement("packet", "SELECT @@max_allowed_packet", {})


def cut_off_bytes(statement: Statement, error: StoreError) -> int:
    """How large a statement was on which a connection to MySQL ended, if that may be why; otherwise 0."""
    if error.code not in _CUT_OFF:
        return 0
    values = (value for value in statement.params.values() if isinstance(value, (bytes, str)))
    size = 0
    for value in values:
        data = value.encode("utf-8", "replace") if isinstance(value, str) else value
        size += 2 * len(data) - len(data.translate(None, _ESCAPED))
    return size if size > _LARGE_BYTES else 0


def packet_too_large() -> StoreError:
    return StoreError(
        "MySQL: the statement is larger than max_allowed_packet: raise it, or lower Limits.payload_bytes.",
        fault=Fault.CONTENT,
        code="1153",
    )


def handler_left(how: str) -> StoreError:
    """Return the error for a handler that ended the transaction or the connection txbox gave it."""
    return StoreError(
        f"The handler left the transaction that claimed its message: {how}.", fault=Fault.GUARD
    )


#: Time for a thread or task that a handler did not wait for to finish its statement.
LEFT_BEHIND_S = 5.0


async def acquired(lock: asyncio.Lock) -> bool:
    """Wait for a lock; False if it is not free within `LEFT_BEHIND_S`."""
    try:
        async with asyncio.timeout(LEFT_BEHIND_S):
            return await lock.acquire()
    except TimeoutError:
        return False


def left_behind() -> StoreError:
    """Return the error for a connection that did not become free in time."""
    return StoreError(
        "A thread or task that the handler left behind still uses its transaction's connection."
    )


# notice a server that vanished silently: the first probe, from one to the next, and how many stay unanswered
_PROBES_S = (30, 10, 3)
#: As libpq's settings; `tcp_user_timeout` ends a connection whose data is not acknowledged, in milliseconds.
KEEPALIVE = {
    "connect_timeout": 10,
    "keepalives_idle": _PROBES_S[0],
    "keepalives_interval": _PROBES_S[1],
    "keepalives_count": _PROBES_S[2],
    "tcp_user_timeout": 30_000,
}


def keep_alive(sock: Any) -> None:
    """Have the kernel end a connection whose server vanished silently, as libpq does by `KEEPALIVE`."""
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = dict(zip(("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"), _PROBES_S, strict=True))
    for name, value in {**options, "TCP_USER_TIMEOUT": KEEPALIVE["tcp_user_timeout"]}.items():
        # not every system has all of them
        if (option := getattr(socket, name, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def hosts_of(url: str) -> list[tuple[str | None, int | None]]:
    """Return the hosts and ports that a URL names, in order: libpq's URLs, and ours, may name several."""
    hosts: list[tuple[str | None, int | None]] = []
    for address in urlsplit(url).netloc.rpartition("@")[2].split(","):
        parts = urlsplit(f"//{address}")
        hosts.append((parts.hostname, parts.port))
    return hosts


def postgresql_url(url: str, *options_naming_it: str) -> tuple[str, bool]:
    """Return a URL as libpq reads it, and whether statements may be prepared.

    `?prepare=off` is for poolers without prepared statements.

    Args:
        options_naming_it: the options that may name the database instead of the path.
    """
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    prepare = options.pop("prepare", "on") != "off"
    if parts.path in ("", "/") and options.keys().isdisjoint(options_naming_it):
        raise ConfigurationError(
            f"The URL {redacted(url)} names no database: use {parts.scheme}://host/name."
        )
    # libpq takes a plus for a plus
    query = urlencode(options, quote_via=quote)
    return urlunsplit(parts._replace(scheme="postgresql", query=query)), prepare


def async_driver(name: str, database: str) -> ModuleType:
    """Import a driver that only async handlers need."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"async handlers on {database} need {name}: run pip install 'txbox[{database.lower()}]'."
        ) from error


def _text_of(cursor: Any, query: Any) -> str:
    if isinstance(query, bytes):
        return query.decode("utf-8", "replace")
    if hasattr(query, "as_string"):
        text: str = query.as_string(cursor.connection)
        return text
    return str(query)


# what drivers call a statement's values
_VALUES = ("params", "params_seq", "args")


def watched_class(
    kind: Any,
    on_statement: Callable[..., None],
    names: Iterable[str],
    quiet: Container[str] = frozenset(),
    *,
    values: bool = False,
) -> Any:
    """Return a subclass whose methods of these names call `on_statement` with the statement before they send it.

    Args:
        quiet: texts of which it need not hear.
        values: call it with the statement's values, too.
    """

    def method_of(name: str) -> Any:
        send = getattr(kind, name)

        def method(self: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
            if values:
                text = query if query.__class__ is str else _text_of(self, query)
                on_statement(text, [*args, *(kwargs[name] for name in _VALUES if name in kwargs)])
            elif query.__class__ is not str:
                on_statement(_text_of(self, query))
            elif query not in quiet:
                on_statement(query)
            return send(self, query, *args, **kwargs)

        return method

    methods = {name: method_of(name) for name in names if hasattr(kind, name)}
    return type(kind)(
        kind.__name__, (kind,), {"__slots__": (), "__module__": kind.__module__, **methods}
    )
