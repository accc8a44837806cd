"""procrastinate: batch_defer_async; an async worker with concurrency. `procrastinate_.py [dedupe]`

Settings, from https://procrastinate.readthedocs.io/en/stable/:
- howto/production/concurrency: `concurrency=16` (default 1); howto/basics/connector: PsycopgConnector with its pool;
- howto/basics/batch_defer: many jobs in one statement. It takes one queueing lock for the whole batch, and a lock is
  free again once its job has begun (howto/advanced/queueing_locks), so it deduplicates nothing here: duplicates
  are dropped by the driver, in this peer's favour;
- `dedupe`: nothing dropped, and the textbook's INSERT … ON CONFLICT in the task's transaction, which lasts;
- howto/production/delete_finished_jobs: `delete_jobs="always"` spares the table;
- the task commits its own transaction; the job is finished afterwards, in another one.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from drive import INBOX, URL, Delivery, batches, clock, distinct, drive
from procrastinate import App, PsycopgConnector
from psycopg_pool import AsyncConnectionPool

TAKE = "UPDATE account SET balance = balance + %s WHERE id = %s"
ORDER = "INSERT INTO orders (number, account, amount) VALUES (%s, %s, %s)"
CLAIM = "INSERT INTO inbox (message_id) VALUES (%s) ON CONFLICT DO NOTHING RETURNING message_id"
LASTING = sys.argv[1:] == ["dedupe"]


async def main() -> None:
    app = App(connector=PsycopgConnector(conninfo=URL, min_size=4, max_size=20))
    pool = AsyncConnectionPool(URL, min_size=16, max_size=16, open=False)
    await pool.open(wait=True)

    @app.task(queue="orders", name="pay")
    async def pay(id: str, body: dict[str, Any]) -> None:  # noqa: A002 - jobs are stored by parameter
        clock.start()
        async with pool.connection() as connection:
            if LASTING and await (await connection.execute(CLAIM, (id,))).fetchone() is None:
                return
            await connection.execute(TAKE, (body["amount"], body["account"]))
            await connection.execute(ORDER, (body["order"], body["account"], body["amount"]))

    async def ingest(deliveries: Sequence[Delivery]) -> None:
        for batch in batches(deliveries if LASTING else distinct(deliveries), 500):
            await pay.batch_defer_async(
                *({"id": delivery.id, "body": delivery.body} for delivery in batch)
            )

    async def process(deliveries: Sequence[Delivery]) -> None:
        del deliveries
        await app.run_worker_async(
            concurrency=16, wait=False, delete_jobs="always", install_signal_handlers=False
        )

    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        if LASTING:
            async with pool.connection() as connection:
                await connection.execute(INBOX)
        await drive(ingest, process)


asyncio.run(main())
