"""Batches that share ids, in threads of one process: who waits for an id holds none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.support.databases import Raw
from tests.support.waiting import DEADLINE_S, eventually
from txbox import App, Message, Outcome
from txbox.outcome import Answer
from txbox.policy import Limits
from txbox.session import drive

pytestmark = pytest.mark.every_database

_BEGUN = "SELECT count(*) FROM txbox_inbox WHERE message_id IN ('a', 'b')"


def test_batches_that_want_each_others_ids_do_not_wait_for_each_other(
    postgresql_url: str, raw: Callable[[str], Raw]
) -> None:
    app = App(postgresql_url, limits=Limits(lock_timeout=timedelta(seconds=2 * DEADLINE_S)))
    app.handler("orders", consumer="billing")(_nothing)
    answers: dict[str, list[Answer]] = {}

    def take(name: str, ids: list[str]) -> Callable[[], None]:
        messages: list[Message[Any]] = [
            Message(id=message_id, topic="orders", payload=b"{}") for message_id in ids
        ]

        def taking() -> None:
            connections = app.database.sync
            assert connections is not None
            answers[name] = drive(connections, app.intake.take, next(iter(app.handlers)), messages)

        return taking

    with app:
        in_flight = app.protocol.in_flight
        for each in ("x", "y"):
            assert in_flight.enter("billing", each) is None
        threads = [
            threading.Thread(target=take("first", ["a", "x", "b"]), daemon=True),
            threading.Thread(target=take("second", ["b", "y", "a"]), daemon=True),
        ]
        for thread in threads:
            thread.start()
        look = raw(postgresql_url)
        eventually(lambda: look.value(_BEGUN), "both transactions")
        in_flight.leave("billing", "x", "y")
        for thread in threads:
            thread.join(DEADLINE_S)
    assert sorted(answers) == ["first", "second"], "two batches wait for each other"
    outcomes = [settled.outcome for answer in answers.values() for settled in answer]
    assert outcomes.count(Outcome.PROCESSED) == 4
    assert outcomes.count(Outcome.DUPLICATE) == 2


def _nothing(message: Message[Any], tx: Any) -> None:
    pass
