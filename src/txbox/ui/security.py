"""Logins, grants, forms that only our pages can send, and security headers."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any, Literal, TypeAlias, cast
from urllib.parse import urlsplit

from starlette.datastructures import Headers
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
#: The header with which a proxy proves that the one with the user's name is its own.
SIGNED_BY = "x-txbox-proxy-secret"
_SESSION_S = 8 * 3600
_NAME_CHARACTERS = 255
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_FAILURES_MAX = 5
_FAILURES_S = 60.0
_REMEMBERED_MAX = 10_000
# addresses of a header that are looked at
_PROXIES_MAX = 16

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


@dataclass(frozen=True, slots=True)
class Token:
    """A secret, and who is known by it. Several tokens may have one name, as while one replaces another.

    Args:
        token: at least 24 random bytes.
        actor: the name for the audit.
        grants: "change" and "payload"; without any, its holder reads.

    Raises:
        ConfigurationError: the secret is too short, an empty name, or an unknown grant.
    """

    digest: bytes = field(repr=False)
    access: Access

    def __init__(self, token: str, *, actor: str = "token", grants: Iterable[Grant] = ()) -> None:
        if len(token.encode()) < TOKEN_BYTES_MIN:
            raise ConfigurationError(
                f"The token of {actor!r} must have at least {TOKEN_BYTES_MIN} bytes: "
                '`python -c "import secrets; print(secrets.token_urlsafe(32))"` makes one.'
            )
        object.__setattr__(self, "digest", hashlib.sha256(token.encode()).digest())
        object.__setattr__(self, "access", Access(actor, grants))


class Tokens:
    """All tokens of a dashboard.

    Raises:
        ConfigurationError: no token, or one that stands twice.
    """

    def __init__(self, *tokens: Token) -> None:
        if not tokens:
            raise ConfigurationError("The dashboard needs at least one token.")
        if len({token.digest for token in tokens}) < len(tokens):
            raise ConfigurationError(
                "Two tokens of the dashboard are the same: give each name one of its own."
            )
        self._tokens = tokens

    def __iter__(self) -> Iterator[Token]:
        return iter(self._tokens)

    @classmethod
    def read(cls, text: str, *, grants: Iterable[Grant] = ()) -> Tokens:
        """Read tokens from lines of `NAME:TOKEN` or `NAME:TOKEN:change,payload`; `#` begins a comment.

        Args:
            grants: of a line that is a token alone, whose holder is known as "token".

        Raises:
            ConfigurationError: a token that is too short, an empty name, or an unknown grant: the line's number, and
                nothing of its text.
        """
        tokens: list[Token] = []
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            actor, colon, rest = line.strip().partition(":")
            token, _, granted = rest.partition(":")
            try:
                if not colon:
                    tokens.append(Token(actor, grants=grants))
                else:
                    named = checked_grants(filter(None, granted.split(",")))
                    tokens.append(Token(token, actor=actor, grants=named))
            except ConfigurationError:
                # not the reason: it names a part of the line, which is a secret if that is of another form
                raise ConfigurationError(
                    f"Line {number} of the tokens is not NAME:TOKEN or NAME:TOKEN:change,payload, with a name and a "
                    f"token of at least {TOKEN_BYTES_MIN} bytes."
                ) from None
        return cls(*tokens)

    def holder(self, secret: str) -> Token | None:
        """The token that this secret is; takes equally long for every secret."""
        digest = hashlib.sha256(secret.encode()).digest()
        match: Token | None = None
        for token in self._tokens:
            if hmac.compare_digest(token.digest, digest):
                match = token
        return match


class TrustedHeader:
    """Takes the user's name from a header that an authenticating proxy in front of the dashboard sets.

    The proxy must remove the header from what its clients send. A request is believed only if it comes from loopback,
    or carries the secret; any other is turned away.

    Args:
        header: with the user's name, such as `X-Forwarded-User`.
        grants: of every user, or by name; others only read.
        secret: 24 bytes or more, which the proxy sends in `X-Txbox-Proxy-Secret`. Without it only loopback is believed.

    Raises:
        ConfigurationError: a secret that is too short, or an unknown grant.
    """

    def __init__(
        self,
        header: str,
        *,
        grants: Iterable[Grant] | Mapping[str, Iterable[Grant]] = (),
        secret: str | None = None,
    ) -> None:
        self._header = header
        by_name: Mapping[str, Iterable[Grant]] = {}
        everybody: Iterable[Grant] = ()
        if isinstance(grants, Mapping):
            by_name = cast("Mapping[str, Iterable[Grant]]", grants)
        else:
            everybody = grants
        self._by_name = {name: checked_grants(granted) for name, granted in by_name.items()}
        self._grants = checked_grants(everybody)
        self._proxy = None if secret is None else Token(secret, actor="proxy")

    def __call__(self, request: Request) -> Access | None:
        if self._proxy is not None:
            sent = hashlib.sha256(request.headers.get(SIGNED_BY, "").encode()).digest()
            if not hmac.compare_digest(sent, self._proxy.digest):
                return None
        elif not _is_loopback(peer_of(request)):
            return None
        # twice: a proxy that adds its header to that of the client does not authenticate
        names = request.headers.getlist(self._header)
        name = (
            names[0].strip().encode("latin-1").decode("utf-8", "replace") if len(names) == 1 else ""
        )
        if not name or len(name) > _NAME_CHARACTERS or not name.isprintable():
            return None
        return Access(name, self._by_name.get(name, self._grants))


class LoginThrottle:
    """Limits failed logins to five a minute from an address.

    An attempt counts before its secret is compared, so that attempts at the same time do not pass together.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def attempt(self, address: str) -> float:
        """Count an attempt; returns how many seconds this address must wait instead, or 0."""
        now = self._now()
        since, count = self._since.pop(address, (now, 0))
        if now - since >= _FAILURES_S:
            since, count = now, 0
        refused = count >= _FAILURES_MAX
        # the oldest is forgotten first, so nobody pushes recent failures out by failing from many addresses
        self._since[address] = (since, count if refused else count + 1)
        while len(self._since) > _REMEMBERED_MAX:
            self._since.popitem(last=False)
        return since + _FAILURES_S - now if refused else 0.0

    def succeeded(self, address: str) -> None:
        """The attempt was no failure."""
        since, count = self._since.get(address, (0.0, 0))
        if count:
            self._since[address] = (since, count - 1)


