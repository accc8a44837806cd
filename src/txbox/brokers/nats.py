"""NATS JetStream: durable pull consumers, confirmed acknowledgements, and messages with all their headers."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar, cast

from txbox.boundaries import log as _log
from txbox.brokers.base import (
    LAST_WORD_S,
    Batch,
    Context,
    Delivery,
    Source,
    refuse,
    run_of,
    taken,
)
from txbox.brokers.envelope import NATS, clock, utf8
from txbox.brokers.facts import Facts, of_nats
from txbox.brokers.loop import LoopConsumer, LoopPublisher, run_once
from txbox.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigurationError,
    DestinationRefused,
    MessageRefused,
    installed,
)
from txbox.message import Message

with installed("nats", "NATS"):
    import nats.aio.client
    import nats.errors
    import nats.js.errors
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription
    from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
    from nats.protocol import command as _command
    from nats.protocol.parser import AUTHORIZATION_VIOLATION as _AUTHORIZATION_VIOLATION

Connected = TypeVar("Connected", bound="Client")

# -- the connection -----------------------------------------------------------------------------------

#: A connection that answers none of three is lost.
_PING_S = 10
#: Errors that waiting can cure: no server, no leader, a connection lost meanwhile.
_TROUBLE = (nats.errors.Error, OSError, TimeoutError)


class LoginRefused(nats.errors.AuthorizationError):
    """The server knows no such user, or not with this password, token or key."""

    def __str__(self) -> str:
        return "the server rejects the login: correct user and password, token or credentials"


class RawHeaders(dict[str, str]):
    """Empty for the client; `pairs` has the headers as received, including repeats and bytes that are not text."""

    def __init__(self, pairs: Sequence[tuple[str, str | bytes]]) -> None:
        super().__init__()
        self.pairs = pairs


class Client(nats.aio.client.Client):
    """The nats-py client, which would otherwise drop all headers of a message if it cannot parse one."""

    async def _process_headers(self, headers: Any) -> Any:
        if headers and not bytes(headers).startswith(b"NATS/1.0\r\n"):
            # a status sent by the server
            return await super()._process_headers(headers)  # pyright: ignore[reportUnknownMemberType]  # untyped there
        return RawHeaders(_pairs(bytes(headers))) if headers else None


def _pairs(raw: bytes) -> list[tuple[str, str | bytes]]:
    pairs: list[tuple[str, str | bytes]] = []
    for line in raw.split(b"\r\n")[1:]:
        name, colon, value = line.partition(b":")
        if colon:
            pairs.append((name.decode(errors="backslashreplace"), _text(value.strip())))
    return pairs


def _text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


async def connect(
    servers: Sequence[str], options: Mapping[str, Any], make: Callable[[], Connected]
) -> Connected:
    """Connect a new client to one of the servers.

    Raises:
        LoginRefused: a server does not accept the user.
        nats.errors.Error: the last server's answer.
        OSError: the last server cannot be reached.
    """
    failure: Exception | None = None
    for server in random.sample(list(servers), len(servers)):
        client: Any = make()
        try:
            # a subscription that survived a reconnect can fall silent, so every connection gets new ones
            await client.connect(
                # by default, six minutes without an answer pass before a connection counts as lost
                servers=[server], **{"error_cb": _noted, "ping_interval": _PING_S, **options},
                allow_reconnect=False, max_reconnect_attempts=1, reconnect_time_wait=0.1,
            )  # fmt: skip
        except _TROUBLE as error:
            failure = LoginRefused() if _rejects_login(error) else error
            # before 2.10 the client fails to close what was never connected
            with suppress(AttributeError):
                await client.close()
        else:
            connection: Connected = client
            return connection
    assert failure is not None
    raise failure


def _rejects_login(error: BaseException) -> bool:
    # the server numbers no errors, and the client makes this one of its text while it connects
    return (
        isinstance(error, nats.errors.AuthorizationError)
        or _AUTHORIZATION_VIOLATION in str(error).lower()
    )


async def _noted(error: Exception) -> None:
    _log.debug("NATS: %r", error)


# -- consuming ----------------------------------------------------------------------------------------

_CONFIRM_S = 5.0
_PULL_S = 5.0
_REFUSED_S = 0.25
_ACK, _NAK, _IN_PROGRESS = b"+ACK", b"-NAK", b"+WPI"
_MAX_DELIVER_MIN = 20
_EXPLICIT = (AckPolicy.EXPLICIT, "explicit")
_NO_NAME = re.compile(r"[^A-Za-z0-9_-]+")
#: A server that was restarted may say that a consumer was created a fraction of a millisecond later (v: 2.9).
_SAME_S = 1.0
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
        consumer: further fields of `nats.js.api.ConsumerConfig` for consumers created here. One that is lost
            while the source is open starts at the beginning of the stream, or at `opt_start_time`.
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
        self._options = options
        wanted: dict[str, Any] = {"max_deliver": -1, **(consumer or {})}
        try:
            checked = ConsumerConfig(ack_wait=ack_wait.total_seconds(), **wanted)
        except TypeError as error:
            raise ConfigurationError(
                "consumer= of Nats names a field that ConsumerConfig does not have."
            ) from error
        _check_limit(checked, "consumer= of Nats")
        self._ack_wait_s = wanted["ack_wait"] = ack_wait.total_seconds()
        names = (
            durable if isinstance(durable, str) else "+".join(sorted({*(durable or {}).values()}))
        )
        self.name = f"nats:{names}" if names else self.publisher().name
        self.tend_every_s = self._ack_wait_s / 3
        # the server redelivers what nobody tends; a consumer has its own setting
        self.redelivery_s = self._ack_wait_s
        self._consumed = partial(
            NatsConsumer, self, self._client,
            stream=stream, confirm_s=_CONFIRM_S if confirm else None, wanted=wanted,
        )  # fmt: skip

    def publisher(self) -> NatsPublisher:
        return NatsPublisher(self._servers, self._options)

    def consumer(self, topics: Sequence[str], context: Context) -> NatsConsumer:
        if not self._durable:
            raise ConfigurationError("Nats needs the name of a durable consumer: set durable=.")
        if not topics:
            raise ConfigurationError("Nats was given no topics: name subjects.")
        return self._consumed(self._consumer_names(["*"] if "*" in topics else topics))

    def examine(self, topics: Sequence[str]) -> Sequence[Facts]:
        """Ask for streams and, to consume, for their consumers."""
        names = (
            self._consumer_names(["*"] if "*" in topics else topics)
            if self._durable
            else dict.fromkeys(topics)
        )
        return run_once(self.name, self._facts_of(names), _TROUBLE)

    async def _client(self) -> Any:
        try:
            return await connect(self._servers, self._options, Client)
        except LoginRefused as error:
            servers = ", ".join(map(_without_credentials, self._servers))
            raise ConfigurationError(f"NATS at {servers}: {error}.") from error

    async def _facts_of(self, names: Mapping[str, str | None]) -> list[Facts]:
        client = await self._client()
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
        return of_nats(
            topic, kept, consumer,
            redelivery_s=self._ack_wait_s if consumer is None else _redelivery_s(consumer, self._ack_wait_s),
            acknowledged=consumer is None or consumer.ack_policy in (None, *_EXPLICIT),
        )  # fmt: skip

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


class NatsConsumer(LoopConsumer["Link"]):
    """Pulls through durable consumers, on a connection that it makes again when it is lost. See `Nats`.

    Args:
        make_client: connects a client.
        names: topic → name of its durable consumer.
        confirm_s: how long each acknowledgement is waited for; None for not at all.
        wanted: fields of consumers created here.
    """

    trouble = _TROUBLE

    def __init__(
        self,
        source: Nats,
        make_client: Callable[[], Awaitable[Any]],
        names: Mapping[str, str],
        *,
        stream: str | None,
        confirm_s: float | None,
        wanted: Mapping[str, Any],
    ) -> None:
        super().__init__(source)
        self._client = make_client
        self._names = names
        self._stream = stream
        self._confirm_s = confirm_s
        self._wanted = wanted
        self._consumers: dict[str, Consumer] = {}  # by topic
        self._buffer: deque[Delivery] = deque()
        self._unsettled: dict[Ack, None] = {}  # of what was handed out
        self._start()

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        self._call(self._receive(self._linked(receiving=True), messages_max, wait_s), wait_s)
        found = taken(self._buffer, messages_max)
        self._unsettled.update(dict.fromkeys(delivery.tag for delivery in found))
        return found

    def tend(self, deliveries: Sequence[Delivery]) -> None:
        """Tell the server that what is in flight is in progress; it then waits `ack_wait` again."""
        if acks := [delivery.tag for delivery in (*deliveries, *self._buffer)]:
            self._call(self._linked().send(acks, _IN_PROGRESS))

    def settle(self, deliveries: Sequence[Delivery]) -> None:
        # never given back, whatever happens here: if this fails, they come again anyway
        for delivery in deliveries:
            self._unsettled.pop(delivery.tag, None)
        # acknowledgement subjects outlive the connection they came through, but not their consumer
        link, acks = self._linked(), [delivery.tag for delivery in deliveries]
        if self._confirm_s is None:
            self._call(link.send(acks, _ACK))
        elif missing := self._call(link.acknowledge(acks, self._confirm_s), self._confirm_s):
            kind = BrokerError if link.lost is None else BrokerUnavailable
            raise kind(
                f"NATS did not confirm {missing} of {len(acks)} acknowledgements: they will come again.",
                failed=missing,
            )

    def close(self) -> None:
        """Return what was not settled, for whoever receives next, and disconnect.

        The server counts that as a delivery, as it would after `ack_wait`.
        """
        try:
            if self._link is not None and self._link.lost is None:
                self._call(self._link.give_back(list(self._unsettled)))
        finally:
            super().close()

    # -- the connection and the consumers: on the loop -----------------------------------------

    async def _connect(self) -> Link:
        link = Link(await self._client(), self._buffer)
        try:
            waits_s: list[float] = []
            for topic, durable in self._names.items():
                pull = Pull(await self._stream_of(link, topic), durable, topic)
                waits_s.append(await self._ensure(link, pull))
                await self._start_pull(link, pull)
            self.redelivery_s = min(waits_s)
            self.tend_every_s = self.redelivery_s / 3
        except BaseException:
            await link.close()
            raise
        return link

    async def _receive(self, link: Link, messages_max: int, wait_s: float) -> None:
        for pull in list(link.pulls):
            if pull.consumer.deleted or (pull.unanswered and not self._buffer):
                await self._ensure(link, pull)
                if not pull.consumer.is_the_one(pull.stream, await link.created_s(pull)):
                    # with a new inbox: this consumer must not answer what the other was asked
                    await link.stop(pull)
                    await self._start_pull(link, Pull(pull.stream, pull.durable, pull.topic))
        await link.receive(messages_max, wait_s)

    async def _start_pull(self, link: Link, pull: Pull) -> None:
        """Let the pull bring messages. If its consumer is not the one of before, that one's acknowledgements end."""
        # before the question: a deletion that the answer does not show is announced
        await link.watch(pull)
        created_s, known = await link.created_s(pull), self._consumers.get(pull.topic)
        if (
            known is not None
            and known.is_the_one(pull.stream, created_s)
            and not pull.consumer.deleted
        ):
            pull.consumer = known
        else:
            if known is not None:
                known.deleted = True
                _log.warning(
                    "NATS: the consumer %r of stream %r was deleted and made again: what was delivered before is not "
                    "acknowledged.", pull.durable, pull.stream,
                )  # fmt: skip
            pull.consumer.created_s = created_s
            self._consumers[pull.topic] = pull.consumer
        await link.start(pull)

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
                wanted = self._wanted
                if self._was_linked and wanted.get("deliver_policy") != DeliverPolicy.BY_START_TIME:
                    # one that was there and is gone must not miss what came since
                    wanted = {**wanted, "deliver_policy": DeliverPolicy.ALL, "opt_start_seq": None}
                config = ConsumerConfig(
                    durable_name=pull.durable, filter_subject=subject,
                    ack_policy=AckPolicy.EXPLICIT, **wanted,
                )  # fmt: skip
                info = await link.js.add_consumer(pull.stream, config)
            filters = _filters(info.config)
            if subject is not None and not filters:
                # a server may report no filter for what is all of the stream
                filters = (await link.js.stream_info(pull.stream)).config.subjects or [">"]
        except nats.js.errors.NotFoundError as error:
            raise ConfigurationError(
                f"NATS has no stream {pull.stream!r}: create it, or check stream= of Nats."
            ) from error
        except nats.js.errors.BadRequestError as error:
            raise ConfigurationError(
                f"NATS refused the consumer {pull.durable!r} of stream {pull.stream!r}: {error}"
            ) from error
        if subject is not None and filters != [subject]:
            raise ConfigurationError(
                f"The consumer {pull.durable!r} of stream {pull.stream!r} delivers {', '.join(filters)}, not "
                f"{subject!r} alone: set durable= to a different name, or the topic to '*' with stream=."
            )
        return self._checked(info.config, pull)

    def _checked(self, config: ConsumerConfig, pull: Pull) -> float:
        what = f"The consumer {pull.durable!r} of stream {pull.stream!r}"
        if config.deliver_subject:
            raise ConfigurationError(f"{what} pushes: set durable= to a pull consumer.")
        if config.ack_policy not in _EXPLICIT:
            raise ConfigurationError(
                f"{what} has ack_policy {config.ack_policy}: only explicit redelivers what a crash leaves behind."
            )
        if config.headers_only:
            raise ConfigurationError(f"{what} has headers_only: payloads are needed.")
        _check_limit(config, what)
        return _redelivery_s(config, self._wanted["ack_wait"])


