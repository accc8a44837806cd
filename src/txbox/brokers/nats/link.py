"""A connection to NATS JetStream: its event loop in a thread, its pull consumers, its headers."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import nats.aio.client
import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from txbox.brokers.base import Delivery
from txbox.brokers.plain import plain_time
from txbox.errors import BrokerUnavailable
from txbox.message import Headers, Message

_log = logging.getLogger("txbox")

Result = TypeVar("Result")
Connected = TypeVar("Connected", bound="Client")

PULL_S = 5.0
_REFUSED_S = 0.25
_ACK = b"+ACK"
_NAK = b"-NAK"
_IN_PROGRESS = b"+WPI"


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, Result], within_s: float) -> Result:
        """Run a coroutine on the loop.

        Raises:
            BrokerUnavailable: it took longer.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(within_s)
        except (TimeoutError, FutureTimeoutError) as error:
            future.cancel()
            raise BrokerUnavailable(f"NATS did not answer within {within_s:g} s.") from error

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class RawHeaders(dict[str, str]):
    """What the client makes of headers, and the headers as they came: repeated, bytes that are no text."""

    def __init__(self, known: Mapping[str, str], pairs: Sequence[tuple[str, str | bytes]]) -> None:
        super().__init__(known)
        self.pairs = pairs


class Client(nats.aio.client.Client):
    """The client, which would drop the headers of a message of which it cannot read one."""

    async def _process_headers(self, headers: Any) -> Any:
        if headers and not bytes(headers).startswith(b"NATS/1.0\r\n"):
            # a status of the server
            return await super()._process_headers(headers)  # pyright: ignore[reportUnknownMemberType]  # untyped there
        return RawHeaders({}, _pairs(bytes(headers))) if headers else None


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


class Pull:
    """One durable consumer: a request is on its way as long as there is room for its answer."""

    def __init__(self, stream: str, durable: str, topic: str) -> None:
        self.stream = stream
        self.durable = durable
        self.topic = topic
        self.until = 0.0
        self.wanted = 0
        self.gone = False  # perhaps: to be looked at before the next request
        self.inbox = ""
        self.subscription: Subscription | None = None


class Link:
    """One connection with its pulls; when it is lost, so is the link. All methods run on the loop."""

    def __init__(self, client: Any, buffer: deque[Delivery]) -> None:
        self._client = client
        self._buffer = buffer
        self._arrived = asyncio.Event()
        self.pulls: list[Pull] = []

    @property
    def js(self) -> Any:
        return self._client.jetstream()

    @property
    def up(self) -> bool:
        return bool(self._client.is_connected)

    async def start(self, pull: Pull) -> None:
        pull.inbox = self._client.new_inbox()
        # nothing may be dropped here: what is asked for is the bound
        pull.subscription = await self._client.subscribe(
            pull.inbox, cb=partial(self._got, pull),
            pending_msgs_limit=-1, pending_bytes_limit=-1,
        )  # fmt: skip
        self.pulls.append(pull)

    async def _got(self, pull: Pull, got: Msg) -> None:
        status = (got.headers or {}).get("Status")
        if got.reply.startswith("$JS.ACK."):
            pull.wanted -= 1
            self._buffer.append(delivery_of(got, pull.topic))
        elif status in ("404", "408"):
            pull.until = 0.0  # the request has ended
        elif status not in ("100", None):
            # 409 may, 503 will mean that the consumer is gone; asking again at once would be a storm
            pull.gone = True
            pull.until = time.monotonic() + _REFUSED_S
            return
        self._arrived.set()

    async def receive(self, messages_max: int, wait_s: float) -> None:
        """Ask for messages where nothing is asked for, and wait for the first."""
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
        request = {"batch": count, "expires": int(PULL_S * 1e9)}
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{pull.stream}.{pull.durable}"
        await self._client.publish(subject, json.dumps(request).encode(), pull.inbox)
        pull.wanted = count
        # a second more than the server takes, in case its word that it has ended gets lost
        pull.until = time.monotonic() + PULL_S + 1.0

    async def acknowledge(self, replies: Sequence[str], confirm_s: float | None) -> int:
        """Acknowledge; returns how many were not confirmed."""
        if confirm_s is None:
            await self._publish(replies, _ACK)
            return 0
        answers = await asyncio.gather(
            *(self._client.request(reply, _ACK, timeout=confirm_s) for reply in replies),
            return_exceptions=True,
        )
        missing = 0
        for answer in answers:
            if isinstance(answer, nats.errors.NoRespondersError):
                # the stream or its consumer is gone, and the delivery with it
                continue
            if isinstance(answer, (nats.errors.Error, OSError, asyncio.TimeoutError)):
                missing += 1
            elif isinstance(answer, BaseException):
                raise answer
        return missing

    async def in_progress(self, replies: Sequence[str]) -> None:
        await self._publish(replies, _IN_PROGRESS)

    async def give_back(self, replies: Sequence[str]) -> None:
        """Return what was not processed, to be delivered to another at once."""
        if not replies:
            return
        for pull in self.pulls:
            # asked how a consumer is, the server drops the requests that nobody listens for any more;
            # into one of those it would deliver what is returned, and lose count of it
            with suppress(nats.js.errors.NotFoundError):
                await self.js.consumer_info(pull.stream, pull.durable)
        await self._publish(replies, _NAK)

    async def _publish(self, replies: Sequence[str], word: bytes) -> None:
        for reply in replies:
            await self._client.publish(reply, word)
        await self._client.flush(2)

    async def unsubscribe(self) -> None:
        """Listen no more; what is on its way comes again after `ack_wait`."""
        for pull in self.pulls:
            if pull.subscription is not None:
                await pull.subscription.unsubscribe()

    async def close(self) -> None:
        await self._client.close()


