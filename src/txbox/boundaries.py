"""Boundaries: where user code, drivers, brokers, requests and stored rows are met.

No content ends a worker (promise 2.13). What comes through a boundary belongs to the smallest thing that can have
caused it: a message, a row, a batch, a route, a job. Each `except` that keeps it there names its boundary, which is
then in the event and in the log line. `tests/test_boundaries.py` makes every one of them raise.

Source: docs/decisions/0043-boundaries.md
"""

from __future__ import annotations

import logging
import signal
import threading
import traceback
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

from txbox.errors import ConfigurationError, Fault, SchemaError, StoreError
from txbox.session import Crashed

_HERE = str(Path(__file__).parent)


class Boundary(StrEnum):
    """What raised, as events and log lines name it."""

    SOURCE = "source"  # receive, settle, tend or close of a source
    ENVELOPE = "envelope"  # a broker's record becomes a message
    DISPATCH = "dispatch"  # a delivery finds its handlers and lanes
    IDENTITY = "identity"  # a message gets its id, version and hash
    TRANSACTION = "transaction"  # claim, handler and close of a batch or a message
    STORE = "store"  # a message becomes a pending row
    RECORD = "record"  # a failure becomes a row
    LANE = "lane"  # a turn of a lane, and what it says about a batch
    LEASE = "lease"  # due rows are leased
    CODEC = "codec"  # a column is encoded or decoded
    RELAY = "relay"  # staged rows are leased, adopted, recorded
    PUBLISH = "publish"  # a publisher sends, and confirms
    LOCAL = "local delivery"  # a staged row becomes inbox rows
    JOB = "maintenance job"
    HEARTBEAT = "heartbeat"
    POLL = "poll"
    PULSE = "pulse"
    OBSERVER = "observer"  # an observer, a tracer, a redaction rule
    ROW = "row"  # a stored row becomes what people read
    PAGE = "page"  # a page or a probe is made
    LOG = "log"  # a handler, filter or formatter of the program's logging


def ends_worker(error: BaseException) -> bool:
    """Whether an error must end the worker: configuration, schema, or a broken invariant of ours."""
    if isinstance(error, StoreError):
        return error.fault is Fault.SCHEMA or error.lacks_right
    if isinstance(error, AssertionError):
        # a library's, or user code's, says nothing about us
        last = traceback.extract_tb(error.__traceback__, limit=-1)
        return bool(last) and last[0].filename.startswith(_HERE)
    return isinstance(error, (ConfigurationError, SchemaError)) or not isinstance(error, Exception)


def is_contents(error: BaseException) -> bool:
    """Whether an error belongs to what was being worked on: nothing else explains it, no outage either."""
    away = isinstance(error, StoreError) and error.transient
    return not (away or ends_worker(error))


def blamed(error: BaseException) -> str:
    """Return the name of what user code has raised, SystemExit included.

    Raises:
        BaseException: the same, if a signal or a simulated crash raised it in there.
    """
    if is_from_outside(error):
        raise error
    return type(error).__name__


def is_from_outside(error: BaseException) -> bool:
    """Whether a signal or a simulated crash raised this in user code, rather than that code itself.

    Python runs signal handlers in the main thread only, and one written in Python is among the error's frames.
    The default for SIGINT has no frame: while it is installed, a KeyboardInterrupt in the main thread counts as
    Ctrl-C, whoever raised it.
    """
    if isinstance(error, (Exception, Crashed)):
        return isinstance(error, Crashed)
    if threading.current_thread() is not threading.main_thread():
        return False
    installed = [signal.getsignal(number) for number in signal.valid_signals()]
    if isinstance(error, KeyboardInterrupt) and signal.default_int_handler in installed:
        return True
    codes = {_code_of(handler) for handler in installed}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _code_of(function: Any) -> CodeType | None:
    while isinstance(function, partial):
        function = function.func
    # a method's is that of its function
    code: CodeType | None = getattr(function, "__code__", None)
    return code or getattr(type(function).__dict__.get("__call__"), "__code__", None)


# -- the log ----------------------------------------------------------------------------------


class Log(logging.LoggerAdapter[logging.Logger]):
    """A logger that never raises: what the program's filters, handlers and formatters raise goes to standard error."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger)
        # its own errors are printed, and end nothing
        self._last_resort = logging.StreamHandler()

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Write a line, as `logging.Logger.log` does."""
        try:
            # one frame further: the caller's line is the one to name
            self.logger.log(level, msg, *args, stacklevel=kwargs.pop("stacklevel", 1) + 1, **kwargs)
        except BaseException as error:  # noqa: BLE001  # user code; `blamed` raises what must not stay here
            raised = blamed(error)
            self._last_resort.handle(
                logging.LogRecord(
                    self.logger.name, logging.ERROR, __file__, 0,
                    "txbox: the program's logging raised %s (boundary: %s) on this line: %s",
                    (raised, Boundary.LOG, msg), (type(error), error, error.__traceback__),
                )
            )  # fmt: skip


log = Log(logging.getLogger("txbox"))
