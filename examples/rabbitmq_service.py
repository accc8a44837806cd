"""A service on RabbitMQ: every payment is booked once, however often the queue delivers it.

From this directory, with a RabbitMQ at AMQP_URL:

    pip install 'txbox[rabbitmq,postgresql]'
    export TXBOX_DATABASE_URL=postgresql://localhost/shop
    python rabbitmq_service.py declare
    txbox init
    python rabbitmq_service.py publish 3
    txbox run rabbitmq_service:app
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import aio_pika
import psycopg

from txbox import App, Message, Reject
from txbox.brokers.rabbitmq import RabbitMQ

AMQP_URL = os.environ.get("AMQP_URL", "amqp://guest:guest@127.0.0.1/")
QUEUE = os.environ.get("PAYMENTS_QUEUE", "payments")

URL = os.environ.get("TXBOX_DATABASE_URL", "postgresql://localhost/shop")

app = App(URL)
app.consume(RabbitMQ(AMQP_URL))


@app.handler(QUEUE, type="payment.made", consumer="ledger")
def book(message: Message[dict[str, Any]], tx: psycopg.Connection) -> None:
    """Book a payment; the row and the inbox row commit together, then the queue is acknowledged."""
    payment = message.body
    if payment["amount"] <= 0:
        raise Reject("a payment of nothing")  # a dead letter in the database, not in the queue
    tx.execute(
        "INSERT INTO ledger (payment, amount) VALUES (%s, %s)", (payment["id"], payment["amount"])
    )


async def declare() -> None:
    """Declare the queue, which the source leaves to you, and make the service's own table."""
    async with await aio_pika.connect(AMQP_URL) as connection:
        channel = await connection.channel()
        await channel.declare_queue(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
    with psycopg.connect(URL) as database:
        database.execute("CREATE TABLE IF NOT EXISTS ledger (payment int, amount int)")


async def publish(count: int) -> None:
    """Publish each payment twice, as a producer does that lost the answer to the first."""
    async with await aio_pika.connect(AMQP_URL) as connection:
        channel = await connection.channel(publisher_confirms=True)
        for number in range(1, count + 1):
            message = aio_pika.Message(
                json.dumps({"id": number, "amount": 10 * number}).encode(),
                # without one, aio-pika invents a new id for every publish
                message_id=f"payment-{number}",
                type="payment.made",
                content_type="application/json",
                delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
            )
            for _ in range(2):
                # mandatory: a message that no queue takes is an error, not silence
                await channel.default_exchange.publish(message, QUEUE, mandatory=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["declare"]:
        asyncio.run(declare())
    else:
        asyncio.run(publish(int(sys.argv[2])))
