"""What is kept of a handler's failure: bounded, printable, and without the values of rows."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

from txbox.errors import Reject, Retry, StoreError
from txbox.handlers import HandlerOptions
from txbox.policy import Limits
from txbox.store.failures import Failure

# the whole package
_HERE = str(Path(__file__).parents[1])
_LIBRARIES = tuple(
    path
    for path in (
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        sys.prefix + os.sep + "lib",
    )
    if path
)

#: Recorded when a handler left the claiming transaction (SEMANTICS 2.2): its effects are unknowable.
BROKEN = Failure(
    error_type="TransactionBroken",
    error="transaction broken: the handler committed or rolled back the transaction that txbox began, so what it "
    "wrote is unknown; look at its effects, then retry or discard the message.",
    fingerprint="TransactionBroken",
    final=True,
)


def failure_of(
    error: BaseException,
    store: StoreError | None,
    options: HandlerOptions,
    limits: Limits,
) -> Failure:
    """Describe a handler's exception for the table.

    Args:
        store: the exception in txbox's words if it came from the database; its text replaces the
            driver's, which may quote rows.
    """
    text = str(store) if store is not None else _text_of(error)
    cause = store.__cause__ if store is not None and not store.definite else None
    if isinstance(cause, Exception) and cause is not store:
        # COMMIT was refused: the driver's name for it says more
        error = cause
    frames = _frames(error.__traceback__)
    final = isinstance(error, (Reject, *options.reject_on))
    delay_s = (
        error.after.total_seconds()
        if isinstance(error, Retry) and error.after is not None
        else None
    )
    return Failure(
        error_type=printable(type(error).__name__, 255),
        error=printable(f"{text}\n\n{''.join(frames)}" if frames else text, limits.error_bytes),
        fingerprint=fingerprint(error),
        final=final,
        delay_s=delay_s,
        raised=error,
    )


def shown(error: BaseException, text: str, depth: int = 8) -> BaseException:
    """An exception as a log may have it: type, frames and `text`, and so for what it came from.

    The texts of libraries, which quote rows and payloads, are left out; what an exception holds stays behind.
    """
    kind = type(error)
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    stand_in: BaseException = type(kind.__name__, (Exception,), named)(
        *([_one_line(text)] if text else [])
    )
    trace = error.__traceback__
    while (
        trace is not None and trace.tb_next and trace.tb_frame.f_code.co_filename.startswith(_HERE)
    ):
        trace = trace.tb_next
    stand_in.__traceback__ = trace
    if depth:
        if error.__cause__ is not None:
            stand_in.__cause__ = shown(error.__cause__, _harmless(error.__cause__), depth - 1)
        elif error.__context__ is not None and not error.__suppress_context__:
            stand_in.__context__ = shown(error.__context__, _harmless(error.__context__), depth - 1)
    return stand_in


def _harmless(error: BaseException) -> str:
    module = type(error).__module__
    where = getattr(sys.modules.get(module), "__file__", None) or ""
    ours = module == "builtins" or where.startswith(_HERE) or not _foreign(where)
    return printable(_text_of(error).partition("\n")[0], 1_000) if ours else ""


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def fingerprint(error: BaseException) -> str:
    """Group failures that are alike: exception type and the first frame of the application."""
    frames = traceback.extract_tb(error.__traceback__)
    app_frames = [frame for frame in frames if not _foreign(frame.filename)] or frames
    place = f"{Path(app_frames[-1].filename).name}:{app_frames[-1].name}" if app_frames else "?"
    return printable(f"{type(error).__name__} at {place}", 255)


def printable(text: str, limit_bytes: int) -> str:
    """Cut text to a size and replace what a database cannot keep (NUL, lone surrogates)."""
    clean = text.replace("\0", "\\0").encode("utf-8", "backslashreplace")
    if len(clean) <= limit_bytes:
        return clean.decode()
    return clean[: limit_bytes - 4].decode("utf-8", "ignore") + " …"


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001
        # an exception whose __str__ fails is still a failure to be recorded
        return f"(the message of this {type(error).__name__} cannot be read)"


def _frames(trace: TracebackType | None) -> list[str]:
    """The frames of the application, newest last; source lines, no values."""
    return traceback.format_list(
        [frame for frame in traceback.extract_tb(trace) if not _foreign(frame.filename)][-8:]
    )


def _foreign(filename: str) -> bool:
    # compiled modules name their files relative to a source tree that is not here
    return not Path(filename).is_absolute() or filename.startswith((_HERE + os.sep, *_LIBRARIES))
