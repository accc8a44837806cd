"""FastStream keeps the consumer, txbox makes each message's effect happen once. RabbitMQ here; the
rules are the same on its other brokers.

    pip install 'txbox[faststream,postgresql]' 'faststream[rabbit,cli]'
    export TXBOX_DATABASE_URL=postgresql://localhost/shop
    psql $TXBOX_DATABASE_URL -c 'CREATE TABLE ledger (payment int, amount int)'
    txbox init
    faststream run faststream_rabbitmq:service

A failed message is parked in the table and acknowledged: run `txbox run faststream_rabbitmq:app`
beside it, it retries what is parked, with the same function.
"""

from __future__ import annotations

import asyncio
import os
from typing import Annotated

import psycopg
from faststream import AckPolicy, Context, FastStream
from faststream.rabbit import Channel, RabbitBroker, RabbitQueue
from pydantic import BaseModel, ValidationError

from txbox import App
from txbox.integrations.faststream import TX, FastStreamInbox

app = App(os.environ.get("TXBOX_DATABASE_URL", "postgresql://localhost/shop"))
inbox = FastStreamInbox(app)
broker = RabbitBroker(
    os.environ.get("AMQP_URL", "amqp://guest:guest@127.0.0.1/"),
    middlewares=[inbox],
    default_channel=Channel(prefetch_count=10),  # without it: the whole queue, in memory
)
queue = RabbitQueue(os.environ.get("PAYMENTS_QUEUE", "payments"), durable=True)
service = FastStream(broker)


class Payment(BaseModel):
    id: int
    amount: int


# FastStream's default policy, REJECT_ON_ERROR, deletes the message when the database is away: it is refused.
@inbox.handler("payments", type="payment.made", consumer="ledger", reject_on=(ValidationError,))
@broker.subscriber(queue, ack_policy=AckPolicy.NACK_ON_ERROR)
async def book(payment: Payment, tx: Annotated[psycopg.AsyncConnection, Context(TX)]) -> None:
    """Book a payment; what is written through `tx` commits together with the inbox row."""
    await tx.execute(
        "INSERT INTO ledger (payment, amount) VALUES (%s, %s)", (payment.id, payment.amount)
    )


if __name__ == "__main__":
    asyncio.run(service.run())