def _check_limit(config: ConsumerConfig, what: str) -> None:
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


@dataclass(slots=True, eq=False)
class Consumer:
    """A consumer from its creation to its deletion.

    Acknowledgements name it and a sequence. In a stream of its name that is made again, these are other messages, so
    what it delivered is never acknowledged once it is deleted.

    Source: docs/decisions/0050-acknowledgements-end.md
    """

    stream: str
    created_s: float = 0.0
    deleted: bool = False

    def is_the_one(self, stream: str, created_s: float) -> bool:
        same = self.stream == stream and abs(created_s - self.created_s) <= _SAME_S
        return same and not self.deleted


@dataclass(slots=True, eq=False)
class Ack:
    """The subject that acknowledges a delivery, and the consumer that understands it."""

    reply: str
    consumer: Consumer


def _replies(acks: Iterable[Ack]) -> list[str]:
    return [ack.reply for ack in acks if not ack.consumer.deleted]


@dataclass(slots=True, eq=False)
class Pull:
    """One durable consumer. A pull request is kept outstanding as long as there is room for its messages.

    Args:
        wanted: how many messages the last request has still to bring.
        until: when it ends, by the monotonic clock; 0.0 once the server has said so.
    """

    stream: str
    durable: str
    topic: str
    inbox: str = ""
    subscriptions: list[Subscription] = field(default_factory=list[Subscription])
    wanted: int = 0
    until: float = 0.0
    consumer: Consumer = field(init=False)

    def __post_init__(self) -> None:
        self.consumer = Consumer(self.stream)

    @property
    def unanswered(self) -> bool:
        """Whether the last request ended without the server saying so: without a consumer nobody answers."""
        return self.wanted > 0 and 0.0 < self.until <= time.monotonic()