async def connect(
    servers: Sequence[str], options: Mapping[str, Any], buffer: deque[Delivery]
) -> Link:
    """Connect to one of the servers, to pull."""
    return Link(await connected(servers, options, Client), buffer)


async def connected(
    servers: Sequence[str], options: Mapping[str, Any], make: Callable[[], Connected]
) -> Connected:
    """Connect a new client to one of the servers.

    Raises:
        nats.errors.Error: the last one's answer.
        OSError: the last one cannot be reached.
    """
    failure: Exception | None = None
    for server in random.sample(list(servers), len(servers)):
        client: Any = make()
        try:
            # a subscription that lived through a reconnect can fall silent: each connection has new ones
            await client.connect(
                servers=[server], **{"error_cb": _noted, **options},
                allow_reconnect=False, max_reconnect_attempts=1, reconnect_time_wait=0.1,
            )  # fmt: skip
        except (nats.errors.Error, OSError, TimeoutError) as error:
            failure = error
            await client.close()
        else:
            connection: Connected = client
            return connection
    assert failure is not None
    raise failure


async def _noted(error: Exception) -> None:
    _log.debug("NATS: %r", error)


def delivery_of(got: Msg, topic: str) -> Delivery:
    """Make a message of JetStream a delivery; its tag is the subject that acknowledges it."""
    raw: Any = {} if got.headers is None else got.headers
    headers = Headers(raw.pairs if isinstance(raw, RawHeaders) else raw.items())
    at = got.metadata
    # nanoseconds: when the stream stored it, the same in every delivery
    tokens = got.reply.split(".")
    stored_ns = int(tokens[7 if len(tokens) == 9 else 9])
    own_topic = got.subject if topic == "*" else topic
    message: Message[Any] = Message(
        topic=own_topic,
        payload=got.data,
        id=_non_empty(headers, "Nats-Msg-Id"),
        type=headers.text("type") or headers.text("ce_type") or headers.text("ce-type"),
        key=_key(headers),
        headers=headers,
        content_type=headers.text("content-type") or headers.text("ce_datacontenttype"),
        time=plain_time(headers)
        or _time(headers.text("ce_time") or headers.text("ce-time"), stored_ns),
        origin={
            "stream": at.stream,
            "sequence": at.sequence.stream,
            "subject": got.subject,
            "deliveries": at.num_delivered,
            "weak_id": f"nats:{at.domain or ''}:{at.stream}:{stored_ns}:{at.sequence.stream}",
        },
    )
    return Delivery(message, own_topic, got.reply, redelivered=at.num_delivered > 1)


def _non_empty(headers: Headers, name: str) -> Any:
    return headers.get(name) or None


def _key(headers: Headers) -> str | None:
    key = headers.get("key", headers.get("ce_subject", headers.get("ce-subject")))
    return f"hex:{key.hex()}" if isinstance(key, bytes) else key


def _time(text: str | None, stored_ns: int) -> datetime | None:
    if text is None:
        return datetime.fromtimestamp(stored_ns / 1e9, UTC)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
