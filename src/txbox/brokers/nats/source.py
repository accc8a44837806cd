"""NATS JetStream: durable pull consumers, confirmed acknowledgements."""

from __future__ import annotations

import logging
import math
import re
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import nats.js.errors
from nats.js.api import AckPolicy, ConsumerConfig, StreamConfig

from txbox.brokers.base import Delivery, Facts, InFlight, Progress, Source, refuse
from txbox.brokers.loop import EventLoop, Result
from txbox.brokers.nats.link import PASSING, Client, Link, Pull, connect
from txbox.brokers.nats.publisher import NatsPublisher
from txbox.errors import BrokerError, BrokerUnavailable, ConfigurationError

_log = logging.getLogger("txbox")

_CALL_S = 10.0
_CONFIRM_S = 5.0
_MAX_DELIVER_MIN = 20
_NO_NAME = re.compile(r"[^A-Za-z0-9_-]+")
_REFUSED_OPTIONS = {
    "servers": "pass them as the first argument",
    "allow_reconnect": "the source reconnects by itself, with new subscriptions",
    "max_reconnect_attempts": "the source keeps trying as long as it runs",
    "reconnect_time_wait": "the worker waits between attempts",
}
_REFUSED_CONSUMER = {
    "name": "set durable=",
    "durable_name": "set durable=",
    "ack_wait": "set ack_wait=",
    "ack_policy": "every message is acknowledged individually",
    "filter_subject": "the topic is the filter",
    "filter_subjects": "the topic is the filter",
    "deliver_subject": "messages are pulled",
    "deliver_group": "messages are pulled",
    "headers_only": "payloads are needed",
    "inactive_threshold": "the consumer must outlive the worker",
}