class Link:
    """One connection with its pulls, which are lost along with it. All methods run on the loop."""

    def __init__(self, client: Any, buffer: deque[Delivery]) -> None:
        self._client = client
        self._buffer = buffer
        self._arrived = asyncio.Event()
        self.pulls: list[Pull] = []
        self._lost: str | None = None

    @property
    def js(self) -> Any:
        return self._client.jetstream()

    @property
    def lost(self) -> str | None:
        return self._lost or (None if self._client.is_connected else "the server is gone")

    def lose(self, reason: str) -> None:
        self._lost = self._lost or reason

    async def watch(self, pull: Pull) -> None:
        """Notice the deletion of its consumer, which comes with that of the stream, if the user may subscribe to it."""

        async def deleted(_: Msg) -> None:
            pull.consumer.deleted = True
            self._arrived.set()

        subject = f"$JS.EVENT.ADVISORY.CONSUMER.DELETED.{pull.stream}.{pull.durable}"
        pull.subscriptions.append(await self._client.subscribe(subject, cb=deleted))

    async def created_s(self, pull: Pull) -> float:
        """Return when the server created the consumer, by its clock; not every version of the client says so."""
        subject = f"$JS.API.CONSUMER.INFO.{pull.stream}.{pull.durable}"
        answer = json.loads((await self._client.request(subject, b"", timeout=_CONFIRM_S)).data)
        if "error" in answer:
            nats.js.errors.APIError.from_error(answer["error"])
        return datetime.fromisoformat(answer["created"]).timestamp()

    async def start(self, pull: Pull) -> None:
        pull.inbox = self._client.new_inbox()
        # nothing may be dropped here; requests bound what arrives
        pull.subscriptions.append(
            await self._client.subscribe(
                pull.inbox, cb=partial(self._got, pull),
                pending_msgs_limit=-1, pending_bytes_limit=-1,
            )
        )  # fmt: skip
        self.pulls.append(pull)

    async def stop(self, pull: Pull) -> None:
        self.pulls.remove(pull)
        for subscription in pull.subscriptions:
            await subscription.unsubscribe()

    async def _got(self, pull: Pull, got: Msg) -> None:
        status = (got.headers or {}).get("Status")
        if got.reply.startswith("$JS.ACK."):
            pull.wanted -= 1
            self._buffer.append(delivery_of(got, pull.topic, pull.consumer))
        elif status in ("404", "408"):
            pull.until = 0.0  # the request has ended
        elif status not in ("100", None):
            # 409 may mean, and 503 does mean, that the consumer is gone; asking again at once would be a storm
            pull.until = time.monotonic() + _REFUSED_S
            return
        self._arrived.set()

    async def receive(self, messages_max: int, wait_s: float) -> None:
        """Request messages where no request is outstanding, and wait for the first."""
        self._arrived.clear()
        if not self._buffer:
            share = max(1, messages_max // len(self.pulls))
            for pull in self.pulls:
                if pull.wanted <= 0 or time.monotonic() >= pull.until:
                    await self._request(pull, share)
        if not self._buffer and wait_s > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), wait_s)

    async def _request(self, pull: Pull, count: int) -> None:
        request = {"batch": count, "expires": int(_PULL_S * 1e9)}
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{pull.stream}.{pull.durable}"
        await self._client.publish(subject, json.dumps(request).encode(), pull.inbox)
        pull.wanted = count
        # a second longer than the server takes, in case its end-of-request status is lost
        pull.until = time.monotonic() + _PULL_S + 1.0

    async def acknowledge(self, acks: Sequence[Ack], confirm_s: float) -> int:
        """Acknowledge; returns how many acknowledgements were not confirmed."""
        answers = await asyncio.gather(
            *(self._client.request(reply, _ACK, timeout=confirm_s) for reply in _replies(acks)),
            return_exceptions=True,
        )
        missing = 0
        for answer in answers:
            if isinstance(answer, nats.errors.NoRespondersError):
                # the stream or its consumer is gone, and the delivery with it
                continue
            if isinstance(answer, _TROUBLE):
                missing += 1
                self.lose("an acknowledgement was not confirmed")
            elif isinstance(answer, BaseException):
                raise answer
        return missing

    async def give_back(self, acks: Sequence[Ack]) -> None:
        """Stop listening, and return these and the buffer, for immediate delivery to another consumer.

        What is on its way comes again after `ack_wait`.
        """
        pulls = list(self.pulls)
        for pull in pulls:
            await self.stop(pull)
        # here, where nothing else adds to the buffer: what arrived until now is returned, too
        acks = [*acks, *(delivery.tag for delivery in self._buffer)]
        if not acks:
            return
        for pull in pulls:
            # asking for a consumer's info makes the server drop requests without a listener;
            # otherwise it would deliver what is returned into one of those, and lose track of it
            with suppress(nats.js.errors.NotFoundError):
                await self.js.consumer_info(pull.stream, pull.durable)
        await self.send(acks, _NAK)

    async def send(self, acks: Sequence[Ack], word: bytes) -> None:
        for reply in _replies(acks):
            await self._client.publish(reply, word)
        await self._client.flush(2)

    async def close(self) -> None:
        await self._client.close()


