"""A Redis server of our own."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import redis

from tests.support.servers import ServerError, programs
from tests.support.servers.process import ServerProcess


def binary() -> str | None:
    path = programs("redis", "/usr/bin:/usr/local/bin")
    return shutil.which("redis-server", path=path) or shutil.which("valkey-server", path=path)


class RedisServer(ServerProcess):
    # The brokers' ports lie below the range for outgoing connections: a client that tries again
    # and again while its broker is down could otherwise be given that very port and reach itself.
    preferred_port = 26479
    accounts = ("redis",)
    not_ready = (redis.ConnectionError, redis.TimeoutError)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def initialise(self) -> None:
        return

    def command(self) -> Sequence[str | Path]:
        program = binary()
        if program is None:
            raise ServerError(
                "Redis is not installed; run `python -m tests.support.servers up --brokers`"
            )
        settings = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(self.directory),
            "save": "",
            "appendonly": "yes",
            # "everysec" may hold a write back in memory for two seconds; "no" hands each one to
            # the kernel before the client hears of it, which is what a killed process needs.
            "appendfsync": "always" if self.durable else "no",
            "set-proc-title": "no",  # the directory in its command line tells whose it is
        }
        flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
        return [program, *flags]

    def ping(self) -> str:
        with redis.Redis.from_url(self.url, socket_timeout=5) as client:
            server = client.info("server")
        if valkey := server.get("valkey_version"):
            return f"Valkey {valkey}"
        return f"Redis {server['redis_version']}"
