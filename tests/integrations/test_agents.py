"""Calls of tools run once: which call it is, what a repeat gets, and what waits for a person or a worker."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import aiosqlite
import psycopg
import pytest

from tests.integrations.conftest import Rows
from tests.support.databases import NewDatabase
from tests.support.effect import AT_ONCE
from txbox import App, ConfigurationError, Message, PayloadMismatch, RetryPolicy, StoreError
from txbox.admin import Admin
from txbox.admin.tables import InboxFilter, QuarantineFilter
from txbox.cli import main
from txbox.encryption import AesGcm, new_key
from txbox.integrations.agents import (
    APPROVAL,
    CallFailed,
    CallRefused,
    CallWaiting,
    once,
    run,
)
from txbox.testing import drain, drain_async

NOW = timedelta(0)


@dataclass
class Refund:
    order: int
    on: date
    number: int


class Shop:
    """A tool that writes, and then fails as often as told."""

    def __init__(self, database: Path, **options: Any) -> None:
        self.app = App(f"sqlite:///{database}", observers=[])
        self.failures: list[Exception] = []
        self.runs = 0

        @once(self.app, "refund", wait=NOW, **options)
        def refund(tx: sqlite3.Connection, order: int, cents: int = 100) -> Refund:
            """Refund an order."""
            tx.execute("INSERT INTO ledger VALUES (?)", (order,))
            if self.failures:
                raise self.failures.pop()
            self.runs += 1
            return Refund(order, date(2026, 11, 29), self.runs)

        self.refund = refund
        self.admin = Admin(self.app)

    def decide(self, verb: str, message_id: str) -> None:
        where = QuarantineFilter(consumer="refund", message_id=message_id)
        getattr(self.admin, verb)(where, reason="seen by Ann")


@pytest.fixture
def shop(database: Path) -> Iterator[Shop]:
    shop = Shop(database)
    with shop.app:
        yield shop


@pytest.fixture
def careful(database: Path) -> Iterator[Shop]:
    """Its refunds of more than 1,000 cents wait for a person."""
    shop = Shop(database, approve=lambda order, cents=100: cents > 1000, retry=AT_ONCE)
    with shop.app:
        yield shop


LEDGER = "SELECT amount FROM ledger ORDER BY 1"


# -- which call it is --------------------------------------------------------------------------------


def test_a_run_from_its_beginning_gets_the_same_answers(shop: Shop, rows: Rows) -> None:
    def play() -> list[Refund]:
        with run("ticket-1"):
            # the second and the third are the same call, written in two ways, and both are meant
            return [shop.refund(1), shop.refund(2), shop.refund(2, cents=100), shop.refund(order=2)]

    first = play()
    assert [each.number for each in first] == [1, 2, 3, 4]
    assert first[0] == Refund(1, date(2026, 11, 29), 1)
    assert play() == first
    assert rows(LEDGER) == [(1,), (2,), (2,), (2,)]
    assert rows("SELECT DISTINCT consumer, topic, key FROM txbox_inbox") == [
        ("refund", "effect:tool:refund", "ticket-1")
    ]
    with run("ticket-2"):
        assert shop.refund(1).number == 5


def test_a_call_is_known_by_the_models_id(shop: Shop, rows: Rows) -> None:
    with run("ticket 1#", call="call 1"):
        first = shop.refund(1)
        assert shop.refund(1) == first
    for other in (run("ticket 1#", call="call 2"), run("ticket-2", call="call 1")):
        with other:
            assert shop.refund(1) != first
    with run("ticket 1#", call="call 1"):
        assert shop.refund(1) == first
        with pytest.raises(PayloadMismatch, match="with other arguments: nothing was done"):
            shop.refund(2)
    assert rows(LEDGER) == [(1,), (1,), (1,)]
    assert rows("SELECT * FROM txbox_quarantine") == []  # its caller has been told
    ids = rows("SELECT message_id FROM txbox_inbox ORDER BY arrival")
    assert ids[0] == ("ticket%201%23 call%201",)
    # a text that is none, as JSON can carry it
    with run("ticket \ud800", call="call 1"):
        assert shop.refund(1) == shop.refund(1)


def test_a_call_is_known_by_its_arguments_where_these_say_so(database: Path, rows: Rows) -> None:
    shop = Shop(database, id=lambda order, **_: f"refund-{order}")
    assert shop.refund(1) == shop.refund(1)
    with run("ticket-1"):
        assert shop.refund(1).number == 1
        with pytest.raises(PayloadMismatch):
            shop.refund(1, 200)
    assert rows(LEDGER) == [(1,)]


def test_a_failed_call_keeps_nothing_and_its_repeat_is_the_same_call(
    shop: Shop, rows: Rows
) -> None:
    """Else the run that starts again would meet a first call without a row, and refund a second time."""
    shop.failures = [ValueError("the bank is away")]
    with run("ticket-1"):
        with pytest.raises(ValueError, match="the bank is away"):
            shop.refund(1)
        assert rows(LEDGER) == rows("SELECT * FROM txbox_inbox") == []
        done = shop.refund(1)
    with run("ticket-1"):
        assert shop.refund(1) == done
    assert rows(LEDGER) == [(1,)]


def test_equal_calls_at_the_same_time_are_several(postgresql_url: str) -> None:
    app, together = App(postgresql_url), threading.Barrier(3)

    @once(app, "refund")
    def refund(tx: psycopg.Connection, order: int) -> int:
        together.wait(30)
        return order

    with app, run("ticket-1"), ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(contextvars.copy_context().run, refund, 1) for _ in range(3)]
        assert [call.result() for call in calls] == [1, 1, 1]
        numbers = {
            row.message_id.rpartition(".")[2]
            for row in Admin(app).list(InboxFilter(consumer="refund"))
        }
    assert numbers == {"0", "1", "2"}


def test_a_call_that_runs_elsewhere_is_told_so(postgresql_url: str) -> None:
    app = App(postgresql_url)

    @once(app, "refund", wait=NOW)
    def refund(tx: psycopg.Connection, order: int) -> int:
        if order == 1:
            with pytest.raises(CallWaiting, match="runs elsewhere"):
                again()
        return order

    def again() -> None:
        with run("ticket-1", call="call-1"):
            refund(1)

    with app, run("ticket-1", call="call-1"):
        assert refund(1) == 1
        assert refund(1) == 1


def test_a_call_without_an_id_is_refused(shop: Shop, rows: Rows) -> None:
    with pytest.raises(ConfigurationError, match="outside a run"):
        shop.refund(1)
    for wrong in ("", True, 1.5):
        with pytest.raises(ConfigurationError, match="needs the id"), run(wrong):  # type: ignore[arg-type]
            pass
    with pytest.raises(ConfigurationError, match="call= is"), run("ticket-1", call=""):
        pass
    with run("ticket-1"), pytest.raises(ConfigurationError, match="not JSON"):
        shop.refund(object())  # type: ignore[arg-type]
    assert rows(LEDGER) == []


# -- results -----------------------------------------------------------------------------------------


def test_a_result_that_cannot_be_kept_commits_nothing(shop: Shop, rows: Rows) -> None:
    @once(shop.app, "strange")
    def strange(tx: sqlite3.Connection) -> Any:
        tx.execute("INSERT INTO ledger VALUES (1)")
        return object()

    with run("ticket-1"), pytest.raises(ConfigurationError, match="cannot be kept"):
        strange()
    assert rows(LEDGER) == rows("SELECT * FROM txbox_inbox") == []


def swallows(tx: psycopg.Connection) -> None:
    with suppress(psycopg.errors.UndefinedTable):
        tx.execute("SELECT 1 FROM no_such_table")


def rolls_back(tx: psycopg.Connection) -> None:
    tx.rollback()


@pytest.mark.parametrize("broken", [swallows, rolls_back])
def test_a_tool_that_loses_its_row_is_no_success(
    postgresql_url: str, broken: Callable[[psycopg.Connection], None]
) -> None:
    app = App(postgresql_url, observers=[])

    @once(app, "refund")
    def refund(tx: psycopg.Connection, order: int) -> int:
        broken(tx)
        return order

    with app, run("ticket-1", call="c-1"):
        for _ in range(2):
            with pytest.raises(StoreError, match="transaction"):
                refund(1)
        assert Admin(app).list(InboxFilter(consumer="refund")) == []


def test_a_result_is_encrypted_and_may_be_forgotten(database: Path, rows: Rows) -> None:
    app = App(f"sqlite:///{database}", codec=AesGcm({"k": new_key()}))

    @once(app, "tell")
    def tell(tx: sqlite3.Connection) -> str:
        return "a secret"

    with app, run("ticket-1", call="c"):
        assert tell() == tell() == "a secret"
        ((kept,),) = rows("SELECT result FROM txbox_inbox")
        assert b"secret" not in kept
        with closing(sqlite3.connect(database)) as connection, connection:
            connection.execute("UPDATE txbox_inbox SET result = NULL")
        with pytest.raises(CallFailed, match="not known any more"):
            tell()


def test_what_the_model_sees_of_a_tool(shop: Shop) -> None:
    seen = inspect.signature(shop.refund)
    assert list(seen.parameters) == ["order", "cents"]
    assert seen.return_annotation is Refund
    assert shop.refund.__doc__ == "Refund an order."


def test_what_the_framework_passes_is_not_compared(database: Path, rows: Rows) -> None:
    app = App(f"sqlite:///{database}")

    @once(app, "refund", context=["ctx"])
    def refund(tx: sqlite3.Connection, ctx: object, order: int) -> int:
        tx.execute("INSERT INTO ledger VALUES (?)", (order,))
        return order

    with app:
        for _ in range(2):
            with run("ticket-1"):
                assert refund(object(), 1) == 1
    assert rows(LEDGER) == [(1,)]


def test_an_effect_of_a_tool_is_carried_out_once_for_its_call(careful: Shop) -> None:
    """Also where it has the tool's name."""
    keys: list[str] = []

    @careful.app.effect("refund")
    def pay_back(message: Message[Any]) -> None:
        keys.append(message.idempotency_key)

    @once(careful.app, "inform", approve=False)
    def inform(tx: sqlite3.Connection, to: str) -> str:
        return careful.app.effects.stage(tx, "refund", {"to": to})

    effects = set[str]()
    for _ in range(2):
        with run("ticket-1"):
            effects.add(inform("ann@example.org"))
    drain(careful.app)
    assert keys == [f"effect:refund:{effect}" for effect in effects]
    assert careful.runs == 0


