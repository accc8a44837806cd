"""A consumer group on its streams: the commands of one consumer of it, and its entries as messages."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from redis import exceptions

from txbox.brokers.base import Delivery
from txbox.brokers.plain import plain_time
from txbox.message import Headers, Message

_COMMAND_IDS = 500

#: An entry id and its fields; None for one that was trimmed or deleted.
Entry = tuple[bytes, list[tuple[bytes, bytes]] | None]

# an id from before 2001 was made up by the producer: the server's own ids begin with its clock
_CLOCK_MS_MIN = 10**12


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


def entries_of(reply: Any) -> Iterator[tuple[str, list[Entry]]]:
    """Read the answer to XREADGROUP: each stream with its entries."""
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
    """Make an entry a message, or say why it is none.

    Args:
        tag: stream and entry id.
        weak_scope: what the weak id begins with.
    """
    stream, entry_id = tag
    names = [name for name, _ in fields]
    content_type = None
    if payload_field in names:
        at = names.index(payload_field)
        payload = fields[at][1]
        headers = _headers(fields[:at] + fields[at + 1 :])
    else:
        headers = _headers(fields)
        content_type = "application/json"
        try:
            texts = {name.decode(): value.decode() for name, value in fields}
        except UnicodeDecodeError:
            texts = {}
        if len(texts) != len(fields):
            return Delivery(
                None, stream, tag, redelivered=redelivered,
                raw=b"\n".join(name + b"=" + value for name, value in fields),
                problem=f"Entry {entry_id.decode()} has no field {payload_field.decode()!r}, and its fields are "
                "no JSON object: one is repeated or not UTF-8. Set payload= of RedisStreams.",
            )  # fmt: skip
        payload = json.dumps(texts, ensure_ascii=False).encode()
    message: Message[Any] = Message(
        topic=stream,
        payload=payload,
        type=headers.text("type") or headers.text("ce_type"),
        key=_key(headers),
        headers=headers,
        content_type=headers.text("content-type")
        or headers.text("ce_datacontenttype")
        or content_type,
        time=plain_time(headers) or _time(headers.text("ce_time"), entry_id),
        origin=_origin(stream, entry_id, weak_scope),
    )
    return Delivery(message, stream, tag, redelivered=redelivered)


def _origin(stream: str, entry_id: bytes, weak_scope: str) -> dict[str, Any]:
    id_text = entry_id.decode()
    origin: dict[str, Any] = {"stream": stream, "entry_id": id_text}
    if _clock_ms(entry_id) >= _CLOCK_MS_MIN:
        origin["weak_id"] = f"{weak_scope}:{stream}:{id_text}"
    return origin


def _headers(fields: Iterable[tuple[bytes, bytes]]) -> Headers:
    return Headers((name.decode(errors="backslashreplace"), value) for name, value in fields)


def _key(headers: Headers) -> str | None:
    key = headers.get("key", headers.get("ce_subject"))
    if not isinstance(key, bytes):
        return key
    try:
        return key.decode()
    except UnicodeDecodeError:
        return f"hex:{key.hex()}"


def _clock_ms(entry_id: bytes) -> int:
    return int(entry_id.partition(b"-")[0])


def _time(text: str | None, entry_id: bytes) -> datetime | None:
    try:
        if text is None:
            clock_ms = _clock_ms(entry_id)
            return (
                datetime.fromtimestamp(clock_ms / 1000, UTC) if clock_ms >= _CLOCK_MS_MIN else None
            )
        moment = datetime.fromisoformat(text)
    except (ValueError, OverflowError, OSError):
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
