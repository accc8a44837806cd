"""Handlers for `txbox.testing.prove`: wrong ones, whose line it must name, and right ones. Nothing here is for use."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import datetime
import inspect
import itertools
import json
import logging
import os
import random
import secrets
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date
from datetime import datetime as Moment  # noqa: N812 - another name for it
from http.client import HTTPConnection
from pathlib import Path
from time import time as seconds
from typing import Any

from tests.support.databases import Raw
from txbox import App, Message, Reject
from txbox.testing.proof import Report

TABLES = (
    "CREATE TABLE ledger (number {serial}, mid varchar(99) NOT NULL, amount integer, note varchar(99))",
    "CREATE TABLE line (number {serial}, ledger_number integer REFERENCES ledger (number), note varchar(99))",
    "CREATE TABLE account (name varchar(99) NOT NULL PRIMARY KEY, balance integer NOT NULL, at {moment} NULL)",
    "CREATE TABLE event (mid varchar(99) NOT NULL PRIMARY KEY, made_at {moment} DEFAULT {now})",
    "INSERT INTO account (name, balance) VALUES ('shop', 100)",
)
_TYPES = {
    "sqlite": {"serial": "INTEGER PRIMARY KEY", "moment": "timestamp", "now": "CURRENT_TIMESTAMP"},
    "postgresql": {
        "serial": "serial PRIMARY KEY",
        "moment": "timestamptz",
        "now": "CURRENT_TIMESTAMP",
    },
    "mysql": {
        "serial": "integer PRIMARY KEY AUTO_INCREMENT",
        "moment": "datetime(6)",
        "now": "CURRENT_TIMESTAMP(6)",
    },
}
MESSAGES = [
    Message[Any](id=f"m-{amount}", topic="payments", payload=b'{"amount": %d}' % amount)
    for amount in (3, 1, 2)
]

#: Set by a test: where handlers find the outside world.
HTTP_PORT = 0
DIRECTORY = Path()
DATABASE_URL = ""
#: The App of the handlers.
APP: Any = None


def make_tables(url: str) -> None:
    with Raw(url) as raw:
        for table in TABLES:
            raw.execute(table.format(**_TYPES[raw.product]))


def _sql(tx: Any, sql: str) -> str:
    lite = type(tx).__module__.partition(".")[0] in ("sqlite3", "aiosqlite")
    return sql if lite else sql.replace("?", "%s")


async def q(tx: Any, sql: str, *params: object) -> list[Any]:
    cursor = tx.cursor()
    cursor = await cursor if inspect.isawaitable(cursor) else cursor
    try:
        await cursor.execute(_sql(tx, sql), params)
        return list(await cursor.fetchall()) if cursor.description else []
    finally:
        await cursor.close()


def _q(tx: Any, sql: str, *params: object) -> list[Any]:
    cursor = tx.cursor()
    try:
        cursor.execute(_sql(tx, sql), params)
        return list(cursor.fetchall()) if cursor.description else []
    finally:
        cursor.close()


async def book(message: Message[Any], tx: Any, note: object = None) -> None:
    insert = "INSERT INTO ledger (mid, amount, note) VALUES (?, ?, ?)"
    await q(tx, insert, message.id, message.body["amount"], note)
    await q(
        tx, "UPDATE account SET balance = balance - ? WHERE name = 'shop'", message.body["amount"]
    )


class _Sync(ast.NodeTransformer):
    def visit_Await(self, node: ast.Await) -> ast.AST:
        plain: ast.AST = self.visit(node.value)
        return plain

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        self.generic_visit(node)
        fields = {
            name: getattr(node, name) for name in ast.FunctionDef._fields if hasattr(node, name)
        }
        fields["decorator_list"] = []
        return ast.copy_location(ast.FunctionDef(**fields), node)

    def visit_AsyncWith(self, node: ast.AsyncWith) -> ast.AST:
        self.generic_visit(node)
        return ast.copy_location(ast.With(items=node.items, body=node.body), node)


def _sync_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same lines without `await`."""
    lines, first = inspect.getsourcelines(function)
    tree = _Sync().visit(ast.parse(textwrap.dedent("".join(lines))))
    ast.increment_lineno(ast.fix_missing_locations(tree), first - 1)
    names = {**globals(), "q": _q}
    if function is not book:
        names["book"] = _sync_of(book)
    exec(compile(tree, __file__, "exec"), names)  # noqa: S102 - our own lines
    made: Callable[..., Any] = names[function.__name__]
    return made


