"""Webhooks: an ASGI application that verifies who sent a request and answers once it is safe."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import inspect
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from txbox.errors import ConfigurationError, Fault, StoreError, StoreUnavailable
from txbox.message import Headers, HeaderValue, Message
from txbox.outcome import Outcome

_log = logging.getLogger("txbox")

_TOLERANCE = timedelta(minutes=5)
# they open doors elsewhere and have no place in a table
_NOT_KEPT = frozenset({"authorization", "proxy-authorization", "cookie"})
_NEVER_CURED = (Fault.SCHEMA, Fault.OTHER)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Process = Callable[[Message[Any]], Awaitable[Outcome | Mapping[str, Outcome]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What a genuine request says about its message; None is left to the headers and the handler."""

    id: str | None = None
    type: str | None = None
    key: str | None = None
    time: datetime | None = None


#: Returns True or Verified for a genuine request; everything else refuses it.
Verify = Callable[[Headers, bytes], Verified | bool]


class GitHub:
    """GitHub's `X-Hub-Signature-256`; the id is `X-GitHub-Delivery`, the type `X-GitHub-Event`.

    Args:
        secrets: one, or several while one replaces another.

    GitHub signs the body alone, no header and no time: whoever has seen one genuine request can send
    it again under another id. Where that matters, take the id from the body with `message_id=`.
    """

    def __init__(self, *secrets: str | bytes) -> None:
        self._keys = [_bytes(secret) for secret in _some(secrets, "GitHub")]

    def __call__(self, headers: Headers, body: bytes) -> Verified | bool:
        given = (headers.text("x-hub-signature-256") or "").removeprefix("sha256=")
        if not _genuine(self._keys, body, [_unhex(given)]):
            return False
        return Verified(
            id=headers.text("x-github-delivery") or None, type=headers.text("x-github-event")
        )


class Stripe:
    """Stripe's `Stripe-Signature` with `t=` and `v1=`; id, type and time are the event's own.

    Args:
        secrets: the endpoint's (`whsec_…`, used as it stands), or several while one replaces another.
        tolerance: how far the signed time may be from this machine's clock.
    """

    def __init__(self, *secrets: str | bytes, tolerance: timedelta = _TOLERANCE) -> None:
        self._keys = [_bytes(secret) for secret in _some(secrets, "Stripe")]
        self._tolerance_s = _tolerance_s(tolerance)

    def __call__(self, headers: Headers, body: bytes) -> Verified | bool:
        parts = [
            (name.strip(), value.strip())
            for name, _, value in (
                part.partition("=") for part in (headers.text("stripe-signature") or "").split(",")
            )
        ]
        moment = next((value for name, value in parts if name == "t"), "")
        given = [_unhex(value) for name, value in parts if name == "v1"]
        if not _fresh(moment, self._tolerance_s):
            return False
        if not _genuine(self._keys, moment.encode() + b"." + body, given):
            return False
        event = _members(body)
        created = event.get("created")
        return Verified(
            id=_text(event.get("id")),
            type=_text(event.get("type")),
            time=_moment(created) if type(created) is int else None,
        )


class StandardWebhooks:
    """`webhook-id`, `webhook-timestamp` and `webhook-signature` of standardwebhooks.com, scheme v1.

    Args:
        secrets: base64 with or without `whsec_`, or the key itself as bytes; several while one
            replaces another.
        tolerance: how far the signed time may be from this machine's clock.
    """

    def __init__(self, *secrets: str | bytes, tolerance: timedelta = _TOLERANCE) -> None:
        self._keys = [_decoded(secret) for secret in _some(secrets, "StandardWebhooks")]
        self._tolerance_s = _tolerance_s(tolerance)

    def __call__(self, headers: Headers, body: bytes) -> Verified | bool:
        own_id, moment = headers.text("webhook-id"), headers.text("webhook-timestamp") or ""
        if not own_id or not _fresh(moment, self._tolerance_s):
            return False
        given = [
            _unbase64(value)
            for scheme, _, value in (
                part.partition(",") for part in (headers.text("webhook-signature") or "").split()
            )
            if scheme == "v1"
        ]
        if not _genuine(self._keys, f"{own_id}.{moment}.".encode() + body, given):
            return False
        return Verified(
            id=own_id, type=_text(_members(body).get("type")), time=_moment(int(moment))
        )


