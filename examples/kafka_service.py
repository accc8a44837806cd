"""A service on Kafka, run by `txbox run`.

From this directory:

    pip install 'txbox[kafka]'
    txbox init --database sqlite:///kafka_service.db
    txbox run kafka_service:app
"""

from __future__ import annotations

import os
import sqlite3
from typing import Any

from txbox import App, Message
from txbox.brokers.kafka import Kafka

app = App(os.environ.get("TXBOX_DATABASE_URL", "sqlite:///kafka_service.db"))


@app.handler("orders", type="order.paid", consumer="billing")
def book(message: Message[dict[str, Any]], tx: sqlite3.Connection) -> None:
    """Book an order; what is written through `tx` commits together with the inbox row."""
    order = message.body
    tx.execute(
        "INSERT INTO booking (order_id, amount) VALUES (?, ?)", (order["id"], order["amount"])
    )


app.consume(Kafka(os.environ.get("KAFKA_BOOTSTRAP", "localhost:9092"), group="billing"))
