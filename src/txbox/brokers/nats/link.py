"""A connection to NATS JetStream: its pull consumers, and messages with all their headers."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import nats.aio.client
import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from txbox.brokers.base import Delivery
from txbox.brokers.envelope import NATS, clock

_log = logging.getLogger("txbox")

Connected = TypeVar("Connected", bound="Client")

PULL_S = 5.0
_REFUSED_S = 0.25
#: Errors that waiting can cure: no server, no leader, a connection lost meanwhile.
PASSING = (nats.errors.Error, OSError, TimeoutError)
_ACK = b"+ACK"
_NAK = b"-NAK"
_IN_PROGRESS = b"+WPI"


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


class Pull:
    """One durable consumer. A pull request is kept outstanding as long as there is room for its messages."""

    def __init__(self, stream: str, durable: str, topic: str) -> None:
        self.stream = stream
        self.durable = durable
        self.topic = topic
        self.until = 0.0
        self.wanted = 0
        self.gone = False  # possibly; checked before the next request
        self.inbox = ""
        self.subscription: Subscription | None = None


class Link:
    """One connection with its pulls, which are lost along with it. All methods run on the loop."""

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
        # nothing may be dropped here; requests bound what arrives
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
            # 409 may mean, and 503 does mean, that the consumer is gone; asking again at once would be a storm
            pull.gone = True
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
        request = {"batch": count, "expires": int(PULL_S * 1e9)}
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{pull.stream}.{pull.durable}"
        await self._client.publish(subject, json.dumps(request).encode(), pull.inbox)
        pull.wanted = count
        # a second longer than the server takes, in case its end-of-request status is lost
        pull.until = time.monotonic() + PULL_S + 1.0

    async def acknowledge(self, replies: Sequence[str], confirm_s: float | None) -> int:
        """Acknowledge; returns how many acknowledgements were not confirmed."""
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
            if isinstance(answer, PASSING):
                missing += 1
            elif isinstance(answer, BaseException):
                raise answer
        return missing

    async def in_progress(self, replies: Sequence[str]) -> None:
        await self._publish(replies, _IN_PROGRESS)

    async def give_back(self, replies: Sequence[str]) -> None:
        """Return what was not processed, for immediate delivery to another consumer."""
        if not replies:
            return
        for pull in self.pulls:
            # asking for a consumer's info makes the server drop requests nobody listens to any more;
            # otherwise it would deliver what is returned into one of those, and lose track of it
            with suppress(nats.js.errors.NotFoundError):
                await self.js.consumer_info(pull.stream, pull.durable)
        await self._publish(replies, _NAK)

    async def _publish(self, replies: Sequence[str], word: bytes) -> None:
        for reply in replies:
            await self._client.publish(reply, word)
        await self._client.flush(2)

    async def unsubscribe(self) -> None:
        """Stop listening; what is on its way comes again after `ack_wait`."""
        for pull in self.pulls:
            if pull.subscription is not None:
                await pull.subscription.unsubscribe()

    async def close(self) -> None:
        await self._client.close()


async def connect(
    servers: Sequence[str], options: Mapping[str, Any], make: Callable[[], Connected]
) -> Connected:
    """Connect a new client to one of the servers.

    Raises:
        nats.errors.Error: the last server's answer.
        OSError: the last server cannot be reached.
    """
    failure: Exception | None = None
    for server in random.sample(list(servers), len(servers)):
        client: Any = make()
        try:
            # a subscription that survived a reconnect can fall silent, so every connection gets new ones
            await client.connect(
                servers=[server], **{"error_cb": _noted, **options},
                allow_reconnect=False, max_reconnect_attempts=1, reconnect_time_wait=0.1,
            )  # fmt: skip
        except PASSING as error:
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
    """Turn a JetStream message into a delivery; its tag is the subject that acknowledges it."""
    headers: Any = {} if got.headers is None else got.headers
    at = got.metadata
    # when the stream stored it, in nanoseconds; the same in every delivery
    tokens = got.reply.split(".")
    stored_ns = int(tokens[7 if len(tokens) == 9 else 9])
    return NATS.delivery(
        got.subject if topic == "*" else topic,
        got.data,
        headers.pairs if isinstance(headers, RawHeaders) else headers,
        tag=got.reply,
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
