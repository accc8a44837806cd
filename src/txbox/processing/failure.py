"""A handler's failure: what is kept of it (bounded, printable, without the values of rows), and its record."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from txbox import alerts
from txbox.boundaries import Boundary, blamed, is_contents
from txbox.errors import LONGEST, Fault, Reject, Retry, StoreError, UnusableMessage
from txbox.events import ErrorContained, Events, MessageDead, MessageFailed
from txbox.handlers import Handler, HandlerOptions
from txbox.outbox.dead_letters import DeadLetters
from txbox.outcome import Answer, Outcome
from txbox.policy import Limits, Redaction
from txbox.session import Raised, Session, Transaction
from txbox.store.codec import Arrival
from txbox.store.inbox import Failure, InboxStore

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

#: Recorded when a handler ended the claiming transaction (promise 2.2): its effects are unknown.
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
    redact: Redaction,
) -> Failure:
    """Describe a handler's exception for the table.

    Args:
        store: the exception in txbox's words if it came from the database; its text replaces the
            driver's, which may quote rows.
        redact: what its text must not show, before it is cut: half a secret matches no rule.
    """
    text = str(store) if store is not None else _text_of(error)
    cause = store.__cause__ if store is not None and not store.definite else None
    if isinstance(cause, Exception) and cause is not store:
        # COMMIT was refused: the driver's name for it says more
        error = cause
    frames = _frames(error.__traceback__)
    final = isinstance(error, (Reject, *options.reject_on))
    # a subclass of Retry may have set it to anything, or not at all
    after = getattr(error, "after", None) if isinstance(error, Retry) else None
    delay_s = (
        after.total_seconds() if isinstance(after, timedelta) and abs(after) <= LONGEST else None
    )
    return Failure(
        error_type=printable(type(error).__name__, 255),
        error=printable(
            redact.error(f"{text}\n\n{''.join(frames)}" if frames else text, limits.error_bytes),
            limits.error_bytes,
        ),
        fingerprint=fingerprint(error),
        final=final,
        delay_s=delay_s,
        raised=error,
    )


def shown(error: BaseException, text: str, redact: Redaction, depth: int = 8) -> BaseException:
    """An exception as a log may have it: type, frames and `text`, and so for what it came from.

    The texts of libraries, which quote rows and payloads, are dropped, and so are an exception's attributes.
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
    stack = "".join(traceback.format_tb(trace)) if redact.errors else ""
    if (legible := redact.error(stack, len(stack))) != stack:
        # a log reads the lines of a traceback from the source
        stand_in.__traceback__ = None
        stand_in.add_note(legible)
    if depth:
        if error.__cause__ is not None:
            harmless = _harmless(error.__cause__, redact)
            stand_in.__cause__ = shown(error.__cause__, harmless, redact, depth - 1)
        elif error.__context__ is not None and not error.__suppress_context__:
            harmless = _harmless(error.__context__, redact)
            stand_in.__context__ = shown(error.__context__, harmless, redact, depth - 1)
    return stand_in


def _harmless(error: BaseException, redact: Redaction) -> str:
    module = type(error).__module__
    where = getattr(sys.modules.get(module), "__file__", None) or ""
    ours = module == "builtins" or where.startswith(_HERE) or not is_foreign(where)
    # the rules before the cut: half a secret matches none
    return printable(redact.error(_text_of(error)).partition("\n")[0], 1_000) if ours else ""


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def fingerprint(error: BaseException) -> str:
    """Group failures that are alike: exception type and the first frame of the application."""
    frames = traceback.extract_tb(error.__traceback__)
    app_frames = [frame for frame in frames if not is_foreign(frame.filename)] or frames
    origin = f"{Path(app_frames[-1].filename).name}:{app_frames[-1].name}" if app_frames else "?"
    return printable(f"{type(error).__name__} at {origin}", 255)


