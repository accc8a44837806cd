"""A batch: one transaction for many messages, in which one culprit costs only itself (promise 2.10)."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.support.databases import NewDatabase, Raw
from tests.support.leasing import Leasing
from tests.support.shop import CONSUMER, Shop, add_effect, as_id, execute, opened, paid, quarantined
from tests.support.waiting import DEADLINE_S, eventually
from txbox import Message, Outbox, Outcome, Reject, RetryPolicy
from txbox.events import (
    ConsumptionPaused,
    MessageDead,
    MessageDeferred,
    MessageDuplicate,
    MessageFailed,
    MessageProcessed,
    MessageQuarantined,
)
from txbox.handlers import Handler
from txbox.processing.intake import Mode
from txbox.session import drive
from txbox.store.dialect import as_time

pytestmark = pytest.mark.every_database

Body = Callable[[Message[Any], Any], object]
IDS = [f"m{number}" for number in range(7)]
OUTCOMES = (
    MessageProcessed, MessageFailed, MessageDead, MessageDuplicate, MessageDeferred, MessageQuarantined,
)  # fmt: skip


def raises(message: Message[Any], tx: Any) -> None:
    raise ValueError("this one")


def is_refused(message: Message[Any], tx: Any) -> None:
    execute(tx, "INSERT INTO effect (message_id) VALUES (NULL)")


def rejects(message: Message[Any], tx: Any) -> None:
    raise Reject("never")


class Batch:
    """A shop whose batches are delivered, or stored and leased and then run together."""

    def __init__(self, shop: Shop, way: str) -> None:
        self.shop = shop
        self.way = way

    def take(self, handler: Handler, *messages: Message[Any]) -> list[Outcome]:
        app = self.shop.app
        assert app.database.sync is not None
        if self.way == "savepoints":
            pace = app.protocol.batch_sizes.of(handler)
            for _ in range(200):
                pace.failed(4)
            assert pace.group > 0
        if self.way != "leased":
            settled = drive(app.database.sync, app.intake.take, handler, messages)
            return [answer.outcome for answer in settled]
        leasing = Leasing(drive(app.database.sync, app.intake.take, handler, messages, Mode.LEASED))
        return [
            answer.outcome
            for answer in drive(
                app.database.sync,
                app.protocol.run_leased_many,
                handler,
                leasing.rows,
                leasing.token,
            )
        ]

    def check(self, good: list[str], bad: list[str], status: str = "failed") -> None:
        """Neighbours are processed once; culprits are recorded once, with all that a retry needs."""
        shop = self.shop
        for message_id in good:
            assert (message_id, shop.row(message_id).status, shop.effects(message_id)) == (
                message_id,
                "processed",
                1,
            )
            assert shop.row(message_id).attempts == 0
            assert not shop.row(message_id).has_payload
            assert attempts(shop.raw, message_id) == []
        for message_id in bad:
            row = shop.row(message_id)
            assert (message_id, row.status, row.attempts, row.has_payload) == (
                message_id,
                status,
                1,
                True,
            )
            assert row.starts == 0
            assert shop.effects(message_id) == 0
            assert attempts(shop.raw, message_id) == [(1, status)]
            payload = shop.raw.value(
                "SELECT payload FROM txbox_inbox WHERE message_id = ?",
                (as_id(shop.raw, message_id),),
            )
            assert bytes(payload) == b'{"cents": 100}'
        ended = Counter(event.message_id for event in shop.events if isinstance(event, OUTCOMES))
        assert ended == Counter([*good, *bad])


def attempts(raw: Raw, message_id: str) -> list[tuple[int, str]]:
    return [
        (int(number), str(status))
        for number, status in raw.rows(
            "SELECT attempt, status FROM txbox_attempt WHERE message_id = ?",
            (as_id(raw, message_id),),
        )
    ]


@pytest.fixture(params=["delivered", "savepoints", "leased"])
def batch(request: pytest.FixtureRequest, shop: Shop) -> Batch:
    return Batch(shop, request.param)


def for_ids(ids: list[str], body: Body) -> Body:
    return lambda message, tx: body(message, tx) if message.id in ids else None


def outcomes_of(bad: list[str], end: Outcome = Outcome.FAILED) -> list[Outcome]:
    return [end if message_id in bad else Outcome.PROCESSED for message_id in IDS]


@pytest.mark.parametrize("body", [raises, is_refused])
@pytest.mark.parametrize(
    "bad",
    [["m0"], ["m6"], ["m3"], ["m2", "m3"], ["m0", "m6"], IDS],
    ids=["first", "last", "middle", "adjacent", "both-ends", "all"],
)
def test_a_culprit_costs_only_itself(batch: Batch, bad: list[str], body: Body) -> None:
    handler = batch.shop.handler(for_ids(bad, body))
    assert batch.take(handler, *map(paid, IDS)) == outcomes_of(bad)
    batch.check([message_id for message_id in IDS if message_id not in bad], bad)


def test_the_event_says_when_the_next_attempt_is_due(batch: Batch) -> None:
    hours = RetryPolicy(base=timedelta(hours=2))
    handler = batch.shop.handler(for_ids(["m1", "m4"], raises), retry=hours)
    assert batch.take(handler, *map(paid, IDS)) == outcomes_of(["m1", "m4"])
    said = {row.message_id: row.retry_in_s for row in batch.shop.emitted(MessageFailed)}
    rows = batch.shop.raw.rows(
        "SELECT message_id, next_attempt_at, updated_at FROM txbox_inbox WHERE status = 'failed'"
    )
    assert len(rows) == len(said) == 2
    for value, due_at, updated_at in rows:
        due, updated = as_time(due_at), as_time(updated_at)
        assert due is not None
        assert updated is not None
        own_id = value.decode() if isinstance(value, bytes) else str(value)
        assert abs((due - updated).total_seconds() - said[own_id]) < 1


def test_a_rejected_message_of_a_batch_is_dead_with_its_letter(batch: Batch) -> None:
    handler = batch.shop.handler(for_ids(["m2"], rejects), dead_letter_topic="letters")
    assert batch.take(handler, *map(paid, IDS)) == outcomes_of(["m2"], Outcome.DEAD)
    batch.check([message_id for message_id in IDS if message_id != "m2"], ["m2"], "dead")
    assert [tuple(row) for row in staged(batch.shop.raw)] == [("letters",)]


def test_the_last_attempt_in_a_batch_is_dead_with_its_letter(batch: Batch) -> None:
    handler = batch.shop.handler(
        for_ids(["m5"], raises),
        dead_letter_topic="letters",
        retry=RetryPolicy(max_attempts=1),
    )
    assert batch.take(handler, *map(paid, IDS)) == outcomes_of(["m5"], Outcome.DEAD)
    batch.check([message_id for message_id in IDS if message_id != "m5"], ["m5"], "dead")
    assert len(staged(batch.shop.raw)) == 1


def staged(raw: Raw) -> list[Any]:
    return [
        (value.decode() if isinstance(value, bytes) else value,)
        for (value,) in raw.rows("SELECT topic FROM txbox_outbox")
    ]


def test_what_neighbours_stage_is_kept_and_a_culprits_is_not(batch: Batch) -> None:
    """And a message that is run twice stages the same ids."""
    seen: dict[str, set[str]] = {}

    def stages(message: Message[Any], tx: Any) -> None:
        row_id = Outbox().stage(tx, "invoices", {"of": message.id}, cause=message)
        seen.setdefault(str(message.id), set()).add(str(row_id))
        if message.id in ("m1", "m5"):
            raise ValueError("after staging")

    handler = batch.shop.handler(stages)
    assert batch.take(handler, *map(paid, IDS)) == outcomes_of(["m1", "m5"])
    assert all(len(ids) == 1 for ids in seen.values()), seen
    kept = {
        value.decode() if isinstance(value, bytes) else value
        for (value,) in batch.shop.raw.rows("SELECT id FROM txbox_outbox")
    }
    wanted = {
        message_id for key, ids in seen.items() if key not in ("m1", "m5") for message_id in ids
    }
    assert kept == wanted


def test_results_are_kept_of_those_that_came_through(batch: Batch) -> None:
    def answers(message: Message[Any], tx: Any) -> None:
        if message.id == "m3":
            raise ValueError("no result")

    shop = batch.shop

    def handle(message: Message[Any], tx: Any) -> str:
        add_effect(tx, message.id)
        answers(message, tx)
        return f"of {message.id}"

    shop.app.handler("orders", consumer=CONSUMER, keep_result=True)(handle)
    (handler,) = shop.app.handlers.matching("orders", None, CONSUMER)
    batch.take(handler, *map(paid, IDS))
    assert shop.app.database.sync is not None
    for message_id in IDS:
        found = drive(shop.app.database.sync, shop.app.store.result, CONSUMER, message_id)
        assert found == (None if message_id == "m3" else f'"of {message_id}"'.encode())


def test_copies_and_rows_that_are_there_are_met_beside_a_culprit(shop: Shop) -> None:
    done = shop.handler(for_ids(["parked"], raises))
    assert shop.deliver(paid("known")) is Outcome.PROCESSED
    assert shop.deliver(paid("parked")) is Outcome.FAILED
    shop.events.clear()
    assert Batch(shop, "delivered").take(
        done,
        paid("a"),
        paid("a"),
        paid("known"),
        paid("b"),
        paid("known", b"another"),
        paid("parked"),
        paid("a", b"altered"),
    ) == [
        Outcome.PROCESSED,
        Outcome.DUPLICATE,
        Outcome.DUPLICATE,
        Outcome.PROCESSED,
        Outcome.QUARANTINED,
        Outcome.DEFERRED,
        Outcome.QUARANTINED,
    ]
    assert [shop.effects(name) for name in ("a", "b", "known", "parked")] == [1, 1, 1, 0]
    assert len(quarantined(shop.raw)) == 2


def test_every_copy_of_a_finished_message_is_told_though_a_batch_holds_several(shop: Shop) -> None:
    handler = shop.handler()
    for told in (2, 5):  # one of the first three was the message
        Batch(shop, "delivered").take(handler, *[paid("a")] * 3)
        assert len(shop.emitted(MessageDuplicate)) == told


def test_two_copies_of_a_culprit_share_its_fate(batch: Batch) -> None:
    if batch.way == "leased":
        pytest.skip("copies are folded before they are stored")
    handler = batch.shop.handler(for_ids(["bad"], raises))
    found = batch.take(handler, paid("a"), paid("bad"), paid("b"), paid("bad"))
    assert found == [Outcome.PROCESSED, Outcome.FAILED, Outcome.PROCESSED, Outcome.FAILED]
    batch.check(["a", "b"], ["bad"])


@pytest.mark.parametrize("way", ["delivered", "savepoints", "leased"])
def test_a_failure_at_commit_is_narrowed_down(new_database: NewDatabase, way: str) -> None:
    """A deferred constraint fails when no savepoint is left that could tell whose it is."""
    with opened(new_database("postgresql")) as shop:
        shop.raw.execute("CREATE TABLE parent (id text PRIMARY KEY)")
        shop.raw.execute(
            "CREATE TABLE child (id text REFERENCES parent DEFERRABLE INITIALLY DEFERRED)"
        )
        orphan = for_ids(["m4"], lambda _, tx: execute(tx, "INSERT INTO child VALUES ('nobody')"))
        batch = Batch(shop, way)
        assert batch.take(shop.handler(orphan), *map(paid, IDS)) == outcomes_of(["m4"])
        batch.check([message_id for message_id in IDS if message_id != "m4"], ["m4"])


def test_savepoints_of_the_handlers_own(batch: Batch) -> None:
    def nests(message: Message[Any], tx: Any) -> None:
        execute(tx, "SAVEPOINT mine")
        add_effect(tx, message.id, "undone")
        execute(tx, "ROLLBACK TO SAVEPOINT mine")
        execute(tx, "RELEASE SAVEPOINT mine")
        if message.id == "m3":
            execute(tx, "SAVEPOINT left_open")
            raise ValueError("inside a savepoint")

    handler = batch.shop.handler(nests)
    assert batch.take(handler, *map(paid, IDS)) == outcomes_of(["m3"])
    batch.check([message_id for message_id in IDS if message_id != "m3"], ["m3"])


def test_a_batch_handler_is_divided_until_the_culprit_is_alone(shop: Shop) -> None:
    calls: list[list[str]] = []

    def handle(messages: list[Message[Any]], tx: Any) -> None:
        calls.append([str(message.id) for message in messages])
        for message in messages:
            add_effect(tx, message.id)
            if message.id == "m5":
                raise ValueError("this one")

    shop.app.handler("orders", consumer=CONSUMER, batch=True)(handle)
    (handler,) = shop.app.handlers.matching("orders", None, CONSUMER)
    batch = Batch(shop, "delivered")
    assert batch.take(handler, *map(paid, IDS)) == outcomes_of(["m5"])
    assert calls[0] == IDS
    assert calls[-1] == ["m6"] or ["m5"] in calls
    batch.check([message_id for message_id in IDS if message_id != "m5"], ["m5"])


def test_an_ordered_batch_passes_no_culprit(shop: Shop) -> None:
    """Later messages of its key wait; those of other keys go on."""
    done: list[str] = []
    handler = shop.handler(for_ids(["x2"], raises), ordered=True)
    messages = [paid(f"{key}{number}", key=key) for number in (1, 2, 3) for key in ("x", "y")]
    found = Batch(shop, "delivered").take(handler, *messages)
    ended = dict(zip((str(message.id) for message in messages), found, strict=True))
    assert ended["x1"] is ended["y1"] is ended["y2"] is ended["y3"] is Outcome.PROCESSED
    assert ended["x2"] is Outcome.FAILED
    assert ended["x3"] is Outcome.DEFERRED
    assert [shop.effects(f"x{number}") for number in (1, 2, 3)] == [1, 0, 0]
    assert shop.row("x3").status == "pending"
    assert not done


def test_after_a_broken_batch_nobody_who_may_have_written_runs_again(shop: Shop) -> None:
    """Every handler leaves the transaction: what each has committed by itself is there once."""

    def escapes(message: Message[Any], tx: Any) -> None:
        execute(tx, "ROLLBACK")
        execute(tx, "BEGIN")
        add_effect(tx, message.id)
        execute(tx, "COMMIT")

    handler = shop.handler(escapes)
    assert Batch(shop, "delivered").take(handler, *map(paid, IDS)) == [Outcome.DEAD] * len(IDS)
    assert [shop.effects(message_id) for message_id in IDS] == [1] * len(IDS)
    assert {shop.row(message_id).error_type for message_id in IDS} == {"TransactionBroken"}
    assert sorted(shop.calls) == IDS


def test_a_batch_handler_that_leaves_its_transaction_is_called_once(shop: Shop) -> None:
    calls: list[int] = []

    def handle(messages: list[Message[Any]], tx: Any) -> None:
        calls.append(len(messages))
        execute(tx, "ROLLBACK")
        execute(tx, "BEGIN")
        for message in messages:
            add_effect(tx, message.id)
        execute(tx, "COMMIT")

    shop.app.handler("orders", consumer=CONSUMER, batch=True)(handle)
    (handler,) = shop.app.handlers.matching("orders", None, CONSUMER)
    found = Batch(shop, "delivered").take(handler, *map(paid, IDS))
    assert (calls, set(found)) == ([len(IDS)], {Outcome.DEAD})
    assert [shop.effects(message_id) for message_id in IDS] == [1] * len(IDS)


@pytest.mark.parametrize("is_engine", [False, True], ids=["url", "engine"])
def test_a_refused_commit_costs_no_prepared_statement(
    new_database: NewDatabase, is_engine: bool
) -> None:
    """psycopg has prepared what a batch repeats, and does not forget it when a COMMIT is refused."""
    import sqlalchemy as sa

    from txbox import App

    url = new_database("postgresql")
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with Raw(url) as raw, App(engine if is_engine else url) as app:
        raw.execute("CREATE TABLE parent (id text PRIMARY KEY)")
        raw.execute("CREATE TABLE child (id text REFERENCES parent DEFERRABLE INITIALLY DEFERRED)")

        @app.handler("orders", consumer=CONSUMER)
        def handle(message: Message[Any], tx: Any) -> None:
            driver = tx.connection.driver_connection if is_engine else tx
            driver.execute("SELECT 1 WHERE %s <> ''", (message.id,))
            if message.id == "m6":
                driver.execute("INSERT INTO child VALUES ('nobody')")

        assert app.database.sync is not None
        (handlers,) = app.handlers.matching("orders", None, CONSUMER)
        drive(app.database.sync, app.protocol.check_schema)
        settled = drive(
            app.database.sync, app.intake.take, handlers, [paid(message_id) for message_id in IDS]
        )
    engine.dispose()
    assert [answer.outcome for answer in settled] == outcomes_of(["m6"])


def test_a_savepoint_that_a_handler_rolls_back_is_no_failure(new_database: NewDatabase) -> None:
    """psycopg then deallocates every prepared statement of the connection, txbox's own among them."""
    with opened(new_database("postgresql")) as shop:

        def nests(message: Message[Any], tx: Any) -> None:
            for _ in range(6):  # enough for psycopg to prepare it
                tx.execute("SELECT 1 WHERE %s <> ''", (message.id,))
            with contextlib.suppress(ZeroDivisionError), tx.transaction():
                raise ZeroDivisionError

        handler = shop.handler(nests)
        for number in range(5):
            assert shop.deliver(paid(f"alone-{number}")) is Outcome.PROCESSED
        batch = Batch(shop, "delivered")
        assert batch.take(handler, *map(paid, IDS)) == [Outcome.PROCESSED] * len(IDS)
        assert [shop.effects(message_id) for message_id in IDS] == [1] * len(IDS)
        assert not shop.emitted(MessageFailed)
        assert not shop.emitted(ConsumptionPaused)


