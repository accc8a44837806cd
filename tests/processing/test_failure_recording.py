"""What is recorded of a failure, over which rows, and what it says (promises 3.1, 3.2)."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa

from tests.support.databases import NewDatabase, names
from tests.support.meddling import Verb, drive_meddled
from tests.support.shop import (
    AT_ONCE,
    CONSUMER,
    TOPIC,
    Shop,
    add_effect,
    execute,
    lasting,
    opened,
    paid,
)
from tests.support.waiting import DEADLINE_S, eventually
from txbox import App, Inbox, Limits, Message, Outcome, RetryPolicy
from txbox.admin import Admin, InboxFilter
from txbox.events import MessageInFlight
from txbox.session import Statements, drive
from txbox.store.codec import Arrival
from txbox.store.inbox import Failure
from txbox.testing import meanwhile

Connect = Callable[[str], AbstractContextManager[Any]]

pytestmark = pytest.mark.every_database

FAILURE = Failure(error_type="ValueError", error="late", fingerprint="f", delay_s=0.0)


def recorded(shop: Shop, payload: bytes = b"{}", token: str = "") -> Any:
    """Record a failure of "a", as a worker does that comes late; returns the row if it was written."""
    message = Message[Any](id="a", topic=TOPIC, payload=payload)
    handler = next(iter(shop.app.handlers))
    arrival: Arrival = handler.arrival(message, shop.app.limits)
    written = drive(
        shop.app._any_sync(),
        shop.app.store.record_failure,
        CONSUMER,
        arrival,
        FAILURE,
        AT_ONCE,
        token=token,
        lock_timeout=shop.app.limits.lock_timeout,
    )
    return None if written is None else shop.row("a")


def snapshot(shop: Shop) -> list[tuple[Any, ...]]:
    return lasting(shop.raw) + shop.raw.rows("SELECT * FROM txbox_attempt")


def test_record_never_overwrites_a_processed_row(shop: Shop) -> None:
    shop.handler()
    shop.deliver(paid("a", b"{}"))
    before = snapshot(shop)
    assert recorded(shop) is None
    assert snapshot(shop) == before


def test_record_never_overwrites_a_dead_row(shop: Shop) -> None:
    def fails(message: Message[Any], tx: Any) -> None:
        raise ValueError("no")

    shop.handler(fails, retry=RetryPolicy(max_attempts=1))
    assert shop.deliver(paid("a", b"{}")) is Outcome.DEAD
    before = snapshot(shop)
    assert recorded(shop) is None
    assert snapshot(shop) == before


def test_record_never_overwrites_a_discarded_row(shop: Shop) -> None:
    shop.handler()
    shop.deliver(paid("a", b"{}"))
    shop.raw.execute("UPDATE txbox_inbox SET status = 'discarded'")
    before = snapshot(shop)
    assert recorded(shop) is None
    assert snapshot(shop) == before


def test_record_never_overwrites_anothers_lease(shop: Shop) -> None:
    shop.handler(mode="stored")
    shop.deliver(paid("a", b"{}"))
    ((_, token),) = shop.lease()
    before = snapshot(shop)
    for stolen in ("", "another token"):
        assert recorded(shop, token=stolen) is None
    assert snapshot(shop) == before
    written = recorded(shop, token=token)
    assert (written.status, written.attempts) == ("failed", 1)


def test_record_never_overwrites_a_pending_row(shop: Shop) -> None:
    shop.handler(mode="stored")
    shop.deliver(paid("a", b"{}"))
    before = snapshot(shop)
    assert recorded(shop) is None
    assert snapshot(shop) == before


def test_record_never_overwrites_another_payload(shop: Shop) -> None:
    shop.handler()
    assert recorded(shop, b"first").status == "failed"
    before = snapshot(shop)
    assert recorded(shop, b"second") is None
    assert snapshot(shop) == before
    assert recorded(shop, b"first").attempts == 2


def test_race_between_a_failure_and_a_success(shop: Shop) -> None:
    """The handler fails; before that is recorded, another process succeeds: the row stays processed."""
    first = [True]

    def fails_once(message: Message[Any], tx: Any) -> None:
        if first:
            first.pop()
            raise ValueError("only this once")

    handler = shop.handler(fails_once)
    raced: list[Outcome] = []

    async def interrupted(verb: Verb, statements: Statements, carried_out: Any) -> Any:
        """After the handler's roll-back another app takes the message."""
        answer = await carried_out()
        if verb == "rollback" and not raced:
            raced.append(other.process(paid("a")))
        return answer

    with App(shop.url) as other:
        other.handler(TOPIC, consumer=CONSUMER)(lambda message, tx: add_effect(tx, message.id))
        arrivals = [handler.arrival(paid("a"), Limits())]
        settled = drive_meddled(
            shop.app._any_sync(), interrupted, shop.app.protocol.deliver, handler, arrivals
        )
    assert raced == [Outcome.PROCESSED]
    assert settled["a"].outcome is Outcome.DUPLICATE
    assert (shop.row("a").status, shop.row("a").attempts, shop.effects("a")) == ("processed", 0, 1)
    assert shop.raw.value("SELECT count(*) FROM txbox_attempt") == 0


