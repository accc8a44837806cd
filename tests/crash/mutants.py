"""Consumers: the real one, and wrong ones that a sound checker must catch. Nothing here is for use."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import psycopg
import pymysql

from tests.crash.service import (
    Job,
    Mode,
    acknowledge,
    book,
    execute,
    receive,
    service,
    work_until_quiet,
)
from tests.support.databases import Raw
from txbox import App, Message
from txbox.handlers import Handler
from txbox.processing.calls import handled
from txbox.processing.failure import Recorder
from txbox.processing.transaction import NEW, Claim, End, HandlerTransaction, TransactionResult
from txbox.session import Session, Statement, at, drive
from txbox.store import leases
from txbox.store.codec import Arrival
from txbox.store.inbox import InboxStore
from txbox.testing import another_process, drain, meanwhile


@dataclass(frozen=True)
class Consumer:
    """A way to work on a job.

    Args:
        swept: it is killed at every point; else its own steps make the trouble, once.
        may_die: a dead letter without an effect is a good end.
        starts: runs that it leaves without an end, besides those of killed workers.
        deduplicates: a copy that comes late is the real protocol's to refuse.
    """

    title: str
    work: Callable[[Job], None]
    swept: bool = True
    may_die: bool = False
    starts: int = 0
    deduplicates: bool = True
    open: Callable[[Job], App] = field(default=service)


def deliver_late(consumer: Consumer, job: Job) -> None:
    """Deliver a copy of a message that was acknowledged long ago."""
    with consumer.open(job) as app:
        for message in job.messages:
            job.note(f"late {app.process(message)}")
        drain(app)


def _consume(job: Job) -> None:
    with service(job) as app:
        receive(app, job)
        work_until_quiet(app, job)


# -- (a) the dedupe row in a transaction of its own ---------------------------------------------


class _OwnTransaction(HandlerTransaction):
    """Commits the inbox row first and the handler's writes afterwards."""

    async def once(self, db: Session, handler: Handler, arrival: Arrival) -> TransactionResult:
        return await self.run(db, handler, [arrival], NEW)

    async def run(
        self,
        db: Session,
        handler: Handler,
        arrivals: Sequence[Arrival],
        claim: Claim,
        *,
        group: int = 0,
        returned: list[Any] | None = None,
    ) -> TransactionResult:
        ran, token = TransactionResult(End.COMMITTED), secrets.token_hex(16)
        ids = [row.message_id for row in arrivals]
        claiming = self.claiming(handler, arrivals, claim, token)
        results = await db.begin(claiming)
        won = self.store.claimed(claiming, results)
        fresh = None if won is None else won.ids
        ran.existing = await self.store.classify(db, handler.consumer, ids)
        if fresh is None:
            fresh = {each for each, row in ran.existing.items() if row.token == token}
        ran.fresh = fresh
        mine = [row for row in arrivals if row.message_id in fresh]
        await db.execute(self.store.closing(token))
        if mine and self.store.dialect.has("complete"):
            await db.execute(
                self.store.complete(
                    handler.consumer,
                    [row.message_id for row in mine],
                    token=token,
                    keep=handler.keeps_payload,
                )
            )
        await db.commit()
        if mine and returned is None:
            await db.begin()
            await handled(db, handler, mine)
            await db.commit()
        return ran


def _own_transaction(job: Job) -> App:
    app = service(job)
    recorder = Recorder(app.store, app.events, app.limits)
    app.protocol.transaction = _OwnTransaction(app.store, app.limits, app.lease, recorder)
    return app


def _consume_own_transaction(job: Job) -> None:
    with _own_transaction(job) as app:
        receive(app, job)
        work_until_quiet(app, job)


# -- (b) acknowledged before the commit ---------------------------------------------------------


def _consume_ack_first(job: Job) -> None:
    with service(job) as app:
        if not job.acked:
            at("received")
            acknowledge(job)
            job.note(f"outcome {app.process(job.message)}")
        work_until_quiet(app, job)


# -- (c) a swallowed database error, and no close that would see it ------------------------------