class Signer:
    """Signs sessions and the tokens of forms.

    A session belongs to the token it was opened with and to one dashboard, so it ends when that token is no longer
    valid, and another dashboard with the same secret does not know it. A logout ends it in this process; where several
    processes share a secret, the others know a copied cookie until it expires.

    Args:
        secret: the same in all processes that serve one dashboard; None makes one for this process.
        dashboard: what tells this dashboard from others with the same secret.
    """

    def __init__(self, secret: str | None, dashboard: str) -> None:
        if secret is not None and len(secret.encode()) < TOKEN_BYTES_MIN:
            raise ConfigurationError(
                f"secret= must have at least {TOKEN_BYTES_MIN} bytes: make it with secrets.token_urlsafe(32)."
            )
        self._key = hashlib.sha256((secret or secrets.token_hex(32)).encode()).digest()
        self._dashboard = dashboard
        #: Sessions that were logged out, until they would have expired.
        self._ended: dict[str, int] = {}

    def session(self, token: Token) -> str:
        """The signed cookie of a new session."""
        until, nonce = str(int(time.time()) + _SESSION_S), secrets.token_urlsafe(16)
        return f"{until}.{nonce}.{self._session_mac(token, until, nonce)}"

    def access(self, session: str, tokens: Iterable[Token]) -> Access | None:
        """Who has this session; None when it has ended or was not signed by us."""
        until, _, rest = session.partition(".")
        nonce, _, mac = rest.partition(".")
        match: Token | None = None
        for token in tokens:
            if _same(mac, self._session_mac(token, until, nonce)):
                match = token
        if match is None or int(until) < time.time() or session in self._ended:
            return None
        return match.access

    def end(self, session: str, tokens: Iterable[Token]) -> None:
        """End a session, if it is one."""
        now = int(time.time())
        if self.access(session, tokens) is not None:
            self._ended = {other: until for other, until in self._ended.items() if until >= now}
            self._ended[session] = int(session.partition(".")[0])

    def form_token(self, cookie: str, actor: str) -> str:
        """The token of a form, for this browser and this login."""
        return self._mac("form", cookie, actor)

    def is_ours(self, token: str, cookie: str, actor: str) -> bool:
        return bool(cookie) and _same(token, self.form_token(cookie, actor))

    def _session_mac(self, token: Token, until: str, nonce: str) -> str:
        return self._mac("session", self._dashboard, token.digest.hex(), until, nonce)

    def _mac(self, *parts: str) -> str:
        # lengths keep ("a", "bc") and ("ab", "c") apart
        text = "".join(f"{len(part)}:{part}" for part in parts).encode()
        return hmac.new(self._key, text, hashlib.sha256).hexdigest()


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())


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
    bare, colon, port = name.rpartition(":")
    if not colon or name.endswith("]"):
        bare = name
    elif port and not (port.isascii() and port.isdigit()):
        return False
    return bare in _LOOPBACK or any(known.lower() in (name, bare) for known in allowed)


