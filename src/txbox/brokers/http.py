"""Publishing to an HTTP endpoint: one POST per message, signed by the scheme of Standard Webhooks."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import io
import ipaddress
import math
import re
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from urllib.parse import quote, unquote, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver

from txbox.boundaries import Boundary, is_contents
from txbox.brokers.base import Batch
from txbox.brokers.envelope import HTTP, to_http
from txbox.brokers.loop import LoopPublisher
from txbox.brokers.webhook import standard_key
from txbox.errors import (
    BrokerError,
    ConfigurationError,
    MessageRefused,
    NotTried,
)
from txbox.message import Message

_TOPIC = "{topic}"
_DOTS = frozenset({".", ".."})
_ANSWER_BYTES = 2048
#: How long an answer waits for its body, which only adds a line of text to it.
_BODY_S = 2.0
#: A longer Retry-After is cut to this.
_RETRY_AFTER_MAX_S = 3600.0
#: Besides 5xx, a later attempt may succeed after these: timed out, too early, too many requests.
_PASSING = frozenset({408, 425, 429})
#: Of a host name. Only ASCII: what libraries make of other characters differs, dots and digits among them.
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)
_HOST_MAX = 253
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.ASCII)
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_NOT_IN_VALUE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
#: They frame, route or authenticate the request, which is this publisher's business.
_STEERING = frozenset(
    {
        "host", "content-length", "transfer-encoding", "connection", "keep-alive", "proxy-connection", "te", "trailer",
        "upgrade", "expect", "accept-encoding", "user-agent", "authorization", "proxy-authorization", "cookie",
        "idempotency-key", "webhook-timestamp", "webhook-signature",
    }
)  # fmt: skip


class Http:
    """An HTTP endpoint to which staged messages are POSTed, each by itself.

    Args:
        url: of the endpoint; `{topic}` in its path or query is replaced by the topic of the message.
        secrets: sign requests by the scheme of standardwebhooks.com (`whsec_…`, or the key as bytes); with
            several, while rotating, each signs.
        headers: sent with every request, such as Authorization.
        timeout: for one request, which also ends with `RelayPolicy.confirm_within`.
        concurrency: requests at a time.
        private: allow http://, and addresses that are not public: this machine's, the local network's, a
            cloud's metadata.
        tls: used instead of the system's certificate authorities.

    `webhook-id` and `Idempotency-Key` are the message's id, the same in each attempt; type, key and time are the
    CloudEvents attributes of the same names. Redirects are not followed, no proxy is used, and what the
    endpoint's name resolves to is checked at each connection.

    A message is sent once the endpoint answers 2xx. 408, 425, 429, 5xx, no answer in time and a broken
    connection cost an attempt: `RelayPolicy.retry` decides when the next one comes, `Retry-After` (up to an
    hour) how early. Any other answer makes the message dead, with the first line of the response as its error.
    An endpoint that refuses connections pauses the relay and costs no attempt.

    Guarantee: what is confirmed was answered with 2xx. Any message may arrive twice, with the same id.
    """

    def __init__(
        self,
        url: str,
        *secrets: str | bytes,
        headers: Mapping[str, str] | None = None,
        timeout: timedelta = timedelta(seconds=10),
        concurrency: int = 10,
        private: bool = False,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        _check_url(url, private)
        if timeout <= timedelta(0):
            raise ConfigurationError(f"timeout is {timeout}: it must be longer than zero.")
        if concurrency < 1:
            raise ConfigurationError(f"concurrency is {concurrency}: it must be at least 1.")
        for name, value in (headers or {}).items():
            if not _NAME.fullmatch(name) or _NOT_IN_VALUE.search(value):
                raise ConfigurationError(f"headers= has {name!r}, which HTTP does not allow.")
        self.url = url
        self.keys = [standard_key(secret) for secret in secrets]
        self.headers = dict(headers or {})
        self.timeout_s = timeout.total_seconds()
        self.concurrency = concurrency
        self.private = private
        self.tls = tls

    def publisher(self) -> HttpPublisher:
        return HttpPublisher(self)


class HttpPublisher(LoopPublisher):
    """Sends messages side by side; see `Http`. The relay sends one of a key at a time."""

    event_prefix = HTTP.prefix
    trouble = (TimeoutError,)

    def __init__(self, endpoint: Http) -> None:
        parts = urlsplit(endpoint.url)
        port = "" if parts.port is None else f":{parts.port}"
        # path and query may be secrets: a digest tells the endpoints of a host apart
        path = parts.path if parts.path != "/" else ""
        mark = hashlib.sha256(endpoint.url.encode()).hexdigest()[:6]
        rest = f"/…{mark}" if path or parts.query else ""
        super().__init__(HTTP.name, f"http:{parts.hostname}{port}{rest}")
        self._endpoint = endpoint
        self._session: aiohttp.ClientSession | None = None

    # -- on the loop --------------------------------------------------------------------------

    async def _publish(self, batch: Batch) -> None:
        if self._session is None:
            self._session = self._new_session()
        for at in range(len(batch.answers)):
            batch.answers[at] = NotTried("There was no time left for this message.")
        entries = batch.entries(self._request_of)

        async def sends() -> None:
            # they share one iterator: whichever is free takes the next message
            for at, (url, headers, body) in entries:
                if self._time_s(batch) <= 0 or batch.away is not None:
                    return
                try:
                    await self._send(batch, at, url, headers, body)
                except Exception as error:
                    if not is_contents(error):
                        raise
                    why = f"{_said(error, url)} (boundary: {Boundary.PUBLISH})"
                    batch.answer(at, BrokerError(f"The request failed: {why}."))

        await asyncio.gather(*(sends() for _ in range(self._endpoint.concurrency)))

    def _disconnect(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            self._close_later(session.close())

    def _time_s(self, batch: Batch) -> float:
        """Return how long a request that starts now may take."""
        return min(batch.left_s() - batch.last_word_s, self._endpoint.timeout_s)

    async def _send(
        self, batch: Batch, at: int, url: str, headers: Sequence[tuple[str, str]], body: bytes
    ) -> None:
        assert self._session is not None
        message = batch.messages[at]
        moment = str(int(time.time()))
        signed = [*headers, *self._signature(str(message.id), moment, body)]
        broken: Exception | None = None
        # a second time, since a connection that was kept open may have ended in the meantime
        for _ in range(2):
            timeout_s = self._time_s(batch)
            if broken is not None and timeout_s <= 0:
                break
            timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=timeout_s / 2)
            try:
                async with self._session.post(
                    url,
                    data=io.BytesIO(body),
                    headers=signed,
                    timeout=timeout,
                    allow_redirects=False,
                ) as response:
                    batch.answer(at, await _answer_of(response, url))
                    return
            except (
                aiohttp.ClientConnectorError,
                aiohttp.ConnectionTimeoutError,
                _Refused,
            ) as error:
                if broken is not None:
                    # it may have died of this message; if it is away, the next one shows that
                    break
                batch.lose(f"{self.name} cannot be reached: {error}", error)
                return
            except TimeoutError:
                batch.answer(
                    at, BrokerError(f"The endpoint did not answer within {timeout_s:g} s.")
                )
                return
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                broken = error
            except aiohttp.ClientError as error:
                # the response is not HTTP
                broken = error
                break
        # the message itself may be the reason, so this counts as an attempt
        assert broken is not None
        batch.answer(at, BrokerError(f"The endpoint broke off the request ({_said(broken, url)})."))

    def _new_session(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            limit=self._endpoint.concurrency,
            resolver=ThreadedResolver() if self._endpoint.private else _PublicAddresses(),
            ssl=self._endpoint.tls if self._endpoint.tls is not None else True,
        )
        return aiohttp.ClientSession(
            connector=connector,
            # the first line of an error is shown as it is
            headers={
                "user-agent": "txbox",
                "accept-encoding": "identity",
                **self._endpoint.headers,
            },
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )

    def _url_of(self, topic: str) -> str:
        """Return the URL for a topic.

        Raises:
            MessageRefused: it would lead out of its path. Quoted dots are dots to servers and proxies as well.
        """
        url = self._endpoint.url.replace(_TOPIC, quote(topic, safe=""))
        if _TOPIC in self._endpoint.url and not _DOTS.isdisjoint(urlsplit(url).path.split("/")):
            raise MessageRefused(
                f"The topic {topic!r} cannot stand in the path of a URL, where dots lead elsewhere: rename it, or put "
                "{topic} into the query."
            )
        return url

    def _request_of(self, message: Message[object]) -> tuple[str, list[tuple[str, str]], bytes]:
        """Return URL, headers, without a signature, and body; raises MessageRefused."""
        url = self._url_of(message.topic)
        body = HTTP.payload(message)
        pairs = [("idempotency-key", str(message.id))]
        for name, value in HTTP.headers(message):
            if name.lower() in _STEERING:
                continue
            try:
                text = "" if value is None else value if isinstance(value, str) else value.decode()
                text = to_http(name, text)
                text.encode()
            except UnicodeError:
                raise MessageRefused(f"The header {name!r} is not UTF-8: leave it out.") from None
            if not _NAME.fullmatch(name) or _NOT_IN_VALUE.search(text):
                raise MessageRefused(
                    f"HTTP allows no header {name!r} with this value: leave it out, or encode it."
                )
            pairs.append((name, text))
        return url, pairs, body

    def _signature(self, message_id: str, moment: str, body: bytes) -> list[tuple[str, str]]:
        if not self._endpoint.keys:
            return []
        content = f"{message_id}.{moment}.".encode() + body
        signatures = (
            hmac.new(key, content, hashlib.sha256).digest() for key in self._endpoint.keys
        )
        value = " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in signatures)
        return [("webhook-timestamp", moment), ("webhook-signature", value)]


class _Refused(Exception):
    """The endpoint's name resolves to addresses that are not public."""


