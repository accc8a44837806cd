"""`prove` finds wrong handlers, names their line, and blames no right one."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support import proofs
from tests.support.databases import NewDatabase, Raw
from tests.support.proofs import (
    ASYNC_ONLY,
    CORE,
    MESSAGES,
    RIGHT,
    SLOW,
    SYNC_ONLY,
    VARIANTS,
    WRONG,
)
from txbox import App, ConfigurationError, Message
from txbox.cli import main
from txbox.testing import prove
from txbox.testing.proof import Report, read_messages

Prove = Callable[[str, str, bool], Report]


@pytest.fixture(scope="module")
def http_port() -> Iterator[int]:
    """A server that answers everything with 200, until its client closes."""

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while data := connection.recv(65_536):
                if b"HTTP/" in data:
                    connection.sendall(
                        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                    )
                    return

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proved(new_database: NewDatabase, http_port: int, tmp_path: Path) -> Iterator[Prove]:
    """`proved(database, handler, is_async)`."""
    log = logging.FileHandler(tmp_path / "app.log", delay=True)
    logging.getLogger("tests.proofs").addHandler(log)

    def prove_it(database: str, name: str, is_async: bool) -> Report:
        url = new_database(database)
        proofs.make_tables(url)
        with App(url) as app:
            proofs.open_outside(tmp_path, http_port, url, app)
            app.effect("charge")(lambda message: None)
            app.handler("receipts", consumer="receipts")(lambda message, tx: None)
            function = proofs.handler_of(name, is_async=is_async)
            app.handler("payments", consumer="billing")(function)
            return prove(app, MESSAGES)

    yield prove_it
    proofs.close_outside()
    logging.getLogger("tests.proofs").removeHandler(log)
    log.close()


def _names(of: Any, is_async: bool) -> list[str]:
    return [name for name in of if name not in (SYNC_ONLY if is_async else ASYNC_ONLY)]


def _judge(name: str, report: Report) -> None:
    if name in WRONG:
        proofs.check_finding(name, report)
    else:
        assert report.ok, report


def test_there_are_fourteen_of_each_and_three_variants_of_what_is_wrong() -> None:
    assert len(CORE & WRONG.keys()) == len(CORE & RIGHT.keys()) == 14
    assert VARIANTS.keys() == CORE & WRONG.keys()
    for name, variants in VARIANTS.items():
        assert len(set(variants) - CORE) >= 3
        assert {WRONG[variant][0] for variant in variants} == {WRONG[name][0]}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
        for name in _names([*WRONG, *RIGHT], is_async=False)
    ],
)
def test_handlers_on_sqlite(proved: Prove, name: str) -> None:
    _judge(name, proved("sqlite", name, False))


@pytest.mark.parametrize("name", [*sorted(ASYNC_ONLY), "swallows", "stages"])
def test_async_handlers_on_sqlite(proved: Prove, name: str) -> None:
    _judge(name, proved("sqlite", name, True))


@pytest.mark.parametrize("name", ["commits", "server_numbers"])
@pytest.mark.parametrize("database", ["postgresql", "mariadb"])
def test_handlers_on_servers(proved: Prove, database: str, name: str) -> None:
    _judge(name, proved(database, name, False))


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("name", sorted(CORE))
@pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb", "mysql"])
def test_every_handler_on_every_database(
    proved: Prove, database: str, name: str, is_async: bool
) -> None:
    began = time.process_time()
    _judge(name, proved(database, name, is_async))
    # of this process: the machine may be busy
    assert time.process_time() - began < 30


def test_it_puts_everything_back(new_database: NewDatabase) -> None:
    url = new_database("sqlite")
    proofs.make_tables(url)
    with Raw(url) as raw:
        raw.execute("INSERT INTO ledger (number, mid) VALUES (41, 'before')")
        raw.execute("INSERT INTO line (ledger_number, note) VALUES (41, 'before')")
        with App(url) as app:
            app.handler("payments", consumer="billing")(
                proofs.handler_of("server_numbers", is_async=False)
            )
            prove(app, MESSAGES[:1]).check()
        assert raw.rows("SELECT number, mid FROM ledger") == [(41, "before")]
        assert raw.rows("SELECT ledger_number, note FROM line") == [(41, "before")]
        assert raw.rows("SELECT balance FROM account") == [(100,)]
        for table in ("txbox_inbox", "txbox_outbox", "txbox_attempt", "txbox_quarantine"):
            assert raw.value(f"SELECT count(*) FROM {table}") == 0
        assert not raw.rows("SELECT 1 FROM sqlite_master WHERE name LIKE 'txbox_prove%'")


def test_it_refuses_a_database_with_messages(new_database: NewDatabase) -> None:
    url = new_database("sqlite")
    with App(url) as app:
        app.handler("payments", consumer="billing")(lambda message, tx: None)
        app.process(MESSAGES[0])
        with pytest.raises(ConfigurationError, match="needs a database for tests"):
            prove(app, MESSAGES)
        with pytest.raises(ConfigurationError, match="No handler of this App"):
            prove(app, [Message(id="1", topic="other", payload=b"")])


def test_observe_replaces_the_rows(new_database: NewDatabase) -> None:
    """The order of messages shows in the rows; what is observed does not have it."""
    url = new_database("sqlite")
    proofs.make_tables(url)
    with App(url) as app, Raw(url) as raw:
        app.handler("payments", consumer="billing")(proofs.handler_of("counts", is_async=False))
        prove(app, MESSAGES[:2], observe=lambda: raw.value("SELECT count(*) FROM ledger")).check()
        report = prove(
            app, MESSAGES[:2], observe=lambda: raw.rows("SELECT mid, amount FROM ledger")
        )
        assert [finding.kind for finding in report.findings] == ["order"]
        with pytest.raises(AssertionError, match="depends on the order"):
            report.check()


def test_lines_of_messages(tmp_path: Path) -> None:
    path = tmp_path / "messages.jsonl"
    path.write_text(
        '{"id": "1", "topic": "orders", "body": {"cents": 1}, "headers": {"tenant": "a"}}\n\n'
        '{"id": 2, "topic": "orders", "payload": "plain", "key": "k"}\n'
    )
    first, second = read_messages(path)
    assert (first.payload, first.headers.text("tenant")) == (b'{"cents": 1}', "a")
    assert (second.id, second.payload, second.key) == (2, b"plain", "k")

    # a separator of lines for Python, and a character like others for JSON
    path.write_text('{"id": "1", "topic": "orders", "body": "a\u2028b"}', "utf-8")
    (message,) = read_messages(path)
    assert message.json() == "a\u2028b"

    for wrong in (b'{"id": "1"}', b"\xff", b"[" * 100_000):
        path.write_bytes(wrong)
        with pytest.raises(ConfigurationError, match="Line 1 of"):
            read_messages(path)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_messages(tmp_path / "missing.jsonl")


_SHOP = """
from txbox import App

app = App("sqlite:///shop.db")


@app.handler("orders", consumer="billing")
def bill(message, tx):
    tx.execute("INSERT INTO bill VALUES (?)", (message.id,))
    open("charges", "a").close()
"""


def test_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("proved_shop.py").write_text(_SHOP)
    Path("messages.jsonl").write_text('{"id": "1", "topic": "orders"}')
    with App("sqlite:///shop.db") as app:
        app.init()
        with app.transaction() as tx:
            tx.execute("CREATE TABLE bill (mid TEXT)")

    words = ["prove", "proved_shop:app", "--messages", "messages.jsonl"]
    assert main([*words, "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["kind"], finding["line"]) == ("outside", 10)
    assert main(words) == 1
    assert "proved_shop.py:10 in bill: the handler of billing writes" in capsys.readouterr().out
