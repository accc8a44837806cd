"""One Kafka Connect worker of our own, standalone, with Debezium for PostgreSQL."""

from __future__ import annotations

import http.client
import json
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.servers import java
from tests.support.servers.process import ServerProcess

POM = Path(__file__).with_name("pom.xml")


class ConnectServer(ServerProcess):
    """Runs one connector; its offsets are in a file, so it continues where it was after a kill.

    Args:
        worker, connector: settings; the port and the file of the offsets are added.
    """

    preferred_port = 29083
    accounts = ("nobody",)
    not_ready = (OSError, http.client.HTTPException, ConnectionError)

    def __init__(self, name: str, worker: Mapping[str, str], connector: Mapping[str, str]) -> None:
        super().__init__(name)
        self._worker, self._connector = worker, connector

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def initialise(self) -> None:
        worker = {
            **self._worker,
            "listeners": self.url,
            "offset.storage.file.filename": str(self.directory / "offsets"),
        }
        for name, settings in (("worker", worker), ("connector", self._connector)):
            lines = [f"{key}={value}\n" for key, value in settings.items()]
            (self.directory / f"{name}.properties").write_text("".join(lines))

    def command(self) -> Sequence[str | Path]:
        return java.command(
            POM,
            "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
            "org.apache.kafka.connect.cli.ConnectStandalone",
            self.directory / "worker.properties",
            self.directory / "connector.properties",
            heap="512m",
        )

    def ping(self) -> str:
        """Ready once the connector's task runs."""
        path = f"{self.url}/connectors/{self._connector['name']}/status"
        with urllib.request.urlopen(path, timeout=5) as answer:
            said = json.load(answer)
        if [task["state"] for task in said["tasks"]] != ["RUNNING"]:
            raise ConnectionError(f"the connector is not running: {said}")
        (jar,) = java.jars(POM).glob("debezium-connector-postgres-*.jar")
        return f"Debezium {jar.stem.rpartition('-')[2]}"
