"""One message at the flat first try and through the loop: the same outcome, events, crash points and rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from tests.support.shop import TOPIC, Shop, execute
from txbox import Message, Outcome, Reject, session
from txbox.handlers import Handler
from txbox.processing.transaction import HandlerTransaction
from txbox.session import Session

Body = Callable[[Message[Any], Any], object]


def fails(_message: Message[Any], _tx: Any) -> None:
    raise ValueError("no")


def rejects(_message: Message[Any], _tx: Any) -> None:
    raise Reject("never")


def commits(_message: Message[Any], tx: Any) -> None:
    tx.commit()


def rolls_back(_message: Message[Any], tx: Any) -> None:
    tx.rollback()


def breaks_a_statement(_message: Message[Any], tx: Any) -> None:
    execute(tx, "SELECT * FROM no_such_table")


def swallows(_message: Message[Any], tx: Any) -> None:
    with suppress(Exception):
        execute(tx, "SELECT * FROM no_such_table")


def nothing(_message: Message[Any], _tx: Any) -> None:
    pass


CASES: dict[str, tuple[Body, dict[str, Any], bytes]] = {
    "processed": (nothing, {}, b"{}"),
    "kept": (nothing, {"keep_payload": "always"}, b"{}"),
    "pipelined": (nothing, {"pipeline": True}, b"{}"),
    "in time": (nothing, {"timeout": timedelta(seconds=30)}, b"{}"),
    "failed": (fails, {}, b"{}"),
    "rejected": (rejects, {}, b"{}"),
    "left by commit": (commits, {}, b"{}"),
    "left by rollback": (rolls_back, {}, b"{}"),
    "a statement fails": (breaks_a_statement, {}, b"{}"),
    "a failure swallowed": (swallows, {}, b"{}"),
    "no JSON": (nothing, {"decode": lambda message: message.json()}, b"{"),
}


class Road:
    """A shop whose messages go one way, and what can be seen of them."""

    def __init__(self, shop: Shop, consumer: str) -> None:
        self._shop, self._consumer = shop, consumer
        self.points: list[str] = []

    def deliver(self, monkeypatch: pytest.MonkeyPatch, payload: bytes = b"{}") -> Outcome:
        message = Message[Any](id="1", topic=TOPIC, payload=payload)
        with monkeypatch.context() as patch:
            patch.setattr(session, "crash_point", self.points.append)
            return self._shop.deliver(message, self._consumer)

    def seen(self) -> tuple[Any, ...]:
        shop, consumer = self._shop, self._consumer
        row = shop.row("1", consumer)
        written = shop.raw.rows("SELECT count(*) FROM effect WHERE note = ?", (consumer,))
        events = [
            type(event).__name__
            for event in shop.events
            if getattr(event, "consumer", None) == consumer
        ]
        return self.points, events, (row.status, row.attempts, row.error_type), written


def roads(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, body: Body, **options: Any
) -> tuple[Road, Road]:
    """The flat road, which is checked to be taken, and the loop's."""
    shop.handler(body, consumer="flat", **options)
    looped = shop.handler(body, consumer="loop", **options)
    vars(looped)["plain"] = False
    tried: list[str] = []
    once = HandlerTransaction.once

    async def noted(self: Any, db: Session, handler: Handler, arrival: Any) -> Any:
        tried.append(handler.consumer)
        return await once(self, db, handler, arrival)

    monkeypatch.setattr(HandlerTransaction, "once", noted)
    # before anything is compared: the schema is checked once, and the catalogue read
    warm = Message[Any](id="warm", topic=TOPIC, payload=b"{}")
    assert {shop.deliver(warm, consumer) for consumer in ("flat", "loop")} <= set(Outcome)
    assert tried == ["flat"]
    shop.events.clear()
    # neither is read again in between, however long that takes
    settings = shop.app.database.handler_settings
    assert settings is not None
    shop.app.pauses.stale_at = settings.stale_at = math.inf
    return Road(shop, "flat"), Road(shop, "loop")


@pytest.mark.parametrize("case", CASES)
def test_both_roads_lead_to_the_same_end(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    body, options, payload = CASES[case]
    flat, loop = roads(shop, monkeypatch, body, **options)
    for _ in ("first", "duplicate"):
        assert flat.deliver(monkeypatch, payload) is loop.deliver(monkeypatch, payload)
        assert flat.seen() == loop.seen()


@pytest.mark.parametrize("step", ["claiming", "_close"])
def test_what_nobody_expects_costs_the_message_an_attempt_on_both_roads(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    flat, loop = roads(shop, monkeypatch, nothing)

    def boom(*_: object, **__: object) -> Any:
        raise RuntimeError("unexpected")

    monkeypatch.setattr(HandlerTransaction, step, boom)
    assert flat.deliver(monkeypatch) is loop.deliver(monkeypatch) is Outcome.FAILED
    assert flat.seen() == loop.seen()