class Webhook:
    """An ASGI application for one endpoint: mount it, or serve it: `uvicorn module:hook`.

    Args:
        process: what takes the message in: `app.process_async`; or `app.send_async`, which only stores
            it, for every consumer of the topic.
        topic: of its messages.
        verify: GitHub(secret), Stripe(secret), StandardWebhooks(secret), or a callable
            `(headers, body)` that returns True or Verified for a genuine request.
        body_bytes: a longer body is answered 413.
        answer_within: bound on reading a request, and again on answering it. What takes longer goes
            on, the sender is told to come again and then meets a duplicate.
        retry_after: what a 503 asks for.

    200: processed, a duplicate, parked, set aside or stored; the text says which. 401: not genuine,
    nothing was stored. 413: too long. 408: the body did not come. 503 with Retry-After: in progress
    elsewhere, or the database is away. A wrong program is an exception, which servers answer with 500.

    Guarantee: 2xx is sent only after the commit that holds the effects or the message itself.
    """

    def __init__(
        self,
        process: Process,
        *,
        topic: str,
        verify: Verify,
        body_bytes: int = 1024 * 1024,
        answer_within: timedelta = timedelta(seconds=8),
        retry_after: timedelta = timedelta(seconds=5),
    ) -> None:
        if _is_async(verify):
            raise ConfigurationError(
                "verify= takes GitHub(secret), Stripe(secret), StandardWebhooks(secret) or a plain "
                "function of headers and body."
            )
        if body_bytes < 1:
            raise ConfigurationError(f"body_bytes is {body_bytes}: it must be 1 or more.")
        if answer_within <= timedelta(0) or retry_after < timedelta(0):
            raise ConfigurationError(
                "answer_within must be longer than nothing, and retry_after not negative."
            )
        self.topic = topic
        self._process = process
        self._verify = verify
        self._body_bytes = body_bytes
        self._answer_s = answer_within.total_seconds()
        self._retry_after = str(math.ceil(retry_after.total_seconds())).encode()
        self._running: set[asyncio.Future[Outcome | Mapping[str, Outcome]]] = set()

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
            if event["type"] == "lifespan.shutdown" and self._running:
                # what took longer than its answer still ends properly
                await asyncio.wait(self._running)
            await send({"type": event["type"] + ".complete"})
            if event["type"] == "lifespan.shutdown":
                return

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await _answer(send, 405, "POST only", [(b"allow", b"POST")])
            return
        headers = _headers(scope["headers"])
        try:
            async with asyncio.timeout(self._answer_s):
                body = await self._body(headers, receive)
        except TimeoutError:
            await _answer(send, 408, "the body did not come", [(b"connection", b"close")])
            return
        except _TooLongError:
            await _answer(send, 413, "the body is too long", [(b"connection", b"close")])
            return
        except _GoneError:
            return
        verified = self._verify(headers, body)
        # anything truthy will not do: a forgotten await is truthy as well
        if verified is not True and not isinstance(verified, Verified):
            await _answer(send, 401, "the signature is missing, wrong or too old")
            return
        said = Verified() if verified is True else verified
        await self._settle(self._message(scope, headers, body, said), send)

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        length = headers.text("content-length") or ""
        if length.isascii() and length.isdigit() and _over(length, self._body_bytes):
            raise _TooLongError
        body = bytearray()
        while True:
            event = await receive()
            if event["type"] == "http.disconnect":
                raise _GoneError
            body += event.get("body", b"")
            if len(body) > self._body_bytes:
                raise _TooLongError
            if not event.get("more_body", False):
                return bytes(body)

    def _message(self, scope: Scope, headers: Headers, body: bytes, said: Verified) -> Message[Any]:
        return Message(
            topic=self.topic,
            payload=body,
            id=said.id,
            type=said.type or headers.text("ce-type"),
            key=said.key,
            headers=Headers((name, value) for name, value in headers if name not in _NOT_KEPT),
            content_type=headers.text("content-type"),
            time=said.time or datetime.now(UTC),
            origin={"source": f"webhook:{self.topic}", "path": str(scope.get("path", ""))},
        )

    async def _settle(self, message: Message[Any], send: Send) -> None:
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
        outcomes = [answer] if isinstance(answer, Outcome) else list(answer.values())
        if all(outcome.settles for outcome in outcomes):
            await _answer(send, 200, ", ".join(dict.fromkeys(outcomes)))
        else:
            await self._come_again(send, "in progress")

    def _ended(self, running: asyncio.Future[Outcome | Mapping[str, Outcome]]) -> None:
        self._running.discard(running)
        if not running.cancelled() and (error := running.exception()) is not None:
            # seen here, even when the answer was given before it
            _log.debug("A webhook of %s ended with %s", self.topic, type(error).__name__)

    async def _come_again(self, send: Send, why: str) -> None:
        await _answer(send, 503, why, [(b"retry-after", self._retry_after)])


class _TooLongError(Exception):
    pass


class _GoneError(Exception):
    pass


async def _answer(
    send: Send, status: int, text: str, more: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    body = text.encode() + b"\n"
    headers = [
        (b"content-type", b"text/plain; charset=utf-8"),
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
    call = getattr(type(verify), "__call__", None)  # noqa: B004  # its colour, not whether it is there
    return inspect.iscoroutinefunction(verify) or inspect.iscoroutinefunction(call)


# -- signatures -----------------------------------------------------------------------------------


def _genuine(keys: Sequence[bytes], content: bytes, given: Sequence[bytes | None]) -> bool:
    genuine = False
    for key in keys:
        own = hmac.new(key, content, hashlib.sha256).digest()
        for signature in given:
            # no early end: the time must not tell which one came close
            genuine |= hmac.compare_digest(own, signature or b"")
    return genuine


def _fresh(moment: str, tolerance_s: float) -> bool:
    if not (moment.isascii() and moment.isdigit()) or len(moment) > 11:
        return False
    return abs(time.time() - int(moment)) <= tolerance_s


def _some(secrets: Sequence[str | bytes], scheme: str) -> Sequence[str | bytes]:
    if not secrets or not all(secrets):
        raise ConfigurationError(
            f"{scheme}() takes one secret or more, none of them empty: anybody can sign with an empty one."
        )
    return secrets


def _tolerance_s(tolerance: timedelta) -> float:
    if tolerance <= timedelta(0):
        raise ConfigurationError("tolerance must be longer than nothing: clocks differ.")
    return tolerance.total_seconds()


def _bytes(secret: str | bytes) -> bytes:
    return secret.encode() if isinstance(secret, str) else secret


def _decoded(secret: str | bytes) -> bytes:
    if isinstance(secret, bytes):
        return secret
    key = _unbase64(secret.removeprefix("whsec_"))
    if not key:
        raise ConfigurationError(
            "A secret of StandardWebhooks() is not base64: copy it whole, with or without whsec_."
        )
    return key


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
        # genuine, but no JSON: without an id the inbox sets it aside
        return {}
    return cast("dict[str, Any]", members) if isinstance(members, dict) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _moment(seconds: int) -> datetime | None:
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return None
