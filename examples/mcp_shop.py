"""An MCP server whose tool runs once for each call, and a client that has to repeat one.

pip install 'txbox[mcp,sqlite]'
python mcp_shop.py client   # starts the server over stdio, calls, loses the session, and calls again

An agent's host starts `python mcp_shop.py`, and sends the model's id of each call in `_meta`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiosqlite
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.server.mcpserver import MCPServer
from pydantic import BaseModel

from txbox import App
from txbox.integrations.mcp import once

app = App("sqlite:///mcp_shop.db", observers=[])


@asynccontextmanager
async def lifespan(_server: object) -> AsyncIterator[None]:
    async with app:
        yield


server = MCPServer("shop", lifespan=lifespan, log_level="ERROR")


class Receipt(BaseModel):
    order: int
    number: int


@server.tool()
@once(app, "refund", caller="anonymous")  # over stdio there is one user
async def refund(tx: aiosqlite.Connection, order: int, cents: int) -> Receipt:
    """Refund an order."""
    added = await tx.execute("INSERT INTO refund (orders, cents) VALUES (?, ?)", (order, cents))
    return Receipt(order=order, number=added.lastrowid or 0)


@asynccontextmanager
async def session() -> AsyncIterator[ClientSession]:
    """A server of its own, and a session with it."""
    parameters = StdioServerParameters(command=sys.executable, args=[__file__], cwd=Path.cwd())
    async with stdio_client(parameters) as streams, ClientSession(*streams) as connected:
        await connected.initialize()
        yield connected


async def call(server: ClientSession, key: str) -> object:
    answer = await server.call_tool(
        "refund", {"order": 7, "cents": 500}, meta={"idempotencyKey": key}
    )
    return answer.structured_content


async def client() -> None:
    await app.init_async()  # once, at deployment
    async with app.transaction_async() as tx:
        await tx.execute("CREATE TABLE refund (number INTEGER PRIMARY KEY, orders INT, cents INT)")
    await app.close_async()
    async with session() as first:
        print(await call(first, "call_1"))
    async with session() as second:
        print(await call(second, "call_1"))  # the client does not know whether it was done
        print(await call(second, "call_2"))  # another call
    async with app.transaction_async() as tx:
        print(await (await tx.execute("SELECT count(*) FROM refund")).fetchone())
    await app.close_async()


if __name__ == "__main__":
    if sys.argv[1:] == ["client"]:
        asyncio.run(client())
    else:
        server.run("stdio")
