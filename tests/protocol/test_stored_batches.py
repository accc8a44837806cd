"""What storing several messages meets, and in which order it takes their ids (SEMANTICS 2.5, 2.12, 4.5, 5.1)."""

from __future__ import annotations

import secrets
import threading
import time
from datetime import timedelta

import pytest

from tests.conftest import NewDatabase
from tests.shop import Shop, opened, paid
from txbox import Inbox, Limits, Outcome
from txbox.drive import drive
from txbox.handlers import Handler
from txbox.outcome import Answer
from txbox.processing.intake import Leasing
from txbox.steps import Statement, Steps

LEASED = pytest.mark.parametrize("leased", [False, True], ids=["pending", "leased"])
_WAITING = (
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE wait_event_type = 'Lock' AND datname = current_database()"
)


def taking(shop: Shop, handler: Handler, ids: list[str], leased: bool) -> Steps[list[Answer]]:
    leasing = Leasing(shop.app.lease, secrets.token_hex(16)) if leased else None
    return shop.app.intake.take(handler, [paid(own, key="k") for own in ids], leasing=leasing)


def take(shop: Shop, handler: Handler, ids: list[str], leased: bool) -> list[Outcome]:
    settled = drive(shop.app._any_sync(), taking(shop, handler, ids, leased))
    return [own.outcome for own in settled]


@LEASED
def test_a_row_that_is_gone_when_it_is_read_is_stored_again(
    new_database: NewDatabase, leased: bool
) -> None:
    """What is acknowledged is in the table: a row that is not there is nobody's word for that."""
    ids = ["new1", "gone", "new2"]
    with opened(new_database("postgresql")) as shop:
        handler = shop.handler(mode="stored")
        assert take(shop, handler, ["gone"], False) == [Outcome.DEFERRED]
        steps = taking(shop, handler, ids, leased)

        def pruned_before_it_is_read() -> Steps[list[Answer]]:
            step = next(steps)
            while True:
                if isinstance(step, Statement) and step.name == "classify":
                    shop.force("DELETE FROM txbox_inbox WHERE message_id = 'gone'")
                answer = yield step
                try:
                    step = steps.send(answer)
                except StopIteration as stop:
                    settled: list[Answer] = stop.value
                    return settled

        settled = drive(shop.app._any_sync(), pruned_before_it_is_read())
        assert [own.outcome for own in settled] == [Outcome.DEFERRED] * 3
        expected = "processing" if leased else "pending"
        assert {own: shop.row(own).status for own in ids} == dict.fromkeys(ids, expected)
        assert all(shop.row(own).has_payload for own in ids)


@LEASED
def test_a_store_that_waits_for_an_id_holds_none_that_sorts_behind_it(
    new_database: NewDatabase, leased: bool
) -> None:
    """Two stores that share ids wait for each other instead of deadlocking."""
    limits = Limits(lock_timeout=timedelta(seconds=20))
    with opened(new_database("postgresql"), limits=limits) as shop:
        handler = shop.handler(mode="stored")
        connections = [shop.app._any_sync().acquire() for _ in range(2)]
        for own in connections:
            own.begin(())
        first, second = connections
        inbox = Inbox(handler.consumer)
        assert inbox.accept(first.native, paid("a"))
        outcomes: list[Outcome] = []
        thread = threading.Thread(
            target=lambda: outcomes.extend(take(shop, handler, ["z", "a"], leased))
        )
        thread.start()
        deadline = time.monotonic() + 15
        while not shop.raw.value(_WAITING) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert inbox.accept(second.native, paid("z"), timeout=timedelta(seconds=1))
        for own in connections:
            own.rollback()
            own.discard()
        thread.join(30)
        assert outcomes == [Outcome.DEFERRED] * 2


def test_in_order_rows_are_numbered_as_they_came(shop: Shop) -> None:
    ids = ["z", "a", "m"]
    handler = shop.handler(mode="stored", ordered=True)
    assert take(shop, handler, ids, False) == [Outcome.DEFERRED] * 3
    found = shop.raw.rows("SELECT message_id FROM txbox_inbox ORDER BY arrival")
    assert [own.decode() if isinstance(own, bytes) else own for (own,) in found] == ids
