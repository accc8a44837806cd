"""FastAPI, Starlette and Litestar: worker and relay in the server's process, and the transaction of a request.

    api = FastAPI(lifespan=lifespan(app), routes=webhooks(app))
    Tx = Annotated[sqlite3.Connection, transaction(app)]

The lifespan is one of plain ASGI, which Litestar takes too.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import threading
import typing
from collections.abc import (
    AsyncGenerator,
    Callable,
    Generator,
    Iterable,
    Mapping,
    MutableMapping,
)
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from contextvars import copy_context
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from txbox.app import App
from txbox.boundaries import log as _log
from txbox.brokers.webhook import Receive, Scope, Send, by_path
from txbox.errors import ConfigurationError
from txbox.events import Event, Observer, WorkerStarted
from txbox.handlers import Opened
from txbox.inbox import Inbox
from txbox.integrations.once import Begin, BeginAsync
from txbox.integrations.requests import (
    ANONYMOUS,
    TOO_LARGE,
    Anonymous,
    Answer,
    Caller,
    Claim,
    Received,
    Refused,
    Requests,
    checked_caller,
    streamed,
)
from txbox.policy import GRACE
from txbox.session import blocking
from txbox.worker import Worker
from txbox.worker.health import Health

if TYPE_CHECKING:
    from fastapi.params import Depends
    from starlette.routing import BaseRoute


class Ending(Protocol):
    """What has work of its own to end before the server does: a Dashboard, a Webhook."""

    async def ended(self) -> None: ...


def end_process(_error: BaseException) -> None:
    """Have the server drain and end, as if it had been told to; whoever looks after the process starts it again."""
    os.kill(os.getpid(), signal.SIGTERM)


def lifespan(
    app: App,
    *,
    relay: bool = True,
    maintenance: bool = True,
    grace: timedelta = GRACE,
    start_within: timedelta = timedelta(seconds=10),
    health: Health | None = None,
    ends: Iterable[Ending] = (),
    crashed: Callable[[BaseException], object] = end_process,
) -> Callable[[Any], AbstractAsyncContextManager[None]]:
    """A lifespan in which `txbox run` happens: sources, handlers, retries, relay and maintenance.

    Async handlers run on the server's own loop, so that they can use its pools and clients, and must not block
    it; the others have threads. An app without handlers only sends what is staged.

    Args:
        relay, maintenance, grace: as Worker has them. The server must have longer than `grace` to shut down.
        start_within: requests are answered when the worker consumes, or after so long while a broker does not
            let it: it goes on trying.
        health: updated by the worker; see `probes`.
        ends: awaited at shutdown, at most for `grace`: a dashboard. The app's webhooks always are.
        crashed: called on the loop with what ended the worker, while the server is up.

    Raises:
        ConfigurationError, SchemaError, StoreError: at startup, which the server refuses then: what the worker
            could not start with.
        RuntimeError: at shutdown, when the worker had crashed: the server reports that it did not end well.

    Guarantee: as Worker's. What was not settled at shutdown, or at a kill, is delivered again.
    """

    @asynccontextmanager
    async def life(_server: Any) -> AsyncGenerator[None]:
        loop = asyncio.get_running_loop()
        consumes: asyncio.Future[None] = loop.create_future()
        ended: asyncio.Future[BaseException | None] = loop.create_future()
        serves = False  # before, and at shutdown, what ends the worker is raised

        def observer(event: Event) -> None:
            if isinstance(event, WorkerStarted):
                loop.call_soon_threadsafe(_resolve, consumes, None)

        def end(error: BaseException | None) -> None:
            _resolve(ended, error)
            if serves:
                # the worker has logged why
                _log.critical("The worker in this server has ended; the server ends, too.")
                crashed(error or RuntimeError("the worker ended"))

        def run() -> None:
            error: BaseException | None
            try:
                worker.run()
                error = worker.failure
            except BaseException as raised:  # noqa: BLE001  # the server decides: nothing dies in silence
                error = raised
            # a closed loop has waited for nothing
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(end, error)

        observers: list[Observer] = [observer] if health is None else [observer, health]
        worker = Worker(
            app,
            install_signals=False,
            relay=relay,
            maintenance=maintenance,
            grace=grace,
            health=health,
            loop=loop,
        )
        app.events.observers += observers
        try:
            threading.Thread(target=run, name="txbox-worker", daemon=True).start()
            await asyncio.wait(
                (consumes, ended),
                timeout=start_within.total_seconds(),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if ended.done():
                raise ended.result() or RuntimeError("The worker ended at its start.")
            if not consumes.done():
                _log.warning(
                    "The worker has not opened its sources within %g s; the server starts without waiting for them.",
                    start_within.total_seconds(),
                )
            serves = True
            yield
            if ended.done():
                raise RuntimeError("The worker in this server had crashed.") from ended.result()
        finally:
            serves = False
            worker.stop()
            others = [asyncio.ensure_future(each.ended()) for each in (*app.webhooks, *ends)]
            if others:
                await asyncio.wait(others, timeout=grace.total_seconds())
            await asyncio.shield(ended)
            for each in observers:
                app.events.observers.remove(each)

    return life


def _resolve(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


# -- the transaction of a request -----------------------------------------------------------------


def transaction(app: App) -> Any:
    """FastAPI: `tx: Annotated[Connection, transaction(app)]` is the request's own transaction, for `def` routes.

    Write through it and stage messages in it. It is committed when the route has returned, before the answer is
    sent; an exception, HTTPException too, rolls it back. An answer with an error status that the route
    *returns* is no exception. Where several dependencies share one request's transaction, give all of them
    the same object.

    Raises:
        ConfigurationError: FastAPI is older than 0.121, which would commit behind the answer.

    Guarantee: an answer that the route has returned is sent only after the commit.
    """

    def begun() -> Generator[Any]:
        with app.transaction() as tx:
            yield tx

    return _depends(begun, is_async=False)


def transaction_async(app: App) -> Any:
    """The twin of `transaction`, with an async connection or session, for `async def` routes."""

    async def begun() -> AsyncGenerator[Any]:
        async with app.transaction_async() as tx:
            yield tx

    return _depends(begun, is_async=True)


# those of a request; in a handler they are its own
_TRANSACTIONS: WeakKeyDictionary[Callable[..., Any], bool] = WeakKeyDictionary()


def _depends(dependency: Callable[[], Any], *, is_async: bool) -> Any:
    from fastapi import Depends

    _TRANSACTIONS[dependency] = is_async

    try:
        # of the request, the default, would be left when the answer is on its way
        return Depends(dependency, scope="function")
    except TypeError:
        raise ConfigurationError(
            "The transaction of a request needs FastAPI 0.121 or newer: an older one commits after its answer."
        ) from None


# -- requests once ----------------------------------------------------------------------------------

_EXCHANGE = "txbox.exchange"


class Answers:
    """ASGI middleware for `once`: it compares, keeps and replays. `api.add_middleware(Answers)`, before all others.

    Requests without an `Idempotency-Key` pass through as they are. Those with one are read before their route runs; if
    it has no `once`, that is all.

    Args:
        max_body_bytes: of a request with a key; a larger one is answered 413 by `once`.
    """

    def __init__(self, app: Any, *, max_body_bytes: int = 16 * 1024 * 1024) -> None:
        self._app, self._max_body_bytes = app, max_body_bytes

    # each framework has types of its own for these
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or _EXCHANGE in scope:
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, send)
        if exchange.keys:
            again = await exchange.read(receive, self._max_body_bytes)
            if again is None:
                return  # half a request is another one, and nobody waits for its answer
            receive = again
            # files by path would be sent by the server, past this
            extensions: dict[str, Any] = {**(scope.get("extensions") or {})}
            extensions.pop("http.response.pathsend", None)
            scope["extensions"] = extensions
        scope[_EXCHANGE] = exchange
        try:
            await self._app(scope, receive, exchange.send)
        except BaseException as error:
            if exchange.refusal is None or not isinstance(error, Exception):
                await exchange.abort(error)
                if exchange.failure is not None and exchange.failure is not error:
                    # a framework that takes the answer for begun says only that
                    raise exchange.failure from error
                raise
        if exchange.refusal is not None:
            await _send(send, exchange.refusal)
        elif exchange.claim is not None and not exchange.ended:
            unanswered = exchange.failure or RuntimeError(
                "The application ended without an answer."
            )
            await exchange.abort(unanswered)
            raise unanswered


class _Exchange:
    """One request and its answer."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self.keys = [
            value.decode("latin-1")
            for name, value in scope["headers"]
            if name.lower() == b"idempotency-key"
        ]
        self._body: bytes | None = b""
        self.claim: Claim | None = None
        self.refusal: Answer | None = None
        #: Why the answer could not be kept or committed.
        self.failure: Exception | None = None
        #: The transaction has been left, or is being left.
        self.ended = False
        self._is_async = False
        # a thread may still be claiming when its request has been cancelled
        self._lock = threading.Lock()
        self._aborted = False
        self._status: int | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._sent = bytearray()

    async def read(self, receive: Receive, limit: int) -> Receive | None:
        """Read the body; returns what brings it again, or None if the client went away before its end."""
        events: list[MutableMapping[str, Any]] = []
        body = bytearray()
        more = True
        while more and len(body) <= limit:
            event = await receive()
            if event["type"] != "http.request":
                return None
            events.append(event)
            more = event.get("more_body", False)
            body += event.get("body", b"")
        self._body = bytes(body) if len(body) <= limit else None
        events.reverse()

        async def again() -> MutableMapping[str, Any]:
            return events.pop() if events else await receive()

        return again

    def received(self) -> Received:
        scope = self._scope
        if self._body is None:
            raise Refused(TOO_LARGE)
        template = getattr(scope.get("route"), "path", None) or scope.get("path_template") or ""
        path = scope.get("raw_path") or scope["path"].encode()
        return Received(
            self.keys, scope["method"], path, scope.get("query_string", b""), self._body, template
        )

    async def begin(self, requests: Requests, caller: object) -> Any:
        """Claim the key; returns the transaction."""
        if self.claim is not None:
            raise ConfigurationError(
                "This request has a transaction of once() already: use one of them in a route."
            )
        try:
            claim = await requests.claim(self.received(), caller)
        except Refused as refused:
            self.refusal = refused.answer
            raise
        with self._lock:
            self.claim, self._is_async = claim, requests.is_async
            aborted = self._aborted
        if aborted:
            late = RuntimeError("The request was cancelled while it claimed its key.")
            await claim.abort(late)
            raise late
        return claim.tx

    async def send(self, event: MutableMapping[str, Any]) -> None:
        """Pass on what is none of `once`; else keep it back until the commit."""
        if self.refusal is not None:
            return  # the framework's own answer to Refused
        if self.claim is None or self.ended:
            await self._send(event)
            return
        try:
            await self._collect(self.claim, event)
        except Exception as error:
            self.failure = error
            raise

    async def _collect(self, claim: Claim, event: MutableMapping[str, Any]) -> None:
        if event["type"] == "http.response.start":
            self._status, self._headers = event["status"], list(event.get("headers", ()))
            self._sent.clear()  # of an answer that could not be kept, for which this one comes
            if not claim.keeps(event["status"]):
                await self._finish(claim, event["status"])
                await self._send(event)
        elif event["type"] == "http.response.body" and self._status is not None:
            self._sent += event.get("body", b"")
            claim.check_size(len(self._sent))
            if not event.get("more_body", False):
                await self._finish(claim, self._status)
                start = {"type": "http.response.start", "status": self._status}
                await self._send({**start, "headers": self._headers})
                await self._send({"type": "http.response.body", "body": bytes(self._sent)})
        elif event["type"] != "http.response.debug":
            raise streamed("The route")

    async def _finish(self, claim: Claim, status: int) -> None:
        headers = tuple(
            (name.lower().decode("latin-1"), value.decode("latin-1"))
            for name, value in self._headers
        )
        answer = Answer(status, headers, bytes(self._sent))
        self.ended = True
        sent = await self._left(claim.finish(answer))
        if sent is not answer:
            # ends the route here: what it does behind its answer is not to happen
            self.refusal = sent
            raise Refused(sent)

    async def abort(self, error: BaseException) -> None:
        with self._lock:
            self._aborted, claim = True, self.claim
        if claim is not None and not self.ended:
            self.ended = True
            await self._left(claim.abort(error))

    async def _left(self, leaving: Any) -> Any:
        if self._is_async:
            return await leaving
        # a sync one may wait for its server, which must not stop the loop; a request that is cancelled leaves it, too,
        # even at the loop's end, which cancels the tasks that there are
        context, loop = copy_context(), asyncio.get_running_loop()
        return await asyncio.shield(
            loop.run_in_executor(None, lambda: context.run(blocking, leaving))
        )


