"""omni-box: InboxConsumerRunner with a handler, fed from memory; one transaction a message.

Settings, from its user guide (https://bedrock-python.github.io/omni-box/):
- PostgreSQL over SQLAlchemy and asyncpg, which is the only storage; its own ORM base as the table;
- `AckStrategy.EXACTLY_ONCE_INBOX`, the default: the handler runs in the transaction of the inbox row;
- a runner reads one message after the other; 16 runners, each with a transaction of its own, share the source;
- structlog at WARNING: at its default every message is written to the console three times.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import structlog
import uvloop
from drive import ORDER, TAKE, URL, Delivery, clock, drive
from omni_box import InboxConsumerRunner, InboxEvent
from omni_box.core.protocols import ConsumedMessage, EventConsumer, InboxEventRepository
from omni_box.infra.storage.postgres import InboxEventDBBase, PostgresInboxRepository
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase

RUNNERS = 16

structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))


class Base(DeclarativeBase):
    pass


class InboxRow(InboxEventDBBase, Base):
    pass


class Memory(EventConsumer):
    """A topic in memory."""

    def __init__(self, deliveries: deque[Delivery]) -> None:
        self._deliveries = deliveries

    async def start(self) -> None:
        return

    async def stop(self) -> None:
        return

    async def getone(self) -> ConsumedMessage:
        delivery = self._deliveries.popleft()
        return ConsumedMessage(
            message_id=delivery.id, source="orders", event_type="order.paid", payload=delivery.body
        )


class Transactions:
    def __init__(self, sessions: async_sessionmaker) -> None:
        self._sessions = sessions

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[InboxEventRepository]:
        async with self._sessions() as session, session.begin():
            yield PostgresInboxRepository(session, model_class=InboxRow)


async def pay(event: InboxEvent, repo: PostgresInboxRepository) -> None:
    clock.start()
    body = event.payload
    connection = await repo.session.connection()
    await connection.exec_driver_sql(TAKE, (body["amount"], body["account"]))
    await connection.exec_driver_sql(ORDER, (body["order"], body["account"], body["amount"]))


async def main() -> None:
    engine = create_async_engine(
        URL.replace("postgresql://", "postgresql+asyncpg://"), pool_size=RUNNERS
    )
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    transactions = Transactions(async_sessionmaker(engine, expire_on_commit=False))

    async def ingest(deliveries: Sequence[Delivery]) -> None:
        del deliveries

    async def process(deliveries: Sequence[Delivery]) -> None:
        waiting = deque(deliveries)

        async def run(number: int) -> None:
            runner = InboxConsumerRunner(
                Memory(waiting),
                transactions,
                pay,
                worker_id=f"w{number}",
                consumer_group="billing",
            )
            await runner.start()
            while waiting:
                result = await runner.process_one()
                assert result.committed, result
            await runner.stop()

        await asyncio.gather(*(run(number) for number in range(RUNNERS)))

    await drive(ingest, process)
    await engine.dispose()


uvloop.run(main())
