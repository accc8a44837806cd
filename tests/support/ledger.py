"""A service to test with: one ledger line per message, on whatever transaction object the handler gets."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from tests.support.databases import Raw
from txbox import App, Message, RetryPolicy

TABLE = "CREATE TABLE ledger (message_id varchar(99) NOT NULL, attempt integer NOT NULL)"
INSERT = "INSERT INTO ledger (message_id, attempt) VALUES (?, ?)"
LATER = RetryPolicy(max_attempts=3, base=timedelta(hours=1), factor=1.0)


def message(message_id: str, payload: bytes = b"{}") -> Message[Any]:
    return Message(id=message_id, topic="orders", payload=payload)


def book(tx: Any, taken: Message[Any]) -> None:
    """Insert the ledger line with any sync connection or session."""
    values = (taken.id, taken.attempt)
    if isinstance(tx, sa.Connection) or hasattr(tx, "begin_nested"):
        tx.execute(
            sa.text("INSERT INTO ledger (message_id, attempt) VALUES (:id, :attempt)"),
            {"id": taken.id, "attempt": taken.attempt},
        )
        return
    cursor = tx.cursor()
    qmark = type(tx).__module__.startswith("sqlite3")
    cursor.execute(INSERT if qmark else INSERT.replace("?", "%s"), values)
    cursor.close()


def service(app: App) -> App:
    """Register a handler: ids that begin with "fail" fail once, after their write; "broken" always."""

    @app.handler("orders", consumer="billing", retry=LATER)
    def take(taken: Message[Any], tx: Any) -> None:
        book(tx, taken)
        name = str(taken.id)
        if name.startswith("broken") or (name.startswith("fail") and taken.attempt == 1):
            raise ValueError("as asked")

    return app


def lines(raw: Raw) -> list[tuple[Any, ...]]:
    return raw.rows("SELECT message_id, attempt FROM ledger ORDER BY message_id, attempt")
