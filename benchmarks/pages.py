"""What the dashboard's pages cost with millions of rows: server time, time to the last byte, and plans.

python -m benchmarks.pages --database URL [--scale 1] [--filled]

The database is empty at first, and full afterwards; `--filled` measures it once more.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import re
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import quote

from tests.support.databases import Raw
from tests.support.demo_data import STREAMS, fill
from txbox import App, Message
from txbox.session import Statement
from txbox.store.dialect import Dialect, native
from txbox.ui import Access
from txbox.worker.serving import DASHBOARD, Server


def pages(dead: str, outgoing: str, aside: str) -> Mapping[str, str]:
    """What is asked for, by the words of the report."""
    named = f"consumer=billing&message_id={quote(dead)}"
    night = datetime.now(UTC) - timedelta(hours=5)
    span = f"since={night:%Y-%m-%dT%H:%M}&until={night + timedelta(minutes=30):%Y-%m-%dT%H:%M}"
    return {
        "Overview, an hour": "/",
        "Overview, a day": "/?last=24h",
        "Overview, a week": "/?last=7d",
        "Consumer, an hour": "/consumer?name=billing",
        "Consumer, a week": "/consumer?name=billing&last=7d",
        "Route, a week": "/route?name=rabbitmq&last=7d",
        "Failures": "/failures",
        "Messages": "/messages",
        "Messages, dead": "/messages?status=dead",
        "Messages, dead of a consumer": "/messages?status=dead&consumer=billing",
        "Messages, dead of a fingerprint": "/messages?status=dead&consumer=billing&error_type=KeyError",
        "Messages, processed of a consumer": "/messages?status=processed&consumer=billing",
        "Messages of an id": f"/messages?message_id={quote(dead)}",
        "Messages of a prefix of an id": f"/messages?id_prefix={quote(dead[:-2])}",
        "Messages received in half an hour": f"/messages?{span}",
        "Messages of a topic that is not there": "/messages?topic=nowhere",
        "Message": f"/message?{named}",
        "Outbox": "/outbox",
        "Outbox, dead": "/outbox?status=dead",
        "Outbox, due": "/outbox?status=due",
        "Outbox of a time": f"/outbox?{span}",
        "Outgoing message": f"/outgoing?message_id={quote(outgoing)}",
        "Quarantine": "/quarantine",
        "Quarantine of a consumer": "/quarantine?consumer=crm-sync",
        "Quarantined message": f"/quarantined?consumer=crm-sync&message_id={quote(aside)}",
        "Workers": "/workers",
        "Database": "/database",
        "Database, examined": "/database?examine=1",
        "Audit": "/audit",
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
        for row in view.rows(
            f"EXPLAIN FORMAT=TRADITIONAL {re.sub(r'^/[*]M!.*?[*]/', '', sql)}", params
        ):
            table = row[2]
            # MySQL has partitions before, and what is filtered behind
            kind, _, key, _, _, count = row[-8:-2] if len(row) == 12 else row[-7:-1]
            if kind in ("ALL", "index") and not _SMALL.match(table):
                yield f"{kind} {table}, key {key}, {count} rows: {row[-1]}"


@contextmanager
def served(app: App) -> Iterator[int]:
    """Serve the dashboard as `txbox ui` does; the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(app.asgi(lambda _: Access("ann", ["change", "payload"])), listener, DASHBOARD)
    server.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.close()


def fetched(port: int, address: str) -> float:
    """Milliseconds from a new connection to the last byte of a page."""
    began = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", address)
    response = connection.getresponse()
    response.read()
    connection.close()
    if response.status != 200:
        raise RuntimeError(f"{address} answered {response.status}")
    return (time.perf_counter() - began) * 1000


#: The threads of the server that work for this database, where it runs on this machine; MariaDB has them in the list
#: of processes, and MySQL does not.
_THREADS = {
    "postgresql": "SELECT pid FROM pg_stat_activity WHERE datname = current_database()",
    "mysql": "SELECT THREAD_OS_ID FROM performance_schema.threads WHERE PROCESSLIST_DB = DATABASE()",
    "mariadb": "SELECT TID FROM information_schema.PROCESSLIST WHERE DB = DATABASE()",
}


class Work:
    """What this process and the database's threads for it spend on a processor: a busy machine does not change that."""

    def __init__(self, view: Raw, dialect: str) -> None:
        if dialect == "mysql" and "MariaDB" in view.value("SELECT version()"):
            dialect = "mariadb"
        self._threads = (
            [Path(f"/proc/{thread}/schedstat") for (thread,) in view.rows(_THREADS[dialect])]
            if dialect in _THREADS
            else []
        )
        self._before = self._now()

    def _now(self) -> dict[Path | None, float]:
        spent: dict[Path | None, float] = {None: time.process_time()}
        for path in self._threads:
            with suppress(OSError):
                spent[path] = int(path.read_text().split()[0]) / 1e9
        return spent

    def ms(self) -> float:
        """Milliseconds since it was made; of threads that are still there."""
        return sum(spent - self._before[of] for of, spent in self._now().items()) * 1000


async def measured(app: App, view: Raw, dialect: str, port: int, times: int) -> bool:
    asked, within = Asked(app), True
    word = "CAST('billing' AS BINARY)" if dialect == "mysql" else "'billing'"
    dead, outgoing, aside = (
        value.decode() if isinstance(value, bytes) else str(value)
        for value in map(
            view.value,
            (
                f"SELECT max(message_id) FROM txbox_inbox WHERE status = 'dead' AND consumer = {word}",
                "SELECT max(id) FROM txbox_outbox",
                "SELECT max(message_id) FROM txbox_quarantine",
            ),
        )
    )
    with asked.heard():
        for name, address in pages(dead, outgoing, aside).items():
            asked.statements.clear()
            first_ms = await asked(address)
            work = Work(view, dialect)
            spent = [await asked(address) for _ in range(times)]
            work_ms = work.ms() / times
            fetched(port, address)
            work = Work(view, dialect)
            bytes_ms = [fetched(port, address) for _ in range(times)]
            fetch_ms = work.ms() / times
            # what others do on the machine only adds
            within = within and min(*spent, work_ms) < 100
            print(
                f"| {name} | {first_ms:.0f} | {work_ms:.1f} | {min(spent):.1f} | {statistics.median(spent):.1f} |"
                f" {fetch_ms:.1f} | {min(bytes_ms):.1f} | {statistics.median(bytes_ms):.1f} |",
                flush=True,
            )
            for statement in list(asked.statements.values()):
                for scan in scans(view, dialect, statement):
                    print(f"    {statement.name}: {scan}")
    return within


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", required=True)
    parser.add_argument("--scale", type=float, default=1.0, help="1 is 2,000,000 rows of the inbox")
    parser.add_argument("--times", type=int, default=20, help="how often each page is loaded")
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
            print("| page | first, ms | work | least | median | last byte: work | least | median |")
            print("|---|---|---|---|---|---|---|---|")
            with served(app) as port:
                return 0 if asyncio.run(measured(app, view, dialect, port, args.times)) else 1


if __name__ == "__main__":
    sys.exit(main())
