"""Writes events as structured log lines to the logger `txbox`."""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
import time
from dataclasses import fields
from typing import Any, cast

from txbox import events
from txbox.events import Event

_LEVELS: dict[type[Event], int] = {
    **dict.fromkeys((
        events.MessageProcessed, events.MessageDuplicate, events.MessageDeferred, events.MessageStored,
        events.MessageInFlight, events.MessageWaits, events.TransactionCommitted, events.OutgoingSent,
    ), logging.DEBUG),
    **dict.fromkeys((
        events.TransactionRetried, events.HandlerRunsAlone, events.ConsumptionResumed, events.ConsumerResumed,
        events.RowsPruned, events.RowsChanged, events.WorkerStarted, events.WorkerStopped, events.RelayResumed,
    ), logging.INFO),
    **dict.fromkeys((
        events.QuarantineTrimmed, events.MessageFailed, events.OutgoingFailed, events.RelayPaused,
        events.MessageUnmatched, events.ConsumptionPaused, events.ConsumerPaused, events.LeaseExpired,
        events.SettleFailed, events.LoginRefused, events.TopicMissing,
    ), logging.WARNING),
    **dict.fromkeys((
        events.MessageQuarantined, events.MessageDead, events.OutgoingDead, events.SequenceGap,
        events.SourceRefused, events.MessagesLost, events.CommitsLost, events.ErrorContained,
    ), logging.ERROR),
}  # fmt: skip

#: Repeating events, and their key besides the consumer.
_BEGINS: dict[type[Event], str] = {
    events.ConsumptionPaused: "source",
    events.RelayPaused: "publisher",
    events.SettleFailed: "source",
    events.ErrorContained: "boundary",
    events.LoginRefused: "cause",
    events.TopicMissing: "topic",
}
_ENDS: dict[type[Event], type[Event]] = {
    events.ConsumptionResumed: events.ConsumptionPaused,
    events.RelayResumed: events.RelayPaused,
}
_REPEATED_EVERY_S = 60.0


class LoggingObserver:
    """Writes every event as one line: its name, then its fields. A handler's failure is followed by its traceback.

    Every App has one; passing one as an observer replaces it.

    Ongoing trouble (the database, a source or a broker is unavailable, acknowledgements fail) is logged when it
    begins, then once a minute, and with its cause when it ends. Attempts in between are logged at DEBUG.

    Args:
        as_json: one JSON object per line; otherwise `event_name field=value …`.

    Lines contain ids, topics, counts, durations and the first lines of sanitised errors, never payloads or
    headers. The fields are also on the log record, as `record.txbox`. With a current OpenTelemetry span, JSON lines
    have its `trace_id` and `span_id`; with App(tracing=…) that is the message's span.
    """

    def __init__(self, as_json: bool = False, logger: logging.Logger | None = None) -> None:
        self._json = as_json
        self._log = logger or logging.getLogger("txbox")
        self._lock = threading.Lock()
        # ongoing troubles: when each was last logged, and its cause
        self._troubles: dict[tuple[type[Event], *tuple[str | None, ...]], tuple[float, str]] = {}

    def __call__(self, event: Event) -> None:
        level = _LEVELS.get(type(event), logging.INFO)
        if level == logging.DEBUG and not self._log.isEnabledFor(level):
            # no trouble begins or ends with it, and there may be several for each message
            return
        level, cause = self._level(event, level)
        if not self._log.isEnabledFor(level):
            return
        name = type(event).__name__
        values: dict[str, Any] = {
            field.name: value
            for field in fields(event)
            if field.repr and (value := getattr(event, field.name)) is not None
        }
        if isinstance(event, events.MessageUnmatched):
            # that it has no type may be why nothing matches
            values["type"] = event.type
        if isinstance(event, (events.ConsumptionPaused, events.ConsumptionResumed)):
            # in code None means these; a reader of log lines needs a name
            values = {"source": "database", "consumer": "all", **values}
        if cause is not None:
            values["reason"] = cause
        if self._json:
            line = json.dumps({"event": name, **values, **current_trace()}, default=str)
        else:
            line = " ".join([name, *(f"{key}={_text(value)}" for key, value in values.items())])
        raised: BaseException | None = getattr(event, "exception", None)
        self._log.log(
            level, "%s", line, exc_info=raised, extra={"txbox": {"event": name, **values}}
        )

    def _level(self, event: Event, level: int) -> tuple[int, str | None]:
        """Return the level to log it at and, if it ends a trouble, what the cause was."""
        kind = type(event)
        begins = _ENDS.get(kind, kind)
        name = _BEGINS.get(begins)
        if name is None:
            return level, None
        key = (begins, event.consumer, getattr(event, name), getattr(event, "topic", None))
        now = time.monotonic()
        with self._lock:
            if kind is not begins:
                _, cause = self._troubles.pop(key, (now, None))
                # if its beginning was not logged, its end is not either
                return (level if cause is not None else logging.DEBUG), cause
            logged_at, _ = self._troubles.get(key, (-math.inf, ""))
            if now - logged_at < _REPEATED_EVERY_S:
                return logging.DEBUG, None
            self._troubles[key] = now, str(getattr(event, "reason", ""))
            return level, None


def current_trace() -> dict[str, str]:
    """The ids of OpenTelemetry's current span, in hexadecimal digits; nothing outside a span."""
    # looked up and not imported: a program that traces has loaded it
    tracing: Any = sys.modules.get("opentelemetry.trace")
    context = None if tracing is None else tracing.get_current_span().get_span_context()
    if context is None or not context.is_valid:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}


def _text(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:.4g}"
    parts = cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,)
    text = ",".join(map(str, parts))
    # quoted if its end would not be obvious, or if it could forge a log line
    plain = text.isascii() and text.isprintable() and text and " " not in text and '"' not in text
    return text if plain else json.dumps(text)
