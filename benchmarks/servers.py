"""Fresh databases on the durable server of the test environment."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from urllib.parse import urlsplit

import psycopg
from psycopg import sql

from tests.support.servers import VARIABLES, ServerError, server_urls

SERVER = "postgresql-durable"


@contextmanager
def fresh_database(purpose: str) -> Generator[str]:
    """The URL of a new database, dropped at the end.

    Raises:
        ServerError: no durable server is known, or it is not durable.
    """
    url = server_urls().get(SERVER)
    if url is None:
        raise ServerError(f"No {SERVER} server: run `make bench`, or set {VARIABLES[SERVER]}.")
    name = sql.Identifier(f"txbox_bench_{purpose}_{os.getpid()}")
    with psycopg.connect(url, autocommit=True) as admin:
        for setting in ("fsync", "synchronous_commit", "full_page_writes"):
            row = admin.execute("SELECT current_setting(%s)", (setting,)).fetchone()
            if row != ("on",):
                raise ServerError(f"The server has {setting} off: its figures would say nothing.")
        admin.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(name))
        admin.execute(sql.SQL("CREATE DATABASE {} TEMPLATE template0").format(name))
        try:
            yield urlsplit(url)._replace(path=f"/txbox_bench_{purpose}_{os.getpid()}").geturl()
        finally:
            admin.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(name))
