"""Claims ahead: a lane with a backlog begins its next batch behind the COMMIT of the one before it (PostgreSQL)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import closing
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg_pool import ConnectionPool

from tests.support.shop import CONSUMER, TOPIC, Shop, add_effect, opened, paid, statuses
from tests.support.sources import Memory
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.workers import running, worker
from tests.test_session import ONE, Lends
from tests.worker.test_lane import at_pace
from txbox import App, Batching, Lease, Limits, Message, RetryPolicy
from txbox.brokers.base import Delivery
from txbox.connections.psycopg import PsycopgConnection
from txbox.events import MessageDuplicate, MessageFailed
from txbox.session import Result, Statement, Statements, blocking
from txbox.store import leases
from txbox.worker.lane import LaneSession
from txbox.worker.table import Table

IDS = [f"m{number:02}" for number in range(60)]
SIZE = 5
TWO = (Statement("two", "SELECT 2", {}),)


@pytest.fixture
def orders(postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    """A shop whose batches have five messages."""
    with opened(postgresql_url) as shop:
        at_pace(shop.app, monkeypatch, SIZE)
        yield shop


class Commits:
    """What was begun behind each COMMIT of a batch: nothing, or a number of statements."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.followed: list[bool] = []
        self.in_vain = 0
        commit_then, rollback = PsycopgConnection.commit_then, PsycopgConnection.rollback

        async def committed(
            connection: PsycopgConnection,
            statements: Any,
            then: Callable[[], Statements | None] | None,
        ) -> Any:
            results = await commit_then(connection, statements, then)
            if then is not None:
                self.followed.append(connection.ahead is not None)
            return results

        async def rolled_back(conn: PsycopgConnection) -> None:
            self.in_vain += conn.ahead is not None
            await rollback(conn)

        monkeypatch.setattr(PsycopgConnection, "commit_then", committed)
        monkeypatch.setattr(PsycopgConnection, "rollback", rolled_back)

    @property
    def ahead(self) -> int:
        return sum(self.followed)


def backlog(shop: Shop, messages: list[Message[Any]] | None = None, **options: Any) -> Memory:
    source = Memory(messages or [paid(message_id) for message_id in IDS], **options)
    shop.app.consume(source)
    return source


