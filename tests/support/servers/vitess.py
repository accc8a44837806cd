"""Vitess on loopback: vtgate and the tablets in one process (`vtcombo`), in front of a MySQL server.

No package of Debian has it: `python -m tests.support.servers.vitess` has Go build it from its module, once, in a
quarter of an hour.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pymysql

from tests.support.servers import UnavailableError, UnofferedError
from tests.support.servers.mysql import PASSWORD, MySQLServer
from tests.support.servers.process import ServerProcess, Throwaway, file_lock, throwaway_name
from tests.support.waiting import DEADLINE_S

VERSION = "0.24.4"
_ROOT = Path("/var/tmp") / f"txbox-packages-{os.geteuid()}" / f"vitess-{VERSION}"
_COMMAND = "vitess.io/vitess/go/cmd/vtcombo"
_BUILD_TIMEOUT_S = 3600
_numbers = itertools.count(1)
KEYSPACE = "shop"
_ROLES = ("app", "dba", "filtered", "repl", "allprivs", "appdebug")


def here() -> bool:
    """True when it has been built."""
    return (_ROOT / "vtcombo").exists() and _ROOT.stat().st_uid == os.geteuid()


def build() -> bool:
    """Build it, unless it is here; True when it was built.

    Raises:
        UnofferedError: there is no Go.
        UnavailableError: Go could not fetch or build it.
    """
    if here():
        return False
    if (go := shutil.which("go")) is None:
        raise UnofferedError("Vitess is built by Go, which is not installed")
    with file_lock(_ROOT.with_name(f"{_ROOT.name}.lock")):
        if here():
            return False
        work = _ROOT.with_name(f"{_ROOT.name}-part")
        work.mkdir(parents=True, exist_ok=True)
        # a module of ours that needs it: `go install …@version` refuses one that excludes versions
        (work / "go.mod").write_text(
            f"module txbox\ngo 1.26\nrequire vitess.io/vitess v{VERSION}\n"
        )
        (work / "tools.go").write_text(
            f'//go:build tools\n\npackage txbox\n\nimport _ "{_COMMAND}"\n'
        )
        done = subprocess.run(
            [go, "build", "-mod=mod", "-o", work / "vtcombo", _COMMAND],
            cwd=work, capture_output=True, text=True, check=False, timeout=_BUILD_TIMEOUT_S,
            env={
                **os.environ, "GOFLAGS": "-buildvcs=false -modcacherw",
                "GOPATH": str(work / "go"), "GOCACHE": str(work / "cache"),
            },
        )  # fmt: skip
        if done.returncode:
            raise UnavailableError(f"Go did not build Vitess: {done.stderr[-500:]}")
        _ROOT.mkdir(parents=True, exist_ok=True)
        (work / "vtcombo").rename(_ROOT / "vtcombo")
        shutil.rmtree(work, ignore_errors=True)
    return True


class _TabletMySQL(MySQLServer):
    """The MySQL server of all tablets: a shard is a database on it."""

    def __init__(self, name: str, databases: Sequence[str]) -> None:
        super().__init__(name, preferred_port=23960)
        self.databases = databases

    def initialise(self) -> None:
        super().initialise()
        init = self.directory / "init.sql"
        made = "".join(f"CREATE DATABASE IF NOT EXISTS `{name}`;\n" for name in self.databases)
        init.write_text(init.read_text() + made)

    def settings(self) -> dict[str, object]:
        settings = super().settings()
        # tablets follow the schema, and each other, by the binary log
        settings.pop("disable-log-bin", None)
        return settings | {
            "server-id": 1,
            "gtid-mode": "ON",
            "enforce-gtid-consistency": "ON",
            "log-bin": self.data / "binlog",
            "sync-binlog": 0,
        }


class VtCombo(ServerProcess):
    """vtgate and one primary tablet for each shard; any login is let in."""

    preferred_port = 23980
    ports = 3  # of MySQL's protocol, of its pages, of gRPC
    accounts = MySQLServer.accounts
    not_ready = (pymysql.Error,)

    def __init__(
        self,
        name: str,
        mysql: MySQLServer,
        shards: Sequence[str],
        vschema: Mapping[str, Any] | None,
        flags: Mapping[str, object],
    ) -> None:
        super().__init__(name)
        self.mysql, self.shards, self.vschema, self.flags = mysql, shards, vschema, flags

    @property
    def url(self) -> str:
        return f"mysql://root:{PASSWORD}@127.0.0.1:{self.port}/{KEYSPACE}"

    def initialise(self) -> None:
        account = self._account()
        for path in ("schema", f"schema/{KEYSPACE}", "tmp"):
            (self.directory / path).mkdir()
            if account:
                os.chown(self.directory / path, account.pw_uid, account.pw_gid)
        if self.vschema is not None:
            vschema = self.directory / "schema" / KEYSPACE / "vschema.json"
            vschema.write_text(json.dumps(self.vschema))

    def environment(self) -> Mapping[str, str]:
        return {**super().environment(), "VTDATAROOT": str(self.directory)}

    def command(self) -> Sequence[str | Path]:
        topology = {
            "cells": ["test"],
            "keyspaces": [
                {
                    "name": KEYSPACE,
                    "replica_count": 1,
                    "shards": [{"name": shard} for shard in self.shards],
                }
            ],
        }
        settings: dict[str, object] = {
            "bind-address": "127.0.0.1",
            "port": self.port + 1,
            "grpc-bind-address": "127.0.0.1",
            "grpc-port": self.port + 2,
            "mysql-server-bind-address": "127.0.0.1",
            "mysql-server-port": self.port,
            "mysql-auth-server-impl": "none",
            # by its address, the read-only tablet of each shard would try to replicate from itself
            "db-socket": self.mysql.directory / "socket",
            "db-charset": "utf8mb4",
            "json-topo": json.dumps(topology),
            "tablet-types-to-wait": "PRIMARY",
            "schema-dir": self.directory / "schema",
            "log_dir": self.directory / "tmp",
            "mycnf-server-id": 1,
            "queryserver-config-schema-reload-time": "5s",
            **{f"db-{role}-user": "root" for role in _ROLES},
            **self.flags,
        }
        return [_ROOT / "vtcombo", *(f"--{name}={value}" for name, value in settings.items())]

    def ping(self) -> str:
        connection = pymysql.connect(
            host="127.0.0.1", port=self.port, user="root", database=KEYSPACE, connect_timeout=5
        )
        with connection, connection.cursor() as cursor:
            cursor.execute("SHOW VITESS_TABLETS")
            states = [row[4] for row in cursor.fetchall() if row[3] == "PRIMARY"]
        if states != ["SERVING"] * len(self.shards):
            raise pymysql.OperationalError("not every shard is served")
        return f"Vitess {VERSION}"


class ThrowawayVitess(Throwaway):
    """`with ThrowawayVitess() as vitess`: one keyspace, `shop`, in a MySQL of its own.

    Args:
        shards: ranges of keyspace ids, `("-80", "80-")`; one of them is unsharded.
        vschema: of the keyspace, as Vitess has it in JSON.
        flags: more settings of vtgate and the tablets.
    """

    def __init__(
        self,
        shards: Sequence[str] = ("0",),
        vschema: Mapping[str, Any] | None = None,
        **flags: object,
    ) -> None:
        if not here():
            raise UnavailableError("Vitess is not here; `make test-vitess` builds it, with Go")
        number = next(_numbers)
        self.mysql = _TabletMySQL(
            throwaway_name("vitessdb", number), [f"vt_{KEYSPACE}_{shard}" for shard in shards]
        )
        renamed = {name.replace("_", "-"): value for name, value in flags.items()}
        self.vitess = VtCombo(
            throwaway_name("vitess", number), self.mysql, shards, vschema, renamed
        )

    @property
    def url(self) -> str:
        """The URL of the keyspace; `f"{url}:-80"` is one shard."""
        return self.vitess.url

    def query(self, sql: str) -> Sequence[Sequence[Any]]:
        """Run a statement; a tablet that has lost its MySQL, and has it again, serves nothing for a moment."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                return self._queried(sql)
            except pymysql.OperationalError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.1)

    def _queried(self, sql: str) -> Sequence[Sequence[Any]]:
        connection = pymysql.connect(
            host="127.0.0.1", port=self.vitess.port, user="root", database=KEYSPACE,
            autocommit=True, connect_timeout=5, read_timeout=30,
        )  # fmt: skip
        with connection, connection.cursor() as cursor:
            cursor.execute(sql)
            return cursor.fetchall()

    def _start_all(self) -> None:
        self.mysql.start()
        self.vitess.start()

    def _remove(self) -> None:
        self.vitess.remove()
        self.mysql.remove()


if __name__ == "__main__":
    print(f"vitess {VERSION}: {'built' if build() else 'here'}")
