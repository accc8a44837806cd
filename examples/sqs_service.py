"""A service on Amazon SQS, run by `txbox run`.

From this directory, with AWS's credentials and region in the environment:

    pip install 'txbox[sqs,postgresql]'
    export TXBOX_DATABASE_URL=postgresql://localhost/shop
    psql $TXBOX_DATABASE_URL -c 'CREATE TABLE booking (order_id int, amount int)'
    txbox init
    txbox run sqs_service:app

Against a server of your own (ElasticMQ, LocalStack) set AWS_ENDPOINT_URL_SQS.
"""

from __future__ import annotations

import os
from typing import Any

import psycopg

from txbox import App, Message, Reject
from txbox.brokers.sqs import SQS

QUEUE = os.environ.get("ORDERS_QUEUE", "orders")

app = App(os.environ.get("TXBOX_DATABASE_URL", "postgresql://localhost/shop"))


@app.handler(QUEUE, type="order.paid", consumer="billing")
def book(message: Message[dict[str, Any]], tx: psycopg.Connection) -> None:
    """Book an order; what is written through `tx` commits together with the inbox row."""
    order = message.body
    if order["amount"] <= 0:
        raise Reject("an order of nothing")  # a dead letter at once
    tx.execute(
        "INSERT INTO booking (order_id, amount) VALUES (%s, %s)", (order["id"], order["amount"])
    )


# producers send the message attributes `message-id` and `type`
app.consume(SQS(QUEUE))
