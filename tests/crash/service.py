"""The service whose worker is killed: a bank that books one payment per message, and a broker made of one file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from tests.support.databases import Raw
from tests.support.waiting import DEADLINE_S
from txbox import App, Lease, Message, RetryPolicy
from txbox.handlers import Handler
from txbox.outcome import Answer
from txbox.processing.waiting import Holder
from txbox.session import Statements, at, blocking, drive
from txbox.testing import drain
from txbox.worker.lane import LaneSession, Prepared

Mode = Literal["inline", "retried", "stored", "batched", "pipelined", "ahead"]
MODES: tuple[Mode, ...] = ("inline", "retried", "stored", "batched", "pipelined", "ahead")

TABLES = (
    "CREATE TABLE ledger (consumer varchar(99) NOT NULL, message_id varchar(99) NOT NULL, amount integer NOT NULL)",
    "CREATE TABLE account (name varchar(99) NOT NULL PRIMARY KEY, balance integer NOT NULL)",
    "CREATE TABLE seen (consumer varchar(99), message_id varchar(99), PRIMARY KEY (consumer, message_id))",
)
AMOUNT = 7
LEASE_S = 0.4
MAX_ATTEMPTS = 5


@dataclass(frozen=True)
class Job:
    """One message for one worker.

    Args:
        consumer: a name that no other job has: jobs share tables and meet in no row.
        journal: the file in which the broker and the worker keep what happened, synced line by line.
    """

    url: str
    mode: Mode
    consumer: str
    journal: str

    @property
    def message(self) -> Message[Any]:
        return self.messages[0]

    @property
    def messages(self) -> list[Message[Any]]:
        """What the broker delivers: one message, or a batch whose second one fails at its first attempt."""
        name = f"payment-{self.consumer}"
        ids = [name, f"{name}-culprit", f"{name}-third"] if self.batched else [name]
        return [
            Message(id=message_id, topic="payments", payload=b'{"amount": 7}') for message_id in ids
        ]

    @property
    def batched(self) -> bool:
        return self.mode in ("batched", "pipelined", "ahead")

    def note(self, line: str) -> None:
        """Write a line that survives this process."""
        descriptor = os.open(self.journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, f"{line}\n".encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def notes(self) -> list[str]:
        path = Path(self.journal)
        return path.read_text().splitlines() if path.exists() else []

    @property
    def acked(self) -> bool:
        return "acked" in self.notes()


def execute(tx: Any, sql: str, *params: object) -> None:
    """Run a statement on the transaction object of any driver."""
    cursor = tx.cursor()
    try:
        cursor.execute(
            sql if type(tx).__module__.startswith("sqlite3") else sql.replace("?", "%s"), params
        )
    finally:
        cursor.close()


def book(job: Job, tx: Any, message: Message[Any] | None = None) -> None:
    """The business: two writes that belong together."""
    write = _put_off if job.mode == "pipelined" else execute
    write(
        tx, "INSERT INTO ledger (consumer, message_id, amount) VALUES (?, ?, ?)",
        job.consumer, (message or job.message).id, AMOUNT,
    )  # fmt: skip
    at("between:writes")
    write(tx, "UPDATE account SET balance = balance + ? WHERE name = ?", AMOUNT, job.consumer)


def _put_off(tx: Any, sql: str, *params: object) -> None:
    # a cursor would send it at once
    tx.execute(sql.replace("?", "%s"), params)


def service(job: Job, handle: Callable[[Message[Any], Any], None] | None = None) -> App:
    """The app of a job; `retried` fails the first recorded attempt, after its writes."""
    app = App(job.url, lease=Lease(duration=timedelta(seconds=LEASE_S)))
    retry = RetryPolicy(max_attempts=MAX_ATTEMPTS, base=timedelta(0))
    mode: Literal["inline", "stored"] = "stored" if job.mode == "stored" else "inline"

    def take_payment(message: Message[Any], tx: Any) -> None:
        book(job, tx, message)
        culprit = job.mode == "retried" or str(message.id).endswith("-culprit")
        if culprit and message.attempt == 1:
            raise ValueError("the first attempt fails")

    app.handler(
        "payments", consumer=job.consumer, retry=retry, mode=mode, pipeline=job.mode == "pipelined"
    )(handle or take_payment)
    return app


def receive(app: App, job: Job) -> None:
    """Take the delivery from the broker unless it was acknowledged, and acknowledge it."""
    if job.acked:
        return
    at("received")
    if job.batched:
        (handler,) = app.handlers
        assert app.database.sync is not None
        if job.mode == "ahead":
            with closing(LaneSession(app.database.sync)) as db:
                settled = blocking(_ahead(db, app, handler, job))
        else:
            # as a lane does: a claim that the server has cut off, because this process stood still, is made again
            settled = drive(app.database.sync, app.intake.take_with_retries, handler, job.messages)
        outcomes = [answer.outcome for answer in settled]
    else:
        outcomes = [app.process(job.message)]
    for outcome in outcomes:
        job.note(f"outcome {outcome}")
    if all(outcome.settles for outcome in outcomes):
        acknowledge(job)


class _Last:
    """The last message, behind the COMMIT of those before it."""

    def __init__(self, app: App, handler: Handler, job: Job) -> None:
        self._app, self._handler, self._job = app, handler, job
        self.holder = Holder()
        self.ahead: Prepared | None = None

    def begin(self, db: LaneSession) -> Statements | None:
        last = self._job.messages[2:]
        operation = self._app.intake.take_with_retries(db, self._handler, last, holder=self.holder)
        self.ahead = Prepared(db, [], operation)
        return self.ahead.statements

    def put_back(self) -> None:
        if self.ahead is not None:
            self.ahead.close()
        self.ahead = None


async def _ahead(db: LaneSession, app: App, handler: Handler, job: Job) -> list[Answer]:
    """Take the last message behind the COMMIT of the first two, as a lane does."""
    last = _Last(app, handler, job)
    with db.followed_by(last):
        settled = await app.intake.take_with_retries(
            db, handler, job.messages[:2], holder=last.holder
        )
    if last.ahead is None:
        # nothing was committed, or more was to be done
        last.begin(db)
    assert last.ahead is not None
    settled += await last.ahead.answers()
    return settled


def acknowledge(job: Job) -> None:
    at("before:ack")
    job.note("acked")
    at("after:ack")


def work_until_quiet(app: App, job: Job) -> None:
    """Run the table's work, rescue included, until no row of the job is unfinished.

    Raises:
        TimeoutError: something is stuck.
    """
    deadline = time.monotonic() + DEADLINE_S
    while True:
        for outcome in drain(app):
            job.note(f"outcome {outcome}")
        # the tests' own view: it passes no crash point
        with Raw(job.url) as raw:
            unfinished = raw.value(
                "SELECT count(*) FROM txbox_inbox WHERE consumer = ?"
                " AND status IN ('pending', 'processing', 'failed')",
                (job.consumer,),
            )
        if not unfinished:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{job.consumer} is not quiet after {DEADLINE_S:g} s")
        time.sleep(0.02)