def _book_and_swallow(job: Job, tx: Any) -> None:
    """Book, then catch an error that has rolled back (or doomed) the whole transaction."""
    book(job, tx)
    name = type(tx).__module__.partition(".")[0]
    if name == "psycopg":
        try:
            execute(tx, "INSERT INTO account (name, balance) VALUES (?, 0)", job.consumer)
        except psycopg.errors.UniqueViolation:
            return
    elif name == "sqlite3":
        try:
            execute(
                tx, "INSERT OR ROLLBACK INTO account (name, balance) VALUES (?, 0)", job.consumer
            )
        except Exception as error:
            if getattr(error, "sqlite_errorname", "") != "SQLITE_CONSTRAINT_PRIMARYKEY":
                raise
            return
    else:
        _lose_a_deadlock(job, tx)
        return
    raise AssertionError("the statement should have failed")


def _lose_a_deadlock(job: Job, tx: Any) -> None:
    """Be the victim of a deadlock (error 1213: all is rolled back, and the next statement begins anew)."""
    rows = [f"{job.consumer}-first", f"{job.consumer}-second"]
    with Raw(job.url) as raw:
        for name in rows:
            raw.execute("INSERT IGNORE INTO account (name, balance) VALUES (?, 0)", (name,))
    with Raw(job.url) as rival:
        rival.execute("BEGIN")
        rival.execute("UPDATE account SET balance = balance WHERE name = ?", (rows[1],))
        # the victim is the transaction that has written less, whichever of the two asks last
        for number in range(50):
            rival.execute("INSERT INTO seen VALUES (?, ?)", (f"{job.consumer}-rival", str(number)))
        execute(tx, "UPDATE account SET balance = balance + 1 WHERE name = ?", rows[0])
        waiting = threading.Thread(
            target=rival.execute,
            args=("UPDATE account SET balance = 1 WHERE name = ?", (rows[0],)),
        )
        waiting.start()
        try:
            execute(tx, "UPDATE account SET balance = 1 WHERE name = ?", rows[1])
        except pymysql.OperationalError as error:
            if error.args[0] != 1213:
                raise
        else:
            raise AssertionError("the rival should have won")
        finally:
            waiting.join()
            rival.execute("ROLLBACK")


def _consume_swallowing_by_hand(job: Job) -> None:
    """The loop of many tutorials: insert the id, run the handler, commit, acknowledge."""
    if job.acked:
        return
    raw = Raw(job.url)
    tx = raw._connection
    if type(tx).__module__.startswith("sqlite3"):
        tx.isolation_level = "IMMEDIATE"
    elif isinstance(tx, psycopg.Connection):
        tx.autocommit = False
    else:
        tx.autocommit(False)
    execute(
        tx, "INSERT INTO seen (consumer, message_id) VALUES (?, ?)", job.consumer, job.message.id
    )
    _book_and_swallow(job, tx)
    tx.commit()
    acknowledge(job)
    raw.close()


def _swallowing(job: Job) -> App:
    def swallow_once(message: Message[Any], tx: Any) -> None:
        if message.attempt == 1:
            _book_and_swallow(job, tx)
        else:
            book(job, tx)

    return service(job, swallow_once)


def _consume_swallowing(job: Job) -> None:
    with _swallowing(job) as app:
        receive(app, job)
        work_until_quiet(app, job)


# -- (d) a failure that is written whatever has become of the row -------------------------------


def _late_failure(job: Job, *, unconditional: bool) -> None:
    """Worker 1 fails; before it records that, worker 2 processes the redelivery."""
    failing = [True]

    def fail_first(message: Message[Any], tx: Any) -> None:
        book(job, tx)
        if failing[0]:
            raise ValueError("worker 1 fails")

    def overtake() -> None:
        failing[0] = False
        job.note(f"outcome {another_process(app).process(job.message)}")

    with service(job, fail_first) as app:
        if job.acked:
            return
        wrong = patch.object(InboxStore, "record_failure", _record_unconditionally)
        moment = meanwhile("before:begin", overtake, nth=_passes_before_record(app))
        with wrong if unconditional else nullcontext(), moment:
            job.note(f"outcome {app.process(job.message)}")
        assert not failing[0], "worker 2 never ran"
        acknowledge(job)
        work_until_quiet(app, job)


def _passes_before_record(app: App) -> int:
    """BEGIN of the claim is pass 1 once the schema was checked; that of the record is pass 2."""
    assert app.database.sync is not None
    drive(app.database.sync, app.protocol.check_schema)
    return 2


