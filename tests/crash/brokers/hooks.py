"""Webhooks as the sweep sees them: an endpoint whose process is killed, and a sender that tries until 2xx."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import uvicorn

from tests.crash.brokers.feeds import Feed, Sent
from txbox import App
from txbox.brokers.base import Source
from txbox.brokers.webhook import Verified, Webhook
from txbox.message import Headers
from txbox.session import at

_SENDERS = 2
_PAUSE_S = 0.02
_TIMEOUT_S = 10.0


class WebhookFeed(Feed):
    """`url` is the folder of the job: what is to be sent stands in one file, what was answered 2xx in another."""

    @property
    def _spool(self) -> Path:
        return Path(self.url, "spool")

    @property
    def _answered(self) -> Path:
        return Path(self.url, "answered")

    def create(self) -> None:
        self._spool.touch()
        self._answered.touch()

    def publish(self, messages: Sequence[Sent]) -> None:
        lines = [json.dumps([message.id, message.payload.decode()]) + "\n" for message in messages]
        append(self._spool, "".join(lines))

    def source(self, member: int) -> Source:
        raise AssertionError("a webhook has no source: its endpoint is served")

    def left(self, workers: int = 0) -> int:
        return len(self._spool.read_bytes().splitlines()) - len(
            self._answered.read_bytes().splitlines()
        )

    def remove(self) -> None:
        """The folder goes with the job."""

    def send_for_ever(self, port: int) -> None:
        """Post what is spooled, each until it is answered 2xx; never returns."""
        waiting: SimpleQueue[tuple[str, str]] = SimpleQueue()
        for _ in range(_SENDERS):
            threading.Thread(target=self._send, args=(port, waiting), daemon=True).start()
        seen = 0
        while True:
            # only whole lines: the last may be on its way
            lines = self._spool.read_bytes().decode().split("\n")[:-1]
            for line in lines[seen:]:
                waiting.put(tuple(json.loads(line)))
            seen = len(lines)
            time.sleep(_PAUSE_S)

    def _send(self, port: int, waiting: SimpleQueue[tuple[str, str]]) -> None:
        while True:
            own_id, body = waiting.get()
            while not _accepted(port, own_id, body):
                time.sleep(_PAUSE_S)
            append(self._answered, f"{own_id}\n")


def _accepted(port: int, own_id: str, body: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    try:
        connection.request("POST", "/hook", body=body, headers={"X-Id": own_id})
        return 200 <= connection.getresponse().status < 300
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def append(path: Path, text: str) -> None:
    """Write lines that survive this process, whole."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def listening() -> socket.socket:
    """The endpoint's socket: it outlives the processes that accept from it, as under systemd."""
    return socket.create_server(("127.0.0.1", 0), backlog=64)


@contextmanager
def serving(
    app: App, topic: str, listener: socket.socket, wrong: str | None = None
) -> Iterator[None]:
    """Serve the endpoint in a thread; `wrong` as in `mutants.WRONG`."""
    verify = _known_by_nothing if wrong == "no_identity" else _known
    hook = Webhook(app.process_async, topic=topic, verify=verify)
    points = _Points(hook, early=wrong == "ack_first")
    server = uvicorn.Server(uvicorn.Config(points, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(_TIMEOUT_S)


def _known(headers: Headers, _: bytes) -> Verified:
    return Verified(id=headers.text("x-id"))


def _known_by_nothing(_: Headers, __: bytes) -> Verified:
    return Verified(id=secrets.token_hex(8))


class _Points:
    """Passes `received`, `before:ack` and `after:ack`, which a pump passes for the other brokers.

    Args:
        early: answer before the message is taken in, which is wrong.
    """

    def __init__(self, hook: Webhook, *, early: bool) -> None:
        self._hook = hook
        self._early = early

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def received() -> Any:
            event = await receive()
            if event["type"] == "http.request":
                at("received")
            return event

        async def answer(event: Any) -> None:
            if event["type"] == "http.response.start":
                at("before:ack")
            await send(event)
            if event["type"] == "http.response.body":
                at("after:ack")

        if not self._early:
            await self._hook(scope, received, answer)
            return
        event = await received()
        headers = [(b"content-length", b"0")]
        await answer({"type": "http.response.start", "status": 200, "headers": headers})
        await answer({"type": "http.response.body", "body": b""})

        async def again() -> Any:
            return event

        async def nowhere(_: Any) -> None:
            return

        await self._hook(scope, again, nowhere)
