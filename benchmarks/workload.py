"""Workload W1, "order paid": what is consumed, what a handler does with it, and whether it came out right."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

ACCOUNTS = 1_000
PAYLOAD_BYTES = 200
DUPLICATES = 0.10


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a broker's client hands over: an id and bytes."""

    id: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Work:
    """Deliveries in order, and what must be in the database once all are consumed."""

    deliveries: Sequence[Delivery]
    distinct: int
    total: int


@dataclass(frozen=True, slots=True)
class Verified:
    """What a run left behind, compared with what it should have; a good run has zeros only."""

    lost: int
    doubled: int
    balance_off_by: int
    inbox_off_by: int

    @property
    def good(self) -> bool:
        return not (self.lost or self.doubled or self.balance_off_by or self.inbox_off_by)


def order_paid(messages: int, *, seed: int) -> Work:
    """Build the workload.

    Args:
        messages: distinct messages; a tenth as many duplicates are interleaved, each between one
            and fifty deliveries behind its original.
    """
    draw = random.Random(seed)
    distinct: list[Delivery] = []
    total = 0
    for number in range(messages):
        amount = draw.randint(1, 500)
        total += amount
        body = {
            "order": number,
            "account": draw.randrange(ACCOUNTS),
            "amount": amount,
            "currency": "EUR",
            "note": "",
        }
        body["note"] = "x" * (PAYLOAD_BYTES - len(json.dumps(body)))
        # time-ordered ids, as producers that care for their consumers' indexes send them
        own_id = str(uuid.UUID(int=(number << 64) | draw.getrandbits(62)))
        distinct.append(Delivery(own_id, json.dumps(body).encode()))
    placed: list[tuple[float, Delivery]] = [
        (float(place), delivery) for place, delivery in enumerate(distinct)
    ]
    again = draw.sample(range(messages), int(messages * DUPLICATES))
    placed.extend((place + draw.uniform(1.0, 50.0), distinct[place]) for place in again)
    placed.sort(key=lambda entry: entry[0])
    return Work([delivery for _, delivery in placed], messages, total)


def take_payment(body: Mapping[str, Any], tx: psycopg.Connection[Any]) -> None:
    """The handler of every contender: one UPDATE and one INSERT through psycopg's own API."""
    tx.execute(
        "UPDATE account SET balance = balance + %s WHERE id = %s", (body["amount"], body["account"])
    )
    tx.execute(
        "INSERT INTO orders (number, account, amount) VALUES (%s, %s, %s)",
        (body["order"], body["account"], body["amount"]),
    )


def create_tables(connection: psycopg.Connection[Any]) -> None:
    """Make the business tables anew, in an autocommit connection."""
    connection.execute("DROP TABLE IF EXISTS account, orders")
    connection.execute(
        "CREATE TABLE account (id int PRIMARY KEY, balance bigint NOT NULL DEFAULT 0)"
    )
    # no unique key on the order: a doubled effect must be visible, not refused
    connection.execute(
        "CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
        "number bigint NOT NULL, account int NOT NULL, amount int NOT NULL)"
    )
    connection.execute("INSERT INTO account (id) SELECT generate_series(0, %s - 1)", (ACCOUNTS,))


def verify(connection: psycopg.Connection[Any], work: Work, inbox: str) -> Verified:
    """Compare the tables with the workload.

    Args:
        inbox: a query that counts the inbox rows of this contender.
    """
    row = connection.execute(
        "SELECT count(DISTINCT number), count(*), (SELECT sum(balance) FROM account) FROM orders"
    ).fetchone()
    assert row is not None
    numbers, rows, balance = row
    counted = connection.execute(inbox.encode()).fetchone()
    assert counted is not None
    return Verified(
        lost=work.distinct - numbers,
        doubled=rows - numbers,
        balance_off_by=int(balance) - work.total,
        inbox_off_by=counted[0] - work.distinct,
    )
