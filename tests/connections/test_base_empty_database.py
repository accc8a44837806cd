"""Every kind of connection on a database without tables: each verb names the command, and `init` makes them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import databases
from tests.support.connections import KINDS, Given, Kind
from tests.support.databases import BY_NAME
from txbox import App, Inbox, Message, Outbox, Outcome, SchemaError

pytestmark = pytest.mark.every_database

MESSAGE: Message[Any] = Message(topic="orders", id="1", payload=b"{}")


@pytest.fixture
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Given]:
    kind: Kind = request.param
    if kind.product not in {selected.name for selected in databases.selected()}:
        pytest.skip(f"{kind.product} is not selected")
    url = BY_NAME[kind.product].create(tmp_path, schema=False)
    try:
        with asyncio.Runner() as runner, Given(kind, url, runner) as opened:
            yield opened
    finally:
        BY_NAME[kind.product].drop(url)


@pytest.mark.parametrize(
    "empty", [kind for kind in KINDS if not kind.pooler], ids=str, indirect=True
)
def test_every_verb_without_tables_names_the_command_that_makes_them(empty: Given) -> None:
    kind, suffix = empty.kind, "_async" if empty.kind.is_async else ""
    app = App(django=empty.target) if kind.family == "django" else App(empty.target)

    def handle(message: Message[Any], tx: Any) -> None: ...

    async def handle_async(message: Message[Any], tx: Any) -> None: ...

    app.handler("orders", consumer="billing")(handle_async if kind.is_async else handle)

    def call(verb: str, *arguments: Any) -> Any:
        return empty.wait(getattr(app, verb + suffix)(*arguments))

    for verb in ("process", "answer", "send"):
        with pytest.raises(SchemaError, match="run `txbox init`"):
            call(verb, MESSAGE)
    for door, verb, arguments in (
        (Inbox(consumer="billing"), "accept", ("1",)), (Outbox(), "stage", ("invoices", {})),
    ):  # fmt: skip
        held = empty.acquire()
        held.begin()
        with pytest.raises(SchemaError, match="run `txbox init`"):
            empty.wait(getattr(door, verb + suffix)(held.native, *arguments))
        held.discard()
    before, after = call("init")
    assert (before, after > 0) == (0, True)
    assert call("process", MESSAGE) is Outcome.PROCESSED
    assert call("process", MESSAGE) is Outcome.DUPLICATE
    empty.wait(app.close_async()) if kind.is_async else app.close()
