"""`--partition`, what `status` says of size and partitions, and `maintain` outside of its window."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from tests.support.command import Command
from tests.support.databases import FreshDatabase, NewDatabase
from tests.support.partitions import midnight
from txbox.store.schema import split

_PARTS = (
    "SELECT relname, pg_get_expr(relpartbound, oid), reloptions FROM pg_class"
    " WHERE relispartition AND relkind = 'r' ORDER BY 1"
)


@pytest.mark.parametrize("kind", ["uuid7", "ulid", "hash"])
def test_what_is_printed_makes_the_partitions_of_init(
    command: Command, new_database: NewDatabase, raw: Any, kind: str
) -> None:
    url, pasted = new_database("postgresql", schema=False), new_database("postgresql", schema=False)
    command("init", "--partition", kind, "--database", url)
    sql = command("schema", "print", "--partition", kind, "--dialect", "postgresql").out
    view = raw(pasted)
    for statement in split(sql):
        view.execute(statement)
    assert view.rows(_PARTS) == raw(url).rows(_PARTS)
    assert len(view.rows(_PARTS)) == (16 if kind == "hash" else 11)
    assert command("schema", "check", "--database", pasted, "--json").json["usable"]
    status = command("status", "--database", url, "--json").json
    assert status["partitions"]["kind"] == kind
    assert f"({kind})" in command("status", "--database", url).out
    refused = command(
        "init", "--partition", "hash" if kind != "hash" else "ulid", "--database", url, code=2
    )
    assert f"partitioned for {kind}" in refused.sentence


def test_partitions_are_of_postgresql(command: Command, sqlite_url: str) -> None:
    assert (
        "on PostgreSQL"
        in command("init", "--partition", "hash", "--database", sqlite_url, code=2).sentence
    )
    for name in ("mysql", "sqlite"):
        refused = command("schema", "print", "--partition", "uuid7", "--dialect", name, code=2)
        assert "on PostgreSQL" in refused.sentence


def test_sizes_are_told_where_they_are_known(command: Command, database: FreshDatabase) -> None:
    tables = {
        table["table"]: table
        for table in command("status", "--database", database.url, "--json").json["tables"]
    }
    if database.kind.dialect == "sqlite":
        assert tables["database file"]["table_bytes"] > 4096
        assert tables["database file"]["index_bytes"] is None
        return
    assert {"txbox_inbox", "txbox_outbox", "txbox_schema"} <= tables.keys()
    assert tables["txbox_inbox"]["index_bytes"] > 0
    assert tables["txbox_inbox"]["partitions"] == 1


def test_partitions_that_are_missing_are_complained_of(
    command: Command, new_database: NewDatabase, raw: Any
) -> None:
    url = new_database("postgresql", schema=False)
    command("init", "--partition", "ulid", "--database", url)
    for name, bound, _ in raw(url).rows(_PARTS):
        if "DEFAULT" not in bound and "VALUE" not in bound.replace("FOR VALUES", ""):
            raw(url).execute(f"DROP TABLE {name}")
    assert "go to the default partition" in command("status", "--database", url).out
    jobs = {
        job["job"]: job
        for job in command("maintain", "--once", "--database", url, "--json").json["jobs"]
    }
    assert jobs["partitions"]["rows"] == 8
    assert f"made until {midnight(8):%Y-%m-%d}" in command("status", "--database", url).out


_WINDOWED = """
from datetime import time
from txbox import App, Retention
app = App("{url}", retention=Retention(window=(time({begins}), time({ends}))))
"""


def test_maintain_says_that_it_is_outside_of_its_window(
    command: Command, database_url: str
) -> None:
    hour = datetime.now(UTC).hour
    command.file(
        "shop.py",
        _WINDOWED.format(url=database_url, begins=(hour + 2) % 24, ends=(hour + 3) % 24),
    )
    lines = command("maintain", "--once", "--app", "shop:app").out.splitlines()
    closed = [line.split()[0] for line in lines if "outside of its window" in line]
    assert closed == ["prune", "prune-outbox"]
    assert "0 messages deleted" in command("prune", "--app", "shop:app").out
