"""Faults for tests: a handler meets what the driver would raise, a worker what the server would answer.

with deadlock(app):  # the handler's first statement fails
    assert deliver(app, paid) is Outcome.PROCESSED  # the second try
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from types import CodeType, FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

from txbox import session
from txbox.app import App
from txbox.brokers.base import Destination
from txbox.connections.base import connection_lost
from txbox.connections.settings import Settings
from txbox.errors import BrokerUnavailable, ConfigurationError
from txbox.handlers import Handler
from txbox.session import SettingChange
from txbox.store.dialect import OURS

#: Fault → what the server reports, by dialect: SQLSTATE, error number, or the name of a result code.
CODES = {
    "deadlock": {"postgresql": "40P01", "mysql": "1213", "sqlite": "SQLITE_BUSY"},
    "serialization_failure": {"postgresql": "40001", "mysql": "1020", "sqlite": "SQLITE_BUSY_SNAPSHOT"},
    "statement_timeout": {"postgresql": "57014", "mysql": "3024", "sqlite": "SQLITE_INTERRUPT"},
    "database_away": {"postgresql": "57P01", "mysql": "1053", "sqlite": "SQLITE_IOERR"},
}  # fmt: skip


@contextmanager
def passing(hook: Callable[[str], None]) -> Generator[None]:
    """Call `hook` with every crash point that is passed."""
    outer = session.crash_point

    def both(point: str) -> None:
        if outer is not None:
            outer(point)
        hook(point)

    session.crash_point = both
    try:
        yield
    finally:
        session.crash_point = outer


class Line(NamedTuple):
    """A line of a handler."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number} in {self.function}"


class Call:
    """One call of a handler.

    Args:
        tx: what the handler got as its transaction; None for one that works outside.
    """

    def __init__(self, handler: Handler, tx: Any) -> None:
        self.handler = handler
        self.tx = tx
        function = inspect.unwrap(handler.function)
        self.code: CodeType | None = getattr(function, "__code__", None)
        #: Of an async handler, whose frame is not on the stack while it waits.
        self.coroutine: Any = None

    def line(self, frame: FrameType | None = None) -> Line:
        """Where the handler is now; its first line if that is unknown."""
        coroutine = self.coroutine
        while coroutine is not None and getattr(coroutine, "cr_code", None) is not self.code:
            coroutine = getattr(coroutine, "cr_await", None)
        if coroutine is not None and coroutine.cr_frame is not None:
            return _line(coroutine.cr_frame)
        frame = frame or inspect.currentframe()
        while frame is not None and frame.f_code is not self.code:
            frame = frame.f_back
        if frame is not None:
            return _line(frame)
        if self.code is None:
            return Line("?", 0, self.handler.name)
        return Line(self.code.co_filename, self.code.co_firstlineno, self.code.co_name)


def _line(frame: FrameType) -> Line:
    return Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


@contextmanager
def around_calls(
    app: App, around: Callable[[Call], AbstractContextManager[object]]
) -> Generator[None]:
    """Enter a context around every call of a handler."""
    originals = [(handler, handler.function) for handler in app.handlers]
    try:
        for handler, function in originals:
            vars(handler)["function"] = _wrapped(handler, function, around)
        yield
    finally:
        for handler, function in originals:
            vars(handler)["function"] = function


def _wrapped(
    handler: Handler,
    function: Callable[..., Any],
    around: Callable[[Call], AbstractContextManager[object]],
) -> Callable[..., Any]:
    def begun(args: Sequence[Any]) -> Call:
        return Call(handler, args[1] if len(args) > 1 else None)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        with around(begun(args)):
            return function(*args, **options)

    @functools.wraps(function)
    async def call_async(*args: Any, **options: Any) -> Any:
        this = begun(args)
        this.coroutine = function(*args, **options)
        with around(this):
            return await this.coroutine

    return call_async if handler.is_async else call


@contextmanager
def statements(app: App, on_statement: Callable[[str], None]) -> Generator[None]:
    """Call `on_statement` with each statement of a handler before it is sent; the handler gets what it raises."""
    of, settings = Settings.of, app.database.handler_settings

    def heard(settings: Settings, text: str) -> SettingChange | None:
        if text not in OURS:
            on_statement(text)
        change = of(settings, text)
        # or the next one would not be heard
        settings.quiet.discard(text)
        return change

    if settings is not None:
        settings.quiet.clear()
    with patch.object(Settings, "of", heard):
        yield


