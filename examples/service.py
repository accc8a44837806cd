"""A whole service, run by `txbox run`.

From this directory, with PostgreSQL:

    pip install 'txbox[postgresql]'
    export TXBOX_DATABASE_URL=postgresql://localhost/shop
    psql $TXBOX_DATABASE_URL -c 'CREATE TABLE booking (order_id int, amount int)'
    txbox init --app service:app
    txbox send orders --app service:app --type order.paid --data '{"id": 1, "amount": 5}'
    txbox run service:app
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import psycopg

from txbox import App, Message, Reject, Retry, RetryPolicy
from txbox.brokers.file import File
from txbox.brokers.local import Local
from txbox.events import Event, MessageDead, MessageQuarantined


def alert(event: Event) -> None:
    """Alerts hang on events; this one only prints."""
    if isinstance(event, (MessageDead, MessageQuarantined)):
        print(f"ALERT {event}")


URL = os.environ.get("TXBOX_DATABASE_URL", "postgresql://localhost/shop")
app = App(URL, observers=[alert])


@app.handler(
    "orders",
    type="order.paid",
    consumer="billing",
    retry=RetryPolicy(max_attempts=5, base=timedelta(seconds=1)),
)
def book(message: Message[dict[str, Any]], tx: psycopg.Connection) -> None:
    """Book an order; what is written through `tx` commits together with the inbox row."""
    order = message.body
    if order["amount"] <= 0:
        raise Reject("an order of nothing")  # a dead letter at once
    if order.get("later") and message.attempt == 1:
        raise Retry(after=timedelta(seconds=0.1))
    tx.execute(
        "INSERT INTO booking (order_id, amount) VALUES (%s, %s)", (order["id"], order["amount"])
    )


app.consume(Local())  # what `app.send(…)` and `txbox send` put into the inbox
if path := os.environ.get("ORDERS_FILE"):
    app.consume(File(path, topic="orders"))  # CloudEvents, a JSON object a line
