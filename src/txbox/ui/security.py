"""Logins, grants, forms that only our pages can send, and security headers."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from starlette.requests import Request

from txbox.errors import ConfigurationError

#: What may be granted beyond reading: changing messages, and seeing their contents.
Grant: TypeAlias = Literal["change", "payload"]
GRANTS: tuple[Grant, ...] = ("change", "payload")

SESSION = "txbox_session"
FORM = "txbox_form"
#: The field of a form that proves that one of our pages has sent it.
FIELD = "form_token"
TOKEN_BYTES_MIN = 24
_SESSION_S = 8 * 3600
# N, r, p of scrypt: 16 MB and about 50 ms
_COST = (2**14, 8, 1)
_SCRYPT_MAX = 64 * 1024 * 1024
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_FAILURES_MAX = 5
_FAILURES_S = 60.0
# across all addresses; higher, so that one address does not lock the owner of a name out
_NAME_FAILURES_MAX = 20
_REMEMBERED_MAX = 10_000

HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # with none at all a browser would send `Origin: null` with our forms
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}


@dataclass(frozen=True, slots=True)
class Access:
    """An authenticated user, who may read, and further grants.

    Args:
        actor: the name that `txbox_audit` records.
        grants: "change" and "payload", or none.

    Raises:
        ConfigurationError: an empty name, or an unknown grant.
    """

    actor: str
    grants: frozenset[Grant] = frozenset()

    def __init__(self, actor: str, grants: Iterable[Grant] = ()) -> None:
        if not actor or not actor.isprintable():
            raise ConfigurationError("An actor needs a name without control characters.")
        object.__setattr__(self, "actor", actor)
        object.__setattr__(self, "grants", checked_grants(grants))

    def may(self, grant: Grant) -> bool:
        return grant in self.grants


def checked_grants(grants: Iterable[str]) -> frozenset[Grant]:
    """Check the names of grants.

    Raises:
        ConfigurationError: an unknown grant.
    """
    asked = frozenset(grants)
    if unknown := sorted(asked.difference(GRANTS)):
        raise ConfigurationError(f"Unknown grant {unknown[0]!r}: use {' or '.join(GRANTS)}.")
    return frozenset(grant for grant in GRANTS if grant in asked)


#: Authentication by the host application; None refuses the request.
Authenticate: TypeAlias = Callable[[Request], "Access | Awaitable[Access | None] | None"]


class Authenticator(ABC):
    """Authenticates users by a secret, and knows their grants."""

    #: Whether the login asks for a name, too.
    named: bool

    @abstractmethod
    def verified(self, name: str, secret: str) -> Access | None:
        """The user with this secret; takes equally long for a wrong one."""

    @abstractmethod
    def known(self, actor: str) -> Access | None:
        """The user of a session, with the grants of today."""


class Token(Authenticator):
    """One secret for everybody.

    Args:
        token: at least 24 random bytes.
        actor: the name for the audit.
        grants: "change" and "payload"; without any, its holders read.

    Raises:
        ConfigurationError: the secret is too short.
    """

    named = False

    def __init__(self, token: str, *, actor: str = "token", grants: Iterable[Grant] = ()) -> None:
        if len(token.encode()) < TOKEN_BYTES_MIN:
            raise ConfigurationError(
                f"The token of the dashboard must have at least {TOKEN_BYTES_MIN} bytes: "
                '`python -c "import secrets; print(secrets.token_urlsafe(32))"` makes one.'
            )
        self._digest = hashlib.sha256(token.encode()).digest()
        self._access = Access(actor, grants)

    def verified(self, name: str, secret: str) -> Access | None:  # noqa: ARG002 - everybody's
        given = hashlib.sha256(secret.encode()).digest()
        return self._access if hmac.compare_digest(given, self._digest) else None

    def known(self, actor: str) -> Access | None:
        return self._access if actor == self._access.actor else None


class Users(Authenticator):
    """Names with hashed passwords.

    Args:
        passwords: name → what `hashed` returned.
        grants: name → "change" and "payload"; others only read.

    Raises:
        ConfigurationError: no users, or a password that is not hashed.
    """

    named = True

    def __init__(
        self, passwords: Mapping[str, str], grants: Mapping[str, Iterable[Grant]] | None = None
    ) -> None:
        if not passwords:
            raise ConfigurationError("The dashboard needs at least one user.")
        self._access = {name: Access(name, (grants or {}).get(name, ())) for name in passwords}
        self._hashes: dict[str, _Hash] = {}
        for name, password in passwords.items():
            read = _Hash.read(password)
            if read is None:
                raise ConfigurationError(
                    f"The password of {name!r} is not hashed: `txbox ui --hash-password` prints what to write there."
                )
            self._hashes[name] = read
        # an unknown name costs as much as a wrong password
        self._nobody = _Hash.of(secrets.token_hex(16))

    @classmethod
    def read(cls, text: str) -> Users:
        """Read users from text: lines of `name:hash` or `name:hash:change,payload`.

        Raises:
            ConfigurationError: a line of another form.
        """
        passwords: dict[str, str] = {}
        grants: dict[str, frozenset[Grant]] = {}
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            name, _, rest = line.strip().partition(":")
            password, _, granted = rest.partition(":")
            if not name or not password:
                raise ConfigurationError(
                    f"Line {number} of the users is not name:hash or name:hash:change,payload."
                )
            passwords[name] = password
            grants[name] = checked_grants(filter(None, granted.split(",")))
        return cls(passwords, grants)

    def verified(self, name: str, secret: str) -> Access | None:
        right = self._hashes.get(name, self._nobody).matches(secret)
        return self._access.get(name) if right else None

    def known(self, actor: str) -> Access | None:
        return self._access.get(actor)


def hashed(password: str) -> str:
    """Hash a password for `Users`, with scrypt and a salt of its own."""
    made = _Hash.of(password)
    encoded = (
        base64.urlsafe_b64encode(part).decode().rstrip("=") for part in (made.salt, made.digest)
    )
    return "$".join(("scrypt", ",".join(map(str, made.cost)), *encoded))


class _Hash(NamedTuple):
    """A password by scrypt; `cost` is n, r and p."""

    cost: tuple[int, int, int]
    salt: bytes
    digest: bytes

    @classmethod
    def of(cls, password: str) -> _Hash:
        salt = secrets.token_bytes(16)
        return cls(_COST, salt, _scrypt(password, salt, _COST))

    @classmethod
    def read(cls, text: str) -> _Hash | None:
        """What `hashed` has returned; None if it is not that, or too weak."""
        try:
            kind, cost, *parts = text.split("$")
            n, r, p = (int(number) for number in cost.split(","))
            salt, digest = (base64.urlsafe_b64decode(part + "==") for part in parts)
        except ValueError:
            return None
        if kind != "scrypt" or n < 2**14 or 128 * n * r * p >= _SCRYPT_MAX:
            return None
        return cls((n, r, p), salt, digest) if len(salt) >= 16 and len(digest) == 32 else None

    def matches(self, password: str) -> bool:
        return hmac.compare_digest(_scrypt(password, self.salt, self.cost), self.digest)


def _scrypt(password: str, salt: bytes, cost: tuple[int, int, int]) -> bytes:
    n, r, p = cost
    return hashlib.scrypt(password.encode(), salt=salt, n=n, r=r, p=p, maxmem=_SCRYPT_MAX, dklen=32)


class Failures:
    """Limits failed logins: five a minute from an address, and twenty for a name, if there is one."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def wait_s(self, address: str, name: str) -> float:
        """How long this address must wait before it tries this name again."""
        now, waits = self._now(), [0.0]
        for key, most in _bounded(address, name):
            since, count = self._since.get(key, (now, 0))
            if count >= most:
                waits.append(since + _FAILURES_S - now)
        return max(waits)

    def add(self, address: str, name: str) -> None:
        now = self._now()
        for key, _ in _bounded(address, name):
            since, count = self._since.pop(key, (now, 0))
            if now - since >= _FAILURES_S:
                since, count = now, 0
            # the oldest is forgotten first, so nobody pushes recent failures out by failing under many names
            self._since[key] = (since, count + 1)
            while len(self._since) > _REMEMBERED_MAX:
                self._since.popitem(last=False)