def same_origin(headers: Mapping[str, str]) -> bool:
    """Whether a form comes from one of our pages, by the headers of the browser."""
    origin = headers.get("origin")
    if origin is None:
        # other clients than browsers send neither
        return headers.get("sec-fetch-site", "same-origin") in ("same-origin", "none")
    try:
        return urlsplit(origin).netloc.lower() == headers.get("host", "").lower()
    except ValueError:
        return False


class Proxies:
    """The proxies in front of a dashboard: what they say of their client's address and scheme is believed.

    Args:
        addresses: of proxies, such as `127.0.0.1` or `10.0.0.0/8`.

    Raises:
        ConfigurationError: one is no address or network.
    """

    def __init__(self, addresses: Iterable[str]) -> None:
        try:
            self._networks = tuple(ip_network(address, strict=False) for address in addresses)
        except ValueError as error:
            raise ConfigurationError(
                f"A trusted proxy is an address or a network: {error}."
            ) from None

    def resolve(self, scope: MutableMapping[str, Any]) -> None:
        """Put the client's address and scheme into the scope of a request, if a proxy of ours has sent it."""
        peer = (scope.get("client") or ("", 0))[0]
        scope["txbox.peer"] = peer
        if not self._trusts(peer):
            return
        headers = Headers(scope=scope)
        if (scheme := headers.get("x-forwarded-proto", "").rpartition(",")[2].strip()) in (
            "http",
            "https",
        ):
            scope["scheme"] = scheme
        # each proxy adds the address it was reached from: the last one that is none of ours is the client's
        addresses = ",".join(headers.getlist("x-forwarded-for")).split(",")
        for address in map(str.strip, reversed(addresses[-_PROXIES_MAX:])):
            if not self._trusts(address):
                if _address(address) is not None:
                    scope["client"] = (address, 0)
                return

    def _trusts(self, text: str) -> bool:
        address = _address(text)
        return address is not None and any(address in network for network in self._networks)


def peer_of(request: Request) -> str:
    """The address that the connection comes from: of the proxy, if there is one."""
    client = request.client.host if request.client else ""
    return str(request.scope.get("txbox.peer", client))


def _is_loopback(text: str) -> bool:
    address = _address(text)
    return address is not None and address.is_loopback


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
