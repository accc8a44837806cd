"""An MCP server with tools that run once, for a client over stdio: `python -m tests.support.mcp_server URL DEADLY`.

While the file DEADLY exists, the next COMMIT kills the server before it answers.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import Context, MCPServer
from pydantic import BaseModel

from txbox import App, Message
from txbox.integrations.mcp import once


class Receipt(BaseModel):
    order: int
    number: str


def served(url: str, deadly: Path) -> tuple[App, Any]:
    """An App and its server."""
    app = App(url, observers=[])
    begin = app.transaction_async

    def die() -> None:
        with suppress(FileNotFoundError):
            deadly.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    @asynccontextmanager
    async def transaction() -> AsyncIterator[Any]:
        async with begin() as tx:
            yield tx
        die()

    vars(app)["transaction_async"] = transaction

    @asynccontextmanager
    async def lifespan(_server: object) -> AsyncIterator[None]:
        async with app:
            yield

    server = MCPServer("shop", lifespan=lifespan)

    def caller(context: Any) -> str:
        return str(dict(context.request_context.meta or {}).get("user", "ann"))

    @server.tool()
    @once(
        app, "refund", caller=caller, approve=lambda order, cents: cents > 1000, wait=timedelta(0)
    )
    async def refund(tx: Any, order: int, cents: int) -> Receipt:
        """Refund an order."""
        await tx.execute("INSERT INTO ledger VALUES (?)", (order,))
        return Receipt(order=order, number=secrets.token_hex(8))

    @server.tool()
    @once(app, "note", caller="anonymous", id=lambda order, **_: f"note-{order}")
    async def note(tx: Any, order: int, context: Context[Any, Any]) -> str:
        """Write a note on an order."""
        await context.report_progress(1)
        await tx.execute("INSERT INTO ledger VALUES (?)", (order,))
        return secrets.token_hex(8)

    @server.tool()
    @once(app, "charge", caller="anonymous", transactional=False, wait=timedelta(0))
    async def charge(message: Message[Any], order: int) -> str:
        """Charge a card."""
        return message.idempotency_key

    @server.tool()
    @once(app, "sync", caller="anonymous")
    def counted(tx: Any, order: int) -> int:
        """Write without awaiting."""
        tx.execute("INSERT INTO ledger VALUES (?)", (order,))
        return order

    return app, server


if __name__ == "__main__":
    served(sys.argv[1], Path(sys.argv[2]))[1].run("stdio")
