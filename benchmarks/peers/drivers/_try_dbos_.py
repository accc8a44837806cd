"""DBOS Transact: a workflow a message, its id the message's. `dbos_.py step | datasource`

Settings, from https://docs.dbos.dev/python/:
- tutorials/workflow-tutorial, "Workflow IDs and Idempotency": a workflow with an id that has run returns its recorded
  result, for as long as the record is kept: that deduplicates;
- called directly, from 16 threads: nothing is queued, which is faster than a queue and its workers;
- step: the business transaction is an ordinary one, in a @DBOS.step, recorded afterwards in another one; a workflow
  that is interrupted resumes "from the last completed step", so a crash between the two runs the step again;
- datasource: @ds.transaction records the step in the business transaction (tutorials/transaction-tutorial), READ
  COMMITTED as everyone else here instead of its default SERIALIZABLE;
- sys_db_pool_size 20 (reference/configuration), system tables in the same database.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import sqlalchemy as sa
from dbos import DBOS, SetWorkflowID, SQLAlchemyDatasource
from drive import URL, Delivery, drive
from psycopg_pool import ConnectionPool

WIDTH = 32
TAKE = "UPDATE account SET balance = balance + %s WHERE id = %s"
ORDER = "INSERT INTO orders (number, account, amount) VALUES (%s, %s, %s)"

SQLALCHEMY_URL = URL.replace("postgresql://", "postgresql+psycopg://")

DBOS(
    config={
        "name": "orders",
        "system_database_url": SQLALCHEMY_URL,
        "sys_db_pool_size": 40,
        "log_level": "ERROR",
    }
)

if sys.argv[1] == "step":
    pool = ConnectionPool(URL, min_size=WIDTH, max_size=WIDTH, open=True)

    @DBOS.step()
    def pay(body: dict[str, Any]) -> None:
        with pool.connection() as connection:
            connection.execute(TAKE, (body["amount"], body["account"]))
            connection.execute(ORDER, (body["order"], body["account"], body["amount"]))

else:
    source = SQLAlchemyDatasource.create(
        SQLALCHEMY_URL, engine_kwargs={"pool_size": WIDTH, "max_overflow": 0}
    )
    take = sa.text("UPDATE account SET balance = balance + :amount WHERE id = :account")
    order = sa.text(
        "INSERT INTO orders (number, account, amount) VALUES (:order, :account, :amount)"
    )

    @source.transaction(isolation_level="READ COMMITTED")
    def pay(body: dict[str, Any]) -> None:
        session = source.sql_session()
        session.execute(take, body)
        session.execute(order, body)


@DBOS.workflow()
def paid(body: dict[str, Any]) -> None:
    pay(body)


def handle(delivery: Delivery) -> None:
    with SetWorkflowID(delivery.id):
        paid(delivery.body)


async def main() -> None:
    DBOS.launch()
    threads = ThreadPoolExecutor(WIDTH)

    async def ingest(deliveries: Sequence[Delivery]) -> None:
        del deliveries

    async def process(deliveries: Sequence[Delivery]) -> None:
        await asyncio.to_thread(lambda: list(threads.map(handle, deliveries)))

    await drive(ingest, process)
    DBOS.destroy()


asyncio.run(main())
