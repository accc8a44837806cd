"""The webhooks of an app, served by uvicorn on the worker's asyncio loop."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from txbox.brokers.webhook import Receive, Scope, Send, Webhook, answer
from txbox.errors import ConfigurationError

if TYPE_CHECKING:
    import uvicorn

_CONNECTIONS = 512
_KEEP_ALIVE_S = 5


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
        for own in webhooks:
            if own.path in self._by_path:
                raise ConfigurationError(
                    f"Two webhooks have the path {own.path}: give one of them another path=."
                )
            self._by_path[own.path] = own
        self._server: uvicorn.Server | None = None
        self._stopped = False

    def check(self, topics: Collection[str]) -> None:
        """Check that every webhook has a handler.

        Raises:
            ConfigurationError: one has none.
        """
        for own in self._by_path.values():
            if "*" not in topics and own.topic not in topics:
                raise ConfigurationError(
                    f"The webhook {own.path} brings topic {own.topic!r}, which no handler consumes: "
                    "register a handler for it, or name another topic=."
                )

    async def serve(self) -> None:
        """Serve until stopped; then accept nothing, finish what is at work, and return."""
        import uvicorn

        self._server = uvicorn.Server(
            uvicorn.Config(
                self._route,
                interface="asgi3",
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=_CONNECTIONS,
                timeout_keep_alive=_KEEP_ALIVE_S,
            )
        )
        # stopped while this one began
        self._server.should_exit = self._stopped
        await self._server.serve([self._listener])
        for own in self._by_path.values():
            await own.ended()

    def stop(self) -> None:
        """From any thread; noticed within a tenth of a second."""
        self._stopped = True
        if self._server is not None:
            self._server.should_exit = True

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        own = self._by_path.get(scope["path"])
        if own is None:
            await answer(send, 404, "no webhook is here")
            return
        await own(scope, receive, send)