async def _record_unconditionally(
    store: InboxStore,
    db: Session,
    consumer: str,
    arrival: Arrival,
    failure: Any,
    retry: Any,
    *,
    token: str,
    lock_timeout: object,
    dying: object = None,
) -> Any:
    await db.begin()
    await db.execute(
        Statement(
            "record_unconditionally",
            "UPDATE txbox_inbox SET status = 'failed', attempts = attempts + 1, next_attempt_at = received_at,"
            " lease_until = NULL, token = NULL, payload = :payload, has_payload = :yes"
            " WHERE consumer = :consumer AND message_id = :message_id",
            {
                "consumer": consumer,
                "message_id": arrival.message_id,
                "payload": arrival.message.payload,
                "yes": True,
            },
        )
    )
    await db.commit()
    return False, 1


# -- (e) a leased completion without the fence --------------------------------------------------


def _zombie(job: Job, *, fenced: bool) -> None:
    """Worker 1 leases a row and sleeps past its lease; worker 2 processes it; worker 1 wakes up."""
    with service(job) as app:
        if job.acked:
            return
        receive(app, job)
        (handler,) = app.handlers
        assert app.database.sync is not None
        connections = app.database.sync
        (leased,) = drive(
            connections,
            leases.lease,
            app.store,
            job.consumer,
            token="zombie",
            limit=1,
            lease=app.lease,
            suspect=False,
        )
        with Raw(job.url) as raw:
            raw.execute(
                "UPDATE txbox_inbox SET lease_until = received_at WHERE consumer = ?",
                (job.consumer,),
            )
        for outcome in drain(another_process(app)):
            job.note(f"outcome {outcome}")
        wrong = patch.object(InboxStore, "claim_known", _unfenced(InboxStore.claim_known))
        with nullcontext() if fenced else wrong:
            settled = drive(connections, app.protocol.run_leased, handler, leased, "zombie")
        job.note(f"zombie {settled.outcome}")
        work_until_quiet(app, job)


def _unfenced(
    fenced: Callable[..., tuple[Statement, ...]],
) -> Callable[..., tuple[Statement, ...]]:
    def claim(*args: Any, **options: Any) -> tuple[Statement, ...]:
        return tuple(map(_without_fence, fenced(*args, **options)))

    return claim


def _without_fence(statement: Statement) -> Statement:
    if statement.name != "claim_leased":
        return statement
    sql = statement.sql
    for fence in (
        "AND inbox.token = :lease::text AND inbox.status = 'processing'",
        "AND token = :lease AND status = 'processing'",
    ):
        sql = sql.replace(fence, "")
    assert sql != statement.sql, "the fence is written in other words now"
    # MySQL's complete looks for the status that the claim writes there
    return statement._replace(sql=sql.replace("SET starts", "SET status = 'processing', starts"))


CONSUMERS = {
    "txbox": Consumer("txbox", _consume),
    "own-transaction": Consumer(
        "dedupe row in its own transaction", _consume_own_transaction, open=_own_transaction
    ),
    "ack-first": Consumer("acknowledged before the commit", _consume_ack_first),
    "swallowing": Consumer(
        "txbox, swallowed database error", _consume_swallowing, swept=False, may_die=True,
        open=_swallowing,
    ),
    "swallowing-no-close": Consumer(
        "swallowed database error, no close", _consume_swallowing_by_hand, swept=False,
        deduplicates=False,
    ),
    "late-failure": Consumer(
        "txbox, failure recorded late", lambda job: _late_failure(job, unconditional=False), swept=False
    ),
    "late-failure-unconditional": Consumer(
        "failure written unconditionally", lambda job: _late_failure(job, unconditional=True), swept=False
    ),
    "zombie": Consumer("txbox, zombie past its lease", lambda job: _zombie(job, fenced=True), swept=False, starts=1),
    "zombie-no-fence": Consumer(
        "leased completion without the fence", lambda job: _zombie(job, fenced=False), swept=False
    ),
}  # fmt: skip

#: wrong consumer → (mode, the real one that is put through the same).
MUTANTS: dict[str, tuple[Mode, str]] = {
    "own-transaction": ("inline", "txbox"),
    "ack-first": ("inline", "txbox"),
    "swallowing-no-close": ("inline", "swallowing"),
    "late-failure-unconditional": ("inline", "late-failure"),
    "zombie-no-fence": ("stored", "zombie"),
}
