"""Storing waits for another transaction that holds an id no longer than a claim does (promise 2.5)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.support.databases import Raw
from txbox import App, Inbox, Limits, Message, Outcome
from txbox.session import drive

pytestmark = pytest.mark.every_database

SHORT = Limits(lock_timeout=timedelta(milliseconds=300))


@pytest.mark.parametrize("ordered", [False, True], ids=["any order", "ordered"])
def test_what_another_transaction_holds_is_in_progress_and_the_rest_is_stored(
    database_url: str, raw: Callable[[str], Raw], ordered: bool
) -> None:
    if database_url.startswith("sqlite"):
        pytest.skip("SQLite has one writer: a transaction that holds an id holds all")
    messages: list[Message[Any]] = [
        Message(topic="t", id=str(number), key="odd" if number % 2 else "even")
        for number in range(6)
    ]
    outcomes: list[Outcome] = []
    with App(database_url, limits=SHORT) as app, App(database_url, limits=SHORT) as other:

        @app.handler("t", consumer="c", mode="stored", ordered=ordered)
        def handle(message: Message[Any], tx: Any) -> None:
            del message, tx

        handler = next(iter(app.handlers))

        @other.handler("held", consumer="holder")
        def hold(message: Message[Any], tx: Any) -> None:
            del message
            assert Inbox(consumer="c").accept(tx, "2")
            assert app.database.sync is not None
            answers = drive(app.database.sync, app.intake.take_with_retries, handler, messages)
            outcomes.extend(answer.outcome for answer in answers)

        assert other.process(Message(topic="held", id="1")) is Outcome.PROCESSED
        assert app.process(Message(topic="t", id="7")) is Outcome.DEFERRED
    stored, held = Outcome.DEFERRED, Outcome.IN_PROGRESS
    # where a key has an order, what comes behind the one that is held must not be stored before it
    assert outcomes == [stored, stored, held, stored, held if ordered else stored, stored]
    assert (
        raw(database_url).value(
            "SELECT count(*) FROM txbox_inbox WHERE consumer = 'c' AND status = 'pending'"
        )
        == outcomes.count(stored) + 1
    )