async def _send(send: Send, answer: Answer) -> None:
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]
    if answer.body or answer.status not in (204, 304):
        headers.append((b"content-length", str(len(answer.body)).encode()))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})


class Once:
    """Starlette and Litestar: a route's own transaction, once for each caller and `Idempotency-Key`.

        place_order = Once(Inbox("place-order"), app.transaction_async, is_async=True)

        async def order(request):
            tx = await place_order.claim_async(request, caller=request.user.username)

    The arguments are those of `txbox.integrations.requests.Requests`; what it does is what `once` says.
    """

    def __init__(self, inbox: Inbox, begin: Callable[[], Any], **options: Any) -> None:
        self._requests = Requests(inbox, begin, **options)

    async def claim_async(self, request: Any, *, caller: object) -> Any:
        """Return the request's transaction, or end the request here, because it is a repeat.

        Args:
            request: of Starlette or Litestar.
            caller: the id of the authenticated user, or ANONYMOUS.
        """
        self._check(is_async=True)
        return await _exchange(request).begin(self._requests, caller)

    def claim(self, request: Any, *, caller: object) -> Any:
        """`claim_async` for `def` routes of Starlette, which waits for their threads even if a request is cancelled."""
        self._check(is_async=False)
        return blocking(_exchange(request).begin(self._requests, caller))

    def _check(self, *, is_async: bool) -> None:
        if self._requests.is_async is not is_async:
            raise ConfigurationError(
                "Call claim_async if this Once has is_async=True and an async transaction, else claim in a `def` route."
            )


