"""pgqueuer: bulk enqueue; QueueManager over an asyncpg pool. `pgqueuer_.py [dedupe]`

Settings, from https://pgqueuer.readthedocs.io/en/latest/:
- guides/performance-tuning: a larger `batch_size` (100; default 10) for short jobs, AsyncpgPoolDriver, `pgq autovac`
  after the installation; durability stays `durable`, as the server of everyone here;
- guides/reliability: `dedupe_key` with on_conflict="skip": unique while a job is queued or picked, free again once it
  is done;
- `dedupe`: no keys, and the textbook's INSERT … ON CONFLICT in the entrypoint's transaction, which lasts;
- comparisons/benchmarks: asyncpg is the fastest driver, the event loop is uvloop, "drain" measures a backlog;
- the entrypoint commits its own transaction; the job is removed and logged afterwards, in another one, in batches.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import timedelta

import asyncpg
import uvloop
from drive import CLAIM, INBOX, ORDER, TAKE, URL, Delivery, batches, clock, drive
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgPoolDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries
from pgqueuer.types import QueueExecutionMode

LASTING = sys.argv[1:] == ["dedupe"]


async def main() -> None:
    # as wide as a batch gives it work for on this server: more connections only wait for the same cores
    pool = await asyncpg.create_pool(URL, min_size=16, max_size=16)
    queries = Queries(AsyncpgPoolDriver(pool))
    await queries.install()
    await queries.optimize_autovacuum()

    if LASTING:
        await pool.execute(INBOX)

    async def pay(job: Job) -> None:
        assert job.payload is not None
        clock.start()
        message = json.loads(job.payload)
        body = message["body"]
        async with pool.acquire() as connection, connection.transaction():
            if LASTING and await connection.fetchval(CLAIM, message["id"]) is None:
                return
            await connection.execute(TAKE, body["amount"], body["account"])
            await connection.execute(ORDER, body["order"], body["account"], body["amount"])

    async def ingest(deliveries: Sequence[Delivery]) -> None:
        for batch in batches(deliveries, 500):
            await queries.enqueue(
                ["pay"] * len(batch),
                [
                    json.dumps({"id": delivery.id, "body": delivery.body}).encode()
                    for delivery in batch
                ],
                [0] * len(batch),
                dedupe_key=None if LASTING else [delivery.id for delivery in batch],
                on_conflict="skip",
            )

    async def process(deliveries: Sequence[Delivery]) -> None:
        del deliveries
        # a pool of its own: a manager closes its driver when it has drained
        async with asyncpg.create_pool(URL, min_size=2, max_size=4) as manager_pool:
            pgq = PgQueuer.from_asyncpg_pool(manager_pool)
            pgq.entrypoint("pay")(pay)
            await pgq.qm.run(
                batch_size=100,
                mode=QueueExecutionMode.drain,
                dequeue_timeout=timedelta(seconds=1),
                log_aggregation_interval=timedelta(0),
            )

    await drive(ingest, process)


uvloop.run(main())
