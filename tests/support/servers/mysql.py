"""A MySQL server of our own: the installed one, else Debian's packages, unpacked beside the system.

No release of Debian has MySQL, its unstable does. With their loader and libraries around them these
programs need nothing of the system they run on, and any user may fetch them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pymysql

from tests.support.servers import UnavailableError, UnofferedError
from tests.support.servers.process import ServerProcess, file_lock

PASSWORD = "txbox"
_PATH = "/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin:/usr/libexec"
_PACKAGE = "mysql-server-core"
_SUITE = "sid"
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_FETCH_TIMEOUT_S = 600
_GIVE_URL = "install mysqld or set TXBOX_TEST_MYSQL_URL"


def fetch() -> bool:
    """Fetch MySQL, unless it is here; True when it was fetched.

    Raises:
        UnofferedError: this machine's packages do not have it.
        UnavailableError: they should have it, and it could not be fetched.
    """
    if _installed() is not None or _fetched():
        return False
    mirror = _mirror()
    with file_lock(_root().with_suffix(".lock")):
        if _fetched():  # another process was here first
            return False
        _unpack(mirror)
    return True


class MySQLServer(ServerProcess):
    preferred_port = 23307
    accounts = ("mysql", "nobody")
    not_ready = (pymysql.Error,)

    @property
    def url(self) -> str:
        return f"mysql://root:{PASSWORD}@127.0.0.1:{self.port}/mysql"

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    def initialise(self) -> None:
        # What comes with the server as root@localhost has no password and stays on its socket.
        (self.directory / "init.sql").write_text(
            f"CREATE USER IF NOT EXISTS root@'127.0.0.1' IDENTIFIED BY '{PASSWORD}';\n"
            "GRANT ALL ON *.* TO root@'127.0.0.1' WITH GRANT OPTION;\n"
        )
        self.run(*_program(), "--initialize-insecure", f"--datadir={self._data}")

    def command(self) -> Sequence[str | Path]:
        settings = {
            "datadir": self._data,
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
        flags = [f"--{name}={value}" for name, value in settings.items()]
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
    if not _fetched():
        raise UnavailableError(
            "MySQL is not here; run `python -m tests.support.servers up --only mysql`"
        )
    root = _root()
    libraries = next(root.glob("usr/lib/*-linux-gnu"))
    return [
        next(libraries.glob("ld-linux*.so.*")),
        "--library-path",
        libraries,
        root / "usr/sbin/mysqld",
        "--no-defaults",
        f"--basedir={root / 'usr'}",
    ]


def _root() -> Path:
    # Outside every checkout and home: the server's account reads it, all checkouts share it.
    return Path("/var/tmp") / f"txbox-packages-{os.geteuid()}" / _PACKAGE


def _fetched() -> bool:
    # Anybody may create names in /var/tmp: programs of another owner are not run.
    return _root().is_dir() and _root().parent.stat().st_uid == os.geteuid()


def _mirror() -> str:
    """The mirror of Debian that this machine's packages come from."""
    if shutil.which("apt-get") is None:
        raise UnofferedError(f"no package of it on a system without apt-get; {_GIVE_URL}")
    listed = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"],
        capture_output=True,
        text=True,
        check=False,
    )
    for uri in listed.stdout.split():
        if re.search(r"/debian(\.list)?/?$", uri):
            return uri
    raise UnofferedError(f"apt's sources name no mirror of Debian; {_GIVE_URL}")


def _unpack(mirror: str) -> None:
    """Fetch the package and everything it needs, as for an empty system, and unpack it."""
    work = _root().with_suffix(".part")
    shutil.rmtree(work, ignore_errors=True)
    root = work / "root"
    for directory in (root, work / "lists/partial", work / "cache/archives/partial"):
        directory.mkdir(parents=True)
    (work / "status").touch()
    (work / "sources.list").write_text(f"deb [signed-by={_KEYRING}] {mirror} {_SUITE} main\n")
    (work / "apt.conf").write_text(
        f'Dir::State "{work}";\n'
        f'Dir::State::status "{work}/status";\n'
        f'Dir::Cache "{work}/cache";\n'
        f'Dir::Etc::sourcelist "{work}/sources.list";\n'
        'Dir::Etc::sourceparts "/dev/null";\n'
        'APT::Sandbox::User "";\n'
        'Acquire::Languages "none";\n'
    )
    if done := _apt(work, "update"):
        raise UnofferedError(f"{mirror} has no {_SUITE} ({done}); {_GIVE_URL}")
    if not list((work / "lists").glob("*_InRelease")):
        raise UnavailableError(f"{mirror} does not answer; {_GIVE_URL}")
    if done := _apt(work, "install", "--yes", "--no-install-recommends", "--simulate", _PACKAGE):
        raise UnofferedError(f"{mirror} cannot install {_PACKAGE} ({done}); {_GIVE_URL}")
    if done := _apt(
        work, "install", "--yes", "--no-install-recommends", "--download-only", _PACKAGE
    ):
        raise UnavailableError(f"{mirror} did not give all of {_PACKAGE} ({done}); {_GIVE_URL}")
    for package in sorted((work / "cache/archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", package, root], check=True, capture_output=True)
    root.rename(_root())
    shutil.rmtree(work)


def _apt(work: Path, *arguments: str) -> str | None:
    """None, or the last line of what apt-get complains about."""
    done = subprocess.run(
        ["apt-get", *arguments],
        env={**os.environ, "APT_CONFIG": str(work / "apt.conf"), "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
        check=False,
        timeout=_FETCH_TIMEOUT_S,
    )
    if done.returncode == 0:
        return None
    return " ".join((done.stderr or done.stdout).strip().splitlines()[-1:])
