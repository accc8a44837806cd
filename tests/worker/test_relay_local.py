"""What messages to the App's own consumers owe to their way through the outbox: see decision 0071."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import pytest

from tests.support.databases import Raw
from tests.support.workers import worker
from tests.worker.test_relay import drained, relay_of
from txbox import App, Message
from txbox.events import Event, MessageQuarantined

Connect = Callable[[str], AbstractContextManager[Any]]
Look = Callable[[str], Raw]


def take(message: Message[Any], tx: Any) -> None: ...


def test_two_that_stage_one_business_id_wait_for_nothing_and_neither_is_lost(
    database_url: str, plain_connection: Connect, raw: Look
) -> None:
    """The consumer's id is none of the outbox: its row is written, and compared, after both commits."""
    events: list[Event] = []
    with (
        App(database_url, observers=[events.append]) as app,
        plain_connection(database_url) as first,
        plain_connection(database_url) as second,
    ):
        app.handler("paid", consumer="books", message_id="body.order")(take)
        if database_url.startswith("postgresql"):
            second.execute("SET lock_timeout = '100ms'")
            second.commit()
            # the snapshot is older than what the other one commits
            second.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        elif not database_url.startswith("sqlite"):
            second.cursor().execute("SET innodb_lock_wait_timeout = 1")
        second.cursor().execute("SELECT count(*) FROM txbox_inbox")
        app.outbox.stage(first, "paid", {"order": "7"})
        if database_url.startswith("sqlite"):
            # it has one writer, whatever that writes
            first.commit()
            second.rollback()
        app.outbox.stage(second, "paid", {"order": "7", "cents": 30})
        second.commit()
        first.commit()
        drained(relay_of(app))
        app.outbox.stage(first, "paid", {"order": "7"})
        app.outbox.stage(first, "paid", {"order": "7", "cents": 31})
        first.commit()
        drained(relay_of(app))
    aside = [event for event in events if isinstance(event, MessageQuarantined)]
    assert [(event.consumer, event.message_id) for event in aside] == [("books", "7")] * 2
    look = raw(database_url)
    assert look.value("SELECT count(*) FROM txbox_inbox WHERE message_id = '7'") == 1
    # copies of one payload share a row; which of the first two came first is up to their numbers
    assert look.value("SELECT count(*) FROM txbox_quarantine WHERE message_id = '7'") == 2
    assert look.value("SELECT count(*) FROM txbox_outbox") == 0


@pytest.mark.parametrize("delay", [None, timedelta(hours=1)], ids=["due", "delayed"])
def test_a_delayed_message_is_not_in_the_order_of_its_key_at_an_ordered_consumer(
    database_url: str, plain_connection: Connect, delay: timedelta | None
) -> None:
    handled: list[Any] = []
    with App(database_url) as app, plain_connection(database_url) as tx:

        @app.handler("moved", consumer="places", ordered=True)
        def move(message: Message[Any], tx: Any) -> None:
            handled.append(message.body)

        app.outbox.stage(tx, "moved", "first", key="k", delay=delay)
        app.outbox.stage(tx, "moved", "second", key="k")
        tx.commit()
        assert worker(app, once=True).run() == 0
    assert handled == (["second"] if delay else ["first", "second"])
