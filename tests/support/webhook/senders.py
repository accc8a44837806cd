"""An endpoint on loopback, and requests signed as their senders sign them."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.support.waiting import DEADLINE_S, eventually

SECRET = "s3cret-of-a-shop"
STANDARD_SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef01234567").decode()
Headers = Mapping[str, str | bytes]


@dataclass(frozen=True)
class Answer:
    status: int
    text: str
    headers: dict[str, str]


class Endpoint:
    def __init__(self, port: int) -> None:
        self.port = port

    def post(
        self, headers: Headers, body: bytes, method: str = "POST", path: str = "/hook"
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            connection.request(method, path, body=body, headers=dict(headers))
            response = connection.getresponse()
            text = response.read().decode().strip()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, text, found)
        finally:
            connection.close()


@contextmanager
def serving(application: Any) -> Iterator[Endpoint]:
    """Serve an ASGI application with uvicorn in a thread."""
    import uvicorn

    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(application, log_level="critical"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        eventually(lambda: server.started or not thread.is_alive(), "the start", pause_s=0.005)
        assert server.started
        yield Endpoint(listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(DEADLINE_S)
        listener.close()
        assert not thread.is_alive()


def _mac(secret: bytes, content: bytes) -> Any:
    return hmac.new(secret, content, hashlib.sha256)


def github(delivery: str, body: bytes, event: str = "push", secret: str = SECRET) -> dict[str, str]:
    return {
        "Content-Type": "application/json",
        "X-GitHub-Delivery": delivery,
        "X-GitHub-Event": event,
        "X-Hub-Signature-256": "sha256=" + _mac(secret.encode(), body).hexdigest(),
    }


def stripe(body: bytes, *, age_s: int = 0, secret: str = SECRET) -> dict[str, str]:
    moment = str(int(time.time()) - age_s)
    signature = _mac(secret.encode(), moment.encode() + b"." + body).hexdigest()
    return {"Stripe-Signature": f"t={moment},v0=ignored,v1={'0' * 64},v1={signature}"}


def standard(
    own_id: str, body: bytes, *, age_s: int = 0, secret: str = STANDARD_SECRET
) -> dict[str, str]:
    moment = str(int(time.time()) - age_s)
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signature = base64.b64encode(_mac(key, f"{own_id}.{moment}.".encode() + body).digest())
    return {
        "webhook-id": own_id,
        "webhook-timestamp": moment,
        "webhook-signature": f"v1a,ignored v1,{signature.decode()}",
    }