# what records a failure is the transaction behind that of the handler
RECORDS = "before:begin"


def expire(shop: Shop) -> None:
    """The worker that holds the row stands still: its lease ends, and the row is rescued."""
    shop.raw.execute("UPDATE txbox_inbox SET lease_until = received_at WHERE status = 'processing'")
    assert len(shop.rescue()) == 1


def operate(shop: Shop, verb: str) -> None:
    """What an operator decides meanwhile."""
    with Admin(shop.url) as admin:
        where = InboxFilter(consumer=CONSUMER, message_id="a")
        if verb == "edit":
            admin.edit(CONSUMER, "a", payload=b"right")
        elif verb == "discard":
            assert admin.discard(where).count == 1
        else:
            assert admin.retry(where).count == 1


@pytest.mark.parametrize("verb", ["edit", "retry", "discard", "another run"])
def test_a_leased_run_that_comes_late_records_nothing_over_what_became_of_the_row(
    shop: Shop, verb: str
) -> None:
    shop.handler(lambda message, tx: fail(), mode="stored", retry=RetryPolicy(max_attempts=1))
    shop.deliver(paid("a", b"wrong"))
    ((frozen, token),) = shop.lease()
    changed: list[Any] = []

    def meanwhile_changed() -> None:
        expire(shop)
        if verb == "another run":
            ((_, other),) = shop.lease(suspect=True)
            row = recorded(shop, b"wrong", other)
            assert (row.status, row.attempts) == ("failed", 1)
        else:
            operate(shop, verb)
        changed.append(snapshot(shop))

    with meanwhile(RECORDS, meanwhile_changed, nth=2):
        assert shop.run(frozen, token) is Outcome.IN_PROGRESS
    assert changed == [snapshot(shop)]


@pytest.mark.parametrize("verb", ["edit", "retry", "discard"])
def test_a_delivery_that_comes_late_records_nothing_over_what_an_operator_decided(
    shop: Shop, verb: str
) -> None:
    """Its copy has failed and stands in the table by then; what was decided on that row stays."""
    shop.handler(lambda message, tx: fail(), retry=RetryPolicy(max_attempts=2))
    changed: list[Any] = []

    def meanwhile_changed() -> None:
        assert recorded(shop, b"wrong").attempts == 1
        operate(shop, verb)
        changed.append(snapshot(shop))

    # before the first delivery comes the check of the schema
    with meanwhile(RECORDS, meanwhile_changed, nth=3):
        late = shop.deliver(paid("a", b"wrong"))
    assert late is (Outcome.DUPLICATE if verb == "discard" else Outcome.DEFERRED)
    assert changed == [snapshot(shop)]


def test_a_late_delivery_leaves_an_edited_row_alone_that_has_failed_again(shop: Shop) -> None:
    shop.handler(lambda message, tx: fail())
    assert recorded(shop, b"wrong").attempts == 1
    operate(shop, "edit")
    assert shop.work() == [Outcome.FAILED]
    before = snapshot(shop)
    assert recorded(shop, b"wrong") is None
    assert snapshot(shop) == before


by_server = pytest.mark.parametrize("product", names("postgresql", "mysql"))


@by_server
def test_a_failure_is_left_to_the_transaction_that_holds_its_message_by_then(
    new_database: NewDatabase, plain_connection: Connect, product: str
) -> None:
    """Its handler may take any time, and runs the message as well: what becomes of that counts."""
    limits = Limits(lock_timeout=timedelta(seconds=1))
    url = new_database(product)
    with opened(url, limits=limits) as shop, plain_connection(url) as rival:
        shop.handler(lambda message, tx: fail())
        claims = partial(Inbox(CONSUMER).accept, rival, paid("a"))
        with meanwhile("record_failure", claims):
            assert shop.deliver(paid("a")) is Outcome.IN_PROGRESS
        rival.rollback()
        # nothing of the limit is left on a connection, and nothing is settled
        assert shop.deliver(paid("a")) is Outcome.FAILED
        assert shop.row("a").attempts == 1


