"""FastStream: a middleware of the broker that runs a subscriber inside its message's inbox transaction.

FastStream receives, decodes, injects and acknowledges; txbox decides whether the function runs, owns the
transaction, and retries what failed from the table. FastStream acknowledges after its middlewares have ended,
and thus after the commit. What it does besides, and what a correct consumer has to refuse:

- A stacked publisher sends after the commit. If that fails, the redelivery is a duplicate and the reply is never sent.
  The same goes for automatic replies. Both have to go through the outbox.
- Its message ids are made up: on Kafka an offset, which other partitions have too; on RabbitMQ a new UUID for each
  delivery. So the id is the producer's; a message without one is quarantined.
- Its defaults acknowledge too early (Kafka) or delete what raised (RabbitMQ, NATS, Redis).
- With confluent-kafka its acknowledgement commits whatever was polled, even what it nacked in another partition
  (it seeks back, but librdkafka keeps the stored offset). Here it commits this message's offset only.

This module uses a few private attributes of FastStream, so the extra pins the minor version.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, Unpack, cast

from faststream import AckPolicy, BaseMiddleware, ExceptionMiddleware, StreamMessage
from faststream.exceptions import AckMessage, NackMessage, RejectMessage

from txbox.app import App
from txbox.errors import ConfigurationError, Reject
from txbox.handlers import Options
from txbox.message import Headers, HeaderValue, Message
from txbox.outcome import Outcome
from txbox.session import drive_async

#: Where a subscriber finds its transaction: `tx: Annotated[AsyncConnection, Context(TX)]`.
TX = "txbox_tx"
_POLICIES = (AckPolicy.NACK_ON_ERROR, AckPolicy.MANUAL)
_ABSENT: Any = object()

Wrapper = TypeVar("Wrapper", bound=Callable[..., Any])
Next = Callable[[Any], Awaitable[Any]]


@dataclass
class _Delivery:
    """The delivery of this task, and what FastStream's function returned for it."""

    call_next: Next
    message: StreamMessage[Any]
    returned: Any = None


@dataclass(frozen=True, slots=True)
class _OneOffset:
    """Stands in for the confluent-kafka consumer of a FastStream message: commits that message only."""

    client: Any
    raw: Any

    async def commit(self) -> None:
        # asynchronous, as in FastStream: a lost commit costs a duplicate
        self.client.consumer.commit(message=self.raw, asynchronous=True)

    async def seek(self, topic: str, partition: int, offset: int) -> None:
        await self.client.seek(topic=topic, partition=partition, offset=offset)


@dataclass(frozen=True, slots=True)
class _Consumer:
    """A function of FastStream that is a handler of the App."""

    function: Any
    subscriber: Any
    topic: str
    name: str


#: The delivery that this task handles; None when a worker retries from the table.
_delivery: ContextVar[_Delivery | None] = ContextVar("txbox_faststream_delivery", default=None)