# -- a person ----------------------------------------------------------------------------------------


def dear(shop: Shop, call: str, order: int = 1, cents: int = 5000) -> Refund:
    with run("ticket-1", call=call):
        return shop.refund(order, cents)


def test_a_call_waits_for_a_person_and_a_worker_carries_it_out(
    careful: Shop, rows: Rows, capsys: pytest.CaptureFixture[str]
) -> None:
    with run("ticket-1"):
        assert careful.refund(9).number == 1  # cheap
    for _ in range(2):
        with pytest.raises(CallWaiting, match="approval of a person"):
            dear(careful, "c-1")
    with pytest.raises(PayloadMismatch):
        dear(careful, "c-1", order=2)
    (waiting,) = careful.admin.list(QuarantineFilter(consumer="refund", reason=APPROVAL))
    assert (waiting.message_id, waiting.key) == ("ticket-1 c-1", "ticket-1")
    (explained,) = careful.admin.explain(waiting.message_id).places
    assert "accept" in str(explained)

    words = ["quarantine", "accept", "refund", "ticket-1 c-1", "--reason", "seen by Ann"]
    assert main([*words, "--database", careful.app.database.name]) == 0, capsys.readouterr()
    with pytest.raises(CallWaiting, match="a worker to carry it out"):
        dear(careful, "c-1")
    careful.failures = [TimeoutError("the bank is slow")]
    drain(careful.app)
    assert dear(careful, "c-1") == dear(careful, "c-1") == Refund(1, date(2026, 11, 29), 2)
    with pytest.raises(PayloadMismatch):
        dear(careful, "c-1", order=2)
    assert rows(LEDGER) == [(1,), (9,)]