class _PublicAddresses(AbstractResolver):
    """Resolves names for each connection, and drops addresses that are not public."""

    def __init__(self) -> None:
        self._names = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._names.resolve(host, port, family)
        public = [each for each in found if is_public(each["host"])]
        if not public:
            raise _Refused(
                f"{host} resolves to an address that is not public: use Http(…, private=True) if that is meant."
            )
        return public

    async def close(self) -> None:
        await self._names.close()


def is_public(address: str) -> bool:
    """Whether an IP address is public; one that embeds an IPv4 address counts as that."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        carried = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if carried is None and ip in _NAT64:
            carried = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if carried is not None:
            ip = carried
    return ip.is_global and not ip.is_multicast


_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def _check_url(url: str, private: bool) -> None:
    parts, complete = None, False
    with suppress(ValueError):
        parts = urlsplit(url)
        # reading an invalid port raises
        complete = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    if not complete or parts is None or parts.scheme not in ("http", "https"):
        raise ConfigurationError("Http() needs a URL such as https://example.com/hooks.")
    host = str(parts.hostname)
    if parts.username is not None or parts.password is not None:
        raise ConfigurationError(
            "The URL of Http() has a user or a password, which logs would show: send them by headers=."
        )
    if _TOPIC in (parts.netloc or ""):
        raise ConfigurationError("The topic may stand in the path of the URL, not in its host.")
    address: str | None = None
    with suppress(ValueError):
        address = str(ipaddress.ip_address(host.partition("%")[0]))
    labels = host.removesuffix(".").split(".")
    if address is None and not (len(host) <= _HOST_MAX and all(map(_LABEL.fullmatch, labels))):
        raise ConfigurationError(
            f"{host!r} is not a host name: use ASCII letters, digits and hyphens, at most 63 between two dots; a name "
            "with other letters has a form that begins with xn--."
        )
    if private:
        return
    if parts.scheme == "http":
        raise ConfigurationError(
            "Http() sends over TLS: use https://, or private=True for an endpoint of your own network."
        )
    # a literal address is never looked up; and connecting reads "127.1", "0x7f.1" and "2130706433" as addresses, too
    public = is_public(address) if address is not None else not _NUMBER.fullmatch(labels[-1])
    if not public:
        raise ConfigurationError(
            f"{host} is not a public address: use Http(…, private=True) if that is meant."
        )


def _said(error: Exception, url: str) -> str:
    """Return type and text of an error, without the URL's path and query."""
    text = error.message if isinstance(error, aiohttp.ClientResponseError) else str(error)
    return f"{type(error).__name__}: {_without_path(text, url)}"