class FastStreamInbox:
    """Runs subscribers once for each message, in a transaction of the app.

    Give it to the broker (`RabbitBroker(url, middlewares=[inbox])`), and put `@inbox.handler(topic, consumer=…)`
    on top of the subscribers it is for; all others run as before.

    Args:
        app: with async connections; its worker (`txbox run module:app`) retries what has failed.

    **Guarantee.** A message is acknowledged after the commit of its row and the function's writes, or after it is
    parked, dead or quarantined. If the process dies before, it is delivered again.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        self._consumers: dict[int, _Consumer] = {}

    def handler(
        self, topic: str, *, consumer: str, **options: Unpack[Options]
    ) -> Callable[[Wrapper], Wrapper]:
        """Make a subscriber a handler of the app; goes on top of `@broker.subscriber`.

        Args:
            topic, consumer, options: as those of `App.handler`. What FastStream cannot decode is dead at once; with
                `reject_on=(pydantic.ValidationError,)`, so is what does not fit the function's annotations.

        Raises:
            ConfigurationError: the subscription cannot deliver again, or its acknowledgement policy may lose messages;
                a publisher is stacked; the subscriber takes batches or has filters; an ExceptionMiddleware is listed
                behind the inbox.
        """

        def register(wrapper: Wrapper) -> Wrapper:
            function: Any = wrapper
            subscribers: Any = getattr(function, "_subscribers", ())
            entries = [_Consumer(function, each, topic, consumer) for each in subscribers]
            for entry in entries:
                _check(entry)
                _check_delivers_again(entry.subscriber, consumer)
            if not _on_one_stream(subscribers):
                raise ConfigurationError(
                    f"{consumer}: put @inbox.handler on top of one @broker.subscriber (on Redis Streams two, one of "
                    "which claims)."
                )

            async def run(message: Message[bytes], tx: Any) -> Any:
                return await self._run(entries[0], message, tx)

            run.__qualname__ = run.__name__ = getattr(function, "__name__", consumer)
            self.app.handler(topic, consumer=consumer, **options)(run)
            self._consumers |= {id(entry.subscriber): entry for entry in entries}
            return wrapper

        return register

    def __call__(self, msg: Any, /, *, context: Any) -> BaseMiddleware[Any, Any]:
        """Return the middleware of one delivery; FastStream calls it."""
        return _Middleware(self, msg, context=context)

    async def deliver(self, call_next: Next, message: StreamMessage[Any], subscriber: Any) -> Any:
        """Run one delivery.

        Returns: what the function returned, when it ran.

        Raises:
            AckMessage: it did not run, or has failed, and the database knows.
            NackMessage: another transaction holds the message, or the database is away.
        """
        consumer = self._consumers.get(id(subscriber))
        if consumer is None:
            return await call_next(message)
        _check(consumer)  # a publisher may have been stacked since
        client = getattr(message, "consumer", None)
        if hasattr(client, "consumer"):
            message.consumer = _OneOffset(client, message.raw_message)  # type: ignore[attr-defined]
        delivery = _Delivery(call_next, message)
        token = _delivery.set(delivery)
        manual = subscriber.ack_policy is AckPolicy.MANUAL
        try:
            outcome = await self.app.process_async(
                message_of(message, consumer.topic), consumer=consumer.name
            )
        except Exception:
            # whatever the policy: another middleware may swallow this, and FastStream would acknowledge
            await message.nack()
            raise
        finally:
            _delivery.reset(token)
        if not outcome.settles:
            await message.nack()
            raise NackMessage
        if manual:
            await message.ack()
        if outcome is not Outcome.PROCESSED:
            # returning None would be published as an empty reply
            raise AckMessage
        message.reply_to = ""  # replies go through the outbox: reply_to= of the handler
        return delivery.returned

    async def unreadable(self, raw: Any, error: Exception, subscriber: Any) -> None:
        """Quarantine what FastStream cannot parse (a null header of Kafka): it would neither deliver nor keep it."""
        consumer = self._consumers.get(id(subscriber))
        connections = self.app.database.asynchronous
        if consumer is None or connections is None:
            return
        payload = _attribute(raw, "value")
        message = Message[Any](
            topic=consumer.topic, payload=payload if isinstance(payload, bytes | None) else b""
        )
        reason = f"FastStream could not parse the message: {type(error).__name__}."
        # FastStream commits the offset when this returns, so wait for the database however long it is away
        await drive_async(
            connections,
            self.app.protocol.with_retries,
            partial(self.app.intake.unmatched, message=message, reason=reason),
        )

    async def _run(self, consumer: _Consumer, message: Message[bytes], tx: Any) -> Any:
        delivery = _delivery.get()
        context = consumer.subscriber._outer_config.context  # noqa: SLF001
        try:
            if delivery is None:
                return await _retry(consumer, message, tx, context)
            await _decoded(delivery.message)
            with context.scope(TX, tx), _unacknowledged(delivery.message, consumer.name):
                delivery.returned = await delivery.call_next(delivery.message)
                return delivery.returned
        except AckMessage:
            return None  # the function wants it acknowledged
        except RejectMessage as error:
            raise Reject("the function raised RejectMessage") from error


@contextmanager
def _unacknowledged(message: StreamMessage[Any], name: str) -> Generator[None]:
    """Refuse what the function acknowledges itself: that would be before the commit."""

    async def refuse(*_: object, **__: object) -> None:
        raise ConfigurationError(
            f"{name}: the inbox acknowledges after the commit: leave it out, or raise AckMessage or RejectMessage."
        )

    verbs = ("ack", "nack", "reject")
    vars(message).update(dict.fromkeys(verbs, refuse))
    try:
        yield
    finally:
        for verb in verbs:
            vars(message).pop(verb, None)


class _Middleware(BaseMiddleware[Any, Any]):
    """One delivery to one subscriber."""

    def __init__(self, inbox: FastStreamInbox, msg: Any, /, *, context: Any) -> None:
        super().__init__(msg, context=context)
        self._inbox = inbox
        self._parsed = False

    async def consume_scope(self, call_next: Next, msg: StreamMessage[Any]) -> Any:
        self._parsed = True
        return await self._inbox.deliver(call_next, msg, self.context.get_local("handler_"))

    async def after_processed(
        self,
        exc_type: type[BaseException] | None = None,  # noqa: ARG002
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,  # noqa: ARG002
    ) -> bool | None:
        if isinstance(exc_val, Exception) and not self._parsed:
            await self._inbox.unreadable(self.msg, exc_val, self.context.get_local("handler_"))
        return False


def message_of(message: StreamMessage[Any], topic: str) -> Message[Any]:
    """FastStream's message as a message of txbox, with the producer's id or none.

    The id is the `message_id` of AMQP, `Nats-Msg-Id`, or what `App.handler(message_id=…)` or the headers say; never
    `message.message_id`, which FastStream makes up.
    """
    raw = message.raw_message
    headers = Headers(_headers(message))
    payload = message.body
    if _attribute(raw, "value") is None:
        payload = None  # a tombstone of Kafka, which FastStream reads as empty
    elif not isinstance(payload, bytes):
        raise ConfigurationError(
            "An inbox takes one message, not a batch: subscribe without batch=True."
        )
    broker_id, key, kind = (_attribute(raw, name) for name in ("message_id", "key", "type"))
    return Message(
        topic=topic,
        payload=payload,
        id=broker_id if isinstance(broker_id, str) and broker_id else headers.text("Nats-Msg-Id"),
        type=kind if isinstance(kind, str) else headers.text("type"),
        key=key.decode(errors="backslashreplace")
        if isinstance(key, bytes)
        else headers.text("key"),
        headers=headers,
        content_type=message.content_type,
        origin={"source": "faststream", "faststream_id": message.message_id},
    )


def _attribute(raw: Any, name: str) -> Any:
    """An attribute of the client's own message; confluent-kafka has methods where others have attributes."""
    value = getattr(raw, name, _ABSENT)
    return value() if callable(value) else value


