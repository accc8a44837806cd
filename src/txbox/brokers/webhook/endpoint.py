"""Webhooks: an ASGI application that verifies who sent a request and answers once it is safe."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from txbox.brokers.webhook.schemes import Verified, Verify
from txbox.errors import ConfigurationError, Fault, StoreError, StoreUnavailable
from txbox.message import Headers, HeaderValue, Message
from txbox.outcome import Answer, Outcome

_log = logging.getLogger("txbox")

# they open doors elsewhere and have no place in a table
_NOT_KEPT = frozenset({"authorization", "proxy-authorization", "cookie"})
# by these txbox identifies, types and answers a message: where the scheme signs, what is unsigned has no say
_SPEAKING = re.compile(r"message-id|reply-to|(ce[-_]|cloudevents[:_]).*")
# what strangers may send at once, in each process, before anything is verified
_READING_MAX = 256
_READING_BYTES = 64 * 1024 * 1024
_NEVER_CURED = (Fault.SCHEMA, Fault.OTHER)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Answered = Outcome | Answer | Mapping[str, Outcome] | Mapping[str, Answer]
Process = Callable[[Message[Any]], Awaitable[Answered]]


class Webhook:
    """An ASGI application for one endpoint: `app.consume(hook)` and `txbox run` serve it, a framework mounts it.

    Args:
        process: what takes the message in: `app.process_async`; `app.answer_async`, whose kept result
            is the answer's body; or `app.send_async`, which only stores it, for every consumer of the
            topic. Without it, `app.consume(hook)` gives it to every
            consumer of its topic, one after the other.
        topic: of its messages.
        verify: GitHub(secret), Stripe(secret), StandardWebhooks(secret), or a callable
            `(headers, body)` that returns True or Verified for a genuine request.
        path: where `txbox run` serves it; `/webhooks/` and the topic by default.
        body_bytes: a longer body is answered 413.
        in_flight_max: verified requests at work at once, in each process; more are answered 503.
        answer_within: bound on reading a request, and again on answering it. What takes longer goes
            on, the sender is told to come again and then meets a duplicate.
        retry_after: what a 503 asks for.
        quarantined_status: the answer for a message that is set aside because its id is known with another
            body, or it has none: 200, or an error such as 409 that the sender's own log shows.

    200: processed, a duplicate, parked, set aside or stored; the text says which. Where one consumer
    takes the message and keeps its result (`keep_result=True`), the body is that, as JSON; a duplicate
    gets it where `verify` returned True, that is, where the request itself proves who asks. 401: not
    genuine, nothing was stored. 413: too long. 408: the body did not come. 503 with Retry-After: in
    progress elsewhere, too many at once, or the database is away. A wrong program is an exception,
    which servers answer with 500.

    Where `verify` returns Verified, as the schemes do, the message's id and type are what it says: the
    headers `message-id`, `ce-…` and `reply-to` are dropped, since no signature covers them.

    Unverified requests never keep a genuine one out: of 256, or of 64 MiB, that are being read, the
    oldest is cut off (408) for the next.

    Guarantee: 2xx is sent only after the commit that holds the effects or the message itself.
    """

    def __init__(
        self,
        process: Process | None = None,
        *,
        topic: str,
        verify: Verify,
        path: str | None = None,
        body_bytes: int = 1024 * 1024,
        in_flight_max: int = 64,
        answer_within: timedelta = timedelta(seconds=8),
        retry_after: timedelta = timedelta(seconds=5),
        quarantined_status: int = 200,
    ) -> None:
        if _is_async(verify):
            raise ConfigurationError(
                "verify= takes GitHub(secret), Stripe(secret), StandardWebhooks(secret) or a plain "
                "function of headers and body."
            )
        if body_bytes < 1 or in_flight_max < 1:
            raise ConfigurationError("body_bytes and in_flight_max must be 1 or more.")
        if path is not None and (not path.startswith("/") or "?" in path or "#" in path):
            raise ConfigurationError(f"path is {path!r}: write it like /webhooks/github.")
        if answer_within <= timedelta(0) or retry_after < timedelta(0):
            raise ConfigurationError(
                "answer_within must be longer than nothing, and retry_after not negative."
            )
        if quarantined_status != 200 and not 400 <= quarantined_status <= 599:
            raise ConfigurationError(
                f"quarantined_status is {quarantined_status}: use 200, or an error from 400 to 599."
            )
        self.topic = topic
        self.path = path or f"/webhooks/{topic}"
        #: How many requests were answered, by status.
        self.answers: Counter[int] = Counter()
        self._process = process
        self._in_flight_max = in_flight_max
        self._quarantined_status = quarantined_status
        #: How many bytes have come of each body that is being read, the oldest first.
        self._reading: dict[asyncio.Timeout, int] = {}
        self._verify = verify
        self._body_bytes = body_bytes
        self._answer_s = answer_within.total_seconds()
        self._retry_after = str(math.ceil(retry_after.total_seconds())).encode()
        self._running: set[asyncio.Future[Answered]] = set()

    def __repr__(self) -> str:
        return f"Webhook(topic={self.topic!r}, path={self.path!r})"

    def bind(self, process: Process) -> None:
        """Take messages in with this, unless `process` was given."""
        self._process = self._process or process

    @property
    def in_flight(self) -> int:
        """Verified requests at work, those included that were told to come again."""
        return len(self._running)

    async def ended(self) -> None:
        """Wait for what took longer than its answer."""
        while self._running:
            await asyncio.wait(self._running)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._request(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            event = await receive()
            if event["type"] == "lifespan.shutdown":
                await self.ended()
            await send({"type": event["type"] + ".complete"})
            if event["type"] == "lifespan.shutdown":
                return

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await self._answer(send, 405, "POST only", [(b"allow", b"POST")])
            return
        headers = _headers(scope["headers"])
        try:
            async with asyncio.timeout(self._answer_s) as reading:
                body = await self._body(headers, receive, reading)
        except TimeoutError:
            await self._answer(send, 408, "the body did not come", [(b"connection", b"close")])
            return
        except _TooLongError:
            await self._answer(send, 413, "the body is too long", [(b"connection", b"close")])
            return
        except _GoneError:
            return
        verified = self._verify(headers, body)
        # anything truthy will not do: a forgotten await is truthy as well
        if verified is not True and not isinstance(verified, Verified):
            await self._answer(send, 401, "the signature is missing, wrong or too old")
            return
        if self.in_flight >= self._in_flight_max:
            await self._come_again(send, "too many requests at once")
            return
        await self._settle(
            self._message(scope, headers, body, verified), send, proven=verified is True
        )

    async def _body(self, headers: Headers, receive: Receive, reading: asyncio.Timeout) -> bytes:
        length = headers.text("content-length") or ""
        if length.isascii() and length.isdigit() and _over(length, self._body_bytes):
            raise _TooLongError
        body = bytearray()
        self._reading[reading] = 0
        try:
            while True:
                self._cut_off_the_oldest()
                event = await receive()
                if event["type"] == "http.disconnect":
                    raise _GoneError
                body += event.get("body", b"")
                if len(body) > self._body_bytes:
                    raise _TooLongError
                if not event.get("more_body", False):
                    return bytes(body)
                self._reading[reading] = len(body)
        finally:
            self._reading.pop(reading, None)

    def _cut_off_the_oldest(self) -> None:
        bound = max(_READING_BYTES, self._body_bytes)
        while len(self._reading) > _READING_MAX or sum(self._reading.values()) > bound:
            oldest = next(iter(self._reading))
            del self._reading[oldest]
            oldest.reschedule(0)

    def _message(
        self, scope: Scope, headers: Headers, body: bytes, verified: Verified | bool
    ) -> Message[Any]:
        kept = [(name, value) for name, value in headers if name not in _NOT_KEPT]
        said = Verified(type=headers.text("ce-type"))
        if isinstance(verified, Verified):
            said = verified
            kept = [(name, value) for name, value in kept if not _SPEAKING.fullmatch(name)]
        return Message(
            topic=self.topic,
            payload=body,
            id=said.id,
            type=said.type,
            key=said.key,
            headers=Headers(kept),
            content_type=headers.text("content-type"),
            time=said.time or datetime.now(UTC),
            origin={"source": f"webhook:{self.topic}", "path": str(scope.get("path", ""))},
        )

    async def _settle(self, message: Message[Any], send: Send, *, proven: bool) -> None:
        if self._process is None:
            raise ConfigurationError(
                "This Webhook has nothing that takes its messages: app.consume(hook), or give it "
                "app.process_async."
            )
        running = asyncio.ensure_future(self._process(message))
        self._running.add(running)
        running.add_done_callback(self._ended)
        # neither the time nor a sender that hangs up ends a transaction half-way
        done, _ = await asyncio.wait([running], timeout=self._answer_s)
        if not done:
            await self._come_again(send, "still running")
            return
        try:
            answer = running.result()
        except StoreError as error:
            if not isinstance(error, StoreUnavailable) and error.fault in _NEVER_CURED:
                raise
            _log.warning("A webhook of %s was not taken: %s", self.topic, error)
            await self._come_again(send, "the database is away")
            return
        answers: list[Outcome | Answer] = (
            list(answer.values()) if isinstance(answer, Mapping) else [answer]
        )
        outcomes = [given.outcome if isinstance(given, Answer) else given for given in answers]
        if not all(outcome.settles for outcome in outcomes):
            await self._come_again(send, "in progress")
            return
        result = answers[0].json if len(answers) == 1 and isinstance(answers[0], Answer) else None
        # a captured request can be sent again: what it signs does not say who asks
        if result is not None and (proven or outcomes[0] is Outcome.PROCESSED):
            self.answers[200] += 1
            await _send(send, 200, b"application/json", result)
            return
        status = self._quarantined_status if Outcome.QUARANTINED in outcomes else 200
        await self._answer(send, status, ", ".join(dict.fromkeys(outcomes)))

    def _ended(self, running: asyncio.Future[Answered]) -> None:
        self._running.discard(running)
        if not running.cancelled() and (error := running.exception()) is not None:
            # seen here, even when the answer was given before it
            _log.debug("A webhook of %s ended with %s", self.topic, type(error).__name__)

    async def _come_again(
        self, send: Send, why: str, more: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        await self._answer(send, 503, why, [(b"retry-after", self._retry_after), *more])

    async def _answer(
        self, send: Send, status: int, text: str, more: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        self.answers[status] += 1
        await answer(send, status, text, more)


class _TooLongError(Exception):
    pass


class _GoneError(Exception):
    pass


async def answer(
    send: Send, status: int, text: str, more: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    """Send a whole answer."""
    await _send(send, status, b"text/plain; charset=utf-8", text.encode() + b"\n", more)


async def _send(
    send: Send, status: int, kind: bytes, body: bytes, more: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    headers = [
        (b"content-type", kind),
        (b"content-length", str(len(body)).encode()),
        *more,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _headers(pairs: Iterable[tuple[bytes, bytes]]) -> Headers:
    return Headers((name.decode("latin-1").lower(), _value(value)) for name, value in pairs)


def _value(value: bytes) -> HeaderValue:
    # HTTP promises no encoding: what is not ASCII stays as it came
    return value.decode("ascii") if value.isascii() else value


def _over(digits: str, limit: int) -> bool:
    # Python refuses to read integers of thousands of digits
    return len(digits) > 19 or int(digits) > limit


def _is_async(verify: object) -> bool:
    call = getattr(type(verify), "__call__", None)  # noqa: B004  # sync or async, not whether it is there
    return inspect.iscoroutinefunction(verify) or inspect.iscoroutinefunction(call)
