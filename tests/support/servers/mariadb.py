"""A MariaDB server of our own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pymysql

from tests.support.servers import ServerError, programs
from tests.support.servers.process import ServerProcess

PASSWORD = "txbox"
_PATH = "/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin:/usr/libexec"


def binary() -> str | None:
    return shutil.which("mariadbd", path=programs("mariadb", _PATH))


def _base() -> list[str]:
    """Where another release than the installed one has its files: beside its programs."""
    directory, _, _ = programs("mariadb", "").partition(os.pathsep)
    return [f"--basedir={Path(directory).parent}"] if directory else []


class MariaDBServer(ServerProcess):
    preferred_port = 23306
    in_memory = True
    accounts = ("mysql",)
    not_ready = (pymysql.Error,)

    @property
    def url(self) -> str:
        return f"mysql://root:{PASSWORD}@127.0.0.1:{self.port}/mysql"

    @property
    def data(self) -> Path:
        return self.directory / "data"

    def initialise(self) -> None:
        installer = shutil.which("mariadb-install-db", path=programs("mariadb", _PATH))
        if installer is None:
            raise ServerError("MariaDB is not installed; run `python -m tests.support.servers up`")
        (self.directory / "init.sql").write_text(
            f"CREATE USER IF NOT EXISTS root@'127.0.0.1' IDENTIFIED BY '{PASSWORD}';\n"
            f"ALTER USER root@'127.0.0.1' IDENTIFIED BY '{PASSWORD}';\n"
            "GRANT ALL ON *.* TO root@'127.0.0.1' WITH GRANT OPTION;\n"
        )
        self.run(
            installer,
            "--no-defaults",
            *_base(),
            f"--datadir={self.data}",
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
            "--skip-name-resolve",
            "--innodb-log-file-size=32M",
        )

    def settings(self) -> dict[str, object]:
        settings: dict[str, object] = {
            "datadir": self.data,
            "socket": self.directory / "socket",
            "pid-file": self.directory / "mariadbd.pid",
            "init-file": self.directory / "init.sql",
            "port": self.port,
            "bind-address": "127.0.0.1",
            "max-connections": 300,
            "innodb-log-file-size": "32M",
            "character-set-server": "utf8mb4",
        }
        if not self.durable:
            settings["innodb-flush-log-at-trx-commit"] = 2
        return settings

    def command(self) -> Sequence[str | Path]:
        mariadbd = binary()
        if mariadbd is None:
            raise ServerError("MariaDB is not installed; run `python -m tests.support.servers up`")
        flags = [f"--{name}={value}" for name, value in self.settings().items()]
        return [mariadbd, "--no-defaults", *_base(), "--skip-name-resolve", *flags]

    def ping(self) -> str:
        connection = pymysql.connect(
            host="127.0.0.1", port=self.port, user="root", password=PASSWORD, connect_timeout=5
        )
        with connection, connection.cursor() as cursor:
            cursor.execute("SELECT version()")
            (version,) = cursor.fetchone() or ("?",)
        return f"MariaDB {version.partition('-')[0]}"
