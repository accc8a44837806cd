"""RabbitMQ: a quorum queue."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from pamqp.commands import Basic

from tests.support.brokers.rabbitmq import declare, left, on_server, publish_plain
from tests.support.brokers.rigs import ServerRig
from tests.support.servers.control import ThrowawayRabbitMQ
from txbox.brokers.rabbitmq import RabbitMQ
from txbox.testing.brokers import Note, Rig


class RabbitMQRig(ServerRig):
    lacks: ClassVar = {
        "weak ids": "a delivery tag names nothing beyond its channel",
        "tombstones": "what has no body has an empty one",
    }
    cloud_events = "cloudEvents:"
    # a table has each name once
    headers = tuple(dict(Rig.headers).items())

    def create(self) -> None:
        declare(self.address, "quorum", self.topic)
        if isinstance(self.server, ThrowawayRabbitMQ):
            self.server.wait_until_kept(self.topic)

    def remove(self) -> None:
        on_server(self.address, lambda channel: channel.queue_delete(self.topic))

    def publish(self, *messages: Note) -> None:
        publish_plain(self.address, self.topic, *(_properties(note) for note in messages))

    def source(self, **options: Any) -> RabbitMQ:
        return RabbitMQ(self.address, **options)

    def outstanding(self) -> int:
        return left(self.address, self.topic)


def _properties(note: Note) -> tuple[Basic.Properties, bytes]:
    headers: Any = {
        name: bytearray(value) if isinstance(value, bytes) else value
        for name, value in replace(note, content_type=None).pairs
    }
    properties = Basic.Properties(
        message_id=note.native,
        content_type=note.content_type,
        headers=headers or None,
        delivery_mode=2,
    )
    return properties, note.payload or b""
