"""An ElasticMQ server of our own: SQS's interface, queues and messages kept in a file."""

from __future__ import annotations

import http.client
from collections.abc import Sequence
from pathlib import Path

from tests.support.servers import java
from tests.support.servers.process import throwaway_name

POM = Path(__file__).with_name("pom.xml")


def fetch() -> bool:
    """Fetch ElasticMQ, unless it is here; True when it was fetched."""
    fetched = java.fetch(POM)
    return java.share_classes(ElasticMQServer(throwaway_name("sqs", 0))) or fetched


class ElasticMQServer(java.JavaServer):
    """Takes any credentials and any region."""

    preferred_port = 29624
    not_ready = (OSError, http.client.HTTPException)
    pom, heap = POM, "128m"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def initialise(self) -> None:
        # Without WRITE_DELAY=0 a killed process takes the last half second of messages with it.
        (self.directory / "elasticmq.conf").write_text(
            f"""include classpath("application.conf")
node-address {{ protocol = http, host = "127.0.0.1", port = {self.port} }}
rest-sqs {{ bind-hostname = "127.0.0.1", bind-port = {self.port}, sqs-limits = strict }}
messages-storage {{
  enabled = true
  uri = "jdbc:h2:{self.directory}/messages;WRITE_DELAY=0"
}}
"""
        )

    def arguments(self) -> Sequence[str | Path]:
        return [f"-Dconfig.file={self.directory}/elasticmq.conf", "org.elasticmq.server.Main"]

    def ping(self) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            status = connection.getresponse().status
        finally:
            connection.close()
        if status != http.client.OK:
            raise ConnectionError(f"not ready yet: HTTP {status}")
        (jar,) = java.jars(POM).glob("elasticmq-server_2.13-*.jar")
        return f"ElasticMQ {jar.stem.removeprefix('elasticmq-server_2.13-')}"
