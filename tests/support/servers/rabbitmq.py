"""A RabbitMQ node of our own."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.servers import ServerError, programs
from tests.support.servers.process import ENVIRONMENT, ServerProcess
from tests.support.waiting import DEADLINE_S, eventually

# Not the wrapper in /usr/sbin: that one is for root and the distribution's own node.
_PATH = "/usr/lib/rabbitmq/bin:/usr/local/lib/rabbitmq/bin:/usr/local/bin"
_RUN_WITH_EPMD = 'epmd -port "$ERL_EPMD_PORT" & exec "$0"'


def binary() -> str | None:
    return shutil.which("rabbitmq-server", path=programs("rabbitmq", _PATH))


class RabbitMQServer(ServerProcess):
    """One node with its own port mapper, which ends with it: nothing is shared between nodes."""

    preferred_port = 25772
    ports = 3  # AMQP, port mapper, distribution
    accounts = ("rabbitmq",)
    not_ready = (OSError,)

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    def initialise(self) -> None:
        (self.directory / "rabbitmq.conf").write_text(
            f"""listeners.tcp.default = 127.0.0.1:{self.port}
vm_memory_high_watermark.absolute = 512MB
disk_free_limit.absolute = 50MB
"""
        )
        (self.directory / "plugins").write_text("[].\n")

    def environment(self) -> Mapping[str, str]:
        flags = {
            "+S": "1:1",
            "+sbwt": "none",  # an idle scheduler does not spin
            "-kernel": "inet_dist_use_interface {127,0,0,1}",
            "-txbox": str(self.directory),  # in its command line it tells whose node this is
        }
        return {
            **ENVIRONMENT,
            "HOME": str(self.directory),  # the Erlang cookie
            "ERL_EPMD_PORT": str(self.port + 1),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_DIST_PORT": str(self.port + 2),
            "RABBITMQ_NODENAME": f"txbox-{self.port}@localhost",
            "RABBITMQ_CONF_ENV_FILE": str(self.directory / "no-file"),
            "RABBITMQ_CONFIG_FILE": str(self.directory / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.directory / "plugins"),
            "RABBITMQ_MNESIA_BASE": str(self.directory / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self.directory / "logs"),
            "RABBITMQ_LOGS": "-",
            # another release brings its own Erlang, which goes before the installed one
            "PATH": os.pathsep.join(filter(None, (programs("rabbitmq", ""), ENVIRONMENT["PATH"]))),
            # Input is the null device. This lets the script become the node instead of its parent.
            "RABBITMQ_ALLOW_INPUT": "true",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": " ".join(
                ["-noinput", *(part for flag in flags.items() for part in flag)]
            ),
        }

    def command(self) -> Sequence[str | Path]:
        program = binary()
        if program is None:
            raise ServerError(
                "RabbitMQ is not installed; run `python -m tests.support.servers up --brokers`"
            )
        return ["/bin/sh", "-c", _RUN_WITH_EPMD, program]

    def _wait_until_listed(self, quorum_queue: str) -> None:
        entry = f"%2F_{quorum_queue}".encode()
        eventually(
            lambda: any(
                entry in path.read_bytes()
                for path in self.directory.glob("mnesia/*/quorum/*/names.dets")
            ),
            f"{quorum_queue} in the list of quorum queues",
        )

    def messages(self) -> int:
        """How many messages its queues have, with those that wait for an acknowledgement, which AMQP does not tell."""
        program = Path(binary() or "").with_name("rabbitmqctl")
        output = subprocess.run(
            [program, "--quiet", "list_queues", "--no-table-headers", "messages"],
            env=self.environment(), capture_output=True, text=True, timeout=DEADLINE_S, check=True,
        ).stdout  # fmt: skip
        return sum(map(int, output.split()))

    def ping(self) -> str:
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            connection.sendall(b"AMQP\x00\x00\x09\x01")
            start = connection.recv(4096)  # connection.start names the product and its version
        version = re.search(rb"\x07versionS\x00\x00\x00.([0-9.]+)", start, re.DOTALL)
        if version is None:
            raise ConnectionError("no greeting yet")
        return f"RabbitMQ {version[1].decode()}"
