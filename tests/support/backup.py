"""A database that is set back under its workers, as by a failover to a replica that lags, or a restore."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from tests.support.databases import Raw
from tests.support.servers import server_urls


class Backup:
    """A copy of a PostgreSQL database, made while its workers are locked out, as a stopped server does."""

    def __init__(self, url: str) -> None:
        self._name = urlsplit(url).path.lstrip("/")
        self._admin = Raw(server_urls()["postgresql"])

    def take(self) -> None:
        with self._nobody_connected():
            self._admin.execute(f'CREATE DATABASE "{self._name}_copy" TEMPLATE "{self._name}"')

    def restore(self) -> None:
        """What was committed since the copy was taken is gone."""
        with self._nobody_connected():
            self._admin.execute(f'ALTER DATABASE "{self._name}" RENAME TO "{self._name}_lost"')
        self._admin.execute(f'ALTER DATABASE "{self._name}_copy" RENAME TO "{self._name}"')

    @contextmanager
    def _nobody_connected(self) -> Iterator[None]:
        name = self._name
        oid = self._admin.value("SELECT oid FROM pg_database WHERE datname = ?", (name,))
        self._admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
        self._admin.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datid = ?", (oid,)
        )
        yield
        name = self._admin.value("SELECT datname FROM pg_database WHERE oid = ?", (oid,))
        self._admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')

    def close(self) -> None:
        for suffix in ("copy", "lost"):
            self._admin.execute(f'DROP DATABASE IF EXISTS "{self._name}_{suffix}" WITH (FORCE)')
        self._admin.close()
