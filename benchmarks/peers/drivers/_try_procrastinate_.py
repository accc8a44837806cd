"""procrastinate: batch_defer_async; an async worker with concurrency.

Settings, from https://procrastinate.readthedocs.io/en/stable/:
- howto/production/concurrency: `concurrency=8` (default 1); howto/basics/connector: PsycopgConnector with its pool;
- howto/basics/batch_defer: many jobs in one statement. It takes one queueing lock for the whole batch, and a lock is
  free again once its job has begun (howto/advanced/queueing_locks), so it deduplicates nothing here: duplicates within
  a batch are dropped before it, those in later batches by the driver, in this peer's favour;
- howto/production/delete_finished_jobs: `delete_jobs="always"` spares the table;
- the task commits its own transaction; the job is finished afterwards, in another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from drive import URL, Delivery, batches, distinct, drive
from procrastinate import App, PsycopgConnector
from psycopg_pool import AsyncConnectionPool

TAKE = "UPDATE account SET balance = balance + %s WHERE id = %s"
ORDER = "INSERT INTO orders (number, account, amount) VALUES (%s, %s, %s)"


async def main() -> None:
    app = App(connector=PsycopgConnector(conninfo=URL, min_size=4, max_size=20))
    pool = AsyncConnectionPool(URL, min_size=16, max_size=16, open=False)
    await pool.open(wait=True)

    @app.task(queue="orders", name="pay")
    async def pay(body: dict[str, Any]) -> None:
        async with pool.connection() as connection:
            await connection.execute(TAKE, (body["amount"], body["account"]))
            await connection.execute(ORDER, (body["order"], body["account"], body["amount"]))

    async def ingest(deliveries: Sequence[Delivery]) -> None:
        for batch in batches(distinct(deliveries), 500):
            await pay.batch_defer_async(*({"body": own.body} for own in batch))

    async def process(deliveries: Sequence[Delivery]) -> None:
        del deliveries
        await app.run_worker_async(
            concurrency=8, wait=False, delete_jobs="always", install_signal_handlers=False
        )

    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        await drive(ingest, process)


asyncio.run(main())
