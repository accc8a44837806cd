"""P11: SQLite with every commit flushed: batches with a savepoint a message beside the same handler one by one."""

from __future__ import annotations

import json
import sqlite3
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import circumstances
from benchmarks.naive_variants import (
    ClientGauge,
    Consume,
    Contender,
    Looped,
    Worked,
    interleaved,
    processed,
)
from benchmarks.result import Bar, Plot, ratios, result, summary
from benchmarks.workload import ACCOUNTS, CONSUMER, Delivery
from txbox import App, Batching, Message

NUMBER = "P11"
TITLE = "SQLite: batches with a savepoint a message"
BAR = 6.0

_PAY = "UPDATE account SET balance = balance + ? WHERE id = ?"
_ORDER = "INSERT INTO orders (number, account, amount) VALUES (?, ?, ?)"


class File:
    """A database in a file, written ahead and flushed at every commit."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def url(self) -> str:
        return f"sqlite:///{self.path}"

    def open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        return connection

    def prepare(self) -> None:
        with closing(self.open()) as admin:
            for name in ("account", "orders", "inbox"):
                admin.execute(f"DROP TABLE IF EXISTS {name}")
            admin.execute(
                "CREATE TABLE account (id INTEGER PRIMARY KEY, balance INTEGER NOT NULL DEFAULT 0)"
            )
            admin.execute(
                "CREATE TABLE orders (id INTEGER PRIMARY KEY, number INTEGER NOT NULL, "
                "account INTEGER NOT NULL, amount INTEGER NOT NULL CHECK (amount > 0))"
            )
            admin.execute(
                "CREATE TABLE inbox (consumer TEXT NOT NULL, message_id TEXT NOT NULL, "
                "received_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')), "
                "PRIMARY KEY (consumer, message_id)) WITHOUT ROWID"
            )
            admin.execute("BEGIN")
            admin.executemany(
                "INSERT INTO account (id) VALUES (?)", [(account,) for account in range(ACCOUNTS)]
            )
            if admin.execute("SELECT 1 FROM sqlite_master WHERE name = 'txbox_inbox'").fetchone():
                admin.execute("DELETE FROM txbox_inbox")
            admin.execute("COMMIT")
            admin.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def row(self, sql: str) -> Sequence[Any]:
        with closing(self.open()) as admin:
            return tuple(admin.execute(sql).fetchone())


def _pay(body: Mapping[str, Any], tx: sqlite3.Connection) -> None:
    tx.execute(_PAY, (body["amount"], body["account"]))
    tx.execute(_ORDER, (body["order"], body["account"], body["amount"]))


def _handler(message: Message[dict[str, Any]], tx: sqlite3.Connection) -> None:
    _pay(message.body, tx)


def _handler_of_many(messages: list[Message[dict[str, Any]]], tx: sqlite3.Connection) -> None:
    bodies = [message.body for message in messages]
    tx.executemany(_PAY, [(body["amount"], body["account"]) for body in bodies])
    tx.executemany(_ORDER, [(body["order"], body["account"], body["amount"]) for body in bodies])


@contextmanager
def _naive(file: File) -> Generator[Consume]:
    with closing(file.open()) as connection:

        def consume(delivery: Delivery) -> None:
            connection.execute("BEGIN IMMEDIATE")
            claimed = connection.execute(
                "INSERT INTO inbox (consumer, message_id) VALUES (?, ?) ON CONFLICT DO NOTHING RETURNING message_id",
                (CONSUMER, delivery.id),
            ).fetchall()
            if claimed:
                _pay(json.loads(delivery.payload), connection)
            connection.execute("COMMIT")

        yield consume


def run(*, rounds: int, messages: int) -> dict[str, Any]:
    """Measure, in interleaved rounds; returns the result as it is stored.

    Args:
        rounds: of each contender, 1 or more.
        messages: distinct ones in each round of those that take one at a time.
    """
    with tempfile.TemporaryDirectory(prefix="txbox-bench-") as folder:
        ours, theirs = File(Path(folder, "txbox.db")), File(Path(folder, "naive.db"))
        gauge = ClientGauge()

        def txbox(name: str, handler: Any, *, most: int = 100, **options: Any) -> Worked:
            app = App(ours.url, batching=Batching(messages=most))
            return Worked(f"txbox, {name}", ours, gauge, app, handler, **options)

        alone = Looped(
            "txbox, app.process",
            ours,
            gauge,
            lambda: processed(App(ours.url), _handler),
            txbox=True,
        )
        cells: list[tuple[Contender, float]] = [
            (Looped("naive", theirs, gauge, partial(_naive, theirs)), 1),
            (alone, 1),
            (txbox("one by one", _handler, most=1), 1),
            (txbox("batches, a savepoint a message", _handler), 4),
            (txbox("batch=True, executemany", _handler_of_many, batch=True), 4),
        ]
        try:
            done = interleaved(cells, rounds=rounds, messages=messages)
        finally:
            for contender, _ in cells:
                contender.close()
    batches = "txbox, batches, a savepoint a message"
    lines = {name: [(0.0, medians["rate"])] for name, medians in summary(done).items()}
    return result(
        phase=NUMBER,
        title=TITLE,
        method=f"{rounds} rounds of each, in turns, a file in WAL mode with synchronous=FULL, the whole workload "
        "waiting from the start, one worker with one lane; one by one is the same worker with Batching(messages=1)",
        bars=[
            Bar(
                f"batches of at most 100 with a savepoint a message: {BAR:g} times one by one",
                BAR,
                ratios(done, batches, "txbox, one by one"),
            ),
            Bar(
                "the same, beside app.process",
                BAR,
                ratios(done, batches, "txbox, app.process"),
                stretch=True,
            ),
        ],
        rounds=done,
        circumstances=circumstances(None),
        plots=[Plot("p11", "SQLite, synchronous=FULL", "bars", "", "messages a second", lines)],
        notes=[f"SQLite {sqlite3.sqlite_version}, through Python's sqlite3."],
    )
