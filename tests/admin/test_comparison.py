"""A rehearsed deploy: `rehearse --against` finds what new code does differently, and nothing else (promise 7.6)."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import Command
from tests.support.databases import FreshDatabase, Raw
from tests.support.servers import ROOT
from txbox import App, Message, Redaction
from txbox.admin import comparison
from txbox.admin.comparison import Reply, Subject, compare, differences
from txbox.admin.rehearsal import Record

SHOP = """
import json, os, random, sqlite3, uuid
from datetime import datetime, timezone
from txbox import App, Message, Redaction
from txbox.brokers.local import Local

app = App(os.environ["SHOP_URL"], redact=Redaction(fields=("body.card", "result.card")))
app.publish(Local(), topics=["receipts"])

@app.handler("receipts", consumer="archive")
def keep(message: Message[dict], tx): ...

def run(tx, sql, *values):
    if isinstance(tx, sqlite3.Connection):
        sql = sql.replace("%s", "?")
    cursor = tx.cursor()
    cursor.execute(sql, values)
    cursor.close()

async def run_async(tx, sql, *values):
    if "asyncmy" in type(tx).__module__ or hasattr(tx, "asyncmy") or hasattr(tx, "get_autocommit"):
        cursor = tx.cursor()
        await cursor.execute(sql, values)
        await cursor.close()
    else:
        await tx.execute(sql.replace("%s", "?") if "aiosqlite" in type(tx).__module__ else sql, values)

def price(n):
    return n * 100

@app.handler("orders", consumer="billing", keep_payload="always", keep_result=True)
def bill(message: Message[dict], tx):
    n, now = message.body["n"], datetime.now(timezone.utc).replace(tzinfo=None)
    cents = price(n)
    run(tx, "INSERT INTO line (token, at, n, cents) VALUES (%s, %s, %s, %s)", uuid.uuid4().hex, str(now), n, cents)
    app.outbox.stage(tx, "receipts", {"n": n, "cents": cents, "card": message.body["card"], "nonce": random.random()})
    return {"cents": cents, "card": message.body["card"], "at": str(now)}

@app.handler("stock", consumer="stock", keep_payload="always")
def move(message: Message[dict], tx):
    run(tx, "UPDATE stock SET pieces = pieces - %s WHERE id = %s", message.body["n"], 1)

@app.handler("trail", consumer="trail", keep_payload="always")
async def trail(message: Message[dict], tx):
    await run_async(tx, "INSERT INTO line (token, at, n, cents) VALUES (%s, %s, %s, 0)", "t", "0", message.body["n"])
