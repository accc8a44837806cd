"""Tools of an MCP server run once for each caller and key, over stdio, also if the server is killed."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import ClientSession, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client

from tests.integrations.conftest import Rows
from tests.support.mcp_server import served
from tests.support.servers import ROOT
from tests.support.waiting import DEADLINE_S
from txbox import ConfigurationError
from txbox.admin import Admin
from txbox.admin.tables import QuarantineFilter
from txbox.integrations import mcp as with_mcp
from txbox.integrations.agents import APPROVAL
from txbox.testing import drain_async


class Client:
    """Of a server that is a process of its own, and is started for each session."""

    def __init__(self, database: Path, deadly: Path) -> None:
        self._words = ["-m", "tests.support.mcp_server", f"sqlite:///{database}", str(deadly)]

    @asynccontextmanager
    async def session(self) -> AsyncIterator[ClientSession]:
        parameters = StdioServerParameters(
            command=sys.executable, args=self._words, env=dict(os.environ), cwd=ROOT
        )
        async with (
            asyncio.timeout(DEADLINE_S),
            stdio_client(parameters) as streams,
            ClientSession(*streams) as session,
        ):
            await session.initialize()
            yield session


@pytest.fixture
def deadly(tmp_path: Path) -> Path:
    return tmp_path / "deadly"


@pytest.fixture
def client(database: Path, deadly: Path) -> Client:
    return Client(database, deadly)


def text(answer: Any) -> str:
    return str(answer.content[0].text)


async def call(session: ClientSession, tool: str, arguments: dict[str, int], **meta: Any) -> Any:
    calling: Any = session.call_tool
    return await calling(tool, arguments, meta=meta or None)


async def refund(session: ClientSession, order: int, cents: int, **meta: Any) -> Any:
    return await call(session, "refund", {"order": order, "cents": cents}, **meta)


def test_a_call_whose_server_is_killed_has_one_effect_and_one_answer(
    client: Client, deadly: Path, rows: Rows
) -> None:
    deadly.touch()

    async def killed() -> None:
        async with client.session() as session:
            with pytest.raises(MCPError):
                await refund(session, 7, 500, idempotencyKey="call_1")

    async def repeated() -> None:
        async with client.session() as session:
            first = await refund(session, 7, 500, idempotencyKey="call_1")
            again = await refund(session, 7, 500, idempotencyKey="call_1")
            assert not first.is_error
            assert first.structured_content == again.structured_content
            assert first.structured_content["order"] == 7
            # another caller's key is another one, and so is another key
            await refund(session, 8, 500, idempotencyKey="call_1", user="bob")
            await refund(session, 9, 500, idempotencyKey="call_2")

    asyncio.run(killed())
    assert rows("SELECT amount FROM ledger") == [(7,)]  # committed, and not answered
    asyncio.run(repeated())
    assert rows("SELECT amount FROM ledger ORDER BY 1") == [(7,), (8,), (9,)]
    assert rows("SELECT message_id FROM txbox_inbox ORDER BY 1") == [
        ("user:ann call_1",), ("user:ann call_2",), ("user:bob call_1",)
    ]  # fmt: skip


def test_what_the_model_reads(client: Client, database: Path, rows: Rows) -> None:
    async def run() -> None:
        async with client.session() as session:
            tools = {tool.name: tool for tool in (await session.list_tools()).tools}
            assert sorted(tools["refund"].input_schema["properties"]) == ["cents", "order"]
            assert tools["refund"].description == "Refund an order."
            assert "number" in str(tools["refund"].output_schema)
            assert sorted(tools["note"].input_schema["properties"]) == ["order"]

            keyless = await refund(session, 7, 500)
            assert keyless.is_error
            assert "needs a key" in text(keyless)
            await refund(session, 7, 500, idempotencyKey="call_1")
            reused = await refund(session, 8, 500, idempotencyKey="call_1")
            assert reused.is_error
            assert "with other arguments: nothing was done" in text(reused)

            # an id from the arguments needs no key, and the tool may take the Context
            notes = [await call(session, "note", {"order": 9}) for _ in range(2)]
            assert text(notes[0]) == text(notes[1])

            for waiting in (
                await refund(session, 10, 5000, idempotencyKey="call_2"),
                await refund(session, 11, 5000, idempotencyKey="call_3"),
            ):
                assert waiting.is_error
                assert "waits for the approval of a person" in text(waiting)
            async with Admin(f"sqlite:///{database}") as admin:
                aside: Any = {"consumer": "refund", "reason": APPROVAL}
                listed = await admin.list_async(QuarantineFilter(**aside))
                assert [row.key for row in listed] == ["user:ann", "user:ann"]
                await admin.accept_async(QuarantineFilter(message_id="user:ann call_2", **aside))
                await admin.discard_async(QuarantineFilter(message_id="user:ann call_3", **aside))
            accepted = await refund(session, 10, 5000, idempotencyKey="call_2")
            assert "waits for a worker" in text(accepted)
            refused = await refund(session, 11, 5000, idempotencyKey="call_3")
            assert refused.is_error
            assert "A person has refused" in text(refused)
            charging = await call(session, "charge", {"order": 1}, idempotencyKey="c")
            assert "waits for a worker" in text(charging)

            app, _ = served(f"sqlite:///{database}", Path("none"))
            async with app:
                await drain_async(app)
            done = await refund(session, 10, 5000, idempotencyKey="call_2")
            assert done.structured_content["order"] == 10
            charged = await call(session, "charge", {"order": 1}, idempotencyKey="c")
            assert text(charged) == "charge:anonymous c"

            counted = [
                await call(session, "counted", {"order": 12}, idempotencyKey="c") for _ in range(2)
            ]
            assert [json.loads(text(each)) for each in counted] == [12, 12]

    asyncio.run(run())
    assert rows("SELECT amount FROM ledger ORDER BY 1") == [(7,), (9,), (10,), (12,)]


def test_a_caller_must_be_said() -> None:
    some: Any = None
    with pytest.raises(ConfigurationError, match="whose key"):
        with_mcp.once(some, "refund", caller=some)
