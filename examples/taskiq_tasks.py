"""taskiq runs the task, txbox makes its effect happen once, however often taskiq runs it.

pip install 'txbox[taskiq,sqlalchemy,asyncpg]' taskiq-aio-pika
txbox init --database postgresql+asyncpg://localhost/shop
taskiq worker taskiq_tasks:broker

python taskiq_tasks.py      # both in one process, on a broker in memory
"""

from __future__ import annotations

import asyncio
import os

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from taskiq import InMemoryBroker, SimpleRetryMiddleware

from txbox import App, Inbox
from txbox.integrations.taskiq import once

engine = create_async_engine(os.environ.get("DATABASE_URL", "postgresql+asyncpg://localhost/shop"))
broker = InMemoryBroker(await_inplace=True)  # AioPikaBroker(…)
broker.add_middlewares(SimpleRetryMiddleware())


@broker.task(retry_on_error=True)
@once(Inbox(consumer="charge"), engine.begin)
async def charge(tx: AsyncConnection, order: int, amount: int) -> str:
    """Charge an order, once for each task id."""
    await tx.execute(
        text("INSERT INTO booking (order_id, amount) VALUES (:order, :amount)"),
        {"order": order, "amount": amount},
    )
    return "charged"


async def main() -> None:
    async with App(engine) as app:
        await app.init_async()  # once, at deployment
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE booking (order_id INTEGER, amount INTEGER)"))
    for _ in range(2):  # delivered twice
        task = await charge.kicker().with_task_id("t-1").kiq(1, 5)
        print((await task.wait_result()).return_value)
    async with engine.connect() as connection:
        print((await connection.execute(text("SELECT * FROM booking"))).all())
    await engine.dispose()


if __name__ == "__main__":
    asyncio.run(main())
