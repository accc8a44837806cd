"""Staging in the caller's transaction: the row lives and dies with it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import pytest

from tests.support.databases import Raw
from txbox import App, Message, Outbox, Outcome, Outgoing, RetryPolicy, UnusableMessage
from txbox.brokers.local import Local
from txbox.errors import Fault, StoreError
from txbox.store.codec import decode_headers

Connect = Callable[[str], AbstractContextManager[Any]]
Look = Callable[[str], Raw]
STAGED = "SELECT id, topic, content_type, headers, payload FROM txbox_outbox ORDER BY number"


class Reversing:
    """A codec, so that a row has the name of its key."""

    key_id = "k1"

    def encode(self, data: bytes) -> bytes:
        return data[::-1]

    def decode(self, data: bytes, key_id: str) -> bytes:
        return data[::-1]


def text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def test_a_staged_message_commits_with_the_callers_writes(
    database_url: str, plain_connection: Connect, raw: Look
) -> None:
    with plain_connection(database_url) as tx:
        first = Outbox().stage(
            tx, "invoices", {"order": "é"}, key="k", headers=[("a", b"\xff\x00"), ("a", "2")]
        )
        tx.commit()
        Outbox().stage(tx, "invoices", b"raw")
        tx.rollback()
    ((own_id, topic, content_type, headers, payload),) = raw(database_url).rows(STAGED)
    assert text(own_id) == first
    assert uuid.UUID(first).version == 7
    assert text(topic) == "invoices"
    assert text(content_type) == "application/json"
    assert json.loads(bytes(payload)) == {"order": "é"}
    assert decode_headers(text(headers)).get_all("a") == [b"\xff\x00", "2"]


def test_many_are_staged_in_their_order(
    database_url: str, plain_connection: Connect, raw: Look
) -> None:
    with plain_connection(database_url) as tx:
        ids = Outbox().stage_many(
            tx,
            [Outgoing(topic="t", body=i, delay=timedelta(seconds=i)) for i in range(50)],
        )
        tx.commit()
    assert [text(row[0]) for row in raw(database_url).rows(STAGED)] == ids
    assert [json.loads(bytes(row[4])) for row in raw(database_url).rows(STAGED)] == list(range(50))
    late = raw(database_url).value(
        "SELECT count(*) FROM txbox_outbox WHERE available_at > staged_at"
    )
    assert late == 49


def test_who_stages_in_order_waits_for_whoever_has_staged_under_the_key(
    database_url: str, plain_connection: Connect, raw: Look
) -> None:
    """So their numbers, by which they leave, are in the order of their commits (promise 6.3)."""
    if database_url.startswith("sqlite"):
        pytest.skip("SQLite has one writer: whoever stages waits for all others")
    postgresql = database_url.startswith("postgresql")
    outbox = Outbox()
    with plain_connection(database_url) as first, plain_connection(database_url) as second:
        limit = "lock_timeout = '100ms'" if postgresql else "innodb_lock_wait_timeout = 1"
        second.cursor().execute(f"SET {limit}")
        second.commit()
        outbox.stage(first, "t", "first", key="k", ordered=True)
        outbox.stage(second, "t", "of another key", key="other", ordered=True)
        outbox.stage(second, "t", "in no order", key="k")
        with pytest.raises(StoreError) as waited:
            outbox.stage(second, "t", "second", key="k", ordered=True)
        assert waited.value.fault is Fault.LOCK_TIMEOUT
        second.rollback()
        first.commit()
        outbox.stage(second, "t", "second", key="k", ordered=True)
        second.commit()
    assert [json.loads(bytes(row[4])) for row in raw(database_url).rows(STAGED)] == [
        "first",
        "second",
    ]


def test_one_message_is_written_as_each_of_many(
    database_url: str, plain_connection: Connect, raw: Look
) -> None:
    outgoing = Outgoing(
        "invoices", {"order": 1}, type="paid", key="k", headers=[("a", "1")], content_type="x/y",
        delay=timedelta(hours=1), cause=Message(topic="orders", id="m1", consumer="billing"),
    )  # fmt: skip
    outbox = Outbox(codec=Reversing(), route="to-crm")
    with plain_connection(database_url) as tx:
        outbox.stage_many(tx, [outgoing])
        outbox.stage_many(tx, [outgoing, outgoing])
        tx.commit()
    one, *many = raw(database_url).rows(
        "SELECT topic, type, txbox_outbox.key, key_id, content_type, headers, payload, cause_consumer, cause_id, "
        "route, status, available_at > staged_at FROM txbox_outbox ORDER BY number"
    )
    assert many == [one, one]
    assert None not in one


def test_what_a_handler_stages_commits_with_its_message(database_url: str, raw: Look) -> None:
    with App(database_url) as app:
        app.publish(Local(), topics=["invoices"])

        @app.handler("orders", consumer="billing", retry=RetryPolicy(base=timedelta(0)))
        def bill(message: Message[Any], tx: Any) -> None:
            app.outbox.stage(tx, "invoices", {"order": message.id}, key=message.key)
            if message.id == "bad":
                raise ValueError("no invoice for this one")

        assert app.process(Message(topic="orders", id="good", key="k")) is Outcome.PROCESSED
        assert app.process(Message(topic="orders", id="good", key="k")) is Outcome.DUPLICATE
        assert app.process(Message(topic="orders", id="bad")) is Outcome.FAILED
    staged = raw(database_url).rows(STAGED)
    assert [json.loads(bytes(row[4])) for row in staged] == [{"order": "good"}]


def test_text_that_no_database_can_keep_is_refused(
    sqlite_url: str, plain_connection: Connect
) -> None:
    with plain_connection(sqlite_url) as tx, pytest.raises(UnusableMessage):
        Outbox().stage(tx, "a\0b", {})
