"""One message, one call: for a webhook, a Lambda function, any framework.

    pip install 'txbox[postgresql]'
    export TXBOX_DATABASE_URL=postgresql://localhost/shop
    python webhook_function.py

`receive` is the function that your web framework calls with headers and body. It answers 200 as soon
as txbox has the message in the database, processed or parked; the sender's redeliveries are harmless.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import psycopg

from txbox import App, Message, StoreUnavailable

app = App(os.environ.get("TXBOX_DATABASE_URL", "postgresql://localhost/shop"))


@dataclass
class Paid:
    order: int
    amount: int


@app.handler("orders", type="order.paid", consumer="shipping")
def ship(message: Message[Paid], tx: psycopg.Connection) -> None:
    if message.body.amount <= 0:
        raise ValueError("nothing was paid")
    tx.execute("INSERT INTO shipment (paid_order) VALUES (%s)", (message.body.order,))


def receive(headers: Mapping[str, str], body: bytes) -> tuple[int, str]:
    """Take one webhook; returns status and text of the answer."""
    message = Message(
        id=headers.get("x-event-id"), topic="orders", type=headers.get("x-event-type"), payload=body
    )
    try:
        outcome = app.process(message)
    except StoreUnavailable:
        return 503, "try again"  # the sender redelivers
    return (200 if outcome.settles else 503), outcome.value


def main() -> None:
    app.init()  # once, at deployment
    with app.transaction() as tx:
        tx.execute("CREATE TABLE IF NOT EXISTS shipment (paid_order int)")
    paid = {"x-event-id": "evt-1", "x-event-type": "order.paid"}
    print(receive(paid, b'{"order": 7, "amount": 30}'))
    print(receive(paid, b'{"order": 7, "amount": 30}'))  # redelivered
    print(receive(paid, b'{"order": 7, "amount": 31}'))  # altered: set aside
    failing = {"x-event-id": "evt-2", "x-event-type": "order.paid"}
    # parked: `txbox run` retries it
    print(receive(failing, b'{"order": 8, "amount": 0}'))
    print(receive({}, b"{}"))  # no type that anybody consumes
    app.close()


if __name__ == "__main__":
    main()
