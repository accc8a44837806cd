"""A PostgreSQL cluster of our own, and PgBouncer in front of one."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

import psycopg

from tests.support.servers import ServerError, programs
from tests.support.servers.process import ServerProcess

PASSWORD = "txbox"


def _cheap_secret(password: str) -> str:
    """What PostgreSQL keeps of a password, hashed once, not 4096 times: clients do it again at every connection."""
    salt = b"txbox"
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, 1)
    stored = hashlib.sha256(hmac.digest(salted, b"Client Key", "sha256")).digest()
    server = hmac.digest(salted, b"Server Key", "sha256")
    parts = [base64.b64encode(part).decode() for part in (salt, stored, server)]
    return "SCRAM-SHA-256$1:{}${}:{}".format(*parts)


def binaries() -> Path | None:
    """The directory of PostgreSQL's programs: the newest installed, unless one is given."""
    if given := programs("postgresql", ""):
        return Path(given)
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"),
        key=lambda path: int(re.sub(r"\D", "", path.parts[-3]) or 0),
    )
    if found:
        return found[-1].parent
    on_path = shutil.which("initdb")
    return Path(on_path).resolve().parent if on_path else None


def pgbouncer_binary() -> str | None:
    path = programs("pgbouncer", "/usr/sbin:/usr/local/sbin:/usr/local/bin:/usr/bin")
    return shutil.which("pgbouncer", path=path)


class PostgreSQLServer(ServerProcess):
    preferred_port = 25432
    in_memory = True
    accounts = ("postgres",)
    not_ready = (psycopg.Error,)
    stop_signal = signal.SIGINT  # "fast": does not wait for clients

    @property
    def url(self) -> str:
        return f"postgresql://txbox:{PASSWORD}@127.0.0.1:{self.port}/postgres"

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    @property
    def _bin(self) -> Path:
        found = binaries()
        if found is None:
            raise ServerError(
                "PostgreSQL is not installed; run `python -m tests.support.servers up`"
            )
        return found

    def initialise(self) -> None:
        password = self.directory / "password"
        password.write_text(_cheap_secret(PASSWORD))
        password.chmod(0o644)  # inside a directory that only the server's account may enter
        self.run(
            self._bin / "initdb",
            "--pgdata", self._data,
            "--username=txbox",
            f"--pwfile={password}",
            "--auth=scram-sha-256",
            "--encoding=UTF8",
            "--locale=C.UTF-8",
            "--no-sync",
            "--no-instructions",
        )  # fmt: skip

    def command(self) -> Sequence[str | Path]:
        settings = {
            "port": str(self.port),
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "max_connections": "300",
        }
        if not self.durable:
            settings |= {"fsync": "off", "full_page_writes": "off"}
        flags = [f"--{name}={value}" for name, value in settings.items()]
        return [self._bin / "postgres", "-D", self._data, *flags]

    def ping(self) -> str:
        with psycopg.connect(self.url, connect_timeout=5) as connection:
            major = connection.info.server_version
        return f"PostgreSQL {major // 10000}.{major % 10000}"


class PgBouncerServer(ServerProcess):
    """Transaction pooling in front of `upstream`; any database name passes through."""

    preferred_port = 26432
    accounts = ("postgres", "pgbouncer")
    not_ready = (psycopg.Error,)
    stop_signal = signal.SIGTERM

    def __init__(self, name: str, upstream: str) -> None:
        super().__init__(name)
        self._upstream = urlsplit(upstream)

    @property
    def url(self) -> str:
        return self._upstream._replace(
            netloc=f"{self._upstream.netloc.rpartition('@')[0]}@127.0.0.1:{self.port}"
        ).geturl()

    def initialise(self) -> None:
        upstream = self._upstream
        login = {
            "host": upstream.hostname or "127.0.0.1",
            "port": str(upstream.port or 5432),
            "user": unquote(upstream.username or "postgres"),
            "password": unquote(upstream.password or ""),
        }
        quoted = " ".join(f"{key}='{value}'" for key, value in login.items() if value)
        (self.directory / "pgbouncer.ini").write_text(
            f"""[databases]
* = {quoted}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {self.port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
max_client_conn = 500
default_pool_size = 20
server_idle_timeout = 5
ignore_startup_parameters = extra_float_digits,options
"""
        )

    def command(self) -> Sequence[str | Path]:
        binary = pgbouncer_binary()
        if binary is None:
            raise ServerError(
                "PgBouncer is not installed; run `python -m tests.support.servers up`"
            )
        return [binary, self.directory / "pgbouncer.ini"]

    def ping(self) -> str:
        with psycopg.connect(self.url, connect_timeout=5, prepare_threshold=None) as connection:
            connection.execute("SELECT 1")
        console = self._upstream._replace(
            scheme="postgresql", netloc=f"pgbouncer@127.0.0.1:{self.port}", path="/pgbouncer"
        ).geturl()
        with psycopg.connect(console, autocommit=True) as connection:
            version = connection.pgconn.exec_(b"SHOW VERSION").get_value(0, 0)
        return (version or b"PgBouncer").decode()
