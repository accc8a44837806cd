"""The dashboard, pages and actions over `admin/`, as an ASGI application: logins, grants, limits, and fresh pages."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal
from urllib.parse import parse_qsl

from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from txbox.admin import Admin
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
    Authenticator,
    Failures,
    Grant,
    Signed,
    Token,
    Users,
    hashed,
)

__all__ = [
    "Access",
    "Authenticate",
    "Authenticator",
    "Dashboard",
    "Grant",
    "Token",
    "Users",
    "hashed",
]

_log = logging.getLogger("txbox")

#: Why somebody is not let in: those of `LoginRefused`.
Cause = Literal["missing", "expired", "wrong", "limited", "host"]

_FORM_BYTES = 256 * 1024
_FORM_FIELDS = 500
_EDITED = "edit a payload of that size with `txbox edit`, and rehearse it with `txbox rehearse`"
_READ_S = 10.0
# connections of its own: the pages', and never the workers'
_THREADS = 4
_WAITING_MAX = 64
_LIVE = "/live"
_STREAMS_MAX = 32
_STREAM_S = 300.0
_TICK_S = 3.0
_VERIFIED_S = 60.0
_VERIFIED_MAX = 1_000


class Dashboard:
    """An ASGI application that shows one inbox and outbox, to those who may see them.

    Args:
        target: an App; or what `Admin` takes.
        authenticator: `Token`, `Users`, or a callable of the host application that takes a Starlette request
            and returns an `Access`, or None to turn it away; it may be a coroutine.
        hosts: names under which the dashboard is reached, beside those of loopback.
        secret: 24 bytes or more, the same in all processes that serve it; without it a login is known to
            one process, and until its end.

    Raises:
        ConfigurationError: no authenticator, or a secret that is too short.

    Nothing connects before the first page.
    """

    def __init__(
        self,
        target: Any,
        authenticator: Authenticator | Authenticate,
        *,
        hosts: Iterable[str] = (),
        secret: str | None = None,
    ) -> None:
        # callers without types may pass None, or a class instead of an object
        given: Any = authenticator
        if not isinstance(given, Authenticator) and (
            isinstance(given, type) or not callable(given)
        ):
            raise ConfigurationError(
                "The dashboard does not start without an authenticator: give it a Token, Users, or a callable "
                "that returns an Access."
            )
        self.admin = target if isinstance(target, Admin) else Admin(target)
        self._authenticator = authenticator
        self._hosts = tuple(hosts)
        self._signed = Signed(secret)
        self._failures = Failures()
        self._verified: dict[bytes, tuple[str, float]] = {}
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="txbox-ui")
        self._waiting = 0
        self._streams = 0
        self._summary: tuple[float, str] = (0.0, "")
        self._summary_lock = threading.Lock()
        known = authenticator if isinstance(authenticator, Authenticator) else None
        self._pages = Pages(self.admin, known, self._signed)

    def close(self) -> None:
        """End what runs between two batches, and close what this dashboard has opened itself."""
        self._pages.changes.close()
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
        request = Request(scope, receive)
        try:
            response = await self._answered(request)
        except Refused as error:
            response = self._pages.refusal(request, error)
        except ClientDisconnect:
            return
        except Exception:  # noqa: BLE001
            # nothing of an exception is an answer, whatever this application is mounted in
            _log.exception("A page of the dashboard failed.")
            refused = Refused(
                500, "Something unexpected happened: the log of the dashboard has it."
            )
            response = self._pages.refusal(request, refused)
        for name, value in security.HEADERS.items():
            response.headers.setdefault(name, value)
        await response(scope, receive, send)

    async def _answered(self, request: Request) -> Response:
        if not security.known_host(request.headers.get("host", ""), self._hosts):
            raise Refused(
                400,
                "This dashboard does not answer to that host name: add it with --allow-host or hosts=.",
            )
        self.admin.loop = asyncio.get_running_loop()
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
            partial(self._pages.answered, rule), Asked(request, access, request.query_params, form)
        )

    async def _run(self, answer: Callable[[Asked], Response], asked: Asked) -> Response:
        """Make a page in a thread of the dashboard."""
        if self._waiting >= _WAITING_MAX:
            raise Refused(503, "Too many pages are being loaded: try again.", {"retry-after": "1"})
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, answer, asked)
        except (ConfigurationError, StoreError, SchemaError) as error:
            raise refused_for(error) from error
        finally:
            self._waiting -= 1

    async def _form(self, request: Request, actor: str) -> Fields:
        if not security.same_origin(request.headers):
            raise Refused(400, "This form was sent by another site, and nothing was done.")
        try:
            async with asyncio.timeout(_READ_S):
                body = bytearray()
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > _FORM_BYTES:
                        way = (
                            _EDITED
                            if path_of(request) in ("/edit", "/rehearse")
                            else "choose fewer messages"
                        )
                        raise Refused(413, f"The form is too large: {way}.")
        except TimeoutError:
            raise Refused(408, "The form did not arrive in time.") from None
        try:
            pairs = parse_qsl(
                body.decode(), keep_blank_values=True, max_num_fields=_FORM_FIELDS, errors="strict"
            )
        except ValueError:
            raise Refused(400, "This form cannot be read.") from None
        form = Fields(pairs)
        token, cookie = form.get(security.FIELD, ""), request.cookies.get(security.FORM, "")
        if not self._signed.is_ours(token, cookie, actor):
            raise Refused(
                400,
                "This form is out of date, or was not sent by this dashboard: load its page again.",
            )
        return form

    # -- logins -----------------------------------------------------------------------------

    async def _access(self, request: Request) -> Access | Cause:
        """Who has sent a request, or why that is not known."""
        authenticator = self._authenticator
        if not isinstance(authenticator, Authenticator):
            found: Any = authenticator(request)
            if inspect.isawaitable(found):
                found = await found
            if found is not None and not isinstance(found, Access):
                raise TypeError("The dashboard's authenticator returns an Access, or None.")
            return found or "host"
        session = request.cookies.get(security.SESSION, "")
        actor = self._signed.actor(session)
        if actor is not None:
            return authenticator.known(actor) or "expired"
        header = request.headers.get("authorization", "")
        if not header:
            return "expired" if session else "missing"
        given = security.basic(header) if authenticator.named else security.bearer(header)
        if given is None:
            return "wrong"
        name, secret = given if isinstance(given, tuple) else ("", given)
        return await self._verify(request, name, secret) or "wrong"

    def _turned_away(self, request: Request, cause: Cause) -> None:
        """Have the cause logged and counted; the answer does not tell it."""
        address = request.client.host if request.client else None
        self.admin.app.events.emit(LoginRefused(cause=cause, address=address))

    async def _verify(self, request: Request, name: str, secret: str) -> Access | None:
        """Check a name and secret, with a limit on failures."""
        authenticator = self._authenticator
        assert isinstance(authenticator, Authenticator)
        address = request.client.host if request.client else ""
        # a token is everybody's: a bound on all its failures would let strangers keep its holders out
        name = name if authenticator.named else ""
        if wait_s := self._failures.wait_s(address, name):
            self._turned_away(request, "limited")
            raise Refused(
                429, "Too many logins have failed: wait a minute.", {"retry-after": f"{wait_s:.0f}"}
            )
        # a client that authenticates each request must not cost 50 ms each time
        digest = hashlib.sha256(f"{len(name)}:{name}{secret}".encode()).digest()
        actor, until = self._verified.get(digest, ("", 0.0))
        if until > time.monotonic():
            return authenticator.known(actor)
        loop = asyncio.get_running_loop()
        access = await loop.run_in_executor(self._pool, authenticator.verified, name, secret)
        if access is None:
            self._failures.add(address, name)
            return None
        if len(self._verified) >= _VERIFIED_MAX:
            self._verified.clear()
        self._verified[digest] = (access.actor, time.monotonic() + _VERIFIED_S)
        return access

    async def _login(self, request: Request) -> Response:
        authenticator = self._authenticator
        if not isinstance(authenticator, Authenticator):
            raise Refused(404, "There is no such page.")
        form = await self._form(request, "")
        access = await self._verify(request, form.get("name", ""), form.get("secret", ""))
        if access is None:
            self._turned_away(request, "wrong")
            raise Refused(401, "Wrong name, password or token.")
        to = form.get("to", "")
        response = RedirectResponse(base_of(request) + (to if is_ours(to) else "/"), 303)
        self._pages.set_cookie(
            request, response, security.SESSION, self._signed.session(access.actor), "lax"
        )
        _log.info("%s has logged in to the dashboard.", access.actor)
        return response

    # -- live ---------------------------------------------------------------------------------

    def _live(self, request: Request) -> Response:
        """Server-sent events: one whenever the overview or an operation has changed."""
        if self._streams >= _STREAMS_MAX:
            raise Refused(503, "Too many pages are being kept up to date.", {"retry-after": "30"})
        return StreamingResponse(self._events(request), media_type="text/event-stream")

    async def _events(self, request: Request) -> AsyncGenerator[bytes, None]:
        self._streams += 1
        loop = asyncio.get_running_loop()
        try:
            yield b"retry: 10000\n\n"
            # the state that the page shows: a change since then is sent at once
            seen = request.query_params.get("seen", "")
            ends = time.monotonic() + _STREAM_S
            while time.monotonic() < ends:
                try:
                    # an expired login gets nothing more
                    if not isinstance(await self._access(request), Access):
                        return
                    now = await loop.run_in_executor(self._pool, self._summarized)
                except (StoreError, SchemaError, Refused):
                    now = "unavailable"
                if seen and now != seen:
                    yield f"event: changed\ndata: {now}\n\n".encode()
                else:
                    # a comment: fails when the client is gone
                    yield b":\n\n"
                seen = now
                running = any(known.running for known in self._pages.changes.latest())
                await asyncio.sleep(_TICK_S / 3 if running else _TICK_S)
        finally:
            self._streams -= 1

    def _summarized(self) -> str:
        """A digest of what is open, read once for all streams."""
        changes = [
            (known.name, known.done, known.state, len(known.notes))
            for known in self._pages.changes.latest()
        ]
        with self._summary_lock:
            at, digest = self._summary
            if time.monotonic() - at >= _TICK_S - 0.5:
                # without ages, which change all the time
                consumers, topics = self.admin.overview()
                counts: list[Any] = [
                    (row.consumer, row.counts, row.quarantined) for row in consumers
                ]
                counts += [(row.topic, row.route, row.counts, row.overdue) for row in topics]
                digest = hashlib.sha256(repr(counts).encode()).hexdigest()
                self._summary = (time.monotonic(), digest)
        self._pages.seen = hashlib.sha256(f"{digest}{changes}".encode()).hexdigest()[:16]
        return self._pages.seen


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
