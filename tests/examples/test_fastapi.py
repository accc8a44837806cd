"""The FastAPI example, served by uvicorn in a process of its own."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.examples.programs import rows, started, tables
from tests.support.databases import NewDatabase
from tests.support.proxy import Proxy, closed_port
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.webhook.senders import SECRET, github

BODY = b'{"id": 1, "amount": 5}'
PAID = {"Authorization": "Bearer t0ken", "X-Event-Type": "order.paid"}


class Server:
    def __init__(self, port: int) -> None:
        self.port = port

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            connection.request("POST", path, body=body, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode().strip()
        finally:
            connection.close()

    def order(self, own_id: str, body: bytes = BODY, **headers: str) -> tuple[int, str]:
        return self.post("/orders", body, {**PAID, "X-Event-Id": own_id, **headers})


@pytest.fixture
def url(new_database: NewDatabase) -> str:
    return tables(
        new_database("postgresql"),
        "CREATE TABLE booking (order_id INTEGER, amount INTEGER)",
        "CREATE TABLE build (commit_id TEXT)",
    )


@pytest.fixture
def server(tmp_path: Path, url: str) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # requests wait until it is up
        number = listener.fileno()
        env = {"TXBOX_DATABASE_URL": url, "API_TOKEN": "t0ken", "WEBHOOK_SECRET": SECRET}
        uvicorn = ("uvicorn", "--fd", str(number), "--log-level", "warning", "fastapi_webhook:api")
        with started(tmp_path, *uvicorn, env=env, keep=[number]) as process:
            yield Server(listener.getsockname()[1])
            process.terminate()
            assert process.wait(DEADLINE_S) in (
                0,
                -15,
            )  # uvicorn raises the signal again when it is done


def test_the_route_answers_after_the_commit(server: Server, url: str) -> None:
    assert server.order("o-1") == (200, "processed")
    assert rows(url, "SELECT * FROM booking") == [(1, 5)]
    assert server.order("o-1") == (200, "duplicate")
    assert server.order("o-1", b'{"id": 1, "amount": 6}') == (200, "quarantined")
    assert server.order("o-2", b'{"id": 2}') == (200, "failed")
    assert server.order("o-3", Authorization="Bearer guessed")[0] == 401
    assert server.order("o-3", b" " * (1 << 20) + b"1")[0] == 413
    assert rows(url, "SELECT * FROM booking") == [(1, 5)]
    # o-2 is retried meanwhile
    eventually(
        lambda: (
            rows(url, "SELECT message_id, status FROM txbox_inbox ORDER BY 1")
            == [("o-1", "processed"), ("o-2", "failed")]
        )
    )


def test_the_webhook_verifies_and_processes(server: Server, url: str) -> None:
    push = b'{"after": "abc123"}'
    for wanted in ("processed", "duplicate"):
        assert server.post("/webhooks/github", push, github("d1", push)) == (200, wanted)
    assert server.post("/webhooks/github", push, github("d2", push, secret="guessed"))[0] == 401
    assert rows(url, "SELECT * FROM build") == [("abc123",)]


def test_the_caller_sends_again_while_the_database_is_away(tmp_path: Path, url: str) -> None:
    with Proxy(url) as proxy, socket.create_server(("127.0.0.1", 0)) as listener:
        env = {"TXBOX_DATABASE_URL": proxy.url, "API_TOKEN": "t0ken", "WEBHOOK_SECRET": SECRET}
        number = listener.fileno()
        uvicorn = ("uvicorn", "--fd", str(number), "--log-level", "warning", "fastapi_webhook:api")
        with started(tmp_path, *uvicorn, env=env, keep=[number]):
            server = Server(listener.getsockname()[1])
            assert server.order("o-1") == (200, "processed")
            proxy.refuse()
            assert server.order("o-2")[0] == 503
            push = b'{"after": "abc123"}'
            assert server.post("/webhooks/github", push, github("d1", push))[0] == 503


def test_a_server_waits_for_its_database(tmp_path: Path) -> None:
    with closed_port() as closed, socket.create_server(("127.0.0.1", 0)) as listener:
        env = {
            "TXBOX_DATABASE_URL": f"postgresql://nobody@127.0.0.1:{closed}/nothing",
            "API_TOKEN": "t0ken",
            "WEBHOOK_SECRET": SECRET,
        }
        number = listener.fileno()
        uvicorn = ("uvicorn", "--fd", str(number), "--log-level", "warning", "fastapi_webhook:api")
        with started(tmp_path, *uvicorn, env=env, keep=[number]) as process:
            assert Server(listener.getsockname()[1]).order("o-1")[0] == 503
            assert process.poll() is None


def test_worker_and_relay_in_the_server(tmp_path: Path, new_database: NewDatabase) -> None:
    url = tables(
        new_database("postgresql"),
        "CREATE TABLE placed (number INTEGER, amount INTEGER)",
        "CREATE TABLE invoice (number INTEGER)",
    )
    env = {"TXBOX_DATABASE_URL": url, "DASHBOARD_TOKEN": "t0ken t0ken t0ken t0ken t0ken"}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = listener.fileno()
        uvicorn = ("uvicorn", "--fd", str(number), "--log-level", "warning", "fastapi_service:api")
        with started(tmp_path, *uvicorn, env=env, keep=[number]) as process:
            server = Server(listener.getsockname()[1])
            assert server.post("/orders/1?amount=5000", b"", {})[0] == 409
            assert server.post("/orders/2?amount=5", b"", {}) == (201, '{"number":2}')
            eventually(lambda: rows(url, "SELECT number FROM invoice"))
            assert server.post("/dashboard/", b"", {})[0] == 401
            process.terminate()
            assert process.wait(DEADLINE_S) in (0, -15)
    assert rows(url, "SELECT number FROM invoice") == [(2,)]
    assert rows(url, "SELECT number FROM placed") == [(2,)]
    stopped = rows(url, "SELECT count(*) FROM txbox_inbox WHERE status = 'processing'")
    assert stopped == [(0,)]
