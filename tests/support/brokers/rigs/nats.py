"""NATS JetStream: a stream with one subject and the durable consumer `shop`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import Any, ClassVar
from urllib.parse import urlsplit

import nats
from nats.js.errors import ServerError

from tests.support.brokers.rigs import ServerRig
from tests.support.waiting import eventually
from txbox.brokers.nats import Nats
from txbox.testing.brokers import Note, Rig, Server

DURABLE = "shop"


class NatsRig(ServerRig):
    lacks: ClassVar = {"tombstones": "what has no payload has an empty one"}
    cloud_events = "ce-"
    # a line each: what ends a line cannot be in it
    headers = tuple(pair for pair in Rig.headers if pair[1] is not None)

    def __init__(self, address: str, server: Server | None = None) -> None:
        super().__init__(address, server)
        self.stream = self.topic
        self.topic = f"{self.stream}.paid"

    @property
    def impatient(self) -> Mapping[str, Any]:
        return {"ack_wait": timedelta(seconds=1)}

    def create(self) -> None:
        def made() -> bool:
            try:
                self.do(lambda js: js.add_stream(name=self.stream, subjects=[f"{self.stream}.>"]))
            except ServerError:
                return False  # the files of its predecessor are still being deleted
            return True

        eventually(made, "a new stream")

    def remove(self) -> None:
        self.do(lambda js: js.delete_stream(self.stream))

    def do(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            client = await nats.connect(self.address)
            try:
                return await work(client.jetstream())
            finally:
                await client.close()

        return asyncio.run(run())

    def publish(self, *messages: Note, subject: str | None = None) -> None:
        """By hand: no client agrees to send such headers."""
        parts = urlsplit(self.address)
        with socket.create_connection((parts.hostname or "", parts.port or 0)) as connection:
            lines = connection.makefile("rb")
            lines.readline()
            connection.sendall(b'CONNECT {"headers":true,"verbose":false}\r\nSUB confirmed 1\r\n')
            for note in messages:
                _send(connection, subject or self.topic, note)
            for _ in messages:
                while not (line := lines.readline()).startswith(b"MSG"):
                    assert line, "the connection ended"
                    assert not line.startswith(b"-ERR"), line
                assert b'"seq"' in lines.readline(), "the stream refused it"

    def source(self, **options: Any) -> Nats:
        return Nats(self.address, **{"durable": DURABLE, **options})

    def outstanding(self, durable: str = DURABLE) -> int:
        info = self.do(lambda js: js.consumer_info(self.stream, durable))
        return int(info.num_ack_pending + info.num_pending)


def _send(connection: socket.socket, subject: str, note: Note) -> None:
    pairs = (*note.pairs, *(() if note.native is None else (("Nats-Msg-Id", note.native),)))
    lines = [
        name.encode() + b": " + (value if isinstance(value, bytes) else str(value).encode())
        for name, value in pairs
    ]
    payload = note.payload or b""
    block = b"NATS/1.0\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n"
    sizes = f"{subject} confirmed {len(block)} {len(block) + len(payload)}\r\n"
    connection.sendall(b"HPUB " + sizes.encode() + block + payload + b"\r\n")
