"""A MySQL server of our own: the installed one, else Debian's packages, unpacked beside the system.

No release of Debian has MySQL, its unstable does.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pymysql

from tests.support.servers import UnavailableError
from tests.support.servers.process import ServerProcess
from tests.support.servers.unpacked import Unpacked

PASSWORD = "txbox"
_PATH = "/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin:/usr/libexec"
_PACKAGE = "mysql-server-core"
_UNPACKED = Unpacked(
    _PACKAGE, "sid", [_PACKAGE], otherwise="install mysqld or set TXBOX_TEST_MYSQL_URL"
)


def fetch() -> bool:
    """Fetch MySQL, unless it is here; True when it was fetched.

    Raises:
        UnofferedError: this machine's packages do not have it.
        UnavailableError: they should have it, and it could not be fetched.
    """
    return _installed() is None and _UNPACKED.fetch()


class MySQLServer(ServerProcess):
    preferred_port = 23307
    in_memory = True
    accounts = ("mysql", "nobody")
    not_ready = (pymysql.Error,)

    @property
    def url(self) -> str:
        return f"mysql://root:{PASSWORD}@127.0.0.1:{self.port}/mysql"

    @property
    def data(self) -> Path:
        return self.directory / "data"

    def initialise(self) -> None:
        # What comes with the server as root@localhost has no password and stays on its socket.
        (self.directory / "init.sql").write_text(
            f"CREATE USER IF NOT EXISTS root@'127.0.0.1' IDENTIFIED BY '{PASSWORD}';\n"
            "GRANT ALL ON *.* TO root@'127.0.0.1' WITH GRANT OPTION;\n"
        )
        self.run(*_program(), "--initialize-insecure", f"--datadir={self.data}")

    def settings(self) -> dict[str, object]:
        settings: dict[str, object] = {
            "datadir": self.data,
            "socket": self.directory / "socket",
            "pid-file": self.directory / "mysqld.pid",
            "init-file": self.directory / "init.sql",
            "port": self.port,
            "bind-address": "127.0.0.1",
            "max-connections": 300,
            "secure-file-priv": "",
            "mysqlx": "OFF",
        }
        if not self.durable:
            settings["innodb-flush-log-at-trx-commit"] = 2
            settings["disable-log-bin"] = "ON"
        return settings

    def command(self) -> Sequence[str | Path]:
        flags = [f"--{name}={value}" for name, value in self.settings().items()]
        return [*_program(), "--skip-name-resolve", *flags]

    def ping(self) -> str:
        connection = pymysql.connect(
            host="127.0.0.1", port=self.port, user="root", password=PASSWORD, connect_timeout=5
        )
        with connection, connection.cursor() as cursor:
            cursor.execute("SELECT version()")
            (version,) = cursor.fetchone() or ("?",)
        return f"MySQL {version.partition('-')[0]}"


def _installed() -> str | None:
    found = shutil.which("mysqld", path=_PATH)
    # MariaDB's packages have a link of this name to their own server.
    return found if found and Path(found).resolve().name == "mysqld" else None


def _program() -> Sequence[str | Path]:
    if installed := _installed():
        return [installed, "--no-defaults"]
    if not _UNPACKED.here():
        raise UnavailableError(
            "MySQL is not here; run `python -m tests.support.servers up --only mysql`"
        )
    return [
        *_UNPACKED.started("usr/sbin/mysqld"),
        "--no-defaults",
        f"--basedir={_UNPACKED.root / 'usr'}",
    ]
