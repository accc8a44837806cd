"""`/livez`, `/readyz` and `/metrics` on a port: of one worker, or of the workers that a parent supervises."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from txbox.observers.counters import render
from txbox.worker.health import Health

_HEAD_S = 1.0
_REQUEST_S = 5.0
_REQUEST_BYTES = 8192
_CONNECTIONS = 32
_CHILD_S = 2.0
_REASONS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: str
    content_type: str = "application/json"


Routes = Mapping[str, Callable[[], Awaitable[Answer]]]


class HealthServer:
    """Answers GET requests from a thread with an asyncio loop of its own: no lane waits for it, nor it for them.

    Args:
        listener: bound and listening; closed with the server.

    Guarantee: a request has 1 s to arrive and 5 s to be answered, and 32 connections are open at once.
    One more closes the oldest of those that have not sent their request, so that idle ones never
    starve a probe; when all 32 are being answered, it is closed itself.
    """

    def __init__(self, listener: socket.socket, routes: Routes) -> None:
        self._listener = listener
        self._routes = routes
        self._loop = asyncio.new_event_loop()
        #: The open connections, oldest first; False until the request's head has come.
        self._connections: dict[asyncio.StreamWriter, bool] = {}
        self._thread = threading.Thread(target=self._run, name="txbox-health", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop answering; returns when the thread has ended."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_REQUEST_S)

    def _run(self) -> None:
        loop = self._loop
        server = loop.run_until_complete(
            asyncio.start_server(self._connected, sock=self._listener, limit=_REQUEST_BYTES)
        )
        try:
            loop.run_forever()
        finally:
            server.close()
            running = asyncio.all_tasks(loop)
            for task in running:
                task.cancel()
            if running:
                loop.run_until_complete(asyncio.wait(running))
            loop.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._makes_room():
            writer.close()
            return
        self._connections[writer] = False
        try:
            async with asyncio.timeout(_HEAD_S):
                head = await reader.readuntil(b"\r\n\r\n")
            self._connections[writer] = True
            async with asyncio.timeout(_REQUEST_S):
                writer.write(_response(head, await self._answer(head)))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            # whoever it was gave up, or sends no request
            pass
        except asyncio.CancelledError:
            # the server ends, and this task with it: asyncio would log a cancelled one as a failure
            pass
        finally:
            self._connections.pop(writer, None)
            writer.close()

    def _makes_room(self) -> bool:
        """Close the oldest connection without a request when no more may be open; False if there is none."""
        if len(self._connections) < _CONNECTIONS:
            return True
        idle = next((writer for writer, asked in self._connections.items() if not asked), None)
        if idle is None:
            return False
        del self._connections[idle]
        idle.transport.abort()
        return True

    async def _answer(self, head: bytes) -> Answer:
        method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        route = self._routes.get(path)
        if route is None:
            return Answer(404, json.dumps({"paths": list(self._routes)}))
        if method not in ("GET", "HEAD"):
            return Answer(405, json.dumps({"methods": ["GET", "HEAD"]}))
        return await route()


def _response(head: bytes, answer: Answer) -> bytes:
    body = answer.body.encode()
    lines = (
        f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}",
        f"Content-Type: {answer.content_type}",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        "Connection: close",
    )
    written = "\r\n".join(lines).encode() + b"\r\n\r\n"
    return written if head.startswith(b"HEAD ") else written + body


def routes_of(health: Health) -> Routes:
    """The paths of one worker."""

    async def livez() -> Answer:
        return _state("alive", health.stuck())

    async def readyz() -> Answer:
        return _state("ready", health.unready())

    async def metrics() -> Answer:
        return Answer(200, render(health.metrics()), _PROMETHEUS)

    return {"/livez": livez, "/readyz": readyz, "/metrics": metrics}


def _state(name: str, why_not: Sequence[str]) -> Answer:
    return Answer(
        503 if why_not else 200, json.dumps({name: not why_not, "because": list(why_not)}) + "\n"
    )


# -- several processes ----------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Child:
    """What the parent knows of a worker process: where it answers, and whether it runs and ever did."""

    number: int
    port: int
    running: bool = False
    answered: bool = False


class Children:
    """The paths of a parent: it asks every worker process on loopback, and answers for all of them.

    Alive: every process that runs is alive; one that has died is started again and one that starts
    has not answered yet, neither is judged. Ready: all of them are. Metrics: the label `process`.
    """

    def __init__(self, children: Sequence[Child]) -> None:
        self._children = children

    def routes(self) -> Routes:
        return {"/livez": self._livez, "/readyz": self._readyz, "/metrics": self._metrics}

    async def _livez(self) -> Answer:
        why: list[str] = []
        for child, answer in await self._asked("/livez"):
            if answer is not None:
                why += _because(child, answer)
            elif child.running and child.answered:
                why.append(f"process {child.number}: no answer within {_CHILD_S:g} s")
        return _state("alive", why)

    async def _readyz(self) -> Answer:
        why: list[str] = []
        for child, answer in await self._asked("/readyz"):
            if answer is not None:
                why += _because(child, answer)
            else:
                state = "no answer" if child.running else "not running"
                why.append(f"process {child.number}: {state}")
        return _state("ready", why)

    async def _metrics(self) -> Answer:
        families: dict[str, list[str]] = {}
        for child, answer in await self._asked("/metrics"):
            family: list[str] = []
            for line in "" if answer is None else answer.splitlines():
                if line.startswith("# TYPE "):
                    family = families.setdefault(line, [])
                elif not line.startswith("#"):
                    family.append(_labelled(line, child.number))
        lines = [line for kind, samples in families.items() for line in (kind, *samples)]
        up = [
            f'txbox_process_up{{process="{child.number}"}} {int(child.running)}'
            for child in self._children
        ]
        lines += ["# TYPE txbox_process_up gauge", *up]
        return Answer(200, "\n".join(lines) + "\n", _PROMETHEUS)

    async def _asked(self, path: str) -> list[tuple[Child, str | None]]:
        answers = await asyncio.gather(*(_ask(child, path) for child in self._children))
        return list(zip(self._children, answers, strict=True))


async def _ask(child: Child, path: str) -> str | None:
    """The body of a child's answer; None when it does not run or did not answer."""
    if not child.running:
        return None
    try:
        async with asyncio.timeout(_CHILD_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", child.port)
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                answer = await reader.read()
            finally:
                writer.close()
    except (TimeoutError, OSError):
        return None
    _, found, body = answer.partition(b"\r\n\r\n")
    if not found:
        return None
    child.answered = True
    return body.decode()


def _because(child: Child, answer: str) -> list[str]:
    return [f"process {child.number}: {why}" for why in json.loads(answer)["because"]]


def _labelled(sample: str, number: int) -> str:
    # the value is the last word; a label may hold blanks and braces
    series, _, value = sample.rpartition(" ")
    label = f'process="{number}"'
    if series.endswith("}"):
        return f"{series[:-1]},{label}}} {value}"
    return f"{series}{{{label}}} {value}"
