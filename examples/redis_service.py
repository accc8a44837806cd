"""A service on Redis Streams, run by `txbox run`.

From this directory, with the server's address in REDIS_URL:

    pip install 'txbox[redis,postgresql]'
    export TXBOX_DATABASE_URL=postgresql://localhost/shop
    psql $TXBOX_DATABASE_URL -c 'CREATE TABLE booking (order_id int, amount int)'
    txbox init
    txbox run redis_service:app
"""

from __future__ import annotations

import os
from typing import Any

import psycopg

from txbox import App, Message, Reject
from txbox.brokers.redis import RedisStreams

STREAM = os.environ.get("ORDERS_STREAM", "orders")

app = App(os.environ.get("TXBOX_DATABASE_URL", "postgresql://localhost/shop"))


@app.handler(STREAM, type="order.paid", consumer="billing")
def book(message: Message[dict[str, Any]], tx: psycopg.Connection) -> None:
    """Book an order; what is written through `tx` commits together with the inbox row."""
    order = message.body
    if order["amount"] <= 0:
        raise Reject("an order of nothing")  # a dead letter at once
    tx.execute(
        "INSERT INTO booking (order_id, amount) VALUES (%s, %s)", (order["id"], order["amount"])
    )


# producers: XADD orders * message-id <id> type order.paid payload <JSON>
app.consume(RedisStreams(os.environ.get("REDIS_URL", "redis://localhost:6379/0"), group="billing"))
