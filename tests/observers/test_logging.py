"""The log observer: one line per event, at the right level, that nobody can forge."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from txbox import events
from txbox.events import Event
from txbox.observers.logging import LoggingObserver

WHERE: dict[str, Any] = {
    "consumer": "billing",
    "message_id": "m 1\nERROR forged",
    "topic": "orders",
}


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


@pytest.mark.parametrize(("kind", "shown"), [("order.lost", "order.lost"), (None, "none")])
def test_an_unmatched_message_is_logged_with_its_topic_and_its_type_or_that_it_has_none(
    kind: str | None, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    event = events.MessageUnmatched(message_id="m1", topic="orders", type=kind)
    LoggingObserver()(event)
    LoggingObserver(as_json=True)(event)
    plain, structured = caplog.records
    assert plain.getMessage() == f"MessageUnmatched message_id=m1 topic=orders type={shown}"
    assert json.loads(structured.getMessage()) == {
        "event": "MessageUnmatched", "message_id": "m1", "topic": "orders", "type": kind,
    }  # fmt: skip


def test_every_event_has_a_level() -> None:
    from txbox.observers.logging import _LEVELS

    kinds = {
        var for var in vars(events).values() if isinstance(var, type) and issubclass(var, Event)
    }
    assert kinds - {Event, events.MessageEvent} == set(_LEVELS)


def _told(records: list[logging.LogRecord]) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in records]


@pytest.mark.parametrize(
    ("paused", "resumed", "named"),
    [
        (
            events.ConsumptionPaused(reason="gone", retry_in_s=1.0, source="kafka:shop"),
            events.ConsumptionResumed(paused_s=150.0, source="kafka:shop"),
            "source=kafka:shop consumer=all",
        ),
        (
            events.ConsumptionPaused(consumer="billing", reason="gone", retry_in_s=1.0),
            events.ConsumptionResumed(consumer="billing", paused_s=150.0),
            "source=database consumer=billing",
        ),
        (
            events.RelayPaused(publisher="kafka:a", reason="gone", retry_in_s=1.0),
            events.RelayResumed(publisher="kafka:a", paused_s=150.0),
            "publisher=kafka:a",
        ),
    ],
)  # fmt: skip
def test_trouble_is_told_when_it_begins_once_a_minute_and_when_it_ends(
    paused: Event, resumed: Event, named: str, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO, "txbox")
    now = 1000.0
    monkeypatch.setattr("txbox.observers.logging.time.monotonic", lambda: now)
    observer = LoggingObserver()
    for _ in range(1500):
        observer(paused)
        now += 0.1
    observer(resumed)
    observer(resumed)
    told = _told(caplog.records)
    assert [level for level, _ in told] == ["WARNING", "WARNING", "WARNING", "INFO"]
    assert all(named in line and "reason=gone" in line for _, line in told), told
    # the next one is a new trouble
    observer(paused)
    assert len(caplog.records) == 5


def test_each_consumer_and_each_source_has_troubles_of_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "txbox")
    observer = LoggingObserver()
    several: list[Event] = [
        events.ConsumptionPaused(consumer="billing", reason="gone", retry_in_s=1.0),
        events.ConsumptionPaused(consumer="ledger", reason="gone", retry_in_s=1.0),
        events.ConsumptionPaused(source="kafka:shop", reason="gone", retry_in_s=1.0),
        events.RelayPaused(publisher="kafka:shop", reason="gone", retry_in_s=1.0),
        events.SettleFailed(source="kafka:shop", count=3, error="gone"),
    ]
    for _ in range(20):
        for line in several:
            observer(line)
    assert len(caplog.records) == len(several)