def _headers(message: StreamMessage[Any]) -> Iterable[tuple[str, HeaderValue]]:
    """All headers as received: FastStream keeps only the last one of a name."""
    raw: Any = _attribute(message.raw_message, "headers")
    if not isinstance(raw, list | tuple):
        raw = list(cast("Mapping[str, Any]", message.headers).items())
    pairs = cast("Iterable[tuple[str, Any]]", raw)
    for name, value in pairs:
        yield name, value if value is None or isinstance(value, bytes | str) else str(value)


def _check(consumer: _Consumer) -> None:
    subscriber, name = consumer.subscriber, consumer.name
    if subscriber.ack_policy not in _POLICIES:
        raise ConfigurationError(
            f"{name}: its ack_policy is {subscriber.ack_policy.name}, which loses messages: "
            "subscribe with ack_policy=AckPolicy.NACK_ON_ERROR."
        )
    if consumer.function._publishers:  # noqa: SLF001
        raise ConfigurationError(
            f"{name}: a stacked publisher sends after the commit, or never: stage the message in the function "
            "(app.outbox.stage_async), or give @inbox.handler a reply_to= topic."
        )
    middlewares: Sequence[Any] = subscriber._broker_middlewares  # noqa: SLF001
    inside = False
    for each in middlewares:
        if isinstance(each, FastStreamInbox):
            inside = True
        elif inside and isinstance(each, ExceptionMiddleware):
            raise ConfigurationError(
                f"{name}: an ExceptionMiddleware behind the inbox hides the function's failure, and what it had "
                "written would be committed: list it before the inbox."
            )
    if "batch" in type(subscriber).__name__.lower():
        raise ConfigurationError(
            f"{name}: an inbox takes one message, not a batch: subscribe without batch=True."
        )
    if len(subscriber.calls) != 1:
        raise ConfigurationError(
            f"{name}: its subscriber has several functions: give it one, and a type= to @inbox.handler."
        )
    if getattr(subscriber, "group_id", "none is needed") is None:
        raise ConfigurationError(
            f"{name}: without a group Kafka keeps no offsets: subscribe with group_id=."
        )


