"""Workload W1, "order paid": what is consumed, what a handler does with it, and whether it came out right."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from psycopg import Connection

from benchmarks.result import Verified
from txbox.message import Message

ACCOUNTS = 1_000
PAYLOAD_BYTES = 200
DUPLICATES = 0.10
TOPIC = "orders"
CONSUMER = "billing"

_STARTED_MS = 1_750_000_000_000
_A_MS = 10  # messages that share a millisecond

Tx = Connection[Any]
Body = Mapping[str, Any]


class Unpayable(Exception):
    """What the handler raises for an order that it was given to fail on."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a broker's client hands over: an id and bytes."""

    id: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Work:
    """Deliveries in order, and what must be in the database once all are consumed.

    Args:
        distinct: messages, those that fail included.
        total: of the amounts that are paid.
        failing: ids whose handler fails, always.
    """

    deliveries: Sequence[Delivery]
    distinct: int
    total: int
    failing: frozenset[str] = field(default_factory=frozenset[str])


def order_paid(
    messages: int, *, seed: int, duplicates: float = DUPLICATES, failing: float = 0.0
) -> Work:
    """Build the workload.

    Args:
        messages: distinct messages.
        duplicates: as many of them, as a share, come once more, between one and fifty deliveries
            behind their original.
        failing: the share whose amount is negative, which the database refuses.
    """
    draw = random.Random(seed)
    wrong = frozenset(draw.sample(range(messages), round(messages * failing)))
    distinct: list[Delivery] = []
    total = 0
    for number in range(messages):
        amount = draw.randint(1, 500)
        if number in wrong:
            amount = -amount
        else:
            total += amount
        body = {
            "order": number,
            "account": draw.randrange(ACCOUNTS),
            "amount": amount,
            "currency": "EUR",
            "note": "",
        }
        body["note"] = "x" * (PAYLOAD_BYTES - len(json.dumps(body)))
        distinct.append(Delivery(_time_ordered(number, draw), json.dumps(body).encode()))
    placed = [(float(place), delivery) for place, delivery in enumerate(distinct)]
    again = draw.sample(range(messages), int(messages * duplicates))
    placed.extend((place + draw.uniform(1.0, 50.0), distinct[place]) for place in again)
    placed.sort(key=lambda entry: entry[0])
    return Work(
        [delivery for _, delivery in placed],
        messages,
        total,
        frozenset(distinct[number].id for number in wrong),
    )


def storm(deliveries: int, *, seed: int, new: float = 0.01) -> Work:
    """The workload as a broker replays it: each message many times over, in any order.

    Args:
        new: the share of deliveries that are the first of their message.
    """
    once = order_paid(max(1, round(deliveries * new)), seed=seed, duplicates=0.0)
    draw = random.Random(seed)
    many = list(once.deliveries)
    many += draw.choices(once.deliveries, k=deliveries - len(many))
    draw.shuffle(many)
    return Work(many, once.distinct, once.total)


def _time_ordered(number: int, draw: random.Random) -> str:
    """A UUIDv7, as producers that care for their consumers' indexes send them."""
    at_ms, in_ms = divmod(number, _A_MS)
    high = (_STARTED_MS + at_ms) << 16 | 7 << 12 | in_ms
    return str(uuid.UUID(int=high << 64 | 2 << 62 | draw.getrandbits(62)))


# -- handlers ---------------------------------------------------------------------------------

_PAY = "UPDATE account SET balance = balance + %s WHERE id = %s"
_ORDER = "INSERT INTO orders (number, account, amount) VALUES (%s, %s, %s)"
_PAY_MANY = (
    "UPDATE account SET balance = balance + paid.amount FROM "
    "(SELECT id, sum(amount) AS amount FROM unnest(%s::int[], %s::bigint[]) AS one (id, amount) "
    "GROUP BY id ORDER BY id) AS paid WHERE account.id = paid.id"
)
_ORDER_MANY = (
    "INSERT INTO orders (account, amount, number) "
    "SELECT * FROM unnest(%s::int[], %s::int[], %s::bigint[])"
)


def pay(body: Body, tx: Tx) -> None:
    """One UPDATE and one INSERT through psycopg's own API, whose results nobody reads."""
    tx.execute(_PAY, (body["amount"], body["account"]))
    tx.execute(_ORDER, (body["order"], body["account"], body["amount"]))


def pay_and_read(body: Body, tx: Tx) -> None:
    """The same, but for the new balance, which is read."""
    paid = tx.execute(f"{_PAY} RETURNING balance", (body["amount"], body["account"])).fetchone()
    assert paid is not None
    tx.execute(_ORDER, (body["order"], body["account"], body["amount"]))


def pay_many(bodies: Sequence[Body], tx: Tx) -> None:
    """The same for a batch, in two statements."""
    given = (
        [body["account"] for body in bodies],
        [body["amount"] for body in bodies],
        [body["order"] for body in bodies],
    )
    tx.execute(_PAY_MANY, given[:2])
    tx.execute(_ORDER_MANY, given)


def writes(message: Message[dict[str, Any]], tx: Tx) -> None:
    pay(message.body, tx)


def reads(message: Message[dict[str, Any]], tx: Tx) -> None:
    pay_and_read(message.body, tx)


def in_sets(messages: list[Message[dict[str, Any]]], tx: Tx) -> None:
    pay_many([message.body for message in messages], tx)


def raises(message: Message[dict[str, Any]], tx: Tx) -> None:
    """As `writes`, and notices in Python, half-way, what the database would refuse."""
    body = message.body
    tx.execute(_PAY, (body["amount"], body["account"]))
    if body["amount"] < 0:
        raise Unpayable
    tx.execute(_ORDER, (body["order"], body["account"], body["amount"]))


# -- tables -----------------------------------------------------------------------------------


def create_tables(connection: Tx) -> None:
    """Make the business tables anew, in an autocommit connection."""
    connection.execute("DROP TABLE IF EXISTS account, orders")
    connection.execute(
        "CREATE TABLE account (id int PRIMARY KEY, balance bigint NOT NULL DEFAULT 0)"
    )
    # no unique key on the order: a doubled effect must be visible, not refused
    connection.execute(
        "CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
        "number bigint NOT NULL, account int NOT NULL, amount int NOT NULL CHECK (amount > 0))"
    )
    connection.execute("INSERT INTO account (id) SELECT generate_series(0, %s - 1)", (ACCOUNTS,))
    connection.execute("ANALYZE account")


def create_inbox(connection: Tx) -> None:
    """Make the inbox of a textbook loop anew; its ids are text, as those of brokers are."""
    connection.execute("DROP TABLE IF EXISTS inbox")
    connection.execute(
        "CREATE TABLE inbox (consumer text NOT NULL, message_id text NOT NULL, "
        "received_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (consumer, message_id))"
    )


def verify(connection: Tx, work: Work, inbox_off_by: int = 0) -> Verified:
    """Compare the business tables with the workload.

    Args:
        inbox_off_by: what the contender found wrong in its inbox.
    """
    row = connection.execute(
        "SELECT count(DISTINCT number), count(*), (SELECT sum(balance) FROM account) FROM orders"
    ).fetchone()
    assert row is not None
    numbers, rows, balance = row
    return Verified(
        lost=work.distinct - len(work.failing) - numbers,
        doubled=rows - numbers,
        balance_off_by=int(balance) - work.total,
        inbox_off_by=inbox_off_by,
    )
