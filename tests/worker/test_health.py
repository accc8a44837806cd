"""/livez, /readyz and /metrics: in each state of a worker, and of several."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tests.support.databases import Raw
from tests.support.proxy import Proxy
from tests.support.shop import CONSUMER, TOPIC, Shop, create_effects, opened, paid
from tests.support.sources import Memory, event_line, write_events
from tests.support.waiting import DEADLINE_S, eventually, room
from tests.support.webhook.running import TxboxRun
from tests.support.webhook.senders import Answer, github
from tests.support.workers import running, worker
from txbox import App, Limits, Message
from txbox.brokers.base import Consumer, Context, Delivery
from txbox.brokers.webhook import Receive, Scope, Send, answer
from txbox.errors import BrokerUnavailable, ConfigurationError
from txbox.events import (
    ConsumptionPaused,
    ConsumptionResumed,
    Event,
    MessageDuplicate,
    SettleFailed,
    TransactionCommitted,
)
from txbox.observers.counters import Counters
from txbox.worker.health import Answers, Health
from txbox.worker.serving import PROBES, Bounds, Routes, Server, probes, probes_of
from txbox.worker.supervisor import Child

HEALTH = ("--health-port", "0")


@pytest.fixture
def lite(sqlite_url: str, raw: Callable[[str], Raw]) -> Raw:
    view = raw(sqlite_url)
    create_effects(view)
    return view


# -- a real process -------------------------------------------------------------------------------


def test_the_life_of_a_worker(sqlite_url: str, lite: Raw, tmp_path: Path) -> None:
    orders = tmp_path / "orders.jsonl"
    write_events(orders, range(3))
    with TxboxRun(tmp_path, *HEALTH, url=sqlite_url, file=str(orders), webhooks=False) as run:
        run.ready()
        assert run.because("/livez") == []
        name = f'consumer="{CONSUMER}",outcome="processed"'
        eventually(lambda: run.metrics().get(f"txbox_messages_total{{{name}}}") == 3)
        with orders.open("a") as file:
            file.write(event_line("held", type="hold") + event_line("last"))
        run.handling("test held")
        eventually(lambda: _in_flight(run.metrics()) == 2)
        run.process.terminate()
        # the handler still runs, and may
        eventually(lambda: run.because("/readyz") == ["draining"])
        assert run.because("/livez") == []
        run.open_the_gate()
        assert run.ended() == 0


def _in_flight(metrics: dict[str, float]) -> float:
    return sum(metric for name, metric in metrics.items() if name.startswith("txbox_in_flight"))


@pytest.mark.parametrize("verb", ["relay", "maintain"])
def test_a_relay_and_maintenance_live_like_a_worker(
    verb: str, sqlite_url: str, lite: Raw, tmp_path: Path
) -> None:
    at_work = "SELECT kind, state FROM txbox_worker"
    with TxboxRun(tmp_path, *HEALTH, verb=verb, url=sqlite_url, webhooks=False) as run:
        run.ready()
        assert run.because("/livez") == []
        assert run.metrics()["txbox_ready"] == 1
        eventually(lambda: lite.rows(at_work) == [(verb, "running")])
        run.process.terminate()
        assert run.ended() == 0
    assert lite.rows(at_work) == []


def test_counters_say_what_happened(sqlite_url: str, lite: Raw, tmp_path: Path) -> None:
    with TxboxRun(tmp_path, *HEALTH, "--http-port", "0", url=sqlite_url) as run:
        hook = run.ready().hook
        for own_id, event in (("a", "push"), ("a", "push"), ("b", "push"), ("c", "bad")):
            assert hook.post(github(own_id, b"{}", event), b"{}").status == 200
        # the same id with another body
        assert hook.post(github("a", b"[]"), b"[]").text == "quarantined"
        assert hook.post({}, b"").status == 401
        metrics = run.metrics()
        of = {
            outcome: metrics.get(
                f'txbox_messages_total{{consumer="{CONSUMER}",outcome="{outcome}"}}'
            )
            for outcome in ("processed", "duplicate", "dead", "quarantined", "failed")
        }
        assert of == {
            "processed": 2, "duplicate": 1, "dead": 1, "quarantined": 1, "failed": None,
        }  # fmt: skip
        assert metrics['txbox_webhook_answers_total{path="/hook",status="200"}'] == 5
        assert metrics['txbox_webhook_answers_total{path="/hook",status="401"}'] == 1
        assert metrics['txbox_webhook_in_flight{path="/hook"}'] == 0
        assert metrics["txbox_ready"] == 1
        assert metrics[f'txbox_rows_leased{{consumer="{CONSUMER}"}}'] == 0


def test_the_paths_and_no_others(sqlite_url: str, lite: Raw, tmp_path: Path) -> None:
    with TxboxRun(tmp_path, *HEALTH, url=sqlite_url, webhooks=False) as run:
        run.ready()
        assert run.get("/").status == 404
        assert run.get("/livez?verbose=1").status == 200
        assert run.get("/livez", "POST").status == 405
        head = run.get("/readyz", "HEAD")
        assert (head.status, head.text) == (200, "")
        assert run.get("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")


def test_several_processes_answer_as_one(
    postgresql_url: str, raw: Callable[[str], Raw], tmp_path: Path
) -> None:
    view = raw(postgresql_url)
    create_effects(view)
    orders = tmp_path / "orders.jsonl"
    write_events(orders, range(20))
    words = (*HEALTH, "--processes", "2")
    with TxboxRun(tmp_path, *words, url=postgresql_url, file=str(orders), webhooks=False) as run:
        assert run.because("/livez") == []
        run.ready()
        name = f'consumer="{CONSUMER}",outcome="processed"'

        def processed() -> float:
            metrics = run.metrics()
            return sum(
                metrics.get(f'txbox_messages_total{{{name},process="{number}"}}', 0)
                for number in (1, 2)
            )

        eventually(lambda: processed() == 20)
        # one is stopped as a debugger would: it answers nothing
        pid = _child_of(run.process.pid)
        os.kill(pid, signal.SIGSTOP)
        try:
            # a signal takes its time to arrive
            (why,) = eventually(lambda: run.because("/livez"))
            assert re.fullmatch(r"process [12]: no answer within 2 s", why)
            assert run.because("/readyz") != []
        finally:
            os.kill(pid, signal.SIGKILL)
        # one that died is started again, and does not make the others lifeless
        run.says("started again")
        assert run.because("/livez") == []
        run.ready()
        run.process.terminate()
        assert run.ended() == 0


def _child_of(parent: int) -> int:
    children = Path(f"/proc/{parent}/task/{parent}/children")
    if not children.exists():
        pytest.skip("this kernel does not list child processes")
    return int(children.read_text().split()[0])


# -- inside ---------------------------------------------------------------------------------------


class Slow(Memory):
    """A source that opens when it is told to, and can be away."""

    def __init__(self, messages: Sequence[Message[Any] | Delivery] = ()) -> None:
        super().__init__(messages, endless=True)
        self.may_open = threading.Event()
        self.is_away = False

    def consumer(self, topics: Sequence[str], context: Context) -> Consumer:
        assert self.may_open.wait(DEADLINE_S)
        return super().consumer(topics, context)

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        if self.is_away:
            raise BrokerUnavailable("nobody is there")
        return super().receive(messages_max, wait_s)


@pytest.fixture
def shop(sqlite_url: str) -> Iterator[Shop]:
    with opened(sqlite_url) as other_shop:
        yield other_shop


def test_sources_that_open_late_or_go_away(shop: Shop) -> None:
    source, health, counters = Slow(), Health(), Counters()
    shop.handler()
    shop.app.consume(source)
    shop.app.events.observers += [health, counters]
    with running(worker(shop.app, health=health)):
        eventually(lambda: health.unready() == ["memory is not open yet"])
        assert health.stuck() == []
        source.may_open.set()
        eventually(lambda: health.unready() == [])
        source.is_away = True
        eventually(lambda: health.unready() == ["memory does not answer"])
        assert health.stuck() == []
        eventually(lambda: (_value(counters, "pauses", source="memory") or 0) >= 1)
        assert _value(counters, "pauses", source="") is None
        source.is_away = False
        eventually(lambda: health.unready() == [])
        assert (_value(counters, "paused_seconds", source="memory") or 0) > 0
    assert health.unready() == ["draining"]
    assert health.stuck() == []


def test_a_source_that_is_refused(shop: Shop) -> None:
    nameless: list[Message[Any] | Delivery] = [
        Message(topic=TOPIC, payload=b"{}") for _ in range(100)
    ]
    source, health, counters = Memory(nameless, endless=True), Health(), Counters()
    shop.handler()
    shop.app.consume(source)
    shop.app.events.observers += [health, counters]
    with running(worker(shop.app, health=health)):
        why = ["memory is paused: its messages have no ids"]
        eventually(lambda: health.unready() == why)
        assert health.stuck() == []
        # the counters hear of it behind `health`
        eventually(lambda: _value(counters, "sources_refused", source="memory") == 1)


def test_the_database_is_away_until_it_says_otherwise() -> None:
    health = _consuming(Health())
    assert health.unready() == []
    health(ConsumptionPaused(reason="no connection", retry_in_s=0.1))
    assert health.unready() == ["the database does not answer"]
    health(ConsumptionPaused(reason="no connection", retry_in_s=0.1, source="kafka"))
    health(ConsumptionResumed(paused_s=1, source="kafka"))
    assert health.unready() == ["the database does not answer"]
    health(ConsumptionResumed(paused_s=1))
    assert health.unready() == []
    # nobody asks any more, so nobody can say that it is back
    health(ConsumptionPaused(reason="no connection", retry_in_s=-60))
    assert health.unready() == []
    assert health.stuck() == []


@pytest.mark.every_database
@pytest.mark.parametrize("driver", ["", "+asyncpg"])
def test_a_database_that_answers_nothing_with_its_connections_open(
    database_url: str, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not database_url.startswith("postgresql" if driver else ("postgresql", "mysql")):
        pytest.skip("no such connections")
    # the same condition, which takes a claim that waits for a lock into account
    monkeypatch.setattr("txbox.worker.health.UNANSWERED_S", 0.5)
    monkeypatch.setattr("txbox.worker.health._BEHIND_LOCK_S", 0.0)
    events: list[Event] = []
    health = Health()
    with Proxy(database_url) as proxy:
        url = proxy.url.replace("://", f"{driver}://", 1)
        limits = Limits(lock_timeout=timedelta(milliseconds=100))
        with App(url, observers=[events.append, health], limits=limits) as app:

            async def handle_async(message: Message[Any], tx: Any) -> None: ...

            def handle(message: Message[Any], tx: Any) -> None: ...

            app.handler(TOPIC, consumer=CONSUMER)(handle_async if driver else handle)
            with running(worker(app, health=health)):
                eventually(lambda: health.unready() == [])
                proxy.hang()
                eventually(lambda: health.unready() == ["the database does not answer"])
                eventually(lambda: [*_pauses(events)])
                assert health.stuck() == []
                proxy.go_on()
                eventually(lambda: health.unready() == [])
                eventually(
                    lambda: [each for each in events if isinstance(each, ConsumptionResumed)]
                )
    (paused,) = _pauses(events)
    assert "has left a statement without an answer for 0.5 s" in paused.reason


def _pauses(events: Sequence[Event]) -> list[ConsumptionPaused]:
    return [event for event in events if isinstance(event, ConsumptionPaused)]


def test_a_statement_that_waits_for_a_lock_is_no_silence(sqlite_url: str) -> None:
    with App(sqlite_url, limits=Limits(lock_timeout=timedelta(seconds=60))) as app:
        connections = app.database.sync
        assert connections is not None
        answers = Answers(app)
        now = time.monotonic()
        connections.waits["a claim"] = now - 62
        assert not answers.missing()
        connections.waits["a COMMIT"] = now - 66
        assert answers.missing()
        connections.waits.clear()
        assert not answers.missing()


def test_a_main_thread_that_stands_still() -> None:
    health = _consuming(Health(stuck_s=0.05))
    assert health.stuck() == []
    eventually(health.stuck)
    assert re.fullmatch(r"the main thread has been stuck for \d+ s", health.stuck()[0])
    assert health.unready() == health.stuck()
    with health.asking_the_database():
        # where it may stay for as long as the database is away
        assert health.stuck() == []
    assert health.stuck() == []
    eventually(health.stuck)
    health.closing()
    assert health.stuck() == []


def test_a_blocked_asyncio_loop_is_not_alive(sqlite_url: str) -> None:
    health = Health(stuck_s=0.2)
    entered, go = threading.Event(), threading.Event()
    with App(sqlite_url, observers=[health]) as app:

        @app.handler(TOPIC, consumer=CONSUMER)
        async def block(message: Message[Any], tx: Any) -> None:
            entered.set()
            # what nobody should do in a coroutine
            assert go.wait(DEADLINE_S)

        source = Memory([paid("m1")], endless=True)
        app.consume(source)
        with running(worker(app, health=health)):
            eventually(lambda: health.unready() == [])
            assert entered.wait(DEADLINE_S)
            eventually(lambda: any("asyncio loop" in why for why in health.stuck()))
            go.set()
            eventually(lambda: health.stuck() == [])
            eventually(lambda: source.settled)


def test_a_dead_thread_is_not_alive(shop: Shop) -> None:
    class Broken(Memory):
        def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
            raise ConfigurationError("a broker that refuses it")

    health = Health()
    shop.handler()
    shop.app.consume(Broken([], endless=True))
    with running(worker(shop.app, health=health)) as codes:
        eventually(lambda: codes == [2])
    assert health.stuck() == ["the worker ends after ConfigurationError"]


def _consuming(health: Health) -> Health:
    health.consuming([], None)
    return health


def _value(counters: Counters, name: str, **labels: str) -> float | None:
    registry = CollectorRegistry()
    registry.register(counters)
    return registry.get_sample_value(f"txbox_{name}_total", labels)


# -- the server -----------------------------------------------------------------------------------


@contextmanager
def serving(routes: Routes, bounds: Bounds = PROBES) -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(routes, listener, bounds)
    port = listener.getsockname()[1]
    server.start()
    try:
        yield port
    finally:
        server.close()
        assert not server._thread.is_alive()


def _worker_probes() -> Routes:
    return probes(_consuming(Health()), Counters())


LIVEZ = b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"


def _ask(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as peer:
        peer.sendall(request)
        return _rest(peer)


def _rest(connection: socket.socket) -> bytes:
    read = bytearray()
    # a server that closes without having read everything resets the connection
    with contextlib.suppress(ConnectionResetError):
        while more := connection.recv(65536):
            read += more
    return bytes(read)


def _get(port: int, path: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    with contextlib.closing(connection):
        connection.request("GET", path)
        response = connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, response.read().decode(), headers)


def test_hostile_requests_do_not_stop_the_answers() -> None:
    with serving(_worker_probes()) as port:
        for request in (
            b"x" * 20_000, b"\x16\x03\x01\r\n\r\n", b"GET /livez HTTP/1.1\r\nX: " + b"x" * 20_000,
        ):  # fmt: skip
            # the reason, or a reset in its place
            assert _ask(port, request)[:12] in (b"HTTP/1.1 400", b"")
        # what comes behind a request is never read
        body = b"POST /readyz HTTP/1.1\r\nHost: a\r\nContent-Length: 999999999\r\n\r\nx"
        assert _ask(port, body).startswith(b"HTTP/1.1 405")
        assert _ask(port, LIVEZ).startswith(b"HTTP/1.1 200")


def test_server_does_not_say_what_it_is() -> None:
    with serving(_worker_probes()) as port:
        headers = _get(port, "/readyz").headers
    assert "server" not in headers
    assert (headers["cache-control"], headers["connection"]) == ("no-store", "close")


@pytest.mark.parametrize("sent", [b"", b"GET /livez HTTP/1.1\r\nX-Slow: "])
def test_connections_without_a_request_never_starve_a_probe(sent: bytes) -> None:
    with serving(_worker_probes()) as port, contextlib.ExitStack() as connections:
        for _ in range(10):
            for _ in range(40):  # more than are open at once
                idle = socket.create_connection(("127.0.0.1", port))
                connections.enter_context(idle)
                idle.sendall(sent)
            assert _ask(port, LIVEZ).startswith(b"HTTP/1.1 200")


def test_connection_without_a_request_is_closed_after_a_second() -> None:
    with serving(_worker_probes()) as port:
        began = time.monotonic()
        assert _ask(port, b"GET /livez HTTP/1.1\r\n") == b""
        assert 0.9 < time.monotonic() - began < 1 + room(2)


_LONG = b"x" * (8 * 1024 * 1024)  # more than the buffers of these sockets hold


async def _long(scope: Scope, receive: Receive, send: Send) -> None:
    await answer(send, 200, _LONG, [(b"connection", b"close")])


def _deaf(port: int) -> socket.socket:
    """A client that has asked for more than it reads."""
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.settimeout(DEADLINE_S)
    deaf.connect(("127.0.0.1", port))
    deaf.sendall(LIVEZ.replace(b"livez", b"long"))
    return deaf


def test_answers_that_nobody_reads_starve_no_probe_and_hold_no_stop() -> None:
    livez = _worker_probes()
    with contextlib.ExitStack() as connections:
        # a busy machine may send the head of a request late, and that is another matter
        with serving(Routes({"/long": _long, "/livez": livez}), replace(PROBES, head_s=60)) as port:
            for _ in range(70):  # more than are open at once
                connections.enter_context(_deaf(port))
            assert _ask(port, LIVEZ).startswith(b"HTTP/1.1 200")
            began = time.monotonic()
        assert time.monotonic() - began < room(3)


def test_who_has_sent_no_request_yet_outlasts_those_that_do_not_read() -> None:
    # the probe says nothing for as long as a busy machine takes to answer forty others
    patient = replace(PROBES, head_s=int(DEADLINE_S))
    asked, answered = threading.Semaphore(0), threading.Semaphore(0)
    go_on, loops = asyncio.Event(), list[asyncio.AbstractEventLoop]()

    async def held(scope: Scope, receive: Receive, send: Send) -> None:
        loops.append(asyncio.get_running_loop())
        asked.release()
        await go_on.wait()
        await _long(scope, receive, send)
        answered.release()

    with (
        contextlib.ExitStack() as connections,
        serving(Routes({"/long": held, "/livez": _worker_probes()}), patient) as port,
    ):
        deaf = range(40)  # more than may wait, fewer than may be open
        for _ in deaf:
            connections.enter_context(_deaf(port))
            assert asked.acquire(timeout=DEADLINE_S)
        probe = connections.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert _ask(port, LIVEZ), "it is accepted behind the first"
        loops[0].call_soon_threadsafe(go_on.set)
        assert all(answered.acquire(timeout=DEADLINE_S) for _ in deaf)
        probe.sendall(LIVEZ)
        assert _rest(probe).startswith(b"HTTP/1.1 200")


def test_answer_that_nobody_reads_is_cut_off() -> None:
    bounds = Bounds(head_s=1, head_bytes=8192, answer_s=1, waiting_max=32)
    with serving(Routes({"/long": _long}), bounds) as port:
        with _deaf(port) as deaf:
            time.sleep(2)
            assert len(_rest(deaf)) < len(_LONG)
        with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as reader:
            reader.sendall(LIVEZ.replace(b"livez", b"long"))
            assert len(_rest(reader)) > len(_LONG)


def test_request_behind_another_has_its_own_time() -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(1.5)  # longer than a head may take
        await answer(send, 200, "late")

    with (
        serving(Routes({"/slow": slow})) as port,
        socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as peer,
    ):
        peer.sendall(2 * LIVEZ.replace(b"livez", b"slow"))
        # kept alive in between, closed a second after the last
        assert _rest(peer).count(b"late") == 2


def test_more_than_the_bound_are_told_to_come_again() -> None:
    go = threading.Event()
    held: list[Scope] = []

    async def hold(scope: Scope, receive: Receive, send: Send) -> None:
        held.append(scope)
        await asyncio.to_thread(go.wait, DEADLINE_S)
        await answer(send, 200, "done", [(b"connection", b"close")])

    bounds = Bounds(head_s=180, head_bytes=8192, answer_s=180, waiting_max=4, connections_max=8)
    routes = Routes({"/hold": hold, "/livez": _worker_probes()})
    with serving(routes, bounds) as port, contextlib.ExitStack() as connections:
        first: list[socket.socket] = []
        while len(first) < 7:
            peer = connections.enter_context(socket.create_connection(("127.0.0.1", port)))
            peer.sendall(LIVEZ.replace(b"livez", b"hold"))
            first.append(peer)
            eventually(lambda: len(held) == len(first))
        assert _ask(port, LIVEZ).startswith(b"HTTP/1.1 503")
        go.set()
        assert all(_rest(each).startswith(b"HTTP/1.1 200") for each in first)
        eventually(lambda: _ask(port, LIVEZ).startswith(b"HTTP/1.1 200"))


def test_burst_of_idle_connections_starves_no_probe() -> None:
    busy = threading.Event()

    async def block(scope: Scope, receive: Receive, send: Send) -> None:
        busy.set()
        time.sleep(1)  # noqa: ASYNC251  # meanwhile they all come, and are accepted at once
        await answer(send, 200, "done", [(b"connection", b"close")])

    routes = Routes({"/block": block, "/livez": _worker_probes()})
    with serving(routes) as port, contextlib.ExitStack() as connections:
        blocking = connections.enter_context(socket.create_connection(("127.0.0.1", port)))
        blocking.sendall(LIVEZ.replace(b"livez", b"block"))
        assert busy.wait(DEADLINE_S)
        for _ in range(300):
            connections.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert _ask(port, LIVEZ).startswith(b"HTTP/1.1 200")


@contextmanager
def _child(number: int, routes: Routes | None) -> Iterator[Child]:
    """A process that runs, and answers so, or with None not yet."""
    waits = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with (
        subprocess.Popen(waits, stdin=subprocess.PIPE) as process,
        socket.create_server(("127.0.0.1", 0)) as health,
        contextlib.ExitStack() as stack,
    ):
        if routes is not None:
            server = Server(routes, health.dup(), PROBES)
            server.start()
            stack.callback(server.close)
        child = Child(number, health)
        child.process = process
        yield child


def test_children_that_start_or_do_not_run() -> None:
    # the third answers, but none of the pages
    with _child(1, None) as starting, _child(3, Routes({})) as odd:
        children = [starting, Child(2, starting.health), odd]
        with serving(probes_of(children)) as port:
            livez, readyz, metrics = (
                _get(port, path) for path in ("/livez", "/readyz", "/metrics")
            )
    assert livez.status == 200
    assert (readyz.status, json.loads(readyz.text)["because"]) == (
        503, ["process 1: no answer", "process 2: not running", "process 3: no answer"],
    )  # fmt: skip
    assert 'txbox_process_up{process="1"} 1.0\n' in metrics.text
    assert 'txbox_process_up{process="2"} 0.0\n' in metrics.text


def test_metrics_of_children_are_theirs_with_their_number() -> None:
    odd = 'a "name" with {braces}, blanks and \\'
    with contextlib.ExitStack() as stack:
        children = []
        for number in (1, 2):
            counters = Counters()
            for _ in range(number):
                counters(MessageDuplicate(consumer=odd))
                counters(
                    TransactionCommitted(consumer=odd, messages=3, handler_s=0.1, commit_s=9e9)
                )
            routes = probes(_consuming(Health()), counters)
            children.append(stack.enter_context(_child(number, routes)))
        text = _get(stack.enter_context(serving(probes_of(children))), "/metrics").text
    escaped = odd.replace("\\", "\\\\").replace('"', '\\"')
    for number in (1, 2):
        labels = f'{{consumer="{escaped}",outcome="duplicate",process="{number}"}}'
        assert f"txbox_messages_total{labels} {number}.0\n" in text
        assert f'txbox_ready{{process="{number}"}} 1.0\n' in text
        for le, count in (("2", 0), ("5", number), ("+Inf", number)):
            labels = f'{{consumer="{escaped}",le="{le}",process="{number}"}}'
            assert f"txbox_batch_messages_bucket{labels} {count}.0\n" in text
    # one family, and those without a sample keep their names
    assert text.count("# TYPE txbox_messages_total counter\n") == 1
    assert "# HELP txbox_messages_total Messages by consumer" in text


# -- counters -------------------------------------------------------------------------------------


def test_names_and_types_of_all_metrics() -> None:
    with serving(_worker_probes()) as port:
        text = _get(port, "/metrics").text
    counted = (
        "messages", "transactions_retried", "settle_failures", "pauses", "paused_seconds",
        "lost_upstream", "lost_commits", "sources_refused", "leases_expired", "rows_pruned", "sequence_gaps",
        "outgoing", "publish_seconds", "relay_pauses", "relay_paused_seconds", "webhook_answers",
        "logins_refused",
    )  # fmt: skip
    gauges = (
        "ready", "in_flight", "source_silent_seconds", "source_away_seconds", "route_away_seconds", "rows_leased",
        "webhook_in_flight",
    )  # fmt: skip
    wanted = {f"txbox_{name}_total counter" for name in counted}
    wanted |= {f"txbox_{name} gauge" for name in gauges}
    histograms = ("latency_seconds", "handler_seconds", "commit_seconds", "batch_messages")
    wanted |= {f"txbox_{name} histogram" for name in histograms}
    assert set(re.findall(r"# TYPE (.+)", text)) == wanted


def test_settle_failures_count_deliveries() -> None:
    counters = Counters()
    counters(SettleFailed(source="kafka", count=3, error="gone"))
    counters(SettleFailed(source="kafka", count=2, error="gone"))
    assert _value(counters, "settle_failures", source="kafka") == 5


def test_counting_from_many_threads_loses_nothing() -> None:
    counters = Counters()

    def count() -> None:
        for _ in range(2000):
            counters(MessageDuplicate(consumer="c"))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert _value(counters, "messages", consumer="c", outcome="duplicate") == 8000


_BESIDE = """
import os, sys
from prometheus_client import REGISTRY, Gauge, generate_latest
from txbox.events import MessageDuplicate
from txbox.observers.counters import Counters
from txbox.worker.health import Answers, Health
from txbox.worker.serving import probes

queue = Gauge("shop_queue", "The application's own.")
queue.set_function(lambda: 7)
counters = Counters()
counters(MessageDuplicate(consumer="c"))
page = generate_latest(REGISTRY).decode()
assert "shop_queue 7.0" in page and "txbox" not in page, page
assert sorted(os.listdir(os.environ["PROMETHEUS_MULTIPROC_DIR"])) == [f"gauge_all_{os.getpid()}.db"]
REGISTRY.register(counters)
assert 'txbox_messages_total{consumer="c",outcome="duplicate"} 1.0' in generate_latest(REGISTRY).decode()
"""


def test_application_keeps_its_metrics_and_their_mode(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _BESIDE],
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