def _check_delivers_again(subscriber: Any, name: str) -> None:
    """Refuse a subscription whose broker forgets what it has sent: with the database away, messages would be lost."""
    kinds = {kind.__name__ for kind in type(subscriber).__mro__}
    client = type(subscriber).__module__.split(".")[1:2]
    if client == ["redis"]:
        stream = getattr(subscriber, "stream_sub", None)
        if stream is None:
            raise ConfigurationError(
                f"{name}: Redis forgets what it has sent to a list or channel: subscribe to a stream with a group."
            )
        if not stream.group or stream.no_ack:
            raise ConfigurationError(
                f"{name}: Redis keeps an entry of {stream.name!r} for an acknowledgement only for a group without "
                "no_ack=True: subscribe with StreamSub(…, group=…, consumer=…)."
            )
    elif client == ["rabbit"]:
        queue = subscriber.queue
        arguments: Mapping[str, Any] = queue.arguments
        kind = arguments.get("x-queue-type")
        if queue.exclusive or queue.auto_delete or kind == "stream":
            raise ConfigurationError(
                f"{name}: RabbitMQ deletes an exclusive or auto_delete queue with the process that dies, and a stream "
                "keeps no acknowledgements: subscribe to a lasting classic or quorum queue."
            )
        if (
            kind == "quorum"
            and not arguments.get("x-dead-letter-exchange")
            and arguments.get("x-delivery-limit", 20) >= 0
        ):
            raise ConfigurationError(
                f"{name}: a quorum queue deletes a message that was nacked 20 times (x-delivery-limit), which it soon "
                "is while the database is away: declare it with x-dead-letter-exchange or, from RabbitMQ 4 on, with "
                "x-delivery-limit -1."
            )
    elif client == ["nats"]:
        if "StreamSubscriber" not in kinds:
            raise ConfigurationError(
                f"{name}: NATS delivers again only from a stream, and neither core subjects nor watches do: subscribe "
                "with stream=."
            )
        limit = getattr(subscriber.config, "max_deliver", None)
        without_ack = getattr(subscriber.config.ack_policy, "value", None) == "none"
        if without_ack or subscriber.extra_options.get("ordered_consumer"):
            raise ConfigurationError(
                f"{name}: its JetStream consumer does not wait for acknowledgements: leave ordered_consumer= and "
                "ack_policy NONE out."
            )
        start = getattr(subscriber.config.deliver_policy, "value", None) or "all"
        lasts = subscriber.config.durable_name or getattr(subscriber, "queue", None)
        if start != "all" and not lasts:
            raise ConfigurationError(
                f"{name}: its JetStream consumer ends with the process, and the next one begins at {start!r}, behind "
                "what was not acknowledged: give it durable= or queue=."
            )
        if limit is not None and limit > 0:
            raise ConfigurationError(
                f"{name}: with max_deliver={limit} NATS gives messages up while the database is away: leave it out."
            )


def _on_one_stream(subscribers: Sequence[Any]) -> bool:
    """Whether there is one subscriber; or, on Redis Streams, one group whose unacknowledged entries somebody claims.

    Raises:
        ConfigurationError: nobody does, so that an entry of a process that died is never seen again.
    """
    streams = [getattr(subscriber, "stream_sub", None) for subscriber in subscribers]
    if not any(streams):
        return len(subscribers) == 1
    claims = any(sub and (sub.min_idle_time or sub.claim_min_idle_time) for sub in streams)
    if not claims:
        raise ConfigurationError(
            "Redis Streams deliver an unacknowledged entry only to who claims it: stack a second @broker.subscriber on "
            "the function, with min_idle_time= (milliseconds, longer than it runs) in its StreamSub, or from Redis 8.4 "
            "on set claim_min_idle_time=."
        )
    return len({sub and (sub.name, sub.group) for sub in streams}) == 1


async def _retry(consumer: _Consumer, message: Message[bytes], tx: Any, context: Any) -> Any:
    """Run a function for a message from the table: injected as usual, with nothing to acknowledge."""
    subscriber = consumer.subscriber
    item = subscriber.calls[0]
    if item.decoder is None:
        # in a worker's process the broker has not been started
        subscriber._build_fastdepends_model()  # noqa: SLF001
    rebuilt: StreamMessage[Any] = StreamMessage(
        None,
        message.payload or b"",
        headers={
            name: value.decode(errors="backslashreplace") if isinstance(value, bytes) else value
            for name, value in message.headers
        },
        content_type=message.content_type,
        message_id=str(message.id),
        correlation_id=message.headers.text("correlation_id"),
    )
    rebuilt.set_decoder(cast("Any", item.decoder))
    scope = (("handler_", subscriber), ("message", rebuilt), (TX, tx))
    with context.scopes(scope):
        await _decoded(rebuilt)
        return await item.call(message=rebuilt, _extra_middlewares=())


async def _decoded(message: StreamMessage[Any]) -> None:
    try:
        await message.decode()  # kept by FastStream, so that this is the only time
    except Exception as error:
        raise Reject(f"FastStream could not decode the message: {type(error).__name__}") from error
