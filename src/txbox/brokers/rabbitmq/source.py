"""RabbitMQ: queues, the connection that consumes them, and recovery when it is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from aiormq.exceptions import (
    AuthenticationError,
    ChannelAccessRefused,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    ConnectionNotAllowed,
    ProbableAuthenticationError,
)
from yarl import URL

from txbox.brokers.base import Delivery, Facts, InFlight, Progress, Source, refuse
from txbox.brokers.loop import EventLoop, Result
from txbox.brokers.rabbitmq import management as api
from txbox.brokers.rabbitmq.link import (
    CLOSE_S,
    HEARTBEAT_S,
    TROUBLE,
    Connection,
    Link,
    MissingQueueError,
    close_quietly,
    shown,
)
from txbox.brokers.rabbitmq.publisher import RabbitMQPublisher
from txbox.errors import BrokerUnavailable, ConfigurationError

_log = logging.getLogger("txbox")

_CALL_S = 10.0
_SLACK_S = 5.0
_RETRY_S = (0.1, 5.0)
_STEADY_S = 10.0
_NAME_BYTES_MAX = 255
_PREFETCH_MAX = 65_535
_REFUSED = {
    "no_ack": "txbox acknowledges by itself, and only what is stored",
    "auto_ack": "txbox acknowledges by itself, and only what is stored",
    "prefetch_count": "it is called prefetch here",
    "requeue": "failures are retried from the database; nothing goes back into a queue",
    "connection_class": "txbox reconnects by itself",
}
_OPTIONS = {"ssl_context", "client_properties"}
_NOT_TOLD = (
    "AMQP tells neither x-message-ttl nor lengths nor the delivery limit nor whether it is durable: give "
    "RabbitMQ(management=…), or look at `rabbitmqctl list_queues name durable arguments effective_policy_definition`."
)
# on the first connection these are mistakes; later they may be repairs under way
_NEVER = (
    AuthenticationError,
    ProbableAuthenticationError,
    ConnectionNotAllowed,
    ChannelAccessRefused,
    ChannelPreconditionFailed,
)


class RabbitMQ(Source):
    """Consumes RabbitMQ queues, classic or quorum. A topic is the name of a queue.

    Args:
        url: "amqp://user:password@host:5672/vhost" or "amqps://…", with the query options of aio-pika.
        queues: the queues to consume; by default those that handlers name as topics. They must exist:
            declaring queues, bindings and policies is up to you.
        prefetch: how many deliveries per queue may be unacknowledged at a time; all are held in memory.
        consumer_timeout: the server's setting (`consumer_timeout`, 30 minutes by default), after which
            it takes back what is unacknowledged. None if it is switched off.
        arguments: of the consumers, such as {"x-priority": 10}.
        check: how long a consumer may be silent before the server is asked whether it still exists.
        single_active_consumer: the queues are declared with `x-single-active-consumer`, so that one
            consumer at a time gets all messages in order; `ordered=True` needs it.
        exchange: where messages are published, with the topic as routing key; "" is the default
            exchange, where the topic is the name of a queue.
        management: the server's HTTP API, "http://user:password@host:15672", for `txbox doctor` alone: AMQP
            does not tell how queues are set. The user needs the tag `monitoring`, or `management`.
        options: `ssl_context` and `client_properties` of `aio_pika.connect`.

    There is no weak id, because a delivery tag means nothing outside its channel. Header values that are
    not text become text: numbers, true and false, ISO times, JSON for tables and arrays; bytes stay bytes.

    Guarantee: a message is acknowledged only after it is stored, on the channel that delivered it, and
    is never rejected or requeued. When the channel or its consumer dies, the source reconnects; what
    was unacknowledged comes again and is a duplicate.
    """

    def __init__(
        self,
        url: str,
        *,
        queues: Iterable[str] | None = None,
        prefetch: int = 200,
        consumer_timeout: timedelta | None = timedelta(minutes=30),
        arguments: Mapping[str, Any] | None = None,
        check: timedelta = timedelta(seconds=30),
        single_active_consumer: bool = False,
        exchange: str = "",
        management: str | None = None,
        **options: Any,
    ) -> None:
        self._url = _checked_url(url)
        self._given = None if queues is None else _checked_queues(queues)
        if not 1 <= prefetch <= _PREFETCH_MAX:
            raise ConfigurationError(
                f"prefetch is {prefetch}: it must be 1 to {_PREFETCH_MAX}; 0 would mean unlimited."
            )
        _check_options(options)
        self._prefetch = prefetch
        self._consumer_timeout = consumer_timeout
        self._arguments = dict(arguments or {})
        self._check_s = check.total_seconds()
        self._single_active_consumer = single_active_consumer
        self._exchange = exchange
        if not (management or "http://").startswith(("http://", "https://")):
            raise ConfigurationError(
                "management= of RabbitMQ is an address such as http://user:password@host:15672."
            )
        self._management = management
        self._options = options
        self._queues: tuple[str, ...] = ()
        self._link: Link | None = None
        self._was_linked = False
        self._failures = 0
        self._retry_at = 0.0
        self._reason = ""
        self._loop: EventLoop | None = None

    @property
    def name(self) -> str:
        return f"rabbitmq:{self._where}:{','.join(self._given or ('*',))}"

    @property
    def topics(self) -> Sequence[str] | None:
        return self._given

    @property
    def redelivery_s(self) -> float | None:
        """Seconds after which the server takes an unacknowledged delivery back."""
        return None if self._consumer_timeout is None else self._consumer_timeout.total_seconds()

    def keeps_order(self, topic: str) -> bool:
        """Consumers of a queue take turns, message by message, unless only one is active at a time."""
        return self._single_active_consumer

    def publisher(self) -> RabbitMQPublisher:
        return RabbitMQPublisher(
            self._url, self._options, exchange=self._exchange, where=self._where
        )

    @property
    def _where(self) -> str:
        return f"{self._url.host}:{self._url.port or 5672}{self._url.path or '/'}"

    def open(self, topics: Sequence[str], progress: Progress, in_flight: InFlight) -> None:
        if self._given is None and "*" in topics:
            raise ConfigurationError(
                f"{self.name} cannot list the server's queues: pass queues= to RabbitMQ(…)."
            )
        named = [topic for topic in topics if topic != "*"]
        self._queues = _checked_queues(named) if named else self._given or ()
        self._was_linked, self._failures, self._retry_at = False, 0, 0.0
        self._loop = EventLoop("txbox-rabbitmq")
        try:
            self._connect()
        except BrokerUnavailable as error:
            # a server that is away at start-up is waited for, just as it is later
            _log.debug("%s", error)

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        link = self._link
        if link is not None and link.lost is not None:
            raise self._unlinked(link)
        if link is None:
            link = self._connect()
        taken = link.take(messages_max, wait_s)
        if not taken and link.lost is None and link.silent_s() > self._check_s:
            try:
                self._call(link.check(self._queues))
            except TROUBLE as error:
                link.lose(shown(error))
        return taken

    def settle(self, deliveries: Sequence[Delivery]) -> None:
        link = self._link
        tags = [delivery.tag[1] for delivery in deliveries if delivery.tag[0] is link]
        if link is None or link.lost is not None or not tags:
            # tags of a channel that is gone: the queue has these messages again
            return
        try:
            self._call(link.acknowledge(tags))
        except TROUBLE as error:
            link.lose(shown(error))
            raise BrokerUnavailable(
                f"{self.name} could not acknowledge ({shown(error)}): the messages will come again.",
                failed=len(tags),
            ) from error

    def close(self) -> None:
        loop, link = self._loop, self._link
        if loop is None:
            return
        try:
            if link is not None:
                self._close(link)
        finally:
            self._link = self._loop = None
            loop.close()

    def examine(self, topics: Sequence[str]) -> Sequence[Facts]:
        """Ask how queues are set; without `management=` only whether they exist."""
        queues = [topic for topic in topics if topic != "*"] or self._given or ()
        if self._management is not None:
            return api.examine(self._management, self._url, queues)
        loop = EventLoop("txbox-rabbitmq-facts")
        try:
            there = loop.call(self._there(queues), _CALL_S, CLOSE_S + _SLACK_S)
        except TROUBLE as error:
            raise BrokerUnavailable(
                f"RabbitMQ at {self._where} cannot be asked ({shown(error)})."
            ) from error
        finally:
            loop.close()
        return [
            Facts(topic=queue, found=queue in there, unknown=(_NOT_TOLD,) if queue in there else ())
            for queue in queues
        ]

    async def _there(self, queues: Iterable[str]) -> set[str]:
        connection = Connection(self._url, **self._options)
        there: set[str] = set()
        try:
            await connection.connect()
            for queue in queues:
                # a name that is not there ends the channel
                channel = await connection.opened_channel(publisher_confirms=False)
                with suppress(ChannelNotFoundEntity):
                    await (await channel.get_underlay_channel()).queue_declare(queue, passive=True)
                    there.add(queue)
        finally:
            await close_quietly(connection)
        return there

    # -- the connection -----------------------------------------------------------------------

    def _connect(self) -> Link:
        """Connect and consume; after a failure, not before the back-off allows."""
        if time.monotonic() < self._retry_at:
            raise BrokerUnavailable(self._reason)
        try:
            link = self._link = self._call(self._linked(), _CALL_S + CLOSE_S)
        except (MissingQueueError, *_NEVER) as error:
            if isinstance(error, MissingQueueError):
                message = (
                    f"The queue {str(error)!r} does not exist on RabbitMQ at {self._where}: "
                    "declare it before the worker starts, or correct the handler's topic."
                )
            else:
                message = (
                    f"RabbitMQ at {self._where} rejects this consumer ({shown(error)}): "
                    "check user, password, vhost, permissions and arguments."
                )
            if not self._was_linked:
                raise ConfigurationError(message) from error
            raise self._failed(message) from error
        except TROUBLE as error:
            raise self._failed(
                f"RabbitMQ at {self._where} cannot be reached ({shown(error)}): it will be tried again."
            ) from error
        self._was_linked = True
        return link

    async def _linked(self) -> Link:
        link = Link(Connection(self._url, **self._options))
        try:
            async with asyncio.timeout(_CALL_S):
                await link.consume(self._queues, self._prefetch, self._arguments)
        except BaseException:
            await link.close()
            raise
        return link

    def _unlinked(self, link: Link) -> BrokerUnavailable:
        self._link = None
        if time.monotonic() - link.made_at < _STEADY_S:
            lost = self._failed(f"{self.name} lost its consumer again: {link.lost}.")
        else:
            self._failures = 0
            lost = BrokerUnavailable(f"{self.name} lost its consumer: {link.lost}.")
        self._close(link)
        return lost

    def _failed(self, reason: str) -> BrokerUnavailable:
        first_s, longest_s = _RETRY_S
        self._reason = reason
        self._retry_at = time.monotonic() + min(first_s * 2 ** min(self._failures, 10), longest_s)
        self._failures += 1
        return BrokerUnavailable(reason)

    def _close(self, link: Link) -> None:
        try:
            self._call(link.close())
        except TimeoutError:
            _log.warning("%s left a connection behind that did not close.", self.name)

    def _call(self, work: Coroutine[Any, Any, Result], within_s: float = _CALL_S) -> Result:
        assert self._loop is not None
        # the client may delay a cancellation while it closes what is already dead
        return self._loop.call(work, within_s, CLOSE_S + _SLACK_S)


def _checked_url(url: str) -> URL:
    try:
        parsed = URL(url)
    except ValueError:
        parsed = URL()
    if parsed.scheme not in ("amqp", "amqps") or not parsed.host:
        # not shown: it may contain a password
        raise ConfigurationError(
            "The URL of RabbitMQ(…) is invalid: use amqp://user:password@host:5672/vhost."
        )
    heartbeat = parsed.query.get("heartbeat", str(HEARTBEAT_S))
    if not heartbeat.isdecimal() or int(heartbeat) == 0:
        raise ConfigurationError(
            f"heartbeat={heartbeat} would leave a dead connection unnoticed: use 5 to 60 seconds."
        )
    return parsed


def _checked_queues(queues: Iterable[str]) -> tuple[str, ...]:
    found = (queues,) if isinstance(queues, str) else tuple(dict.fromkeys(queues))
    for queue in found:
        if not queue or len(queue.encode()) > _NAME_BYTES_MAX:
            raise ConfigurationError(
                f"{queue!r} is not a valid queue name: RabbitMQ allows 1 to {_NAME_BYTES_MAX} bytes."
            )
    if not found:
        raise ConfigurationError("RabbitMQ(…) has no queues to consume: pass queues=.")
    return found


def _check_options(options: Mapping[str, Any]) -> None:
    refuse(options, _REFUSED, "RabbitMQ(…) does not take {option}=: {why}.")
    for name in options:
        if name not in _OPTIONS:
            raise ConfigurationError(
                f"RabbitMQ(…) has no option {name!r}: connection options go into the URL's query."
            )
