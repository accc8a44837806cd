"""The databases of a chaos run: servers of its own, the ways to them, and what can be done to them."""

from __future__ import annotations

import itertools
import os
import shutil
import sqlite3
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

import pymysql

from tests.support.databases import Raw
from tests.support.proxy import Proxy
from tests.support.servers.clusters import ThrowawayGalera
from tests.support.servers.control import ThrowawayMariaDB, ThrowawayMySQL, ThrowawayPostgres
from tests.support.servers.postgresql import PASSWORD, PgBouncerServer, pgbouncer_binary
from tests.support.servers.process import ServerProcess, throwaway_name
from tests.support.waiting import eventually

_DISK = "size=2g,mode=700"
_NAME = "chaos"


class Disk:
    """A small file system of its own; without the right to mount one, a directory that never fills up."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)
        mount = shutil.which("mount")
        command = [mount or "", "-t", "tmpfs", "-o", _DISK, "tmpfs", str(directory)]
        self.small = (
            bool(mount) and not subprocess.run(command, check=False, capture_output=True).returncode
        )

    def fill(self) -> None:
        with self._ballast.open("wb", buffering=0) as ballast:
            for size in (1 << 20, 1 << 12):
                try:
                    while ballast.write(bytes(size)):
                        pass
                except OSError:
                    continue

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)

    @property
    def _ballast(self) -> Path:
        return self.directory / "ballast"

    def close(self) -> None:
        if self.small:
            subprocess.run(["umount", "--lazy", self.directory], check=False, capture_output=True)


class Database(ABC):
    """One database of a run. Its processes reach it by several ways; `raw` goes past all of them."""

    name: str
    proxy: Proxy | None = None
    #: It runs in a server that can be stopped.
    served = True
    standby: Any = None

    def __init__(self) -> None:
        self.stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self.open()
        except BaseException:
            self.stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stack.close()

    @abstractmethod
    def open(self) -> None: ...

    @abstractmethod
    def url(self, way: int) -> str:
        """The URL of a way to it, by number."""

    @abstractmethod
    def raw(self) -> Raw: ...

    @abstractmethod
    def version(self) -> str: ...

    @property
    def disk(self) -> Disk | None:
        """The small disk that it alone writes to."""
        return None

    def stop(self) -> None:
        """End the server as a crash does."""
        raise NotImplementedError

    def start(self) -> None:
        """Start it again, unless it runs."""
        raise NotImplementedError

    def heal(self) -> None:
        """Start whatever does not run."""
        self.start()

    def sessions(self, raw: Raw, *, idle: bool = False) -> Sequence[int]:
        """The sessions of the run's processes."""
        raise NotImplementedError

    def end_session(self, raw: Raw, session: int) -> None:
        raise NotImplementedError

    def read_only(self, raw: Raw, *, on: bool) -> None:
        raise NotImplementedError


class _OnDisk(ServerProcess):
    """A server whose data is on a small disk."""

    disk: Disk | None = None

    def _mount(self, directory: Path) -> None:
        if self.disk is None:
            self.disk = Disk(directory)
            account = self._account()
            if account is not None:
                os.chown(directory, account.pw_uid, account.pw_gid)
            directory.chmod(0o700)


class PostgresNode(_OnDisk, ThrowawayPostgres):
    """One of two: the first, or a copy of the other that follows it."""

    #: The URL of the one that it follows.
    follows: str | None = None

    def initialise(self) -> None:
        self._mount(self._data)
        if self.follows is None:
            super().initialise()
            return
        self.run(
            self._bin / "pg_basebackup",
            "--pgdata", self._data, "--write-recovery-conf", "--wal-method=stream", "--checkpoint=fast",
            "--no-sync", f"--dbname={self.follows}",
        )  # fmt: skip

    def command(self) -> Sequence[str | Path]:
        return [
            *super().command(), "--max_wal_size=192MB", "--min_wal_size=64MB", "--deadlock_timeout=200ms",
            "--wal_keep_size=64MB",
        ]  # fmt: skip

    def follow(self, primary: str) -> None:
        """Become a copy of the one at this URL, whatever is here."""
        self.stop(immediate=True)
        self.follows = primary
        for path in self._data.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        self.initialise()
        self.start()