def _bounded(address: str, name: str) -> list[tuple[str, int]]:
    bounds = [(f"from {address}", _FAILURES_MAX)]
    if name:
        bounds.append((f"as {name[:255]}", _NAME_FAILURES_MAX))
    return bounds


class Signed:
    """Signs sessions and the tokens of forms.

    Args:
        secret: the same in all processes that serve one dashboard; None makes one for this process.
    """

    def __init__(self, secret: str | None) -> None:
        if secret is not None and len(secret.encode()) < TOKEN_BYTES_MIN:
            raise ConfigurationError(
                f"secret= must have at least {TOKEN_BYTES_MIN} bytes: make it with secrets.token_urlsafe(32)."
            )
        self._key = hashlib.sha256((secret or secrets.token_hex(32)).encode()).digest()

    def session(self, actor: str) -> str:
        """A signed cookie with the user and the end of the session."""
        until = str(int(time.time()) + _SESSION_S)
        name = base64.urlsafe_b64encode(actor.encode()).decode()
        return f"{name}.{until}.{self._mark('session', name, until)}"

    def actor(self, session: str) -> str | None:
        """The user of a session; None when it is expired or not signed by us."""
        name, _, rest = session.partition(".")
        until, _, mark = rest.partition(".")
        if not _same(mark, self._mark("session", name, until)):
            return None
        if int(until) < time.time():
            return None
        return base64.urlsafe_b64decode(name).decode()

    def form_token(self, cookie: str, actor: str) -> str:
        """The token of a form, for this browser and this login."""
        return self._mark("form", cookie, actor)

    def is_ours(self, token: str, cookie: str, actor: str) -> bool:
        return bool(cookie) and _same(token, self.form_token(cookie, actor))

    def _mark(self, *parts: str) -> str:
        # lengths keep ("a", "bc") and ("ab", "c") apart
        said = "".join(f"{len(part)}:{part}" for part in parts).encode()
        return hmac.new(self._key, said, hashlib.sha256).hexdigest()


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())


def basic(header: str) -> tuple[str, str] | None:
    """Name and password of an `Authorization: Basic` header."""
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name, _, password = base64.b64decode(encoded, validate=True).decode().partition(":")
    except ValueError:
        return None
    return name, password


def bearer(header: str) -> str | None:
    """The token of an `Authorization: Bearer` header."""
    scheme, _, token = header.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def known_host(host: str, allowed: Iterable[str]) -> bool:
    """Whether a request names a host of this dashboard, against DNS rebinding.

    Args:
        host: with its port, if any.
        allowed: hosts beside loopback; one without a port matches any port.
    """
    name = host.lower()
    bare = name if name.endswith("]") else name.rpartition(":")[0] or name
    return bare in _LOOPBACK or any(known.lower() in (name, bare) for known in allowed)


def same_origin(headers: Mapping[str, str]) -> bool:
    """Whether a form comes from one of our pages, by the headers of the browser."""
    origin = headers.get("origin")
    if origin is not None:
        return urlsplit(origin).netloc.lower() == headers.get("host", "").lower()
    # other clients than browsers send neither
    return headers.get("sec-fetch-site", "same-origin") in ("same-origin", "none")
