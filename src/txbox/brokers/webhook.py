"""Webhooks: the schemes senders sign with, and an ASGI application that answers once the message is safe."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import inspect
import json
import math
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, cast

from txbox.boundaries import log as _log
from txbox.brokers.envelope import clock, from_http
from txbox.errors import ConfigurationError, Fault, StoreError, StoreUnavailable
from txbox.message import Headers, Message
from txbox.outcome import Answer, Outcome

# -- who sent it: the signatures of GitHub, Stripe and Standard Webhooks ------------------------------

_TOLERANCE = timedelta(minutes=5)
# a shorter one can be guessed from a single captured request; Standard Webhooks has its own bounds
_SECRET_BYTES_MIN = 8
_STANDARD_SECRET_BYTES = (24, 64)
# `id.time.body` of a captured request, split at a later time, would be another id with the rest of the body
_TIME_IN_ID = re.compile(r"\.[0-9]{10,}(\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What a genuine request's signature covers. Its headers then have no say in the message's id, type or replies."""

    id: str | None = None
    type: str | None = None
    key: str | None = None
    time: datetime | None = None


#: Returns True if the whole request is genuine, including its headers (a token over TLS). Returns Verified if a
#: signature covers what that contains. Anything else rejects the request.
Verify = Callable[[Headers, bytes], Verified | bool]


def _key(secret: str | bytes) -> bytes:
    key = secret.encode() if isinstance(secret, str) else secret
    if len(key) < _SECRET_BYTES_MIN:
        raise ConfigurationError(
            f"The secret has {len(key)} bytes: use at least {_SECRET_BYTES_MIN} random ones; short secrets are guessed."
        )
    return key


def standard_key(secret: str | bytes) -> bytes:
    """Return the key of a Standard Webhooks secret: base64 with or without `whsec_`, or the key itself as bytes."""
    key = secret if isinstance(secret, bytes) else _unbase64(secret.removeprefix("whsec_"))
    if key is None:
        raise ConfigurationError(
            "A secret of Standard Webhooks is not base64: copy all of it, with or without whsec_."
        )
    least, most = _STANDARD_SECRET_BYTES
    if not least <= len(key) <= most:
        raise ConfigurationError(
            f"A secret of Standard Webhooks has {len(key)} bytes: the standard requires {least} to {most}."
        )
    return key


class _Scheme:
    """An HMAC-SHA256 under one of several secrets, and a signed time that must be recent."""

    def __init__(
        self,
        secrets: Sequence[str | bytes],
        tolerance: timedelta = _TOLERANCE,
        key_of: Callable[[str | bytes], bytes] = _key,
    ) -> None:
        if not secrets:
            raise ConfigurationError(f"{type(self).__name__}() takes one or more secrets.")
        if tolerance <= timedelta(0):
            raise ConfigurationError("tolerance must be above zero, because clocks differ.")
        self._keys = [key_of(secret) for secret in secrets]
        self._tolerance_s = tolerance.total_seconds()

    def _signed(self, content: bytes, signatures: Iterable[bytes | None]) -> bool:
        given, genuine = list(signatures), False
        for key in self._keys:
            digest = hmac.new(key, content, hashlib.sha256).digest()
            for signature in given:
                # no early exit: timing must not reveal which signature came close
                genuine |= hmac.compare_digest(digest, signature or b"")
        return genuine

    def _fresh(self, moment: str) -> bool:
        if not (moment.isascii() and moment.isdigit()) or len(moment) > 11:
            return False
        return abs(time.time() - int(moment)) <= self._tolerance_s


