"""What both sides left in their databases, compared with what a clean service would have charged."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from txbox.demo.business import Stream
from txbox.demo.service import CONSUMER


@dataclass(frozen=True, slots=True)
class Verdict:
    """One side's books."""

    customers_charged_too_much: int
    customers_charged_too_little: int
    amount_too_much: int
    amount_too_little: int
    payments_doubled: int
    payments_doubled_by_crashes: int
    payments_lost: int
    receipts_lost: int
    receipts_doubled: int

    @property
    def right(self) -> bool:
        return not any(asdict(self).values())


def connect(database: Path) -> sqlite3.Connection:
    """Open a side's database to look at it."""
    connection = sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)
    connection.execute("PRAGMA busy_timeout = 10000")
    return connection


def judge(database: Path, stream: Stream, receipts: Iterable[str]) -> Verdict:
    """Compare balances, payments and the receipts that reached their consumer with the stream."""
    sent = Counter(receipts)
    with closing(connect(database)) as connection:
        charged = dict(connection.execute("SELECT customer, charged FROM account"))
        booked = Counter(dict(connection.execute("SELECT id, count(*) FROM payment GROUP BY id")))
    expected = stream.expected
    off = {customer: charged[customer] - expected[customer] for customer in charged}
    delivered = Counter(own.id for own in stream.deliveries)
    return Verdict(
        customers_charged_too_much=sum(1 for own in off.values() if own > 0),
        customers_charged_too_little=sum(1 for own in off.values() if own < 0),
        amount_too_much=sum(own for own in off.values() if own > 0),
        amount_too_little=-sum(own for own in off.values() if own < 0),
        payments_doubled=sum(1 for count in booked.values() if count > 1),
        # booked more often than it was sent: only a crash can have done that
        payments_doubled_by_crashes=sum(
            1 for own, count in booked.items() if count > delivered[own]
        ),
        payments_lost=sum(1 for own in stream.payments if own not in booked),
        receipts_lost=sum(1 for own in booked if own not in sent),
        receipts_doubled=sum(1 for count in sent.values() if count > 1),
    )


def rows(database: Path) -> Mapping[str, Any]:
    """The state of inbox and outbox: payments by status, what is on its way behind them, dead letters."""
    with closing(connect(database)) as connection:
        by_status = dict(
            connection.execute(
                "SELECT status, count(*) FROM txbox_inbox WHERE consumer = ? GROUP BY status",
                (CONSUMER,),
            )
        )
        ((behind,),) = connection.execute(
            "SELECT (SELECT count(*) FROM txbox_outbox) + (SELECT count(*) FROM txbox_inbox "
            "WHERE consumer <> ? AND status <> 'processed')",
            (CONSUMER,),
        )
        ((attempts,),) = connection.execute(
            "SELECT count(*) FROM txbox_attempt WHERE status = 'failed'"
        )
        dead = [
            row[0]
            for row in connection.execute("SELECT message_id FROM txbox_dead_letters ORDER BY 1")
        ]
    unfinished = sum(by_status.get(name, 0) for name in ("pending", "processing", "failed"))
    return {
        "processed": by_status.get("processed", 0),
        "unfinished": unfinished,
        "behind": behind,
        "attempts": attempts,
        "dead": dead,
    }
