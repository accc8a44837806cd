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
from dramatiq.middleware import CurrentMessage, Retries

from tests.integrations.conftest import Rows
from txbox import ConfigurationError, Inbox
from txbox.integrations.dramatiq import once


class Shop:
    """An actor that writes, and then fails as often as told."""

    def __init__(self, database: Path, *middleware: Any) -> None:
        self.broker = StubBroker(middleware=[Retries(min_backoff=1, max_backoff=1), *middleware])
        self.failures: list[Exception] = []

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

        self.pay = pay

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


def test_without_the_middleware_there_is_no_id(database: Path, rows: Rows) -> None:
    shop = Shop(database)
    with pytest.raises(ConfigurationError, match="has no id"):
        shop.pay(5)
    assert rows("SELECT * FROM ledger") == []
