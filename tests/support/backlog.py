"""Many rows that wait in the table, made on the server."""

from __future__ import annotations

from tests.support.databases import Raw
from tests.support.shop import CONSUMER, TOPIC

_COLUMNS = (
    "consumer, message_id, status, topic, {key}, received_at, next_attempt_at, payload, has_payload"
)


def fill(
    raw: Raw,
    rows: int,
    *,
    key: str | None = None,
    status: str = "pending",
    due_in_s: int = -3600,
    first: int = 0,
    consumer: str = CONSUMER,
) -> None:
    """Insert rows m0, m1, … of one state, each due a microsecond after the one before.

    Args:
        key: SQL over the row's number `n`.
        due_in_s: when the first of them is due.
        first: the number of the first row.
    """
    key = key or "NULL"
    last = first + rows - 1
    match raw.product:
        case "postgresql":
            columns = _COLUMNS.format(key="key")
            numbers = (
                f"SELECT n, now() + interval '{due_in_s} seconds' + n * interval '1 microsecond' AS at"
                f" FROM generate_series({first}, {last}) AS n"
            )
            name, payload = "'m' || n", "'{}'::bytea"
        case "mysql":
            columns = _COLUMNS.format(key="`key`")
            tens = "(SELECT 0 AS d UNION SELECT 1 UNION SELECT 2 UNION SELECT 3 UNION SELECT 4 UNION SELECT 5"
            tens += " UNION SELECT 6 UNION SELECT 7 UNION SELECT 8 UNION SELECT 9)"
            digits = len(str(max(rows - 1, 1)))
            number = " + ".join(f"d{place}.d * {10**place}" for place in range(digits))
            tables = " CROSS JOIN ".join(f"{tens} AS d{place}" for place in range(digits))
            numbers = (
                f"SELECT n, UTC_TIMESTAMP(6) + INTERVAL {due_in_s} SECOND + INTERVAL n MICROSECOND AS at"
                f" FROM (SELECT {first} + {number} AS n FROM {tables}) AS every WHERE n <= {last} ORDER BY n"
            )
            name, payload = "CONCAT('m', n)", "'{}'"
        case _:
            columns = _COLUMNS.format(key="key")
            # as strings of the same length, so that they sort as times do
            numbers = (
                f"SELECT n, strftime('%Y-%m-%d %H:%M:%S', 'now', '{due_in_s} seconds') || printf('.%09d', n)"
                " AS at"
                f" FROM (WITH RECURSIVE count(n) AS (SELECT {first} UNION ALL SELECT n + 1 FROM count WHERE n < {last})"
                " SELECT n FROM count)"
            )
            name, payload = "'m' || n", "x'7b7d'"
    raw.execute(
        f"INSERT INTO txbox_inbox ({columns}) SELECT '{consumer}', {name}, '{status}', '{TOPIC}', {key}, at, at,"
        f" {payload}, {'1' if raw.product == 'sqlite' else 'TRUE'} FROM ({numbers}) AS own ORDER BY n"
    )