#: name → kind of finding, function
WRONG: dict[str, tuple[str, Callable[..., Any]]] = {}
RIGHT: dict[str, Callable[..., Any]] = {}
#: The fourteen of each that run on every database, sync and async.
CORE: set[str] = set()
#: These need an event loop, or must not have one.
ASYNC_ONLY: set[str] = set()
SYNC_ONLY: set[str] = set()
SQLITE_ONLY: set[str] = set()


def wrong(kind: str, *sets: set[str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        WRONG[function.__name__] = (kind, function)
        for each in sets:
            each.add(function.__name__)
        return function

    return add


def right(*sets: set[str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        RIGHT[function.__name__] = function
        for each in sets:
            each.add(function.__name__)
        return function

    return add


def handler_of(name: str, *, is_async: bool) -> Callable[..., Any]:
    function = RIGHT[name] if name in RIGHT else WRONG[name][1]
    return function if is_async else _sync_of(function)


def check_finding(name: str, report: Report) -> None:
    """The first finding is of the right kind, and its line has the comment `# wrong`."""
    kind, _ = WRONG[name]
    assert [finding.kind for finding in report.findings] == [kind], report
    (finding,) = report.findings
    line = Path(finding.file).read_text().splitlines()[finding.line - 1]
    assert "# wrong" in line, f"{line}\n{finding.sentence}"
    assert finding.sentence.startswith(f"{__file__}:{finding.line} in {name}: "), finding.sentence


# -- wrong: outside of the transaction ----------------------------------------------------------


@wrong("outside", CORE)
async def http(message: Message[Any], tx: Any) -> None:
    await book(message, tx)
    urllib.request.urlopen(f"http://127.0.0.1:{HTTP_PORT}/charge", timeout=30).close()  # noqa: ASYNC210  # wrong


@wrong("outside")
async def http_client(message: Message[Any], tx: Any) -> None:
    connection = HTTPConnection("127.0.0.1", HTTP_PORT, timeout=30)
    connection.request("POST", "/charge", b"{}")  # wrong
    connection.getresponse().read()
    connection.close()
    await book(message, tx)


@wrong("outside", CORE)
async def raw_socket(message: Message[Any], tx: Any) -> None:
    await book(message, tx)
    with socket.create_connection(("127.0.0.1", HTTP_PORT)) as sock:  # wrong
        sock.sendall(b"GET / HTTP/1.0\r\n\r\n")


@wrong("outside")
async def datagram(message: Message[Any], tx: Any) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(b"charge", ("127.0.0.1", 9))  # wrong
    await book(message, tx)


_kept: list[Any] = []


@wrong("outside")
async def kept_socket(message: Message[Any], tx: Any) -> None:
    await book(message, tx)
    _kept[0].send(b"charge")  # wrong


@wrong("outside")
async def scattered(message: Message[Any], tx: Any) -> None:
    _kept[0].sendmsg([b"char", b"ge"])  # wrong
    await book(message, tx)


@wrong("outside", ASYNC_ONLY)
async def stream(message: Message[Any], tx: Any) -> None:
    await book(message, tx)
    _, writer = await asyncio.open_connection("127.0.0.1", HTTP_PORT)  # wrong
    writer.write(b"GET / HTTP/1.0\r\n\r\n")
    writer.close()


@wrong("outside", ASYNC_ONLY)
async def in_a_thread(message: Message[Any], tx: Any) -> None:
    await book(message, tx)
    url = f"http://127.0.0.1:{HTTP_PORT}/charge"
    await asyncio.to_thread(urllib.request.urlopen, url, timeout=30)  # wrong


@wrong("outside", CORE)
async def appends(message: Message[Any], tx: Any) -> None:
    await book(message, tx)
    with open(DIRECTORY / "charges", "a") as file:  # noqa: ASYNC230, PTH123  # wrong
        file.write(f"{message.id}\n")


@wrong("outside")
async def path_writes(message: Message[Any], tx: Any) -> None:
    (DIRECTORY / f"{message.id}.txt").write_text("charged")  # wrong
    await book(message, tx)


@wrong("outside")
async def descriptor(message: Message[Any], tx: Any) -> None:
    await book(message, tx)
    number = os.open(DIRECTORY / "charges", os.O_CREAT | os.O_WRONLY | os.O_APPEND)  # wrong
    os.write(number, b"charge\n")
    os.close(number)


@wrong("outside")
async def kept_file(message: Message[Any], tx: Any) -> None:
    await book(message, tx)
    _kept[1].write("charge\n")  # wrong


@wrong("outside")
async def copies(message: Message[Any], tx: Any) -> None:
    await book(message, tx)
    shutil.copyfile(__file__, DIRECTORY / "copy")  # wrong


@wrong("outside")
async def makes_directory(message: Message[Any], tx: Any) -> None:
    os.makedirs(DIRECTORY / str(uuid.uuid4()))  # noqa: PTH103  # wrong
    await book(message, tx)


@wrong("outside", CORE)
async def program(message: Message[Any], tx: Any) -> None:
    await book(message, tx)
    subprocess.run(["true"], check=True)  # noqa: ASYNC221  # wrong


@wrong("outside")
async def shell(message: Message[Any], tx: Any) -> None:
    os.system("true")  # noqa: ASYNC221  # wrong
    await book(message, tx)


@wrong("outside")
async def pipe(message: Message[Any], tx: Any) -> None:
    await book(message, tx)
    os.popen("true").close()  # noqa: ASYNC220  # wrong


@wrong("outside")
async def spawns(message: Message[Any], tx: Any) -> None:
    await book(message, tx)
    number = os.posix_spawn("/bin/true", ["true"], {})  # noqa: ASYNC221  # wrong
    os.waitpid(number, 0)  # noqa: ASYNC222


@wrong("outside", CORE)
async def second_connection(message: Message[Any], tx: Any) -> None:
    with sqlite3.connect(DIRECTORY / "other.db") as other:  # wrong
        other.execute("CREATE TABLE IF NOT EXISTS charge (mid)")
        other.execute("INSERT INTO charge VALUES (?)", (message.id,))
    await book(message, tx)


@wrong("outside")
async def same_database(message: Message[Any], tx: Any) -> None:
    with Raw(DATABASE_URL) as other:  # wrong
        if other.product == "sqlite":
            other.execute("PRAGMA busy_timeout = 100")
        other.execute("INSERT INTO event (mid) VALUES (?)", (f"{message.id}-{uuid.uuid4()}",))
    await book(message, tx)


@wrong("outside")
async def second_transaction(message: Message[Any], tx: Any) -> None:
    await book(message, tx)
    with App(DATABASE_URL) as other, other.transaction() as more:  # wrong
        _q(more, "SELECT balance FROM account")


@wrong("outside")
async def kept_connection(message: Message[Any], tx: Any) -> None:
    _kept[2].execute("INSERT INTO charge VALUES (?)", (message.id,))
    _kept[2].commit()  # wrong
    await book(message, tx)


# -- wrong: the transaction's end ---------------------------------------------------------------


@wrong("commit", CORE)
async def commits(message: Message[Any], tx: Any) -> None:
    await q(tx, "INSERT INTO ledger (mid) VALUES (?)", message.id)
    await tx.commit()  # wrong
    await q(tx, "UPDATE account SET balance = balance - 1 WHERE name = 'shop'")


@wrong("commit", CORE)
async def commits_by_statement(message: Message[Any], tx: Any) -> None:
    await book(message, tx)
    await q(tx, "COMMIT")  # wrong


@wrong("commit")
async def commits_quietly(message: Message[Any], tx: Any) -> None:
    await book(message, tx)
    with contextlib.suppress(Exception):
        await tx.commit()  # wrong


@wrong("commit")
async def rolls_back(message: Message[Any], tx: Any) -> None:
    await q(tx, "INSERT INTO ledger (mid) VALUES (?)", message.id)
    await tx.rollback()  # wrong


@wrong("commit", SQLITE_ONLY, SYNC_ONLY)
async def script(message: Message[Any], tx: Any) -> None:
    await book(message, tx)
    tx.executescript("UPDATE account SET balance = balance - 1;")  # wrong


@wrong("commit", SQLITE_ONLY, SYNC_ONLY)
async def with_block(message: Message[Any], tx: Any) -> None:
    with tx:  # wrong
        await book(message, tx)


@wrong("commit")
async def rolls_back_by_statement(message: Message[Any], tx: Any) -> None:
    await book(message, tx)
    await q(tx, "/* undo */ rollback")  # wrong


@wrong("commit")
async def begins_anew(message: Message[Any], tx: Any) -> None:
    await book(message, tx)
    await q(tx, "commit")  # wrong
    await q(tx, "begin")
    await q(tx, "UPDATE account SET balance = balance - 1 WHERE name = 'shop'")


# -- wrong: an error of the database ------------------------------------------------------------


@wrong("swallowed", CORE)
async def swallows(message: Message[Any], tx: Any) -> None:
    await q(tx, "INSERT INTO ledger (mid) VALUES (?)", message.id)
    try:
        await q(tx, "UPDATE account SET balance = balance - 1 WHERE name = 'shop'")  # wrong
    except Exception:  # noqa: BLE001
        logging.getLogger(__name__).debug("never mind")


@wrong("swallowed", CORE)
async def suppresses(message: Message[Any], tx: Any) -> None:
    with contextlib.suppress(Exception):
        await q(tx, "INSERT INTO ledger (mid) VALUES (?)", message.id)  # wrong


@wrong("swallowed")
async def tries_again(message: Message[Any], tx: Any) -> None:
    for _ in range(3):
        try:
            await book(message, tx)  # wrong
        except Exception:  # noqa: BLE001
            continue
        else:
            break


@wrong("swallowed")
async def returns_instead(message: Message[Any], tx: Any) -> None:
    try:
        await q(tx, "INSERT INTO ledger (mid) VALUES (?)", message.id)  # wrong
        await q(tx, "SELECT balance FROM account")
    except Exception as error:
        if message.id == "m-3" and "nothing" in str(error):
            raise
        return
    finally:
        logging.getLogger(__name__).debug("done")


@wrong("swallowed")
async def returns_at_last(message: Message[Any], tx: Any) -> None:
    try:
        await book(message, tx)  # wrong
    finally:
        return  # noqa: B012


@wrong("swallowed")
async def exit_stack(message: Message[Any], tx: Any) -> None:
    with contextlib.ExitStack() as stack:
        stack.push(lambda *raised: True)
        await q(tx, "INSERT INTO ledger (mid) VALUES (?)", message.id)  # wrong


@wrong("swallowed")
async def asks_first(message: Message[Any], tx: Any) -> None:
    try:
        rows = await q(tx, "SELECT mid FROM event WHERE mid = ?", message.id)  # wrong
    except Exception:  # noqa: BLE001
        rows = []
    if not rows:
        with contextlib.suppress(Exception):
            await q(tx, "INSERT INTO event (mid) VALUES (?)", message.id)


# -- wrong: what outlives the call --------------------------------------------------------------


def _work() -> None:
    pass


@wrong("outlived", CORE)
async def thread(message: Message[Any], tx: Any) -> None:
    await book(message, tx)
    threading.Thread(target=_work).start()  # wrong


@wrong("outlived")
async def timer(message: Message[Any], tx: Any) -> None:
    await book(message, tx)
    threading.Timer(0.01, _work).start()  # wrong


_pool = ThreadPoolExecutor(2)


@wrong("outlived")
async def job(message: Message[Any], tx: Any) -> None:
    await book(message, tx)
    _pool.submit(_work)  # wrong


async def _awaits() -> None:
    await asyncio.sleep(0)


@wrong("outlived", ASYNC_ONLY)
async def task(message: Message[Any], tx: Any) -> None:
    await book(message, tx)
    _kept.append(asyncio.create_task(_awaits()))  # wrong


@wrong("outlived", ASYNC_ONLY)
async def in_an_executor(message: Message[Any], tx: Any) -> None:
    await book(message, tx)
    asyncio.get_running_loop().run_in_executor(None, _work)  # wrong


# -- wrong: runs differ -------------------------------------------------------------------------


@wrong("random", CORE)
async def random_id(message: Message[Any], tx: Any) -> None:
    await book(message, tx, str(uuid.uuid4()))  # wrong


@wrong("random")
async def token(message: Message[Any], tx: Any) -> None:
    note = secrets.token_hex(8)  # wrong
    await book(message, tx, note)


@wrong("random")
async def urandom(message: Message[Any], tx: Any) -> None:
    await book(message, tx, os.urandom(8).hex())  # wrong


@wrong("random")
async def rare(message: Message[Any], tx: Any) -> None:
    if random.random() < 0.01:  # wrong
        return
    await book(message, tx)


@wrong("random")
async def choice(message: Message[Any], tx: Any) -> None:
    await book(message, tx, random.choice(["heads", "tails"]))  # wrong


@wrong("random")
async def staged_id(message: Message[Any], tx: Any) -> None:
    await book(message, tx)
    reference = str(uuid.uuid4())  # wrong
    if asyncio.iscoroutinefunction(q):
        await APP.outbox.stage_async(tx, "receipts", {"reference": reference})
    else:
        APP.outbox.stage(tx, "receipts", {"reference": reference})


_numbers = itertools.count()


@wrong("random")
async def counter(message: Message[Any], tx: Any) -> None:
    await book(message, tx, f"number {next(_numbers)}")  # wrong


@wrong("clock", CORE)
async def now(message: Message[Any], tx: Any) -> None:
    await book(message, tx, Moment.now(UTC).isoformat())  # wrong


@wrong("clock")
async def today(message: Message[Any], tx: Any) -> None:
    day = date.today()  # noqa: DTZ011  # wrong
    await book(message, tx, day.isoformat())


@wrong("clock")
async def module_clock(message: Message[Any], tx: Any) -> None:
    await book(message, tx, datetime.datetime.now(UTC).strftime("%Y-%m"))  # wrong


@wrong("clock")
async def epoch(message: Message[Any], tx: Any) -> None:
    at = int(time.time())  # wrong
    await q(tx, "INSERT INTO ledger (mid, amount) VALUES (?, ?)", message.id, at)


@wrong("clock")
async def imported_clock(message: Message[Any], tx: Any) -> None:
    at = int(seconds())  # wrong
    await q(tx, "INSERT INTO ledger (mid, amount) VALUES (?, ?)", message.id, at)


@wrong("clock")
async def formatted(message: Message[Any], tx: Any) -> None:
    await book(message, tx, time.strftime("%Y-%m-%d"))  # wrong


@wrong("clock")
async def duration(message: Message[Any], tx: Any) -> None:
    began = time.perf_counter()  # wrong
    await book(message, tx)
    took = f"{time.perf_counter() - began:.9f}"
    await q(tx, "INSERT INTO event (mid) VALUES (?)", f"{message.id} {took}")


# -- wrong: order -------------------------------------------------------------------------------


@wrong("order", CORE)
async def counts(message: Message[Any], tx: Any) -> None:
    ((count,),) = await q(tx, "SELECT count(*) FROM ledger")  # wrong
    await q(tx, "INSERT INTO ledger (mid, amount) VALUES (?, ?)", message.id, count)


@wrong("order")
async def remaining(message: Message[Any], tx: Any) -> None:
    ((balance,),) = await q(tx, "SELECT balance FROM account WHERE name = 'shop'")  # wrong
    await book(message, tx, f"leaves {balance}")


@wrong("order", CORE)
async def last_wins(message: Message[Any], tx: Any) -> None:
    amount = message.body["amount"]
    await q(tx, "UPDATE account SET balance = ? WHERE name = 'shop'", amount)  # wrong


@wrong("order")
async def highest(message: Message[Any], tx: Any) -> None:
    ((number,),) = await q(tx, "SELECT coalesce(max(amount), 0) + 1 FROM ledger")  # wrong
    await q(tx, "INSERT INTO ledger (mid, amount) VALUES (?, ?)", message.id, number)


@wrong("order")
async def newest(message: Message[Any], tx: Any) -> None:
    rows = await q(tx, "SELECT mid FROM ledger ORDER BY number DESC LIMIT 1")  # wrong
    await book(message, tx, f"after {rows}")


@wrong("order")
async def counts_in_sql(message: Message[Any], tx: Any) -> None:
    insert = "INSERT INTO ledger (mid, amount) SELECT ?, count(*) FROM account, ledger"
    await q(tx, insert, message.id)  # wrong


@wrong("order")
async def overwrites(message: Message[Any], tx: Any) -> None:
    update = "UPDATE account SET balance = ? + 1 - 1 WHERE name = 'shop'"
    await q(tx, update, message.body["amount"])  # wrong


@wrong("order")
async def keeps_first(message: Message[Any], tx: Any) -> None:
    insert = "INSERT INTO event (mid) SELECT ? FROM account WHERE NOT EXISTS (SELECT 1 FROM event)"
    await q(tx, insert, message.id)  # wrong


@wrong("order")
async def keeps_last(message: Message[Any], tx: Any) -> None:
    await q(tx, "DELETE FROM event")  # wrong
    await q(tx, "INSERT INTO event (mid) VALUES (?)", message.id)


# -- right --------------------------------------------------------------------------------------


@right(CORE)
async def plain(message: Message[Any], tx: Any) -> None:
    await book(message, tx)


@right(CORE)
async def stages(message: Message[Any], tx: Any) -> None:
    await book(message, tx)
    if asyncio.iscoroutinefunction(q):
        await APP.outbox.stage_async(tx, "receipts", {"of": message.id})
    else:
        APP.outbox.stage(tx, "receipts", {"of": message.id})


@right(CORE)
async def stages_effect(message: Message[Any], tx: Any) -> None:
    await book(message, tx)
    if asyncio.iscoroutinefunction(q):
        await APP.effects.stage_async(tx, "charge", {"of": message.id})
    else:
        APP.effects.stage(tx, "charge", {"of": message.id})


@right(CORE)
async def logs(message: Message[Any], tx: Any) -> None:
    log = logging.getLogger("tests.proofs")
    log.warning("at %s: %s", Moment.now(UTC), message.id)
    print("booking", message.id, file=sys.stderr)
    sys.stderr.write("booking\n")
    await book(message, tx)


@right(CORE)
async def reads_file(message: Message[Any], tx: Any) -> None:
    note = json.loads((DIRECTORY / "config.json").read_text())["note"]
    await book(message, tx, note)


@right(CORE)
async def derived_id(message: Message[Any], tx: Any) -> None:
    await book(message, tx, str(uuid.uuid5(uuid.NAMESPACE_URL, str(message.id))))


@right(CORE)
async def measures(message: Message[Any], tx: Any) -> None:
    began, at = time.perf_counter(), time.time()
    await book(message, tx)
    logging.getLogger("tests.proofs").info("%s s since %s", time.perf_counter() - began, at)


@right(CORE)
async def draws(message: Message[Any], tx: Any) -> None:
    for _ in sorted(range(3), key=lambda _: random.random()):
        secrets.token_hex(2)
    await book(message, tx)


@right(CORE)
async def waits_for_thread(message: Message[Any], tx: Any) -> None:
    worker = threading.Thread(target=_work)
    worker.start()
    worker.join()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_work).result()
    _pool.submit(_work).result()
    await book(message, tx)


@right(ASYNC_ONLY)
async def waits_for_task(message: Message[Any], tx: Any) -> None:
    await asyncio.gather(_awaits(), asyncio.to_thread(_work))
    async with asyncio.TaskGroup() as group:
        group.create_task(_awaits())
    await book(message, tx)


@right(CORE)
async def server_numbers(message: Message[Any], tx: Any) -> None:
    await book(message, tx)
    ((number,),) = await q(tx, "SELECT number FROM ledger WHERE mid = ?", message.id)
    await q(tx, "INSERT INTO line (ledger_number, note) VALUES (?, ?)", number, message.id)


@right()
async def numbers_in_texts(message: Message[Any], tx: Any) -> None:
    await book(message, tx)
    ((number,),) = await q(tx, "SELECT number FROM ledger WHERE mid = ?", message.id)
    body = {"ledger": number}
    if asyncio.iscoroutinefunction(q):
        await APP.outbox.stage_async(tx, "receipts", body)
    else:
        APP.outbox.stage(tx, "receipts", body)


@right(CORE)
async def server_clock(message: Message[Any], tx: Any) -> None:
    await q(tx, "INSERT INTO event (mid) VALUES (?)", message.id)
    await q(tx, "UPDATE account SET at = CURRENT_TIMESTAMP")


@right(CORE)
async def imports(message: Message[Any], tx: Any) -> None:
    import wave

    note = str(wave.WAVE_FORMAT_PCM)
    await book(message, tx, note)


@right(CORE)
async def upserts(message: Message[Any], tx: Any) -> None:
    rows = await q(tx, "SELECT mid FROM event WHERE mid = ?", message.id)
    if not rows:
        await q(tx, "INSERT INTO event (mid) VALUES (?)", message.id)


@right(CORE)
async def rejects(message: Message[Any], tx: Any) -> None:
    if message.body["amount"] == 1:
        raise Reject("no such account")
    await book(message, tx)


@right()
async def resolves(message: Message[Any], tx: Any) -> None:
    socket.getaddrinfo("localhost", 80)
    socket.gethostbyname("localhost")
    await book(message, tx)


@right()
async def temporary(message: Message[Any], tx: Any) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(b"scratch")
    await book(message, tx)


@right()
async def savepoint(message: Message[Any], tx: Any) -> None:
    await q(tx, "SAVEPOINT part")
    try:
        await q(tx, "INSERT INTO account (name, balance) VALUES ('shop', 0)")
    except Exception as error:
        if "unique" not in f"{type(error).__name__} {error}".lower() and "1062" not in str(error):
            raise
        await q(tx, "ROLLBACK TO SAVEPOINT part")
    await book(message, tx)


@right()
async def fails_first(message: Message[Any], tx: Any) -> None:
    await book(message, tx)
    if message.attempt == 1:
        raise TimeoutError("not yet")


@right()
async def wraps_errors(message: Message[Any], tx: Any) -> None:
    try:
        await book(message, tx)
    except Exception as error:
        raise RuntimeError("the booking failed") from error


@right()
async def from_the_message(message: Message[Any], tx: Any) -> None:
    generator = random.Random(str(message.id))
    await book(message, tx, str(generator.random()))
    await q(tx, "INSERT INTO event (mid, made_at) VALUES (?, ?)", message.id, str(date(2026, 1, 2)))


#: Of each wrong one of CORE, others that make the same mistake in another way: `prove` was not written for these.
VARIANTS = {
    "http": ("http_client", "stream", "in_a_thread"),
    "raw_socket": ("datagram", "kept_socket", "scattered"),
    "appends": ("path_writes", "descriptor", "kept_file", "copies", "makes_directory"),
    "program": ("shell", "pipe", "spawns"),
    "second_connection": ("same_database", "second_transaction", "kept_connection"),
    "commits": ("commits_quietly", "rolls_back", "with_block"),
    "commits_by_statement": ("script", "rolls_back_by_statement", "begins_anew"),
    "swallows": ("tries_again", "returns_instead", "asks_first"),
    "suppresses": ("returns_at_last", "exit_stack", "tries_again"),
    "thread": ("timer", "job", "task", "in_an_executor"),
    "random_id": ("token", "urandom", "rare", "choice", "staged_id", "counter"),
    "now": ("today", "module_clock", "epoch", "imported_clock", "formatted", "duration"),
    "counts": ("remaining", "highest", "newest", "counts_in_sql"),
    "last_wins": ("overwrites", "keeps_first", "keeps_last"),
}
#: They wait for locks of their own.
SLOW = {"second_transaction"}


def open_outside(directory: Path, port: int, url: str, app: App) -> None:
    """What handlers find: a port of HTTP, files, a socket and a file that are open already."""
    names = {"HTTP_PORT": port, "DIRECTORY": directory, "DATABASE_URL": url, "APP": app}
    globals().update(names)
    (directory / "config.json").write_text('{"note": "configured"}')
    _kept[:] = [
        socket.create_connection(("127.0.0.1", port)),
        (directory / "kept.txt").open("a"),
        sqlite3.connect(directory / "kept.db", check_same_thread=False),
    ]
    _kept[2].execute("CREATE TABLE charge (mid)")


def close_outside() -> None:
    for each in _kept[:3]:
        each.close()
    _kept.clear()
