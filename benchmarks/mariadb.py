"""MariaDB through PyMySQL: rows for the page, no bar."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from importlib import metadata
from typing import Any
from urllib.parse import urlsplit

import pymysql

from benchmarks.measure import circumstances
from benchmarks.naive_variants import (
    ClientGauge,
    Consume,
    Contender,
    Looped,
    Worked,
    interleaved,
)
from benchmarks.result import Plot, ratios, result, summary
from benchmarks.workload import ACCOUNTS, CONSUMER, Delivery
from tests.support.servers import VARIABLES, ServerError, server_urls
from txbox import App, Batching, Message

NUMBER = "MARIADB"
TITLE = "MariaDB, PyMySQL"
SERVER = "mariadb-durable"

_PAY = "UPDATE account SET balance = balance + %s WHERE id = %s"
_ORDER = "INSERT INTO orders (number, account, amount) VALUES (%s, %s, %s)"


class Schema:
    """A database of a MariaDB server."""

    def __init__(self, url: str, name: str) -> None:
        self._parts = urlsplit(url)
        self._name = name

    @property
    def url(self) -> str:
        return self._parts._replace(path=f"/{self._name}").geturl()

    def open(self, *, within: bool = True) -> pymysql.Connection[Any]:
        return pymysql.connect(
            host=self._parts.hostname or "localhost",
            port=self._parts.port or 3306,
            user=self._parts.username,
            password=self._parts.password or "",
            database=self._name if within else None,
            charset="utf8mb4",
            init_command="SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
        )

    def create(self) -> None:
        with closing(self.open(within=False)) as admin, admin.cursor() as cursor:
            cursor.execute("SELECT @@GLOBAL.innodb_flush_log_at_trx_commit")
            if cursor.fetchone() != (1,):
                raise ServerError(
                    "The server does not flush each commit: its figures would say nothing."
                )
            cursor.execute(f"DROP DATABASE IF EXISTS `{self._name}`")
            cursor.execute(f"CREATE DATABASE `{self._name}` CHARACTER SET utf8mb4")

    def drop(self) -> None:
        with closing(self.open(within=False)) as admin, admin.cursor() as cursor:
            cursor.execute(f"DROP DATABASE IF EXISTS `{self._name}`")

    def prepare(self) -> None:
        with closing(self.open()) as admin, admin.cursor() as cursor:
            cursor.execute("DROP TABLE IF EXISTS account, orders, inbox")
            cursor.execute(
                "CREATE TABLE account (id INT PRIMARY KEY, balance BIGINT NOT NULL DEFAULT 0)"
            )
            cursor.execute(
                "CREATE TABLE orders (id BIGINT AUTO_INCREMENT PRIMARY KEY, number BIGINT NOT NULL, "
                "account INT NOT NULL, amount INT NOT NULL)"
            )
            cursor.execute(
                "CREATE TABLE inbox (consumer VARBINARY(255) NOT NULL, message_id VARBINARY(255) NOT NULL, "
                "received_at TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6), "
                "PRIMARY KEY (consumer, message_id))"
            )
            cursor.executemany(
                "INSERT INTO account (id) VALUES (%s)", [(account,) for account in range(ACCOUNTS)]
            )
            admin.commit()
            cursor.execute("SHOW TABLES LIKE 'txbox_inbox'")
            if cursor.fetchone():
                cursor.execute("TRUNCATE txbox_inbox")

    def row(self, sql: str) -> Sequence[Any]:
        with closing(self.open()) as admin, admin.cursor() as cursor:
            cursor.execute(sql)
            row = cursor.fetchone()
        assert row is not None
        return tuple(row)


def _pay(body: Mapping[str, Any], tx: pymysql.Connection[Any]) -> None:
    with tx.cursor() as cursor:
        cursor.execute(_PAY, (body["amount"], body["account"]))
        cursor.execute(_ORDER, (body["order"], body["account"], body["amount"]))


def _handler(message: Message[dict[str, Any]], tx: Any) -> None:
    _pay(message.body, tx)


def _handler_of_many(messages: list[Message[dict[str, Any]]], tx: Any) -> None:
    bodies = [message.body for message in messages]
    with tx.cursor() as cursor:
        # one UPDATE after another: PyMySQL joins rows of an INSERT only
        cursor.executemany(_PAY, [(body["amount"], body["account"]) for body in bodies])
        cursor.executemany(
            _ORDER, [(body["order"], body["account"], body["amount"]) for body in bodies]
        )


@contextmanager
def _naive(schema: Schema) -> Generator[Consume]:
    with closing(schema.open()) as connection:

        def consume(delivery: Delivery) -> None:
            connection.begin()
            with connection.cursor() as cursor:
                claimed = cursor.execute(
                    "INSERT IGNORE INTO inbox (consumer, message_id) VALUES (%s, %s)",
                    (CONSUMER, delivery.id),
                )
            if claimed:
                _pay(json.loads(delivery.payload), connection)
            connection.commit()

        yield consume


def run(*, rounds: int, messages: int) -> dict[str, Any]:
    """Measure, in interleaved rounds; returns the result as it is stored.

    Args:
        rounds: of each contender, 1 or more.
        messages: distinct ones in each round of those that take one at a time.
    """
    url = server_urls().get(SERVER)
    if url is None:
        raise ServerError(f"No {SERVER} server: run `make bench`, or set {VARIABLES[SERVER]}.")
    ours = Schema(url, f"txbox_bench_own_{os.getpid()}")
    theirs = Schema(url, f"txbox_bench_naive_{os.getpid()}")
    gauge = ClientGauge()
    ours.create()
    theirs.create()

    def txbox(name: str, handler: Any, *, most: int = 100, **options: Any) -> Worked:
        app = App(ours.url, batching=Batching(messages=most))
        return Worked(f"txbox, {name}", ours, gauge, app, handler, **options)

    cells: list[tuple[Contender, float]] = []
    try:
        cells += [
            (Looped("naive", theirs, gauge, partial(_naive, theirs)), 1),
            (txbox("one by one", _handler, most=1), 1),
            (txbox("batches of ordinary handlers", _handler), 2),
            (txbox("batch=True, executemany", _handler_of_many, batch=True), 2),
        ]
        done = interleaved(cells, rounds=rounds, messages=messages)
        version = str(ours.row("SELECT VERSION()")[0])
    finally:
        for contender, _ in cells:
            contender.close()
        ours.drop()
        theirs.drop()
    lines = {name: [(0.0, medians["rate"])] for name, medians in summary(done).items()}
    return result(
        phase=NUMBER,
        title=TITLE,
        method=f"{rounds} rounds of each, in turns, innodb_flush_log_at_trx_commit=1, READ COMMITTED, the whole "
        "workload waiting from the start, one worker with one lane; PyMySQL is a driver in Python, and each of its "
        "statements a round trip",
        bars=[],
        rounds=done,
        circumstances=circumstances(None),
        plots=[Plot("mariadb", "MariaDB, backlog", "bars", "", "messages a second", lines)],
        notes=[
            f"MariaDB {version}, PyMySQL {metadata.version('pymysql')}.",
            *(
                f"{name}: {statistics.median(ratios(done, name, 'naive')):.2f} times naive."
                for name in lines
                if name != "naive"
            ),
        ],
    )
