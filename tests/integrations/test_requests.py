"""An HTTP request runs once for each caller and key, on every framework and database, even if its server is killed."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple
from urllib.parse import urlencode

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy import orm
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext import asyncio as sa_async
from werkzeug.test import Client

from tests.support import once_service
from tests.support.command import Command, command
from tests.support.databases import NewDatabase, Raw
from tests.support.django_project import configured
from tests.support.once_service import ASGI, DEADLY, FRAMEWORKS, GATE
from tests.support.proxy import Proxy, closed_port
from tests.support.servers import ROOT
from tests.support.shop import add_effect, create_effects, effects
from tests.support.waiting import DEADLINE_S
from tests.ui.conftest import Serve, serve
from txbox import App, ConfigurationError, Inbox, StoreError
from txbox.encryption import AesGcm, new_key
from txbox.integrations.requests import ANONYMOUS, Answer, Received, Refused, Requests
from txbox.integrations.starlette import Answers, Once
from txbox.session import blocking

__all__ = ["command", "serve"]

every_product = pytest.mark.parametrize("product", ["postgresql", "mariadb", "mysql", "sqlite"])
KEY = "8e03978e-40d5-43e8-bc93-6894a57f9324"


class Reply(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def kept(self) -> tuple[int, str, str | None, bytes]:
        """What a repeat gets as well."""
        return self.status, self.headers["content-type"], self.headers.get("x-chosen"), self.body


BODY = (b"{}", b"")


class Shop:
    """An application in this process."""

    def __init__(self, application: Any, app: App, raw: Raw | None, *, asgi: bool) -> None:
        self._raw, self._asgi = raw, asgi
        self._application = application
        self._runner = asyncio.Runner()
        self.app = app
        #: The last answer's body, as it came.
        self.pieces: list[Any] = []

    def post(
        self,
        path: str,
        key: str | None = KEY,
        *,
        user: str | None = "ann",
        body: bytes = b"{}",
        kind: str = "application/json",
    ) -> Reply:
        headers = {"content-type": kind}
        if key is not None:
            headers["Idempotency-Key"] = key
        if user is not None:
            headers["x-user"] = user
        if self._asgi:
            reply = self._runner.run(self.post_async(path, headers, (body[:1], body[1:])))
            assert reply is not None
            return reply
        response = Client(self._application).post(path, data=body, headers=headers)
        return Reply(
            response.status_code, {n.lower(): v for n, v in response.headers.items()}, response.data
        )

    def run(self, asking: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(asking)

    async def post_async(
        self, path: str, headers: dict[str, str], pieces: Sequence[bytes | None] = BODY
    ) -> Reply | None:
        """A request in pieces; the client goes away at one that is None. None if there was no answer."""
        path, _, query = path.partition("?")
        events = [
            {"type": "http.disconnect"}
            if piece is None
            else {"type": "http.request", "body": piece, "more_body": number < len(pieces)}
            for number, piece in enumerate(pieces, 1)
        ]
        events.reverse()
        sent: list[Any] = []

        gone = asyncio.Event()

        async def receive() -> Any:
            if events:
                return events.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(event: Any) -> None:
            sent.append(event)
            if event["type"] == "http.response.body" and not event.get("more_body"):
                gone.set()

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "root_path": "", "query_string": query.encode(), "app": None,
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "state": {}, "extensions": {},
        }  # fmt: skip
        del scope["app"]
        try:
            await self._application(scope, receive, send)
        except Exception:
            if not sent:
                raise  # no server error handler: the server would answer 500
        if not sent:
            return None
        start, *bodies = sent
        self.pieces = bodies
        named = {name.decode().lower(): value.decode() for name, value in start["headers"]}
        return Reply(start["status"], named, b"".join(each.get("body", b"") for each in bodies))

    def close(self) -> None:
        self._runner.run(self.app.close_async())
        self._runner.close()

    @property
    def raw(self) -> Raw:
        assert self._raw is not None
        return self._raw

    @property
    def rows(self) -> int:
        return int(self.raw.value("SELECT count(*) FROM txbox_inbox"))

    @property
    def effects(self) -> int:
        return effects(self.raw)


@contextmanager
def opened(framework: str, url: str, raw: Callable[[str], Raw], **options: Any) -> Iterator[Shop]:
    connection = raw(url)
    create_effects(connection)
    with ExitStack() as stack:
        alias = "default"
        if framework == "django":
            alias = stack.enter_context(configured(url))
            options["django"] = alias
            app = App(**options)
        else:
            app = App(url, **options)
        application = once_service.make(framework, app, alias=alias, codec=options.get("codec"))
        shop = Shop(application, app, connection, asgi=framework in ASGI)
        stack.callback(shop.close)
        yield shop


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def shop(framework: str, sqlite_url: str, raw: Callable[[str], Raw]) -> Iterator[Shop]:
    with opened(framework, sqlite_url, raw) as shop:
        yield shop


@every_product
@pytest.mark.parametrize("framework", ["fastapi", "litestar", "django"])
def test_a_repeat_gets_the_answer_of_the_first(
    framework: str, product: str, new_database: NewDatabase, raw: Callable[[str], Raw]
) -> None:
    with opened(framework, new_database(product), raw) as shop:
        first, again = shop.post("/orders/1"), shop.post("/orders/1")
        assert first.status == 201
        assert again.kept == first.kept
        assert "idempotent-replayed" not in first.headers
        assert again.headers["idempotent-replayed"] == "true"
        assert "set-cookie" in first.headers
        assert "set-cookie" not in again.headers
        assert "x-other" not in again.headers
        assert (shop.effects, shop.rows) == (1, 1)
        if product in ("mariadb", "mysql"):
            # InnoDB shows a COMMIT before it is on disk: that of a repeat, which has written, is behind it
            moved = "SELECT updated_at > processed_at FROM txbox_inbox"
            assert shop.raw.value(moved)
        # other requests and other callers under the key
        assert shop.post("/orders/2").status == 422
        assert shop.post("/orders/1?how=x").status == 422
        assert shop.post("/orders/1", body=b'{"a": 1}').status == 422
        assert shop.post("/orders/1", user="bob").kept[3] != first.body
        assert shop.post("/orders/1", KEY + "x").kept[3] != first.body
        assert (shop.effects, shop.rows) == (3, 3)


def test_nobody_sees_the_answer_of_another_caller(shop: Shop) -> None:
    first = shop.post("/orders/1")
    assert shop.post("/orders/1", user=None).status == 401
    assert shop.post("/orders/1", user="an").body != first.body
    # a name and a key that together look like another caller's
    assert shop.post("/orders/1", "k", user="ann%20x").status == 201
    assert shop.post("/orders/1", "k", user="ann x").headers.get("idempotent-replayed") is None
    assert shop.post("/optional/1", f"ann {KEY}").status == 400
    assert shop.post("/optional/1").headers.get("idempotent-replayed") is None


@pytest.mark.parametrize("how", ["raise", "bug", "refuse", "large", "stream"])
def test_a_failure_leaves_nothing(shop: Shop, how: str) -> None:
    try:
        first = shop.post(f"/orders/1?how={how}")
    except Exception as error:  # noqa: BLE001  # as a server, which answers it with 500
        first, cause = None, error.__cause__ or error
        assert isinstance(cause, (ZeroDivisionError, ConfigurationError))
    if how == "stream" and first is not None and first.status == 201:
        # a whole answer by the time it is kept
        assert first.body == b"ab"
        assert shop.post(f"/orders/1?how={how}").body == b"ab"
        return
    if first is not None:
        assert first.status in (403, 409, 500)
    assert (shop.effects, shop.rows) == (0, 0)
    assert shop.post("/orders/1").status == 201


@pytest.mark.parametrize("framework", ASGI)
def test_what_is_not_kept_is_sent_as_it_is_made(shop: Shop) -> None:
    """An endless stream would never be committed, and fill the memory."""
    reply = shop.post("/optional/1?how=stream", None)
    assert (reply.status, reply.body) == (201, b"ab")
    assert len(shop.pieces) > 1
    assert (shop.effects, shop.rows) == (1, 0)


@pytest.mark.parametrize("framework", ["flask", "django"])
def test_a_form_that_was_parsed_before_is_compared(shop: Shop) -> None:
    kind = "multipart/form-data; boundary=b"

    def posted(amount: int, file: str) -> Reply:
        fields = "".join(
            f'--b\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n{value}\r\n'
            for name, more, value in (("amount", "", amount), ("file", '; filename="f"', file))
        )
        return shop.post("/orders/1?parse=1", body=f"{fields}--b--\r\n".encode(), kind=kind)

    first = posted(30, "x")
    assert first.status == 201
    assert posted(30, "x").kept == first.kept
    assert posted(31, "x").status == 422
    assert posted(30, "y").status == 422


# -- the client, or the database, goes away ----------------------------------------------------------

_HEADERS = {"content-type": "application/json", "idempotency-key": KEY, "x-user": "ann"}


@pytest.mark.parametrize("framework", ASGI)
def test_half_a_request_does_not_run(shop: Shop) -> None:
    assert shop.run(shop.post_async("/orders/1", _HEADERS, (b"{", None))) is None
    assert (shop.effects, shop.rows) == (0, 0)
    # its body would be another one
    assert shop.post("/orders/1").status == 201


@pytest.mark.parametrize("framework", ASGI)
def test_a_cancelled_request_leaves_nothing(shop: Shop) -> None:
    """A server that gives up cancels it: its transaction and its key are free then."""
    entered, go = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        assert go.wait(DEADLINE_S)

    async def cancelled() -> None:
        asking = asyncio.create_task(shop.post_async("/orders/1?how=wait", _HEADERS))
        assert await asyncio.to_thread(entered.wait, DEADLINE_S)
        asking.cancel()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await asking

    GATE["wait"] = wait
    shop.run(cancelled())
    assert (shop.effects, shop.rows) == (0, 0)
    assert shop.post("/orders/1?how=wait").status == 201
    assert (shop.effects, shop.rows) == (1, 1)


def _scope() -> dict[str, Any]:
    return {
        "type": "http",
        "method": "POST",
        "path": "/",
        "headers": [(b"idempotency-key", KEY.encode())],
    }


async def _whole() -> dict[str, Any]:
    return {"type": "http.request", "body": b"{}"}


async def _none(_event: Any) -> None:
    raise AssertionError("nothing is sent")


def _claims_again(place: Once) -> None:
    """The key is free, and so is the database."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        place.claim(SimpleNamespace(scope=scope), caller=ANONYMOUS)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(Answers(application)(_scope(), _whole, _none))


