"""Staging in the caller's transaction: the row lives and dies with it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import pytest

from tests.databases import Raw
from txbox import Outbox, Outgoing, UnusableMessage
from txbox.store.codec import decode_headers

Connect = Callable[[str], AbstractContextManager[Any]]
Look = Callable[[str], Raw]
STAGED = "SELECT id, topic, content_type, headers, payload FROM txbox_outbox ORDER BY number"


def text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def test_a_staged_message_commits_with_the_callers_writes(
    database_url: str, own_connection: Connect, raw: Look
) -> None:
    with own_connection(database_url) as tx:
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
    database_url: str, own_connection: Connect, raw: Look
) -> None:
    with own_connection(database_url) as tx:
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


def test_text_that_no_database_can_keep_is_refused(
    sqlite_url: str, own_connection: Connect
) -> None:
    with own_connection(sqlite_url) as tx, pytest.raises(UnusableMessage):
        Outbox().stage(tx, "a\0b", {})