def _exchange(request: Any) -> _Exchange:
    exchange: _Exchange | None = request.scope.get(_EXCHANGE)
    if exchange is None:
        raise ConfigurationError(
            "once() needs its middleware: api.add_middleware(Answers), of txbox.integrations.starlette."
        )
    return exchange


def once(inbox: Inbox, begin: Begin, *, caller: Caller, **options: Any) -> Any:
    """FastAPI: `tx: Annotated[Connection, once(…)]` is the transaction of a `def` route that runs once for each key.

    With `api.add_middleware(Answers)`. The answer is kept in the transaction, and a repeat gets it, byte for byte.

    Args:
        inbox: one for each route, because its consumer is part of the key: `Inbox("place-order")`.
        begin: begins the transaction: `app.transaction`, `engine.begin`, `sessionmaker.begin`.
        caller: a dependency that returns the id of the authenticated user, so that it refuses others before a key is
            looked at; or "anonymous".
        options: as of `txbox.integrations.requests.Requests`.

    A repeat is answered 409 with Retry-After while the first request runs, another request under the key 422, a
    missing or malformed key 400; 503 with Retry-After while the database is away. An exception, and an answer of 400
    and above, roll back and leave no row; with `keep=(402, …)` an answer of these statuses is kept by itself.

    Raises, in the request:
        ConfigurationError: the middleware is missing, there is no caller, or the answer is too large: nothing is kept.
        StoreError: COMMIT was refused, or the route ended the transaction.

    Guarantee: row, answer and what the route wrote are one commit, and the answer is sent behind it.
    """
    requests = Requests(inbox, begin, **options)

    def begun(request: Any, who: object = ANONYMOUS) -> Any:
        return blocking(_exchange(request).begin(requests, who))

    return _once(begun, caller)


