"""FastStream with the textbook's dedupe, written by hand: INSERT … ON CONFLICT in the handler's transaction.

Fed by a Redis stream that holds the whole workload before the clock starts, so that, as for txbox, nothing is stored.
Settings, from https://faststream.ag2.ai/latest/:
- redis/streams/groups: a consumer group, acknowledged after the handler (NACK_ON_ERROR),
  `max_records=100` a read; getting-started/subscription: `max_workers=16`, handlers that run concurrently;
- asyncpg with a pool of 16 (FastStream brings no database); no schema validation: the body stays a dict;
- claim, UPDATE and INSERT are in one transaction, the message is acknowledged after its commit: effects happen once.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import asyncpg
import uvloop
from drive import CLAIM, INBOX, ORDER, TAKE, URL, After, Delivery, batches, clock, drive
from faststream import AckPolicy
from faststream.redis import RedisBroker, StreamSub
from redis.asyncio import Redis

REDIS = os.environ["REDIS_URL"]
# of its own: another run may use the same Redis
STREAM = f"orders-{os.getpid()}"


async def main() -> None:
    pool = await asyncpg.create_pool(URL, min_size=16, max_size=16)
    await pool.execute(INBOX)
    broker = RedisBroker(REDIS, logger=None)
    stream = StreamSub(
        STREAM, group="billing", consumer="one", max_records=100, polling_interval=10
    )
    redis = Redis.from_url(REDIS)
    await redis.xgroup_create(STREAM, "billing", id="0", mkstream=True)
    left = 0
    done = asyncio.Event()

    @broker.subscriber(stream=stream, max_workers=16, ack_policy=AckPolicy.NACK_ON_ERROR)
    async def pay(message: dict[str, Any]) -> None:
        nonlocal left
        clock.start()
        body = message["body"]
        async with pool.acquire() as connection, connection.transaction():
            if await connection.fetchval(CLAIM, message["id"]) is not None:
                await connection.execute(TAKE, body["amount"], body["account"])
                await connection.execute(ORDER, body["order"], body["account"], body["amount"])
        left -= 1
        if not left:
            done.set()

    async def fill(deliveries: Sequence[Delivery]) -> None:
        await broker.connect()
        for batch in batches(deliveries, 500):
            pipe = redis.pipeline()
            for delivery in batch:
                message = {"id": delivery.id, "body": delivery.body}
                await broker.publish(message, stream=STREAM, pipeline=pipe)
            await pipe.execute()

    async def process(deliveries: Sequence[Delivery]) -> After:
        nonlocal left
        left = len(deliveries)
        done.clear()
        await broker.start()
        await done.wait()
        return broker.stop

    await drive(fill, process)
    await redis.delete(STREAM)


uvloop.run(main())
