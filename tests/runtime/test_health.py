"""/livez, /readyz and /metrics: in each state of a worker, and of several."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.databases import Raw
from tests.runtime.support import Memory, event_line, eventually, running, worker, write_events
from tests.shop import CONSUMER, TOPIC, Shop, create_effects, opened, paid
from tests.webhook.running import TxboxRun
from tests.webhook.senders import github
from txbox import App, Message
from txbox.brokers.base import Delivery, InFlight, Progress
from txbox.errors import BrokerUnavailable
from txbox.events import ConsumptionPaused, ConsumptionResumed, SettleFailed
from txbox.observers.counters import Counters, Metric, render
from txbox.worker.health import Health
from txbox.worker.health_server import Answer, Child, Children, HealthServer, routes_of

HEALTH = ("--health-port", "0")


@pytest.fixture
def lite(sqlite_url: str, raw: Callable[[str], Raw]) -> Raw:
    own = raw(sqlite_url)
    create_effects(own)
    return own


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
    return sum(own for name, own in metrics.items() if name.startswith("txbox_in_flight"))


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
        assert run.get("/metrics").headers["Content-Type"].startswith("text/plain; version=0.0.4")


def test_several_processes_answer_as_one(
    postgresql_url: str, raw: Callable[[str], Raw], tmp_path: Path
) -> None:
    own = raw(postgresql_url)
    create_effects(own)
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

    def open(self, topics: Sequence[str], progress: Progress, in_flight: InFlight) -> None:
        assert self.may_open.wait(20)

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        if self.is_away:
            raise BrokerUnavailable("nobody is there")
        return super().receive(messages_max, wait_s)


@pytest.fixture
def shop(sqlite_url: str) -> Iterator[Shop]:
    with opened(sqlite_url) as own:
        yield own


def test_sources_that_open_late_or_go_away(shop: Shop) -> None:
    source, health = Slow(), Health()
    shop.handler()
    shop.app.consume(source)
    shop.app.events.observers.append(health)
    with running(worker(shop.app, health=health)):
        eventually(lambda: health.unready() == ["memory is not open yet"])
        assert health.stuck() == []
        source.may_open.set()
        eventually(lambda: health.unready() == [])
        source.is_away = True
        eventually(lambda: health.unready() == ["memory does not answer"])
        assert health.stuck() == []
        eventually(lambda: health.counters.value("pauses", source="memory") >= 1)
        assert health.counters.value("pauses", source="") == 0
        source.is_away = False
        eventually(lambda: health.unready() == [])
        assert health.counters.value("paused_seconds", source="memory") > 0
    assert health.unready() == ["draining"]
    assert health.stuck() == []


def test_a_source_that_is_refused(shop: Shop) -> None:
    nameless: list[Message[Any] | Delivery] = [
        Message(topic=TOPIC, payload=b"{}") for _ in range(100)
    ]
    source, health = Memory(nameless, endless=True), Health()
    shop.handler()
    shop.app.consume(source)
    shop.app.events.observers.append(health)
    with running(worker(shop.app, health=health)):
        why = ["memory is paused: its messages have no ids"]
        eventually(lambda: health.unready() == why)
        assert health.stuck() == []
        assert health.counters.value("sources_refused", source="memory") == 1


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
            assert go.wait(20)

        source = Memory([paid("m1")], endless=True)
        app.consume(source)
        with running(worker(app, health=health)):
            eventually(lambda: health.unready() == [])
            assert entered.wait(20)
            eventually(lambda: any("asyncio loop" in why for why in health.stuck()))
            go.set()
            eventually(lambda: health.stuck() == [])
            eventually(lambda: source.settled)


def test_a_dead_thread_is_not_alive(shop: Shop) -> None:
    class Broken(Memory):
        def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
            raise LookupError("a bug")

    health = Health()
    shop.handler()
    shop.app.consume(Broken([], endless=True))
    with running(worker(shop.app, health=health)) as codes:
        eventually(lambda: codes == [1])
    assert health.stuck() == ["the worker ends after LookupError"]


def _consuming(health: Health) -> Health:
    health.consuming([], None)
    return health


# -- the server -----------------------------------------------------------------------------------


@contextmanager
def serving(routes: Any) -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = HealthServer(listener, routes)
    port = listener.getsockname()[1]
    server.start()
    try:
        yield port
    finally:
        server.close()
        assert not [own for own in threading.enumerate() if own.name == "txbox-health"]


def _ask(port: int, request: bytes) -> bytes:
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as own:
        own.sendall(request)
        # a server that closes without having read everything resets the connection
        with contextlib.suppress(ConnectionResetError):
            while more := own.recv(4096):
                answer += more
        return answer


def test_hostile_requests_do_not_stop_the_answers() -> None:
    with serving(routes_of(_consuming(Health()))) as port:
        assert _ask(port, b"x" * 20_000) == b""
        assert _ask(port, b"\x16\x03\x01\r\n\r\n").startswith(b"HTTP/1.1 404")
        assert _ask(port, b"GET /livez HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("sent", [b"", b"GET /livez HTTP/1.1\r\nX-Slow: "])
def test_connections_without_a_request_never_starve_a_probe(sent: bytes) -> None:
    with serving(routes_of(_consuming(Health()))) as port, contextlib.ExitStack() as connections:
        for _ in range(10):
            for _ in range(40):  # more than are open at once
                idle = socket.create_connection(("127.0.0.1", port))
                connections.enter_context(idle)
                idle.sendall(sent)
            answer = _ask(port, b"GET /livez HTTP/1.1\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200")


def test_connection_without_a_request_is_closed_after_a_second() -> None:
    with serving(routes_of(_consuming(Health()))) as port:
        began = time.monotonic()
        assert _ask(port, b"GET /livez HTTP/1.1\r\n") == b""
        assert 0.9 < time.monotonic() - began < 4  # an answer may take up to 5 s


def test_children_that_start_or_do_not_run() -> None:
    starting = socket.create_server(("127.0.0.1", 0))
    children = [
        Child(1, starting.getsockname()[1], running=True), Child(2, 1, running=False),
    ]  # fmt: skip
    routes = Children(children).routes()

    async def asked() -> list[Answer]:
        return [await route() for route in routes.values()]

    livez, readyz, metrics = asyncio.run(asked())
    starting.close()
    assert livez.status == 200
    assert (readyz.status, "process 1: no answer" in readyz.body) == (503, True)
    assert "process 2: not running" in readyz.body
    assert 'txbox_process_up{process="2"} 0' in metrics.body


# -- counters -------------------------------------------------------------------------------------


def test_the_text_format() -> None:
    text = render(
        [Metric("m_total", "counter", "Help.", [({"a": 'x"\\\n'}, 3), ({}, 0.5), ({"b": ""}, 1e6)])]
    )
    assert text == (
        "# HELP m_total Help.\n# TYPE m_total counter\n"
        'm_total{a="x\\"\\\\\\n"} 3\nm_total 0.5\nm_total{b=""} 1000000\n'
    )


def test_settle_failures_count_deliveries() -> None:
    counters = Counters()
    counters(SettleFailed(source="kafka", count=3, error="gone"))
    counters(SettleFailed(source="kafka", count=2, error="gone"))
    assert counters.value("settle_failures", source="kafka") == 5
    assert 'txbox_settle_failures_total{source="kafka"} 5\n' in render(counters.metrics())


def test_counting_from_many_threads_loses_nothing() -> None:
    counters = Counters()

    def count() -> None:
        for _ in range(2000):
            counters.count("messages", consumer="c", outcome="processed")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for own in threads:
        own.start()
    for own in threads:
        own.join()
    assert counters.value("messages", consumer="c", outcome="processed") == 8000
