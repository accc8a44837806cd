"""FastStream keeps the consumer, txbox makes each message's effect happen once. RabbitMQ here; the
rules are the same on its other brokers.

    pip install 'faststream[rabbit,cli]' txbox
    txbox init --database sqlite:///faststream.db
    faststream run faststream_rabbitmq:service

A failed message is parked in the table and acknowledged: run `txbox run faststream_rabbitmq:app`
beside it, it retries what is parked.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from typing import Any

from faststream import AckPolicy, FastStream
from faststream.rabbit import Channel, RabbitBroker, RabbitMessage, RabbitQueue

from txbox import App, Message, StoreUnavailable

app = App(os.environ.get("TXBOX_DATABASE_URL", "sqlite:///faststream.db"))

broker = RabbitBroker(
    os.environ.get("AMQP_URL", "amqp://guest:guest@127.0.0.1/"),
    default_channel=Channel(prefetch_count=10),  # without it: the whole queue, in memory
)
queue = RabbitQueue(os.environ.get("PAYMENTS_QUEUE", "payments"), durable=True)
service = FastStream(broker)


@app.handler("payments", type="payment.made", consumer="ledger")
def book(message: Message[dict[str, Any]], tx: sqlite3.Connection) -> None:
    """Book a payment; what is written through `tx` commits together with the inbox row."""
    payment = message.body
    tx.execute(
        "INSERT INTO ledger (payment, amount) VALUES (?, ?)", (payment["id"], payment["amount"])
    )


async def raw(incoming: RabbitMessage) -> bytes:
    """txbox decodes: what is no JSON becomes a dead letter, and not an error inside FastStream."""
    return incoming.body


# MANUAL: the default, REJECT_ON_ERROR, deletes the message when the database is away.
@broker.subscriber(queue, ack_policy=AckPolicy.MANUAL, decoder=raw)
async def on_payment(payload: bytes, incoming: RabbitMessage) -> None:
    delivery = incoming.raw_message
    message = Message[Any](
        id=delivery.message_id,  # not FastStream's: it makes one up where there is none
        topic="payments",
        type=delivery.type,
        headers=[
            (name, value if value is None or isinstance(value, bytes) else str(value))
            for name, value in delivery.headers.items()
        ],
        payload=payload,
    )
    while not await settled(message):
        await asyncio.sleep(1)  # unacknowledged, the message stays with this process
    await incoming.ack()


async def settled(message: Message[Any]) -> bool:
    try:
        return (await app.process_async(message)).settles  # False: another process holds it
    except StoreUnavailable:
        return False


if __name__ == "__main__":
    asyncio.run(service.run())