def test_a_deadlock_costs_the_batch_nothing_but_its_size(
    new_database: NewDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rival holds the second row and waits for the first: one of the two transactions must give way."""
    # on a busy machine the second run may come later than the calm that lets batches grow again
    monkeypatch.setattr("txbox.processing.attempt._CALM_S", (3600.0, 3600.0))
    with opened(new_database("postgresql")) as shop, Raw(shop.url) as rival:
        shop.raw.execute("CREATE TABLE account (name text PRIMARY KEY, balance int)")
        shop.raw.execute("INSERT INTO account VALUES ('m0', 0), ('m1', 0)")
        rivals: list[threading.Thread] = []

        def books(message: Message[Any], tx: Any) -> None:
            if message.id == "m1" and not rivals:
                rival.execute("BEGIN")
                rival.execute("SET LOCAL deadlock_timeout = '1h'")  # it is not the one to notice
                rival.execute("UPDATE account SET balance = balance + 100 WHERE name = 'm1'")
                waits = threading.Thread(
                    target=rival.execute,
                    args=("UPDATE account SET balance = balance + 100 WHERE name = 'm0'",),
                )
                waits.start()
                rivals.append(waits)
                _until_waiting(shop.raw)
            execute(tx, f"UPDATE account SET balance = balance + 1 WHERE name = '{message.id}'")
            if message.id == "m0" and rivals and rivals[0].is_alive():
                rivals[0].join(DEADLINE_S)

        handler = shop.handler(books)
        pace = shop.app.protocol.batch_sizes.of(handler)
        for _ in range(5):
            pace.committed(pace.messages, 0.0)
        before = pace.messages
        running = threading.Thread(target=_commit_when_free, args=(rival, rivals))
        running.start()
        found = Batch(shop, "delivered").take(handler, paid("m0"), paid("m1"))
        running.join(DEADLINE_S)
        assert found == [Outcome.PROCESSED] * 2
        balances = dict(shop.raw.rows("SELECT name, balance FROM account"))
        assert balances == {"m0": 101, "m1": 101}
        assert [shop.effects(name) for name in ("m0", "m1")] == [1, 1]
        assert pace.messages == 1 < before
        assert not shop.emitted(MessageFailed)


@pytest.mark.parametrize("way", ["delivered", "savepoints"])
def test_a_short_wait_for_a_lock_is_no_failure_when_the_others_are_duplicates(
    new_database: NewDatabase, way: str
) -> None:
    """A batch waits shorter for locks than a message alone, also when only one of it is new."""
    with opened(new_database("postgresql")) as shop, Raw(shop.url) as rival:
        shop.raw.execute("CREATE TABLE account (name text PRIMARY KEY, balance int)")
        shop.raw.execute("INSERT INTO account VALUES ('m0', 0), ('m1', 0)")

        def books(message: Message[Any], tx: Any) -> None:
            if shop.calls.count("m1") == 2:
                rival.execute("COMMIT")
            execute(tx, f"UPDATE account SET balance = balance + 1 WHERE name = '{message.id}'")

        handler = shop.handler(books)
        assert shop.deliver(paid("m0")) is Outcome.PROCESSED
        rival.execute("BEGIN")
        rival.execute("UPDATE account SET balance = balance + 100 WHERE name = 'm1'")
        found = Batch(shop, way).take(handler, paid("m0"), paid("m1"))
        assert found == [Outcome.DUPLICATE, Outcome.PROCESSED]
        assert shop.calls == ["m0", "m1", "m1"]
        assert dict(shop.raw.rows("SELECT name, balance FROM account")) == {"m0": 1, "m1": 101}
        assert shop.row("m1").attempts == 0
        assert not shop.emitted(MessageFailed)


def _until_waiting(raw: Raw) -> None:
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    eventually(lambda: raw.value(waiting), "the wait for a lock")


def _commit_when_free(rival: Raw, rivals: list[threading.Thread]) -> None:
    eventually(lambda: rivals, "the rival")
    rivals[0].join(DEADLINE_S)
    rival.execute("COMMIT")
