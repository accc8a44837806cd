"""One consumer of a group: its commands, and stream entries as messages."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import redis
from redis import exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from txbox.brokers.base import Delivery, Facts
from txbox.brokers.envelope import REDIS, clock

_COMMAND_IDS = 500

#: An entry id and its fields; None for an entry that was trimmed or deleted.
Entry = tuple[bytes, list[tuple[bytes, bytes]] | None]

# the server's ids begin with its clock, so an id from before 2001 was made up by a producer
_CLOCK_MS_MIN = 10**12


def new_client(url: str, options: Mapping[str, Any]) -> Any:
    """Create a client that never retries silently and decodes nothing; raises ValueError for a bad URL."""
    return cast("Any", redis.Redis).from_url(
        url, **options, decode_responses=False, protocol=2, retry=Retry(NoBackoff(), 0)
    )


class Group:
    """One consumer, with a new name each time. Commands raise redis-py's RedisError unchanged."""

    def __init__(self, client: Any, name: str, streams: Sequence[str]) -> None:
        self.name = name
        self.streams = tuple(streams)
        self._client = client
        for command in ("XREADGROUP", "XAUTOCLAIM", "XCLAIM"):
            # redis-py would fold repeated fields into a dict, and supports JUSTID only in its own method
            client.set_response_callback(command, _as_it_came)
        # two processes with the same name would read each other's pending entries
        self._consumer = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"

    def create(self, stream: str, start: str) -> None:
        """Create the stream and the group if missing; `start` applies to a group created here."""
        try:
            self._client.xgroup_create(stream, self.name, id=start, mkstream=True)
        except exceptions.ResponseError as error:
            if code_of(error) != "BUSYGROUP":
                raise

    def read_pending(self, stream: str) -> Iterator[list[Entry]]:
        """Yield what is pending under our own name, in parts."""
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
        """Read entries nobody has read yet, up to `count` per stream; waits if `block_ms` is not 0."""
        block = ("BLOCK", block_ms) if block_ms > 0 else ()
        reply = self._client.execute_command(
            "XREADGROUP", "GROUP", self.name, self._consumer, "COUNT", count, *block,
            "STREAMS", *self.streams, *[">"] * len(self.streams),
        )  # fmt: skip
        return entries_of(reply)

    def claim(
        self, stream: str, cursor: bytes, idle_ms: int, count: int
    ) -> tuple[bytes, Iterator[Entry], Sequence[bytes]]:
        """Take over entries that have been idle for this long.

        Returns: the next cursor ("0-0" at the end), the entries that are ours now, and the ids of
            trimmed or deleted entries, which Redis has already removed from the group.
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
        """Set the idle time of entries, without delivering them or counting a delivery."""
        with self._client.pipeline(transaction=False) as pipeline:
            for stream, entry_ids in _by_stream(tags):
                # entries that were acknowledged meanwhile are skipped
                pipeline.execute_command(
                    "XCLAIM", stream, self.name, self._consumer, 0, *entry_ids,
                    "IDLE", idle_ms, "JUSTID",
                )  # fmt: skip
            _run(pipeline)

    def leave(self) -> None:
        for stream in self.streams:
            try:
                # DELCONSUMER forgets pending entries, so there must be none
                if not self._client.xpending_range(
                    stream, self.name, "-", "+", 1, consumername=self._consumer
                ):
                    self._client.xgroup_delconsumer(stream, self.name, self._consumer)
            except exceptions.RedisError as error:
                if code_of(error) != "NOGROUP":
                    raise


def facts_of(client: Any, stream: str, claim_idle_s: float) -> Facts:
    """What can be read again of a stream; one that is not there is created when it is read."""
    replay_s: float | None = None
    said = {"redelivery_s": f"claim_idle={claim_idle_s:g} s"}
    unknown: tuple[str, ...] = ()
    if entries := client.xrange(stream, count=1):
        seconds, microseconds = client.time()
        entry_id = entries[0][0].decode()
        stored_ms = int(entry_id.partition("-")[0])
        if stored_ms >= _CLOCK_MS_MIN:
            replay_s = max(0.0, seconds + microseconds / 1e6 - stored_ms / 1000)
            said["replay_s"] = f"XLEN {client.xlen(stream)}, oldest entry {entry_id}"
        else:
            unknown = (f"its ids are made up by the producer ({entry_id}), and tell no age.",)
    return Facts(
        topic=stream, replay_s=replay_s, redelivery_s=claim_idle_s, said=said, unknown=unknown
    )


def code_of(error: Exception) -> str:
    """Return the error code that every Redis error reply begins with."""
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


def entries_of(reply: Any) -> Iterator[tuple[str, list[Entry]]]:
    """Parse the reply to XREADGROUP: each stream with its entries."""
    for stream, entries in reply or ():
        yield stream.decode(), [entry_of(entry) for entry in entries]


def entry_of(reply: Any) -> Entry:
    entry_id, flat = reply
    return entry_id, list(zip(flat[::2], flat[1::2], strict=True)) if flat else None


def delivery_of(
    fields: list[tuple[bytes, bytes]],
    tag: tuple[str, bytes],
    payload_field: bytes,
    weak_scope: str,
    *,
    redelivered: bool,
) -> Delivery:
    """Turn an entry into a message, or say why it is not one.

    Args:
        tag: stream and entry id.
        weak_scope: the prefix of the weak id.
    """
    stream, entry_id = tag[0], tag[1].decode()
    content_type = None
    at = next((at for at, (name, _) in enumerate(fields) if name == payload_field), None)
    if at is not None:
        payload = fields[at][1]
        fields = fields[:at] + fields[at + 1 :]
    else:
        content_type = "application/json"
        try:
            texts = {name.decode(): value.decode() for name, value in fields}
        except UnicodeDecodeError:
            texts = {}
        if len(texts) != len(fields):
            return Delivery(
                None, stream, tag, redelivered=redelivered,
                raw=b"\n".join(name + b"=" + value for name, value in fields),
                problem=f"Entry {entry_id} has no field {payload_field.decode()!r}, and its fields do not form "
                "a JSON object: one is repeated or not UTF-8. Set payload= of RedisStreams.",
            )  # fmt: skip
        payload = json.dumps(texts, ensure_ascii=False).encode()
    origin: dict[str, Any] = {"stream": stream, "entry_id": entry_id}
    stored_ms = int(entry_id.partition("-")[0])
    by_clock = stored_ms >= _CLOCK_MS_MIN
    if by_clock:
        origin["weak_id"] = f"{weak_scope}:{stream}:{entry_id}"
    return REDIS.delivery(
        stream,
        payload,
        [(name.decode(errors="backslashreplace"), value) for name, value in fields],
        tag=tag,
        redelivered=redelivered,
        origin=origin,
        content_type=content_type,
        stored_at=clock(stored_ms / 1000) if by_clock else None,
    )