def printable(text: str, limit_bytes: int) -> str:
    """Cut text to a size and replace what a database cannot keep (NUL, lone surrogates)."""
    # a character is a byte or more: nothing behind the limit is worth encoding
    clean = text[: limit_bytes + 1].replace("\0", "\\0").encode("utf-8", "backslashreplace")
    if len(clean) <= limit_bytes:
        return clean.decode()
    return clean[: limit_bytes - 4].decode("utf-8", "ignore") + " …"


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as unreadable:  # noqa: BLE001
        # an exception whose __str__ fails, SystemExit included, is still a failure to be recorded
        blamed(unreadable)
        return f"(the message of this {type(error).__name__} cannot be read)"


def _frames(trace: TracebackType | None) -> list[str]:
    """The frames of the application, newest last; source lines, no values."""
    return traceback.format_list(
        [frame for frame in traceback.extract_tb(trace) if not is_foreign(frame.filename)][-8:]
    )


def is_foreign(filename: str) -> bool:
    """Whether a file belongs to Python, an installed package or txbox: it is not the application's."""
    # compiled modules name their files relative to a source tree that is not here
    return not Path(filename).is_absolute() or filename.startswith((_HERE + os.sep, *_LIBRARIES))


def is_of_content(error: Exception) -> bool:
    """Whether a message cannot be written because of what it carries, so that nothing but the message is to blame."""
    return isinstance(error, UnusableMessage) or (
        isinstance(error, StoreError) and error.fault is Fault.CONTENT
    )


def _bare(arrival: Arrival) -> Arrival:
    """The message with nothing but its id and topic, in a form that every character set has."""
    message = replace(
        arrival.message, topic=escaped(arrival.message.topic), type=None, key=None, payload=None, headers=()
    )  # fmt: skip
    return replace(arrival, message=message)


def escaped(text: str) -> str:
    """The text in ASCII, which every character set has."""
    return text.encode("ascii", "backslashreplace").decode()


# -- its record -------------------------------------------------------------------------------


class Recorded(NamedTuple):
    """A failure that stands in the table, or will when its batch's transaction has committed."""

    failure: Failure
    dead: bool
    attempt: int