class GitHub(_Scheme):
    """GitHub's `X-Hub-Signature-256`; the id is `X-GitHub-Delivery`, the type `X-GitHub-Event`.

    Args:
        secrets: one, or several while rotating.
        id_from: "delivery" for GitHub's id; "body" for the SHA-256 of the body. With "body", a request
            replayed under another id is a duplicate, but so is a second event with the same body.

    GitHub signs only the body, not the id, the type or the time. Whoever has seen one genuine request
    can replay it under another id and as another type.
    """

    def __init__(
        self, *secrets: str | bytes, id_from: Literal["delivery", "body"] = "delivery"
    ) -> None:
        super().__init__(secrets)
        if id_from not in ("delivery", "body"):
            raise ConfigurationError(f"id_from is {id_from!r}: use 'delivery' or 'body'.")
        self._id_from = id_from

    def __call__(self, headers: Headers, body: bytes) -> Verified | bool:
        given = (headers.text("x-hub-signature-256") or "").removeprefix("sha256=")
        if not self._signed(body, [_unhex(given)]):
            return False
        delivery = headers.text("x-github-delivery") or None
        return Verified(
            id=hashlib.sha256(body).hexdigest() if self._id_from == "body" else delivery,
            type=headers.text("x-github-event"),
        )


class Stripe(_Scheme):
    """Stripe's `Stripe-Signature` with `t=` and `v1=`; id, type and time come from the event.

    Args:
        secrets: the endpoint's (`whsec_…`, used verbatim), or several while rotating.
        tolerance: how far the signed time may differ from this machine's clock.
    """

    def __init__(self, *secrets: str | bytes, tolerance: timedelta = _TOLERANCE) -> None:
        super().__init__(secrets, tolerance)

    def __call__(self, headers: Headers, body: bytes) -> Verified | bool:
        signed = (headers.text("stripe-signature") or "").split(",")
        parts = [
            (name.strip(), value.strip())
            for name, _, value in (part.partition("=") for part in signed)
        ]
        moment = next((value for name, value in parts if name == "t"), "")
        signatures = [_unhex(value) for name, value in parts if name == "v1"]
        if not self._fresh(moment) or not self._signed(moment.encode() + b"." + body, signatures):
            return False
        event = _members(body)
        created = event.get("created")
        return Verified(
            id=_text(event.get("id")),
            type=_text(event.get("type")),
            time=clock(created) if type(created) is int else None,
        )


class StandardWebhooks(_Scheme):
    """`webhook-id`, `webhook-timestamp` and `webhook-signature` of standardwebhooks.com, scheme v1; or Svix's `svix-…`.

    Args:
        secrets: base64 with or without `whsec_`, or the key itself as bytes; several while rotating.
        tolerance: how far the signed time may differ from this machine's clock.

    An id with ten or more digits behind a dot is refused: it may be another's, split at another dot.
    """

    def __init__(self, *secrets: str | bytes, tolerance: timedelta = _TOLERANCE) -> None:
        super().__init__(secrets, tolerance, standard_key)

    def __call__(self, headers: Headers, body: bytes) -> Verified | bool:
        # all three of one kind
        kind = "webhook" if headers.text("webhook-id") else "svix"
        webhook_id, moment = headers.text(f"{kind}-id"), headers.text(f"{kind}-timestamp") or ""
        given = (headers.text(f"{kind}-signature") or "").split()
        signatures = [_unbase64(value[3:]) for value in given if value.startswith("v1,")]
        # a text of JSON, as AWS Lambda has it, may be none that UTF-8 can carry: then it is signed by nobody
        content = f"{webhook_id}.{moment}.".encode("utf-8", "surrogatepass") + body
        if not webhook_id or not self._fresh(moment) or not self._signed(content, signatures):
            return False
        if _TIME_IN_ID.search(webhook_id):
            return False
        return Verified(
            id=webhook_id, type=_text(_members(body).get("type")), time=clock(int(moment))
        )


def _unhex(text: str) -> bytes | None:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return None


def _unbase64(text: str) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None


def _members(body: bytes) -> dict[str, Any]:
    try:
        members = json.loads(body)
    except (ValueError, RecursionError):
        # genuine, but not JSON: without an id the inbox quarantines it
        return {}
    return cast("dict[str, Any]", members) if isinstance(members, dict) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


