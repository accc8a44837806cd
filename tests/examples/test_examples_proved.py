"""The handlers of the examples, proved as `docs/howto/prove.md` shows it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.examples.programs import EXAMPLES, tables
from tests.support.databases import NewDatabase
from tests.support.waiting import DEADLINE_S

_BOOKING = "CREATE TABLE booking (order_id integer, amount integer)"
_PAID = [{"id": 1, "amount": 5}, {"id": 2, "amount": 7}, {"id": 3, "amount": 9}]
_SCANS = [
    {"scanner_id": "s", "scan_id": at, "package": "p", "version": at, "status": f"at {at}", "at": "2026-11-28"}
    for at in (1, 2, 3)
]  # fmt: skip
_PACKAGE = (
    "CREATE TABLE package (name VARCHAR(40) PRIMARY KEY, version INTEGER NOT NULL, status VARCHAR(40) NOT NULL,"
    " at VARCHAR(40) NOT NULL)"
)

#: App → database, its tables, topic, type, bodies
PROVED: dict[str, tuple[str, str, str, str | None, list[dict[str, Any]]]] = {
    # its third order is rejected, and its second one waits once
    "service": (
        "postgresql", _BOOKING, "orders", "order.paid",
        [_PAID[0], {**_PAID[1], "later": True}, {"id": 3, "amount": 0}],
    ),
    "delivery_platform.monolith": ("sqlite", _PACKAGE, "package.scans", None, _SCANS),
    "kafka_service": ("postgresql", _BOOKING, "orders", "order.paid", _PAID),
    "redis_service": ("postgresql", _BOOKING, "orders", "order.paid", _PAID),
    "nats_service": ("postgresql", _BOOKING, "orders.paid", "order.paid", _PAID),
    "webhook_function": (
        "postgresql", "CREATE TABLE shipment (paid_order int)", "orders", "order.paid",
        [{"order": 1, "amount": 5}, {"order": 2, "amount": 7}],
    ),
    "flask_shop": (
        "postgresql", "CREATE TABLE invoices (number int)", "invoices", None, [{"order": 1}, {"order": 2}],
    ),
}  # fmt: skip
#: Of handlers that differ in their broker alone, one is enough each time.
_SLOW = {"kafka_service", "redis_service", "nats_service", "webhook_function", "flask_shop"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in _SLOW else name for name in PROVED],
)
def test_an_example_is_proved(name: str, new_database: NewDatabase, tmp_path: Path) -> None:
    database, table, topic, kind, bodies = PROVED[name]
    url = tables(new_database(database), table)
    lines = [
        json.dumps({"id": f"m-{at}", "topic": topic, "type": kind, "key": "k", "body": body})
        for at, body in enumerate(bodies)
    ]
    (tmp_path / "messages.jsonl").write_text("\n".join(lines))
    done = subprocess.run(
        [sys.executable, "-m", "txbox", "prove", f"{name}:app", "--messages", "messages.jsonl"],
        cwd=tmp_path,
        env={
            **os.environ, "PYTHONPATH": str(EXAMPLES), "TXBOX_DATABASE_URL": url, "SCANS_DATABASE_URL": url,
        },
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"\nProved: {len(bodies)} messages" in f"\n{done.stdout}"
