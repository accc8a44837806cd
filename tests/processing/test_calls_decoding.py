"""Bodies are decoded while the server works on the claim, and each run of a handler sees its own."""

from __future__ import annotations

import json
import threading
from typing import Any

import psycopg
import pytest

from tests.support.databases import NewDatabase
from tests.support.shop import CONSUMER, Shop, opened, paid
from tests.support.waiting import DEADLINE_S
from txbox import Message, Outcome


def decode(message: Message[Any]) -> object:
    return json.loads(message.payload or b"")


class Meddled(psycopg.errors.SerializationFailure):
    """A conflict with nobody."""


def test_a_body_is_decoded_while_its_claim_waits(new_database: NewDatabase) -> None:
    with opened(new_database("postgresql")) as shop:
        decoded = threading.Event()

        def noted(message: Message[Any]) -> object:
            decoded.set()
            return decode(message)

        shop.handler(decode=noted)
        # prepares its statements
        assert shop.deliver(paid("first")) is Outcome.PROCESSED
        decoded.clear()
        with psycopg.connect(shop.url) as rival:
            rival.execute(
                "INSERT INTO txbox_inbox (consumer, message_id, status, topic) VALUES (%s, 'm', 'pending', 'orders')",
                (CONSUMER,),
            )
            outcomes: list[Outcome] = []
            thread = threading.Thread(target=lambda: outcomes.append(shop.deliver(paid("m"))))
            thread.start()
            assert decoded.wait(DEADLINE_S)
            assert not outcomes
            rival.rollback()
        thread.join(DEADLINE_S)
        assert outcomes == [Outcome.PROCESSED]


@pytest.mark.parametrize("batch", [False, True], ids=["alone", "batch"])
def test_a_run_again_sees_the_body_as_it_came(new_database: NewDatabase, batch: bool) -> None:
    seen: list[Any] = []

    def pay(message: Message[Any]) -> None:
        seen.append(dict(message.body))
        message.body.clear()
        if len(seen) == 1:
            raise Meddled

    def pay_all(messages: list[Message[Any]], tx: Any) -> None:
        del tx
        for message in messages:
            pay(message)

    with opened(new_database("postgresql")) as shop:
        function: Any = pay_all if batch else lambda message, tx: pay(message)
        shop.app.handler("orders", consumer=CONSUMER, batch=batch)(function)
        assert shop.deliver(paid("m")) is Outcome.PROCESSED
    assert seen == [{"cents": 100}] * 2


def test_a_body_that_cannot_be_decoded_fails_its_message_alone(shop: Shop) -> None:
    shop.handler(decode=decode)
    assert shop.deliver(paid("bad", b"{")) is Outcome.DEAD
    assert shop.row("bad").error_type == "Reject"
    assert shop.deliver(paid("good")) is Outcome.PROCESSED
    assert shop.effects() == 1
