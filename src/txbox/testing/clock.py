"""Stop the database's clock: the test decides what is due, leased or too old."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import patch

from txbox.errors import ConfigurationError
from txbox.session import Statement
from txbox.store.dialect import Dialect

# how each dialect asks for the time, and how it writes one
_NOW = {
    "postgresql": (
        re.compile(r"\b(?:clock_timestamp|statement_timestamp|now)\(\)"),
        "timestamptz '{}+00'",
    ),
    "mysql": (re.compile(r"\bUTC_TIMESTAMP\(6\)"), "TIMESTAMP'{}'"),
    "sqlite": (re.compile(r"'now'"), "'{}'"),
}


class Clock:
    """A time that stands still.

    Attributes:
        now: aware, in whole milliseconds.
    """

    def __init__(self, at: datetime) -> None:
        if at.tzinfo is None:
            raise ConfigurationError(f"{at!r} has no time zone: give datetime(…, tzinfo=UTC).")
        self.now = at.replace(microsecond=at.microsecond // 1000 * 1000)

    def advance(self, by: timedelta) -> None:
        """Move it forward, as if that much time had passed."""
        self.now += by

    def __call__(self, dialect: Dialect, statement: Statement) -> Statement:
        asks, writes = _NOW[dialect.name]
        at = self.now.astimezone(UTC).isoformat(" ", "milliseconds").removesuffix("+00:00")
        return statement._replace(sql=asks.sub(writes.format(at), statement.sql))


@contextmanager
def frozen_clock(at: datetime | None = None) -> Generator[Clock]:
    """Stop the clock by which txbox's statements in this process find what is due; `drain` then takes that and no more.

    Back-off, delays, leases and ages are compared with it. Columns that only record a moment, as received_at,
    staged_at and processed_at do, may keep the server's time, and so do your own statements: start from now, and
    advance.

    Args:
        at: by default this machine's time.
    """
    clock = Clock(at or datetime.now(UTC))
    statement = Dialect.statement

    def at_that_time(dialect: Dialect, *args: Any, **kwargs: Any) -> Statement:
        return clock(dialect, statement(dialect, *args, **kwargs))

    with patch.object(Dialect, "statement", at_that_time):
        yield clock
