"""Clusters of three on loopback, in which every node takes writes: Galera and MySQL Group Replication."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import pymysql

from tests.support.servers import ServerError, UnavailableError
from tests.support.servers.mariadb import PASSWORD, MariaDBServer
from tests.support.servers.mysql import MySQLServer
from tests.support.servers.process import ServerProcess, Throwaway, throwaway_name
from tests.support.waiting import DEADLINE_S

_numbers = itertools.count(1)
_PROVIDERS = ("/usr/lib/galera/libgalera_smm.so", "/usr/lib64/galera-4/libgalera_smm.so")


def galera_provider() -> str | None:
    """Galera's library, of Debian's package galera-4."""
    return next((path for path in _PROVIDERS if Path(path).exists()), None)


class _Node(ServerProcess):
    """What the nodes of both kinds have: the addresses of all, and a connection of a superuser."""

    members: Sequence[Any]
    number: int

    @property
    def group_port(self) -> int:
        return self.port + 1

    def query(self, sql: str) -> Sequence[Sequence[Any]]:
        connection = pymysql.connect(
            host="127.0.0.1", port=self.port, user="root", password=PASSWORD, autocommit=True,
            connect_timeout=5, read_timeout=30,
        )  # fmt: skip
        with connection, connection.cursor() as cursor:
            cursor.execute(sql)
            return cursor.fetchall()

    def addresses(self) -> str:
        return ",".join(f"127.0.0.1:{node.group_port}" for node in self.members)


class GaleraNode(_Node, MariaDBServer):
    """One node of Galera; `first` founds the cluster, the others copy its data."""

    ports = 4  # its own, the group's, and those for the rows and the data that a node missed

    def __init__(self, name: str, number: int) -> None:
        super().__init__(name, preferred_port=23810)
        self.members, self.number, self.first = (), number, False

    def settings(self) -> dict[str, object]:
        settings = super().settings()
        if not self.first:
            del settings["init-file"]  # the users come with the data
        options = {
            "base_host": "127.0.0.1",
            "gmcast.listen_addr": f"tcp://127.0.0.1:{self.group_port}",
            "ist.recv_addr": f"127.0.0.1:{self.port + 2}",
            "gcache.size": "64M",
            # a node that is gone is noticed within seconds
            "evs.keepalive_period": "PT0.5S",
            "evs.suspect_timeout": "PT2S",
            "evs.inactive_timeout": "PT4S",
        }
        return settings | {
            "binlog-format": "ROW",
            "innodb-autoinc-lock-mode": 2,
            "innodb-flush-log-at-trx-commit": 0,
            "wsrep-on": "ON",
            "wsrep-provider": galera_provider(),
            "wsrep-cluster-name": self.members[0].name,
            "wsrep-cluster-address": "gcomm://" if self.first else f"gcomm://{self.addresses()}",
            "wsrep-node-name": f"node-{self.number}",
            "wsrep-node-address": f"127.0.0.1:{self.group_port}",
            "wsrep-sst-method": "rsync",
            "wsrep-sst-receive-address": f"127.0.0.1:{self.port + 3}",
            "wsrep-provider-options": ";".join(f"{key}={value}" for key, value in options.items()),
        }

    def ping(self) -> str:
        version = super().ping()
        if self.query("SHOW STATUS LIKE 'wsrep_ready'")[0][1] != "ON":
            raise pymysql.OperationalError("not in the cluster yet")
        return version


class GroupNode(_Node, MySQLServer):
    """One node of MySQL Group Replication."""

    ports = 2

    def __init__(self, name: str, number: int) -> None:
        super().__init__(name, preferred_port=23860)
        self.members, self.number, self.group = (), number, ""

    def initialise(self) -> None:
        super().initialise()
        init = self.directory / "init.sql"
        # each node has its own users: a transaction that only one has would keep it out of the group
        init.write_text("SET SESSION sql_log_bin = 0;\n" + init.read_text())

    def settings(self) -> dict[str, object]:
        settings = super().settings()
        settings.pop("disable-log-bin", None)
        return settings | {
            "server-id": self.number,
            "gtid-mode": "ON",
            "enforce-gtid-consistency": "ON",
            "log-bin": self.data / "binlog",
            "sync-binlog": 0,
            "report-host": "127.0.0.1",
            "plugin-load-add": "group_replication.so",
            "loose-group-replication-group-name": self.group,
            "loose-group-replication-start-on-boot": "OFF",
            "loose-group-replication-local-address": f"127.0.0.1:{self.group_port}",
            "loose-group-replication-group-seeds": self.addresses(),
            "loose-group-replication-ip-allowlist": "127.0.0.1",
            "loose-group-replication-single-primary-mode": "OFF",
            "loose-group-replication-enforce-update-everywhere-checks": "ON",
            "loose-group-replication-recovery-get-public-key": "ON",
            # a node that lost the others is noticed, and says so, within seconds
            "loose-group-replication-member-expel-timeout": 0,
            "loose-group-replication-unreachable-majority-timeout": 3,
            "loose-group-replication-autorejoin-tries": 0,
        }

    def join(self, *, found: bool = False) -> None:
        """Join the group, or found it; returns when this node takes writes."""
        self.query(
            f"CHANGE REPLICATION SOURCE TO SOURCE_USER = 'root', SOURCE_PASSWORD = '{PASSWORD}' "
            "FOR CHANNEL 'group_replication_recovery'"
        )
        if found:
            self.query("SET GLOBAL group_replication_bootstrap_group = ON")
        self.query("START GROUP_REPLICATION")
        if found:
            self.query("SET GLOBAL group_replication_bootstrap_group = OFF")
        deadline = time.monotonic() + DEADLINE_S
        while self.state() != "ONLINE":
            if time.monotonic() > deadline:
                raise ServerError(f"{self.name} did not join its group: {self.state()}")
            time.sleep(0.1)

    def state(self) -> str:
        rows = self.query(
            "SELECT member_state FROM performance_schema.replication_group_members "
            "WHERE member_id = @@server_uuid"
        )
        return str(rows[0][0]) if rows else "OFFLINE"


N = TypeVar("N", GaleraNode, GroupNode)


class _Cluster(Throwaway, Generic[N]):
    """Nodes are numbered from 1. `stop(2, immediate=True)` is SIGKILL; a stopped node keeps its data."""

    nodes: list[N]

    @property
    def url(self) -> str:
        """The URL that names every node."""
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        return f"mysql://root:{PASSWORD}@{hosts}/mysql"

    def node(self, number: int) -> N:
        return self.nodes[number - 1]

    def stop(self, number: int, *, immediate: bool = False) -> None:
        self.node(number).stop(immediate=immediate)

    def start(self, number: int) -> None:
        """Start a stopped node; returns when it takes writes again."""
        raise NotImplementedError

    def _claim_all(self) -> None:
        """Before any of them starts, as they name one another."""
        for node in self.nodes:
            node.members = self.nodes
            node.claim()

    def _remove(self) -> None:
        for node in self.nodes:
            node.remove()


class ThrowawayGalera(_Cluster[GaleraNode]):
    """`with ThrowawayGalera() as cluster`: three nodes of MariaDB with Galera."""

    def __init__(self, nodes: int = 3) -> None:
        if galera_provider() is None:
            raise UnavailableError("Galera is not here; install Debian's galera-4")
        self.nodes = [
            GaleraNode(throwaway_name("galera", next(_numbers)), number)
            for number in range(1, nodes + 1)
        ]

    def found(self, number: int) -> None:
        """Found the cluster with one node's data: at the beginning, or once all have stopped."""
        node = self.node(number)
        node.first = True
        state = node.data / "grastate.dat"
        if state.exists():
            state.write_text(state.read_text().replace("to_bootstrap: 0", "to_bootstrap: 1"))
        try:
            node.start()
        finally:
            node.first = False

    def start(self, number: int) -> None:
        self.node(number).start()

    def _start_all(self) -> None:
        self._claim_all()
        self.found(1)
        for node in self.nodes[1:]:
            node.start()


class ThrowawayGroup(_Cluster[GroupNode]):
    """`with ThrowawayGroup() as cluster`: three nodes of MySQL Group Replication, multi-primary."""

    def __init__(self, nodes: int = 3) -> None:
        self.nodes = [
            GroupNode(throwaway_name("group", next(_numbers)), number)
            for number in range(1, nodes + 1)
        ]
        for node in self.nodes:
            node.group = _group_name(self.nodes[0].name)

    def found(self, number: int) -> None:
        """Found the group with one node's data: once all have stopped, or lost one another."""
        node = self.node(number)
        if not node.running():
            node.start()
        node.query("STOP GROUP_REPLICATION")
        node.join(found=True)

    def rejoin(self, number: int) -> None:
        """Have a node that left the group come back."""
        self.node(number).query("STOP GROUP_REPLICATION")
        self.node(number).join()

    def start(self, number: int) -> None:
        self.node(number).start()
        self.node(number).join()

    def _start_all(self) -> None:
        self._claim_all()
        for node in self.nodes:
            node.launch()
        for node in self.nodes:
            node.wait_ready()
        self.found(1)
        for node in self.nodes[1:]:
            node.join()


def _group_name(name: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_OID, name))