class Recorder:
    """Parks messages whose handler failed (promise 3.1).

    Args:
        letters, alerting: what is staged with a dead message.
    """

    def __init__(
        self,
        store: InboxStore,
        events: Events,
        limits: Limits,
        letters: DeadLetters | None = None,
        alerting: alerts.Alerting | None = None,
    ) -> None:
        self._store = store
        self._events = events
        self._limits = limits
        self._letters = letters
        self._alerting = alerting

    def described(
        self, handler: Handler, error: BaseException, database_error: StoreError | None
    ) -> Failure:
        """What is to be recorded of an exception; see `failure_of`."""
        redact = self._store.columns.redact
        return failure_of(error, database_error, handler.options, self._limits, redact)

    def contain(
        self,
        boundary: Boundary,
        error: Exception,
        *,
        consumer: str | None = None,
        arrival: Arrival | None = None,
        retry_in_s: float | None = None,
    ) -> None:
        """Emit the event of an error that something unexpected raised, and which ends nothing.

        Raises:
            Exception: the same, if it must end the worker.
        """
        if not is_contents(error):
            raise error
        columns = self._store.columns
        text = printable(columns.redact.error(_text_of(error)).partition("\n")[0], 1_000)
        self._events.emit(
            ErrorContained(
                boundary=boundary,
                consumer=consumer,
                message_id=None if arrival is None else arrival.message_id,
                topic=None if arrival is None else arrival.message.topic,
                error_type=type(error).__name__,
                error=columns.shown_error(text),
                retry_in_s=retry_in_s,
                exception=None if columns.key_id else shown(error, text, columns.redact),
            )
        )

    async def parked(
        self, db: Session, handler: Handler, arrival: Arrival, failure: Failure, *, token: str
    ) -> Answer | None:
        """Record a failure in a transaction of its own; None when the row is not ours to write.

        What cannot be kept of the message is dropped: then a leased row keeps what it has, and a new message is dead
        at once, because nothing could run it again.

        Raises:
            StoreError: as `InboxStore.record_failure`; CONTENT if even the message's id cannot be stored.
        """
        retry, lock_timeout = handler.options.retry, self._limits.lock_timeout
        failure, kept = failure.drawn(arrival, retry), arrival

        async def letter(db: Session, attempts: int) -> None:
            await self._dying(db, handler, kept, failure, attempts)
            await self.alert(db, handler, [failure])

        wanted = self._alerting is not None or handler.options.dead_letter_topic is not None
        dying = letter if wanted else None
        try:
            row = await self._store.record_failure(
                db, handler.consumer, arrival, failure, retry,
                token=token, lock_timeout=lock_timeout, dying=dying,
            )  # fmt: skip
        except (UnusableMessage, StoreError) as error:
            if not is_of_content(error):
                raise
            await self._store.rollback_bounded(db)
            failure = replace(
                failure,
                error=printable(f"{failure.error}\n\nNot kept: {error}", self._limits.error_bytes),
                final=failure.final or not token,
            )
            kept = _bare(arrival)
            row = await self._store.record_failure(
                db, handler.consumer, kept, failure, retry,
                token=token, lock_timeout=lock_timeout, dying=dying, bare=True,
            )  # fmt: skip
        if row is None:
            return None
        return self.reported(handler, arrival, Recorded(failure, *row))

    async def parked_within(
        self, db: Transaction, handler: Handler, arrival: Arrival, raised: Raised, token: str
    ) -> Recorded:
        """Record a failure in the transaction that has claimed the message under `token`. Call `alert` at its end.

        Raises:
            StoreError: as `InboxStore.record_failure_of_claimed`; CONTENT if its content cannot be kept.
        """
        retry = handler.options.retry
        failure = self.described(handler, raised.error, raised.database_error)
        failure = failure.drawn(arrival, retry)
        try:
            dead, attempts = await self._store.record_failure_of_claimed(
                db, handler.consumer, arrival, failure, retry, token=token
            )
        except UnusableMessage as error:
            # divides the batch; alone, the message is recorded without its content
            raise StoreError(str(error), fault=Fault.CONTENT) from error
        if dead:
            await self._dying(db, handler, arrival, failure, attempts)
        return Recorded(failure, dead, attempts)

    def reported(self, handler: Handler, arrival: Arrival, recorded: Recorded) -> Answer:
        """Emit the event of a failure that is on disk; returns its answer."""
        failure, dead, attempts = recorded
        text = failure.error.partition("\n")[0]
        # the lines of a traceback quote the program, which may have a text in it that the codec hides
        plain = failure.raised if self._store.columns.key_id is None else None
        fields: dict[str, Any] = {
            **message_fields(handler, arrival),
            "attempt": attempts,
            "error_type": failure.error_type,
            "error": self._store.columns.shown_error(text),
            "exception": None if plain is None else shown(plain, text, self._store.columns.redact),
        }
        if dead:
            self._events.emit(MessageDead(**fields))
        else:
            self._events.emit(MessageFailed(**fields, retry_in_s=failure.delay_s or 0.0))
        return Answer(Outcome.DEAD if dead else Outcome.FAILED, attempts)

    async def alert(self, db: Transaction, handler: Handler, given_up: Iterable[Failure]) -> None:
        """Stage the alerts about messages that are given up, last in the transaction that makes them dead."""
        if self._alerting is not None:
            dead = (
                alerts.dead(handler.consumer, failure.fingerprint, failure.error_type)
                for failure in given_up
            )
            await self._alerting.opened(db, self._store.dialect, dead)

    async def _dying(
        self, db: Transaction, handler: Handler, arrival: Arrival, failure: Failure, attempts: int
    ) -> None:
        """What else is written in the transaction that makes a message dead."""
        if self._letters is not None and handler.options.dead_letter_topic is not None:
            await self._letters.staged(
                db,
                self._store.dialect,
                handler.consumer,
                replace(arrival.message, id=arrival.message_id),
                attempts=attempts,
                error_type=failure.error_type,
            )


def message_fields(handler: Handler, arrival: Arrival) -> dict[str, str]:
    """The fields that every event about a message has."""
    return {
        "consumer": handler.consumer,
        "message_id": arrival.message_id,
        "topic": arrival.message.topic,
    }
