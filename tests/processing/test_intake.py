"""What storing several messages meets, and in which order it takes their ids (promises 2.5, 2.12, 4.5, 5.1)."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest

from tests.support.blocked import acquired
from tests.support.databases import NewDatabase
from tests.support.meddling import Verb, drive_meddled
from tests.support.shop import Shop, opened, paid
from tests.support.waiting import DEADLINE_S, eventually
from txbox import Inbox, Limits, Outcome
from txbox.handlers import Handler
from txbox.outcome import Answer
from txbox.processing.intake import Mode
from txbox.session import Session, Statements, drive

pytestmark = pytest.mark.every_database

LEASED = pytest.mark.parametrize("leased", [False, True], ids=["pending", "leased"])
_WAITING = (
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE wait_event_type = 'Lock' AND datname = current_database()"
)


async def taking(
    db: Session, shop: Shop, handler: Handler, ids: list[str], leased: bool
) -> list[Answer]:
    mode = Mode.LEASED if leased else None
    return await shop.app.intake.take(
        db, handler, [paid(message_id, key="k") for message_id in ids], mode
    )


def take(shop: Shop, handler: Handler, ids: list[str], leased: bool) -> list[Outcome]:
    settled = drive(shop.app._any_sync(), taking, shop, handler, ids, leased)
    return [answer.outcome for answer in settled]


@LEASED
def test_a_row_that_is_gone_when_it_is_read_is_stored_again(
    new_database: NewDatabase, leased: bool
) -> None:
    """What is acknowledged is in the table: a row that is not there is nobody's word for that."""
    ids = ["new1", "gone", "new2"]
    with opened(new_database("postgresql")) as shop:
        handler = shop.handler(mode="stored")
        assert take(shop, handler, ["gone"], False) == [Outcome.DEFERRED]

        async def pruned_before_it_is_read(
            verb: Verb, statements: Statements, carried_out: Any
        ) -> Any:
            if verb == "execute" and statements[0].name == "classify":
                shop.force("DELETE FROM txbox_inbox WHERE message_id = 'gone'")
            return await carried_out()

        settled = drive_meddled(
            shop.app._any_sync(), pruned_before_it_is_read, taking, shop, handler, ids, leased
        )
        assert [answer.outcome for answer in settled] == [Outcome.DEFERRED] * 3
        expected = "processing" if leased else "pending"
        assert {message_id: shop.row(message_id).status for message_id in ids} == dict.fromkeys(
            ids, expected
        )
        assert all(shop.row(message_id).has_payload for message_id in ids)


@LEASED
def test_a_store_that_waits_for_an_id_holds_none_that_sorts_behind_it(
    new_database: NewDatabase, leased: bool
) -> None:
    """Two stores that share ids wait for each other instead of deadlocking."""
    limits = Limits(lock_timeout=timedelta(seconds=2 * DEADLINE_S))
    with opened(new_database("postgresql"), limits=limits) as shop:
        handler = shop.handler(mode="stored")
        connections = [acquired(shop.app._any_sync()) for _ in range(2)]
        for connection in connections:
            connection.begin(())
        first, second = connections
        inbox = Inbox(handler.consumer)
        assert inbox.accept(first.native, paid("a"))
        outcomes: list[Outcome] = []
        thread = threading.Thread(
            target=lambda: outcomes.extend(take(shop, handler, ["z", "a"], leased))
        )
        thread.start()
        eventually(lambda: shop.raw.value(_WAITING), "the wait for the first")
        assert inbox.accept(second.native, paid("z"), timeout=timedelta(seconds=DEADLINE_S))
        for connection in connections:
            connection.rollback()
            connection.discard()
        thread.join(DEADLINE_S)
        assert outcomes == [Outcome.DEFERRED] * 2


def test_in_order_rows_are_numbered_as_they_came(shop: Shop) -> None:
    ids = ["z", "a", "m"]
    handler = shop.handler(mode="stored", ordered=True)
    assert take(shop, handler, ids, False) == [Outcome.DEFERRED] * 3
    found = shop.raw.rows("SELECT message_id FROM txbox_inbox ORDER BY arrival")
    assert [row.decode() if isinstance(row, bytes) else row for (row,) in found] == ids
