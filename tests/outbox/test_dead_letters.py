"""A message that is given up leaves a letter, in the same transaction (promise 3.2)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from tests.support.databases import Raw
from txbox import App, ConfigurationError, Lease, Message, Outcome, Reject, RetryPolicy
from txbox.admin import Admin, InboxFilter
from txbox.maintenance import Task, run_once
from txbox.session import drive
from txbox.store import leases
from txbox.store.codec import decode_headers
from txbox.testing import Crashed, crash_at, crash_points, drain

Look = Callable[[str], Raw]
LETTERS = (
    "SELECT id, topic, headers, payload, cause_consumer, cause_id FROM txbox_outbox ORDER BY number"
)


def text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def failing(app: App, error: Exception, **options: Any) -> None:
    @app.handler("orders", consumer="billing", dead_letter_topic="orders.dead", **options)
    def bill(message: Message[Any], tx: Any) -> None:
        del message, tx
        raise error


def test_a_rejected_message_is_forwarded_with_its_payload_and_why(
    database_url: str, raw: Look
) -> None:
    with App(database_url) as app:
        failing(app, Reject("never"))
        message: Message[Any] = Message(
            topic="orders",
            id="1",
            key="k",
            payload=b'{"order":1}',
            headers={"a": "b", "message-id": "1"},
        )
        assert app.process(message) is Outcome.DEAD
        assert app.process(message) is Outcome.DUPLICATE
    ((own_id, topic, headers, payload, consumer, cause),) = raw(database_url).rows(LETTERS)
    assert (text(topic), text(consumer), text(cause)) == ("orders.dead", "billing", "1")
    assert json.loads(bytes(payload)) == {"order": 1}
    found = decode_headers(text(headers))
    assert found.get("a") == "b"
    assert found.get("message-id") is None, "it would be taken for the letter's own"
    assert found.get("dead-letter-message-id") == "1"
    assert found.get("dead-letter-topic") == "orders"
    assert found.get("dead-letter-error-type") == "Reject"
    assert text(own_id) != "1"


def test_only_the_last_failure_leaves_a_letter_and_a_second_death_another(
    database_url: str, raw: Look
) -> None:
    with App(database_url) as app:
        failing(app, ValueError("no"), retry=RetryPolicy(max_attempts=3, base=timedelta(0)))
        assert app.process(Message(topic="orders", id="1")) is Outcome.FAILED
        assert raw(database_url).rows(LETTERS) == []
        drain(app)
        assert len(raw(database_url).rows(LETTERS)) == 1
        with Admin(app) as admin:
            admin.retry(InboxFilter(consumer="billing"))
        drain(app)
    first, second = raw(database_url).rows(LETTERS)
    assert first[0] != second[0]


def test_an_edited_message_that_dies_again_leaves_a_letter_that_is_no_copy(
    database_url: str, raw: Look
) -> None:
    """With the id of the first, an inbox that takes both would quarantine it: the payload is another."""
    with App(database_url) as app:
        failing(app, ValueError("no"), retry=RetryPolicy(max_attempts=1))
        assert app.process(Message(topic="orders", id="1", payload=b"{}")) is Outcome.DEAD
        with Admin(app) as admin:
            admin.edit("billing", "1", payload=b'{"fixed": true}', reason="typo")
        drain(app)
    first, second = raw(database_url).rows(LETTERS)
    assert first[0] != second[0]
    assert [bytes(letter[3]) for letter in (first, second)] == [b"{}", b'{"fixed": true}']


def test_a_message_that_killed_its_process_leaves_a_letter(database_url: str, raw: Look) -> None:
    lease = Lease(duration=timedelta(seconds=30), max_starts=1)
    with App(database_url, lease=lease) as app:
        failing(app, ValueError("never run"), mode="stored")
        app.process(Message(topic="orders", id="1", payload=b"x"))
        assert app.database.sync is not None
        drive(
            app.database.sync,
            leases.lease,
            app.store,
            "billing",
            token="t",
            limit=1,
            lease=lease,
            suspect=False,
        )
        raw(database_url).execute("UPDATE txbox_inbox SET lease_until = received_at")
        assert run_once(app, "rescue", Task()).dead == 1
    ((_, topic, headers, payload, _, _),) = raw(database_url).rows(LETTERS)
    assert (text(topic), bytes(payload)) == ("orders.dead", b"x")
    assert decode_headers(text(headers)).get("dead-letter-consumer") == "billing"


def test_no_message_is_dead_without_its_letter_wherever_a_process_dies(
    sqlite_url: str, raw: Look
) -> None:
    """A second delivery would not stage it: it is a duplicate by then."""
    with App(sqlite_url) as app:
        failing(app, Reject("never"))
        passes = Counter[str]()
        for point in crash_points(app, Message(topic="orders", id="undisturbed")):
            passes[point] += 1
            dies: Message[Any] = Message(topic="orders", id=f"{point} {passes[point]}")
            with suppress(Crashed), crash_at(point, passes[point]):
                app.process(dies)
    look = raw(sqlite_url)
    dead = {text(row[0]) for row in look.rows("SELECT message_id FROM txbox_inbox")}
    letters = {text(row[0]) for row in look.rows("SELECT cause_id FROM txbox_outbox")}
    assert letters == dead
    assert "undisturbed" in dead
    assert "before:last_death 1" not in dead


def test_a_handler_may_not_feed_itself(sqlite_url: str) -> None:
    with App(sqlite_url) as app, pytest.raises(ConfigurationError, match="its own dead letters"):

        @app.handler("t", consumer="c", dead_letter_topic="t")
        def handle(message: Message[Any], tx: Any) -> None: ...
