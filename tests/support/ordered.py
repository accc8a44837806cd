"""What was done for each key, in a table that numbers its rows; and messages of a key."""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from tests.support.effect import TOPIC
from txbox import Message
from txbox.brokers.base import Delivery

if TYPE_CHECKING:  # a process that works needs neither
    from tests.support.databases import Raw
    from tests.support.shop import Shop

_NUMBER = {
    "sqlite": "integer PRIMARY KEY AUTOINCREMENT",
    "postgresql": "bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    "mysql": "bigint AUTO_INCREMENT PRIMARY KEY",
}


def create_steps(raw: Raw) -> None:
    raw.execute(
        f"CREATE TABLE step (number {_NUMBER[raw.product]}, name varchar(64), version integer)"
    )


def add_step(tx: Any, message: Message[Any]) -> None:
    """Note in the handler's transaction that this version of its key was done."""
    mark = "?" if isinstance(tx, sqlite3.Connection) else "%s"
    cursor = tx.cursor()
    cursor.execute(
        f"INSERT INTO step (name, version) VALUES ({mark}, {mark})",
        (message.key, message.json()["n"]),
    )
    cursor.close()


def done(raw: Raw) -> dict[str, list[int]]:
    """The versions of each key, in the order in which they were done."""
    found: dict[str, list[int]] = defaultdict(list)
    for name, version in raw.rows("SELECT name, version FROM step ORDER BY number"):
        found[str(name)].append(int(version))
    return dict(found)


def of(key: str | None, n: int, **more: Any) -> Message[Any]:
    """The n-th message of a key."""
    payload = json.dumps({"n": n, **more}).encode()
    return Message(id=f"{key}-{n}", topic=TOPIC, key=key, payload=payload)


def again(key: str | None, n: int) -> Delivery:
    return Delivery(of(key, n), TOPIC, redelivered=True)


def status_of(shop: Shop, key: str, n: int) -> str:
    return shop.row(f"{key}-{n}").status
