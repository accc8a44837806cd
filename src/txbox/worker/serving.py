"""What a process answers over HTTP (the probes and metrics of a worker, its webhooks, the dashboard), and how.

With several processes the parent answers for its workers: it asks each of them on loopback.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import uvicorn
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from uvicorn.protocols.http.h11_impl import H11Protocol

from txbox.brokers.webhook import Receive, Scope, Send, Webhook, answer
from txbox.observers.counters import Counters
from txbox.store.activity import Trouble
from txbox.worker.health import Health

# a page takes 2 s at most, a stop of uvicorn a little more
_CLOSE_S = 5.0
_CHILD_S = 2.0
_JSON = b"application/json"
_PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"

Application = Callable[[Scope, Receive, Send], Awaitable[None]]
#: Status, content type, body.
Page = tuple[int, bytes, bytes]


class Routes:
    """An ASGI application: each path has one of its own, everything else is 404."""

    def __init__(self, applications: Mapping[str, Application]) -> None:
        self.applications = applications

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        application = self.applications.get(scope["path"])
        if application is None:
            await answer(send, 404, "nothing is here")
            return
        await application(scope, receive, send)

    async def ended(self) -> None:
        """Wait for what webhooks still do after they answered that the sender should retry."""
        for application in self.applications.values():
            if isinstance(application, Webhook):
                await application.ended()


def probes(health: Health, counters: Counters, hooks: Sequence[Webhook] = ()) -> Routes:
    """`/livez`, `/readyz` and `/metrics` of one worker."""

    async def livez() -> Page:
        return _state("alive", health.stuck())

    async def readyz() -> Page:
        return _state("ready", health.unready())

    async def metrics() -> Page:
        return _exposition([*counters.collect(), *_gauges(health), *_of_webhooks(hooks)])

    return _pages(livez=livez, readyz=readyz, metrics=metrics)


def _pages(**contents: Callable[[], Awaitable[Page]]) -> Routes:
    return Routes({f"/{name}": _page(content) for name, content in contents.items()})


def _page(content: Callable[[], Awaitable[Page]]) -> Application:
    async def application(scope: Scope, _: Receive, send: Send) -> None:
        # close: probes do not reuse connections
        headers = [(b"cache-control", b"no-store"), (b"connection", b"close")]
        if scope["method"] not in ("GET", "HEAD"):
            await answer(send, 405, "GET or HEAD", [(b"allow", b"GET, HEAD"), *headers])
            return
        status, kind, body = await content()
        await answer(send, status, body, headers, kind=kind)

    return application


def _state(name: str, why_not: Sequence[str]) -> Page:
    said = json.dumps({name: not why_not, "because": list(why_not)}) + "\n"
    return 503 if why_not else 200, _JSON, said.encode()


def _exposition(families: Iterable[Metric]) -> Page:
    return 200, _PROMETHEUS, generate_latest(_Collected(families))


class _Collected:
    """Not the default registry, which has the application's metrics."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _gauges(health: Health) -> Iterable[Metric]:
    pumps = {pump.name: pump for pump in health.pumps}
    yield GaugeMetricFamily(
        "txbox_ready", "1 when /readyz says 200.", value=float(not health.unready())
    )
    yield _gauge(
        "in_flight", "Deliveries that were received and are not settled.", "source",
        {name: pump.in_flight for name, pump in pumps.items()},
    )  # fmt: skip
    yield _gauge(
        "source_silent_seconds", "Seconds since the source's loop came round last.", "source",
        {name: pump.silent_s for name, pump in pumps.items()},
    )  # fmt: skip
    yield _gauge(
        "source_away_seconds", "For how long the source's broker has not let this process receive.", "source",
        {name: _away_s([pump.trouble] if pump.trouble else []) for name, pump in pumps.items()},
    )  # fmt: skip
    routes = {} if health.relays is None else health.relays.by_route()
    yield _gauge(
        "route_away_seconds", "For how long the route's destination has not let this process send.", "route",
        {name: _away_s(troubles) for name, troubles in routes.items()},
    )  # fmt: skip
    yield _gauge(
        "rows_leased", "Rows of the table that this process holds a lease of.", "consumer",
        {table.consumer: table.leased for table in health.tables},
    )  # fmt: skip


