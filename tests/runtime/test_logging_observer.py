"""The log observer: one line an event, a level that fits, and nothing that could forge a line."""

from __future__ import annotations

import json
import logging

import pytest

from txbox import events
from txbox.events import Event
from txbox.observers.logging import LoggingObserver

WHERE = {"consumer": "billing", "message_id": "m 1\nERROR forged", "topic": "orders"}


@pytest.mark.parametrize(
    ("event", "level"),
    [
        (events.MessageProcessed(**WHERE, attempt=2, duration_s=0.25), "DEBUG"),
        (events.MessageFailed(**WHERE, attempt=1, error_type="E", error="x", retry_in_s=1.0), "WARNING"),
        (events.MessageDead(**WHERE, attempt=8, error_type="E", error="x"), "ERROR"),
        (events.MessageQuarantined(**WHERE, reason="no id"), "ERROR"),
        (events.ConsumptionPaused(reason="gone", retry_in_s=1.0), "WARNING"),
        (events.OutgoingSent(publisher="kafka", count=3, duration_s=0.1), "DEBUG"),
        (events.OutgoingFailed(message_id="m", topic="t", publisher="kafka", attempt=1, error="x"), "WARNING"),
        (events.OutgoingDead(message_id="m", topic="t", publisher="kafka", attempt=1, error="x"), "ERROR"),
        (events.RelayPaused(publisher="kafka", reason="gone", retry_in_s=1.0), "WARNING"),
        (events.RelayResumed(publisher="kafka", paused_s=1.0), "INFO"),
        (events.SequenceGap(**WHERE, expected=2, sequence=3), "ERROR"),
        (events.WorkerStarted(consumers=("a", "b"), sources=("s",)), "INFO"),
    ],
)  # fmt: skip
def test_one_line_an_event_at_its_level(
    event: Event, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "txbox")
    LoggingObserver()(event)
    LoggingObserver(as_json=True)(event)
    plain, structured = caplog.records
    assert (plain.levelname, structured.levelname) == (level, level)
    assert "\n" not in plain.getMessage() + structured.getMessage()
    assert plain.getMessage().startswith(type(event).__name__)
    assert json.loads(structured.getMessage())["event"] == type(event).__name__


def test_fields_are_readable_and_structured(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "txbox")
    LoggingObserver()(events.MessageProcessed(**WHERE, attempt=2, duration_s=0.123456))
    (record,) = caplog.records
    assert record.getMessage() == (
        'MessageProcessed consumer=billing message_id="m 1\\nERROR forged" topic=orders attempt=2 duration_s=0.1235'
    )
    assert vars(record)["txbox"]["attempt"] == 2


def test_every_event_has_a_level() -> None:
    from txbox.observers.logging import _LEVELS

    kinds = {
        own for own in vars(events).values() if isinstance(own, type) and issubclass(own, Event)
    }
    assert kinds - {Event, events.MessageEvent} == set(_LEVELS)
