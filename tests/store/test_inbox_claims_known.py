"""Batches of which most, or some, are known: what a duplicate costs, and what it never skips (promise 2.12)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import psycopg
import pytest

from tests.support.databases import NewDatabase
from tests.support.shop import CONSUMER, Shop, opened, paid
from tests.support.waiting import DEADLINE_S
from txbox import App, Inbox, Message, Outcome
from txbox.connections.psycopg import PsycopgConnection
from txbox.events import MessageDuplicate
from txbox.handlers import Handler
from txbox.policy import Batching
from txbox.processing.attempt import BatchSize
from txbox.session import Result, Statement, drive

pytestmark = pytest.mark.every_database

IDS = [f"m{number}" for number in range(6)]


def take(app: App, handler: Handler, *messages: Message[Any]) -> list[Outcome]:
    assert app.database.sync is not None
    settled = drive(app.database.sync, app.intake.take, handler, messages)
    return [answer.outcome for answer in settled]


def replay(shop: Shop, handler: Handler) -> BatchSize:
    """Have so many duplicates come that the next batch is looked up before it is claimed."""
    pace = shop.app.protocol.batch_sizes.of(handler)
    pace.looked_up(100, 100)
    assert pace.looks_first
    return pace


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names of txbox's statements on psycopg, a list for each round trip."""
    trips: list[list[str]] = []
    for name, verb in (("begin_meanwhile", "begin"), ("commit_then", "commit")):
        original = getattr(PsycopgConnection, name)

        async def noted(
            self: Any,
            statements: Sequence[Statement],
            then: Any,
            value: Any = original,
            kind: str = verb,
        ) -> list[Result]:
            trips.append([kind, *(statement.name for statement in statements)])
            results: list[Result] = await value(self, statements, then)
            return results

        monkeypatch.setattr(PsycopgConnection, name, noted)
    execute = PsycopgConnection.execute

    async def executed(self: Any, statement: Statement) -> Result:
        trips.append([statement.name])
        return await execute(self, statement)

    monkeypatch.setattr(PsycopgConnection, "execute", executed)
    one_trip = PsycopgConnection.one_trip

    async def together(self: Any, statements: Sequence[Statement]) -> list[Result]:
        trips.append(["begin", *(statement.name for statement in statements), "commit"])
        return await one_trip(self, statements)

    monkeypatch.setattr(PsycopgConnection, "one_trip", together)
    return trips


def test_finished_duplicates_cost_a_batch_no_statement_of_their_own(
    new_database: NewDatabase, sent: list[list[str]]
) -> None:
    with opened(new_database("postgresql")) as shop:
        handler = shop.handler()
        assert take(shop.app, handler, *map(paid, IDS[:3])) == [Outcome.PROCESSED] * 3
        sent.clear()
        outcomes = take(shop.app, handler, *map(paid, IDS))
        assert outcomes == [Outcome.DUPLICATE] * 3 + [Outcome.PROCESSED] * 3
        assert sent == [["begin", "claim", "bound_batch", "savepoint_claim"], ["commit", "close"]]
        assert [shop.effects(message_id) for message_id in IDS] == [1] * 6


def test_what_is_not_finished_is_read_by_a_statement_of_its_own(
    new_database: NewDatabase, sent: list[list[str]]
) -> None:
    with opened(new_database("postgresql")) as shop:
        handler = shop.handler()
        shop.app.send(paid("m0"))
        sent.clear()
        outcomes = take(shop.app, handler, *map(paid, IDS[:3]))
        assert outcomes == [Outcome.DEFERRED, Outcome.PROCESSED, Outcome.PROCESSED]
        assert ["classify"] in sent


def test_a_batch_is_looked_up_first_while_duplicates_prevail(
    new_database: NewDatabase, sent: list[list[str]]
) -> None:
    with opened(new_database("postgresql")) as shop:
        handler = shop.handler()
        assert take(shop.app, handler, *map(paid, IDS)) == [Outcome.PROCESSED] * 6
        replay(shop, handler)
        sent.clear()
        assert take(shop.app, handler, *map(paid, IDS)) == [Outcome.DUPLICATE] * 6
        assert sent == [["begin", "duplicates", "commit"]]
        told = [row.message_id for row in shop.events if isinstance(row, MessageDuplicate)]
        assert sorted(map(str, told)) == IDS


def test_what_the_look_does_not_find_is_claimed(shop: Shop) -> None:
    handler = shop.handler()
    take(shop.app, handler, *map(paid, IDS[:4]))
    replay(shop, handler)
    assert take(shop.app, handler, *map(paid, IDS)) == (
        [Outcome.DUPLICATE] * 4 + [Outcome.PROCESSED] * 2
    )
    assert [shop.effects(message_id) for message_id in IDS] == [1] * 6


def test_another_payload_under_a_known_id_is_set_aside_all_the_same(shop: Shop) -> None:
    handler = shop.handler()
    take(shop.app, handler, *map(paid, IDS[:3]))
    replay(shop, handler)
    outcomes = take(shop.app, handler, paid("m0", b'{"cents": 1}'), *map(paid, IDS[1:4]))
    assert outcomes == [
        Outcome.QUARANTINED, Outcome.DUPLICATE, Outcome.DUPLICATE, Outcome.PROCESSED,
    ]  # fmt: skip


def test_a_kept_result_is_returned_though_most_are_known(shop: Shop) -> None:
    def keep(message: Message[Any], tx: Any) -> str | None:
        del tx
        return message.id if isinstance(message.id, str) else None

    shop.app.handler("orders", consumer=CONSUMER, keep_result=True)(keep)
    handler = shop.app.handlers.matching("orders", None, CONSUMER)[0]
    take(shop.app, handler, *map(paid, IDS[:3]))
    replay(shop, handler)
    assert shop.app.database.sync is not None
    settled = drive(shop.app.database.sync, shop.app.intake.take, handler, [*map(paid, IDS[:3])])
    assert [(answer.outcome, answer.json) for answer in settled] == [
        (Outcome.DUPLICATE, f'"{message_id}"'.encode()) for message_id in IDS[:3]
    ]


def test_a_look_beside_a_claim_in_flight_does_not_decide(new_database: NewDatabase) -> None:
    """A row that is not committed is not seen: the claim waits for it, and runs what was rolled back."""
    url = new_database("postgresql")
    with opened(url) as shop, psycopg.connect(url) as rival:
        handler = shop.handler()
        take(shop.app, handler, *map(paid, IDS[1:]))
        replay(shop, handler)
        rival.execute("SELECT 1")  # which begins its transaction
        assert Inbox(consumer=CONSUMER).accept(rival, paid("m0"))
        outcomes: list[list[Outcome]] = []
        second = threading.Thread(
            target=lambda: outcomes.append(take(shop.app, handler, *map(paid, IDS)))
        )
        second.start()
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        while second.is_alive() and not shop.raw.value(waiting):
            pass
        assert not outcomes
        rival.rollback()
        second.join(DEADLINE_S)
        assert outcomes == [[Outcome.PROCESSED] + [Outcome.DUPLICATE] * 5]
        assert [shop.effects(message_id) for message_id in IDS] == [1] * 6


def test_the_look_is_given_up_when_new_messages_prevail() -> None:
    pace = BatchSize(Batching())
    pace.looked_up(100, 99)
    assert pace.looks_first
    pace.looked_up(100, 10)
    assert not pace.looks_first