class PostgreSQL(Database):
    """A primary with a synchronous standby: through a proxy, through PgBouncer, or by the addresses of both."""

    name = "postgresql"

    def open(self) -> None:
        self.primary, self.standby = PostgresNode(), PostgresNode()
        for node in (self.primary, self.standby):
            self.stack.callback(node.remove)
        self.primary.start()
        self.standby.follows = self.primary.url
        self.standby.start()
        with Raw(self.primary.url) as raw:
            raw.execute(f"CREATE DATABASE {_NAME}")
        self.synchronous(on=True)
        self.proxy = self.stack.enter_context(Proxy(self.primary.url))
        self._pooler: PgBouncerServer | None = None
        if pgbouncer_binary() is not None:
            self._pooler = PgBouncerServer(throwaway_name("pgbouncer", 1), self.proxy.url)
            self.stack.callback(self._pooler.remove)
            self._pooler.start()

    @property
    def disk(self) -> Disk | None:
        return self.primary.disk

    def url(self, way: int) -> str:
        both = ",".join(f"127.0.0.1:{node.port}" for node in (self.primary, self.standby))
        assert self.proxy is not None
        ways = [
            _database(self.proxy.url),
            f"postgresql://txbox:{PASSWORD}@{both}/{_NAME}?target_session_attrs=read-write",
            f"{_database(self._pooler.url)}?prepare=off"
            if self._pooler
            else _database(self.proxy.url),
        ]
        return ways[way % len(ways)]

    def raw(self) -> Raw:
        return Raw(f"{_database(self.primary.url)}?application_name=harness")

    def version(self) -> str:
        return self.primary.ping()

    def stop(self) -> None:
        self.primary.stop(immediate=True)

    def start(self) -> None:
        self.primary.start()

    def heal(self) -> None:
        self.primary.start()
        self.standby.start()

    def sessions(self, raw: Raw, *, idle: bool = False) -> Sequence[int]:
        state = "state = 'idle'" if idle else "true"
        return [
            pid
            for (pid,) in raw.rows(
                f"SELECT pid FROM pg_stat_activity WHERE datname = '{_NAME}' AND {state}"
                " AND application_name <> 'harness' AND backend_type = 'client backend' ORDER BY pid"
            )
        ]

    def end_session(self, raw: Raw, session: int) -> None:
        raw.rows("SELECT pg_terminate_backend(?)", (session,))

    def read_only(self, raw: Raw, *, on: bool) -> None:
        raw.execute(f"ALTER SYSTEM SET default_transaction_read_only = {'on' if on else 'off'}")
        raw.rows("SELECT pg_reload_conf()")

    def synchronous(self, *, on: bool) -> None:
        """Commits wait for the standby; returns once it follows."""
        with Raw(self.primary.url) as raw:
            raw.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{'*' if on else ''}'")
            raw.rows("SELECT pg_reload_conf()")
            if on:
                eventually(
                    lambda: raw.rows("SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"),
                    "a synchronous standby",
                )

    def promote(self) -> None:
        """The primary dies, the standby takes over, and the dead one is made anew as a copy of it."""
        assert self.proxy is not None
        self.primary.stop(immediate=True)
        self.primary, self.standby = self.standby, self.primary
        with Raw(self.primary.url) as raw:
            # the other one is not there yet, and nothing else is promoted before it follows
            raw.execute("ALTER SYSTEM SET synchronous_standby_names = ''")
            raw.rows("SELECT pg_promote(true, 60), pg_reload_conf()")
        self.proxy.lead_to(self.primary.url)
        self.standby.follow(self.primary.url)
        self.synchronous(on=True)


class _MySQLNode(_OnDisk, ThrowawayMySQL):
    def initialise(self) -> None:
        self._mount(self.data)
        super().initialise()


class _MariaDBNode(_OnDisk, ThrowawayMariaDB):
    def initialise(self) -> None:
        self._mount(self.data)
        super().initialise()


