"""Who sent a webhook: the signatures of GitHub, Stripe and Standard Webhooks."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, cast

from txbox.brokers.envelope import clock
from txbox.errors import ConfigurationError
from txbox.message import Headers

_TOLERANCE = timedelta(minutes=5)
# a shorter one can be guessed from a single captured request; Standard Webhooks has its own bounds
_SECRET_BYTES_MIN = 8
_STANDARD_SECRET_BYTES = (24, 64)


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
    """`webhook-id`, `webhook-timestamp` and `webhook-signature` of standardwebhooks.com, scheme v1.

    Args:
        secrets: base64 with or without `whsec_`, or the key itself as bytes; several while rotating.
        tolerance: how far the signed time may differ from this machine's clock.
    """

    def __init__(self, *secrets: str | bytes, tolerance: timedelta = _TOLERANCE) -> None:
        super().__init__(secrets, tolerance, standard_key)

    def __call__(self, headers: Headers, body: bytes) -> Verified | bool:
        webhook_id, moment = headers.text("webhook-id"), headers.text("webhook-timestamp") or ""
        given = (headers.text("webhook-signature") or "").split()
        signatures = [_unbase64(value[3:]) for value in given if value.startswith("v1,")]
        content = f"{webhook_id}.{moment}.".encode() + body
        if not webhook_id or not self._fresh(moment) or not self._signed(content, signatures):
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
