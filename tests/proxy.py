"""A TCP proxy that loses the answer to a COMMIT, or the COMMIT itself: the two look the same to a client."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from types import TracebackType
from typing import Literal, Self
from urllib.parse import urlsplit

# not the isolation level of that name
_COMMIT = re.compile(rb"COMMIT(?!TED)")
Cut = Literal["before", "after"]


class Proxy:
    """`with Proxy(url) as proxy`: connect to `proxy.url`; `proxy.cut = "after"` cuts the next COMMIT's connection.

    "before": the COMMIT never reaches the server. "after": the server has answered it, the client
    never hears. Each cut is one; afterwards everything passes again.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._server = (parts.hostname or "127.0.0.1", parts.port or 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        host = f"127.0.0.1:{self._listener.getsockname()[1]}"
        user = parts.netloc.rpartition("@")[0]
        self.url = parts._replace(netloc=f"{user}@{host}" if user else host).geturl()
        self.cut: Cut | None = None
        self.cuts = 0
        self._sockets: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for own in self._sockets:
            _end(own)
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._server)
            self._sockets += [client, server]
            # set while the connection is about to be cut: the answer is read, and dropped
            deaf = threading.Event()
            for run, args in (
                (self._to_server, (client, server, deaf)),
                (_to_client, (server, client, deaf)),
            ):
                thread = threading.Thread(target=run, args=args)
                self._threads.append(thread)
                thread.start()

    def _to_server(
        self, client: socket.socket, server: socket.socket, deaf: threading.Event
    ) -> None:
        while data := _read(client):
            cut = self.cut if _COMMIT.search(data) else None
            if cut is not None:
                self.cut, self.cuts = None, self.cuts + 1
                if cut == "before":
                    break
                deaf.set()
            if not _write(server, data):
                break
        if not deaf.is_set():
            _end(server)
            _end(client)


def _to_client(server: socket.socket, client: socket.socket, deaf: threading.Event) -> None:
    while data := _read(server):
        if deaf.is_set() or not _write(client, data):
            break
    _end(server)
    _end(client)


def _read(own: socket.socket) -> bytes:
    try:
        return own.recv(65536)
    except OSError:
        return b""


def _write(own: socket.socket, data: bytes) -> bool:
    try:
        own.sendall(data)
    except OSError:
        return False
    return True


def _end(own: socket.socket) -> None:
    with contextlib.suppress(OSError):
        own.shutdown(socket.SHUT_RDWR)
    own.close()