class StatementFault:
    """Makes the nth statement of handlers fail, and those behind it in the same call: the transaction has failed.

    Attributes:
        raised: whether that statement came.
        swallowed: the statement's line, when the handler returned nevertheless. Then this raises the error again: a
            server would have refused the COMMIT.
    """

    def __init__(self, app: App, name: str, nth: int = 1) -> None:
        if nth < 1:
            raise ConfigurationError(f"nth is {nth}: it must be at least 1, the first statement.")
        self._app, self._code = app, CODES[name][app.database.dialect.name]
        self._name = name
        self._remaining = nth
        self._call: Call | None = None
        self._failed = False
        self._at: Line | None = None
        self.raised = False
        self.swallowed: Line | None = None

    @contextmanager
    def injected(self) -> Generator[None]:
        with around_calls(self._app, self._around), statements(self._app, self._count_statement):
            yield

    @contextmanager
    def _around(self, call: Call) -> Generator[None]:
        self._call, self._failed = call, False
        try:
            yield
        finally:
            self._call = None
        if self._failed:
            self.swallowed = self._at
            raise raised_by(call.tx, self._code, self._name)

    def _count_statement(self, _text: str) -> None:
        call = self._call
        if call is None or call.tx is None:
            return
        if not self._failed:
            self._remaining -= 1
            if self._remaining != 0:
                return
            self._failed, self._at, self.raised = True, call.line(), True
        # a new one: kept, it would keep the handler's cursors
        raise raised_by(call.tx, self._code, self._name)


def raised_by(tx: Any, code: str, name: str) -> BaseException:
    """What a handler with this transaction gets when the server reports `code`."""
    # a class of ours stands on the driver's
    roots = [kind.__module__.partition(".")[0] for kind in type(tx).__mro__]
    root = next(root for root in roots if root != "txbox")
    if root == "sqlalchemy":
        from sqlalchemy.exc import DBAPIError

        dialect = (tx.get_bind() if hasattr(tx, "get_bind") else tx).dialect
        error = _driver_error(dialect.dbapi, code, name)
        wrapped: BaseException = DBAPIError.instance(
            None, None, error, dialect.dbapi.Error, dialect=dialect
        )
        return wrapped
    if root == "django":
        # it wraps what leaves this block
        try:
            with tx.wrap_database_errors:
                _raise(_driver_error(tx.Database, code, name))
        except Exception as django_error:  # noqa: BLE001
            return django_error
    modules = {"aiosqlite": "sqlite3", "asyncmy": "asyncmy.errors"}
    return _driver_error(import_module(modules.get(root, root)), code, name)


def _raise(error: BaseException) -> None:
    raise error


def _driver_error(driver: Any, code: str, name: str) -> BaseException:
    text = f"{name.replace('_', ' ')} (of txbox.testing)"
    error: Any
    if code.isdigit() and len(code) == 4:
        error = driver.OperationalError(int(code), text)
    elif hasattr(getattr(driver, "errors", None), "lookup"):
        error = driver.errors.lookup(code)(text)
    elif hasattr(driver, "PostgresError"):
        error = driver.PostgresError.new({"C": code, "M": text})
    else:
        error = driver.OperationalError(text)
        error.sqlite_errorname = error.pgcode = error.sqlstate = code
    failure: BaseException = error
    return failure


@contextmanager
def _statement_fails(app: App, name: str, nth: int) -> Generator[None]:
    fault = StatementFault(app, name, nth)
    with fault.injected():
        yield
    if not fault.raised:
        raise AssertionError(
            f"Handlers sent fewer than {nth} statements, so none failed with a {name}."
        )
    if fault.swallowed is not None:
        raise AssertionError(
            f"The handler swallowed a {name} of {fault.swallowed}: let errors of the database propagate."
        )


@contextmanager
def deadlock(app: App, nth: int = 1) -> Generator[None]:
    """The nth statement of a handler is the victim of a deadlock (on SQLite: the database is locked).

    Raises:
        AssertionError: the statement never came, or the handler swallowed the error.
    """
    with _statement_fails(app, "deadlock", nth):
        yield


@contextmanager
def serialization_failure(app: App, nth: int = 1) -> Generator[None]:
    """The nth statement of a handler cannot be serialized with another transaction; raises as `deadlock` does."""
    with _statement_fails(app, "serialization_failure", nth):
        yield


@contextmanager
def statement_timeout(app: App, nth: int = 1) -> Generator[None]:
    """The nth statement of a handler takes too long; raises as `deadlock` does."""
    with _statement_fails(app, "statement_timeout", nth):
        yield


@contextmanager
def database_away(app: App, nth: int = 1) -> Generator[None]:
    """The server goes away at the nth statement of a handler, and is back at once; raises as `deadlock` does."""
    with _statement_fails(app, "database_away", nth):
        yield


@contextmanager
def lost_commit_answer(nth: int = 1) -> Generator[None]:
    """The nth COMMIT of a handler's transaction succeeds, and its answer is lost.

    Raises:
        AssertionError: there were fewer.
    """
    handled, remaining = False, nth

    def lose(point: str) -> None:
        nonlocal handled, remaining
        if point == "after:handler":
            handled = True
        elif point == "after:commit" and handled:
            handled = False
            remaining -= 1
            if remaining == 0:
                raise connection_lost(definite=False)

    with passing(lose):
        yield
    if remaining > 0:
        raise AssertionError(
            f"Fewer than {nth} transactions of handlers were committed: no answer was lost."
        )


@contextmanager
def broker_away(destination: Destination) -> Generator[None]:
    """Relays of this process cannot reach brokers of this kind: what is staged stays in the outbox."""
    publisher = destination.publisher()

    def publish(*_: object) -> None:
        raise BrokerUnavailable(f"{publisher.name} is away (of txbox.testing).")

    with patch.object(type(publisher), "publish", publish):
        yield
