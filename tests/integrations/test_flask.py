"""A request's transaction is committed before its answer; webhooks are routes of Flask."""

from __future__ import annotations

import hashlib
import hmac
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import flask
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from tests.support.waiting import DEADLINE_S
from txbox import App, ConfigurationError, Message, StoreError
from txbox.brokers.loop import EventLoop
from txbox.brokers.webhook import GitHub, Webhook
from txbox.integrations import flask as ours
from txbox.integrations.flask import transaction, webhooks

SECRET = "a secret of ours"


@pytest.fixture
def app(sqlite_url: str) -> Iterator[App]:
    with App(sqlite_url) as app:
        with app.transaction() as tx:
            tx.execute("CREATE TABLE item (id INTEGER PRIMARY KEY)")
            tx.execute(
                "CREATE TABLE orders (number INTEGER REFERENCES item (id) DEFERRABLE INITIALLY DEFERRED)"
            )
            tx.execute("INSERT INTO item VALUES (1)")
        app.handler("invoices", consumer="sending")(lambda message, tx: None)
        yield app


@pytest.fixture
def api(app: App) -> flask.Flask:
    api = flask.Flask(__name__)

    @api.post("/orders/<int:number>")
    @transaction(app)
    def order(tx: sqlite3.Connection, number: int) -> Any:
        tx.execute("INSERT INTO orders VALUES (?)", (number,))
        app.outbox.stage(tx, "invoices", {"order": number})
        match flask.request.args.get("how"):
            case "abort":
                flask.abort(409)
            case "bug":
                raise ZeroDivisionError
            case "no response":
                return None
            case "returned":
                return {"error": "sold out"}, 409
        return {"order": number}, 201

    return api


def _count(app: App, table: str) -> int:
    with app.transaction() as tx:
        ((count,),) = tx.execute(f"SELECT count(*) FROM {table}").fetchall()
        return int(count)


@pytest.mark.parametrize(
    ("how", "status", "kept"),
    [
        ("", 201, 1),
        ("returned", 409, 1),
        ("abort", 409, 0),
        ("bug", 500, 0),
        ("no response", 500, 0),
    ],
)
def test_what_raises_is_rolled_back(
    how: str, status: int, kept: int, app: App, api: flask.Flask
) -> None:
    assert api.test_client().post(f"/orders/1?how={how}").status_code == status
    assert (_count(app, "orders"), _count(app, "txbox_outbox")) == (kept, kept)


def test_the_answer_comes_after_the_commit(app: App, api: flask.Flask) -> None:
    # only COMMIT checks the constraint
    @api.errorhandler(StoreError)
    def refused(error: StoreError) -> tuple[str, int]:
        return "no such item", 422

    assert api.test_client().post("/orders/2").status_code == 422
    assert _count(app, "txbox_outbox") == 0


def test_async_views_and_databases_are_refused(app: App, sqlite_url: str) -> None:
    async def view(tx: Any) -> str:
        return ""

    with pytest.raises(ConfigurationError, match="async"):
        transaction(app)(view)  # type: ignore[arg-type]
    engine = create_async_engine(sqlite_url.replace("sqlite", "sqlite+aiosqlite"))
    with pytest.raises(ConfigurationError, match="async connections only"):
        transaction(App(engine))


@pytest.mark.parametrize("is_async", [False, True])
def test_a_webhook_is_a_route(is_async: bool, app: App, sqlite_url: str) -> None:
    seen: list[Any] = []
    app.consume(Webhook(topic="github", verify=GitHub(SECRET), body_bytes=200_000))

    def build(message: Message[dict[str, Any]], tx: Any) -> None:
        seen.append(message.body["after"])

    async def build_async(message: Message[dict[str, Any]], tx: Any) -> None:
        seen.append(message.body["after"])

    app.handler("github", type="push", consumer="builds")(build_async if is_async else build)
    api = flask.Flask(__name__)
    api.register_blueprint(webhooks(app))
    client = api.test_client()

    def post(body: bytes, event: str = "push") -> Any:
        signature = "sha256=" + hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
        return client.post(
            "/webhooks/github",
            data=body,
            headers={
                "x-hub-signature-256": signature, "x-github-event": event,
                "x-github-delivery": hashlib.sha256(body).hexdigest(),
            },
            content_type="application/json",
        )  # fmt: skip

    # longer than one chunk
    body = b'{"after": "c0ffee", "rest": "%s"}' % (b"x" * 100_000)
    assert (post(body).status_code, post(body).text) == (200, "duplicate\n")
    assert post(b"{}", "star").text == "unmatched\n"
    assert post(b"x" * 200_001).status_code == 413
    assert client.post("/webhooks/github", data=body).status_code == 401
    assert client.get("/webhooks/github").status_code == 405
    assert seen == ["c0ffee"]


def test_two_first_requests_at_once_make_one_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    both_have_seen_none = threading.Barrier(2, timeout=DEADLINE_S)
    found: list[EventLoop] = []
    closed: list[EventLoop] = []

    class Met(EventLoop):
        def __init__(self, name: str) -> None:
            super().__init__(name)
            both_have_seen_none.wait()

        def close(self) -> None:
            super().close()
            closed.append(self)

    monkeypatch.setattr(ours, "EventLoop", Met)
    loops = ours._Loops()
    requests = [threading.Thread(target=lambda: found.append(loops.here())) for _ in range(2)]
    for request in requests:
        request.start()
    for request in requests:
        request.join(DEADLINE_S)
    assert found[0] is found[1]
    assert len(closed) == 1
    assert closed[0] is not found[0]
    found[0].close()


def test_webhooks_need_nothing_but_the_framework() -> None:
    """`txbox run` serves them with the extra http; here the framework does."""
    program = """
import sys
for name in ("prometheus_client", "uvicorn"):
    sys.modules[name] = None  # as if it were not installed
from txbox import App
from txbox.brokers.webhook import GitHub, Webhook
from txbox.integrations.flask import webhooks
app = App("sqlite:///x.db")
app.handler("github", consumer="c")(lambda message, tx: None)
app.consume(Webhook(topic="github", verify=GitHub("a secret long enough")))
assert webhooks(app)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
