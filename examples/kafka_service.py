"""A service on Kafka: every order is booked once, however often it was published or is delivered.

From this directory, with a Kafka at KAFKA_BOOTSTRAP:

    pip install 'txbox[kafka,postgresql]'
    export TXBOX_DATABASE_URL=postgresql://localhost/shop
    python kafka_service.py declare
    txbox init
    python kafka_service.py publish 3
    txbox run kafka_service:app
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import psycopg
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from txbox import App, Message
from txbox.brokers.kafka import Kafka

BOOTSTRAP = os.environ.get("KAFKA_BOOTSTRAP", "localhost:9092")
TOPIC = os.environ.get("ORDERS_TOPIC", "orders")
URL = os.environ.get("TXBOX_DATABASE_URL", "postgresql://localhost/shop")

app = App(URL)
# of a share group (Kafka 4.2), any number of workers take messages of one partition, in no order
SHARE = os.environ.get("ORDERS_SHARE") == "1"
app.consume(Kafka(BOOTSTRAP, group=os.environ.get("ORDERS_GROUP", "billing"), share=SHARE))


@app.handler(TOPIC, type="order.paid", consumer="billing")
def book(message: Message[dict[str, Any]], tx: psycopg.Connection) -> None:
    """Book an order; what is written through `tx` commits together with the inbox row."""
    order = message.body
    tx.execute(
        "INSERT INTO booking (order_id, amount) VALUES (%s, %s)", (order["id"], order["amount"])
    )


def declare() -> None:
    """Make the topic, and the table of the service itself."""
    admin = AdminClient({"bootstrap.servers": BOOTSTRAP})
    admin.create_topics([NewTopic(TOPIC, num_partitions=3, replication_factor=1)])[TOPIC].result()
    with psycopg.connect(URL) as database:
        database.execute("CREATE TABLE IF NOT EXISTS booking (order_id INTEGER, amount INTEGER)")


def publish(count: int) -> None:
    """Publish each order twice, as a producer does that lost the answer to the first."""
    producer = Producer({"bootstrap.servers": BOOTSTRAP, "acks": "all"})
    for number in range(1, count + 1):
        for _ in range(2):
            producer.produce(
                TOPIC,
                json.dumps({"id": number, "amount": 10 * number}).encode(),
                key=f"customer-{number}",
                # the id is of the order, not of the attempt to publish it
                headers={"message-id": f"order-{number}", "type": "order.paid"},
            )
    if left := producer.flush(30):
        sys.exit(f"{left} messages were not taken by {BOOTSTRAP}")


if __name__ == "__main__":
    if sys.argv[1:] == ["declare"]:
        declare()
    else:
        publish(int(sys.argv[2]))
