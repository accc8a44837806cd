"""Whose error it is: the handler's, the infrastructure's, the schema's (promise 2.8)."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest

from tests.support.databases import NewDatabase
from tests.support.meddling import Verb, drive_meddled
from tests.support.shop import CONSUMER, TOPIC, Shop, execute, opened, paid
from txbox import App, Limits, Message, Outcome, RetryPolicy, SchemaError, StoreError
from txbox.admin import Admin, InboxFilter
from txbox.errors import Fault
from txbox.events import ConsumptionPaused, TransactionRetried
from txbox.processing.attempt import InboxProtocol
from txbox.session import Statements
from txbox.testing import drain

pytestmark = pytest.mark.every_database


def test_conflict_of_the_claim_is_never_an_attempt(shop: Shop) -> None:
    """The budget of immediate retries is spent before the handler ran once: infrastructure."""
    handler = shop.handler()
    protocol = InboxProtocol(
        shop.app.store, shop.app.events, Limits(conflict_retries=2), shop.app.lease
    )
    begun = []

    async def busy(verb: Verb, statements: Statements, carried_out: Any) -> Any:
        assert verb != "commit", "nothing is recorded"
        if verb == "begin":
            begun.append(statements)
            raise StoreError("busy", fault=Fault.CONFLICT)
        return await carried_out()

    arrivals = [handler.arrival(paid("a"), Limits())]
    with pytest.raises(StoreError) as raised:
        drive_meddled(shop.app._any_sync(), busy, protocol.deliver, handler, arrivals)
    assert raised.value.fault is Fault.CONFLICT
    assert len(begun) == 3
    assert len(shop.emitted(TransactionRetried)) == 2


@pytest.mark.parametrize("column", [False, True], ids=["table", "column"])
def test_undefined_table_or_column_in_txboxs_statements_stops(shop: Shop, column: bool) -> None:
    shop.handler()
    assert shop.deliver(paid("before")) is Outcome.PROCESSED
    if column:
        shop.raw.execute("ALTER TABLE txbox_inbox RENAME COLUMN payload_hash TO gone")
    else:
        shop.raw.execute("DROP VIEW txbox_status")
        shop.raw.execute("DROP VIEW txbox_dead_letters")
        shop.raw.execute("ALTER TABLE txbox_inbox RENAME TO gone")
    with pytest.raises((SchemaError, StoreError)) as raised:
        shop.deliver(paid("a"))
    assert isinstance(raised.value, SchemaError), raised.value
    assert "txbox " in str(raised.value)  # the command to run
    assert shop.calls == ["before"]
    assert shop.emitted(ConsumptionPaused) == []


def test_missing_tables_name_the_command(empty_database_url: str) -> None:
    with App(empty_database_url) as app:
        app.handler(TOPIC, consumer=CONSUMER)(lambda message, tx: None)
        with pytest.raises(SchemaError, match="txbox init"):
            app.process(paid("a"))


def test_undefined_table_in_the_handler_is_the_handlers_failure(shop: Shop) -> None:
    shop.handler(lambda message, tx: execute(tx, "SELECT * FROM no_such_table"))
    assert shop.deliver(paid("a")) is Outcome.FAILED
    assert (shop.row("a").attempts, shop.effects()) == (1, 0)


def test_connection_lost_in_the_handler_is_no_attempt(new_database: NewDatabase) -> None:
    with opened(new_database("postgresql")) as shop:
        killed: list[int] = []

        def loses(message: Message[Any], tx: Any) -> None:
            if not killed:
                killed.append(execute(tx, "SELECT pg_backend_pid()")[0][0])
                shop.raw.execute("SELECT pg_terminate_backend(?)", (killed[0],))
                execute(tx, "SELECT pg_sleep(10)")

        shop.handler(loses)
        assert shop.deliver(paid("a")) is Outcome.PROCESSED
        assert shop.calls == ["a", "a"]
        assert (shop.effects("a"), shop.row("a").attempts) == (1, 0)
        assert len(shop.emitted(TransactionRetried)) == 1


@pytest.mark.parametrize("stored", [False, True])
def test_a_handler_that_always_loses_its_connection_is_a_failure(
    new_database: NewDatabase, stored: bool
) -> None:
    """The database is there each time, so waiting cures nothing: it must not go round for ever."""
    with opened(new_database("postgresql"), limits=Limits(conflict_retries=3)) as shop:
        shop.handler(
            lambda message, tx: execute(tx, "SELECT pg_terminate_backend(pg_backend_pid())"),
            retry=RetryPolicy(max_attempts=1),
        )
        if stored:
            shop.app.send(paid("a"))
            drain(shop.app)
        else:
            assert shop.deliver(paid("a")) is Outcome.DEAD
        assert shop.calls == ["a"] * 4
        found = shop.row("a")
        assert (found.status, found.attempts, shop.effects()) == ("dead", 1, 0)


def test_a_replay_that_loses_its_connection_is_tried_again_and_fails_at_last(
    new_database: NewDatabase,
) -> None:
    """As a message that comes for the first time; and its row stays processed."""
    losses: list[None] = []

    def loses(message: Message[Any], tx: Any) -> None:
        if losses:
            losses.pop()
            execute(tx, "SELECT pg_terminate_backend(pg_backend_pid())")

    with opened(new_database("postgresql"), limits=Limits(conflict_retries=3)) as shop:
        shop.handler(loses, keep_payload="always")
        assert shop.deliver(paid("a")) is Outcome.PROCESSED
        admin, everything = Admin(shop.app), InboxFilter(consumer=CONSUMER)
        losses += [None]
        assert admin.replay(everything).processed == 1
        assert shop.calls == ["a"] * 3
        losses += [None] * 10
        assert admin.replay(everything).failed == 1
        assert shop.calls == ["a"] * 7
        assert (shop.row("a").status, shop.row("a").attempts) == ("processed", 0)
        assert shop.raw.value("SELECT status FROM txbox_attempt") == "replay failed"


def test_timeout_of_the_handler_is_its_failure(shop: Shop) -> None:
    done = threading.Event()
    shop.handler(lambda message, tx: done.wait(0.2), timeout=timedelta(seconds=0.05))
    assert shop.deliver(paid("a")) is Outcome.FAILED
    assert (shop.row("a").error_type, shop.effects()) == ("HandlerTimeout", 0)