def _without_path(text: str, url: str) -> str:
    """Return a text without the path and query of a URL: they may be secrets, and endpoints quote them."""
    parts = urlsplit(url)
    secrets = [f"{parts.path}?{parts.query}", parts.query, parts.path]
    for secret in [*secrets, *map(unquote, secrets)]:
        if len(secret.strip("/?")) > 1:
            text = text.replace(secret, "…")
    return text


async def _answer_of(response: aiohttp.ClientResponse, url: str) -> BrokerError | None:
    """Return what the head says; the body, which may hang or break off, never changes that."""
    status, said = response.status, b""
    # read after 2xx, too: the connection can then be used again
    with suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(_BODY_S):
            said = await response.content.read(_ANSWER_BYTES)
    if 200 <= status < 300:
        return None
    if response.headers.get("content-encoding", "identity") != "identity":
        said = b""
    line = _without_path(said.decode(errors="replace").strip().partition("\n")[0], url)[:500]
    text = f"The endpoint answered {status}{f': {line}' if line else ''}"
    if status in _PASSING or status >= 500:
        return BrokerError(text, retry_after_s=_retry_after_s(response.headers.get("retry-after")))
    return MessageRefused(text)


def _retry_after_s(value: str | None) -> float | None:
    """Return the seconds of a Retry-After header, which may be a date; None if it is missing or invalid."""
    if value is None:
        return None
    try:
        wait_s = float(value)
    except ValueError:
        try:
            moment = parsedate_to_datetime(value)
            moment = moment.replace(tzinfo=moment.tzinfo or UTC)
            wait_s = (moment - datetime.now(UTC)).total_seconds()
        except (ValueError, OverflowError, TypeError, LookupError):
            # numbers of any length come from outside
            return None
    return min(max(wait_s, 0.0), _RETRY_AFTER_MAX_S) if math.isfinite(wait_s) else None
