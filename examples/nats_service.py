"""A service on NATS JetStream, run by `txbox run`.

From this directory, with the server's address in NATS_URL:

    pip install 'txbox[nats,postgresql]'
    export TXBOX_DATABASE_URL=postgresql://localhost/shop
    psql $TXBOX_DATABASE_URL -c 'CREATE TABLE booking (order_id int, amount int)'
    txbox init
    txbox run nats_service:app
"""

from __future__ import annotations

import os
from typing import Any

import psycopg

from txbox import App, Message, Reject
from txbox.brokers.nats import Nats

SUBJECT = os.environ.get("ORDERS_SUBJECT", "orders.paid")

app = App(os.environ.get("TXBOX_DATABASE_URL", "postgresql://localhost/shop"))


@app.handler(SUBJECT, type="order.paid", consumer="billing")
def book(message: Message[dict[str, Any]], tx: psycopg.Connection) -> None:
    """Book an order; what is written through `tx` commits together with the inbox row."""
    order = message.body
    if order["amount"] <= 0:
        raise Reject("an order of nothing")  # a dead letter at once
    tx.execute(
        "INSERT INTO booking (order_id, amount) VALUES (%s, %s)", (order["id"], order["amount"])
    )


# a stream with this subject must exist; producers send the headers `Nats-Msg-Id` and `type`
app.consume(Nats(os.environ.get("NATS_URL", "nats://localhost:4222"), durable="billing"))
