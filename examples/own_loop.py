"""Door 1: your own loop and your own transaction; txbox adds one call. `python examples/own_loop.py`.

The loop here reads a list; in your service it reads Kafka, RabbitMQ or whatever you have. What
matters is the order: accept, effects, COMMIT, acknowledge.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Callable

from txbox import App, Inbox, PayloadMismatch

inbox = Inbox(consumer="billing")


def consume(
    database: sqlite3.Connection, message_id: str, payload: bytes, acknowledge: Callable[[], None]
) -> bool:
    """Process one delivery; returns whether it had an effect."""
    try:
        with database:  # commits, or rolls back on an exception
            database.execute("BEGIN IMMEDIATE")
            accepted = inbox.accept(database, message_id, payload=payload, topic="payments")
            if accepted:
                body = json.loads(payload)
                database.execute(
                    "UPDATE account SET balance = balance - ? WHERE id = ?",
                    (body["amount"], body["account"]),
                )
    except PayloadMismatch:
        with database:  # the id is known with another payload: keep it for a person to look at
            database.execute("BEGIN IMMEDIATE")
            inbox.quarantine(database, message_id, payload=payload, topic="payments")
        accepted = None
    acknowledge()
    return bool(accepted)


def main(path: str) -> None:
    with App(f"sqlite:///{path}") as app:
        app.init()  # once, at deployment: the same as `txbox init`
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE IF NOT EXISTS account (id INTEGER PRIMARY KEY, balance INTEGER)")
    database.execute("INSERT OR REPLACE INTO account VALUES (1, 100)")
    database.commit()

    deliveries = [
        ("pay-1", b'{"account": 1, "amount": 30}'),
        ("pay-1", b'{"account": 1, "amount": 30}'),  # a duplicate
        ("pay-2", b'{"account": 1, "amount": 20}'),
        ("pay-2", b'{"account": 1, "amount": 99}'),  # another message under a known id
    ]
    for message_id, payload in deliveries:
        effect = consume(database, message_id, payload, acknowledge=lambda: None)
        print(f"{message_id}: {'processed' if effect else 'no effect'}")
    ((balance,),) = database.execute("SELECT balance FROM account WHERE id = 1")
    print(f"balance: {balance}")
    database.close()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "own_loop.db")
