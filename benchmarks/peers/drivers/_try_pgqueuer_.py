"""pgqueuer: bulk enqueue with a dedupe key; QueueManager over an asyncpg pool.

Settings, from https://pgqueuer.readthedocs.io/en/latest/:
- guides/performance-tuning: a larger `batch_size` (100; default 10) for short jobs, AsyncpgPoolDriver, `pgq autovac`
  after the installation; durability stays `durable`, as the server of everyone here;
- guides/reliability: `dedupe_key` with on_conflict="skip": unique while a job is queued or picked, free again once it
  is done;
- comparisons/benchmarks: asyncpg is the fastest driver, the event loop is uvloop, "drain" measures a backlog;
- the entrypoint commits its own transaction; the job is removed and logged afterwards, in another one, in batches.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta

import asyncpg
import uvloop
from drive import ORDER, TAKE, URL, Delivery, batches, drive
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgPoolDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries
from pgqueuer.types import QueueExecutionMode


async def main() -> None:
    # as wide as a batch gives it work for on this server: more connections only wait for the same cores
    pool = await asyncpg.create_pool(URL, min_size=16, max_size=16)
    queries = Queries(AsyncpgPoolDriver(pool))
    await queries.install()
    await queries.optimize_autovacuum()

    async def pay(job: Job) -> None:
        assert job.payload is not None
        body = json.loads(job.payload)
        async with pool.acquire() as connection, connection.transaction():
            await connection.execute(TAKE, body["amount"], body["account"])
            await connection.execute(ORDER, body["order"], body["account"], body["amount"])

    async def ingest(deliveries: Sequence[Delivery]) -> None:
        for batch in batches(deliveries, 500):
            await queries.enqueue(
                ["pay"] * len(batch),
                [json.dumps(own.body).encode() for own in batch],
                [0] * len(batch),
                dedupe_key=[own.id for own in batch],
                on_conflict="skip",
            )

    async def process(deliveries: Sequence[Delivery]) -> None:
        del deliveries
        # a pool of its own: a manager closes its driver when it has drained
        async with asyncpg.create_pool(URL, min_size=2, max_size=4) as own:
            pgq = PgQueuer.from_asyncpg_pool(own)
            pgq.entrypoint("pay")(pay)
            await pgq.qm.run(
                batch_size=100,
                mode=QueueExecutionMode.drain,
                dequeue_timeout=timedelta(seconds=1),
                log_aggregation_interval=timedelta(0),
            )

    await drive(ingest, process)


uvloop.run(main())
