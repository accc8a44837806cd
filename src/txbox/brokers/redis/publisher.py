"""Publishing to Redis Streams: pipelined XADD, with an answer for each."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import redis
from redis import exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from txbox.brokers.base import Batch, parts
from txbox.brokers.envelope import REDIS, utf8
from txbox.errors import BrokerError, BrokerUnavailable, MessageRefused
from txbox.message import Message

_PART_COMMANDS = 500
_PART_BYTES = 4 * 1024 * 1024
_FIELD_BYTES_MAX = 512 * 1024 * 1024
#: The server is there but cannot write now: a failover is under way, or data is being loaded.
_PASSING = (
    exceptions.ReadOnlyError,
    exceptions.ClusterDownError,
    exceptions.MasterDownError,
    exceptions.BusyLoadingError,
)


def new_client(url: str, options: Mapping[str, Any]) -> Any:
    """Create a client that never retries silently and decodes nothing; raises ValueError for a bad URL."""
    return cast("Any", redis.Redis).from_url(
        url, **options, decode_responses=False, protocol=2, retry=Retry(NoBackoff(), 0)
    )


class RedisPublisher:
    """Appends entries in the form RedisStreams reads. A topic is a stream's key, created if missing.

    Headers are fields whose values are bytes. A repeated header is a repeated field; one without a
    value is an empty field.

    Args:
        payload: the field for the payload.
        maxlen: trim each stream to about this many entries; None keeps all.
        replicas: how many replicas must have an entry before it counts as confirmed (WAIT).

    Guarantee: what is confirmed is in the master's stream. Only with `appendfsync always` does it
    survive a power failure; a failover may lose what no replica has.
    """

    event_prefix = REDIS.prefix

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any],
        *,
        payload: str,
        maxlen: int | None,
        replicas: int,
    ) -> None:
        self._url, self._options = url, options
        self._payload = payload.encode()
        self._trim: tuple[bytes, ...] = () if maxlen is None else (b"MAXLEN", b"~", b"%d" % maxlen)
        self._replicas = replicas
        self._client: Any = None
        self._timeout_s = 0.0
        self._field_bytes_max = _FIELD_BYTES_MAX
        known = self._new_client(1.0).connection_pool.connection_kwargs
        where = known.get("path") or f"{known.get('host', 'localhost')}:{known.get('port', 6379)}"
        self.name = f"redis:{where}/{known.get('db') or 0}"

    def publish(
        self, messages: Sequence[Message[Any]], within_s: float
    ) -> Sequence[BrokerError | None]:
        batch = Batch(REDIS.name, messages, within_s)
        # the last command may start at half the time, and take as long again
        until, timeout_s = time.monotonic() + within_s / 2, within_s / 2
        try:
            self._connect(timeout_s)
            commands = batch.entries(self._command)
            for part in parts(commands, _size_of, _PART_COMMANDS, _PART_BYTES):
                if time.monotonic() > until:
                    break
                replies = self._run([command for _, command in part], timeout_s)
                if all(isinstance(reply, _PASSING) for reply in replies) and not batch.heard:
                    raise replies[0]
                for (at, _), reply in zip(part, replies, strict=True):
                    batch.answer(at, _error_of(reply, messages[at].topic))
        except exceptions.RedisError as error:
            self.close()
            batch.away = BrokerUnavailable(f"Redis is unavailable: {error}")
            batch.away.__cause__ = error
        return batch.outcome()

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    # -- commands -----------------------------------------------------------------------------

    def _command(self, message: Message[Any]) -> list[bytes]:
        fields = [self._payload, REDIS.payload(message)]
        for name, value in REDIS.headers(message):
            text = "" if value is None else value
            fields += [utf8(name), text if isinstance(text, bytes) else utf8(text)]
        longest = max(map(len, fields))
        if longest > self._field_bytes_max:
            raise MessageRefused(
                f"A field of {longest} bytes exceeds what Redis allows ({self._field_bytes_max}, its "
                "proto-max-bulk-len): make the payload or the header smaller."
            )
        return [b"XADD", utf8(message.topic), *self._trim, b"*", *fields]

    def _run(self, commands: Sequence[Sequence[bytes]], timeout_s: float) -> list[Any]:
        with self._client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            if self._replicas:
                pipeline.execute_command("WAIT", self._replicas, math.floor(timeout_s * 800))
            replies: list[Any] = pipeline.execute(raise_on_error=False)
        if not self._replicas:
            return replies
        *replies, copies = replies
        if isinstance(copies, exceptions.RedisError) or copies < self._replicas:
            missing = BrokerError(
                f"Only {copies} of {self._replicas} replicas of Redis confirmed the entry in time."
            )
            return [reply if isinstance(reply, Exception) else missing for reply in replies]
        return replies

    # -- the connection -----------------------------------------------------------------------

    def _connect(self, timeout_s: float) -> None:
        if self._client is not None and self._timeout_s == timeout_s:
            return
        self.close()
        client = self._new_client(timeout_s)
        try:
            found = client.execute_command("CONFIG GET", "proto-max-bulk-len")
            limit = next(iter(dict(found).values()), _FIELD_BYTES_MAX)
            self._field_bytes_max = int(limit)
        except exceptions.ResponseError:
            # managed servers do not reveal it; assume the default
            self._field_bytes_max = _FIELD_BYTES_MAX
        self._client, self._timeout_s = client, timeout_s

    def _new_client(self, timeout_s: float) -> Any:
        timeouts = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
        return new_client(self._url, {**self._options, **timeouts})


def _size_of(entry: tuple[int, list[bytes]]) -> int:
    return sum(map(len, entry[1]))


def _error_of(reply: object, topic: str) -> BrokerError | None:
    if isinstance(reply, exceptions.OutOfMemoryError):
        return BrokerError(
            f"Redis is out of memory for stream {topic!r}: raise maxmemory, or trim streams with maxlen=."
        )
    if isinstance(reply, BrokerError):
        return reply
    if isinstance(reply, Exception):
        return BrokerError(
            f"Redis did not accept the entry for {topic!r} ({reply}): check the key."
        )
    return None
