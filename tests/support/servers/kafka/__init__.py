"""An Apache Kafka broker of our own, in KRaft mode: broker and controller in one process."""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import confluent_kafka
from confluent_kafka.admin import AdminClient

from tests.support.servers import java
from tests.support.servers.process import file_lock, throwaway_name

POM = Path(__file__).with_name("pom.xml")
_CLUSTER_ID = "dHhib3gtdGVzdHMtMDAwMA"


def fetch() -> bool:
    """Fetch Kafka, unless it is here; True when it was fetched."""
    fetched = java.fetch(POM)
    return java.share_classes(KafkaServer(throwaway_name("kafka", 0))) or fetched


class KafkaServer(java.JavaServer):
    """Node 1 alone; or, with `join`, one node of a cluster, and copies of everything on three."""

    preferred_port = 29392
    ports = 2  # clients, controllers
    not_ready = (confluent_kafka.KafkaException, ConnectionError)
    pom, heap = POM, "512m"

    def __init__(self, name: str, *, preferred_port: int | None = None) -> None:
        super().__init__(name, preferred_port=preferred_port)
        self.node = 1
        self._voters: Mapping[int, int] | None = None

    def join(self, node: int, controllers: Mapping[int, int]) -> None:
        """Become this node of a cluster whose controllers listen on these ports, by node."""
        self.node = node
        self._voters = controllers

    @property
    def url(self) -> str:
        """Kafka knows no URL: host and port, for `bootstrap.servers`."""
        return f"127.0.0.1:{self.port}"

    @property
    def bootstrap(self) -> str:
        return self.url

    @property
    def controller_port(self) -> int:
        return self.port + 1

    @property
    def format(self) -> str:
        # a newer Kafka goes on with the features of the one that formatted its storage
        return java.jars(POM).name

    def initialise(self) -> None:
        settings = self.directory / "server.properties"
        lines = [f"{name}={value}\n" for name, value in self._settings().items()]
        settings.write_text("".join(lines))
        data, kept = self.directory / "data", java.jars(POM).with_suffix(".formatted")
        if kept.exists():
            # what formatting writes, which takes a Java of its own; only the names of node and directory differ
            self.run("cp", "-r", kept, data)
            names = data / "meta.properties"
            text = re.sub(r"(?m)^node\.id=.*", f"node.id={self.node}", names.read_text())
            text = re.sub(
                r"(?m)^directory\.id=.*", f"directory.id={secrets.token_urlsafe(16)}", text
            )
            names.write_text(text)
            return
        self.run(
            *java.command(POM, "kafka.tools.StorageTool", heap="256m"),
            "format",
            "--cluster-id", _CLUSTER_ID,
            "--config", settings,
        )  # fmt: skip
        with file_lock(kept.with_suffix(".lock")):
            if not kept.exists():
                shutil.copytree(data, part := kept.with_suffix(".part"))
                part.rename(kept)

    def _settings(self) -> dict[str, str | int | Path]:
        voters = self._voters or {self.node: self.controller_port}
        copies = min(3, len(voters))
        return {
            "node.id": self.node,
            "process.roles": "broker,controller",
            "controller.quorum.voters": ",".join(
                f"{node}@127.0.0.1:{port}" for node, port in voters.items()
            ),
            "listeners": (
                f"PLAINTEXT://127.0.0.1:{self.port},CONTROLLER://127.0.0.1:{self.controller_port}"
            ),
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "log.dirs": self.directory / "data",
            "default.replication.factor": copies,
            "min.insync.replicas": max(1, copies - 1),
            "offsets.topic.replication.factor": copies,
            "offsets.topic.num.partitions": 5,
            "transaction.state.log.replication.factor": copies,
            "transaction.state.log.min.isr": max(1, copies - 1),
            "transaction.state.log.num.partitions": 5,
            "share.coordinator.state.topic.replication.factor": copies,
            "share.coordinator.state.topic.min.isr": max(1, copies - 1),
            "auto.create.topics.enable": "false",  # a test that misspells a topic shall fail
            "group.initial.rebalance.delay.ms": 0,
            # Members of KIP-848 groups leave these to the broker: one that dies is missed after so long.
            "group.consumer.min.session.timeout.ms": 6000,
            "group.consumer.session.timeout.ms": 6000,
            "group.consumer.min.heartbeat.interval.ms": 1000,
            "group.consumer.heartbeat.interval.ms": 1000,
            # Share groups: a test may let locks and members expire soon; the state takes its place quickly.
            "group.share.min.session.timeout.ms": 1000,
            "group.share.min.heartbeat.interval.ms": 500,
            "group.share.heartbeat.interval.ms": 1000,
            "group.share.min.record.lock.duration.ms": 1000,
            "group.share.delivery.count.limit": 10,
            "share.coordinator.state.topic.num.partitions": 5,
            # A killed broker is noticed, and may come back under its name, after this long.
            "broker.session.timeout.ms": 4000,
            "broker.heartbeat.interval.ms": 500,
        }

    def arguments(self) -> Sequence[str | Path]:
        log = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
        return [log, "kafka.Kafka", self.directory / "server.properties"]

    def ping(self) -> str:
        admin = AdminClient(
            {"bootstrap.servers": self.url, "log_level": 0, "socket.timeout.ms": 5000}
        )
        # A broker that still recovers its log is fenced: it answers, and is not in the list.
        if self.node not in admin.list_topics(timeout=2).brokers:
            raise ConnectionError("not registered yet")
        (jar,) = java.jars(POM).glob("kafka_2.13-*.jar")
        return f"Kafka {jar.stem.removeprefix('kafka_2.13-')}"