class MySQL(Database):
    """One server, directly or through a proxy, with a user whom `read_only` stops."""

    name = "mysql"
    node: ClassVar[type[Any]] = _MySQLNode

    def open(self) -> None:
        self.server = self.node()
        self.stack.callback(self.server.remove)
        self.server.start()
        with Raw(self.server.url) as raw:
            self._prepare(raw)
        self.proxy = self.stack.enter_context(Proxy(self._app_of(self.server.port)))

    def _prepare(self, raw: Raw) -> None:
        raw.execute(f"CREATE DATABASE {_NAME} CHARACTER SET utf8mb4")
        raw.execute(f"CREATE USER app@'127.0.0.1' IDENTIFIED BY '{PASSWORD}'")
        raw.execute(f"GRANT ALL ON {_NAME}.* TO app@'127.0.0.1'")

    @property
    def disk(self) -> Disk | None:
        disk: Disk | None = self.server.disk
        return disk

    def _app_of(self, port: int) -> str:
        return f"mysql://app:{PASSWORD}@127.0.0.1:{port}/{_NAME}"

    def url(self, way: int) -> str:
        assert self.proxy is not None
        return self._app_of(self.server.port) if way % 2 else self.proxy.url

    def raw(self) -> Raw:
        return Raw(_database(self.server.url))

    def version(self) -> str:
        return str(self.server.ping())

    def stop(self) -> None:
        self.server.stop(immediate=True)

    def start(self) -> None:
        self.server.start()

    def sessions(self, raw: Raw, *, idle: bool = False) -> Sequence[int]:
        state = "command = 'Sleep'" if idle else "true"
        return [
            number
            for (number,) in raw.rows(
                f"SELECT id FROM information_schema.processlist WHERE user = 'app' AND {state} ORDER BY id"
            )
        ]

    def end_session(self, raw: Raw, session: int) -> None:
        raw.execute(f"KILL {int(session)}")

    def read_only(self, raw: Raw, *, on: bool) -> None:
        raw.execute(f"SET GLOBAL read_only = {int(on)}")


class MariaDB(MySQL):
    name = "mariadb"
    node: ClassVar[type[Any]] = _MariaDBNode


class Galera(MySQL):
    """Three nodes of MariaDB that all take writes; each process names all of them, and another one first."""

    name = "galera"

    def open(self) -> None:
        self._cluster = self.stack.enter_context(ThrowawayGalera())
        self._down = itertools.cycle(self._cluster.nodes)
        with Raw(self._cluster.node(1).url) as raw:
            self._prepare(raw)
        self.proxy = self.stack.enter_context(Proxy(self._app_of(self._cluster.node(1).port)))

    @property
    def disk(self) -> Disk | None:
        return None

    def url(self, way: int) -> str:
        assert self.proxy is not None
        nodes = self._cluster.nodes
        ports = [urlsplit(self.proxy.url).port, *(node.port for node in nodes[1:])]
        first = way % len(ports)
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports[first:] + ports[:first])
        return f"mysql://app:{PASSWORD}@{hosts}/{_NAME}"

    def raw(self) -> Raw:
        for node in self._cluster.nodes:
            try:
                raw = Raw(_database(node.url))
            except pymysql.Error:
                continue
            try:
                # a node may be behind the others
                raw.execute("SET SESSION wsrep_sync_wait = 1")
                raw.value("SELECT 1")
            except pymysql.Error:
                raw.__exit__(None, None, None)
            else:
                return raw
        raise ConnectionError("no node answers")

    def version(self) -> str:
        return f"Galera, 3 x {self._cluster.node(1).ping()}"

    def stop(self) -> None:
        """End one node; the others go on."""
        next(self._down).stop(immediate=True)

    def start(self) -> None:
        for node in self._cluster.nodes:
            node.start()

    def read_only(self, raw: Raw, *, on: bool) -> None:
        """One node is; none is afterwards, whichever it was."""
        if on:
            super().read_only(raw, on=True)
            return
        for node in self._cluster.nodes:
            node.query("SET GLOBAL read_only = 0")


class SQLite(Database):
    """A file, on a disk of its own."""

    name = "sqlite"
    served = False

    def open(self) -> None:
        directory = Path(tempfile.mkdtemp(prefix="txbox-chaos-", dir="/var/tmp"))
        self.stack.callback(shutil.rmtree, directory, ignore_errors=True)
        self._disk = Disk(directory / "disk")
        self.stack.callback(self._disk.close)

    @property
    def disk(self) -> Disk | None:
        return self._disk

    def url(self, way: int) -> str:
        del way
        return f"sqlite:///{self._disk.directory}/{_NAME}.db"

    def raw(self) -> Raw:
        return Raw(self.url(0))

    def start(self) -> None:
        """Nothing had to stop."""

    def version(self) -> str:
        return f"SQLite {sqlite3.sqlite_version}"


def _database(url: str) -> str:
    return urlsplit(url)._replace(path=f"/{_NAME}").geturl()


DATABASES: Mapping[str, type[Database]] = {
    kind.name: kind for kind in (PostgreSQL, MySQL, MariaDB, Galera, SQLite)
}
