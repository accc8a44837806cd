"""The examples run as they stand and print what they promise."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.programs import EXAMPLES, rows, tables
from tests.support.databases import NewDatabase
from tests.support.waiting import DEADLINE_S, eventually


def _run(*command: str, cwd: Path, path: Path | None = None, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={**os.environ, "PYTHONPATH": str(path or "")},
    )
    assert done.returncode == code, done.stderr
    return done.stdout


def test_own_loop(tmp_path: Path, new_database: NewDatabase) -> None:
    url = new_database("postgresql", schema=False)
    assert _run(str(EXAMPLES / "own_loop.py"), url, cwd=tmp_path).splitlines() == [
        "pay-1: processed",
        "pay-1: no effect",
        "pay-2: processed",
        "pay-2: no effect",
        "None: no effect",
        "balance: 50",
    ]


def test_own_loop_async(tmp_path: Path, new_database: NewDatabase) -> None:
    url = new_database("postgresql", schema=False).replace("://", "+asyncpg://")
    assert _run(str(EXAMPLES / "own_loop_async.py"), url, cwd=tmp_path).splitlines() == [
        "invoice for 30, balance 70",
        "balance: 70",
    ]


def test_webhook_function(
    tmp_path: Path, new_database: NewDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TXBOX_DATABASE_URL", new_database("postgresql", schema=False))
    printed = _run(str(EXAMPLES / "webhook_function.py"), cwd=tmp_path).splitlines()
    assert printed == [
        "(200, 'processed')",
        "(200, 'duplicate')",
        "(200, 'quarantined')",
        "(200, 'failed')",
        "(200, 'unmatched')",
    ]


def test_service(
    tmp_path: Path, new_database: NewDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = tables(
        new_database("postgresql"), "CREATE TABLE booking (order_id INTEGER, amount INTEGER)"
    )
    monkeypatch.setenv("TXBOX_DATABASE_URL", url)
    orders = {
        "o-1": '{"id": 1, "amount": 5}',
        "o-2": '{"id": 2, "amount": 6, "later": true}',
        "o-3": '{"id": 3, "amount": 0}',
    }
    for each, order in orders.items():
        send = ("send", "orders", "--app", "service:app", "--type", "order.paid", "--id", each)
        _run("-m", "txbox", *send, "--data", order, cwd=tmp_path, path=EXAMPLES)
    run = ("-m", "txbox", "run", "service:app", "--once")
    printed = _run(*run, cwd=tmp_path, path=EXAMPLES, code=1)  # one of them is dead
    assert "ALERT MessageDead" in printed

    def tried_again() -> bool:
        # its handler asked for a later attempt; --once ends when nothing is due
        _run(*run, cwd=tmp_path, path=EXAMPLES)
        return bool(_statuses(url)["o-2"] != "failed")

    eventually(tried_again, "the later attempt")
    assert _statuses(url) == {"o-1": "processed", "o-2": "processed", "o-3": "dead"}
    assert rows(url, "SELECT order_id, amount FROM booking ORDER BY 1") == [(1, 5), (2, 6)]


def _statuses(url: str) -> dict[str, str]:
    return dict(rows(url, "SELECT message_id, status FROM txbox_inbox"))


def test_dishka_handlers(
    tmp_path: Path, new_database: NewDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TXBOX_DATABASE_URL", new_database("postgresql", schema=False))
    printed = _run(str(EXAMPLES / "dishka_handlers.py"), cwd=tmp_path).splitlines()
    assert printed == ["processed", "duplicate", "[(55,)]"]


def test_pytest_billing(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "pytest_billing.py", tmp_path)
    printed = _run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "pytest_billing.py", cwd=tmp_path
    )
    assert "3 passed" in printed


def test_pytest_spool(tmp_path: Path) -> None:
    """Two points here; tests/testing/test_brokers.py runs them all."""
    for name in ("spool.py", "pytest_spool.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    points = "producers or killed_and_comes_back"
    words = ("-q", "-rs", "-p", "no:cacheprovider", "pytest_spool.py", "-k", points)
    printed = _run("-m", "pytest", *words, cwd=tmp_path)
    assert "1 passed, 1 skipped" in printed
    assert "SpoolRig lacks server" in printed


def test_settings_service(
    tmp_path: Path, new_database: NewDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_DATABASE_URL", new_database("postgresql", schema=False))
    monkeypatch.setenv("SHOP_LEASE__DURATION", "PT10M")
    monkeypatch.setenv("SHOP_FEE", "3")
    printed = _run(str(EXAMPLES / "settings_service.py"), cwd=tmp_path).splitlines()
    assert printed == ["********** 0:10:00", "charged 53"]


_ORDERS = """
import hashlib, hmac
import flask_shop

client = flask_shop.api.test_client()
print([client.post(f"/orders/{number}").status_code for number in (1, 2000)])
body = b'{"after": "c0ffee"}'
signed = "sha256=" + hmac.new(b"the secret", body, hashlib.sha256).hexdigest()
headers = {"x-hub-signature-256": signed, "x-github-event": "push", "x-github-delivery": "d-1"}
print([client.post("/webhooks/github", data=body, headers=headers).text for _ in range(2)])
with flask_shop.app.transaction() as tx:
    print([tx.execute(f"SELECT * FROM {table}").fetchall() for table in ("orders", "builds")])
    print(tx.execute("SELECT count(*) FROM txbox_outbox").fetchone())
"""


def test_flask_shop(tmp_path: Path, postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tables(
        postgresql_url,
        "CREATE TABLE orders (number int)",
        "CREATE TABLE invoices (number int)",
        "CREATE TABLE builds (commit_id text)",
    )
    monkeypatch.setenv("TXBOX_DATABASE_URL", postgresql_url)
    assert _run("-c", _ORDERS, cwd=tmp_path, path=EXAMPLES).splitlines() == [
        "[201, 409]",
        "['processed\\n', 'duplicate\\n']",
        "[[(1,)], [('c0ffee',)]]",
        "(1,)",
    ]


_PAYMENTS = """
import asyncio
import fastapi_once
from tests.support.asgi import Lived

async def main():
    async with Lived(fastapi_once.api) as lived:
        async def pay(amount, key, user="ann"):
            headers = {"authorization": f"Bearer {user}-secret", "idempotency-key": key}
            return tuple(await lived.ask("POST", f"/payments?amount={amount}", headers=headers))
        for paid in ((30, "k-1"), (30, "k-1"), (31, "k-1"), (30, "k-1", "bob"), (2000, "k-2"), (1, "k-2")):
            print(*await pay(*paid))

asyncio.run(main())
with fastapi_once.app.transaction() as tx:
    print(tx.execute("SELECT * FROM payment ORDER BY 1, 2").fetchall())
"""


def test_fastapi_once(postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tables(postgresql_url, "CREATE TABLE payment (account text, amount int)")
    monkeypatch.setenv("TXBOX_DATABASE_URL", postgresql_url)
    *answers, payments = _run("-c", _PAYMENTS, cwd=EXAMPLES.parent, path=EXAMPLES).splitlines()
    assert answers[0] == answers[1] == '201 {"account":"ann","amount":30}'
    assert answers[2].startswith("422 ")
    assert answers[3] == '201 {"account":"bob","amount":30}'
    assert answers[4].startswith("402 ")
    assert answers[5] == '201 {"account":"ann","amount":1}'
    assert payments == "[('ann', 1), ('ann', 30), ('bob', 30)]"
