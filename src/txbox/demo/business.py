"""The payment service of the demo: what a payment does, shared by both consumers, and the stream of payments.

Step 1 books a payment, step 2 sends a receipt for it to a second consumer.
"""

from __future__ import annotations

import json
import random
import sqlite3
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CUSTOMERS = 50
WORK_S = 0.012  # how long a payment takes: long enough for kills to hit in the middle of one

TABLES = """
CREATE TABLE account (customer INTEGER PRIMARY KEY, charged INTEGER NOT NULL DEFAULT 0);
CREATE TABLE payment (number INTEGER PRIMARY KEY, id TEXT NOT NULL, customer INTEGER NOT NULL, amount INTEGER NOT NULL);
CREATE TABLE receipt (number INTEGER PRIMARY KEY, payment TEXT NOT NULL);
"""


class CardNetworkUnavailable(Exception):
    """Some payments meet it at their first attempt."""


class UnknownCurrency(Exception):
    """The poison message meets it at every attempt."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """One delivery of a payment; duplicates share an id."""

    id: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Stream:
    """What is sent to both consumers, in order, and what a clean service would have charged."""

    deliveries: Sequence[Delivery]
    payments: Mapping[str, tuple[int, int]]  # id → customer, amount; without the poison
    poison: frozenset[str]

    @property
    def expected(self) -> Counter[int]:
        """Customer → the sum that is right."""
        charged: Counter[int] = Counter()
        for customer, amount in self.payments.values():
            charged[customer] += amount
        return charged


def build_stream(payments: int, *, duplicates: float, seed: int) -> Stream:
    """Draw a stream of payments.

    Args:
        payments: distinct ones, the poison included; 10 or more.
        duplicates: share of payments that the producer sends twice, 0 to 1.
    """
    draw = random.Random(seed)
    poison = payments // 3
    placed: list[tuple[float, Delivery]] = []
    good: dict[str, tuple[int, int]] = {}
    for number in range(payments):
        own_id, customer, amount = (
            f"pay-{number:04d}",
            draw.randrange(CUSTOMERS),
            draw.randint(5, 90),
        )
        body = {"payment": own_id, "customer": customer, "amount": amount, "currency": "EUR"}
        if number == poison:
            body["currency"] = "???"
        elif number % 40 == 7:
            body["flaky"] = True
        if number != poison:
            good[own_id] = (customer, amount)
        placed.append((number, Delivery(own_id, json.dumps(body).encode())))
    for place in draw.sample(range(payments), round(payments * duplicates)):
        placed.append((place + draw.uniform(0.5, 12.0), placed[place][1]))
    placed.sort(key=lambda entry: entry[0])
    return Stream([own for _, own in placed], good, frozenset({f"pay-{poison:04d}"}))


def create_tables(connection: sqlite3.Connection) -> None:
    """Create the business tables, every customer at zero."""
    connection.execute("PRAGMA journal_mode = WAL")
    connection.executescript(TABLES)
    connection.executemany(
        "INSERT INTO account (customer) VALUES (?)", [(own,) for own in range(CUSTOMERS)]
    )
    connection.commit()


def charge(tx: sqlite3.Connection, body: Mapping[str, Any], attempt: int) -> None:
    """Charge a customer and book the payment, in a transaction of the caller's."""
    if body["currency"] != "EUR":
        raise UnknownCurrency(f"payment in {body['currency']}")
    tx.execute(
        "UPDATE account SET charged = charged + ? WHERE customer = ?",
        (body["amount"], body["customer"]),
    )
    time.sleep(WORK_S / 2)
    if body.get("flaky") and attempt == 1:
        raise CardNetworkUnavailable("no answer")
    tx.execute(
        "INSERT INTO payment (id, customer, amount) VALUES (?, ?, ?)",
        (body["payment"], body["customer"], body["amount"]),
    )
    time.sleep(WORK_S / 2)
