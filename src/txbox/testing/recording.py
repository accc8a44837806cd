"""What a handler does besides its transaction: seen by an audit hook and a profiler while it runs."""

from __future__ import annotations

import asyncio
import contextvars
import datetime as _datetime
import functools
import inspect
import io
import os
import random
import re
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import thread as _pools
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

from txbox.processing.failure import is_foreign
from txbox.session import Crashed
from txbox.testing.faults import Call, Line

# what these do in a handler's call is not the handler's effect
_HARMLESS = frozenset(
    {"logging", "loguru", "importlib", "_frozen_importlib", "_frozen_importlib_external", "linecache", "traceback",
     "warnings", "tempfile", "txbox", "uuid", "platform", "ctypes", "zoneinfo", "encodings"}
)  # fmt: skip
_DRIVERS = frozenset(
    {"psycopg", "psycopg_pool", "psycopg2", "asyncpg", "pymysql", "MySQLdb", "asyncmy", "aiomysql", "aiosqlite"}
)  # fmt: skip
# these connect when they are first used
_POOLS = frozenset({"sqlalchemy", "django.db", "psycopg_pool"})
_CONNECTS = frozenset(
    {"socket.connect", "http.client.connect", "smtplib.connect", "ftplib.connect"}
)
_SENDS = frozenset(
    {"socket.sendto", "socket.sendmsg", "http.client.send", "smtplib.send", "ftplib.sendcmd"}
)
_RUNS = frozenset(
    {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn"}
)  # fmt: skip
_CHANGES = frozenset(
    {"os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown",
     "os.utime", "os.setxattr", "os.mkfifo", "shutil.copyfile", "shutil.move", "shutil.rmtree"}
)  # fmt: skip
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
# C functions by name
_CLOCKS = frozenset(
    {"time", "time_ns", "now", "utcnow", "today", "localtime", "gmtime", "ctime", "asctime", "strftime", "monotonic",
     "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time"}
)  # fmt: skip
_WRITES = frozenset({"write", "writelines", "flush", "pwrite", "writev"})
_SOCKET_SENDS = frozenset({"send", "sendall", "sendto", "sendmsg"})
_ENDS = frozenset({"commit", "rollback", "close", "executescript", "__exit__", "__aexit__"})
_EXECUTES = frozenset(
    {"execute", "executemany", "fetch", "fetchrow", "fetchval", "begin", "commit", "add", "flush"}
)
# statements that end a transaction, or on MySQL do so by the way; comments may stand before them
_ENDED = re.compile(
    r"(?:\s|/\*.*?\*/|--[^\n]*+\n)*+"
    r"(?:commit|end|abort|rollback(?!\s++(?:work\s++|transaction\s++)?to\b))\b",
    re.IGNORECASE | re.DOTALL,
)
_ENDING = re.compile(
    r"(?:\s|/\*.*?\*/|--[^\n]*+\n)*+"
    r"(?:commit|end|abort|rollback(?!\s++(?:work\s++|transaction\s++)?to\b)"
    r"|begin|start|create|alter|drop|truncate|rename|lock|set\s++autocommit)\b",
    re.IGNORECASE | re.DOTALL,
)
_SECOND = "opens a second connection to a database"
_NETWORK = "sends something over the network"
#: How long what a handler started waits before it begins: a handler that waits for it waits, too.
_HEAD_START_S = 0.3


class Effect(NamedTuple):
    """Something outside of the transaction.

    Attributes:
        what: of a sentence "the handler …".
    """

    what: str
    line: Line


class Recorder:
    """What calls of handlers do.

    Attributes:
        effects: outside of the transaction, once a line and call.
        clocks: where the time was read.
        draws: where something random was drawn.
        commits: where the transaction was to be ended.
        ends: the same, and where it may have been ended by the way.
        others: where another connection was used.
        outlived: threads, tasks and jobs that were still running when the handler had returned.
        statements: the statements of the transaction.
        errors: what a handler raised, and at which line.
    """

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self.clocks: list[Line] = []
        self.draws: list[Line] = []
        self.commits: list[Line] = []
        self.ends: list[Line] = []
        self.others: list[Line] = []
        self.outlived: list[Line] = []
        self.statements: list[tuple[str, Line]] = []
        self.errors: list[tuple[type[Exception], Line]] = []
        self.call: Call | None = None
        self._before = self._seconds = 0
        self._started: list[tuple[Callable[[], bool], Line]] = []
        self._pending: list[threading.Thread | Future[Any]] = []

    def on_statement(self, text: str) -> None:
        """Record a statement of the handler's transaction."""
        if self.call is not None:
            line = self.call.line()
            self.statements.append((text, line))
            if _ENDING.match(text):
                self.ends.append(line)
            if _ENDED.match(text):
                self.commits.append(line)

    @property
    def seconds(self) -> list[Effect]:
        """Where another connection was opened."""
        return [effect for effect in self.effects if effect.what == _SECOND]

    @contextmanager
    def around(self, call: Call) -> Generator[None]:
        """Record one call."""
        _install()
        self.call, self._before, self._seconds = call, len(self.effects), len(self.seconds)
        token = _watching.set(self)
        profile = sys.getprofile()
        try:
            with _concurrency(self, call), _profiled(self):
                yield
                self.outlived += [line for running, line in self._started if running()]
        except Exception as error:
            # no traceback: it would keep cursors alive, and with them the transaction of a closed SQLite connection
            self.errors.append((type(error), _raised_at(error, call)))
            if self.seconds[self._seconds :]:
                # it waits for its own transaction, each time again
                raise Crashed("a second connection failed") from error
            raise
        finally:
            sys.setprofile(profile)
            _watching.reset(token)
            self._started.clear()
            self.call = None
            pending, self._pending = self._pending, []
            for work in pending:
                # it must not disturb the next run
                with suppress(Exception):
                    work.join(1.0) if isinstance(work, threading.Thread) else work.exception(1.0)

    def effect(self, what: str, line: Line, *, opened: str | None = None) -> None:
        """Note an effect; not if this call has already noted one that begins like `opened`, which includes it."""
        if opened is not None and any(
            effect.what.startswith(opened) for effect in self.effects[self._before :]
        ):
            return
        if all(effect.line != line or effect.what != what for effect in self.effects):
            self.effects.append(Effect(what, line))

    def trail(self) -> tuple[Line, frozenset[str]] | None:
        """The handler's line, and the packages between it and what it called; None where it is not the handler's."""
        call, between = self.call, set[str]()
        origin = _origin.get() or getattr(_thread, "origin", None)
        if call is None:
            return None
        frame = inspect.currentframe()
        while frame is not None:
            name = frame.f_globals.get("__name__") or "?"
            if frame.f_code is call.code or not _foreign(frame.f_code.co_filename):
                return origin or call.line(frame), frozenset(between)
            if not name.startswith("txbox.testing."):
                between.add("django.db" if name.startswith("django.db") else name.partition(".")[0])
            frame = frame.f_back
        return None if origin is None else (origin, frozenset(between))

    def start(self, running: Callable[[], bool], line: Line, work: Any = None) -> None:
        self._started.append((running, line))
        if work is not None:
            self._pending.append(work)


def _raised_at(error: BaseException, call: Call) -> Line:
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code is call.code:
            return Line(code.co_filename, trace.tb_lineno, code.co_name)
        trace = trace.tb_next
    return call.line()


_watching: contextvars.ContextVar[Recorder | None] = contextvars.ContextVar(
    "txbox_recorder", default=None
)
# in what a handler has started: where
_origin: contextvars.ContextVar[Line | None] = contextvars.ContextVar("txbox_origin", default=None)
_thread = threading.local()
_installed = threading.Event()
# called for every frame
_foreign = functools.lru_cache(4096)(is_foreign)


def _install() -> None:
    # an audit hook cannot be removed
    if not _installed.is_set():
        _installed.set()
        sys.addaudithook(_audit)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    try:
        recorder = _watching.get()
    except (LookupError, AttributeError, TypeError):  # the interpreter is being shut down
        return
    if recorder is None or recorder.call is None:
        return
    what = _described(event, args)
    if what is None:
        return
    trail = recorder.trail()
    if trail is None:
        return
    line, between = trail
    if event == "sqlite3.connect" and between & _HARMLESS == {"txbox"}:
        # a transaction of an App, inside that of the handler
        recorder.effect(_SECOND, line)
        return
    if between & _HARMLESS or (event in _SENDS and between & (_DRIVERS | _POOLS)):
        return
    if event in _CONNECTS and between & (_DRIVERS | _POOLS):
        if not between & _POOLS:
            recorder.effect(_SECOND, line)
        return
    recorder.effect(what, line, opened=what if what == _NETWORK and event in _SENDS else None)


def _described(event: str, args: tuple[Any, ...]) -> str | None:
    if event == "open":
        path, mode, flags = args
        writes = set(mode) & set("wax+") if isinstance(mode, str) else (flags or 0) & _WRITING
        if not writes or isinstance(path, int) or os.fspath(path) in (os.devnull, b"/dev/null"):
            return None
        return f"writes the file {os.fsdecode(path)}"
    if event in _CONNECTS or event in _SENDS:
        return _NETWORK
    if event in _RUNS:
        return "starts a program"
    if event in _CHANGES:
        return "changes files"
    if event == "sqlite3.connect":
        return _SECOND
    if event == "urllib.Request":
        return _NETWORK
    return None


@contextmanager
def _profiled(recorder: Recorder) -> Generator[None]:
    tx = recorder.call.tx if recorder.call is not None else None

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call":
            name = arg.__name__
            if name in _NAMES and _watching.get() is recorder:
                _called_c(recorder, name, getattr(arg, "__self__", None), tx)
        elif event == "call":
            name = frame.f_code.co_name
            if name in _PYTHON_NAMES and _watching.get() is recorder:
                _called_python(recorder, frame, name, tx)

    sys.setprofile(profile)
    threading.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


_DRAWS = frozenset(
    {
        "random",
        "getrandbits",
        "urandom",
        "getrandom",
        "generate_time_safe",
        "betavariate",
        "token_bytes",
    }
)
_NAMES = _CLOCKS | _WRITES | _SOCKET_SENDS | _ENDS | _EXECUTES | _DRAWS
_PYTHON_NAMES = _ENDS | _EXECUTES | {"connect"}


def _called_c(recorder: Recorder, name: str, owner: Any, tx: Any) -> None:
    trail = recorder.trail()
    if trail is None:
        return
    line, between = trail
    if between & (_HARMLESS - {"uuid"}) and (between != frozenset({"txbox"}) or name not in _ENDS):
        return
    if isinstance(owner, (sqlite3.Connection, sqlite3.Cursor)):
        _used(recorder, name, owner, tx, line, directly=not between)
    elif name in _DRAWS and (isinstance(owner, random.Random) or _is_module(owner)):
        recorder.draws.append(line)
    elif name in _CLOCKS and (_is_module(owner) or isinstance(owner, type)):
        if not between & (_DRIVERS | _POOLS):
            recorder.clocks.append(line)
    elif name in _SOCKET_SENDS and isinstance(owner, socket.SocketType):
        if not between & (_DRIVERS | _POOLS | {"asyncio"}) or between == frozenset({"asyncio"}):
            recorder.effect(_NETWORK, line, opened=_NETWORK)
    elif name in _WRITES and (
        (isinstance(owner, (io.TextIOWrapper, io.BufferedWriter, io.FileIO)) and _is_file(owner))
        or (_is_module(owner) and owner.__name__ == "posix")
    ):
        recorder.effect("writes to a file", line, opened="writes the file")


def _is_module(owner: Any) -> bool:
    return isinstance(owner, type(sys))


def _is_file(stream: Any) -> bool:
    std = {sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__}
    return stream not in std and stream not in {getattr(each, "buffer", None) for each in std}


def _called_python(recorder: Recorder, frame: FrameType, name: str, tx: Any) -> None:
    caller, module = frame.f_back, frame.f_globals.get("__name__") or "?"
    root = "django.db" if module.startswith("django.db") else module.partition(".")[0]
    if root not in _DRIVERS | _POOLS | {"sqlalchemy"}:
        return
    while caller is not None and _is_between(caller):
        caller = caller.f_back
    call = recorder.call
    if (
        call is None
        or caller is None
        or (caller.f_code is not call.code and _foreign(caller.f_code.co_filename))
    ):
        return
    line = call.line(caller)
    if name == "connect":
        if root not in ("sqlalchemy", "django.db"):
            recorder.effect(_SECOND, line)
        else:
            recorder.others.append(line)
        return
    owner = frame.f_locals.get("self")
    if owner is not None:
        _used(recorder, name, owner, tx, line, directly=root in _DRIVERS)


def _is_between(frame: FrameType) -> bool:
    """A class of ours stands on the driver's, and a block of ours around it."""
    name = frame.f_globals.get("__name__") or ""
    return name == "contextlib" or name.startswith("txbox.")


def _used(
    recorder: Recorder, name: str, owner: Any, tx: Any, line: Line, *, directly: bool
) -> None:
    """A connection or a cursor was called; `directly`, by the handler and not by a library."""
    connection = getattr(owner, "connection", owner)
    if not hasattr(connection, "cursor"):
        connection = owner
    real = getattr(tx, "_con", getattr(tx, "_conn", tx))
    if connection is not tx and connection is not real:
        recorder.others.append(line)
        if name == "commit" and directly:
            recorder.effect("commits on another connection", line, opened=_SECOND)
    elif name in _ENDS and owner is connection:
        recorder.ends.append(line)
        recorder.commits.append(line)


# -- what is started ------------------------------------------------------------------------------


@contextmanager
def _concurrency(recorder: Recorder, call: Call) -> Generator[None]:
    """Note the threads, jobs and tasks that the handler starts, and let them begin a little later."""
    start, submit = threading.Thread.start, ThreadPoolExecutor.submit

    def started(thread: threading.Thread) -> None:
        trail = recorder.trail() if _watching.get() is recorder else None
        of_pool = getattr(thread, "_target", None) is getattr(_pools, "_worker", None)
        if trail is not None and not of_pool and not trail[1] & (_HARMLESS | _DRIVERS | _POOLS):
            recorder.start(thread.is_alive, trail[0], thread)
            vars(thread)["run"] = _later(thread.run, trail[0])
        start(thread)

    def submitted(pool: ThreadPoolExecutor, job: Any, /, *args: Any, **options: Any) -> Any:
        trail = recorder.trail() if _watching.get() is recorder else None
        if trail is None or trail[1] & (_HARMLESS | _DRIVERS | _POOLS):
            return submit(pool, job, *args, **options)
        future = submit(pool, _later(job, trail[0]), *args, **options)
        recorder.start(lambda: not future.done(), trail[0], future)
        return future

    with (
        patch.object(threading.Thread, "start", started),
        patch.object(ThreadPoolExecutor, "submit", submitted),
    ):
        if call.coroutine is None:
            yield
            return
        loop: Any = asyncio.get_running_loop()
        create = loop.create_task

        def created(coroutine: Any, **options: Any) -> Any:
            trail = recorder.trail() if _watching.get() is recorder else None
            if trail is None or trail[1] - {"asyncio"}:
                return create(coroutine, **options)
            task = create(_later_async(coroutine, trail[0]), **options)

            def ended(_: object) -> None:
                # it may be cancelled before it begins
                coroutine.close()

            task.add_done_callback(ended)
            recorder.start(lambda: not task.done(), trail[0])
            return task

        with suppress(AttributeError):  # of a loop that is no Python object
            loop.create_task = created
        try:
            yield
        finally:
            with suppress(AttributeError):
                del loop.create_task


def _later(work: Callable[..., Any], line: Line) -> Callable[..., Any]:
    context = contextvars.copy_context()

    def run(*args: Any, **options: Any) -> Any:
        time.sleep(_HEAD_START_S)
        # not in the context, which `asyncio.to_thread` replaces
        _thread.origin = line
        try:
            return context.run(work, *args, **options)
        finally:
            del _thread.origin

    return run


async def _later_async(work: Any, line: Line) -> Any:
    _origin.set(line)
    await asyncio.sleep(_HEAD_START_S)
    return await work


# -- another day, another draw --------------------------------------------------------------------


class _Meta(type):
    """Instances of the real class are instances of its stand-in."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.__mro__[1])

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, cls.__mro__[1])


_DATETIME, _DATE, _TIME, _TIME_NS, _RANDOM = (
    _datetime.datetime, _datetime.date, time.time, time.time_ns, random.random,
)  # fmt: skip
_LOCAL, _GM, _FORMAT = time.localtime, time.gmtime, time.strftime


def _stand_ins(days: int, draw: float | None) -> dict[int, Any]:
    later = _datetime.timedelta(days=days, hours=days and 5, minutes=days and 7)

    class Datetime(_datetime.datetime, metaclass=_Meta):
        def __new__(cls, *args: Any, **options: Any) -> Any:
            return _DATETIME(*args, **options)

        @classmethod
        def now(cls, tz: _datetime.tzinfo | None = None) -> Any:
            return _DATETIME.now(tz) + later

        @classmethod
        def today(cls) -> Any:
            return _DATETIME.now() + later

        @classmethod
        def utcnow(cls) -> Any:
            return _DATETIME.now(_datetime.UTC).replace(tzinfo=None) + later

    class Date(_datetime.date, metaclass=_Meta):
        def __new__(cls, *args: Any, **options: Any) -> Any:
            return _DATE(*args, **options)

        @classmethod
        def today(cls) -> Any:
            return _DATE.today() + later

    seconds = later.total_seconds()

    def moment(at: Any) -> Any:
        return _TIME() + seconds if at is None else at

    def local(at: Any = None) -> Any:
        return _LOCAL(moment(at))

    def gm(at: Any = None) -> Any:
        return _GM(moment(at))

    def form(text: str, at: Any = None) -> str:
        return _FORMAT(text, local() if at is None else at)

    standing: dict[int, Any] = {}
    if days:
        standing = {
            id(_DATETIME): Datetime, id(_DATE): Date, id(_TIME): lambda: _TIME() + seconds,
            id(_TIME_NS): lambda: _TIME_NS() + int(seconds) * 10**9,
            id(_LOCAL): local, id(_GM): gm, id(_FORMAT): form,
        }  # fmt: skip
    if draw is not None:
        standing[id(_RANDOM)] = lambda: draw
    return standing


def _places(call_globals: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The namespaces of the application, and of the modules of the standard library that it asks."""
    yield call_globals
    for module in (_datetime, time, random):
        yield vars(module)
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and not _foreign(file):
            yield vars(module)


@contextmanager
def another_day(call: Call, *, days: int = 0, draw: float | None = None) -> Generator[None]:
    """In the application it is so many days later, and `random.random` returns `draw`."""
    standing: Any = _stand_ins(days, draw)
    code_globals = getattr(inspect.unwrap(call.handler.function), "__globals__", {})
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for names in _places(code_globals):
            for name, value in list(names.items()):
                if id(value) in standing and names is not globals():
                    replaced.append((names, name, value))
                    names[name] = standing[id(value)]
        yield
    finally:
        for names, name, value in reversed(replaced):
            names[name] = value