def _filters(config: ConsumerConfig) -> list[str]:
    """Return the subjects that a consumer delivers; none for all of its stream."""
    several: list[str] | None = getattr(config, "filter_subjects", None)
    return list(several or ([config.filter_subject] if config.filter_subject else []))


def _within(subject: str, pattern: str) -> bool:
    """Whether a subject is one of those that a pattern names."""
    tokens, wanted = subject.split("."), pattern.split(".")
    if wanted[-1] == ">":
        tokens = tokens[: len(wanted) - 1] if len(tokens) >= len(wanted) else []
        wanted = wanted[:-1]
    return len(tokens) == len(wanted) and all(
        name in ("*", token) for token, name in zip(tokens, wanted, strict=True)
    )


def _redelivery_s(config: ConsumerConfig, default_s: float) -> float:
    """Return after how many seconds at least the server delivers again what is not acknowledged."""
    return min(config.backoff or [config.ack_wait or default_s])


def delivery_of(got: Msg, topic: str, consumer: Consumer) -> Delivery:
    """Turn a JetStream message of a consumer into a delivery.

    Its topic is its subject where that is not what the topic names: the consumer's filter was changed.
    """
    headers: Any = {} if got.headers is None else got.headers
    at = got.metadata
    # when the stream stored it, in nanoseconds; the same in every delivery
    tokens = got.reply.split(".")
    stored_ns = int(tokens[7 if len(tokens) == 9 else 9])
    return NATS.delivery(
        topic
        if topic == got.subject or (topic != "*" and _within(got.subject, topic))
        else got.subject,
        got.data,
        headers.pairs if isinstance(headers, RawHeaders) else headers,
        tag=Ack(got.reply, consumer),
        redelivered=at.num_delivered > 1,
        stored_at=clock(stored_ns / 1e9),
        origin={
            "stream": at.stream,
            "sequence": at.sequence.stream,
            "subject": got.subject,
            "deliveries": at.num_delivered,
            "weak_id": f"nats:{at.domain or ''}:{at.stream}:{stored_ns}:{at.sequence.stream}",
        },
    )


