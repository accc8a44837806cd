"""The run of a handler that is going on, so that what it stages can name its cause and keep its ids."""

from __future__ import annotations

import hashlib
import sys
import uuid
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from contextvars import ContextVar
from typing import Any

from txbox.errors import ConfigurationError
from txbox.message import HeaderValue, Message

# W3C trace context, and the correlation that services of one chain share
_PASSED_ON = ("traceparent", "tracestate", "baggage", "correlation-id")
_UUID_V7_TIME = slice(0, 6)


class Run:
    """One run of one handler: its messages, and how much each has caused so far.

    As a context manager it is the run that is going on, in this thread or task.

    Args:
        first: the ordinal of the first thing that each message causes.
        replied: of a replay, what its message was answered with.
    """

    __slots__ = ("_caused", "_first", "_token", "consumer", "messages", "replied")

    def __init__(
        self,
        consumer: str,
        messages: Sequence[Message[Any]],
        *,
        first: int = 0,
        replied: bytes | None = None,
    ) -> None:
        self._first = first
        self.replied = replied
        self.consumer = consumer
        self.messages = messages
        self._caused: dict[str, int] = {}

    def __enter__(self) -> None:
        self._token = _running.set(self)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # a coroutine that is closed by another task ends in a context that never had it
        with suppress(ValueError) if kind is GeneratorExit else _nothing:
            _running.reset(self._token)

    def next_id(self, cause: Message[Any]) -> str:
        """The id of the next thing that this message causes: a run that is repeated gives the same ones."""
        cause_id = str(cause.id)
        ordinal = self._caused.get(cause_id, self._first)
        self._caused[cause_id] = ordinal + 1
        return derived_id(self.consumer, cause_id, ordinal)


_nothing = nullcontext()
_running: ContextVar[Run | None] = ContextVar("txbox_running", default=None)


def cause_of(explicit: Message[Any] | None) -> tuple[Run | None, Message[Any] | None]:
    """Return the run and the message that cause what is staged now; without either, nothing does.

    Raises:
        ConfigurationError: several messages are being handled and it was not said which.
    """
    run = _running.get()
    if run is None:
        return None, explicit
    if explicit is not None:
        handled = any(explicit.id == message.id for message in run.messages)
        return (run if handled else None), explicit
    if len(run.messages) != 1:
        raise ConfigurationError(
            "A batch handler handles several messages: say which one causes what is staged, with cause=message."
        )
    return run, run.messages[0]


def passed_on(cause: Message[Any] | None) -> dict[str, HeaderValue]:
    """The headers that go from a message to what it causes: trace context, correlation, and the cause's id.

    The trace is that of OpenTelemetry's current span, where the program uses it.
    """
    headers: dict[str, HeaderValue] = {}
    if cause is not None:
        for name in _PASSED_ON:
            if (value := cause.headers.text(name)) is not None:
                headers[name] = value
        headers["causation-id"] = str(cause.id)
    # looked up and not imported: a program that traces has loaded it
    tracing: Any = sys.modules.get("opentelemetry.propagate")
    if tracing is not None:
        tracing.inject(headers)
    return headers


def derived_id(consumer: str, message_id: str, ordinal: int) -> str:
    """Return the id of the n-th thing that a message causes in a consumer, as a UUID.

    The same arguments always give the same id. When the cause's own id is a UUID of version 7, the
    result has its time and version, so that ids which grow with time stay so along a chain.
    """
    digest = bytearray(
        hashlib.sha256(f"{len(consumer)}:{consumer}{message_id}:{ordinal}".encode()).digest()[:16]
    )
    version = 8
    moment = _time_of(message_id)
    if moment is not None:
        digest[_UUID_V7_TIME] = moment
        version = 7
    digest[6] = digest[6] & 0x0F | version << 4
    digest[8] = digest[8] & 0x3F | 0x80
    return str(uuid.UUID(bytes=bytes(digest)))


def _time_of(message_id: str) -> bytes | None:
    if len(message_id) != 36:
        return None
    try:
        parsed = uuid.UUID(message_id)
    except ValueError:
        return None
    return parsed.bytes[_UUID_V7_TIME] if parsed.version == 7 else None
