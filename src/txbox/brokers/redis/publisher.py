"""Publishing to Redis Streams: pipelined XADD, each with its answer."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import redis
from redis import exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from txbox.brokers.plain import (
    CONTENT_TYPE,
    KEY,
    MESSAGE_ID,
    TIME,
    TYPE,
    described,
    payload_of,
    utf8,
)
from txbox.errors import BrokerError, BrokerUnavailable, MessageRefused
from txbox.message import Message

_PART_COMMANDS = 500
_PART_BYTES = 4 * 1024 * 1024
_FIELD_BYTES_MAX = 512 * 1024 * 1024
_AWAY = (exceptions.ConnectionError, exceptions.TimeoutError)
#: The server is there and cannot write at all now: another becomes master, data are being loaded.
_PASSING = (
    exceptions.ReadOnlyError,
    exceptions.ClusterDownError,
    exceptions.MasterDownError,
    exceptions.BusyLoadingError,
)

_Command = tuple[int, list[bytes]]


class RedisPublisher:
    """Appends entries as RedisStreams reads them; a topic is a stream's key, made where it is missing.

    The payload is one field, `message-id`, `type`, `key`, `content-type`, `time` and each header are
    others, with bytes for values; a repeated header is a repeated field, one without a value an
    empty field. There are no tombstones.

    Args:
        payload: the field that holds the payload.
        maxlen: trim each stream to about so many entries; None keeps all.
        replicas: how many replicas must have an entry before it counts as confirmed (WAIT).

    Guarantee: what is confirmed is in the stream of the master. Only `appendfsync always` keeps it
    through a power failure; a failover may lose what no replica has.
    """

    event_prefix = "ce_"

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
        # the last command may begin at half the time, and take as long again
        until, timeout_s = time.monotonic() + within_s / 2, within_s / 2
        answers: list[BrokerError | None] = [
            BrokerError(f"Redis has not confirmed the entry within {within_s:g} s.")
        ] * len(messages)
        try:
            self._connect(timeout_s)
        except exceptions.RedisError as error:
            raise self._away(error) from error
        commands: list[_Command] = []
        for at, message in enumerate(messages):
            try:
                commands.append((at, self._command(message)))
            except MessageRefused as refusal:
                answers[at] = refusal
        heard = False
        for part in _parts(commands):
            if time.monotonic() > until:
                break
            try:
                replies = self._run([command for _, command in part], timeout_s)
            except exceptions.RedisError as error:
                away = self._away(error)
                if not heard:
                    raise away from error
                break
            if all(isinstance(reply, _PASSING) for reply in replies) and not heard:
                raise self._away(replies[0]) from replies[0]
            heard = True
            for (at, _), reply in zip(part, replies, strict=True):
                answers[at] = _sentence(reply, messages[at].topic)
        return answers

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    # -- commands -----------------------------------------------------------------------------

    def _command(self, message: Message[Any]) -> list[bytes]:
        fields = [self._payload, payload_of(message, "Redis")]
        for name, value in described(message, MESSAGE_ID, TYPE, KEY, CONTENT_TYPE, TIME):
            text = "" if value is None else value
            fields += [utf8(name), text if isinstance(text, bytes) else utf8(text)]
        longest = max(map(len, fields))
        if longest > self._field_bytes_max:
            raise MessageRefused(
                f"A field of {longest} bytes is more than Redis takes ({self._field_bytes_max}, its "
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
                f"{copies} of {self._replicas} replicas of Redis have confirmed the entry in time."
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
            # managed servers do not tell; then it is the default
            self._field_bytes_max = _FIELD_BYTES_MAX
        self._client, self._timeout_s = client, timeout_s

    def _new_client(self, timeout_s: float) -> Any:
        timeouts = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
        return cast("Any", redis.Redis).from_url(
            self._url, **{**self._options, **timeouts},
            decode_responses=False, protocol=2, retry=Retry(NoBackoff(), 0),
        )  # fmt: skip

    def _away(self, error: Exception) -> BrokerUnavailable:
        self.close()
        return BrokerUnavailable(f"Redis cannot be used now: {error}")


def _parts(commands: Sequence[_Command]) -> Iterator[Sequence[_Command]]:
    part: list[_Command] = []
    size = 0
    for command in commands:
        own_size = sum(map(len, command[1]))
        if part and (len(part) == _PART_COMMANDS or size + own_size > _PART_BYTES):
            yield part
            part, size = [], 0
        part.append(command)
        size += own_size
    if part:
        yield part


def _sentence(reply: object, topic: str) -> BrokerError | None:
    if isinstance(reply, exceptions.OutOfMemoryError):
        return BrokerError(
            f"Redis has no memory for stream {topic!r}: raise maxmemory, or trim streams by maxlen=."
        )
    if isinstance(reply, BrokerError):
        return reply
    if isinstance(reply, Exception):
        return BrokerError(f"Redis did not take the entry for {topic!r} ({reply}): check the key.")
    return None