# -- publishing ---------------------------------------------------------------------------------------

_hpub: Any = cast("Any", _command).hpub_cmd  # untyped there
_Frame = tuple[str, bytearray, bytes]
#: Headers with this prefix would make a message expire, replace others or depend on a sequence.
_STEERING = "nats-"
_ID = "nats-msg-id"
#: Any more unconfirmed messages would only queue in the server, which refuses those beyond its limit.
_WINDOW = 1000
#: The subject is part of a protocol line, and the server closes connections that send overlong lines.
_SUBJECT_BYTES_MAX = 1024
_NO_HEADER_NAME = re.compile(r"[\x00-\x20:\x7f]")
_NO_SUBJECT = re.compile(r"[\x00-\x20\x7f*>]|^\.|\.$|\.\.|^$")
#: The server's err_code where only the message can be the reason: it, or its headers, are larger than is allowed.
_OF_A_MESSAGE = frozenset({10054, 10097})
#: … and where, unlike other requests with code 400, it concerns the stream or the account: limits, or a sealed stream.
_OF_THE_STREAM = frozenset({10002, 10109, 10120})


class NatsPublisher(LoopPublisher):
    """Publishes to the streams that have the topics among their subjects, and awaits each PubAck.

    A message the stream already has from the last minutes (its duplicate window) is confirmed but not
    stored twice. Header values lose white space at both ends, and None arrives as empty text; values
    with a line break are refused. Headers that begin with `Nats-` steer the server and are left out.

    Guarantee: what is confirmed is in the stream, and as durable as the stream is. To survive a power
    failure it needs file storage, and `sync_interval: always` or several replicas. Of a key the next
    message is sent when the one before it is confirmed.

    Source: docs/decisions/0056-runs-of-a-key.md
    """

    event_prefix = NATS.prefix
    trouble = _TROUBLE
    keeps_runs = True

    def __init__(self, servers: Sequence[str], options: Mapping[str, Any]) -> None:
        super().__init__(NATS.name, "nats:" + ",".join(map(_without_credentials, servers)))
        self._servers, self._options = servers, options
        self._client: _PublishingClient | None = None

    async def _publish(self, batch: Batch) -> None:
        client = self._client
        if client is None or not client.is_connected:
            self._client = None
            async with asyncio.timeout(batch.left_s() - batch.last_word_s):
                client = self._client = await connect(
                    self._servers, self._options, _PublishingClient
                )
                await client.listen()
        client.batch = batch
        try:
            async with asyncio.timeout(batch.left_s() - batch.last_word_s):
                await client.send_all(batch)
        except TimeoutError:
            try:
                if not batch.heard:
                    await cast("Any", client).flush(batch.last_word_s)
            finally:
                # the connection's buffer may still hold some, which must not be sent later
                self._disconnect()
        finally:
            client.batch = None

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.cut()


