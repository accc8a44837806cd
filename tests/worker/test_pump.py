"""The pump: what it tends while it waits, and what it says of acknowledgements that failed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.shop import TOPIC, Shop, paid, quarantined
from tests.support.sources import Memory
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.workers import running, worker
from txbox.brokers.base import Delivery
from txbox.errors import BrokerError, Fault, StoreUnavailable
from txbox.events import ConsumptionPaused, SettleFailed
from txbox.session import Session


def test_what_is_in_flight_is_tended_while_the_database_is_away(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what reaches no lane, too: the pump itself waits for the database then."""
    back = threading.Event()
    protocol = shop.app.protocol
    quarantine = protocol.quarantine

    async def away(db: Session, *words: Any, **named: Any) -> None:
        if not back.is_set():
            raise StoreUnavailable("away", fault=Fault.UNAVAILABLE)
        await quarantine(db, *words, **named)

    monkeypatch.setattr(protocol, "quarantine", away)
    shop.handler()
    source = Memory(
        [Delivery(None, TOPIC, problem="not JSON", raw=b"\x00{"), paid("behind")], endless=True
    )
    source.tend_every_s = 0.02
    shop.app.consume(source)
    with running(worker(shop.app)):
        eventually(
            lambda: len([delivery for delivery in source.tended if len(delivery) == 2]) >= 3,
            "three rounds of tending both",
        )
        assert source.settled == []
        assert shop.emitted(ConsumptionPaused)
        back.set()
        eventually(lambda: len(source.settled) == 2, "both settled")
    assert quarantined(shop.raw) == [("not JSON", 1)]
    assert len(source.threads) == 1


def test_a_drain_leaves_what_cannot_be_set_aside(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()
    quarantine = shop.app.protocol.quarantine

    async def away(db: Session, *words: Any, **named: Any) -> None:
        asked.set()
        if shop.app.events:
            raise StoreUnavailable("away", fault=Fault.UNAVAILABLE)
        await quarantine(db, *words, **named)

    monkeypatch.setattr(shop.app.protocol, "quarantine", away)
    shop.handler()
    source = Memory([Delivery(None, TOPIC, problem="not JSON", raw=b"{")], endless=True)
    shop.app.consume(source)
    with running(worker(shop.app)) as codes:
        assert asked.wait(DEADLINE_S)
    assert codes == [0]
    assert source.settled == []
    assert source.closed


@pytest.mark.parametrize(("says", "counted"), [(True, 1), (False, 3)])
def test_only_acknowledgements_that_failed_are_counted(
    shop: Shop, says: bool, counted: int
) -> None:
    class Refusing(Memory):
        def settle(self, deliveries: Sequence[Delivery]) -> None:
            super().settle(deliveries)
            failed = [
                delivery
                for delivery in deliveries
                if delivery.message and delivery.message.id == "m1"
            ]
            raise BrokerError("a receipt is unknown", failed=len(failed) if says else None)

    shop.handler()
    source = Refusing([paid(f"m{number}") for number in range(3)])
    shop.app.consume(source)

    assert worker(shop.app, once=True).run() == 0

    assert len(source.settled) == 3
    assert sum(event.count for event in shop.emitted(SettleFailed)) == counted
    assert {event.error for event in shop.emitted(SettleFailed)} == {"a receipt is unknown"}