@by_server
@pytest.mark.parametrize("leased", [True, False], ids=["leased", "broken"])
def test_a_failure_that_must_not_get_lost_is_recorded_whoever_holds_the_row(
    new_database: NewDatabase, plain_connection: Connect, product: str, leased: bool
) -> None:
    limits = Limits(lock_timeout=timedelta(seconds=1))
    url = new_database(product)
    with opened(url, limits=limits) as shop, plain_connection(url) as rival:
        shop.handler(
            lambda message, tx: fail() if leased else tx.rollback(),
            mode="stored" if leased else "inline",
        )
        held = threading.Event()

        def hold() -> None:
            if leased:
                execute(rival, "SELECT * FROM txbox_inbox FOR UPDATE")
            else:
                Inbox(CONSUMER).accept(rival, paid("a"))
            held.set()

        def let_go() -> None:
            held.wait(DEADLINE_S)
            eventually(lambda: len(shop.emitted(MessageInFlight)) > 1, "it waits again")
            rival.rollback()

        letting_go = threading.Thread(target=let_go)
        letting_go.start()
        if leased:
            assert shop.deliver(paid("a")) is Outcome.DEFERRED
        with meanwhile("record_failure", hold):
            (outcome,) = shop.work() if leased else (shop.deliver(paid("a")),)
        letting_go.join()
        assert outcome is (Outcome.FAILED if leased else Outcome.DEAD)
        assert shop.row("a").attempts == 1
        assert shop.calls == ["a"]


def fail() -> None:
    raise ValueError("no")


SECRET = "4111-1111-1111-1111"
VIOLATION = f"INSERT INTO card VALUES ('{SECRET}'), ('{SECRET}')"


@pytest.mark.parametrize("door", ["driver", "sqlalchemy"])
def test_error_text_holds_no_values_of_rows(shop: Shop, door: str) -> None:
    shop.raw.execute("CREATE TABLE card (number varchar(40) PRIMARY KEY)")
    if door == "driver":
        shop.handler(lambda message, tx: execute(tx, VIOLATION))
        assert shop.deliver(paid("a")) is Outcome.FAILED
    else:
        scheme, _, rest = shop.url.partition(":")
        driver = {"postgresql": "psycopg", "mysql": "pymysql", "sqlite": "pysqlite"}[scheme]
        engine = sa.create_engine(f"{scheme}+{driver}:{rest}")
        app = App(engine)
        card = sa.table("card", sa.column("number"))

        @app.handler(TOPIC, consumer=CONSUMER)
        def handle(message: Message[Any], tx: sa.Connection) -> None:
            for _ in range(2):
                tx.execute(card.insert().values(number=SECRET))

        assert app.process(paid("a")) is Outcome.FAILED
        engine.dispose()
    row = shop.row("a")
    assert row.error_type in ("IntegrityError", "UniqueViolation")
    assert row.error is not None
    assert SECRET not in row.error
    assert {"postgresql": "23505", "mysql": "1062", "sqlite": "SQLITE_CONSTRAINT"}[
        shop.raw.product
    ] in row.error
    (history,) = shop.raw.rows("SELECT error FROM txbox_attempt")
    assert SECRET not in str(history)


def test_error_chained_to_a_database_error_holds_no_values_of_rows(shop: Shop) -> None:
    """An application wraps the driver's error in its own words; only those are kept."""
    shop.raw.execute("CREATE TABLE card (number varchar(40) PRIMARY KEY)")

    def wraps(message: Message[Any], tx: Any) -> None:
        try:
            execute(tx, VIOLATION)
        except Exception as error:
            raise RuntimeError("the card is known") from error

    shop.handler(wraps)
    assert shop.deliver(paid("a")) is Outcome.FAILED
    row = shop.row("a")
    assert row.error_type == "RuntimeError"
    assert row.error is not None
    assert row.error.startswith("the card is known\n")
    assert SECRET not in row.error


@pytest.mark.parametrize(
    "text", ["nul \0 byte", "lone \ud800 surrogate", "\U0001f4a5" * 5000, "x" * 100_000, ""],
    ids=["NUL", "surrogate", "emoji", "long", "empty"],
)  # fmt: skip
def test_error_text_is_sanitised_and_bounded(shop: Shop, text: str) -> None:
    def fails(message: Message[Any], tx: Any) -> None:
        raise ValueError(text)

    shop.handler(fails)
    assert shop.deliver(paid("a")) is Outcome.FAILED
    error = shop.row("a").error
    assert error is not None
    assert len(error.encode()) <= Limits().error_bytes
    assert error[:4] == text[:4] or text == ""


def test_exception_without_a_readable_text_is_recorded(shop: Shop) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def fails(message: Message[Any], tx: Any) -> None:
        raise Mute

    shop.handler(fails)
    assert shop.deliver(paid("a")) is Outcome.FAILED
    assert shop.row("a").error_type == "Mute"


# -- delays (3.2) --------------------------------------------------------------------------------


def test_delays_grow_to_their_cap_with_full_jitter() -> None:
    policy = RetryPolicy(base=timedelta(seconds=10), factor=2.0, cap=timedelta(seconds=60))
    for failed, bound in ((1, 10), (2, 20), (3, 40), (4, 60), (5, 60), (1000, 60)):
        drawn = [policy.delay_s(failed) for _ in range(2000)]
        assert 0 <= min(drawn) < 0.05 * bound
        assert 0.95 * bound < max(drawn) <= bound
        assert abs(statistics.mean(drawn) - bound / 2) < 0.05 * bound
