"""Where the peers run: the durable server, or one of our own that allows logical replication; Redis for FastStream."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
from psycopg import sql

from benchmarks.servers import fresh_database
from tests.support.servers import ServerError, provision, server_urls
from tests.support.servers.control import ThrowawayPostgres


class LogicalPostgres(ThrowawayPostgres):
    """`with LogicalPostgres() as server`: as durable as the shared one, with `wal_level = logical`."""

    def __init__(self) -> None:
        super().__init__()
        self.durable = True

    def command(self) -> Sequence[str | Path]:
        return [*super().command(), "--wal_level=logical"]


@contextmanager
def database_on(server: str | None) -> Generator[str]:
    """The URL of a new database, dropped at the end with its replication slots.

    Args:
        server: None for the durable server.
    """
    if server is None:
        with fresh_database("peer") as url:
            yield url
        return
    name = f"txbox_bench_peer_{os.getpid()}"
    quoted = sql.Identifier(name)
    with psycopg.connect(server, autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE DATABASE {} TEMPLATE template0").format(quoted))
        try:
            yield urlsplit(server)._replace(path=f"/{name}").geturl()
        finally:
            admin.execute(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots "
                "WHERE database = %s AND active_pid IS NOT NULL",
                (name,),
            )
            admin.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots "
                "WHERE database = %s",
                (name,),
            )
            admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(quoted))


def redis() -> str:
    """The URL of Redis, started where it is not running."""
    provision.up(("redis",))
    url = server_urls().get("redis")
    if url is None:
        raise ServerError(
            "P16 needs Redis for FastStream: run `python -m tests.support.servers up`."
        )
    return url
