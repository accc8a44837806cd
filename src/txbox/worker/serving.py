"""How a port is served: uvicorn on a socket that is already bound, and the limits that uvicorn lacks."""

from __future__ import annotations

import asyncio
import socket
import threading
from dataclasses import dataclass
from typing import Any, Protocol

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

# a page takes 2 s at most, a stop of uvicorn a little more
_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """What clients may hold of a server.

    Args:
        head_s: bound on sending the head of a request, also the next one of a connection that is kept alive.
        head_bytes: of a request, with its headers.
        answer_s: bound on reading an answer.
        waiting_max: connections that have sent no request, or not read their answer; one more closes the
            oldest of them.
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
# browsers keep connections open between pages, and one for each that is kept up to date
DASHBOARD = Bounds(
    head_s=15, head_bytes=64 * 1024, answer_s=15, waiting_max=64, connections_max=256, drain_s=2
)


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
        #: Connections whose client has something to do, the oldest first.
        self.waiting: dict[_Protocol, None] = {}


class _Protocol(H11Protocol):
    """uvicorn's protocol, where clients that send no request, or read no answer, neither stay nor keep others out.

    uvicorn bounds the pause between two requests, but neither the time of a head nor that of reading an
    answer; and its limit on connections turns away who comes last, so that idle ones starve every other.
    """

    config: _Config
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
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
        self._give(bounds.answer_s if self.transport.is_closing() else bounds.head_s)

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