class _PublishingClient(Client):
    """The client, sending headers unchanged and matching acknowledgements to messages by number."""

    batch: Batch | None = None

    async def listen(self) -> None:
        self._inbox = self.new_inbox()
        self._call = 0
        self._waiting: set[int] = set()
        # so many may be under way before whoever waits goes on
        self._wanted = 0
        # of keys with a message under way, what is behind it
        self._behind: dict[Any, deque[tuple[int, _Frame]]] = {}
        self._changed = asyncio.Event()
        client: Any = self  # partly typed there
        await client.subscribe(
            f"{self._inbox}.*", cb=self._acknowledged, pending_msgs_limit=-1, pending_bytes_limit=-1
        )

    async def send_all(self, batch: Batch) -> None:
        self._call += 1
        self._waiting.clear()
        self._behind.clear()
        for at, frame in batch.entries(lambda message: _frame(message, self.max_payload)):
            run = run_of(batch.messages[at], at)
            if run in self._behind:
                self._behind[run].append((at, frame))
                continue
            self._behind[run] = deque()
            if len(self._waiting) >= _WINDOW:
                await self._flushed(_WINDOW // 2)
            await self._send(at, frame)
        await self._flushed(0)

    async def _send(self, at: int, frame: _Frame) -> None:
        self._waiting.add(at)
        subject, block, payload = frame
        # the client's own publish supports neither repeated headers nor bytes
        await self._send_command(_hpub(subject, f"{self._inbox}.{self._call}-{at}", block, payload))

    async def _send_next(self, batch: Batch, at: int) -> None:
        """Send what is behind this message in its key, at once, unless it was not taken."""
        run = run_of(batch.messages[at], at)
        behind = self._behind.get(run)
        while behind:
            following, frame = behind.popleft()
            if batch.may_follow(following):
                await self._send(following, frame)
                await self._flush_pending()
                return
        self._behind.pop(run, None)

    async def _flushed(self, waiting: int) -> None:
        """Send what is buffered, and wait until no more than so many messages are under way."""
        self._wanted = waiting
        while len(self._waiting) > waiting:
            self._changed.clear()
            await self._flush_pending()
            if not self.is_connected:
                raise nats.errors.ConnectionClosedError
            # not for ever: time to check the connection again
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), LAST_WORD_S)

    async def _acknowledged(self, got: Msg) -> None:
        batch = self.batch
        call, _, number = got.subject.rpartition(".")[2].partition("-")
        if batch is None or int(call) != self._call:
            # belongs to an earlier call that has given up on it
            return
        at = int(number)
        batch.answer(at, _error_of(got, batch.messages[at].topic))
        if at in self._waiting:
            # before it leaves, so that there is no moment in which nothing seems to be under way
            await self._send_next(batch, at)
            self._waiting.discard(at)
        if len(self._waiting) <= self._wanted:
            self._changed.set()

    def cut(self) -> None:
        """Close the connection without sending what is still buffered."""
        self._pending.clear()
        transport: Any = self._transport
        if transport is not None:
            transport.close()


