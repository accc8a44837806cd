"""The dashboard, pages and actions over `admin/`, as an ASGI application: logins, grants, limits, and fresh pages."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal
from urllib.parse import parse_qsl

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from txbox.admin import Admin
from txbox.boundaries import Boundary
from txbox.boundaries import log as _log
from txbox.brokers.webhook import Bodies, GoneError, TooLongError
from txbox.errors import ConfigurationError, SchemaError, StoreError
from txbox.events import LoginRefused
from txbox.ui import security
from txbox.ui.pages import (
    RULES,
    STATIC,
    Asked,
    Fields,
    Pages,
    Refused,
    base_of,
    is_ours,
    path_of,
    refused_for,
)
from txbox.ui.security import (
    Access,
    Authenticate,
    Grant,
    LoginThrottle,
    Proxies,
    Signer,
    Token,
    Tokens,
    TrustedHeader,
)

__all__ = [
    "Access",
    "Authenticate",
    "Dashboard",
    "Grant",
    "Token",
    "Tokens",
    "TrustedHeader",
]

#: Why somebody is not let in: those of `LoginRefused`.
Cause = Literal["missing", "expired", "wrong", "limited", "host"]

_FORM_BYTES = 256 * 1024
_FORM_FIELDS = 500
_EDITED = "edit a payload of that size with `txbox edit`, and rehearse it with `txbox rehearse`"
_READ_S = 10.0
# connections of its own: the pages', and never the workers'
_THREADS = 4
_WAITING_MAX = 64
# longer than a rehearsal may take
_PAGE_S = 60.0
_LATE = (
    "This page takes longer than a minute: narrow the filter, by consumer and status.",
    "This takes longer than a minute. It may still be done: look before you try again.",
)
_LIVE = "/live"
_STREAMS_MAX = 32
_STREAM_S = 300.0
_TICK_S = 3.0
# workers write their counts as often
_COUNTED_S = 15.0


class Dashboard:
    """An ASGI application that shows one inbox and outbox, to those who may see them.

    Args:
        target: an App; or what `Admin` takes.
        authenticator: a `Token`, `Tokens`, a `TrustedHeader` of a proxy, or a callable of the host application that
            takes a Starlette request and returns an `Access`, or None to turn it away; it may be a coroutine.
        hosts: names under which the dashboard is reached, beside those of loopback.
        proxies: addresses or networks of proxies whose `X-Forwarded-For` and `X-Forwarded-Proto` are believed.
        secret: 24 bytes or more, the same in all processes that serve it; without it a login is known to
            one process, and until its end.
        login: where the host application logs people in: who is turned away is sent there, with the page that was
            asked for in place of `{next}`, as in "/login?next={next}".

    Raises:
        ConfigurationError: no authenticator, a secret that is too short, or a login beside tokens.

    Nothing connects before the first page.
    """

    def __init__(
        self,
        target: Any,
        authenticator: Token | Tokens | Authenticate,
        *,
        hosts: Iterable[str] = (),
        proxies: Iterable[str] = (),
        secret: str | None = None,
        login: str | None = None,
    ) -> None:
        # callers without types may pass None, or a class instead of an object
        host: Any = Tokens(authenticator) if isinstance(authenticator, Token) else authenticator
        if not isinstance(host, Tokens) and (isinstance(host, type) or not callable(host)):
            raise ConfigurationError(
                "The dashboard does not start without an authenticator: give it a Token, Tokens, a TrustedHeader, or a "
                "callable that returns an Access."
            )
        if login is not None and isinstance(host, Tokens):
            raise ConfigurationError(
                "login= is where an application of yours logs people in: tokens have a page of their own."
            )
        self.admin = target if isinstance(target, Admin) else Admin(target)
        self._tokens = host if isinstance(host, Tokens) else None
        self._host: Any = host
        self._hosts = tuple(hosts)
        self._proxies = Proxies(proxies)
        database = self.admin.app.database
        self._signer = Signer(secret, f"{database.name} {database.schema or ''}")
        self._throttle = LoginThrottle()
        self._forms = Bodies(_FORM_BYTES)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="txbox-ui")
        self._waiting = 0
        self._streams = 0
        self._summary: tuple[float, str] = (0.0, "")
        self._summary_lock = threading.Lock()
        self._pages = Pages(self.admin, self._tokens, self._signer, login)

    def close(self) -> None:
        """End what runs between two batches, and close what this dashboard has opened itself."""
        self._pages.closing.set()
        self._pool.shutdown()
        self.admin.close()

    async def ended(self) -> None:
        """Wait for the end of what runs."""
        await asyncio.to_thread(self.close)

    # -- from a request to its answer ---------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        self._proxies.resolve(scope)
        request = Request(scope, receive)
        try:
            response = await self._answered(request)
        except Refused as error:
            response = self._pages.refusal(request, error)
        except GoneError:
            return
        except Exception:  # noqa: BLE001
            # nothing of an exception is an answer, whatever this application is mounted in
            _log.exception("A page of the dashboard failed (boundary: %s).", Boundary.PAGE)
            refused = Refused(
                500, "Something unexpected happened: the log of the dashboard has it."
            )
            response = self._pages.refusal(request, refused)
        for name, value in security.HEADERS.items():
            response.headers.setdefault(name, value)
        try:
            await response(scope, receive, send)
        finally:
            if isinstance(response, StreamingResponse):
                self._streams -= 1

    async def _answered(self, request: Request) -> Response:
        if not security.known_host(request.headers.get("host", ""), self._hosts):
            raise Refused(
                400,
                "This dashboard does not answer to that host name: add it with --allow-host or hosts=.",
            )
        self._pages.on_loop(asyncio.get_running_loop())
        request.state.seen = self._pages.seen
        path = path_of(request)
        if path in self._pages.static and request.method in ("GET", "HEAD"):
            kind = STATIC[path.rpartition("/")[2]]
            kept = {"cache-control": "public, max-age=31536000, immutable"}
            return Response(self._pages.static[path], media_type=kind, headers=kept)
        if path == "/login" and request.method == "POST":
            return await self._login(request)
        access = await self._access(request)
        if not isinstance(access, Access):
            self._turned_away(request, access)
            raise Refused(401, "")
        if path == _LIVE and request.method == "GET":
            return self._live(request)
        rule = RULES.get(path)
        if rule is None:
            raise Refused(404, "There is no such page.")
        method = "GET" if request.method == "HEAD" else request.method
        if rule.method != method:
            raise Refused(405, "This page does not take that method.", {"allow": rule.method})
        for grant in rule.grants:
            if not access.may(grant):
                raise Refused(
                    403,
                    f"You are logged in as {access.actor}, without the grant “{grant}” that this needs.",
                )
        form = await self._form(request, access.actor) if method == "POST" else Fields()
        return await self._run(
            partial(self._pages.answered, rule), self._pages.asked(request, access, form)
        )

    async def _run(self, answer: Callable[[Asked], Response], asked: Asked) -> Response:
        """Make a page in a thread of the dashboard."""
        if self._waiting >= _WAITING_MAX:
            raise Refused(503, "Too many pages are being loaded: try again.", {"retry-after": "1"})
        self._waiting += 1
        page = asyncio.get_running_loop().run_in_executor(self._pool, answer, asked)
        page.add_done_callback(self._made)
        done, _ = await asyncio.wait((page,), timeout=_PAGE_S)
        if not done:
            raise Refused(503, _LATE[asked.request.method == "POST"], {"retry-after": "60"})
        try:
            return page.result()
        except (ConfigurationError, StoreError, SchemaError) as error:
            raise refused_for(error) from error

    def _made(self, page: asyncio.Future[Response]) -> None:
        """Count a thread as busy until its end, also behind an answer that came before."""
        self._waiting -= 1
        if not page.cancelled():
            # read once: asyncio reports one that nobody has read
            page.exception()

    async def _form(self, request: Request, actor: str) -> Fields:
        if not security.same_origin(request.headers):
            raise Refused(400, "This form was sent by another site, and nothing was done.")
        ends = {"connection": "close"}
        try:
            length = request.headers.get("content-length")
            body = await self._forms.read(request.receive, length, within_s=_READ_S)
        except TimeoutError:
            raise Refused(408, "The form did not arrive in time.", ends) from None
        except TooLongError:
            is_edit = path_of(request) in ("/edit", "/rehearse")
            way = _EDITED if is_edit else "choose fewer messages"
            raise Refused(413, f"The form is too large: {way}.", ends) from None
        try:
            pairs = parse_qsl(
                body.decode(), keep_blank_values=True, max_num_fields=_FORM_FIELDS, errors="strict"
            )
        except ValueError:
            raise Refused(400, "This form cannot be read.") from None
        form = Fields(pairs)
        token, cookie = form.get(security.FIELD, ""), request.cookies.get(security.FORM, "")
        if not self._signer.is_ours(token, cookie, actor):
            raise Refused(
                400,
                "This form is out of date, or was not sent by this dashboard: load its page again.",
            )
        return form

    # -- logins -----------------------------------------------------------------------------

    async def _access(self, request: Request) -> Access | Cause:
        """Who has sent a request, or why that is not known."""
        if self._tokens is None:
            access: Any = self._host(request)
            if inspect.isawaitable(access):
                access = await access
            if access is not None and not isinstance(access, Access):
                raise TypeError("The dashboard's authenticator returns an Access, or None.")
            return access or "host"
        session = request.cookies.get(security.SESSION, "")
        if (known := self._signer.access(session, self._tokens)) is not None:
            return known
        header = request.headers.get("authorization", "")
        if not header:
            return "expired" if session else "missing"
        secret = security.bearer(header)
        token = None if secret is None else self._verified(request, self._tokens, secret)
        return "wrong" if token is None else token.access

    def _turned_away(self, request: Request, cause: Cause) -> None:
        """Have the cause logged and counted; the answer does not tell it."""
        address = request.client.host if request.client else None
        self.admin.app.events.emit(LoginRefused(cause=cause, address=address))

    def _verified(self, request: Request, tokens: Tokens, secret: str) -> Token | None:
        """Compare a secret with the tokens; an address that failed too often must wait instead."""
        address = request.client.host if request.client else ""
        # counted and compared without a pause between, so that simultaneous guesses count one by one
        if wait_s := self._throttle.attempt(address):
            self._turned_away(request, "limited")
            raise Refused(
                429, "Too many logins have failed: wait a minute.", {"retry-after": f"{wait_s:.0f}"}
            )
        token = tokens.holder(secret)
        if token is not None:
            self._throttle.succeeded(address)
        return token

    async def _login(self, request: Request) -> Response:
        if self._tokens is None:
            raise Refused(404, "There is no such page.")
        form = await self._form(request, "")
        token = self._verified(request, self._tokens, form.get("secret", ""))
        if token is None:
            self._turned_away(request, "wrong")
            raise Refused(401, "This is no token of the dashboard.")
        to = form.get("to", "")
        response = RedirectResponse(base_of(request) + (to if is_ours(to) else "/"), 303)
        session = self._signer.session(token)
        self._pages.set_cookie(request, response, security.SESSION, session, "lax")
        _log.info("%s has logged in to the dashboard.", token.access.actor)
        return response

    # -- live ---------------------------------------------------------------------------------

    def _live(self, request: Request) -> Response:
        """Server-sent events: `changed` whenever the overview has, and from time to time `counted`, for charts."""
        if self._streams >= _STREAMS_MAX:
            later = {"retry-after": "30", "connection": "close"}
            raise Refused(503, "Too many pages are being kept up to date.", later)
        # here, not when the stream begins: several may be opened before the first one does
        self._streams += 1
        return StreamingResponse(self._events(request), media_type="text/event-stream")

    async def _events(self, request: Request) -> AsyncGenerator[bytes, None]:
        loop = asyncio.get_running_loop()
        yield b"retry: 10000\n\n"
        # the state that the page shows: a change since then is sent at once
        seen = request.query_params.get("seen", "")
        began = sent_at = time.monotonic()
        while (at := time.monotonic()) < began + _STREAM_S:
            try:
                # an expired login gets nothing more
                if not isinstance(await self._access(request), Access):
                    return
                now = await loop.run_in_executor(self._pool, self._summarized)
            except (StoreError, SchemaError, Refused):
                now = "unavailable"
            event = (
                "changed"
                if seen and now != seen
                else "counted"
                if at > sent_at + _COUNTED_S
                else ""
            )
            if event:
                sent_at = at
                yield f"event: {event}\ndata: {now}\n\n".encode()
            else:
                # a comment: fails when the client is gone
                yield b":\n\n"
            seen = now
            await asyncio.sleep(_TICK_S)

    def _summarized(self) -> str:
        """A digest of what is open, read once for all streams."""
        with self._summary_lock:
            at, digest = self._summary
            if time.monotonic() - at >= _TICK_S - 0.5:
                # without ages, which change all the time
                consumers, topics = self.admin.overview()
                counts: list[Any] = [
                    (row.consumer, row.counts, row.quarantined) for row in consumers
                ]
                counts += [(row.topic, row.route, row.counts) for row in topics]
                counts += [(one.code, one.query) for one in self.admin.check().findings]
                digest = hashlib.sha256(repr(counts).encode()).hexdigest()
                self._summary = (time.monotonic(), digest)
        self._pages.seen = digest[:16]
        return self._pages.seen


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