def _away_s(troubles: Sequence[Trouble]) -> float:
    return max((time.time() - trouble.since_s for trouble in troubles), default=0.0)


def _of_webhooks(hooks: Sequence[Webhook]) -> Iterable[Metric]:
    in_flight = {hook.path: hook.in_flight for hook in hooks}
    yield _gauge("webhook_in_flight", "Requests at work.", "path", in_flight)
    answers = CounterMetricFamily(
        "txbox_webhook_answers", "Requests answered, by path and status.", labels=("path", "status")
    )
    for hook in hooks:
        for status, count in hook.answers.copy().items():
            answers.add_metric((hook.path, str(status)), count)
    yield answers


def _gauge(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"txbox_{name}", text, labels=(label,))
    for labelled, value in values.items():
        family.add_metric((labelled,), value)
    return family


# -- several processes ----------------------------------------------------------------------------


class Child(Protocol):
    """A worker process, as its parent sees it; see `supervisor.Child`."""

    number: int
    health: socket.socket | None
    answered: bool

    @property
    def running(self) -> bool: ...


def probes_of(children: Sequence[Child]) -> Routes:
    """`/livez`, `/readyz` and `/metrics` of a parent.

    Alive: every process that runs is; one that has died is started again and one that starts has not
    answered yet, neither is judged. Ready: all of them are. Metrics: the label `process`.
    """

    async def livez() -> Page:
        def silent(child: Child) -> str:
            judged = child.running and child.answered
            return f"no answer within {_CHILD_S:g} s" if judged else ""

        return await state("alive", "/livez", silent)

    async def readyz() -> Page:
        return await state(
            "ready", "/readyz", lambda child: "no answer" if child.running else "not running"
        )

    async def state(name: str, path: str, silent: Callable[[Child], str]) -> Page:
        why: list[str] = []
        for child, body in await _ask_all(children, path):
            because = [silent(child)] if body is None else json.loads(body)["because"]
            why += [f"process {child.number}: {reason}" for reason in because if reason]
        return _state(name, why)

    async def metrics() -> Page:
        # not prometheus_client's multiprocess mode: docs/decisions/0030-metrics-of-several-processes.md
        families: dict[str, Metric] = {}
        for child, body in await _ask_all(children, "/metrics"):
            for family in text_string_to_metric_families(body or ""):
                samples = [
                    sample._replace(labels=sample.labels | {"process": str(child.number)})
                    for sample in family.samples
                ]
                first = families.setdefault(family.name, family)
                first.samples = samples if first is family else first.samples + samples
        up = {str(child.number): float(child.running) for child in children}
        return _exposition(
            [*families.values(), _gauge("process_up", "1 while the process runs.", "process", up)]
        )

    return _pages(livez=livez, readyz=readyz, metrics=metrics)


async def _ask_all(children: Sequence[Child], path: str) -> list[tuple[Child, str | None]]:
    answers = await asyncio.gather(*(_ask(child, path) for child in children))
    return list(zip(children, answers, strict=True))


async def _ask(child: Child, path: str) -> str | None:
    """The body of a child's answer; None when it does not run or did not answer."""
    if not child.running or child.health is None:
        return None
    try:
        async with asyncio.timeout(_CHILD_S):
            reader, writer = await asyncio.open_connection(*child.health.getsockname())
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                # a page ends with its connection
                page = await reader.read()
            finally:
                writer.close()
    except (TimeoutError, OSError):
        return None
    head, _, body = page.partition(b"\r\n\r\n")
    # neither cut off with a child that died, nor uvicorn's word that it has too many connections
    if b"\r\ncontent-length: %d\r\n" % len(body) not in head or b"no-store" not in head:
        return None
    child.answered = True
    return body.decode()


# -- a port ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bounds:
    """What clients may use of a server.

    Args:
        head_s: bound on sending the head of a request, also the next one of a connection that is kept alive.
        head_bytes: of a request, with its headers.
        answer_s: bound on reading an answer.
        waiting_max: connections that have sent no request, or not read their answer; one more closes one of the
            latter, or else the oldest.
        connections_max: of all, those included that are being answered; above it the answer is 503.
        drain_s: what takes longer is cut off when the server stops.
    """

    head_s: int
    head_bytes: int
    answer_s: int
    waiting_max: int
    connections_max: int | None = None
    drain_s: int | None = None