def test_a_thread_that_claims_when_its_request_is_cancelled_gives_back_what_it_gets(
    sqlite_url: str,
) -> None:
    entered, go, ended = threading.Event(), threading.Event(), threading.Event()

    @contextmanager
    def begin() -> Iterator[Any]:
        entered.set()
        assert go.wait(DEADLINE_S)
        with app.transaction() as tx:
            yield tx

    def claim(scope: Any) -> None:
        with pytest.raises(RuntimeError, match="cancelled"):
            place.claim(SimpleNamespace(scope=scope), caller=ANONYMOUS)
        ended.set()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.to_thread(claim, scope)

    async def cancelled() -> None:
        asking = asyncio.create_task(Answers(application)(_scope(), _whole, _none))
        assert await asyncio.to_thread(entered.wait, DEADLINE_S)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        go.set()
        assert await asyncio.to_thread(ended.wait, DEADLINE_S)

    with App(sqlite_url) as app:
        place = Once(Inbox("pay"), begin)
        asyncio.run(cancelled())
        _claims_again(place)


def test_a_request_that_is_cancelled_again_and_again_leaves_nothing(sqlite_url: str) -> None:
    """As anyio does, while all threads of the loop are busy: what has not begun would be dropped."""
    busy = threading.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        place.claim(SimpleNamespace(scope=scope), caller=ANONYMOUS)
        claimed.set()
        await asyncio.Event().wait()

    async def cancelled() -> None:
        threads = ThreadPoolExecutor(1)
        asyncio.get_running_loop().set_default_executor(threads)
        threads.submit(busy.wait, DEADLINE_S)
        asking = asyncio.create_task(Answers(application)(_scope(), _whole, _none))
        await claimed.wait()
        while not asking.done():
            asking.cancel()
            await asyncio.sleep(0)
        busy.set()

    with App(sqlite_url) as app:
        place, claimed = Once(Inbox("pay"), app.transaction), asyncio.Event()
        asyncio.run(cancelled())
        _claims_again(place)


