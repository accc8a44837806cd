"""A consumer group on its streams: the commands of one consumer of it, and the codes of Redis's errors."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from redis import exceptions

from txbox.brokers.redis_entry import Entry, entries_of, entry_of

_COMMAND_IDS = 500


class Group:
    """One consumer, whose name is new each time. All commands raise redis-py's RedisError as it comes."""

    def __init__(self, client: Any, name: str, streams: Sequence[str]) -> None:
        self.name = name
        self.streams = tuple(streams)
        self._client = client
        for command in ("XREADGROUP", "XAUTOCLAIM", "XCLAIM"):
            # redis-py would fold repeated fields into a dict, and knows JUSTID only from its own method
            client.set_response_callback(command, _as_it_came)
        # two processes under one name would read each other's pending entries
        self._consumer = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"

    def create(self, stream: str, start: str) -> None:
        """Make sure of the group and of the stream; `start` is for a group that was not there."""
        try:
            self._client.xgroup_create(stream, self.name, id=start, mkstream=True)
        except exceptions.ResponseError as error:
            if code_of(error) != "BUSYGROUP":
                raise

    def read_own(self, stream: str) -> Iterator[list[Entry]]:
        """What is pending under our own name, in parts."""
        after: bytes | str = "0"
        while True:
            reply = self._client.execute_command(
                "XREADGROUP", "GROUP", self.name, self._consumer, "COUNT", _COMMAND_IDS,
                "STREAMS", stream, after,
            )  # fmt: skip
            entries = [entry for _, found in entries_of(reply) for entry in found]
            if not entries:
                return
            yield entries
            after = entries[-1][0]

    def read_new(self, count: int, block_ms: int) -> Iterator[tuple[str, list[Entry]]]:
        """What nobody has read yet, up to `count` of each stream; waits when `block_ms` is not 0."""
        block = ("BLOCK", block_ms) if block_ms > 0 else ()
        reply = self._client.execute_command(
            "XREADGROUP", "GROUP", self.name, self._consumer, "COUNT", count, *block,
            "STREAMS", *self.streams, *[">"] * len(self.streams),
        )  # fmt: skip
        return entries_of(reply)

    def claim(
        self, stream: str, cursor: bytes, idle_ms: int, count: int
    ) -> tuple[bytes, Iterator[Entry], Sequence[bytes]]:
        """Take over what has been idle for so long.

        Returns: the next cursor, "0-0" at the end; what is ours now; the ids of what was trimmed or
        deleted, which Redis has taken out of the group itself.
        """
        following, found, *deleted = self._client.execute_command(
            "XAUTOCLAIM", stream, self.name, self._consumer, idle_ms, cursor, "COUNT", count
        )
        return (
            following,
            (entry_of(entry) for entry in found if entry),
            deleted[0] if deleted else (),
        )

    def acknowledge(self, tags: Sequence[tuple[str, bytes]]) -> None:
        with self._client.pipeline(transaction=False) as pipeline:
            for stream, entry_ids in _by_stream(tags):
                pipeline.xack(stream, self.name, *entry_ids)
            _run(pipeline)

    def touch(self, tags: Sequence[tuple[str, bytes]], idle_ms: int) -> None:
        """Set for how long entries count as idle; neither delivered nor counted by that."""
        with self._client.pipeline(transaction=False) as pipeline:
            for stream, entry_ids in _by_stream(tags):
                # an entry that is acknowledged by now is passed over
                pipeline.execute_command(
                    "XCLAIM", stream, self.name, self._consumer, 0, *entry_ids,
                    "IDLE", idle_ms, "JUSTID",
                )  # fmt: skip
            _run(pipeline)

    def leave(self) -> None:
        for stream in self.streams:
            try:
                # DELCONSUMER forgets what is pending: it must be nothing
                if not self._client.xpending_range(
                    stream, self.name, "-", "+", 1, consumername=self._consumer
                ):
                    self._client.xgroup_delconsumer(stream, self.name, self._consumer)
            except exceptions.RedisError as error:
                if code_of(error) != "NOGROUP":
                    raise


def code_of(error: Exception) -> str:
    """The error code, with which every error reply of Redis begins."""
    return getattr(error, "status_code", None) or str(error).partition(" ")[0]


def _as_it_came(reply: object, **_: object) -> object:
    return reply


def _run(pipeline: Any) -> None:
    for answer in pipeline.execute(raise_on_error=False):
        # without the group there is nothing to acknowledge or to keep
        if isinstance(answer, exceptions.RedisError) and code_of(answer) != "NOGROUP":
            raise answer


def _by_stream(tags: Sequence[tuple[str, bytes]]) -> Iterator[tuple[str, list[bytes]]]:
    grouped: dict[str, list[bytes]] = {}
    for stream, entry_id in tags:
        grouped.setdefault(stream, []).append(entry_id)
    for stream, entry_ids in grouped.items():
        for at in range(0, len(entry_ids), _COMMAND_IDS):
            yield stream, entry_ids[at : at + _COMMAND_IDS]