# -- the endpoint -------------------------------------------------------------------------------------

# credentials open doors elsewhere and do not belong in a table
_NOT_KEPT = frozenset({"authorization", "proxy-authorization", "cookie"})
# headers txbox reads ids, types and reply topics from; ignored when unsigned in a scheme that signs
_IDENTIFYING = re.compile(r"message-id|reply-to|(ce[-_]|cloudevents[:_]).*")
# how many requests, and how many of their bytes, may be read at once before they are verified, per process
_READING_MAX = 256
_READING_BYTES = 64 * 1024 * 1024
_TEXT = b"text/plain; charset=utf-8"
_PERMANENT = (Fault.SCHEMA, Fault.OTHER, Fault.CONTENT)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Answered = Outcome | Answer | Mapping[str, Outcome] | Mapping[str, Answer]
Process = Callable[[Message[Any]], Awaitable[Answered]]


class Webhook:
    """An ASGI application for one endpoint. `txbox run` serves it after `app.consume(hook)`; a framework can mount it.

    Args:
        process: what accepts the message: `app.process_async`; `app.answer_async`, whose kept result
            becomes the response body; or `app.send_async`, which only stores it for every consumer of
            the topic. By default `app.consume(hook)` passes it to every consumer of its topic, one
            after the other.
        topic: of its messages.
        verify: GitHub(secret), Stripe(secret), StandardWebhooks(secret), or a callable
            `(headers, body)` that returns True or Verified for a genuine request.
        path: where `txbox run` serves it; by default `/webhooks/` and the topic.
        body_bytes: a longer body is answered with 413.
        in_flight_max: verified requests in progress at once, per process; more are answered with 503.
        answer_within: time limit for reading a request, and again for answering it. Work that takes
            longer continues; the sender is told to retry, and then meets a duplicate.
        retry_after: what a 503 asks for.
        quarantined_status: the response for a message that is set aside because its id is known with a
            different body, or it has none: 200, or an error such as 409 that shows up in the sender's log.

    200: processed, duplicate, parked, set aside or stored; the text says which. If a single consumer
    takes the message and keeps its result (`keep_result=True`), the body is that result as JSON. A
    duplicate gets it only if `verify` returned True, that is, if the request itself proves who is asking.
    401: not genuine; nothing was stored. 413: too long. 408: the body did not arrive. 503 with
    Retry-After: in progress elsewhere, too many requests at once, or the database is unavailable. A bug
    is an exception, which servers turn into a 500.

    If `verify` returns Verified, as the schemes do, it decides the message's id and type. The headers
    `message-id`, `ce-…` and `reply-to` are dropped, because no signature covers them.

    Unverified requests never keep a genuine one out: when more than 256, or 64 MiB, are being read, the
    oldest is cut off (408) to make room.

    Guarantee: a 2xx is sent only after the commit that holds the effects or the message itself.
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
                "function of headers and body; it must not be async."
            )
        if body_bytes < 1 or in_flight_max < 1:
            raise ConfigurationError("body_bytes and in_flight_max must be 1 or more.")
        if path is not None and (not path.startswith("/") or "?" in path or "#" in path):
            raise ConfigurationError(f"path is {path!r}: write it like /webhooks/github.")
        if answer_within <= timedelta(0) or retry_after < timedelta(0):
            raise ConfigurationError(
                "answer_within must be above zero, and retry_after must not be negative."
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
        self._bound = False
        self._in_flight_max = in_flight_max
        self._quarantined_status = quarantined_status
        self._bodies = Bodies(body_bytes)
        self._verify = verify
        self._answer_s = answer_within.total_seconds()
        self._retry_after = str(math.ceil(retry_after.total_seconds())).encode()
        self._running: set[asyncio.Future[Answered]] = set()

    def __repr__(self) -> str:
        return f"Webhook(topic={self.topic!r}, path={self.path!r})"

    def bind(self, process: Process) -> None:
        """Process messages with this, unless `process` was given.

        Raises:
            ConfigurationError: it is bound already, to this or another App, whose handlers would get the messages.
        """
        if self._bound:
            raise ConfigurationError(
                f"The webhook {self.path} is consumed twice: make a second one, with another path=."
            )
        self._process, self._bound = self._process or process, True

    @property
    def in_flight(self) -> int:
        """Verified requests in progress, including those whose sender was told to retry."""
        return len(self._running)

    async def ended(self) -> None:
        """Wait for the work that outlasted its answer."""
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
            length = headers.text("content-length")
            body = await self._bodies.read(receive, length, within_s=self._answer_s)
        except TimeoutError:
            await self._answer(send, 408, "the body did not arrive", [(b"connection", b"close")])
            return
        except TooLongError:
            await self._answer(send, 413, "the body is too long", [(b"connection", b"close")])
            return
        except GoneError:
            return
        verified = self._verify(headers, body)
        # merely truthy is not enough: a coroutine that was not awaited is truthy too
        if verified is not True and not isinstance(verified, Verified):
            await self._answer(send, 401, "the signature is missing, wrong or too old")
            return
        if self.in_flight >= self._in_flight_max:
            await self._retry_later(send, "too many requests at once")
            return
        await self._settle(
            self._message(scope, headers, body, verified), send, proven=verified is True
        )

    def _message(
        self, scope: Scope, headers: Headers, body: bytes, verified: Verified | bool
    ) -> Message[Any]:
        kept = [(name, value) for name, value in headers if name not in _NOT_KEPT]
        said = Verified(type=headers.text("ce-type"))
        if isinstance(verified, Verified):
            said = verified
            kept = [(name, value) for name, value in kept if not _IDENTIFYING.fullmatch(name)]
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
                "Nothing processes the messages of this Webhook: call app.consume(hook), or pass it "
                "app.process_async."
            )
        running = asyncio.ensure_future(self._process(message))
        self._running.add(running)
        running.add_done_callback(self._ended)
        # neither the time limit nor a sender that hangs up may end a transaction half-way
        done, _ = await asyncio.wait([running], timeout=self._answer_s)
        if not done:
            await self._retry_later(send, "still running")
            return
        try:
            answer = running.result()
        except StoreError as error:
            if not isinstance(error, StoreUnavailable) and error.fault in _PERMANENT:
                raise
            _log.warning("A webhook message for %s was not accepted: %s", self.topic, error)
            await self._retry_later(send, "the database is unavailable")
            return
        answers: list[Outcome | Answer] = (
            list(answer.values()) if isinstance(answer, Mapping) else [answer]
        )
        outcomes = [given.outcome if isinstance(given, Answer) else given for given in answers]
        if not all(outcome.settles for outcome in outcomes):
            await self._retry_later(send, "in progress")
            return
        result = answers[0].json if len(answers) == 1 and isinstance(answers[0], Answer) else None
        # a captured request can be replayed: its signature does not prove who is asking
        if result is not None and (proven or outcomes[0] is Outcome.PROCESSED):
            await self._answer(send, 200, result, kind=b"application/json")
            return
        status = self._quarantined_status if Outcome.QUARANTINED in outcomes else 200
        await self._answer(send, status, ", ".join(dict.fromkeys(outcomes)))

    def _ended(self, running: asyncio.Future[Answered]) -> None:
        self._running.discard(running)
        if not running.cancelled() and (error := running.exception()) is not None:
            # retrieved here even if the answer was sent before, so that asyncio does not complain
            _log.debug("A webhook request for %s ended with %s", self.topic, type(error).__name__)

    async def _retry_later(self, send: Send, why: str) -> None:
        await self._answer(send, 503, why, [(b"retry-after", self._retry_after)])

    async def _answer(
        self,
        send: Send,
        status: int,
        body: str | bytes,
        more: Sequence[tuple[bytes, bytes]] = (),
        *,
        kind: bytes = _TEXT,
    ) -> None:
        self.answers[status] += 1
        await answer(send, status, body, more, kind=kind)


class TooLongError(Exception):
    """The body of a request is longer than allowed."""


class GoneError(Exception):
    """The client has closed the connection."""


class Bodies:
    """Reads bodies of requests that nobody has authenticated yet, so that they never keep a genuine one out.

    When more than 256, or 64 MiB, are being read, the oldest is cut off to make room.

    Args:
        body_bytes: a longer body is refused.
    """

    def __init__(self, body_bytes: int) -> None:
        self._body_bytes = body_bytes
        #: How many bytes of each body being read have arrived, oldest first.
        self._reading: dict[asyncio.Timeout, int] = {}

    async def read(self, receive: Receive, length: str | None, *, within_s: float) -> bytes:
        """Read a body.

        Args:
            length: what the request says, if it does.

        Raises:
            TimeoutError: it did not arrive in time, or was cut off.
            TooLongError, GoneError
        """
        length = length or ""
        if length.isascii() and length.isdigit() and _over(length, self._body_bytes):
            raise TooLongError
        body = bytearray()
        async with asyncio.timeout(within_s) as reading:
            self._reading[reading] = 0
            try:
                while True:
                    self._cut_off_the_oldest()
                    event = await receive()
                    if event["type"] == "http.disconnect":
                        raise GoneError
                    body += event.get("body", b"")
                    if len(body) > self._body_bytes:
                        raise TooLongError
                    if not event.get("more_body", False):
                        return bytes(body)
                    self._reading[reading] = len(body)
            finally:
                self._reading.pop(reading, None)
        raise AssertionError("the loop returns or raises")

    def _cut_off_the_oldest(self) -> None:
        bound = max(_READING_BYTES, self._body_bytes)
        while len(self._reading) > _READING_MAX or sum(self._reading.values()) > bound:
            oldest = next(iter(self._reading))
            del self._reading[oldest]
            oldest.reschedule(0)


async def answer(
    send: Send,
    status: int,
    body: str | bytes,
    more: Sequence[tuple[bytes, bytes]] = (),
    *,
    kind: bytes = _TEXT,
) -> None:
    """Send a complete response: a line of text, or bytes of another content type."""
    content = f"{body}\n".encode() if isinstance(body, str) else body
    headers = [(b"content-type", kind), (b"content-length", str(len(content)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def _headers(pairs: Iterable[tuple[bytes, bytes]]) -> Headers:
    names = ((name.decode("latin-1").lower(), value) for name, value in pairs)
    return Headers((name, from_http(name, value)) for name, value in names)


def _over(digits: str, limit: int) -> bool:
    # Python will not parse integers of thousands of digits
    return len(digits) > 19 or int(digits) > limit


def _is_async(verify: object) -> bool:
    call = getattr(type(verify), "__call__", None)  # noqa: B004  # is it async, not: is it callable
    return inspect.iscoroutinefunction(verify) or inspect.iscoroutinefunction(call)


def by_path(hooks: Iterable[Webhook], topics: Sequence[str]) -> dict[str, Webhook]:
    """Return each endpoint under its path.

    Args:
        topics: those that handlers consume.

    Raises:
        ConfigurationError: two have the same path, or no handler consumes what one brings.
    """
    found: dict[str, Webhook] = {}
    for hook in hooks:
        if hook.path in found:
            raise ConfigurationError(
                f"Two webhooks have the path {hook.path}: give one of them another path=."
            )
        if "*" not in topics and hook.topic not in topics:
            raise ConfigurationError(
                f"The webhook {hook.path} brings topic {hook.topic!r}, which no handler consumes: "
                "register a handler for it, or name another topic=."
            )
        found[hook.path] = hook
    return found
