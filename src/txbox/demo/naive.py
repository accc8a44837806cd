"""What a payment does, and the naive consumer of payments.

A payment is booked in a SQLite database, then a receipt for it is sent to the next consumer. This module uses
nothing of txbox, so that its process, which runs this file, starts as quickly as a naive one does.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CUSTOMERS = 50
#: The environment variable that says where the databases of the demo are.
DIRECTORY = "TXBOX_DEMO_DIRECTORY"

#: The moments at which a crash does harm.
WRITTEN = "written, not yet committed"
COMMITTED = "committed, not yet acknowledged"
SENDING = "receipts are about to be sent"

# how long a payment takes: long enough for kills to hit in the middle of one
_WORK_S = 0.012
# of the naive producer; without it a crash would double more receipts, and lose fewer
_LINGER_S = 0.1
# then the naive consumer drops a message, as brokers without a dead-letter queue do
_ATTEMPTS = 3
_TABLES = """
CREATE TABLE account (customer INTEGER PRIMARY KEY, charged INTEGER NOT NULL DEFAULT 0);
CREATE TABLE payment (number INTEGER PRIMARY KEY, id TEXT NOT NULL, customer INTEGER NOT NULL, amount INTEGER NOT NULL);
CREATE TABLE receipt (number INTEGER PRIMARY KEY, payment TEXT NOT NULL);
"""


def create_tables(connection: sqlite3.Connection) -> None:
    """Create the business tables, every customer at zero."""
    connection.execute("PRAGMA journal_mode = WAL")
    connection.executescript(_TABLES)
    customers = [(customer,) for customer in range(CUSTOMERS)]
    connection.executemany("INSERT INTO account (customer) VALUES (?)", customers)
    connection.commit()


def charge(tx: sqlite3.Connection, body: Mapping[str, Any], attempt: int) -> None:
    """Charge a customer and book the payment, in the caller's transaction."""
    payment, customer, amount = body["payment"], body["customer"], body["amount"]
    if body["currency"] != "EUR":
        raise ValueError(f"payment in {body['currency']}")
    tx.execute("UPDATE account SET charged = charged + ? WHERE customer = ?", (amount, customer))
    time.sleep(_WORK_S / 2)
    if body.get("flaky") and attempt == 1:
        raise ConnectionError("the card network does not answer")
    tx.execute(
        "INSERT INTO payment (id, customer, amount) VALUES (?, ?, ?)", (payment, customer, amount)
    )
    time.sleep(_WORK_S / 2)


def die_if_asked(side: Path, moment: str) -> None:
    """Die here, by SIGKILL, if this moment stands in the file by which the supervisor asks for it."""
    try:
        wanted = side.with_suffix(".kill").read_text()
    except FileNotFoundError:
        return
    if wanted == moment:
        os.kill(os.getpid(), signal.SIGKILL)


def consume_naively(directory: str) -> None:
    """The loop of most tutorials: one transaction a message, acknowledged after its commit.

    The queue is a file, and the acknowledgement an offset in it. Without an inbox, nothing remembers what was
    processed before. Without an outbox, receipts wait in memory until the producer sends them.
    """
    side = Path(directory, "naive")
    acknowledged = side.with_suffix(".offset")
    offset = int(acknowledged.read_text()) if acknowledged.exists() else 0
    receipts: list[str] = []
    waiting_since_s = 0.0
    tx = sqlite3.connect(side.with_suffix(".db"))
    queue, sent = side.with_suffix(".queue").open("rb"), side.with_suffix(".receipts").open("a")
    while True:
        if receipts and time.monotonic() > waiting_since_s + _LINGER_S:
            die_if_asked(side, SENDING)
            sent.writelines(f"{payment}\n" for payment in receipts)
            sent.flush()
            receipts.clear()
        queue.seek(offset)
        line = queue.readline()
        if not line.endswith(b"\n"):
            time.sleep(0.01)
            continue
        body = json.loads(line)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with tx:  # commits, or rolls back on an exception
                    charge(tx, body, attempt)
                    die_if_asked(side, WRITTEN)
            except (ValueError, ConnectionError) as error:
                verb = "dropped" if attempt == _ATTEMPTS else "retry"
                sys.stderr.write(f"{verb} {body['payment']}: {error}\n")
            else:
                die_if_asked(side, COMMITTED)
                waiting_since_s = waiting_since_s if receipts else time.monotonic()
                receipts.append(body["payment"])
                break
        offset += len(line)
        partial = side.with_suffix(".new")
        partial.write_text(str(offset))
        partial.rename(acknowledged)


if __name__ == "__main__":
    consume_naively(sys.argv[1])
