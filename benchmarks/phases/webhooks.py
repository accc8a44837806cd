"""P23: a signed webhook over a connection that is kept alive."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import uvicorn

from benchmarks.contender import inbox_off_by
from benchmarks.phases.latency import Turns
from benchmarks.result import Bar, Round, ratios
from benchmarks.setting import Setting
from benchmarks.workload import CONSUMER, TOPIC, Delivery, writes
from txbox.app import App
from txbox.brokers.webhook import StandardWebhooks, Webhook
from txbox.worker.serving import WEBHOOKS, Routes, Server

_KEY = b"benchmark" * 4
_TURN = 100


@contextmanager
def _by_txbox(routes: Routes) -> Generator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(routes, listener, WEBHOOKS)
    server.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.close()


@contextmanager
def by_uvicorn(routes: Any) -> Generator[int]:
    # with a socket of its own, for which asyncio sets TCP_NODELAY
    config = uvicorn.Config(
        routes, port=0, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=60
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            thread.join(0.01)
            assert thread.is_alive(), "uvicorn has not started"
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


_SERVED: dict[str, Callable[[Routes], Any]] = {"txbox run": _by_txbox, "uvicorn": by_uvicorn}


def _posting(connection: http.client.HTTPConnection, path: str) -> Callable[[Delivery], object]:
    def post(delivery: Delivery) -> None:
        moment = str(int(time.time()))
        signed = f"{delivery.id}.{moment}.".encode() + delivery.payload
        signature = base64.b64encode(hmac.new(_KEY, signed, hashlib.sha256).digest()).decode()
        headers = {
            "content-type": "application/json", "webhook-id": delivery.id, "webhook-timestamp": moment,
            "webhook-signature": f"v1,{signature}",
        }  # fmt: skip
        connection.request("POST", path, delivery.payload, headers)
        response = connection.getresponse()
        response.read()
        assert response.status == 200, response.status
        assert connection.sock is not None, "it was not kept alive"

    return post


def _one_round(on: Setting, name: str, seed: int) -> Round:
    work = on.work()(seed)
    with ExitStack() as stack:
        app = stack.enter_context(App(on.place.url))
        app.handler(TOPIC, consumer=CONSUMER)(writes)
        app.init()
        on.place.prepare()
        hook = Webhook(app.process_async, topic=TOPIC, verify=StandardWebhooks(_KEY))
        port = stack.enter_context(_SERVED[name](Routes({hook.path: hook})))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        stack.enter_context(closing(connection))
        post = _posting(connection, hook.path)
        turns = Turns(name, on.place, inbox_off_by, post)
        for start in range(0, len(work.deliveries), _TURN):
            turns.turn(work.deliveries[start : start + _TURN], on.gauges.read)
        return turns.round(work)


def p23(on: Setting) -> dict[str, Any]:
    rounds: list[Round] = []
    for number in range(on.rounds):
        # who goes first alternates
        for name in list(_SERVED)[:: -1 if number % 2 else 1]:
            on.report(f"{name}, round {number + 1} of {on.rounds}")
            rounds.append(_one_round(on, name, number + 1))
    return on.result(
        "P23",
        "A signed webhook over a kept-alive connection",
        "one client that signs, sends and waits for the answer before it sends the next, in the server's process; the "
        "port of `txbox run --http-port` beside the same application under uvicorn as it comes",
        [
            Bar(
                "txbox run: p50 at most 1.2 times uvicorn's",
                1.2,
                ratios(rounds, "txbox run", "uvicorn", "p50_ms"),
                "at most",
            )
        ],
        sorted(rounds, key=lambda run: run.contender),
    )
