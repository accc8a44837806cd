"""Redis Streams: a stream and the group `shop`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar

import redis

from tests.support.brokers.rigs import ServerRig
from txbox.brokers.redis import RedisStreams
from txbox.testing.brokers import Note, Rig

GROUP = "shop"


class RedisRig(ServerRig):
    lacks: ClassVar = {
        "native ids": "an entry has the id of its place in the stream",
        "tombstones": "a field without a value is an empty one",
    }
    headers = tuple(  # fields have names and bytes, and nothing else
        (name, value.encode() if isinstance(value, str) else value)
        for name, value in Rig.headers
        if value is not None
    )

    @property
    def impatient(self) -> Mapping[str, Any]:
        return {"claim_idle": timedelta(seconds=1)}

    def create(self) -> None:
        self.client: Any = redis.Redis.from_url(self.address)

    def remove(self) -> None:
        self.client.delete(self.topic)
        self.client.close()

    def publish(self, *messages: Note) -> None:
        with self.client.pipeline(transaction=False) as pipeline:
            for note in messages:
                pipeline.execute_command("XADD", self.topic, "*", *_fields(note))
            pipeline.execute()

    def source(self, **options: Any) -> RedisStreams:
        return RedisStreams(self.address, group=GROUP, **options)

    def outstanding(self) -> int:
        ((info),) = self.client.xinfo_groups(self.topic)
        return int(info["pending"]) + int(info["lag"])


def _fields(note: Note) -> list[str | bytes]:
    pairs = [*note.pairs, ("payload", note.payload)]
    return [part for name, value in pairs if value is not None for part in (name, value)]
