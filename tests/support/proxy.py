"""A TCP proxy that loses the answer to a COMMIT, or the COMMIT itself, or hangs: nothing passes, nothing ends."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Literal, Self
from urllib.parse import urlsplit

from tests.support.waiting import DEADLINE_S

# not the isolation level of that name
_COMMIT = re.compile(rb"COMMIT(?!TED)")
Cut = Literal["before", "after"]


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """A port that refuses connections: it is held, so that nobody else can listen on it meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


class Proxy:
    """`with Proxy(url) as proxy`: connect to `proxy.url`; `proxy.cut = "after"` cuts the next COMMIT's connection.

    "before": the COMMIT never reaches the server. "after": the server has answered it, the client
    never hears. Each cut is one; afterwards everything passes again. `hang()` is a server that accepts
    connections and says nothing, until `go_on()`; `refuse()` ends all connections, and takes no new ones. `lose()` is a
    network that drops what the connections made so far send, without an end; new ones pass. `delay_s` is what
    each piece of data waits, either way; `lead_to` is for connections that follow. `trips` counts how often clients
    have sent something after an answer.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._mysql = parts.scheme == "mysql"
        self._server = (parts.hostname or "127.0.0.1", parts.port or 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        host = f"127.0.0.1:{self._listener.getsockname()[1]}"
        user = parts.netloc.rpartition("@")[0]
        self.url = parts._replace(netloc=f"{user}@{host}" if user else host).geturl()
        self.cut: Cut | None = None
        self.cuts = 0
        self.delay_s = 0.0
        self.trips = 0
        self._answered = True
        self._refusing = False
        self._lost: set[socket.socket] = set()
        # a connection is either made before all of them end, or it is refused
        self._lock = threading.Lock()
        #: Set once a client waits for an answer that does not come.
        self.hung = threading.Event()
        self._flows = threading.Event()
        self._flows.set()
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
        self._flows.set()
        for each in self._sockets:
            _end(each)
        for thread in self._threads:
            thread.join(DEADLINE_S)

    def hang(self) -> None:
        self._flows.clear()

    def refuse(self) -> None:
        with self._lock:
            self._refusing = True
            made = self._sockets[1:]
        for each in made:
            _end(each)

    def lose(self) -> None:
        with self._lock:
            self._lost.update(self._sockets)

    def go_on(self) -> None:
        self._refusing = False
        self._flows.set()

    def lead_to(self, url: str) -> None:
        parts = urlsplit(url)
        self._server = (parts.hostname or "127.0.0.1", parts.port or 0)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if self._refusing:
                    client.close()
                    continue
                try:
                    server = self._reach()
                except OSError:  # its server is away
                    client.close()
                    continue
                self._sockets = [peer for peer in self._sockets if peer.fileno() >= 0]
                self._sockets += [client, server]
            # set while the connection is about to be cut: the answer is read, and dropped
            deaf = threading.Event()
            for run, args in (
                (self._to_server, (client, server, deaf)),
                (self._to_client, (server, client, deaf)),
            ):
                thread = threading.Thread(target=run, args=args)
                self._threads.append(thread)
                thread.start()

    def answer(self, data: bytes) -> bytes:
        """What a client gets instead of these bytes; the connection ends behind others."""
        return data

    def _reach(self) -> socket.socket:
        """A connection to the server."""
        return socket.create_connection(self._server)

    def _to_server(
        self, client: socket.socket, server: socket.socket, deaf: threading.Event
    ) -> None:
        while data := _read(client):
            if client in self._lost:
                continue
            if self._answered:
                self._answered, self.trips = False, self.trips + 1
            cut = self.cut if _COMMIT.search(data) else None
            if cut is not None:
                self.cut, self.cuts = None, self.cuts + 1
                if cut == "before":
                    break
                deaf.set()
            if not self._flows.is_set():
                self.hung.set()
            self._flows.wait()
            if self.delay_s:
                time.sleep(self.delay_s)
            if not _write(server, data):
                break
        if not deaf.is_set():
            _end(server)
            _end(client)

    def _to_client(
        self, server: socket.socket, client: socket.socket, deaf: threading.Event
    ) -> None:
        greeted = not self._mysql
        while data := _read(server):
            if not greeted:
                data, greeted = _without_tls(data), True
            self._flows.wait()
            if self.delay_s:
                time.sleep(self.delay_s)
            if client in self._lost:
                continue
            self._answered = True
            answer = self.answer(data)
            if deaf.is_set() or not _write(client, answer) or answer is not data:
                break
        _end(server)
        _end(client)


def _without_tls(greeting: bytes) -> bytes:
    """MySQL's first packet without its offer to encrypt, which PyMySQL takes: no COMMIT could be seen."""
    if greeting[4:5] != b"\x0a":  # an error: too many connections
        return greeting
    flags = greeting.index(0, 5) + 14  # after the version: thread id, salt and a filler
    return greeting[: flags + 1] + bytes([greeting[flags + 1] & ~0x08]) + greeting[flags + 2 :]


def _read(peer: socket.socket) -> bytes:
    try:
        return peer.recv(65536)
    except OSError:
        return b""


def _write(peer: socket.socket, data: bytes) -> bool:
    try:
        peer.sendall(data)
    except OSError:
        return False
    return True


def _end(peer: socket.socket) -> None:
    with contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)
    peer.close()
