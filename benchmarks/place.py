"""Where contenders keep their tables, and the gauges of the server they run on."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import psycopg
from psycopg import Connection, sql

from benchmarks.workload import Tx, create_tables
from txbox.errors import ConfigurationError

#: txbox's tables are in the first, those that it is compared with in the other.
SCHEMAS = ("txbox_bench", "txbox_bench_beside")

_MARK = "made by the benchmarks of txbox, which drop it"
_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Place:
    """A schema of a database, for the tables of contenders that take turns in it."""

    url: str

    def connect(self) -> Tx:
        return psycopg.connect(self.url, autocommit=True)

    def prepare(self) -> None:
        """Business tables anew, and every table of txbox's that messages leave rows in empty."""
        with self.connect() as admin:
            create_tables(admin)
            if admin.execute("SELECT to_regclass('txbox_inbox')").fetchone() != (None,):
                admin.execute("TRUNCATE txbox_inbox, txbox_attempt, txbox_quarantine, txbox_outbox")
            checkpoint(admin)

    def dead_tuples(self) -> int:
        """Dead rows of all tables here, as the statistics know them."""
        with self.connect() as admin:
            row = admin.execute(
                "SELECT coalesce(sum(n_dead_tup), 0)::bigint FROM pg_stat_user_tables "
                "WHERE schemaname = current_schema()"
            ).fetchone()
        assert row is not None
        return int(row[0])


def checkpoint(admin: Tx) -> None:
    """Begin from a checkpoint where the role may make one, so that no round pays for the last one's."""
    try:
        admin.execute("CHECKPOINT")
    except psycopg.errors.InsufficientPrivilege:
        return


@contextmanager
def places(url: str) -> Generator[tuple[Place, Place]]:
    """The two schemas, made at the start and dropped at the end: txbox's own, and that of all others.

    Raises:
        ConfigurationError: one of them is there, and not from here.
    """
    with psycopg.connect(url, autocommit=True) as admin:
        for name in SCHEMAS:
            refuse_foreign(admin, name)
        try:
            for name in SCHEMAS:
                admin.execute(_DROP.format(sql.Identifier(name)))
                admin.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(name)))
                admin.execute(_COMMENT.format(sql.Identifier(name), sql.Literal(_MARK)))
            place, beside = (Place(within(url, name)) for name in SCHEMAS)
            yield place, beside
        finally:
            for name in SCHEMAS:
                refuse_foreign(admin, name)
                admin.execute(_DROP.format(sql.Identifier(name)))


_DROP = sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE")
_COMMENT = sql.SQL("COMMENT ON SCHEMA {} IS {}")


def refuse_foreign(admin: Tx, name: str) -> None:
    """Raise ConfigurationError where a schema of this name was made by somebody else."""
    row = admin.execute(
        "SELECT obj_description(oid, 'pg_namespace') FROM pg_namespace WHERE nspname = %s", (name,)
    ).fetchone()
    if row is not None and row[0] != _MARK:
        raise ConfigurationError(
            f"The schema {name} exists and was not made by the benchmarks, which would drop it: "
            "rename it, or give another database."
        )


def within(url: str, schema: str) -> str:
    """The URL, for connections whose search path is this schema alone."""
    parts = urlsplit(url)
    option = f"options={quote(f'-csearch_path={schema}', safe='')}"
    return parts._replace(query=f"{parts.query}&{option}" if parts.query else option).geturl()


@dataclass(frozen=True, slots=True)
class Reading:
    """The gauges at one moment; None is what cannot be read."""

    at: float
    client_cpu_s: float
    server_cpu_s: float | None
    wal_bytes: int | None


class Gauges:
    """CPU of this process and of the server, and the WAL that the server has written.

    The server's CPU is that of every process below its postmaster, whoever they work for: measure
    on a server that nobody else uses. None unless it runs on this machine, in sight of /proc.
    """

    def __init__(self, url: str) -> None:
        self._connection: Connection[Any] = psycopg.connect(url, autocommit=True)
        self._connection.prepare_threshold = 0
        self._postmaster = _postmaster(self._connection)

    def read(self) -> Reading:
        server = None if self._postmaster is None else _family_cpu_s(self._postmaster)
        row = self._connection.execute(
            "SELECT CASE WHEN pg_is_in_recovery() THEN NULL "
            "ELSE pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint END"
        ).fetchone()
        assert row is not None
        return Reading(time.perf_counter(), time.process_time(), server, row[0])

    def close(self) -> None:
        self._connection.close()


def _postmaster(connection: Connection[Any]) -> int | None:
    backend = connection.info.backend_pid
    try:
        command = Path(f"/proc/{backend}/cmdline").read_bytes()
        parent = int(_stat(backend)[1])
    except (OSError, ValueError):
        return None
    # the number may be that of a process in another container, or on another machine
    mine = connection.info.dbname.encode()
    return parent if command.startswith(b"postgres: ") and mine in command else None


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _family_cpu_s(parent: int) -> float:
    try:
        fields = _stat(parent)
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    except OSError:
        return 0.0
    # of itself, and of children that have ended
    spent_ns = sum(int(value) for value in fields[11:15]) * _TICK_NS
    for child in children:
        try:
            # in nanoseconds, where `stat` counts hundredths of a second
            spent_ns += int(Path(f"/proc/{child}/schedstat").read_text().split()[0])
        except (OSError, IndexError):
            continue
    return spent_ns / 1e9