def _frame(message: Message[Any], bytes_max: int) -> _Frame:
    topic = utf8(message.topic)
    if _NO_SUBJECT.search(message.topic) or len(topic) > _SUBJECT_BYTES_MAX:
        raise MessageRefused(
            f"{message.topic!r} is not a valid subject to publish to: use no spaces, wildcards or empty tokens, "
            f"and at most {_SUBJECT_BYTES_MAX} bytes."
        )
    payload = NATS.payload(message)
    block = bytearray(b"NATS/1.0\r\n")
    for name, value in NATS.headers(message):
        if not name.lower().startswith(_STEERING) or name.lower() == _ID:
            _add(block, name, value)
    block += b"\r\n"
    if len(block) + len(payload) > bytes_max:
        raise MessageRefused(
            f"The message has {len(block) + len(payload)} bytes with its headers, but NATS allows "
            f"{bytes_max} (max_payload). Make it smaller."
        )
    return message.topic, block, payload


def _add(block: bytearray, name: str, value: str | bytes | None) -> None:
    text = b"" if value is None else value if isinstance(value, bytes) else utf8(value)
    if not name or _NO_HEADER_NAME.search(name):
        raise MessageRefused(
            "NATS does not allow a header name that is empty or has a space, colon or control character."
        )
    if b"\r" in text or b"\n" in text:
        raise MessageRefused(
            f"The value of header {name} contains a line break, which NATS does not allow: encode it."
        )
    block += utf8(name) + b": " + text + b"\r\n"


def _error_of(got: Msg, topic: str) -> BrokerError | None:
    if (got.headers or {}).get("Status") == "503":
        return DestinationRefused(f"No NATS stream has the subject {topic!r}: create one.")
    try:
        answer: Any = json.loads(got.data)
        if answer.get("error") is None and answer["stream"]:
            return None
        error = answer["error"]
        status, code, text = error["code"], error["err_code"], error["description"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return DestinationRefused(
            f"Whatever answers on subject {topic!r} is not a stream, so nothing confirms that the message is kept."
        )
    if code in _OF_A_MESSAGE:
        return MessageRefused(f"The stream of {topic!r} will not accept the message ({text}).")
    if status == 404 or status >= 500 or code in _OF_THE_STREAM:
        return DestinationRefused(f"The stream of {topic!r} takes no message now ({text}).")
    return BrokerError(f"The stream of {topic!r} did not accept the message ({text}).")


def _without_credentials(server: str) -> str:
    # without user and password
    return server.rpartition("@")[2].removeprefix("nats://").removeprefix("tls://")