def test_what_nobody_could_approve_does_not_wait(shop: Shop, rows: Rows) -> None:
    @once(shop.app, "tell", approve=True)
    def tell(tx: sqlite3.Connection, text: object) -> None: ...

    with run("ticket-1", call="c-1"):
        with pytest.raises(ConfigurationError, match="pass a reference"):
            tell("x" * 5 * 1024 * 1024)
        with pytest.raises(ConfigurationError, match="not JSON"):
            tell(object())
    assert rows("SELECT * FROM txbox_quarantine") == []


def test_a_refused_call_stays_refused(careful: Shop, rows: Rows) -> None:
    with pytest.raises(CallWaiting):
        dear(careful, "c-1")
    careful.decide("discard", "ticket-1 c-1")
    for _ in range(2):
        with pytest.raises(CallRefused, match="Nothing was done"):
            dear(careful, "c-1")
    # asked by arguments alone, a model that insists asks for the same call
    for expected in (CallWaiting, CallRefused, CallRefused):
        with run("ticket-2"):
            for _ in range(2):
                with pytest.raises(expected):
                    careful.refund(1, 5000)
        if expected is CallWaiting:
            (row,) = careful.admin.list(QuarantineFilter(consumer="refund", status="quarantined"))
            careful.decide("discard", row.message_id)
    assert rows(LEDGER) == []
    assert rows("SELECT count(*) FROM txbox_quarantine") == [(2,)]