def test_without_its_database_it_is_503(framework: str) -> None:
    with closed_port() as port, ExitStack() as stack:
        url, alias = f"postgresql://nobody@127.0.0.1:{port}/none", "default"
        if framework == "django":
            alias = stack.enter_context(configured(url))
            app = App(django=alias)
        else:
            app = App(url)
        application = once_service.make(framework, app, alias=alias)
        shop = Shop(application, app, None, asgi=framework in ASGI)
        stack.callback(shop.close)
        for path, key in (("/orders/1", KEY), ("/optional/1", None)):
            reply = shop.post(path, key)
            assert (reply.status, reply.headers["retry-after"]) == (503, "1")
            assert reply.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    ("product", "scheme"),
    [
        ("postgresql", "postgresql+psycopg"), ("postgresql", "postgresql+asyncpg"), ("mysql", "mysql+pymysql"),
        ("sqlite", "sqlite"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("orm_session", [False, True], ids=["engine", "session"])
def test_in_a_transaction_of_ones_own_engine(
    product: str,
    scheme: str,
    orm_session: bool,
    new_database: NewDatabase,
    raw: Callable[[str], Raw],
) -> None:
    url = new_database(product)
    create_effects(raw(url))
    received = Received([KEY], "POST", b"/orders/1", b"", b"")
    effect = sa.text("INSERT INTO effect (message_id, note) VALUES ('1', '')")
    answer, target = Answer(201, (), b"{}"), f"{scheme}:{url.partition(':')[2]}"

    async def asked() -> None:
        is_async = scheme.endswith("asyncpg")
        engine: Any = (sa_async.create_async_engine if is_async else sa.create_engine)(target)
        begin = engine.begin
        if orm_session:
            begin = (sa_async.async_sessionmaker if is_async else orm.sessionmaker)(engine).begin
        here, elsewhere = (Requests(Inbox("pay"), begin, is_async=is_async) for _ in range(2))
        claim = await here.claim(received, 7)
        done = claim.tx.execute(effect)
        if is_async:
            await done
        if product == "postgresql":
            with pytest.raises(Refused) as refused:
                await elsewhere.claim(received, 7)
            assert refused.value.answer.status == 409
        assert await claim.finish(answer) is answer
        with pytest.raises(Refused) as refused:
            await elsewhere.claim(received, 7)
        assert (refused.value.answer.status, refused.value.answer.body) == (201, b"{}")
        disposed = engine.dispose()
        if is_async:
            await disposed

    asyncio.run(asked())
    assert effects(raw(url)) == 1


def test_a_fault_of_the_route_that_shows_at_commit_is_no_503(sqlite_url: str) -> None:
    """A session writes at COMMIT; that a table is missing has the class of a database that is away."""
    engine = sa.create_engine(sqlite_url)
    missing = orm.registry()

    @missing.mapped
    class Missing:
        __tablename__ = "missing"
        id: orm.Mapped[int] = orm.mapped_column(primary_key=True)

    requests = Requests(Inbox("pay"), orm.sessionmaker(engine).begin)
    received = Received([KEY], "POST", b"/orders/1", b"", b"")
    claim = blocking(requests.claim(received, 7))
    claim.tx.add(Missing())
    with pytest.raises((OperationalError, StoreError)):
        blocking(claim.finish(Answer(201, (), b"{}")))
    # nothing was kept
    blocking(blocking(requests.claim(received, 7)).abort(ZeroDivisionError()))
    engine.dispose()


def test_of_ones_own_engine_or_pool_it_is_503_too() -> None:
    received = Received([KEY], "POST", b"/orders/1", b"", b"")
    with closed_port() as port:
        engine = sa.create_engine(f"postgresql+psycopg://nobody@127.0.0.1:{port}/none")
        full = sa.create_engine(
            "sqlite://", poolclass=sa.QueuePool, pool_size=1, max_overflow=0, pool_timeout=0
        )
        with full.connect():
            for begin in (engine.begin, orm.sessionmaker(engine).begin, full.begin):
                with pytest.raises(Refused) as refused:
                    # a session connects when it is used
                    blocking(Requests(Inbox("place-order"), begin).claim(received, "ann"))
                assert refused.value.answer.status == 503
        full.dispose()


@pytest.mark.parametrize("cut", ["before", "after"])
def test_a_commit_without_an_answer_is_503_and_the_repeat_learns_its_end(
    cut: Literal["before", "after"], postgresql_url: str, raw: Callable[[str], Raw]
) -> None:
    connection = raw(postgresql_url)
    create_effects(connection)
    with Proxy(postgresql_url) as proxy, App(proxy.url) as app:
        shop = Shop(once_service.make("flask", app), app, connection, asgi=False)
        proxy.cut = cut
        first = shop.post("/orders/1")
        assert (first.status, first.headers["retry-after"]) == (503, "1")
        assert shop.effects == (cut == "after")
        again = shop.post("/orders/1")
        assert again.status == 201
        assert ("idempotent-replayed" in again.headers) == (cut == "after")
        assert (shop.effects, shop.rows) == (1, 1)
        shop.close()


def test_an_error_is_kept_if_asked_for_without_its_effect(shop: Shop) -> None:
    first, again = shop.post("/orders/1?how=keep"), shop.post("/orders/1?how=keep")
    assert first.status == 402
    assert again.kept == first.kept
    assert (shop.effects, shop.rows) == (0, 1)


def test_a_key_is_required_and_bounded(shop: Shop) -> None:
    for key in (None, "", '"', "a b", "a,b", "a" * 256, '"a', "é"):
        reply = shop.post("/orders/1", key)
        assert reply.status == 400, key
        assert reply.headers["content-type"] == "application/problem+json"
        assert json.loads(reply.body)["status"] == 400
    assert shop.effects == 0
    # the draft writes it as a string of structured fields
    first = shop.post("/orders/1", "a" * 255, user="u" * 300)
    assert shop.post("/orders/1", f'"{"a" * 255}"', user="u" * 300).kept == first.kept
    # where it is optional, each request without one runs
    assert [shop.post("/optional/1", None).status for _ in range(2)] == [201, 201]
    assert (shop.effects, shop.rows) == (3, 1)


@pytest.mark.parametrize("framework", ["fastapi", "flask"])
def test_an_answer_is_encrypted(framework: str, sqlite_url: str, raw: Callable[[str], Raw]) -> None:
    with opened(framework, sqlite_url, raw, codec=AesGcm({"k": new_key()})) as shop:
        first = shop.post("/orders/1")
        kept = bytes(shop.raw.value("SELECT result FROM txbox_inbox"))
        assert b"nonce" not in kept
        assert shop.post("/orders/1").kept == first.kept


def test_operators_see_keys_and_answers_until_they_are_pruned(
    sqlite_url: str, raw: Callable[[str], Raw], command: Command, serve: Serve
) -> None:
    with opened("flask", sqlite_url, raw) as shop:
        first = shop.post("/orders/1")
        message_id = f"ann {KEY}"
        at = ("--database", sqlite_url)
        (listed,) = command("list", "--consumer", "place-order", "--json", *at).json["messages"]
        assert (listed["message_id"], listed["key"], listed["status"], listed["topic"]) == (
            message_id, KEY, "processed", "POST /orders/<int:number>",
        )  # fmt: skip
        assert message_id in command("explain", message_id, *at).out
        nonce = json.loads(first.body)["nonce"]
        assert nonce not in command("show", "place-order", message_id, *at).out
        assert nonce in command("show", "place-order", message_id, "--reveal", *at).out
        browser = serve(shop.app)
        assert message_id in browser.get("/messages?consumer=place-order").text
        page = "/message?" + urlencode({"consumer": "place-order", "message_id": message_id})
        assert "POST /orders/" in browser.get(page).text
        # as all other rows
        command("prune", "--consumer", "place-order", "--older-than", "1h", "--yes", *at)
        assert shop.rows == 1
        command("prune", "--consumer", "place-order", "--older-than", "0s", "--yes", *at)
        assert shop.rows == 0
        assert shop.post("/orders/1").body != first.body


# -- one request at a time ------------------------------------------------------------------------


@every_product
def test_a_repeat_does_not_wait(product: str, new_database: NewDatabase) -> None:
    """Neither in the process of the first request nor in another one; on SQLite nobody else writes anyway."""
    received = Received([KEY], "POST", b"/orders/1", b"", b"")
    with App(new_database(product)) as app:
        inbox = Inbox("place-order")
        here, elsewhere = (Requests(inbox, app.transaction) for _ in range(2))
        claim = blocking(here.claim(received, "ann"))
        for requests in (here, elsewhere) if product != "sqlite" else (here,):
            with pytest.raises(Refused) as refused:
                blocking(requests.claim(received, "ann"))
            assert refused.value.answer.status == 409
            assert dict(refused.value.answer.headers)["retry-after"] == "1"
            if product != "sqlite":
                # other callers are not in the way
                other = blocking(requests.claim(received, ANONYMOUS))
                blocking(other.abort(ZeroDivisionError()))
        answer = Answer(201, (("content-type", "text/plain"), ("x-other", "x")), b"caf\xe9 \xff")
        assert blocking(claim.finish(answer)) is answer
        with pytest.raises(Refused) as refused:
            blocking(elsewhere.claim(received, "ann"))
        assert refused.value.answer.body == answer.body
        assert refused.value.answer.headers == (
            ("content-type", "text/plain"), ("idempotent-replayed", "true"),
        )  # fmt: skip


@every_product
def test_a_route_that_ends_its_transaction_is_an_error(
    product: str, new_database: NewDatabase, raw: Callable[[str], Raw]
) -> None:
    """What it committed stays, so its key is spent, and there is no answer to give."""
    url = new_database(product)
    create_effects(raw(url))
    received = Received([KEY], "POST", b"/orders/1", b"", b"")
    with App(url) as app:
        requests = Requests(Inbox("pay"), app.transaction)
        claim = blocking(requests.claim(received, "ann"))
        add_effect(claim.tx, 1)
        claim.tx.commit()
        with pytest.raises(StoreError):
            blocking(claim.finish(Answer(201, (), b"{}")))
        with pytest.raises(Refused) as refused:
            blocking(requests.claim(received, "ann"))
        assert refused.value.answer.status == 409
        assert "retry-after" not in dict(refused.value.answer.headers)
    assert effects(raw(url)) == 1


def test_a_route_that_rolls_back_and_writes_again_is_an_error(
    postgresql_url: str, raw: Callable[[str], Raw]
) -> None:
    """Its row is gone: what it writes then would be there without a key, and again with the next repeat."""
    connection = raw(postgresql_url)
    create_effects(connection)
    received = Received([KEY], "POST", b"/orders/1", b"", b"")
    requests = Requests(Inbox("pay"), lambda: psycopg.connect(postgresql_url))
    claim = blocking(requests.claim(received, "ann"))
    claim.tx.rollback()
    add_effect(claim.tx, 1)
    with pytest.raises(StoreError):
        blocking(claim.finish(Answer(201, (), b"{}")))
    assert effects(connection) == 0


def test_a_route_that_goes_on_after_a_failed_statement_is_an_error(postgresql_url: str) -> None:
    """PostgreSQL would answer its COMMIT with ROLLBACK, and the client would hear of an order that is not there."""
    received = Received([KEY], "POST", b"/orders/1", b"", b"")
    with App(postgresql_url) as app:
        requests = Requests(Inbox("pay"), app.transaction)
        claim = blocking(requests.claim(received, "ann"))
        with pytest.raises(psycopg.errors.UndefinedTable):
            claim.tx.execute("SELECT * FROM missing")
        with pytest.raises(StoreError):
            blocking(claim.finish(Answer(201, (), b"{}")))
        # its key is free
        blocking(blocking(requests.claim(received, "ann")).abort(ZeroDivisionError()))


def test_a_request_in_flight_is_409(shop: Shop, framework: str) -> None:
    entered, go = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        assert go.wait(DEADLINE_S)

    async def both() -> tuple[Reply | None, Reply | None]:
        first = asyncio.create_task(shop.post_async("/orders/1?how=wait", _HEADERS))
        assert await asyncio.to_thread(entered.wait, DEADLINE_S)
        again = await shop.post_async("/orders/1?how=wait", _HEADERS)
        go.set()
        return await first, again

    GATE["wait"] = wait
    if framework in ASGI:
        first, again = shop.run(both())
    else:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(shop.post, "/orders/1?how=wait")
            assert entered.wait(DEADLINE_S)
            again = shop.post("/orders/1?how=wait")
            go.set()
            first = asked.result()
    assert first.status == 201
    assert again.status == 409
    assert again.headers["retry-after"] == "1"
    assert shop.post("/orders/1?how=wait").kept == first.kept


# -- what is kept ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [b"", b'{"a": 1}', b"[1,\n 2]\n}", b"{\n}", b"plain\n}", b"\xff\x00", b"\x00", "Zo\u00eb".encode(), b"[" * 5000],
    ids=repr,
)  # fmt: skip
def test_a_body_comes_back_byte_for_byte(body: bytes) -> None:
    answer = Answer(200, (("content-type", "text/x"), ("etag", '"\xe9"')), body)
    kept = answer.encoded()
    assert Answer.decoded(kept) == answer
    if len(body) < 5000:
        assert json.loads(kept)["status"] == 200


def test_headers_cannot_smuggle() -> None:
    for headers in ((("etag", "a\r\nset-cookie: b"),), (("a:b", "c"),)):
        with pytest.raises(ConfigurationError, match="HTTP does not allow"):
            Answer(200, headers, b"").encoded()
    kept = Answer(200, (("etag", "a"),), b"{}").encoded().replace(b'"a"', b'"a\\r\\nb: c"')
    with pytest.raises(ConfigurationError, match="HTTP does not allow"):
        Answer.decoded(kept)


@pytest.mark.parametrize(
    "options",
    [{"headers": ["Set-Cookie"]}, {"keep": [200]}, {"retry_after": 1}],
    ids=str,
)
def test_options_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Requests(Inbox("place-order"), lambda: None, **options)


@pytest.mark.parametrize(
    "caller", [None, "", True, object()], ids=["none", "empty", "bool", "object"]
)
def test_a_request_without_a_caller_does_not_run(caller: object, sqlite_url: str) -> None:
    received = Received([KEY], "POST", b"/", b"", b"")
    with App(sqlite_url) as app:
        requests = Requests(Inbox("place-order"), app.transaction)
        with pytest.raises(ConfigurationError, match="caller"):
            blocking(requests.claim(received, caller))


# -- processes that are killed -----------------------------------------------------------------------


class Server:
    """A server process that is started again when it has died."""

    def __init__(self, framework: str, url: str, deadly: Path) -> None:
        self._command = [sys.executable, "-m", "tests.support.once_service", framework, url]
        self._environment = {**os.environ, DEADLY: str(deadly)}
        self._lock = threading.Lock()
        self.deaths = 0
        self._process, self.port = self._started()

    def _started(self) -> tuple[subprocess.Popen[str], int]:
        process = subprocess.Popen(
            self._command, cwd=ROOT, env=self._environment, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        return process, int(process.stdout.readline())

    def post(self, key: str) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            connection.request(
                "POST", "/orders/1", b"{}", {"Idempotency-Key": key, "x-user": "ann"}
            )
            response = connection.getresponse()
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, headers, response.read())
        finally:
            connection.close()

    def revive(self) -> None:
        with self._lock:
            if self._process.poll() is not None:
                assert self._process.returncode == -signal.SIGKILL
                self.deaths += 1
                self._close()
                self._process, self.port = self._started()

    def _close(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._close()


def _client(servers: list[Server], number: int) -> Reply:
    """Repeat until there is an answer, as clients with a key do."""

    def tried() -> Reply | None:
        nonlocal number
        server = servers[number % len(servers)]
        try:
            reply = server.post(KEY)
        except (OSError, http.client.HTTPException):
            server.revive()
            number += 1
            return None
        # 503: a wait for SQLite's one writer at a time may take too long
        if reply.status in (409, 503):
            assert reply.headers["retry-after"] == "1"
            return None
        return reply

    # two servers start, and one of them again
    deadline = time.monotonic() + 5 * DEADLINE_S
    while time.monotonic() < deadline:
        if reply := tried():
            return reply
        time.sleep(
            1
        )  # as Retry-After says: fifty who do not wait keep a busy machine from answering any
    raise AssertionError("no answer")


def _killed(framework: str, url: str, connection: Raw, directory: Path, clients: int) -> None:
    create_effects(connection)
    deadly = directory / "deadly"
    deadly.touch()
    with ExitStack() as stack, ThreadPoolExecutor(clients) as pool:
        servers = [Server(framework, url, deadly) for _ in range(2)]
        for server in servers:
            stack.callback(server.close)
        replies = list(pool.map(lambda number: _client(servers, number), range(clients)))
        assert sum(server.deaths for server in servers) == 1
    assert {reply.kept for reply in replies} == {replies[0].kept}
    assert replies[0].status == 201
    assert all("idempotent-replayed" in reply.headers for reply in replies)
    assert effects(connection) == 1


def test_a_server_is_killed_between_commit_and_answer(
    postgresql_url: str, raw: Callable[[str], Raw], tmp_path: Path
) -> None:
    _killed("flask", postgresql_url, raw(postgresql_url), tmp_path, clients=8)


@pytest.mark.slow
@every_product
def test_fifty_clients_with_one_key_while_a_server_is_killed(
    framework: str,
    product: str,
    new_database: NewDatabase,
    raw: Callable[[str], Raw],
    tmp_path: Path,
) -> None:
    url = new_database(product)
    _killed(framework, url, raw(url), tmp_path, clients=50)
