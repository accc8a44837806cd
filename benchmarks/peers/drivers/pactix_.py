"""pactix: messages stored in bulk transactions, then InboxRunner over asyncpg. `pactix_.py [dedupe]`

Settings, from its README and docs/operations.md:
- `save_received` for each message, a hundred in a transaction; `inbox_batch_size=100`;
- `InboxRunner.new_unordered`: without the question for older messages of the key; `ProcessAll`, no stale filter;
- a runner handles one message after the other, so 16 of them run at once; the handler commits its own transaction, and
  the runner marks the row in another one;
- `dedupe`: the textbook's INSERT … ON CONFLICT in the handler's transaction: effects once, as the README asks for.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import uvloop
from drive import CLAIM, INBOX, ORDER, TAKE, URL, Delivery, batches, clock, drive
from pactix.config import PactixConfig
from pactix.db.tables import metadata
from pactix.inbox.handler import HandleOutcome, inbox_handler
from pactix.inbox.idempotency import ProcessAll
from pactix.inbox.model import InboxMessageRecord
from pactix.inbox.runner import InboxRunner
from pactix.inbox.stale import AcceptAllEvents
from pactix.inbox.store import InboxStore
from pactix.message import MessageEnvelope, MessageMetadata
from sqlalchemy.ext.asyncio import create_async_engine

RUNNERS = 16
LASTING = sys.argv[1:] == ["dedupe"]


async def main() -> None:
    engine = create_async_engine(
        URL.replace("postgresql://", "postgresql+asyncpg://"), pool_size=2 * RUNNERS
    )
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
        if LASTING:
            await connection.exec_driver_sql(INBOX)
    store = InboxStore(PactixConfig(inbox_batch_size=100))

    async def pay(record: InboxMessageRecord) -> HandleOutcome:
        clock.start()
        body = record.payload
        async with engine.begin() as connection:
            if LASTING:
                claimed = await connection.exec_driver_sql(CLAIM, (record.message_id,))
                if claimed.first() is None:
                    return HandleOutcome.processed()
            await connection.exec_driver_sql(TAKE, (body["amount"], body["account"]))
            order = (body["order"], body["account"], body["amount"])
            await connection.exec_driver_sql(ORDER, order)
        return HandleOutcome.processed()

    async def ingest(deliveries: Sequence[Delivery]) -> None:
        for batch in batches(deliveries, 100):
            async with engine.begin() as connection:
                for delivery in batch:
                    metadata_ = MessageMetadata(message_id=delivery.id, event_type="order.paid")
                    envelope = MessageEnvelope(metadata_, delivery.body)
                    await store.save_received(connection, "orders", envelope)

    async def process(deliveries: Sequence[Delivery]) -> None:
        del deliveries

        async def run() -> None:
            runner = InboxRunner.new_unordered(
                store, inbox_handler(pay), ProcessAll(), AcceptAllEvents()
            )
            while (await runner.run_once(engine)).claimed:
                pass

        await asyncio.gather(*(run() for _ in range(RUNNERS)))

    await drive(ingest, process)
    await engine.dispose()


uvloop.run(main())