PROBES = Bounds(
    head_s=1, head_bytes=8192, answer_s=5, waiting_max=32, connections_max=64, drain_s=1
)
# a Webhook bounds what is at work itself, and the worker's grace bounds the drain
WEBHOOKS = Bounds(head_s=5, head_bytes=64 * 1024, answer_s=5, waiting_max=256)
# a Dashboard bounds what is read and what is at work itself. Browsers keep connections open between pages, and one for
# each that is kept up to date: who comes with many at once gets 503 for some, and none is closed before it is read
DASHBOARD = Bounds(head_s=15, head_bytes=64 * 1024, answer_s=15, waiting_max=256, drain_s=2)


class Served(Protocol):
    """An ASGI application that says when what it has begun has ended."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None: ...
    async def ended(self) -> None: ...


class Server:
    """Serves an application on a listening socket, perhaps shared with other processes; closes it at the end.

    Either as a task of a loop, with `serve`, or in a thread with a loop of its own, from `start` to
    `close`: no lane waits for it then, nor it for them.
    """

    def __init__(self, routes: Served, listener: socket.socket, bounds: Bounds) -> None:
        self._routes = routes
        self._listener = listener
        self._bounds = bounds
        self._server: uvicorn.Server | None = None
        self._stopped = False
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self.serve()), name="txbox-health", daemon=True
        )

    async def serve(self) -> None:
        """Serve until stopped; then accept nothing, finish what is at work, and return."""
        config = _Config(self._routes, self._bounds)
        self._server = uvicorn.Server(config)
        # stopped while this one began
        self._server.should_exit = self._stopped
        await self._server.serve([self._listener])
        for connection in list(config.waiting):
            connection.abort()
        await self._routes.ended()

    def stop(self) -> None:
        """From any thread; noticed within a tenth of a second."""
        self._stopped = True
        if self._server is not None:
            self._server.should_exit = True

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop, and wait for the thread."""
        self.stop()
        self._thread.join(_CLOSE_S)


class _Config(uvicorn.Config):
    def __init__(self, routes: Served, bounds: Bounds) -> None:
        super().__init__(
            routes,
            # whatever else is installed: httptools bounds no head
            http=_Protocol,
            h11_max_incomplete_event_size=bounds.head_bytes,
            limit_concurrency=bounds.connections_max,
            timeout_keep_alive=bounds.head_s,
            timeout_graceful_shutdown=bounds.drain_s,
            interface="asgi3",
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
        )
        self.bounds = bounds
        #: Connections whose client has something to do, in the order in which they are closed when they are too many:
        #: those that have their answer, then those that have sent no request, the oldest first.
        self.waiting: OrderedDict[_Protocol, None] = OrderedDict()


class _Protocol(H11Protocol):
    """uvicorn's protocol, where clients that send no request, or read no answer, neither stay nor keep others out.

    uvicorn bounds the pause between two requests, but neither the time of a head nor that of reading an
    answer; and its limit on connections turns away who comes last, so that idle ones starve every other.
    """

    config: _Config
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # asyncio sets it only where the listener names its protocol; without it each answer on a kept-alive connection
        # waits 40 ms: head and body are two writes, and the client delays its ACK of the first
        connection: socket.socket = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._wait_for_client()

    def handle_events(self) -> None:
        super().handle_events()
        # None before the first request
        if not getattr(self.cycle, "response_complete", True):
            self._stop_waiting()

    def on_response_complete(self) -> None:
        # first: uvicorn goes on with a request that came behind this one
        self._wait_for_client()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._timer is None:
            self._give(self.config.bounds.answer_s)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self not in self.config.waiting:
            self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def abort(self) -> None:
        self._stop_waiting()
        self.transport.abort()

    def _wait_for_client(self) -> None:
        """Until its next request has come, or, where the connection closes, it has read its answer."""
        bounds, waiting = self.config.bounds, self.config.waiting
        if len(waiting) >= bounds.waiting_max:
            next(iter(waiting)).abort()
        waiting[self] = None
        answered = self.transport.is_closing()
        if answered:
            waiting.move_to_end(self, last=False)
        self._give(bounds.answer_s if answered else bounds.head_s)

    def _stop_waiting(self) -> None:
        self.config.waiting.pop(self, None)
        self._stop_timer()

    def _give(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
