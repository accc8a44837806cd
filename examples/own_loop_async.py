"""Your own asyncio loop with SQLAlchemy's ORM; what it stages, txbox handles in the same process.

    pip install 'txbox[sqlalchemy,asyncpg]'
    python own_loop_async.py postgresql+asyncpg://localhost/shop

The loop here reads a list; in your service it reads the client of your broker. What matters is the
order: accept, effects, COMMIT, acknowledge.
"""

from __future__ import annotations

import asyncio
import json
import sys

from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from txbox import App, Inbox, Message, PayloadMismatch, UnusableMessage
from txbox.integrations.starlette import lifespan


class Base(DeclarativeBase): ...


class Account(Base):
    __tablename__ = "account"
    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int]


engine = create_async_engine(sys.argv[1])
Session = async_sessionmaker(engine)
inbox = Inbox(consumer="billing")
app = App(Session)
printed = asyncio.Event()


@app.handler("invoices", consumer="printing")
async def print_invoice(message: Message[int], session: AsyncSession) -> None:
    account = await session.get_one(Account, 1)
    print(f"invoice for {message.body}, balance {account.balance}")
    printed.set()


async def on_message(message_id: str | None, payload: bytes) -> None:
    """Process one delivery; acknowledge it when this returns, and only then."""
    try:
        async with Session.begin() as session:
            if await inbox.accept_async(session, message_id, payload=payload, topic="payments"):
                body = json.loads(payload)
                account = await session.get_one(Account, body["account"], with_for_update=True)
                account.balance -= body["amount"]
                await app.outbox.stage_async(session, "invoices", body["amount"])
    except (PayloadMismatch, UnusableMessage):
        # a known id with another payload, or no usable id: keep it for a person
        async with Session.begin() as session:
            await inbox.quarantine_async(session, message_id, payload=payload, topic="payments")


async def main() -> None:
    await app.init_async()  # once, at deployment: the same as `txbox init`
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with Session.begin() as session:
        await session.merge(Account(id=1, balance=100))

    async with lifespan(app)(None):  # relay, retries and maintenance, until the block ends
        for _ in range(2):
            await on_message("pay-1", b'{"account": 1, "amount": 30}')  # the second is a duplicate
        await on_message(None, b'{"account": 1, "amount": 10}')  # set aside: it has no id
        await printed.wait()
    async with Session() as session:
        print("balance:", (await session.get_one(Account, 1)).balance)
    await app.close_async()
    await engine.dispose()


asyncio.run(main())
