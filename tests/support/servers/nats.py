"""A NATS server of our own, with JetStream."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

from tests.support.servers import ServerError, programs
from tests.support.servers.process import ServerProcess


def binary() -> str | None:
    path = programs("nats", "/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
    return shutil.which("nats-server", path=path)


class NatsServer(ServerProcess):
    preferred_port = 24322
    accounts = ("nats", "nobody")
    not_ready = (OSError,)

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def initialise(self) -> None:
        (self.directory / "nats.conf").write_text(
            f"""listen: "127.0.0.1:{self.port}"
jetstream {{
  store_dir: "{self.directory}"
  max_memory_store: 64MB
  max_file_store: 1GB
}}
"""
        )

    def command(self) -> Sequence[str | Path]:
        program = binary()
        if program is None:
            raise ServerError(
                "NATS is not installed; run `python -m tests.support.servers up --brokers`"
            )
        return [program, "-c", self.directory / "nats.conf"]

    def ping(self) -> str:
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            greeting = connection.makefile("rb").readline()  # it listens once JetStream is there
        if not greeting.startswith(b"INFO "):
            raise ConnectionError("no greeting yet")
        return f"NATS {json.loads(greeting[5:])['version']}"
