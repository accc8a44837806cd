"""A batch whose COMMIT got no answer, or whose row somebody else has by now (promises 2.6, 2.7, 4.1, 4.2)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from tests.support.databases import NewDatabase, Raw
from tests.support.leasing import Leasing
from tests.support.meddling import Verb, drive_meddled
from tests.support.proxy import Cut, Proxy
from tests.support.shop import CONSUMER, Shop, add_effect, create_effects, execute, opened, paid
from txbox import App, Limits, Message, Outcome, StoreError
from txbox.errors import Fault
from txbox.events import Event, MessageDead, MessageFailed
from txbox.handlers import Handler
from txbox.policy import Batching
from txbox.processing import attempt as pace
from txbox.processing.intake import Mode
from txbox.session import Statements, drive

pytestmark = pytest.mark.every_database

IDS = [f"m{number}" for number in range(5)]
by_cut = pytest.mark.parametrize("cut", ["before", "after"])
# none: the doubt is not decided at once, and the wait for a database that is away has it
by_retries = pytest.mark.parametrize("retries", [0, 5])


@contextmanager
def behind_proxy(url: str, retries: int) -> Iterator[tuple[Shop, Proxy]]:
    events: list[Event] = []
    limits = Limits(conflict_retries=retries)
    with (
        Raw(url) as raw,
        Proxy(url) as proxy,
        App(proxy.url, observers=[events.append], limits=limits) as app,
    ):
        create_effects(raw)
        yield Shop(url, raw, app, events), proxy


def take(shop: Shop, handler: Handler, ids: list[str]) -> list[Outcome]:
    settled = drive(
        shop.app._any_sync(), shop.app.intake.take_with_retries, handler, [*map(paid, ids)]
    )
    return [answer.outcome for answer in settled]


def check_nothing_counted(shop: Shop) -> None:
    assert shop.raw.value("SELECT count(*) FROM txbox_attempt") == 0
    assert shop.emitted(MessageFailed) == shop.emitted(MessageDead) == []


@by_cut
@by_retries
@pytest.mark.parametrize("way", ["alone", "together", "savepoints"])
def test_a_commit_in_doubt_is_no_attempt_of_anybody(
    new_database: NewDatabase, way: str, retries: int, cut: Cut
) -> None:
    with behind_proxy(new_database("postgresql"), retries) as (shop, proxy):
        handler = shop.handler()
        if way == "savepoints":
            for _ in range(200):
                shop.app.protocol.batch_sizes.of(handler).failed(4)
        ids = IDS[:1] if way == "alone" else IDS
        assert take(shop, handler, ["before"]) == [Outcome.PROCESSED]
        proxy.cut = cut
        outcomes = take(shop, handler, ids)
        assert proxy.cuts == 1
        expected = Outcome.PROCESSED if cut == "before" else Outcome.DUPLICATE
        assert outcomes == [expected] * len(ids)
        assert [shop.effects(message_id) for message_id in ids] == [1] * len(ids)
        assert {shop.row(message_id).status for message_id in ids} == {"processed"}
        check_nothing_counted(shop)


@by_cut
def test_a_look_in_doubt_is_repeated(new_database: NewDatabase, cut: Cut) -> None:
    with behind_proxy(new_database("postgresql"), 5) as (shop, proxy):
        handler = shop.handler()
        assert take(shop, handler, IDS[:4]) == [Outcome.PROCESSED] * 4
        shop.app.protocol.batch_sizes.of(handler).looked_up(1000, 1000)
        proxy.cut = cut
        assert take(shop, handler, IDS) == [Outcome.DUPLICATE] * 4 + [Outcome.PROCESSED]
        assert proxy.cuts == 1
        assert [shop.effects(message_id) for message_id in IDS] == [1] * 5
        check_nothing_counted(shop)


@by_cut
@by_retries
def test_rows_whose_commit_is_in_doubt_are_decided_one_by_one(
    new_database: NewDatabase, retries: int, cut: Cut
) -> None:
    with behind_proxy(new_database("postgresql"), retries) as (shop, proxy):
        handler = shop.handler(mode="stored")
        leasing = Leasing(
            drive(
                shop.app._any_sync(),
                shop.app.intake.take_with_retries,
                handler,
                [*map(paid, IDS)],
                Mode.LEASED,
            )
        )
        proxy.cut = cut
        settled = drive(
            shop.app._any_sync(),
            shop.app.protocol.run_leased_many,
            handler,
            leasing.rows,
            leasing.token,
        )
        assert proxy.cuts == 1
        # lost after the server: the fenced release matches nothing, since the work is done
        done = cut == "after"
        assert [answer.outcome for answer in settled] == (
            [Outcome.PROCESSED if done else Outcome.DEFERRED] * len(IDS)
        )
        assert shop.calls == IDS
        assert {(each.status, each.starts) for each in map(shop.row, IDS)} == {
            ("processed" if done else "pending", 0)
        }
        if not done:
            shop.make_due()
            assert shop.work() == [Outcome.PROCESSED] * len(IDS)
        assert [shop.effects(message_id) for message_id in IDS] == [1] * len(IDS)
        check_nothing_counted(shop)


def test_rows_that_left_their_transaction_together_are_never_run_again(shop: Shop) -> None:
    def escapes(message: Message[Any], tx: Any) -> None:
        execute(tx, "ROLLBACK")
        execute(tx, "BEGIN")
        add_effect(tx, message.id)
        execute(tx, "COMMIT")

    handler = shop.handler(escapes, mode="stored")
    leasing = Leasing(
        drive(
            shop.app._any_sync(),
            shop.app.intake.take_with_retries,
            handler,
            [*map(paid, IDS)],
            Mode.LEASED,
        )
    )
    settled = drive(
        shop.app._any_sync(),
        shop.app.protocol.run_leased_many,
        handler,
        leasing.rows,
        leasing.token,
    )
    assert [answer.outcome for answer in settled] == [Outcome.DEAD] * len(IDS)
    assert [shop.effects(message_id) for message_id in IDS] == [1] * len(IDS)
    assert {shop.row(message_id).error_type for message_id in IDS} == {"TransactionBroken"}
    assert sorted(shop.calls) == IDS


@pytest.mark.parametrize("way", ["delivered", "leased"])
def test_a_conflict_makes_batches_small_and_is_no_attempt(
    new_database: NewDatabase, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    # on a busy machine the last message may come later than the calm that lets batches grow again
    monkeypatch.setattr(pace, "_CALM_S", (3600.0, 3600.0))
    with opened(
        new_database("postgresql"), batching=Batching(duration=timedelta(seconds=60))
    ) as shop:

        def conflicts(message: Message[Any], tx: Any) -> None:
            if message.id == "m1" and shop.calls.count("m1") == 1:
                execute(tx, "DO $$ BEGIN RAISE 'lost' USING ERRCODE = '40001'; END $$")

        handler = shop.handler(conflicts, mode="stored" if way == "leased" else "inline")
        version = shop.app.protocol.batch_sizes.of(handler)
        for _ in range(5):
            version.committed(version.messages, 0.0)
        assert version.messages > 2
        if way == "leased":
            messages = [*map(paid, IDS)]
            leasing = Leasing(
                drive(
                    shop.app._any_sync(),
                    shop.app.intake.take_with_retries,
                    handler,
                    messages,
                    Mode.LEASED,
                )
            )
            settled = drive(
                shop.app._any_sync(),
                shop.app.protocol.run_leased_many,
                handler,
                leasing.rows,
                leasing.token,
            )
            outcomes = [one.outcome for one in settled]
        else:
            outcomes = take(shop, handler, IDS)
        assert outcomes == [Outcome.PROCESSED] * len(IDS)
        assert [shop.effects(message_id) for message_id in IDS] == [1] * len(IDS)
        assert version.messages == 2
        check_nothing_counted(shop)


@pytest.mark.parametrize("ids", [["gone"], ["new1", "gone", "new2"]], ids=["alone", "in-a-batch"])
def test_a_row_that_is_gone_when_it_is_read_is_claimed_again(
    new_database: NewDatabase, ids: list[str]
) -> None:
    """Nobody is told that a message is known on the word of a row that is not there."""
    with opened(new_database("postgresql")) as shop:
        handler = shop.handler()
        assert shop.deliver(paid("gone")) is Outcome.PROCESSED
        shop.force("UPDATE txbox_inbox SET status = 'failed', has_payload = true")

        async def pruned_before_it_is_read(
            _verb: Verb, statements: Statements, carried_out: Any
        ) -> Any:
            if any(statement.name == "classify" for statement in statements):
                shop.force("DELETE FROM txbox_inbox WHERE message_id = 'gone'")
            return await carried_out()

        settled = drive_meddled(
            shop.app._any_sync(),
            pruned_before_it_is_read,
            shop.app.protocol.deliver,
            handler,
            [handler.arrival(paid(message_id), Limits()) for message_id in ids],
        )
        assert {message_id: settled[message_id].outcome for message_id in ids} == dict.fromkeys(
            ids, Outcome.PROCESSED
        )
        assert shop.calls.count("gone") == 2
        assert {shop.row(message_id).status for message_id in ids} == {"processed"}


def test_a_conflict_of_the_claim_gives_a_row_back_and_is_never_an_attempt(shop: Shop) -> None:
    """As for a delivery: the budget is spent before the handler ran once."""
    handler = shop.handler(mode="stored")
    shop.deliver(paid("m0"))
    ((leased, token),) = shop.lease()
    claims = 0

    async def busy(verb: Verb, statements: Statements, carried_out: Any) -> Any:
        nonlocal claims
        answer = await carried_out()
        if verb == "begin" and any(one.name.startswith("claim") for one in statements):
            claims += 1
            raise StoreError("busy", fault=Fault.CONFLICT)
        return answer

    settled = drive_meddled(
        shop.app._any_sync(), busy, shop.app.protocol.run_leased, handler, leased, token
    )
    assert claims == shop.app.limits.conflict_retries + 1
    assert settled.outcome is Outcome.DEFERRED
    row = shop.row("m0")
    assert (row.status, row.attempts, row.starts, shop.calls) == ("pending", 0, 0, [])
    check_nothing_counted(shop)
    shop.make_due()
    assert shop.work() == [Outcome.PROCESSED]


@pytest.mark.parametrize("together", [False, True])
def test_a_row_whose_id_another_thread_has_is_given_back_with_its_start(
    database_url: str, together: bool
) -> None:
    with opened(database_url, limits=Limits(lock_timeout=timedelta(seconds=0.2))) as shop:
        _check_given_back(shop, IDS if together else IDS[:1])


def _check_given_back(shop: Shop, own_ids: list[str]) -> None:
    handler, app = shop.handler(mode="stored"), shop.app
    leasing = Leasing(
        drive(
            app._any_sync(),
            app.intake.take_with_retries,
            handler,
            [*map(paid, own_ids)],
            Mode.LEASED,
        )
    )
    assert app.protocol.in_flight.enter(CONSUMER, "m0") is None
    settled = drive(
        app._any_sync(), app.protocol.run_leased_many, handler, leasing.rows, leasing.token
    )
    expected = [Outcome.IN_PROGRESS, *[Outcome.PROCESSED] * (len(own_ids) - 1)]
    assert [answer.outcome for answer in settled] == expected
    assert (shop.row("m0").status, shop.row("m0").starts, shop.calls) == ("pending", 0, own_ids[1:])
    app.protocol.in_flight.leave(CONSUMER, "m0")
    shop.make_due()
    assert shop.work() == [Outcome.PROCESSED]
    assert [shop.effects(message_id) for message_id in own_ids] == [1] * len(own_ids)