def once_async(inbox: Inbox, begin: BeginAsync, *, caller: Caller, **options: Any) -> Any:
    """The twin of `once`, with an async connection or session, for `async def` routes."""
    requests = Requests(inbox, begin, is_async=True, **options)

    async def begun(request: Any, who: object = ANONYMOUS) -> Any:
        return await _exchange(request).begin(requests, who)

    return _once(begun, caller)


def _once(begun: Callable[..., Any], caller: Caller) -> Any:
    from fastapi import Depends, Request

    who = checked_caller(caller)
    parameter = inspect.Parameter
    parameters = [parameter("request", parameter.POSITIONAL_OR_KEYWORD, annotation=Request)]
    if not isinstance(who, Anonymous):
        depends: Any = Depends(who)
        parameters.append(
            parameter("who", parameter.POSITIONAL_OR_KEYWORD, annotation=Any, default=depends)
        )
    vars(begun)["__signature__"] = inspect.Signature(parameters)
    return Depends(begun)


# -- dependencies of handlers ------------------------------------------------------------------------


def depends(annotations: Mapping[str, Any], *, is_async: bool, transactional: bool) -> Opened:
    """FastAPI: `App(…, resolver=depends)` gives handlers what `Annotated[…, Depends(…)]` gives routes.

    Dependencies of dependencies too, each once a call. Those with a `yield` are closed in reverse, in the handler's
    transaction, before COMMIT. `transaction(app)` and `transaction_async(app)` are the handler's own transaction. In an
    `async def` handler `def` dependencies run on the loop.

    Raises, at registration:
        ConfigurationError: a parameter is no Depends, needs something of a request, or is async and the handler is not.
    """
    wanted = {
        name: _Dependency.of(name, hint, None, is_async=is_async, transactional=transactional)
        for name, hint in annotations.items()
    }

    @asynccontextmanager
    async def opened_async(_given: Any, tx: Any) -> AsyncGenerator[Mapping[str, Any]]:
        known: dict[Any, Any] = {}
        async with AsyncExitStack() as stack:
            yield {name: await each.value(stack, known, tx) for name, each in wanted.items()}

    @contextmanager
    def opened(argument: Any, tx: Any) -> Generator[Mapping[str, Any]]:
        entered = opened_async(argument, tx)
        values = blocking(entered.__aenter__())
        try:
            yield values
        except BaseException as error:
            blocking(entered.__aexit__(type(error), error, error.__traceback__))
            raise
        blocking(entered.__aexit__(None, None, None))

    return opened_async if is_async else opened