def test_a_backlog_is_claimed_ahead_in_its_order(
    orders: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = Commits(monkeypatch)
    orders.handler()
    source = backlog(orders)

    assert worker(orders.app, once=True).run() == 0

    assert commits.ahead >= len(IDS) / SIZE - 3
    assert not commits.in_vain, "what was begun was gone on with"
    assert orders.calls == source.settled_ids == IDS
    assert orders.effects() == len(IDS)
    assert statuses(orders.raw) == {"processed": len(IDS)}


def test_async_handlers_too(orders: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = PsycopgConnection.begun
    ahead: list[str] = []

    async def went_on(connection: PsycopgConnection, work: Any) -> Any:
        ahead.append("")
        return await begun(connection, work)

    monkeypatch.setattr(PsycopgConnection, "begun", went_on)

    @orders.app.handler(TOPIC, consumer=CONSUMER)
    async def handle(message: Message[Any], tx: Any) -> None:
        await tx.execute("INSERT INTO effect (message_id, note) VALUES (%s, '')", [message.id])

    backlog(orders)
    assert worker(orders.app, once=True).run() == 0
    assert len(ahead) >= len(IDS) / SIZE - 3
    assert orders.effects() == len(IDS)


def test_copies_in_the_batch_before_are_met_in_the_batch_behind(
    orders: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An id of the batch that commits is no reason to wait, or to run anything alone."""
    commits = Commits(monkeypatch)
    orders.handler()
    twice: list[Message[Any]] = []
    for at in range(0, len(IDS), 4):
        # each batch of five ends with a copy of the one before
        twice += [paid(message_id) for message_id in [*IDS[at : at + 4], IDS[max(at - 1, 0)]]]
    source = backlog(orders, twice)

    assert worker(orders.app, once=True).run() == 0

    assert commits.ahead >= len(twice) / SIZE - 3
    assert len(commits.followed) <= len(twice) / SIZE + 2, "nothing was claimed alone"
    assert orders.calls == IDS
    assert len(source.settled) == len(twice)
    # the very first copy is in the batch of its original, and folded
    assert len(orders.emitted(MessageDuplicate)) == len(twice) - len(IDS)


@pytest.mark.parametrize("copies", [False, True])
def test_stored_messages_run_while_the_next_are_stored(
    orders: Shop, monkeypatch: pytest.MonkeyPatch, copies: bool
) -> None:
    """Behind the COMMIT of rows that were run the next batch is stored; copies make nobody look into the table."""
    commits, looks = Commits(monkeypatch), list[str]()
    lease = leases.lease

    def looked(*words: Any, **more: Any) -> Any:
        looks.append("")
        return lease(*words, **more)

    monkeypatch.setattr(leases, "lease", looked)
    # the poll looks by the clock, however long a batch takes
    monkeypatch.setattr(Table, "due", lambda _table: None)
    orders.app.lease = Lease(batch=SIZE)
    # nothing can be begun ahead of what has not arrived
    orders.handler(lambda _message, _tx: eventually(lambda: source.exhausted), mode="stored")
    messages = [paid(message_id) for message_id in IDS]
    if copies:
        messages = [each for pair in zip(messages, messages, strict=True) for each in pair]
    source = backlog(orders, messages)

    assert worker(orders.app, once=True).run() == 0

    assert not commits.in_vain
    assert commits.ahead >= len(messages) / SIZE - 2
    assert looks == []
    assert orders.calls == IDS
    assert len(source.settled) == len(messages)
    assert statuses(orders.raw) == {"processed": len(IDS)}
    assert orders.effects() == len(IDS)


def test_a_batch_that_is_not_whole_is_left_to_grow(
    orders: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = Commits(monkeypatch)
    orders.handler()
    backlog(orders, [paid(message_id) for message_id in IDS[: 2 * SIZE - 1]])
    assert worker(orders.app, once=True).run() == 0
    assert commits.followed == [False, False]


def test_redeliveries_are_never_claimed_ahead(
    orders: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their run is counted before it begins."""
    commits = Commits(monkeypatch)
    orders.handler()
    new = [Delivery(paid(message_id), TOPIC) for message_id in IDS[:SIZE]]
    again = [
        Delivery(paid(message_id), TOPIC, redelivered=True) for message_id in IDS[SIZE : 3 * SIZE]
    ]
    source = Memory([*new, *again])
    orders.app.consume(source)
    stored: list[str] = []
    store = leases.storing

    def storing(*words: Any, **more: Any) -> Any:
        stored.extend(arrival.message_id for arrival in words[2])
        return store(*words, **more)

    monkeypatch.setattr(leases, "storing", storing)
    assert worker(orders.app, once=True).run() == 0
    assert commits.followed[0] is False
    assert sorted(stored) == IDS[SIZE : 3 * SIZE]
    assert orders.calls == IDS[: 3 * SIZE]


def test_a_batch_that_is_divided_claims_ahead_once_at_most(
    orders: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part of it commits; only the last is followed by the next batch, and which that is nobody knows."""
    commits = Commits(monkeypatch)

    @orders.app.handler(TOPIC, consumer=CONSUMER, batch=True, retry=RetryPolicy(max_attempts=1))
    def handle(messages: list[Message[Any]], tx: Any) -> None:
        for message in messages:
            if str(message.id)[-1] in "27":
                raise ValueError
            add_effect(tx, message.id)

    backlog(orders)
    assert worker(orders.app, once=True).run() == 0
    assert commits.in_vain
    assert commits.in_vain <= len(IDS) / SIZE
    assert statuses(orders.raw) == {"processed": 48, "dead": 12}
    assert orders.effects() == 48


def test_rows_that_run_one_by_one_claim_nothing_ahead(
    orders: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart redeliveries come first, and a backlog behind them."""
    monkeypatch.setattr(Table, "due", False)
    commits = Commits(monkeypatch)
    orders.handler()
    again = [Delivery(paid(message_id), TOPIC, redelivered=True) for message_id in IDS[:SIZE]]
    orders.app.consume(
        Memory([*again, *(Delivery(paid(message_id), TOPIC) for message_id in IDS[SIZE:])])
    )
    assert worker(orders.app, once=True).run() == 0
    assert not commits.in_vain
    assert orders.calls == IDS


def test_who_waits_for_an_id_holds_none_of_the_next_batch(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two lanes that want each other's ids would wait until the lock time-out."""
    monkeypatch.setattr(Table, "due", False)
    limits = Limits(lock_timeout=timedelta(seconds=2 * DEADLINE_S))
    lease = Lease(duration=timedelta(seconds=5 * DEADLINE_S))
    with opened(postgresql_url, limits=limits, lease=lease) as shop:
        at_pace(shop.app, monkeypatch, SIZE)
        shop.handler()
        in_flight = shop.app.protocol.in_flight
        # another thread of this process is at work on it
        assert in_flight.enter(CONSUMER, "m03") is None
        source = backlog(shop)
        with running(worker(shop.app, once=True)):
            eventually(lambda: len(shop.calls) == SIZE - 1, "the rest of its batch")
            # the lane waits for m03 now, and nobody has to wait for the second batch
            eventually(lambda: shop.effects() == SIZE - 1, "its commit")
            try:
                # before the lock time-out
                eventually(lambda: _is_free(shop, IDS[SIZE : 2 * SIZE]), "the next batch's ids")
            finally:
                in_flight.leave(CONSUMER, "m03")
            eventually(lambda: len(source.settled) == len(IDS), "the end")
        assert shop.effects() == len(IDS)


def _is_free(shop: Shop, ids: list[str]) -> bool:
    if not shop.app.protocol.in_flight.enter_all(CONSUMER, ids):
        return False
    shop.app.protocol.in_flight.leave(CONSUMER, *ids)
    return True


def test_an_order_is_never_claimed_ahead(orders: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = Commits(monkeypatch)
    orders.handler(ordered=True)
    backlog(orders, [paid(message_id, key="k") for message_id in IDS])
    assert worker(orders.app, once=True).run() == 0
    assert commits.followed
    assert commits.ahead == 0
    assert orders.calls == IDS


def test_a_commit_that_is_refused_does_not_touch_the_batch_behind_it(
    orders: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = Commits(monkeypatch)
    orders.raw.execute(
        "CREATE TABLE paid_once (cents int UNIQUE DEFERRABLE INITIALLY DEFERRED, message_id text)"
    )

    def body(message: Message[Any], tx: Any) -> None:
        if message.id in ("m11", "m12"):
            tx.execute("INSERT INTO paid_once VALUES (7, %s)", [message.id])

    orders.handler(body, retry=RetryPolicy(max_attempts=1))
    source = backlog(orders)

    assert worker(orders.app, once=True).run() == 0

    assert commits.ahead
    assert statuses(orders.raw) == {"processed": len(IDS) - 1, "dead": 1}
    assert orders.effects() == len(IDS) - 1
    assert sorted(source.settled_ids) == IDS


def test_a_handler_that_leaves_its_transaction_takes_nothing_of_the_next_batch_with_it(
    orders: Shop,
) -> None:
    def body(message: Message[Any], tx: Any) -> None:
        if message.id == "m14":
            # the last of its batch: COMMIT of the batch is the next thing that is sent
            tx.rollback()

    orders.handler(body, retry=RetryPolicy(max_attempts=1))
    backlog(orders)

    assert worker(orders.app, once=True).run() == 0

    assert statuses(orders.raw) == {"processed": len(IDS) - 1, "dead": 1}
    assert orders.row("m14").status == "dead"
    assert orders.effects() == len(IDS) - 1
    for message_id in IDS:
        assert orders.effects(message_id) == (message_id != "m14")


def test_failures_in_every_batch(orders: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = Commits(monkeypatch)

    def body(message: Message[Any], tx: Any) -> None:
        del tx
        if str(message.id).endswith("3") and message.attempt == 1:
            raise ValueError

    orders.handler(body)
    backlog(orders)

    assert worker(orders.app, once=True).run() == 0

    assert commits.in_vain <= len(IDS) / SIZE
    assert len(orders.emitted(MessageFailed)) == 6
    assert statuses(orders.raw) == {"processed": len(IDS)}
    for message_id in IDS:
        assert orders.effects(message_id) == 1


def test_a_batch_is_settled_while_the_claim_behind_it_waits_for_an_id(orders: Shop) -> None:
    orders.handler()
    source = backlog(orders)
    with psycopg.connect(orders.url) as other:
        # another worker is at work on it
        other.execute(
            "INSERT INTO txbox_inbox (consumer, message_id, status, topic) "
            "VALUES ('billing', 'm07', 'processing', 'orders')"
        )
        with running(worker(orders.app, once=True)) as ended:
            eventually(lambda: len(source.settled) == SIZE, "the first batch's settlement")
            eventually(lambda: _waits_for_a_lock(orders), "the second batch's wait")
            assert source.settled_ids == IDS[:SIZE]
            assert not ended
            other.rollback()
            eventually(lambda: ended, "the end")
    assert sorted(source.settled_ids) == IDS
    assert orders.effects() == len(IDS)


def _waits_for_a_lock(shop: Shop) -> bool:
    return bool(
        shop.raw.value("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
    )


def test_a_drain_gives_up_what_was_begun_and_never_ran(
    orders: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_then, stopped = PsycopgConnection.commit_then, threading.Event()
    own_worker = worker(orders.app)

    async def committed(connection: PsycopgConnection, statements: Any, then: Any) -> Any:
        results = await commit_then(connection, statements, then)
        if connection.ahead is not None and not stopped.is_set():
            own_worker.stop()
            stopped.set()
        return results

    monkeypatch.setattr(PsycopgConnection, "commit_then", committed)
    orders.handler()
    source = backlog(orders, endless=True)
    with running(own_worker):
        eventually(stopped.is_set, "a claim ahead")
    assert orders.calls == source.settled_ids == IDS[: len(orders.calls)]
    assert len(orders.calls) < len(IDS)
    assert statuses(orders.raw) == {"processed": len(orders.calls)}
    assert orders.app.protocol.in_flight.enter_all(CONSUMER, IDS), "no id is held any more"
    assert not orders.raw.rows(
        "SELECT state, query FROM pg_stat_activity WHERE datname = current_database() "
        "AND pid <> pg_backend_pid() AND state LIKE 'idle in%'"
    )


def test_a_database_that_goes_away_between_two_batches(
    orders: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, cuts = PsycopgConnection.begun, [3, 7]
    seen = [0]

    def went_on(connection: PsycopgConnection, work: Any) -> Any:
        seen[0] += 1
        if seen[0] in cuts:
            with psycopg.connect(orders.url, autocommit=True) as other:
                other.execute(
                    "SELECT pg_terminate_backend(%s, 5000)", [connection.native.info.backend_pid]
                )
        return begun(connection, work)

    monkeypatch.setattr(PsycopgConnection, "begun", went_on)
    orders.handler()
    source = backlog(orders)
    assert worker(orders.app, once=True).run() == 0
    assert seen[0] >= max(cuts)
    assert sorted(source.settled_ids) == IDS
    for message_id in IDS:
        assert orders.effects(message_id) == 1
    assert statuses(orders.raw) == {"processed": len(IDS)}


def test_the_table_has_its_turn_amid_a_backlog(postgresql_url: str) -> None:
    """A row whose retry is due does not wait until the source has nothing more."""
    with opened(postgresql_url, batching=Batching(messages=SIZE)) as shop:
        at_its_turn = threading.Event()

        def body(message: Message[Any], tx: Any) -> None:
            del tx
            if message.id == "first" and message.attempt == 1:
                raise ValueError
            if message.id == "first":
                at_its_turn.set()

        shop.handler(body)
        source = Flood([paid("first")])
        shop.app.consume(source)
        with running(worker(shop.app)):
            eventually(at_its_turn.is_set, "the retry")
        assert source.given > 2 * SIZE


def test_nothing_is_claimed_ahead_when_it_is_the_tables_turn(
    orders: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Table, "has_work", True)
    commits = Commits(monkeypatch)
    orders.handler()
    backlog(orders)
    assert worker(orders.app, once=True).run() == 0
    assert commits.followed
    assert commits.ahead == 0


class Flood(Memory):
    """Whatever is asked for is there."""

    def __init__(self, first: list[Message[Any]]) -> None:
        super().__init__(first, endless=True)
        self.given = 0

    def receive(self, messages_max: int, wait_s: float) -> Any:
        while len(self.waiting) < messages_max:
            self.given += 1
            message = paid(f"f{self.given}")
            self.waiting += Memory([message]).waiting
        return super().receive(messages_max, wait_s)


def test_a_connection_is_given_back_after_sixteen_in_a_row(
    orders: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_pace(orders.app, monkeypatch, 1)
    commits = Commits(monkeypatch)
    orders.handler()
    backlog(orders)
    assert worker(orders.app, once=True).run() == 0
    rows = "".join("x" if each else " " for each in commits.followed).split()
    assert max(map(len, rows)) == 16


def test_a_pools_only_connection_is_given_back_now_and_then(postgresql_url: str) -> None:
    """Claims ahead keep a connection; others that wait for it have their turn amid a backlog."""
    with ConnectionPool(postgresql_url, min_size=1, max_size=1, open=True) as pool:
        app = App(pool, batching=Batching(messages=SIZE), limits=Limits())
        with pool.connection() as connection:
            connection.execute("CREATE TABLE effect (message_id text, note text)")

        @app.handler(TOPIC, consumer=CONSUMER)
        def handle(message: Message[Any], tx: Any) -> None:
            add_effect(tx, message.id)

        source = Flood([])
        app.consume(source)
        with running(worker(app, relay=False)):
            eventually(lambda: len(source.settled) > 20 * SIZE, "a backlog at work")
            done = 0
            for _ in range(3):
                with pool.connection(timeout=DEADLINE_S) as connection:
                    (done,) = connection.execute("SELECT count(*) FROM effect").fetchone() or (0,)
                    connection.commit()
            assert done
        app.close()


# -- the session of a lane, by itself ---------------------------------------------------------------


class Follows:
    """Has the next batch ready: an operation that begins with TWO."""

    def __init__(self, lends: Lends) -> None:
        self.told = lends.told
        self.operation: Coroutine[Any, Any, Any] | None = None

    def begin(self, db: LaneSession) -> Statements | None:
        async def operation() -> Sequence[Result]:
            return await db.begin(TWO)

        self.operation = operation()
        return db.prepare(self.operation)

    def put_back(self) -> None:
        assert self.operation is not None
        self.operation.close()
        self.told.append("put back")


def driven(lends: Lends, operation: Callable[[LaneSession], Coroutine[Any, Any, Any]]) -> None:
    with closing(LaneSession(lends)) as db:
        blocking(operation(db))


def test_what_was_begun_behind_a_commit_is_the_next_operations() -> None:
    lends = Lends()
    follows = Follows(lends)

    async def operation(db: LaneSession) -> None:
        with db.followed_by(follows):
            await db.begin(ONE)
            await db.commit(ONE)
        assert follows.operation is not None
        with pytest.raises(StopIteration):
            follows.operation.send(None)
        await db.commit()

    driven(lends, operation)
    assert lends.told == ["begin one", "commit one", "begun two", "commit", "released"]


@pytest.mark.parametrize("verb", ["begin", "read", "wait"])
def test_a_batch_that_goes_on_puts_back_what_was_prepared_behind_it(verb: str) -> None:
    lends = Lends()

    async def operation(db: LaneSession) -> None:
        with db.followed_by(Follows(lends)):
            await db.begin(ONE)
            await db.commit(ONE)
            if verb == "begin":
                await db.begin(ONE)
                await db.commit()
            elif verb == "read":
                await db.alone(ONE[0])
            else:
                await db.wait(0)

    driven(lends, operation)
    told = lends.told
    assert told[:5] == ["begin one", "commit one", "put back", "rollback", "released"]
    # and nothing is offered to a later COMMIT of the batch
    assert told.count("put back") == 1


@pytest.mark.parametrize(("statements", "goes_on"), [((), False), (ONE, True)])
def test_nothing_is_offered_behind_a_commit_without_statements_or_one_that_goes_on(
    statements: Statements, goes_on: bool
) -> None:
    lends = Lends()
    follows = Follows(lends)

    async def operation(db: LaneSession) -> None:
        with db.followed_by(follows):
            await db.begin(ONE)
            await db.commit(statements, goes_on=goes_on)

    driven(lends, operation)
    assert follows.operation is None
    assert lends.told == ["begin one", "commit one" if statements else "commit", "released"]
