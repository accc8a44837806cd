"""An actor of Dramatiq runs once for each id, in a real worker on its stub broker."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq import Worker
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import Callbacks, CurrentMessage, Interrupt, Retries, SkipMessage

from tests.integrations.conftest import Rows
from txbox import ConfigurationError, Inbox
from txbox.integrations.dramatiq import once


class Shop:
    """An actor that writes, and then fails as often as told."""

    def __init__(self, database: Path, *middleware: Any) -> None:
        self.broker = StubBroker(middleware=[Retries(min_backoff=1, max_backoff=1), *middleware])
        self.failures: list[BaseException] = []

        @contextmanager
        def transaction() -> Iterator[sqlite3.Connection]:
            with closing(sqlite3.connect(database)) as connection, connection:
                connection.execute("BEGIN IMMEDIATE")
                yield connection

        @dramatiq.actor(broker=self.broker, max_retries=3)
        @once(Inbox(consumer="pay"), transaction)
        def pay(tx: sqlite3.Connection, amount: int) -> str:
            tx.execute("INSERT INTO ledger VALUES (?)", (amount,))
            if self.failures:
                raise self.failures.pop()
            return "paid"

        self.pay, self.transaction = pay, transaction

    def work(self, *messages: Any) -> None:
        """Let a worker do what is in the queue, retries included."""
        for message in messages:
            self.broker.enqueue(message)
        worker = Worker(self.broker, worker_threads=1, worker_timeout=50)
        worker.start()
        try:
            self.broker.join("default", fail_fast=False, timeout=60_000)
            worker.join()
        finally:
            worker.stop()
            self.broker.close()


def test_a_message_that_comes_again_runs_nothing(database: Path, rows: Rows) -> None:
    shop = Shop(database, CurrentMessage())
    message = shop.pay.message(5)
    shop.work(message, message, shop.pay.message(6))
    assert rows("SELECT amount FROM ledger ORDER BY 1") == [(5,), (6,)]
    assert (message.message_id,) in rows("SELECT message_id FROM txbox_inbox")


def test_a_retry_runs_under_the_same_id(database: Path, rows: Rows) -> None:
    shop = Shop(database, CurrentMessage())
    shop.failures = [ValueError("first"), ValueError("second")]
    shop.work(shop.pay.message(5))
    assert shop.failures == []
    assert rows("SELECT amount FROM ledger") == [(5,)]
    assert len(rows("SELECT * FROM txbox_inbox")) == 1


def test_a_body_that_ends_by_skipping_is_done(database: Path, rows: Rows) -> None:
    shop = Shop(database, CurrentMessage())
    shop.failures = [SkipMessage(), SkipMessage()]
    message = shop.pay.message(5)
    shop.work(message, message)
    assert len(shop.failures) == 1
    assert rows("SELECT amount FROM ledger") == [(5,)]
    assert rows("SELECT message_id FROM txbox_inbox") == [(message.message_id,)]


def test_an_interrupt_is_a_failure(database: Path, rows: Rows) -> None:
    """Of a time limit, a shutdown or dramatiq-abort: it strikes anywhere, so the body is not done."""
    shop = Shop(database, CurrentMessage())
    shop.failures = [Interrupt()]
    shop.work(shop.pay.message(5))
    assert shop.failures == []
    assert rows("SELECT amount FROM ledger") == [(5,)]


def test_an_actor_that_is_called_as_a_function_twice_is_refused(database: Path, rows: Rows) -> None:
    """It has the id of the message that calls it, and its second call would be a copy."""
    shop = Shop(database, CurrentMessage())
    refused: list[ConfigurationError] = []

    @dramatiq.actor(broker=shop.broker)
    def both() -> None:
        shop.pay(5)
        try:
            shop.pay(6)
        except ConfigurationError as error:
            refused.append(error)

    shop.work(both.message())
    assert len(refused) == 1
    assert rows("SELECT amount FROM ledger") == [(5,)]
    assert rows("SELECT * FROM txbox_quarantine") == []


def test_a_callback_knows_its_copies_by_the_message_that_it_follows(
    database: Path, rows: Rows
) -> None:
    """Dramatiq sends it with a new id whenever that message is delivered."""
    shop = Shop(database, CurrentMessage(), Callbacks())

    @dramatiq.actor(broker=shop.broker, actor_name="tip")
    @once(Inbox(consumer="tip"), shop.transaction, id=lambda paid, _result: paid["message_id"])
    def tip(tx: sqlite3.Connection, _paid: dict[str, Any], _result: str) -> None:
        tx.execute("INSERT INTO ledger VALUES (1)")

    message = shop.pay.message_with_options(args=(5,), on_success=tip)
    shop.work(message, message)
    assert rows("SELECT amount FROM ledger ORDER BY 1") == [(1,), (5,)]
    assert rows("SELECT * FROM txbox_quarantine") == []


def test_without_the_middleware_there_is_no_id(database: Path, rows: Rows) -> None:
    shop = Shop(database)
    with pytest.raises(ConfigurationError, match="has no id"):
        shop.pay(5)
    assert rows("SELECT * FROM ledger") == []
