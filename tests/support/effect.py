"""What handlers of the tests do, without what only the tests themselves need: processes start twice as fast."""

from __future__ import annotations

import sqlite3
from datetime import timedelta
from typing import Any

from txbox import RetryPolicy

CONSUMER = "billing"
TOPIC = "orders"
#: Failures are due again at once: tests wait for nothing.
AT_ONCE = RetryPolicy(max_attempts=8, base=timedelta(0))


def add_effect(tx: Any, message_id: str | int | None, note: str = "") -> None:
    """Write an effect by a plain sync driver's connection."""
    mark = "?" if isinstance(tx, sqlite3.Connection) else "%s"
    cursor = tx.cursor()
    cursor.execute(
        f"INSERT INTO effect (message_id, note) VALUES ({mark}, {mark})", (str(message_id), note)
    )
    cursor.close()
