"""Celery runs the task, txbox makes its effect happen once, however often Celery runs it.

pip install 'txbox[celery,sqlalchemy,postgresql]'
txbox init --database postgresql://localhost/shop
celery -A celery_tasks worker

python celery_tasks.py      # both in one process, on a broker in memory
"""

from __future__ import annotations

import os

from celery import Celery
from sqlalchemy import Connection, create_engine, text

from txbox import App, Inbox
from txbox.integrations.celery import once

engine = create_engine(os.environ.get("DATABASE_URL", "postgresql+psycopg://localhost/shop"))
app = Celery("shop", broker=os.environ.get("BROKER_URL", "memory://"))
app.conf.task_always_eager = "BROKER_URL" not in os.environ


@app.task(
    acks_late=True,  # acknowledged after the commit,
    reject_on_worker_lost=True,  # and delivered again when the worker is killed
    autoretry_for=(OSError,),
    retry_backoff=True,
)
@once(Inbox(consumer="charge"), engine.begin, id=lambda order, *_: f"order-{order}")
def charge(tx: Connection, order: int, amount: int) -> None:
    """Charge an order; without `id=` it would be once for each task id."""
    tx.execute(
        text("INSERT INTO booking (order_id, amount) VALUES (:order, :amount)"),
        {"order": order, "amount": amount},
    )


def main() -> None:
    with App(engine) as txbox:
        txbox.init()  # once, at deployment
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE booking (order_id INTEGER, amount INTEGER)"))
    print(charge.delay(1, 5).state)
    print(charge.delay(1, 5).state)  # the sender was not sure, and sent it again
    with engine.connect() as connection:
        print(connection.execute(text("SELECT * FROM booking")).all())
    engine.dispose()


if __name__ == "__main__":
    main()
