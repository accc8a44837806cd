"""A service on Amazon SQS, run by `txbox run`.

From this directory, with AWS's credentials and region in the environment:

    txbox init --database sqlite:///service.db
    txbox run sqs_service:app

Against a server of your own (ElasticMQ, LocalStack) set AWS_ENDPOINT_URL_SQS.
"""

from __future__ import annotations

import os
import sqlite3
from typing import Any

from txbox import App, Message, Reject
from txbox.brokers.sqs import SQS

QUEUE = os.environ.get("ORDERS_QUEUE", "orders")

app = App(os.environ.get("TXBOX_DATABASE_URL", "sqlite:///service.db"))


@app.handler(QUEUE, type="order.paid", consumer="billing")
def book(message: Message[dict[str, Any]], tx: sqlite3.Connection) -> None:
    """Book an order; its row, the inbox's row and the deletion from the queue follow each other."""
    order = message.body
    if order["amount"] <= 0:
        raise Reject(
            "an order of nothing"
        )  # a dead letter in the database; the queue is done with it
    tx.execute(
        "INSERT INTO booking (order_id, amount) VALUES (?, ?)", (order["id"], order["amount"])
    )


# producers send the message attributes `message-id` and `type`
app.consume(SQS(QUEUE))
