"""`txbox run` serves the webhooks of its App: real requests to a real process."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.brokers.test_webhook import events
from tests.support.databases import Raw, missing_server, require
from tests.support.servers import ROOT
from tests.support.servers.control import ThrowawayPostgres
from tests.support.shop import Shop, create_effects, effects, quarantined, statuses
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.webhook.running import TxboxRun
from tests.support.webhook.senders import Answer, Endpoint, github, standard
from txbox import App

BODY = b'{"number": 1}'
HTTP = ("--http-port", "0")


@pytest.fixture
def lite(sqlite_url: str, raw: Callable[[str], Raw]) -> Raw:
    view = raw(sqlite_url)
    create_effects(view)
    return view


def _in_a_thread(endpoint: Endpoint, headers: dict[str, str]) -> tuple[threading.Thread, list[Any]]:
    answers: list[Any] = []

    def post() -> None:
        try:
            answers.append(endpoint.post(headers, BODY))
        except (OSError, http.client.HTTPException) as error:
            answers.append(error)

    thread = threading.Thread(target=post)
    thread.start()
    return thread, answers


@pytest.mark.parametrize("mode", ["inline", "stored"])
def test_github_events_each_delivered_twice_are_one_effect_each(
    sqlite_url: str, lite: Raw, tmp_path: Path, mode: str
) -> None:
    bodies = events()
    with TxboxRun(tmp_path, *HTTP, url=sqlite_url, mode=mode) as run:
        for _ in range(2):
            for own_id, event, body in bodies:
                assert run.hook.post(github(own_id, body, event), body).status == 200
        eventually(lambda: effects(lite) == len(bodies))
        run.process.terminate()
        assert run.ended() == 0
    assert statuses(lite) == {"processed": len(bodies)}
    found = lite.rows("SELECT message_id, count(*) FROM effect GROUP BY message_id")
    assert {row: int(count) for row, count in found} == {own_id: 1 for own_id, _, _ in bodies}


def test_every_database(shop: Shop, tmp_path: Path) -> None:
    with TxboxRun(tmp_path, *HTTP, url=shop.url, second_consumer=True) as run:
        hook = run.hook
        assert hook.post(github("d1", BODY), BODY).text == "processed"
        # by then another connection sees what both consumers did
        assert shop.effects("d1") == 2
        assert hook.post(github("d1", BODY), BODY).text == "duplicate"
        assert hook.post(github("d2", BODY, "bad"), BODY).text == "dead"
        run.process.terminate()
        assert run.ended() == 0
    assert statuses(shop.raw) == {"processed": 2, "dead": 2}
    assert shop.effects() == 2


def test_what_is_refused_is_not_stored(sqlite_url: str, lite: Raw, tmp_path: Path) -> None:
    options = {"body_bytes": 1000}
    with TxboxRun(tmp_path, *HTTP, url=sqlite_url, options=options) as run:
        hook = run.hook
        long = b"x" * 1001
        assert hook.post(github("d1", BODY, secret="wrong"), BODY).status == 401
        assert hook.post({}, BODY).status == 401
        assert hook.post(github("d1", long), long).status == 413
        assert hook.post({}, b"", method="GET").status == 405
        assert (
            hook.post(standard("m1", BODY, age_s=400), BODY, path="/webhooks/orders").status == 401
        )
        assert hook.post(github("d1", BODY), BODY, path="/hook/").status == 404
        assert (statuses(lite), quarantined(lite)) == ({}, [])
        assert hook.post(standard("m1", BODY), BODY, path="/webhooks/orders").text == "processed"
    assert statuses(lite) == {"processed": 1}


def test_killed_in_a_request_then_redelivered_is_once(shop: Shop, tmp_path: Path) -> None:
    with TxboxRun(tmp_path, *HTTP, url=shop.url) as run:
        thread, answers = _in_a_thread(run.hook, github("d1", BODY, "hold"))
        run.handling("d1")
        run.process.kill()
        thread.join(DEADLINE_S)
        assert not isinstance(answers[0], Answer)
    assert shop.effects() == 0
    with TxboxRun(tmp_path, *HTTP, url=shop.url) as run:
        run.open_the_gate()
        texts = [run.hook.post(github("d1", BODY, "hold"), BODY).text for _ in range(2)]
        assert texts == ["processed", "duplicate"]
    assert shop.effects() == 1


@pytest.mark.parametrize("told_to_come_again", [False, True])
def test_sigterm_finishes_what_is_at_work(
    sqlite_url: str, lite: Raw, tmp_path: Path, told_to_come_again: bool
) -> None:
    with TxboxRun(tmp_path, *HTTP, url=sqlite_url, seconds=0.2 if told_to_come_again else 8) as run:
        hook = run.hook
        thread, answers = _in_a_thread(hook, github("d1", BODY, "hold"))
        run.handling("d1")
        if told_to_come_again:
            thread.join(DEADLINE_S)
            assert answers[0].status == 503
        run.process.terminate()
        # nothing more is accepted, while the request is at work
        eventually(lambda: _refused(hook.port), "a closed port")
        assert run.process.poll() is None
        run.open_the_gate()
        assert run.ended() == 0
        thread.join(DEADLINE_S)
        if not told_to_come_again:
            assert answers[0].text == "processed"
    assert effects(lite) == 1


def test_answers_on_a_kept_alive_connection_are_not_delayed(
    sqlite_url: str, lite: Raw, tmp_path: Path
) -> None:
    """Nagle's algorithm and the client's delayed ACK make 40 ms of every answer whose head and body are two writes."""
    took_s: list[float] = []
    with TxboxRun(tmp_path, *HTTP, url=sqlite_url) as run:
        connection = http.client.HTTPConnection("127.0.0.1", run.hook.port, timeout=DEADLINE_S)
        for number in range(21):
            body = json.dumps({"number": number}).encode()
            began = time.monotonic()
            connection.request("POST", "/hook", body, github(f"d{number}", body))
            assert connection.getresponse().read()
            took_s.append(time.monotonic() - began)
        connection.close()
    # the quickest of twenty: a busy machine is slow, but never that regularly
    assert min(took_s[1:]) < 0.03, took_s


def _refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S).close()
    except ConnectionError:
        return True
    return False


def test_a_drain_longer_than_its_grace_ends(sqlite_url: str, lite: Raw, tmp_path: Path) -> None:
    with TxboxRun(tmp_path, *HTTP, "--grace", "2s", url=sqlite_url) as run:
        thread, answers = _in_a_thread(run.hook, github("d1", BODY, "hold"))
        run.handling("d1")
        run.process.terminate()
        assert run.ended() == 1
        thread.join(DEADLINE_S)
        # cut off, or told to come again: whichever was first
        assert not (isinstance(answers[0], Answer) and answers[0].status < 500)
        run.says("grace period of 2 s ended")
    assert effects(lite) == 0


def test_more_than_the_bound_come_again(sqlite_url: str, lite: Raw, tmp_path: Path) -> None:
    with TxboxRun(tmp_path, *HTTP, url=sqlite_url, options={"in_flight_max": 1}) as run:
        hook = run.hook
        thread, answers = _in_a_thread(hook, github("d1", BODY, "hold"))
        run.handling("d1")
        refused = hook.post(github("d2", BODY), BODY)
        assert (refused.status, refused.headers["retry-after"]) == (503, "5")
        run.open_the_gate()
        thread.join(DEADLINE_S)
        assert answers[0].text == "processed"
        assert hook.post(github("d2", BODY), BODY).text == "processed"
    assert effects(lite) == 2


def test_half_heads_and_silent_bodies_keep_no_sender_out(
    sqlite_url: str, lite: Raw, tmp_path: Path
) -> None:
    with TxboxRun(tmp_path, *HTTP, url=sqlite_url) as run, contextlib.ExitStack() as connections:
        hook = run.hook

        def connect(sent: bytes) -> socket.socket:
            connection = socket.create_connection(("127.0.0.1", hook.port), timeout=DEADLINE_S)
            connections.enter_context(connection).sendall(sent)
            return connection

        head = b"POST /hook HTTP/1.1\r\nHost: a\r\n"
        for _ in range(64):
            connect(head + b"Content-Length: 9\r\n\r\n")
        last = [connect(head) for _ in range(515)][-1]
        for number in range(20):
            assert hook.post(github(f"d{number}", BODY), BODY).text == "processed"
        # nobody takes its place: its own time ends it, also behind an answer
        second = connect(b"GET /hook HTTP/1.1\r\nHost: a\r\n\r\n")
        answer = b""
        while not answer.endswith(b"POST only\n"):
            answer += second.recv(4096)
        assert answer.startswith(b"HTTP/1.1 405")
        second.sendall(head)
        for silent in (last, second):
            with contextlib.suppress(ConnectionResetError):
                assert silent.recv(4096) == b""
        long = connect(head)
        with contextlib.suppress(ConnectionError):
            for _ in range(1024):
                long.sendall(b"X-Long: " + b"x" * 8192 + b"\r\n")
            pytest.fail("eight megabytes of headers were taken")
    assert effects(lite) == 20


def test_the_database_is_away(tmp_path: Path) -> None:
    require(missing_server("postgresql"))
    with ThrowawayPostgres() as server:
        with App(server.url) as app, Raw(server.url) as raw:
            app.init()
            create_effects(raw)
        with TxboxRun(tmp_path, *HTTP, "--health-port", "0", url=server.url) as run:
            hook = run.ready().hook
            assert hook.post(github("d1", BODY), BODY).text == "processed"
            server.stop(immediate=True)
            answer = hook.post(github("d2", BODY), BODY)
            assert (answer.status, answer.headers["retry-after"]) == (503, "5")
            eventually(lambda: run.because("/readyz") == ["the database does not answer"])
            assert run.because("/livez") == []
            server.start()
            eventually(lambda: hook.post(github("d2", BODY), BODY).status == 200)
            run.ready()
            assert run.metrics()['txbox_pauses_total{source=""}'] >= 1
            run.process.terminate()
            assert run.ended() == 0
        with Raw(server.url) as raw:
            assert statuses(raw) == {"processed": 2}
            assert effects(raw) == 2
            assert raw.value("SELECT max(attempts) FROM txbox_inbox") == 0


def test_two_processes_share_one_port(
    postgresql_url: str, raw: Callable[[str], Raw], tmp_path: Path
) -> None:
    view = raw(postgresql_url)
    create_effects(view)
    words = (*HTTP, "--processes", "2", "--health-port", "0")
    with TxboxRun(tmp_path, *words, url=postgresql_url) as run:
        hook = run.ready().hook
        held, answers = _in_a_thread(hook, github("held", BODY, "hold"))
        run.handling("held")
        number = 0

        def both_have_worked() -> bool:
            nonlocal number
            number += 1
            assert hook.post(github(f"d{number}", BODY), BODY).text == "processed"
            return int(view.value("SELECT count(DISTINCT note) FROM effect")) == 2 or number > 300

        # which of them accepts is up to the kernel
        eventually(both_have_worked)
        assert run.metrics()['txbox_process_up{process="2"}'] == 1
        run.process.terminate()
        eventually(lambda: _refused(hook.port), "a closed port")
        run.open_the_gate()
        assert run.ended() == 0
        held.join(DEADLINE_S)
        assert answers[0].text == "processed"
    assert statuses(view) == {"processed": number + 1}
    assert effects(view) == number + 1


def test_a_dead_process_loses_no_request_of_the_others(
    postgresql_url: str, raw: Callable[[str], Raw], tmp_path: Path
) -> None:
    create_effects(raw(postgresql_url))
    words = (*HTTP, "--processes", "2", "--health-port", "0")
    with TxboxRun(tmp_path, *words, url=postgresql_url) as run:
        hook = run.ready().hook
        hook.post(github("d1", BODY), BODY)
        pid = int(raw(postgresql_url).value("SELECT note FROM effect"))
        os.kill(pid, signal.SIGKILL)
        for number in range(2, 30):
            assert hook.post(github(f"d{number}", BODY), BODY).text == "processed"
        assert run.because("/livez") == []
        run.says("started again")
        run.ready()
        run.process.terminate()
        assert run.ended() == 0


@pytest.mark.parametrize(
    ("words", "plan", "sentence"),
    [
        (("--http-port", "{taken}"), {}, "cannot be listened on (Address already in use)"),
        (("--health-port", "{taken}", *HTTP), {}, "free it, or give another --health-port."),
        (("--health-port", "0", "--health-host", "192.0.2.1", *HTTP), {}, "192.0.2.1"),
        (HTTP, {"webhooks": False}, "the App has none"),
        ((*HTTP, "--once"), {}, "--once waits for none"),
        (HTTP, {"topic": "nobody"}, "topic 'nobody', which no handler consumes"),
        (HTTP, {"path": "/webhooks/orders"}, "Two webhooks have the path /webhooks/orders"),
    ],
)
def test_wrong_configuration_is_one_sentence(
    sqlite_url: str, tmp_path: Path, words: tuple[str, ...], plan: dict[str, Any], sentence: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        given = [word.replace("{taken}", port) for word in words]
        with TxboxRun(tmp_path, *given, url=sqlite_url, **plan) as run:
            assert run.ended() == 2
            said = [line for line in run.lines if "Listening on" not in line]
            assert len(said) == 1, run.lines
            assert sentence in said[0]


def test_slow_clients_do_not_hold_a_drain(sqlite_url: str, lite: Raw, tmp_path: Path) -> None:
    # its end within the deadline is the proof
    words = (*HTTP, "--health-port", "0", "--grace", f"{2 * DEADLINE_S:g}s")
    with (
        TxboxRun(tmp_path, *words, url=sqlite_url, seconds=1) as run,
        contextlib.ExitStack() as connections,
    ):
        ports = (run.hook.port, run.ready().health_port)
        for port in ports:
            for sent in (b"", b"POST /hook HTTP/1.1\r\n", b"POST /hook HTTP/1.1\r\nHost: a\r\n"):
                slow = socket.create_connection(("127.0.0.1", port))
                connections.enter_context(slow).sendall(sent)
        silent = socket.create_connection(("127.0.0.1", ports[0]))
        connections.enter_context(silent)
        silent.sendall(b"POST /hook HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n")
        run.process.terminate()
        assert run.ended() == 0


_WITHOUT = """
import sys
sys.modules[sys.argv.pop(1)] = None  # as if it were not installed
from txbox.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("missing", ["uvicorn", "prometheus_client"])
@pytest.mark.parametrize(
    ("words", "webhooks"),
    [
        (("--health-port", "0"), False),
        (("--health-port", "0", "--processes", "2"), False),
        (HTTP, True),
        ((), True),
    ],
)
def test_without_the_extra_it_says_what_to_install(
    sqlite_url: str, missing: str, words: tuple[str, ...], webhooks: bool
) -> None:
    ended = _run_without(missing, sqlite_url, *words, webhooks=webhooks)
    assert ended.returncode == 2
    (said,) = ended.stderr.splitlines()
    assert f"cannot be served without {missing}: run pip install 'txbox[http]'." in said


@pytest.mark.parametrize("missing", ["uvicorn", "prometheus_client"])
def test_a_worker_without_ports_needs_no_extra(sqlite_url: str, lite: Raw, missing: str) -> None:
    ended = _run_without(missing, sqlite_url, "--once", webhooks=False)
    assert (ended.returncode, ended.stdout) == (0, "Nothing to do.\n"), ended.stderr


def _run_without(
    missing: str, url: str, *words: str, webhooks: bool
) -> subprocess.CompletedProcess[str]:
    plan = {"url": url, "webhooks": webhooks}
    return subprocess.run(
        [
            sys.executable,
            "-c",
            _WITHOUT,
            missing,
            "run",
            "tests.support.webhook.served:app",
            *words,
        ],
        cwd=ROOT,
        env={**os.environ, "TEST_PLAN": json.dumps(plan)},
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