def test_a_call_that_a_worker_gives_up_is_told_why(careful: Shop, database: Path) -> None:
    shop = Shop(database, approve=True, retry=RetryPolicy(max_attempts=1))
    with pytest.raises(CallWaiting):
        dear(shop, "c-1")
    shop.decide("accept", "ticket-1 c-1")
    shop.failures = [ValueError("no such account")]
    drain(shop.app)
    with pytest.raises(CallFailed, match="no such account"):
        dear(shop, "c-1")
    where = InboxFilter(consumer="refund", message_id="ticket-1 c-1")
    shop.admin.retry(where)
    with pytest.raises(CallWaiting, match="a worker"):
        dear(shop, "c-1")
    drain(shop.app)
    assert dear(shop, "c-1").number == 1
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("DELETE FROM txbox_inbox")  # as retention does
    with pytest.raises(CallFailed, match="not known any more"):
        dear(shop, "c-1")
    # a tool that asks nobody any more knows what was given up
    with pytest.raises(CallWaiting):
        dear(shop, "c-2")
    shop.decide("accept", "ticket-1 c-2")
    for error, verb in ((CallFailed, "discard"), (CallRefused, None)):
        shop.failures = [ValueError("no such account")]
        drain(shop.app)
        for tool in (shop, Shop(database)):
            with pytest.raises(error):
                dear(tool, "c-2")
        if verb:
            getattr(shop.admin, verb)(InboxFilter(consumer="refund", message_id="ticket-1 c-2"))


def test_a_call_waits_as_long_as_told(database: Path, rows: Rows) -> None:
    """The person accepts, and a worker carries it out, while the agent waits."""
    app = App(f"sqlite:///{database}", observers=[])

    @once(app, "refund", approve=True, wait=timedelta(seconds=30))
    def refund(tx: sqlite3.Connection, order: int) -> int:
        tx.execute("INSERT INTO ledger VALUES (?)", (order,))
        return order

    def person() -> None:
        with Admin(f"sqlite:///{database}") as admin:
            while not admin.accept(QuarantineFilter(consumer="refund")).count:
                pass
        drain(app)

    with app, ThreadPoolExecutor(1) as pool, run("ticket-1"):
        deciding = pool.submit(person)
        assert refund(1) == 1
        deciding.result()
    assert rows(LEDGER) == [(1,)]


