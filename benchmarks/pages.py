"""What the dashboard's pages cost with millions of rows: server time of each, and the plans of its statements.

python -m benchmarks.pages --database URL [--scale 1] [--filled]

The database is empty at first, and full afterwards; `--filled` measures it once more.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch
from urllib.parse import quote

from tests.support.databases import Raw
from tests.support.demo_data import STREAMS, fill
from txbox import App, Message
from txbox.session import Statement
from txbox.store.dialect import Dialect, native
from txbox.ui import Access

_TIMES = 20


def pages(dead: str, outgoing: str) -> Mapping[str, str]:
    """What is asked for, by the words of the report."""
    named = f"consumer=billing&message_id={quote(dead)}"
    return {
        "Overview": "/",
        "Overview, a day": "/?last=24h",
        "Failures": "/failures",
        "Messages": "/messages",
        "Messages, dead": "/messages?status=dead",
        "Messages, dead of a consumer": "/messages?status=dead&consumer=billing",
        "Messages, processed of a consumer": "/messages?status=processed&consumer=billing",
        "Messages of an id": f"/messages?message_id={quote(dead)}",
        "Messages of a topic that is not there": "/messages?topic=nowhere",
        "Message": f"/message?{named}",
        "Outbox": "/outbox",
        "Outbox, dead": "/outbox?status=dead",
        "Outbox, due": "/outbox?status=due",
        "Outgoing message": f"/outgoing?message_id={quote(outgoing)}",
        "Quarantine": "/quarantine",
        "Workers": "/workers",
        "Database": "/database",
        "Database, examined": "/database?examine=1",
        "Audit": "/audit",
        "Changes": "/operations",
    }


class Asked:
    """The dashboard of an app, and what it says to the database."""

    def __init__(self, app: App) -> None:
        self._dashboard = app.asgi(lambda _: Access("ann", ["change", "payload"]))
        self.statements: dict[str, Statement] = {}

    async def __call__(self, address: str) -> float:
        """Milliseconds until a page has been sent."""
        path, _, query = address.partition("?")
        scope = {
            "type": "http", "method": "GET", "path": path, "root_path": "", "query_string": query.encode(),
            "scheme": "http", "headers": [(b"host", b"127.0.0.1")], "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }  # fmt: skip
        statuses: list[int] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b""}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        began = time.perf_counter()
        await self._dashboard(scope, receive, send)
        spent_ms = (time.perf_counter() - began) * 1000
        if statuses != [200]:
            raise RuntimeError(f"{address} answered {statuses}")
        return spent_ms

    def heard(self) -> Any:
        """Remember each statement that is made, by its name."""
        statement = Dialect.statement

        def remembered(dialect: Dialect, *args: Any, **kwargs: Any) -> Statement:
            made = statement(dialect, *args, **kwargs)
            self.statements[made.name] = made
            return made

        return patch.object(Dialect, "statement", remembered)


# a derived table, or one with as many rows as there are processes, pauses or versions
_SMALL = re.compile(r"<|txbox_(?:pause|worker|schema)$|(?:paused|tables|columns|statistics)$")


def scans(view: Raw, dialect: str, statement: Statement) -> Iterator[str]:
    """Say where a statement reads a large table, or an index of one, from end to end."""
    if not statement.sql.lstrip().upper().startswith(("SELECT", "WITH", "/*M!")):
        return
    sql, names = native(statement.sql, "qmark")
    params = [statement.params[name] for name in names]
    if dialect != "sqlite":
        # to their drivers a % begins a parameter
        sql = sql.replace("%", "%%")
    if dialect == "sqlite":
        steps = [str(step) for *_, step in view.rows(f"EXPLAIN QUERY PLAN {sql}", params)]
        made = {step.split()[1] for step in steps if step.startswith(("CO-ROUTINE", "MATERIALIZE"))}
        for step in steps:
            name = step.removeprefix("SCAN ").partition(" ")[0]
            if step.startswith("SCAN") and name not in made and not _SMALL.match(name):
                yield step
    elif dialect == "postgresql":
        for (line,) in view.rows(f"EXPLAIN {sql}", params):
            if "Seq Scan on txbox_" in line and not _SMALL.match(line.split(" on ")[1].split()[0]):
                yield line.strip()
    else:
        # what bounds a statement is not explained
        for row in view.rows(f"EXPLAIN {re.sub(r'^/[*]M!.*?[*]/', '', sql)}", params):
            table, kind, rows = row[2], row[3], row[-2]
            if kind in ("ALL", "index") and not _SMALL.match(table):
                yield f"{kind} {table}, key {row[5]}, {rows} rows: {row[-1]}"


async def measured(app: App, view: Raw, dialect: str, times: int) -> bool:
    asked, within = Asked(app), True
    dead = "SELECT max(message_id) FROM txbox_inbox WHERE status = 'dead' AND consumer = "
    word = "CAST('billing' AS BINARY)" if dialect == "mysql" else "'billing'"
    dead, outgoing = (
        value.decode() if isinstance(value, bytes) else str(value)
        for value in (view.value(dead + word), view.value("SELECT max(id) FROM txbox_outbox"))
    )
    view_of = asked.heard()
    with view_of:
        for name, address in pages(dead, outgoing).items():
            asked.statements.clear()
            first_ms = await asked(address)
            spent = [await asked(address) for _ in range(times)]
            # what others do on the machine only adds
            within = within and min(spent) < 100
            middle, longest = statistics.median(spent), max(spent)
            print(f"| {name} | {first_ms:.0f} | {min(spent):.1f} | {middle:.1f} | {longest:.1f} |")
            for statement in list(asked.statements.values()):
                for scan in scans(view, dialect, statement):
                    print(f"    {statement.name}: {scan}")
    return within


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", required=True)
    parser.add_argument("--scale", type=float, default=1.0, help="1 is 2,000,000 rows of the inbox")
    parser.add_argument("--filled", action="store_true", help="the rows are there")
    args = parser.parse_args(given)
    with App(args.database) as app:
        for stream in STREAMS:
            for consumer in stream.consumers:

                @app.handler(stream.topic, consumer=consumer)
                def handle(_message: Message[Any], _tx: Any) -> None: ...

        app.init()
        with Raw(args.database) as view:
            dialect = app.database.dialect.name
            if not args.filled:
                fill(view, scale=args.scale)
            print("| page | first, ms | least of 20 | median | longest |\n|---|---|---|---|---|")
            return 0 if asyncio.run(measured(app, view, dialect, _TIMES)) else 1


if __name__ == "__main__":
    sys.exit(main())
