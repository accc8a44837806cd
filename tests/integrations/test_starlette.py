"""Worker and relay in the server's process: start, drain, crash; and the transaction of a request."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from datetime import timedelta
from functools import partial
from typing import Annotated, Any

import pytest
from fastapi import Depends, FastAPI, HTTPException, Request
from litestar import Litestar, asgi
from starlette.applications import Starlette

from tests.support.asgi import Lived
from tests.support.invariant import broken_invariant
from tests.support.recording import Recorder
from tests.support.sources import Memory
from tests.support.waiting import DEADLINE_S, eventually
from txbox import App, ConfigurationError, Message, Outcome
from txbox.brokers.base import Consumer, Context, Delivery
from txbox.brokers.webhook import GitHub, Webhook
from txbox.errors import SchemaError
from txbox.integrations.starlette import (
    depends,
    lifespan,
    probes,
    transaction,
    transaction_async,
    webhooks,
)
from txbox.worker.health import Health

SECRET = "a secret of ours"


def _paid(message_id: str) -> Message[Any]:
    return Message(id=message_id, topic="orders", payload=b"{}")


def _rows(url: str, sql: str) -> list[Any]:
    with sqlite3.connect(url.removeprefix("sqlite:///"), timeout=DEADLINE_S) as database:
        found = database.execute(sql).fetchall()
    database.close()
    return found


def _never(error: BaseException) -> None:
    raise AssertionError(f"the worker ended: {error!r}")


async def _comes_true(condition: Callable[[], object]) -> None:
    await asyncio.to_thread(eventually, condition)


@pytest.mark.parametrize("framework", [FastAPI, Starlette, Litestar])
def test_the_worker_runs_from_startup_to_shutdown(framework: Any, sqlite_url: str) -> None:
    app, source = App(sqlite_url), Memory([_paid("m-1")], endless=True)
    loops: list[asyncio.AbstractEventLoop] = []
    app.consume(source, topics=["orders"])

    @app.handler("orders", consumer="billing")
    async def book(message: Message[Any], tx: Any) -> None:
        loops.append(asyncio.get_running_loop())

    life = lifespan(app, crashed=_never)
    api = framework(lifespan=[life] if framework is Litestar else life)

    async def main() -> None:
        async with Lived(api):
            await _comes_true(lambda: source.settled)
            # on the server's loop: a handler may use its clients
            assert loops == [asyncio.get_running_loop()]
        assert source.closed

    asyncio.run(main())
    assert source.settled_ids == ["m-1"]
    assert not app.events.observers


def test_a_handler_that_runs_at_shutdown_is_finished(sqlite_url: str) -> None:
    app, source = App(sqlite_url), Memory([_paid("m-1"), _paid("m-2")], endless=True)
    runs, may_end = threading.Event(), threading.Event()
    app.consume(source, topics=["orders"])

    @app.handler("orders", consumer="billing", batch=False)
    def book(message: Message[Any], tx: sqlite3.Connection) -> None:
        runs.set()
        assert may_end.wait(DEADLINE_S)

    async def main() -> None:
        life = lifespan(app, crashed=_never)(None)
        await life.__aenter__()
        assert await asyncio.to_thread(runs.wait, DEADLINE_S)
        leaving = asyncio.ensure_future(life.__aexit__(None, None, None))
        # the drain has begun, and waits for the handler
        await _comes_true(lambda: not source.waiting)
        assert not leaving.done()
        may_end.set()
        await leaving

    asyncio.run(main())
    assert "m-1" in source.settled_ids
    done = _rows(sqlite_url, "SELECT message_id FROM txbox_inbox WHERE status = 'processed'")
    assert sorted(name for (name,) in done) == sorted(source.settled_ids)


@pytest.mark.parametrize("wrong", ["no tables", "no handlers"])
def test_a_worker_that_cannot_start_fails_the_startup(
    wrong: str, sqlite_url: str, tmp_path: Any
) -> None:
    app = App(f"sqlite:///{tmp_path}/empty.db" if wrong == "no tables" else sqlite_url)
    app.consume(Memory([]), topics=["orders"])
    if wrong == "no tables":
        app.handler("orders", consumer="billing")(lambda message, tx: None)

    async def main() -> None:
        async with Lived(FastAPI(lifespan=lifespan(app, crashed=_never))):
            raise AssertionError("it started")

    with pytest.raises(SchemaError if wrong == "no tables" else ConfigurationError):
        asyncio.run(main())


class _Dies(Memory):
    """A source that breaks an invariant of txbox."""

    def __init__(self) -> None:
        super().__init__([], endless=True)
        self.die = threading.Event()

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        if self.die.is_set():
            broken_invariant()
        return super().receive(messages_max, wait_s)


def test_a_worker_that_crashes_is_told_to_the_server(sqlite_url: str) -> None:
    app, source = App(sqlite_url), _Dies()
    app.consume(source, topics=["orders"])
    app.handler("orders", consumer="billing")(lambda message, tx: None)
    told: list[BaseException] = []
    health = Health()
    api = FastAPI(
        lifespan=lifespan(app, crashed=told.append, health=health), routes=probes(app, health)
    )

    async def main() -> None:
        async with Lived(api) as client:
            await _comes_true(lambda: not health.unready())
            assert (await client.ask("GET", "/readyz")).status == 200
            source.die.set()
            await _comes_true(lambda: told)
            assert (await client.ask("GET", "/livez")).status == 503

    with pytest.raises(RuntimeError, match="crashed") as raised:
        asyncio.run(main())
    assert [type(error) for error in told] == [AssertionError]
    assert raised.value.__cause__ is told[0]


class _Away(Memory):
    """A source whose broker does not answer until it is told to."""

    def __init__(self) -> None:
        super().__init__([_paid("m-1")], endless=True)
        self.answers = threading.Event()

    def consumer(self, topics: Sequence[str], context: Context) -> Consumer:
        assert self.answers.wait(DEADLINE_S)
        return super().consumer(topics, context)


def test_a_broker_that_is_away_keeps_no_server_from_starting(sqlite_url: str) -> None:
    app, source = App(sqlite_url), _Away()
    app.consume(source, topics=["orders"])
    app.handler("orders", consumer="billing")(lambda message, tx: None)
    life = lifespan(app, crashed=_never, start_within=timedelta(0))

    async def main() -> None:
        async with Lived(Starlette(lifespan=life)):
            assert not source.settled
            source.answers.set()
            await _comes_true(lambda: source.settled)

    asyncio.run(main())


def _in_fastapi(app: App) -> Any:
    return FastAPI(lifespan=lifespan(app, crashed=_never), routes=webhooks(app))


def _in_litestar(app: App) -> Any:
    hooks = [asgi(hook.path, copy_scope=True)(hook) for hook in app.webhooks]
    return Litestar(hooks, lifespan=[lifespan(app, crashed=_never)])


@pytest.mark.parametrize("served", [_in_fastapi, _in_litestar])
def test_a_webhook_is_answered_after_the_commit_and_waited_for(
    served: Callable[[App], Any], sqlite_url: str
) -> None:
    app = App(sqlite_url)
    app.consume(Webhook(topic="github", verify=GitHub(SECRET)))
    seen: list[Any] = []

    @app.handler("github", type="push", consumer="builds")
    def build(message: Message[dict[str, Any]], tx: Any) -> None:
        seen.append(message.body["after"])

    api = served(app)
    body = b'{"after": "c0ffee"}'
    signed = "sha256=" + hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
    headers = {
        "x-hub-signature-256": signed, "x-github-event": "push", "x-github-delivery": "d-1",
        "content-type": "application/json",
    }  # fmt: skip

    async def main() -> None:
        async with Lived(api) as client:
            assert await client.ask("POST", "/webhooks/github", body, headers) == (
                200,
                "processed\n",
            )
            assert await client.ask("POST", "/webhooks/github", body, headers) == (
                200,
                "duplicate\n",
            )
            assert (await client.ask("POST", "/webhooks/github", body)).status == 401
            assert (await client.ask("GET", "/webhooks/github")).status == 405

    asyncio.run(main())
    assert seen == ["c0ffee"]
    assert app.webhooks[0].answers == {200: 2, 401: 1, 405: 1}  # it, and no copy of it


# -- the transaction of a request -----------------------------------------------------------------


class _Shop:
    """An API with an order route in both colours; each writes, stages, and then fails as it is asked to."""

    def __init__(self, app: App, insert: str) -> None:
        self.app, self.sent = app, Recorder()
        app.publish(self.sent, topics=["invoices"])
        self.api = FastAPI(lifespan=lifespan(app, crashed=_never))
        tx_of, tx_of_async = transaction(app), transaction_async(app)

        def seller(tx: Any = tx_of) -> int:
            return id(tx)

        @self.api.post("/sync/{number}")
        def order(
            number: int, tx: Any = tx_of, same: int = Depends(seller, scope="function"),
            how: str = "",
        ) -> dict[str, int]:  # fmt: skip
            assert same == id(tx), "dependencies of one request share its transaction"
            tx.execute(insert, (number,))
            app.outbox.stage(tx, "invoices", {"order": number})
            _fail(how)
            return {"order": "x" if how == "response" else number}  # type: ignore[dict-item]

        @self.api.post("/async/{number}")
        async def order_async(number: int, how: str = "", tx: Any = tx_of_async) -> dict[str, int]:
            await tx.execute(insert, (number,))
            await app.outbox.stage_async(tx, "invoices", {"order": number})
            _fail(how)
            return {"order": "x" if how == "response" else number}  # type: ignore[dict-item]


def _fail(how: str) -> None:
    if how == "http":
        raise HTTPException(409, "sold out")
    if how == "bug":
        raise ZeroDivisionError("a bug")


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_request_that_fails_after_staging_sends_nothing(colour: str, sqlite_url: str) -> None:
    _rows(sqlite_url, "CREATE TABLE orders (number INTEGER)")
    shop = _Shop(App(sqlite_url), "INSERT INTO orders VALUES (?)")

    async def main() -> None:
        async with Lived(shop.api) as client:
            for how, status in (("http", 409), ("bug", 500), ("response", 500)):
                assert (await client.ask("POST", f"/{colour}/1?how={how}")).status == status
            assert (await client.ask("POST", f"/{colour}/2")).status == 200
            await _comes_true(lambda: shop.sent.sent)

    asyncio.run(main())
    assert _rows(sqlite_url, "SELECT number FROM orders") == [(2,)]
    assert shop.sent.bodies == [{"order": 2}]


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_an_answer_is_sent_after_the_commit(colour: str, sqlite_url: str) -> None:
    # the constraint is checked by COMMIT alone: an answer before it would have been a 200
    _rows(
        sqlite_url,
        "CREATE TABLE orders (number INTEGER REFERENCES item (id) DEFERRABLE INITIALLY DEFERRED)",
    )
    _rows(sqlite_url, "CREATE TABLE item (id INTEGER PRIMARY KEY)")
    shop = _Shop(App(sqlite_url), "INSERT INTO orders VALUES (?)")

    async def main() -> None:
        async with Lived(shop.api) as client:
            assert (await client.ask("POST", f"/{colour}/1")).status == 500

    asyncio.run(main())
    assert _rows(sqlite_url, "SELECT count(*) FROM txbox_outbox") == [(0,)]


def test_an_older_fastapi_is_refused(monkeypatch: pytest.MonkeyPatch, sqlite_url: str) -> None:
    def older(dependency: Any = None, *, use_cache: bool = True) -> None: ...

    monkeypatch.setattr("fastapi.Depends", older)
    with pytest.raises(ConfigurationError, match=r"0\.121"):
        transaction(App(sqlite_url))


# -- dependencies of handlers ----------------------------------------------------------------------


_OPEN: list[str] = []


def _fee() -> int:
    _OPEN.append("fee")
    return 3


class _Prices:
    def __init__(self, fee: Annotated[int, Depends(_fee)], rounding: int = 2) -> None:
        self.fee = fee


def _prices(prices: Annotated[_Prices, Depends()], fee: int = Depends(_fee)) -> Generator[_Prices]:
    assert prices.fee == fee
    _OPEN.append("open")
    yield prices
    _OPEN.append("closed")


async def _prices_async(fee: Annotated[int, Depends(_fee)]) -> AsyncGenerator[int]:
    _OPEN.append("open")
    yield fee
    _OPEN.append("closed")


def _of_request(request: Request) -> str:
    return "no"


@pytest.fixture
def asked(sqlite_url: str) -> App:
    _OPEN.clear()
    _rows(sqlite_url, "CREATE TABLE orders (number INTEGER)")
    return App(sqlite_url, resolver=depends)


def test_a_handler_is_given_what_a_route_is(asked: App, sqlite_url: str) -> None:
    orders = Annotated[Any, transaction(asked)]

    def repository(tx: Any) -> Callable[[int], object]:
        return lambda number: tx.execute("INSERT INTO orders VALUES (?)", (number,))

    def book(message: Message[Any], tx: sqlite3.Connection, add: Any, prices: Any) -> None:
        add(prices.fee)
        if message.body == {"fail": True}:
            raise ValueError

    # as without `from __future__ import annotations`: these are local names
    hints = {
        "add": Annotated[Any, Depends(repository)],
        "prices": Annotated[_Prices, Depends(_prices)],
    }
    book.__annotations__ |= hints
    repository.__annotations__["tx"] = orders
    asked.handler("orders", consumer="billing")(book)
    failing = Message[Any](id="m-0", topic="orders", payload=b'{"fail": true}')
    assert asked.process(failing) is Outcome.FAILED
    # what is thrown into the dependency has ended it
    assert _OPEN == ["fee", "open"]
    assert asked.process(_paid("m-1")) is Outcome.PROCESSED
    assert _OPEN[2:] == ["fee", "open", "closed"]
    assert _rows(sqlite_url, "SELECT number FROM orders") == [(3,)]


def test_an_async_handler_is_given_async_dependencies(asked: App, sqlite_url: str) -> None:
    @asked.handler("orders", consumer="billing")
    async def book(
        message: Message[Any], tx: Any, fee: Annotated[int, Depends(_prices_async)]
    ) -> None:
        await tx.execute("INSERT INTO orders VALUES (?)", (fee,))

    async def main() -> None:
        async with asked:
            assert await asked.process_async(_paid("m-1")) is Outcome.PROCESSED

    asyncio.run(main())
    assert _OPEN == ["fee", "open", "closed"]
    assert _rows(sqlite_url, "SELECT number FROM orders") == [(3,)]


class _Times:
    def __init__(self, times: int) -> None:
        self.times = times

    def __call__(self, fee: Annotated[int, Depends(_fee)]) -> int:
        return self.times * fee


class _TimesAsync:
    def __init__(self, times: int) -> None:
        self.times = times

    async def __call__(self, fee: Annotated[int, Depends(_fee)]) -> int:
        return self.times * fee


def _plus(more: int, fee: Annotated[int, Depends(_fee)] = 0) -> int:
    return fee + more


def test_objects_and_partials_are_called_as_fastapi_does(asked: App, sqlite_url: str) -> None:
    @asked.handler("orders", consumer="billing")
    async def book(
        message: Message[Any],
        tx: Any,
        twice: Annotated[int, Depends(_Times(2))],
        thrice: Annotated[int, Depends(_TimesAsync(3))],
        more: Annotated[int, Depends(partial(_plus, 1))],
    ) -> None:
        await tx.execute("INSERT INTO orders VALUES (?), (?), (?)", (twice, thrice, more))

    async def main() -> None:
        async with asked:
            assert await asked.process_async(_paid("m-1")) is Outcome.PROCESSED

    asyncio.run(main())
    assert _rows(sqlite_url, "SELECT number FROM orders") == [(6,), (9,), (4,)]


@pytest.mark.parametrize(
    ("hint", "says"),
    [
        (int, "x is not Annotated"),
        (Annotated[int, Depends(_TimesAsync(3))], "x is async"),
        (Annotated[str, Depends(_of_request)], "request is not Annotated"),
        (Annotated[int, Depends(_prices_async)], "x is async"),
    ],
)
def test_what_only_a_request_has_is_refused_at_registration(
    hint: Any, says: str, asked: App
) -> None:
    def book(message: Any, tx: Any, x: Any) -> None: ...

    book.__annotations__["x"] = hint
    with pytest.raises(ConfigurationError, match=says):
        asked.handler("orders", consumer="billing")(book)


def test_a_transaction_of_the_other_kind_is_refused(asked: App) -> None:
    def book(message: Any, tx: Any, x: Any) -> None: ...

    book.__annotations__["x"] = Annotated[Any, transaction_async(asked)]
    with pytest.raises(ConfigurationError, match="another kind"):
        asked.handler("orders", consumer="billing")(book)
    book.__annotations__["x"] = Annotated[Any, transaction(asked)]

    def call(message: Any, x: Any) -> None: ...

    call.__annotations__["x"] = book.__annotations__["x"]
    with pytest.raises(ConfigurationError, match="another kind"):
        asked.effect("call")(call)


def test_webhooks_need_nothing_but_the_framework() -> None:
    """`txbox run` serves them with the extra http; here the framework does."""
    program = """
import sys
for name in ("prometheus_client", "uvicorn"):
    sys.modules[name] = None  # as if it were not installed
from txbox import App
from txbox.brokers.webhook import GitHub, Webhook
from txbox.integrations.starlette import webhooks
app = App("sqlite:///x.db")
app.handler("github", consumer="c")(lambda message, tx: None)
app.consume(Webhook(topic="github", verify=GitHub("a secret long enough")))
assert webhooks(app)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