"""
#: Multiples of 27 are orders: 37 of 1,000.
EVERY = 27
PLANTED = "    return n * 100 + (1 if n % 27 == 0 else 0)\n"
SECRET = "4111-1111"


def _id_column(product: str) -> str:
    return {
        "postgresql": "id serial PRIMARY KEY",
        "mysql": "id integer AUTO_INCREMENT PRIMARY KEY",
        "sqlite": "id integer PRIMARY KEY AUTOINCREMENT",
    }[product]


@pytest.fixture
def deploy(command: Command, database: FreshDatabase) -> Iterator[Deploy]:
    with Raw(database.url) as raw:
        yield Deploy(command, database.url, raw)


class Deploy:
    """A shop whose code is in one directory, and its next release in another."""

    def __init__(self, command: Command, url: str, raw: Raw) -> None:
        self.url, self.raw = url, raw
        self.command = Command(command.directory, {**command.environment, "SHOP_URL": url})
        self.new = command.directory.parent / "new"
        self.new.mkdir()
        self.command.file("shop.py", SHOP)
        raw.execute(
            f"CREATE TABLE line ({_id_column(raw.product)}, token varchar(64), at varchar(64), n integer,"
            " cents integer)"
        )
        raw.execute("CREATE TABLE stock (id integer PRIMARY KEY, pieces integer)")
        raw.execute("INSERT INTO stock VALUES (1, 1000000)")

    def release(self, *changes: tuple[str, str]) -> None:
        text = SHOP
        for before, after in changes:
            assert before in text
            text = text.replace(before, after)
        (self.new / "shop.py").write_text(text)

    def processed(self, messages: int) -> None:
        """Messages that were processed, a third for each handler; what their handlers wrote is of no interest."""
        with App(self.url) as app:
            for topic, consumer in (("orders", "billing"), ("stock", "stock"), ("trail", "trail")):
                app.handler(topic, consumer=consumer, keep_payload="always")(
                    lambda message, tx: None
                )
            for n in range(1, messages + 1):
                payload = json.dumps({"n": n, "card": SECRET}).encode()
                topic = ("orders", "stock", "trail")[n % 3]
                app.process(Message(id=f"m{n}", topic=topic, payload=payload))

    def rehearse(self, *words: str, code: int) -> Any:
        done = self.command(
            "rehearse", "--app", "shop:app", "--against", "shop:app", "--against-path", str(self.new), "--json", *words,
            code=code,
        )  # fmt: skip
        assert SECRET not in done.out + done.err
        return done.json if done.out else done.sentence


def differing(report: Any) -> dict[tuple[str, str, str], int]:
    return {
        (each["handler"], each["kind"], each["what"]): each["count"]
        for each in report["differences"]
    }


def check_planted(deploy: Deploy, messages: int, rehearse: Callable[..., Any]) -> None:
    deploy.processed(messages)
    deploy.release(("    return n * 100\n", PLANTED))
    before = deploy.raw.rows("SELECT count(*) FROM line"), deploy.raw.rows("SELECT * FROM stock")
    report = rehearse("--last", str(messages))
    planted = messages // EVERY
    assert (report["compared"], report["differing"]) == (messages, planted)
    assert {handler["handler"]: handler["differing"] for handler in report["handlers"]} == {
        "billing orders": planted, "stock stock": 0, "trail trail": 0,
    }  # fmt: skip
    table = {
        "postgresql": ("rows", "public.line cents"),
        "sqlite": ("rows", "line insert.cents"),
    }
    insert = "INSERT INTO line (token, at, n, cents) VALUES (?, ?, ?, ?): value 4"
    assert differing(report) == {
        ("billing orders", "result", "cents"): planted,
        ("billing orders", "staged", "receipts [].body.cents"): planted,
        ("billing orders", *table.get(deploy.raw.product, ("statements", insert))): planted,
    }
    ignored = " ".join(report["handlers"][0]["ignored"])
    assert "nonce" in ignored
    assert "result at" in ignored
    assert (
        deploy.raw.rows("SELECT count(*) FROM line"),
        deploy.raw.rows("SELECT * FROM stock"),
    ) == before
    assert deploy.raw.value("SELECT count(*) FROM txbox_outbox") == 0


def test_exactly_the_planted_change_is_found(deploy: Deploy) -> None:
    check_planted(deploy, 27, partial(deploy.rehearse, code=1))


@pytest.mark.slow
def test_a_thousand_messages_take_less_than_a_minute(deploy: Deploy) -> None:
    def rehearse(*words: str) -> Any:
        started = time.monotonic()
        # longer than a command of the tests may take
        done = subprocess.run(
            [sys.executable, "-P", "-m", "txbox", "rehearse", "--app", "shop:app", "--against", "shop:app",
             "--against-path", str(deploy.new), "--json", *words],
            cwd=deploy.command.directory, env=deploy.command.environment, stdout=subprocess.PIPE, check=False,
        )  # fmt: skip
        assert done.returncode == 1
        # time says nothing where others have the processors
        assert crowded or time.monotonic() - started < 60
        return json.loads(done.stdout)

    crowded = os.getloadavg()[0] > (os.cpu_count() or 1)
    check_planted(deploy, 1_000, rehearse)


# -- what differs, and what does not ----------------------------------------------------------

REFUSES = (
    '    run(tx, "UPDATE stock',
    "    if message.body['n'] == 1: raise ValueError(message.body)\n    run(tx, \"UPDATE stock",
)
#: The same row by another statement.
REWRITTEN = (
    '"INSERT INTO line (token, at, n, cents) VALUES (%s, %s, %s, 0)", "t", "0", message.body["n"]',
    "\"INSERT INTO line (cents, n, token, at) VALUES (%s, %s, 't', '0')\", 0, message.body[\"n\"]",
)
CALLS = (
    "    cents = price(n)\n",
    """
    cents = price(n)
    try:
        import socket; socket.create_connection(("127.0.0.1", 9), timeout=1)
    except OSError:
        pass