class Nats(Source):
    """Pulls from JetStream through durable consumers, one per topic. A topic is a subject.

    Args:
        servers: URLs of one cluster.
        durable: the name of the consumer, shared by all workers of a service. With several topics the
            name is followed by "-" and the topic, in which every run of other characters than letters
            and digits becomes "_". Or a mapping from topic to name. Not needed to publish.
        stream: the stream's name; by default the one that has the topic among its subjects.
        ack_wait: how long the server waits for a consumer created here. An existing consumer keeps
            its own.
        confirm: wait until the server confirms each acknowledgement. Otherwise one that is lost leads
            to a redelivery, which is a duplicate.
        consumer: further fields of `nats.js.api.ConsumerConfig` for consumers created here.
        options: passed to the client's `connect`: `user_credentials`, `tls`, `token` …

    A topic may contain wildcards. It is then the topic of all its messages, and the subject is in their
    origin. The topic "*" is the whole stream; then each message's topic is its subject.

    The weak id is made of the stream, the sequence and the time at which the stream stored the message,
    so a recreated stream, whose sequence starts over, has other ids. A mirror may store at other times.

    Guarantee: a message is acknowledged only once its outcome is on disk; while it is in flight, the
    server is told so. A delivery limit would break that guarantee: `max_deliver` below 20 is refused,
    and any other limit is logged as a warning.
    """

    def __init__(
        self,
        servers: str | Sequence[str] = "nats://localhost:4222",
        *,
        durable: str | Mapping[str, str] | None = None,
        stream: str | None = None,
        ack_wait: timedelta = timedelta(seconds=30),
        confirm: bool = True,
        consumer: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        refuse(options, _REFUSED_OPTIONS, "Nats does not take {option}=: {why}.")
        refuse(
            consumer or (), _REFUSED_CONSUMER, "consumer= of Nats does not take {option}: {why}."
        )
        if ack_wait < timedelta(seconds=1):
            raise ConfigurationError(f"ack_wait is {ack_wait}: it must be 1 second or more.")
        self._servers = [servers] if isinstance(servers, str) else list(servers)
        self._durable = durable or ""
        self._stream = stream
        self._confirm_s = _CONFIRM_S if confirm else None
        self._options = options
        self._wanted: dict[str, Any] = {"max_deliver": -1, **(consumer or {})}
        try:
            checked = ConsumerConfig(ack_wait=ack_wait.total_seconds(), **self._wanted)
        except TypeError as error:
            raise ConfigurationError(
                "consumer= of Nats names a field that ConsumerConfig does not have."
            ) from error
        self._check_limit(checked, "consumer= of Nats")
        self._wanted["ack_wait"] = self._ack_wait_s = ack_wait.total_seconds()
        self._names: dict[str, str] = {}
        self._was_there = False
        self._loop: EventLoop | None = None
        self._link: Link | None = None
        self._buffer: deque[Delivery] = deque()
        self._unsettled: dict[Any, None] = {}  # the acknowledgement subjects of what was handed out

    @property
    def name(self) -> str:
        durable = self._durable
        consumers = durable if isinstance(durable, str) else "+".join(sorted(set(durable.values())))
        return f"nats:{consumers}" if consumers else self.publisher().name

    def publisher(self) -> NatsPublisher:
        return NatsPublisher(self._servers, self._options)

    @property
    def tend_every_s(self) -> float | None:
        return self._ack_wait_s / 3

    @property
    def redelivery_s(self) -> float | None:
        """Seconds after which the server redelivers what nobody tends; after `open`, the consumers' own setting."""
        return self._ack_wait_s

    def open(self, topics: Sequence[str], progress: Progress, in_flight: InFlight) -> None:
        if not self._durable:
            raise ConfigurationError("Nats needs the name of a durable consumer: set durable=.")
        if not topics:
            raise ConfigurationError("Nats was given no topics: name subjects.")
        self._names = self._consumer_names(["*"] if "*" in topics else topics)
        self._buffer.clear()
        self._unsettled.clear()
        self._was_there = False
        self._loop = EventLoop(f"txbox-{self.name}")
        try:
            self._connected()
        except BrokerUnavailable as away:
            _log.debug("%s cannot be opened yet: %s", self.name, away)

    def examine(self, topics: Sequence[str]) -> Sequence[Facts]:
        """Ask for streams and, to consume, for their consumers."""
        names = (
            self._consumer_names(["*"] if "*" in topics else topics)
            if self._durable
            else dict.fromkeys(topics)
        )
        loop = EventLoop(f"txbox-{self.name}-facts")
        try:
            return loop.call(self._facts_of(names), _CALL_S)
        except PASSING as error:
            raise BrokerUnavailable(f"NATS cannot be used now: {error!r}") from error
        finally:
            loop.close()

    async def _facts_of(self, names: Mapping[str, str | None]) -> list[Facts]:
        client: Any = await connect(self._servers, self._options, Client)
        try:
            return [await self._facts(client.jetstream(), *named) for named in names.items()]
        finally:
            await client.close()

    async def _facts(self, js: Any, topic: str, durable: str | None) -> Facts:
        try:
            stream = self._stream or await js.find_stream_name_by_subject(topic)
            kept = (await js.stream_info(stream)).config
        except nats.js.errors.NotFoundError:
            return Facts(topic=topic, found=False)
        consumer: ConsumerConfig | None = None
        if durable is not None:
            # one that is not there is created as this source wants it
            with suppress(nats.js.errors.NotFoundError):
                consumer = (await js.consumer_info(stream, durable)).config
        return _facts(topic, kept, consumer, self._ack_wait_s)

    def _consumer_names(self, topics: Sequence[str]) -> dict[str, str]:
        if "*" in topics and self._stream is None:
            raise ConfigurationError('Nats cannot look up the stream of topic "*": set stream=.')
        durable = self._durable
        if not isinstance(durable, str):
            missing = [topic for topic in topics if topic not in durable]
            if missing:
                raise ConfigurationError(
                    f"durable= of Nats names no consumer for {missing[0]!r}: add it."
                )
            return {topic: durable[topic] for topic in topics}
        if len(topics) == 1:
            return {topics[0]: durable}
        names = {topic: f"{durable}-{_NO_NAME.sub('_', topic)}" for topic in topics}
        if len(set(names.values())) < len(names):
            raise ConfigurationError(
                "Two topics would share a consumer name: give durable= a mapping from topics to names."
            )
        return names

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        link = self._connected()
        for pull in link.pulls:
            if pull.gone:
                self._call(self._ensure(link, pull))
                pull.gone = False
        self._call(link.receive(messages_max, wait_s), wait_s)
        found = [self._buffer.popleft() for _ in range(min(messages_max, len(self._buffer)))]
        self._unsettled.update(dict.fromkeys(delivery.tag for delivery in found))
        return found

    def tend(self, deliveries: Sequence[Delivery]) -> None:
        """Tell the server that what is in flight is in progress; it then waits `ack_wait` again."""
        replies = [delivery.tag for delivery in (*deliveries, *self._buffer)]
        if replies:
            self._call(self._connected().in_progress(replies))

    def settle(self, deliveries: Sequence[Delivery]) -> None:
        # never given back, whatever happens here: if this fails, they come again anyway
        for delivery in deliveries:
            self._unsettled.pop(delivery.tag, None)
        # acknowledgement subjects outlive the connection they came through
        link = self._connected()
        missing = self._call(
            link.acknowledge([delivery.tag for delivery in deliveries], self._confirm_s), _CONFIRM_S
        )
        if missing:
            raise BrokerError(
                f"NATS did not confirm {missing} of {len(deliveries)} acknowledgements: they will come again.",
                failed=missing,
            )

    def close(self) -> None:
        """Return what was not settled, for whoever receives next, and disconnect.

        The server counts that as a delivery, as it would after `ack_wait`.
        """
        loop, link = self._loop, self._link
        self._loop = self._link = None
        if loop is None:
            return
        try:
            if link is not None and link.up:
                loop.call(self._close(link), _CALL_S)
        except PASSING as error:
            raise BrokerUnavailable(f"NATS is unavailable: {error!r}") from error
        finally:
            self._buffer.clear()
            self._unsettled.clear()
            loop.close()

    async def _close(self, link: Link) -> None:
        await link.unsubscribe()
        await link.give_back([*self._unsettled, *(delivery.tag for delivery in self._buffer)])
        await link.close()

    # -- the connection and the consumers -----------------------------------------------------

    def _call(self, work: Coroutine[Any, Any, Result], more_s: float = 0.0) -> Result:
        assert self._loop is not None
        try:
            return self._loop.call(work, _CALL_S + more_s)
        except PASSING as error:
            raise BrokerUnavailable(f"NATS is unavailable: {error!r}") from error

    def _connected(self) -> Link:
        link = self._link
        if link is None or not link.up:
            self._link = None
            link = self._link = self._call(self._connect())
        return link

    async def _connect(self) -> Link:
        link = Link(await connect(self._servers, self._options, Client), self._buffer)
        try:
            waits_s: list[float] = []
            for topic, durable in self._names.items():
                pull = Pull(await self._stream_of(link, topic), durable, topic)
                waits_s.append(await self._ensure(link, pull))
                await link.start(pull)
            self._ack_wait_s = min(waits_s)
            self._was_there = True
        except BaseException:
            await link.close()
            raise
        return link

    async def _stream_of(self, link: Link, topic: str) -> str:
        if self._stream is not None:
            return self._stream
        try:
            found: str = await link.js.find_stream_name_by_subject(topic)
        except nats.js.errors.NotFoundError as error:
            raise ConfigurationError(
                f"No NATS stream has the subject {topic!r}: create one, or check the topic."
            ) from error
        return found

    async def _ensure(self, link: Link, pull: Pull) -> float:
        """Create the consumer if it does not exist; returns its timeout in seconds."""
        subject = None if pull.topic == "*" else pull.topic
        try:
            try:
                info = await link.js.consumer_info(pull.stream, pull.durable)
            except nats.js.errors.NotFoundError:
                config = ConsumerConfig(
                    durable_name=pull.durable, filter_subject=subject,
                    ack_policy=AckPolicy.EXPLICIT, **self._wanted,
                )  # fmt: skip
                info = await link.js.add_consumer(pull.stream, config)
        except nats.js.errors.NotFoundError as error:
            if self._was_there:
                # whoever deleted it may create it again
                raise BrokerUnavailable(f"The stream {pull.stream!r} is gone.") from error
            raise ConfigurationError(
                f"NATS has no stream {pull.stream!r}: create it, or check stream= of Nats."
            ) from error
        except nats.js.errors.BadRequestError as error:
            raise ConfigurationError(
                f"NATS refused the consumer {pull.durable!r} of stream {pull.stream!r}: {error}"
            ) from error
        return self._checked(info.config, pull, subject)

    def _checked(self, config: ConsumerConfig, pull: Pull, subject: str | None) -> float:
        what = f"The consumer {pull.durable!r} of stream {pull.stream!r}"
        if config.deliver_subject:
            raise ConfigurationError(f"{what} pushes: set durable= to a pull consumer.")
        if config.ack_policy not in (AckPolicy.EXPLICIT, "explicit"):
            raise ConfigurationError(
                f"{what} has ack_policy {config.ack_policy}: only explicit redelivers what a crash leaves behind."
            )
        if config.headers_only:
            raise ConfigurationError(f"{what} has headers_only: payloads are needed.")
        # a stream with a single subject may report no filter
        if config.filter_subject != subject and config.filter_subject and subject:
            raise ConfigurationError(
                f"{what} filters {config.filter_subject!r}, not {subject!r}: set durable= to a different name."
            )
        self._check_limit(config, what)
        waits = config.backoff or [config.ack_wait or self._ack_wait_s]
        return min(waits)

    def _check_limit(self, config: ConsumerConfig, what: str) -> None:
        limit = config.max_deliver
        if limit is None or limit <= 0:
            return
        if limit < _MAX_DELIVER_MIN:
            raise ConfigurationError(
                f"{what} has max_deliver {limit}: after that many deliveries NATS never delivers a message again, "
                "and crashes count too. Set it to -1; attempts are counted in the database."
            )
        _log.warning(
            "%s has max_deliver %d: a message delivered that often is lost to it. Set it to -1.",
            what, limit,
        )  # fmt: skip


def _facts(
    topic: str, stream: StreamConfig, consumer: ConsumerConfig | None, ack_wait_s: float
) -> Facts:
    age_s = float(stream.max_age or 0.0) or math.inf
    # what everybody has acknowledged is gone from the others
    replayed = str(getattr(stream.retention, "value", stream.retention)) in ("None", "limits")
    waits_s: list[float] = [ack_wait_s]
    most, policy = None, None
    if consumer is not None:
        waits_s = list(consumer.backoff or [consumer.ack_wait or ack_wait_s])
        most, policy = consumer.max_deliver, consumer.ack_policy
    aged = f"stream {stream.name}: max_age={0 if math.isinf(age_s) else age_s:g} s"
    return Facts(
        topic=topic,
        replay_s=age_s if replayed else None,
        kept_s=None if math.isinf(age_s) else age_s,
        redelivery_s=min(waits_s),
        deliveries_max=most if most is not None and most > 0 else None,
        acknowledged=policy is None or policy in (AckPolicy.EXPLICIT, "explicit"),
        duplicates_s=float(stream.duplicate_window or 0.0) or None,
        said={
            "replay_s": aged,
            "kept_s": aged,
            "redelivery_s": f"ack_wait={min(waits_s):g} s",
            "deliveries_max": f"max_deliver={most}",
            "acknowledged": f"ack_policy={getattr(policy, 'value', policy)}",
            "duplicates_s": f"stream {stream.name}: duplicate_window={stream.duplicate_window:g} s",
        },
    )