@dataclass(frozen=True)
class _Dependency:
    """What Depends names, and what that takes in its turn."""

    call: Callable[..., Any]
    function: Callable[..., Any]
    takes: Mapping[str, _Dependency]
    cached: bool

    @classmethod
    def of(cls, name: str, hint: Any, default: object, **handler: bool) -> _Dependency:
        kind, marker = _marked(hint, default)
        if marker is None:
            raise ConfigurationError(f"{name} is not Annotated[…, Depends(…)].")
        call: Callable[..., Any] = marker.dependency or kind
        if call in _TRANSACTIONS:
            if not handler["transactional"] or _TRANSACTIONS[call] != handler["is_async"]:
                raise ConfigurationError(
                    f"{name} is a transaction of another kind than the handler's: use transaction() in `def` handlers, "
                    "transaction_async() in `async def` ones, and neither outside of one."
                )
            return cls(call, call, {}, True)
        function = _function_of(call)
        if not handler["is_async"] and (
            inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
        ):
            raise ConfigurationError(f"{name} is async: make the handler an `async def` function.")
        hints = typing.get_type_hints(function, include_extras=True)
        takes = {
            each.name: cls.of(each.name, hints.get(each.name), each.default, **handler)
            for each in inspect.signature(call).parameters.values()
            if each.default is each.empty or _marked(hints.get(each.name), each.default)[1]
        }
        return cls(call, function, takes, marker.use_cache)

    async def value(self, stack: AsyncExitStack, known: dict[Any, Any], tx: Any) -> Any:
        if self.call in _TRANSACTIONS:
            return tx
        if self.cached and self.call in known:
            return known[self.call]
        arguments = {name: await each.value(stack, known, tx) for name, each in self.takes.items()}
        if inspect.isasyncgenfunction(self.function):
            result = await stack.enter_async_context(asynccontextmanager(self.call)(**arguments))
        elif inspect.isgeneratorfunction(self.function):
            result = stack.enter_context(contextmanager(self.call)(**arguments))
        else:
            result = self.call(**arguments)
            if inspect.iscoroutinefunction(self.function):
                result = await result
        known[self.call] = result
        return result


def _marked(hint: Any, default: object) -> tuple[Any, Depends | None]:
    """What a parameter is annotated with, and the Depends of its annotation or default."""
    from fastapi.params import Depends

    kind, *more = typing.get_args(hint) if typing.get_origin(hint) is typing.Annotated else [hint]
    return kind, next((each for each in (default, *more) if isinstance(each, Depends)), None)


def _function_of(call: Any) -> Callable[..., Any]:
    """What runs when a dependency is called, which may be a function, a class, an object or a partial of these."""
    while isinstance(call, partial):
        call = call.func
    if inspect.isclass(call):
        return call.__init__
    return call if inspect.isroutine(call) else call.__call__


# -- routes -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Asgi:
    """An application that Starlette does not take for a function of a request."""

    application: Callable[[Scope, Receive, Send], Any]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.application(scope, receive, send)


def webhooks(app: App) -> list[BaseRoute]:
    """A route for each webhook that the app consumes, at its path; call it when all are registered.

    Routes and no mounts: those answer a URL without a slash at its end with a redirect, which senders do not follow.

    Raises:
        ConfigurationError: two have the same path, or one has no handler.
    """
    return _routes(by_path(app.webhooks, app.handlers.topics()))


def probes(app: App, health: Health) -> list[BaseRoute]:
    """`/livez`, `/readyz` and `/metrics`, as `txbox run --health-port` serves them.

    Args:
        health: the same object as for `lifespan`.
    """
    from txbox.observers.counters import Counters
    from txbox.worker.serving import probes as pages

    counters = Counters()
    app.events.observers.append(counters)
    return _routes(pages(health, counters, app.webhooks).applications)


def _routes(applications: Any) -> list[BaseRoute]:
    from starlette.routing import Route

    return [Route(path, _Asgi(application)) for path, application in applications.items()]