""",
)


def test_each_kind_of_difference_and_none_for_another_way_to_the_same_rows(deploy: Deploy) -> None:
    deploy.processed(6)
    deploy.release(REFUSES, REWRITTEN, CALLS)
    report = deploy.rehearse(code=1)
    expected = {
        ("stock stock", "outcome", "processed → failed (ValueError)"): 1,
        ("billing orders", "calls", "socket.connect 127.0.0.1:9 (only new)"): 2,
    }
    if deploy.raw.product == "mysql":
        # nobody tells which rows were written: the statements stand for them
        new = "INSERT INTO line (cents, n, token, at) VALUES (?, ?, ?, ?) (only new)"
        old = "INSERT INTO line (token, at, n, cents) VALUES (?, ?, ?, ?) (only running)"
        expected |= {("trail trail", "statements", new): 2, ("trail trail", "statements", old): 2}
    assert differing(report) == expected


def test_values_are_shown_on_demand_and_redacted(deploy: Deploy) -> None:
    if deploy.raw.product == "mysql":
        pytest.skip("as on the others")
    deploy.processed(6)
    deploy.release(
        ("return n * 100", "return n * 101"),
        ('"card": message.body["card"], "nonce"', '"card": message.body["card"] + "!", "nonce"'),
    )
    report = deploy.rehearse("--reveal", "--consumer", "billing", "--actor", "anna", code=1)
    values = {each["what"]: (each["running"], each["new"]) for each in report["differences"]}
    assert values["receipts [].body.cents"] == ("300", "303")
    assert values["receipts [].body.card"] == ("***", "***")
    audited = deploy.raw.rows("SELECT actor, action, affected FROM txbox_audit ORDER BY number")
    assert [tuple(row) for row in audited] == [("anna", "rehearse", 2), ("anna", "reveal", 2)]
    one = deploy.rehearse("billing", "m3", code=1)
    assert one["compared"] == 1
    assert {each["running"] for each in one["differences"]} == {None}


def test_what_stops_a_comparison_says_so(deploy: Deploy, tmp_path: Path) -> None:
    if deploy.raw.product != "sqlite":
        pytest.skip("as on SQLite")
    deploy.release()
    assert "No such processed message" in deploy.rehearse(code=2)
    deploy.processed(6)
    deploy.release(("import json", "import no_such_module, json"))
    assert "shop:app cannot be rehearsed: shop imports" in deploy.rehearse(code=2)
    other = tmp_path / "other.db"
    with App(f"sqlite:///{other}") as app:
        app.init()
    deploy.release(('os.environ["SHOP_URL"]', repr(f"sqlite:///{other}")))
    assert "both must use the same database" in deploy.rehearse(code=2)
    # a process that ends costs its message, not the comparison
    deploy.release(('    run(tx, "UPDATE stock', '    os._exit(3)\n    run(tx, "UPDATE stock'))
    report = deploy.rehearse(code=1)
    assert differing(report) == {
        ("stock stock", "outcome", "processed → its process ended with status 3"): 2
    }
    # one that nothing takes any more
    deploy.release(
        ('@app.handler("stock", consumer="stock"', '@app.handler("stocks", consumer="stock"')
    )
    assert differing(deploy.rehearse(code=1)) == {
        ("stock stock", "outcome", "processed → no handler"): 2
    }
    # effects that are in the way
    deploy.raw.execute("INSERT INTO line (n) SELECT n * 3 FROM (SELECT 1 AS n UNION SELECT 2) AS m")
    deploy.raw.execute("CREATE UNIQUE INDEX once ON line (n)")
    deploy.release()
    done = deploy.command(
        "rehearse",
        "--app",
        "shop:app",
        "--against",
        "shop:app",
        "--against-path",
        str(deploy.new),
        code=2,
    )
    assert "billing orders: 2 messages failed in both" in done.sentence
    assert "IntegrityError" in done.out


def test_the_example_differs_as_its_page_shows(command: Command) -> None:
    running = command.directory / "running"
    shutil.copytree(ROOT / "examples/rehearsed_deploy", command.directory, dirs_exist_ok=True)
    subprocess.run([sys.executable, "shop.py"], cwd=running, check=True)
    inside = Command(running, command.environment)
    words = ("rehearse", "--app", "shop:app", "--against", "shop:app", "--against-path", "../new")
    lines = inside(*words, code=1).out.splitlines()
    page = (ROOT / "docs/howto/rehearse.md").read_text()
    shown_lines = page[page.index("```text") : page.index("That is the change")].splitlines()
    # but for times
    assert lines[1:6] == shown_lines[2:7]
    assert lines[0].endswith("12 differ. Nothing was committed.")
    source = page[page.index("```python\n") + 10 :]
    assert source.startswith((running / "shop.py").read_text())


# -- the rules, without processes -------------------------------------------------------------


def _reply(**document: Any) -> Reply:
    return Reply(document={"outcome": "processed", **document}, handler_s=0.001)


def _run(running: Callable[[int], Reply], new: Callable[[int], Reply], messages: int = 40) -> Any:
    """Compare two functions of a number that grows with each run of either."""
    clock = count()
    subjects = [
        Subject(consumer="billing", message_id=str(number), topic="orders")
        for number in range(messages)
    ]
    return compare(
        subjects,
        lambda _consumer, _id: running(next(clock)),
        lambda _consumer, _id: new(next(clock)),
    )


def test_rows_and_statements_do_not_show_what_the_rules_hide_elsewhere() -> None:
    record = Record(
        outcome="processed",
        body={"card": SECRET, "n": 7},
        rows={"line": {"inserted": 1, "rows": [{"note": f"by {SECRET}", "n": 7, "card": "other"}]}},
        statements={"INSERT INTO line VALUES (?, ?)": [{"1": f"'{SECRET}'", "2": 7}]},
    )
    shown = record.shown(Redaction(fields=("body.card",)))
    assert shown["rows"]["line"]["rows"] == [{"note": "***", "n": 7, "card": "***"}]
    assert shown["statements"]["INSERT INTO line VALUES (?, ?)"] == [{"1": "***", "2": 7}]
    # what is compared is whole
    assert SECRET in str(record.document())


def test_what_the_running_code_does_not_repeat_is_no_difference() -> None:
    numbers = random.Random(1)
    noisy: dict[str, Callable[[int], Any]] = {
        # grows; seldom changes; has two values only; and sometimes is not there
        "id": lambda run: run,
        "second": lambda run: run // 50,
        "coin": lambda run: numbers.random() < 0.5,
        "list": lambda run: [1] * numbers.randrange(2),
    }

    def once(run: int) -> Reply:
        return _reply(result={name: value(run) for name, value in noisy.items()}, rows={})

    report = _run(once, once)
    assert (report.compared, report.differing, report.differences) == (40, 0, ())
    (handler,) = report.handlers
    assert {"result id", "result coin", "result list"} <= set(handler.ignored)


def test_new_noise_is_a_difference_and_so_is_what_noise_surrounds() -> None:
    report = _run(
        lambda run: _reply(result={"id": run, "total": 1}),
        lambda run: _reply(result={"id": run, "total": 1 + run, "extra": run}),
    )
    assert {(each.what, each.count) for each in report.differences} == {
        ("total", 40), ("extra (only new)", 40),
    }  # fmt: skip


def test_a_slower_handler_is_told_and_is_no_difference() -> None:
    report = _run(
        lambda run: Reply(document={"outcome": "processed"}, handler_s=0.001 + run % 3 / 10_000),
        lambda run: Reply(document={"outcome": "processed"}, handler_s=0.003),
    )
    assert report.differing == 0
    assert [handler.pace for handler in report.handlers] == ["slower"]


def test_messages_that_are_locked_or_gone_are_left_out() -> None:
    report = _run(
        lambda run: Reply(skipped="locked") if run < 3 else _reply(),
        lambda run: Reply(skipped="locked") if 10 < run < 15 else _reply(),
    )
    assert report.differing == 0
    assert report.compared + report.skipped["locked"] == 40


@pytest.mark.parametrize(
    ("old", "new", "paths"),
    [
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}, [("a", 1, "b")]),
        ({"a": [1]}, {"a": [1, 2]}, [("a", comparison.NUMBER)]),
        ({"a": 1}, {"b": 1}, [("a", comparison.REMOVED), ("b", comparison.ADDED)]),
        ({"a": 1}, {"a": True}, [("a",)]),
        ({"a": None}, {"a": {}}, [("a",)]),
    ],
)
def test_where_documents_differ(old: Any, new: Any, paths: list[Any]) -> None:
    assert list(differences(old, new)) == paths
