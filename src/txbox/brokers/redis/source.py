"""Redis Streams: consumer groups, claims of what dead consumers left, an alarm for what was trimmed."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, cast

import redis
from redis import exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from txbox.brokers.base import Delivery, InFlight, Progress
from txbox.brokers.redis.group import Entry, Group, code_of, delivery_of
from txbox.brokers.redis.publisher import RedisPublisher
from txbox.errors import BrokerError, BrokerUnavailable, ConfigurationError
from txbox.events import MessagesLost

_log = logging.getLogger("txbox")

_SOCKET_TIMEOUT_S = 10.0
_REFUSED = {
    "decode_responses": "payloads stay bytes",
    "protocol": "replies are read in one form",
    "retry": "a read that is repeated unseen loses what its first answer held",
    "retry_on_error": "a read that is repeated unseen loses what its first answer held",
    "retry_on_timeout": "a read that is repeated unseen loses what its first answer held",
    "single_connection_client": "the source opens its connections itself",
}
# what a wait can cure: another server becomes master, the disk has room again, a script ends
_PASSING = frozenset({"BUSY", "MISCONF", "NOREPLICAS", "UNBLOCKED"})
_PASSING_ERRORS = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    exceptions.OutOfMemoryError,
    exceptions.TryAgainError,
    exceptions.ClusterDownError,
)


class RedisStreams:
    """Reads Redis streams as one consumer of a group; a topic is a stream's key.

    Args:
        url: as redis-py takes it: `redis://`, `rediss://` or `unix://`.
        group: the consumer group; created where a stream lacks it, the stream as well. Publishing
            needs none.
        payload: the field that holds the payload. An entry without it has all its fields as a JSON
            object of texts for a payload.
        claim_idle: an entry that no consumer tended for so long is taken over, 1 second or more.
        start: where a group that is created here begins: "0" is the whole stream, "$" what comes next.
        incarnation: text for weak ids, see below.
        maxlen: of publishing: trim each stream to about so many entries.
        replicas: of publishing: how many replicas must have an entry before it counts as confirmed.
        options: passed to `redis.Redis.from_url`.

    Fields `message-id`, `type`, `key`, `content-type` and CloudEvents `ce_…` describe the message;
    every field but the payload's is a header, its value as bytes. A key that is not UTF-8 becomes
    its hexadecimal digits after "hex:". The fields of an entry whose payload is a JSON object must
    be UTF-8 and each there once; otherwise it is quarantined.

    The weak id is `incarnation`, database number, stream and entry id. Redis tells nothing by which
    a recreated stream could be known, but ids that the server makes begin with its clock, so a new
    stream does not repeat them unless that clock is set back. Ids that the producer made up can come
    again: one that cannot be a time gives no weak id. Set `incarnation` when streams of one name lie
    on several servers, and change it with a stream whose ids begin anew.

    Guarantee: an entry is acknowledged only when its outcome is on disk. An entry that was trimmed
    or deleted while it was pending cannot be processed: it is logged as "lost upstream", reported as
    `MessagesLost`, counted in `lost_upstream` and acknowledged. Redis 7 or later.
    """

    def __init__(
        self,
        url: str,
        *,
        group: str | None = None,
        payload: str = "payload",
        claim_idle: timedelta = timedelta(seconds=60),
        start: str = "0",
        incarnation: str = "",
        maxlen: int | None = None,
        replicas: int = 0,
        **options: Any,
    ) -> None:
        for option, why in _REFUSED.items():
            if option in options:
                raise ConfigurationError(f"RedisStreams takes no {option}=: {why}.")
        if (maxlen is not None and maxlen < 1) or replicas < 0:
            raise ConfigurationError(
                f"maxlen={maxlen}, replicas={replicas}: use 1 entry or more, and 0 replicas or more."
            )
        if claim_idle < timedelta(seconds=1):
            raise ConfigurationError(f"claim_idle is {claim_idle}: it must be 1 second or more.")
        self._published = partial(
            RedisPublisher, url, dict(options), payload=payload, maxlen=maxlen, replicas=replicas
        )
        options.setdefault("socket_timeout", _SOCKET_TIMEOUT_S)
        timeout_s: float | None = options["socket_timeout"]
        try:
            self._client: Any = cast("Any", redis.Redis).from_url(
                url, **options, decode_responses=False, protocol=2, retry=Retry(NoBackoff(), 0)
            )
        except ValueError:
            # redis-py's text may quote the URL, which may hold a password
            raise ConfigurationError(
                "The URL of RedisStreams is not usable: write redis://host:port/database."
            ) from None
        if self._client.connection_pool.connection_kwargs.get("decode_responses"):
            raise ConfigurationError("RedisStreams takes no decode_responses: payloads stay bytes.")
        self._block_max_s = math.inf if timeout_s is None else timeout_s / 2
        database = self._client.connection_pool.connection_kwargs.get("db") or 0
        self._weak_scope = f"redis:{incarnation}:{database}"
        self._group = Group(self._client, group or "", ())
        self._payload = payload.encode()
        self._claim_idle_s = claim_idle.total_seconds()
        self._start = start
        self._in_flight: InFlight | None = None
        self._ready = False
        self._broken = False
        self._claim_at = 0.0
        self._buffer: deque[Delivery] = deque()
        self._held: set[tuple[str, bytes]] = set()  # ours: in the buffer or handed out
        #: Entries that were trimmed or deleted before they could be processed.
        self.lost_upstream = 0

    topics: Sequence[str] | None = None
    exhausted = False

    @property
    def name(self) -> str:
        return f"redis:{self._group.name}" if self._group.name else self.publisher().name

    def publisher(self) -> RedisPublisher:
        return self._published()

    @property
    def tend_every_s(self) -> float | None:
        return self._claim_idle_s / 3

    @property
    def redelivery_s(self) -> float | None:
        """Seconds after which another consumer takes over what nobody tends."""
        return self._claim_idle_s

    def keeps_order(self, topic: str) -> bool:  # noqa: ARG002  # every one
        """A group shares a stream out entry by entry."""
        return False

    def open(
        self,
        topics: Sequence[str],
        progress: Progress,  # noqa: ARG002  # the group remembers
        in_flight: InFlight | None = None,
    ) -> None:
        if not self._group.name:
            raise ConfigurationError("RedisStreams needs the name of a consumer group: group=.")
        if "*" in topics or not topics:
            raise ConfigurationError(
                "RedisStreams reads streams by name: list them, app.consume(source, topics=[…])."
            )
        self._group = Group(self._client, self._group.name, topics)
        self._in_flight = in_flight
        self._ready = self._broken = False
        self._buffer.clear()
        self._held.clear()
        try:
            self._prepare()
        except exceptions.AuthenticationError as error:
            raise ConfigurationError(
                "Redis refused the user or the password: check the URL of RedisStreams."
            ) from error
        except exceptions.RedisError as error:
            self._at_open(error)

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        try:
            if not self._ready:
                self._prepare()
            if not self._buffer:
                self._claim(messages_max)
            if not self._buffer:
                self._read_new(messages_max, wait_s)
        except exceptions.RedisError as error:
            self._raise(error)
        return [self._buffer.popleft() for _ in range(min(messages_max, len(self._buffer)))]

    def tend(self, deliveries: Sequence[Delivery]) -> None:
        """Reset the idle time of what is in flight; neither delivered nor counted by that."""
        try:
            self._group.touch(
                [delivery.tag for delivery in (*deliveries, *self._buffer)], idle_ms=0
            )
        except exceptions.RedisError as error:
            self._raise(error)

    def settle(self, deliveries: Sequence[Delivery]) -> None:
        # if it fails they come again by a claim, as duplicates
        self._held.difference_update(delivery.tag for delivery in deliveries)
        try:
            self._group.acknowledge([delivery.tag for delivery in deliveries])
        except exceptions.RedisError as error:
            self._raise(error)

    def close(self) -> None:
        """Let the others take over at once what was not settled, and leave the group."""
        try:
            if self._ready:
                self._group.touch(list(self._held), idle_ms=math.ceil(self._claim_idle_s * 1000))
                # after a broken connection an unseen read could still bring entries under our name
                if not self._broken:
                    self._group.leave()
        except exceptions.RedisError as error:
            self._raise(error)
        finally:
            self._buffer.clear()
            self._held.clear()
            self._ready = False
            self._client.close()

    # -- reading ------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Make sure of the groups, then take what is pending under our own name."""
        for stream in self._group.streams:
            self._group.create(stream, self._start)
        for stream in self._group.streams:
            for entries in self._group.read_own(stream):
                self._keep(stream, entries, redelivered=True)
        self._ready = True

    def _read_new(self, messages_max: int, wait_s: float) -> None:
        # COUNT holds for each stream; what is more than asked for waits in the buffer, tended
        count = math.ceil(messages_max / len(self._group.streams))
        block_ms = math.floor(min(wait_s, self._block_max_s) * 1000)
        try:
            found = self._group.read_new(count, block_ms)
        except exceptions.ResponseError as error:
            if code_of(error) not in ("NOGROUP", "UNBLOCKED"):
                raise
            self._recreate()
            return
        for stream, entries in found:
            self._keep(stream, entries, redelivered=False)

    def _recreate(self) -> None:
        _log.warning(
            "%s: the group or a stream of %s was deleted; it is created again and read from its beginning.",
            self.name, ", ".join(self._group.streams),
        )  # fmt: skip
        for stream in self._group.streams:
            self._group.create(stream, "0")

    def _claim(self, messages_max: int) -> None:
        """Take over what consumers that are gone left pending, oldest first."""
        if time.monotonic() < self._claim_at:
            return
        idle_ms = math.ceil(self._claim_idle_s * 1000)
        more = False
        for stream in self._group.streams:
            cursor: bytes = b"0-0"
            while len(self._buffer) < messages_max:
                try:
                    cursor, found, deleted = self._group.claim(
                        stream, cursor, idle_ms, messages_max
                    )
                except exceptions.ResponseError as error:
                    if code_of(error) != "NOGROUP":
                        raise
                    self._recreate()
                    break
                if deleted:
                    self._lost(stream, deleted)
                self._keep(stream, found, redelivered=True)
                if cursor == b"0-0":
                    break
            more = more or len(self._buffer) >= messages_max
        # with more to claim, the next receive goes on
        self._claim_at = 0.0 if more else time.monotonic() + self._claim_idle_s / 4

    def _keep(self, stream: str, entries: Iterable[Entry], *, redelivered: bool) -> None:
        gone: list[bytes] = []
        for entry_id, fields in entries:
            if (stream, entry_id) in self._held:
                continue
            if fields is None:
                gone.append(entry_id)
                continue
            self._held.add((stream, entry_id))
            self._buffer.append(
                delivery_of(
                    fields,
                    (stream, entry_id),
                    self._payload,
                    self._weak_scope,
                    redelivered=redelivered,
                )
            )
        if gone:
            self._lost(stream, gone)
            self._group.acknowledge([(stream, gone_id) for gone_id in gone])

    def _lost(self, stream: str, entry_ids: Sequence[bytes]) -> None:
        self.lost_upstream += len(entry_ids)
        reason = (
            f"lost upstream: {len(entry_ids)} entries of stream {stream} were trimmed or deleted before group "
            f"{self._group.name} could process them (first {entry_ids[0].decode()}): give the stream a longer MAXLEN."
        )
        _log.warning("%s", reason)
        if self._in_flight is not None:
            self._in_flight.report(
                MessagesLost(source=self.name, topic=stream, count=len(entry_ids), reason=reason)
            )

    # -- errors -------------------------------------------------------------------------------

    def _at_open(self, error: exceptions.RedisError) -> None:
        if isinstance(error, exceptions.NoPermissionError):
            raise ConfigurationError(
                f"Redis does not permit this user to consume ({error}): allow @stream on the streams."
            ) from error
        if code_of(error) == "WRONGTYPE":
            raise ConfigurationError(
                f"One of the keys {', '.join(map(repr, self._group.streams))} is no stream: check the topics."
            ) from error
        try:
            self._raise(error)
        except BrokerUnavailable as away:
            _log.debug("%s cannot be opened yet: %s", self.name, away)

    def _raise(self, error: exceptions.RedisError) -> NoReturn:
        if isinstance(error, _PASSING_ERRORS) or code_of(error) in _PASSING:
            # an answer may have been lost on its way: what it held is pending under our name
            self._ready, self._broken = False, True
            raise BrokerUnavailable(f"Redis cannot be used now: {error}") from error
        raise BrokerError(f"Redis refused a command of {self.name}: {error}") from error
