"""The webhooks of an app, served by uvicorn on the worker's asyncio loop."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from txbox.brokers.webhook import Receive, Scope, Send, Webhook, answer
from txbox.errors import ConfigurationError

if TYPE_CHECKING:
    import uvicorn

# connections that have not sent the head of a request
_WAITING_MAX = 256
_HEAD_S = 5.0
_HEAD_BYTES = 64 * 1024


class Endpoints:
    """Webhooks on one port, each at its path.

    Args:
        listener: bound and listening, perhaps shared with other processes; closed with the server.

    Raises:
        ConfigurationError: uvicorn is not installed, or two have the same path.
    """

    def __init__(self, webhooks: Sequence[Webhook], listener: socket.socket) -> None:
        if importlib.util.find_spec("uvicorn") is None:
            raise ConfigurationError(
                "Webhooks are served by uvicorn, which is not installed: "
                "`pip install 'txbox[webhook]'`, or mount them in a web framework and do not consume() them."
            )
        self._listener = listener
        self._by_path: dict[str, Webhook] = {}
        for webhook in webhooks:
            if webhook.path in self._by_path:
                raise ConfigurationError(
                    f"Two webhooks have the path {webhook.path}: give one of them another path=."
                )
            self._by_path[webhook.path] = webhook
        self._server: uvicorn.Server | None = None
        self._stopped = False

    def check(self, topics: Collection[str]) -> None:
        """Check that every webhook has a handler.

        Raises:
            ConfigurationError: one has none.
        """
        for webhook in self._by_path.values():
            if "*" not in topics and webhook.topic not in topics:
                raise ConfigurationError(
                    f"The webhook {webhook.path} brings topic {webhook.topic!r}, which no handler consumes: "
                    "register a handler for it, or name another topic=."
                )

    async def serve(self) -> None:
        """Serve until stopped; then accept nothing, finish what is at work, and return."""
        import uvicorn

        self._server = uvicorn.Server(
            uvicorn.Config(
                self._route,
                http=_protocol(),
                h11_max_incomplete_event_size=_HEAD_BYTES,
                interface="asgi3",
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=int(_HEAD_S),
            )
        )
        # stopped while this one began
        self._server.should_exit = self._stopped
        await self._server.serve([self._listener])
        for webhook in self._by_path.values():
            await webhook.ended()

    def stop(self) -> None:
        """From any thread; noticed within a tenth of a second."""
        self._stopped = True
        if self._server is not None:
            self._server.should_exit = True

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        webhook = self._by_path.get(scope["path"])
        if webhook is None:
            await answer(send, 404, "no webhook is here")
            return
        await webhook(scope, receive, send)


def _protocol() -> type[asyncio.Protocol]:
    """uvicorn's protocol, where strangers that send no request neither stay nor keep others out.

    It is h11's whatever else is installed: httptools bounds no head. Each head has 5 s, also the next
    one of a connection that is kept alive. One connection too many closes the oldest that waits; those
    whose requests are at work are bounded by their Webhook.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    waiting: dict[Protocol, asyncio.TimerHandle] = {}

    class Protocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(waiting) >= _WAITING_MAX:
                next(iter(waiting)).transport.abort()
            self._wait_for_head()

        def handle_events(self) -> None:
            super().handle_events()
            # None before the first request
            if not getattr(self.cycle, "response_complete", True):
                self._stop_waiting()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._wait_for_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _wait_for_head(self) -> None:
            self._stop_waiting()
            if not self.transport.is_closing():
                waiting[self] = self.loop.call_later(_HEAD_S, self.transport.abort)

        def _stop_waiting(self) -> None:
            if (timer := waiting.pop(self, None)) is not None:
                timer.cancel()

    return Protocol
