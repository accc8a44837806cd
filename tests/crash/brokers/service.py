"""The service whose worker is killed: a bank that books one payment for each message, whatever the broker."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from tests.crash.brokers import hooks
from tests.crash.brokers.feeds import FEEDS, Feed, Sent
from tests.crash.service import execute
from tests.support.databases import Raw
from txbox import App, Batching, Lease, Limits, Message, RetryPolicy
from txbox.brokers.base import Context, Delivery, Source
from txbox.events import ConsumptionPaused, ConsumptionResumed, Event, LeaseExpired, MessageFailed
from txbox.session import at
from txbox.worker import Worker

Mode = Literal["inline", "stored"]
CONSUMER = "bank"
AMOUNT = 7
MAX_ATTEMPTS = 8
LEASE_S = 1.5
DISTINCT = 20
#: its first attempt fails, after its writes
FAILS = "p3"
TABLES = (
    "CREATE TABLE ledger (payment varchar(99) NOT NULL, amount integer NOT NULL)",
    "CREATE TABLE account (name varchar(99) NOT NULL PRIMARY KEY, balance integer NOT NULL)",
)
_LOOK_S = 0.1
# longer than a client keeps to itself what it has prefetched, and than a batch takes
_SILENT_S, _GIVEN_UP_S = 0.5, 3.0


@dataclass(frozen=True)
class Job:
    """One feed, one database, one folder for what the processes write down.

    Args:
        broker: a row of `FEEDS`, or "webhook".
        wrong: a row of `mutants.WRONG`; None is the real consumer.
        handle_s: how long the handler takes, besides its writes.
    """

    database_url: str
    broker: str
    broker_url: str
    name: str
    mode: Mode
    folder: str
    wrong: str | None = None
    handle_s: float = 0.0
    concurrency: int = 1
    workers: int = 1

    @property
    def feed(self) -> Feed:
        if self.broker == "webhook":
            return hooks.WebhookFeed(self.folder, self.name)
        return FEEDS[self.broker](self.broker_url, self.name)

    def note(self, line: str) -> None:
        hooks.append(self._journal, f"{line}\n")

    def notes(self) -> list[str]:
        return self._journal.read_text().splitlines() if self._journal.exists() else []

    @property
    def _journal(self) -> Path:
        return Path(self.folder, "journal")

    @property
    def feeding(self) -> Path:
        """A file that is there as long as more is to come."""
        return Path(self.folder, "feeding")


def messages(first: int = 0, distinct: int = DISTINCT) -> list[Sent]:
    """Payments, and a copy of every tenth close behind its original."""
    sent: list[Sent] = []
    for number in range(first, first + distinct):
        sent.append(Sent(f"p{number}", json.dumps({"payment": f"p{number}"}).encode()))
        if number % 10 == 4:
            sent.append(sent[-3])
    return sent


class Watched:
    """The source, with a count of what it has handed out and not got back."""

    def __init__(self, source: Source) -> None:
        self._source: Any = source
        self._consumer: Any = None
        self.in_flight = 0
        self.changed_at = time.monotonic()

    def consumer(self, topics: Sequence[str], context: Context) -> Any:
        self._consumer = self._source.consumer(topics, context)
        return self

    def __getattr__(self, name: str) -> Any:
        # what is open knows more
        return getattr(self._consumer if hasattr(self._consumer, name) else self._source, name)

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        found: Sequence[Delivery] = self._consumer.receive(messages_max, wait_s)
        if found:
            self.in_flight += len(found)
            self.changed_at = time.monotonic()
        return found

    def settle(self, deliveries: Sequence[Delivery]) -> None:
        self._consumer.settle(deliveries)
        self.in_flight -= len(deliveries)
        self.changed_at = time.monotonic()

    @property
    def done(self) -> bool:
        silent_s = time.monotonic() - self.changed_at
        # what died with a connection is never settled, and comes again
        return silent_s > (_SILENT_S if self.in_flight <= 0 else _GIVEN_UP_S)


def make(job: Job) -> App:
    def observe(event: Event) -> None:
        if isinstance(event, MessageFailed):
            job.note(f"failed {event.message_id}")
            job.note(f"because {event.error_type}: {event.error}")
        elif isinstance(event, LeaseExpired):
            job.note(f"expired {event.message_id}")
        elif isinstance(event, ConsumptionPaused):
            job.note(f"paused {event.reason}")
        elif isinstance(event, ConsumptionResumed):
            job.note("resumed")

    app = App(
        job.database_url,
        # a killed worker's rows come back soon, and are not taken for poison however often it is killed
        lease=Lease(duration=timedelta(seconds=LEASE_S), max_starts=1000),
        limits=Limits(lock_timeout=timedelta(seconds=1)),
        # small: several batches, and on Kafka a first window that is smaller than the whole
        batching=Batching(messages=3),
        observers=[observe],
    )

    @app.handler(
        job.feed.topic, consumer=CONSUMER, mode=job.mode, concurrency=job.concurrency,
        retry=RetryPolicy(max_attempts=MAX_ATTEMPTS, base=timedelta(0)),
    )  # fmt: skip
    def take_payment(message: Message[Any], tx: Any) -> None:
        payment = json.loads(message.payload or b"")["payment"]
        execute(tx, "INSERT INTO ledger (payment, amount) VALUES (?, ?)", payment, AMOUNT)
        at("between:writes")
        execute(tx, "UPDATE account SET balance = balance + ? WHERE name = 'bank'", AMOUNT)
        if job.handle_s:
            time.sleep(job.handle_s)
        if payment == FAILS and message.attempt == 1:
            raise ValueError("the first attempt fails")

    return app


def work(
    job: Job,
    listener: socket.socket | None,
    *,
    member: int = 0,
    wrap: Callable[[Watched, App], Any] | None = None,
) -> int:
    """Run a worker until nothing is left; returns its exit status."""
    app = make(job)
    watched: Watched | None = None
    if job.broker != "webhook":
        watched = Watched(job.feed.source(member))
        source: Any = watched if wrap is None else wrap(watched, app)
        app.consume(source, topics=[job.feed.topic])
    worker = Worker(app)
    threading.Thread(target=_stop_when_quiet, args=(job, worker, watched), daemon=True).start()
    serving = (
        nullcontext()
        if listener is None
        else hooks.serving(app, job.feed.topic, listener, job.wrong)
    )
    with serving:
        return worker.run()


def _stop_when_quiet(job: Job, worker: Worker, watched: Watched | None) -> None:
    while not quiet(job, watched):
        time.sleep(_LOOK_S)
    worker.stop()


def quiet(job: Job, watched: Watched | None) -> bool:
    """Say whether nothing is left: at the producer, in the table, in this process, in the broker."""
    if job.feeding.exists():
        return False
    blind = watched if not job.feed.sees_unacknowledged else None
    changed_at = blind.changed_at if blind is not None else 0.0
    if blind is not None and not blind.done:
        return False
    try:
        if job.feed.left(job.workers):
            return False
    except Exception as error:  # noqa: BLE001  # the broker is killed by some scenarios
        job.note(f"broker {type(error).__name__}")
        return False
    # after the broker: what has left it is in the table. The tests' own view passes no crash point
    with Raw(job.database_url) as raw:
        return not unfinished(raw) and (blind is None or blind.changed_at == changed_at)


def unfinished(raw: Raw) -> int:
    return int(
        raw.value(
            "SELECT count(*) FROM txbox_inbox WHERE status IN ('pending', 'processing', 'failed')"
        )
    )
