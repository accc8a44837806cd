"""Events as structured log lines on the logger `txbox`."""

from __future__ import annotations

import json
import logging
from dataclasses import fields
from typing import cast

from txbox import events
from txbox.events import Event

_LEVELS: dict[type[Event], int] = {
    events.MessageProcessed: logging.DEBUG,
    events.MessageDuplicate: logging.DEBUG,
    events.MessageDeferred: logging.DEBUG,
    events.MessageStored: logging.DEBUG,
    events.MessageInFlight: logging.DEBUG,
    events.MessageWaits: logging.DEBUG,
    events.OutgoingSent: logging.DEBUG,
    events.TransactionRetried: logging.INFO,
    events.ConsumptionResumed: logging.INFO,
    events.RowsPruned: logging.INFO,
    events.RowsChanged: logging.INFO,
    events.WorkerStarted: logging.INFO,
    events.WorkerStopped: logging.INFO,
    events.RelayResumed: logging.INFO,
    events.MessageFailed: logging.WARNING,
    events.OutgoingFailed: logging.WARNING,
    events.RelayPaused: logging.WARNING,
    events.MessageUnmatched: logging.WARNING,
    events.MessageQuarantined: logging.ERROR,
    events.MessageDead: logging.ERROR,
    events.OutgoingDead: logging.ERROR,
    events.SequenceGap: logging.ERROR,
    events.ConsumptionPaused: logging.WARNING,
    events.SourceRefused: logging.ERROR,
    events.MessagesLost: logging.ERROR,
    events.LeaseExpired: logging.WARNING,
    events.SettleFailed: logging.WARNING,
}


class LoggingObserver:
    """Writes every event as one line: its name, then its fields.

    Args:
        as_json: one JSON object a line; otherwise `event_name field=value …`.

    Ids, topics, counts, durations and the first lines of sanitised errors appear; payloads and
    headers never do. The fields are also on the log record, as `record.txbox`.
    """

    def __init__(self, as_json: bool = False, logger: logging.Logger | None = None) -> None:
        self._json = as_json
        self._log = logger or logging.getLogger("txbox")

    def __call__(self, event: Event) -> None:
        level = _LEVELS.get(type(event), logging.INFO)
        if not self._log.isEnabledFor(level):
            return
        name = type(event).__name__
        values = {
            own.name: value
            for own in fields(event)
            if (value := getattr(event, own.name)) is not None
        }
        if self._json:
            line = json.dumps({"event": name, **values}, default=str)
        else:
            line = " ".join([name, *(f"{own}={_shown(value)}" for own, value in values.items())])
        self._log.log(level, "%s", line, extra={"txbox": {"event": name, **values}})


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return str(value)
    text = (
        ",".join(map(str, cast("tuple[object, ...]", value)))
        if isinstance(value, tuple)
        else str(value)
    )
    # quoted when a reader could not tell where it ends, or when it could forge a line of its own
    plain = text.isascii() and text.isprintable() and text and " " not in text and '"' not in text
    return text if plain else json.dumps(text)
