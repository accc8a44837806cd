"""Your own loop and your own transaction; txbox adds one call.

    pip install 'txbox[postgresql]'
    python own_loop.py postgresql://localhost/shop

The loop here reads a list; in your service it reads Kafka, RabbitMQ or whatever you have. What
matters is the order: accept, effects, COMMIT, acknowledge.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import psycopg

from txbox import App, Inbox, PayloadMismatch, UnusableMessage

inbox = Inbox(consumer="billing")


def consume(
    database: psycopg.Connection,
    message_id: str | None,
    payload: bytes,
    acknowledge: Callable[[], None],
) -> bool:
    """Process one delivery; returns whether it had an effect."""
    try:
        with database.transaction():  # commits, or rolls back on an exception
            accepted = inbox.accept(database, message_id, payload=payload, topic="payments")
            if accepted:
                body = json.loads(payload)
                database.execute(
                    "UPDATE account SET balance = balance - %s WHERE id = %s",
                    (body["amount"], body["account"]),
                )
    except (PayloadMismatch, UnusableMessage):
        # a known id with another payload, or no usable id: keep it for a person
        with database.transaction():
            inbox.quarantine(database, message_id, payload=payload, topic="payments")
        accepted = None
    acknowledge()
    return bool(accepted)


def main(url: str) -> None:
    with App(url) as app:
        app.init()  # once, at deployment: the same as `txbox init`
    database = psycopg.connect(url, autocommit=True)
    database.execute("CREATE TABLE IF NOT EXISTS account (id int PRIMARY KEY, balance int)")
    database.execute("INSERT INTO account VALUES (1, 100) ON CONFLICT DO NOTHING")

    deliveries: list[tuple[str | None, bytes]] = [
        ("pay-1", b'{"account": 1, "amount": 30}'),
        ("pay-1", b'{"account": 1, "amount": 30}'),  # a duplicate
        ("pay-2", b'{"account": 1, "amount": 20}'),
        ("pay-2", b'{"account": 1, "amount": 99}'),  # another message under a known id
        (None, b'{"account": 1, "amount": 10}'),  # no id
    ]
    for message_id, payload in deliveries:
        effect = consume(database, message_id, payload, acknowledge=lambda: None)
        print(f"{message_id}: {'processed' if effect else 'no effect'}")
    ((balance,),) = database.execute("SELECT balance FROM account")
    print(f"balance: {balance}")
    database.close()


if __name__ == "__main__":
    main(sys.argv[1])
