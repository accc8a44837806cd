"""A service on NATS JetStream, run by `txbox run`.

From this directory, with the server's address in NATS_URL:

    txbox init --database sqlite:///service.db
    txbox run nats_service:app
"""

from __future__ import annotations

import os
import sqlite3
from typing import Any

from txbox import App, Message, Reject
from txbox.brokers.nats import Nats

SUBJECT = os.environ.get("ORDERS_SUBJECT", "orders.paid")

app = App(os.environ.get("TXBOX_DATABASE_URL", "sqlite:///service.db"))


@app.handler(SUBJECT, type="order.paid", consumer="billing")
def book(message: Message[dict[str, Any]], tx: sqlite3.Connection) -> None:
    """Book an order; what is written through `tx` commits together with the inbox row."""
    order = message.body
    if order["amount"] <= 0:
        raise Reject("an order of nothing")  # a dead letter at once
    tx.execute(
        "INSERT INTO booking (order_id, amount) VALUES (?, ?)", (order["id"], order["amount"])
    )


# a stream with this subject must exist; producers send the headers `Nats-Msg-Id` and `type`
app.consume(Nats(os.environ.get("NATS_URL", "nats://localhost:4222"), durable="billing"))
