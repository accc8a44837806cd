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
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
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
