"""A partitioned inbox that is forty days old, and ids of any time."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.support.databases import NewDatabase, Raw
from tests.support.shop import Shop, opened
from txbox import Retention
from txbox.maintenance import pruning
from txbox.store import schema as tables
from txbox.store.dialect import dialect
from txbox.store.partitions import Kind, Partitioning

DAY = timedelta(days=1)
AGE_DAYS = 40

_numbers = itertools.count(1)
_LETTERS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def uuid7(at: datetime, number: int | None = None) -> str:
    """A UUIDv7 of a millisecond; the same number gives the same id."""
    number = next(_numbers) if number is None else number
    ms = int(at.timestamp() * 1000)
    return str(uuid.UUID(int=(ms << 80) | (7 << 76) | (2 << 62) | number))


def ulid(at: datetime, number: int | None = None) -> str:
    """A ULID of a millisecond."""
    number = next(_numbers) if number is None else number
    value = (int(at.timestamp() * 1000) << 80) | number
    return "".join(_LETTERS[(value >> (5 * place)) & 31] for place in reversed(range(26)))


ID_OF: dict[str, Callable[..., str]] = {"uuid7": uuid7, "ulid": ulid}


def midnight(days: int = 0) -> datetime:
    """The beginning of today, or of a day before or behind it."""
    now = datetime.now(UTC)
    return now.replace(hour=0, minute=0, second=0, microsecond=0) + days * DAY


def aged(url: str, kind: Kind) -> str:
    """Apply the schema as it would have been applied forty days ago, and made ahead of then on."""
    text = tables.migration_text(
        dialect("postgresql"), None, partitioning=Partitioning(kind, ahead=1)
    )
    schema, block, made = text.rpartition("DO $partition$")
    made = made.replace("clock_timestamp()", f"(now() - interval '{AGE_DAYS} days')")
    with Raw(url) as raw:
        for statement in tables.split(schema + block + made):
            raw.execute(statement)
        for number in range(-AGE_DAYS, 3):
            raw.rows(
                "SELECT txbox_partition_make(?::timestamptz, ?::timestamptz, 0)",
                (midnight(number), midnight(number + 1)),
            )
    return url


@pytest.fixture(params=["uuid7", "ulid"])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def timed(kind: Kind, new_database: NewDatabase, without_rest: None) -> Iterator[Shop]:
    """A shop whose inbox is partitioned by the time in its ids, with a week of retention."""
    url = aged(new_database("postgresql", schema=False), kind)
    with opened(url, retention=Retention(processed=7 * DAY, ahead=2, batch=50)) as shop:
        yield shop


@pytest.fixture
def of_uuid7(new_database: NewDatabase, without_rest: None) -> Iterator[Shop]:
    url = aged(new_database("postgresql", schema=False), "uuid7")
    with opened(url, retention=Retention(processed=7 * DAY, ahead=2, batch=50)) as shop:
        yield shop


@pytest.fixture
def without_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty partitions that are dropped one after another, as tests have them, would rest half a minute."""
    monkeypatch.setattr(pruning, "DETACH_PAUSE_MAX_S", 0.0)


def place(raw: Raw, message_id: str) -> set[str]:
    """The partitions in which rows of an id are."""
    return {
        str(name).removeprefix("txbox_inbox_")
        for (name,) in raw.rows(
            "SELECT tableoid::regclass::text FROM txbox_inbox WHERE message_id = ?", (message_id,)
        )
    }


def day_parts(raw: Raw) -> list[str]:
    """The partitions of a day each."""
    return [
        str(name)
        for (name,) in raw.rows(
            "SELECT relname FROM pg_class WHERE relispartition AND relkind = 'r'"
            " AND relname ~ '^txbox_inbox_[a-z0-9]+_[0-9]{8}' ORDER BY 1"
        )
    ]


def finished_at(raw: Raw, moment: datetime, where: str = "true") -> None:
    raw.execute(f"UPDATE txbox_inbox SET processed_at = '{moment.isoformat()}' WHERE {where}")
