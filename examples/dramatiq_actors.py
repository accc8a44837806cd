"""Dramatiq runs the actor, txbox makes its effect happen once, however often Dramatiq runs it.

pip install 'txbox[dramatiq,sqlalchemy,postgresql]' 'dramatiq[rabbitmq]'
txbox init --database postgresql://localhost/shop
dramatiq dramatiq_actors

python dramatiq_actors.py      # both in one process, on a broker in memory
"""

from __future__ import annotations

import os

import dramatiq
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import CurrentMessage
from sqlalchemy import Connection, create_engine, text

from txbox import App, Inbox
from txbox.integrations.dramatiq import once

engine = create_engine(os.environ.get("DATABASE_URL", "postgresql+psycopg://localhost/shop"))
broker = StubBroker()  # RabbitmqBroker(url=…), RedisBroker(url=…)
broker.add_middleware(CurrentMessage())  # the message's id
dramatiq.set_broker(broker)


@dramatiq.actor(max_retries=8)
@once(Inbox(consumer="charge"), engine.begin)
def charge(tx: Connection, order: int, amount: int) -> None:
    """Charge an order, once for each message."""
    tx.execute(
        text("INSERT INTO booking (order_id, amount) VALUES (:order, :amount)"),
        {"order": order, "amount": amount},
    )


def main() -> None:
    with App(engine) as app:
        app.init()  # once, at deployment
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE booking (order_id INTEGER, amount INTEGER)"))
    message = charge.send(1, 5)
    broker.enqueue(message)  # as after a worker that died, or a lost heartbeat
    worker = dramatiq.Worker(broker, worker_threads=1, worker_timeout=50)
    worker.start()
    broker.join("default")
    worker.join()
    worker.stop()
    broker.close()
    with engine.connect() as connection:
        print(connection.execute(text("SELECT * FROM booking")).all())
    engine.dispose()


if __name__ == "__main__":
    main()