def test_a_tool_of_another_system_is_carried_out_by_a_worker(database: Path) -> None:
    app = App(f"sqlite:///{database}", observers=[])
    keys: list[str] = []

    @once(app, "charge", transactional=False, wait=NOW, retry=AT_ONCE)
    def charge(message: Message[Any], order: int, on: date = date(2026, 11, 29)) -> str:
        keys.append(message.idempotency_key)
        assert isinstance(on, date)
        if len(keys) == 1:
            raise TimeoutError("charged, but the answer was lost")
        return f"charged {order}"

    with app, run("ticket-1", call="c-1"):
        for _ in range(2):
            with pytest.raises(CallWaiting, match="a worker"):
                charge(1, on=date(2026, 11, 30))
        drain(app)
        assert charge(1, on=date(2026, 11, 30)) == "charged 1"
        with pytest.raises(PayloadMismatch):
            charge(2)
    assert keys == ["charge:ticket-1 c-1"] * 2


def test_async_tools(database: Path, rows: Rows) -> None:
    app = App(f"sqlite:///{database}", observers=[])

    @once(app, "refund", approve=lambda order, ctx=None: order > 10, wait=NOW, context=["ctx"])
    async def refund(tx: aiosqlite.Connection, order: int, ctx: object = None) -> Refund:
        await tx.execute("INSERT INTO ledger VALUES (?)", (order,))
        return Refund(order, date(2026, 11, 29), 0)

    @once(app, "charge", transactional=False, wait=NOW)
    async def charge(message: Message[Any], order: int) -> str:
        return message.idempotency_key

    async def play() -> None:
        async with app, Admin(app) as admin:
            for _ in range(2):
                with run("ticket-1"):
                    assert (await refund(1)).order == 1
            with run("ticket-1", call="c-1"):
                for tool in (refund, charge):
                    with pytest.raises(CallWaiting):
                        await tool(11)
            where = QuarantineFilter(consumer="refund", message_id="ticket-1 c-1")
            assert (await admin.accept_async(where)).count == 1
            await drain_async(app)
            with run("ticket-1", call="c-1"):
                assert (await refund(11, ctx=object())).order == 11
                assert await charge(11) == "charge:ticket-1 c-1"

    asyncio.run(play())
    assert rows(LEDGER) == [(1,), (11,)]


# -- registration ------------------------------------------------------------------------------------


def any_order(tx: sqlite3.Connection, *orders: int) -> None: ...


def with_context(tx: sqlite3.Connection, ctx: object) -> None: ...


@pytest.mark.parametrize(
    ("function", "options", "wrong"),
    [
        (any_order, {"approve": True}, r"because of \*orders"),
        (with_context, {"approve": True, "context": ["ctx"]}, "give it a default"),
        (with_context, {"context": ["context"]}, "does not take"),
        (with_context, {"retry": AT_ONCE}, "retry= is for what a worker carries out"),
        (lambda: None, {}, "first parameter"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    database: Path, function: Any, options: dict[str, Any], wrong: str
) -> None:
    with pytest.raises(ConfigurationError, match=wrong):
        once(App(f"sqlite:///{database}"), "tool", **options)(function)


@pytest.mark.parametrize("product", ["postgresql", "mariadb", "mysql"])
def test_on_each_database(product: str, new_database: NewDatabase) -> None:
    app, runs = App(new_database(product), observers=[]), list[int]()

    @once(app, "refund", approve=lambda order: order > 10, wait=NOW)
    def refund(tx: Any, order: int) -> int:
        runs.append(order)
        return order

    with app, run("ticket-1", call="c-1"):
        assert refund(1) == refund(1) == 1
        with pytest.raises(PayloadMismatch):
            refund(2)
        with run("ticket-1", call="c-2"):
            for _ in range(2):
                with pytest.raises(CallWaiting):
                    refund(11)
            assert Admin(app).accept(QuarantineFilter(consumer="refund")).count == 1
            drain(app)
            assert refund(11) == 11
    assert runs == [1, 11]
