"""What a chaos run does: transfers and lists that two Apps book, their producer, and an operator who interferes."""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, cast

from tests.chaos.brokers import Broker, WebhookFeed
from tests.chaos.journal import Journal
from tests.crash.service import execute
from txbox import App, Batching, GapPolicy, Lease, Limits, Message, RelayPolicy, RetryPolicy
from txbox.admin import Admin, InboxFilter, OutboxFilter, QuarantineFilter
from txbox.brokers.base import Context, Delivery, Destination, Publisher
from txbox.cli import main as txbox_command
from txbox.errors import BrokerError, BrokerUnavailable, TxboxError
from txbox.store import schema as tables

ACCOUNTS = 2000
KEYS = 20
_REPEATED_MAX = 200
MAX_ATTEMPTS = 6
LEASE = timedelta(seconds=4)
LIMITS = Limits(payload_bytes=16 * 1024, headers_bytes=8 * 1024, lock_timeout=timedelta(seconds=1))
TABLES = (
    "CREATE TABLE account (name integer NOT NULL PRIMARY KEY, balance bigint NOT NULL)",
    "CREATE TABLE ledger (consumer varchar(20) NOT NULL, message_id varchar(99) NOT NULL, amount integer NOT NULL)",
    "CREATE TABLE counter (name varchar(20) NOT NULL PRIMARY KEY, n integer NOT NULL)",
    "CREATE TABLE appended (name varchar(20) NOT NULL, n integer NOT NULL, previous integer NOT NULL)",
    "CREATE TABLE books (cause varchar(99) NOT NULL, message_id varchar(99) NOT NULL)",
)
#: A row that refers to nothing: refused at COMMIT, where the database can.
LATE = "CREATE TABLE late (account integer NOT NULL REFERENCES account (name) DEFERRABLE INITIALLY DEFERRED)"
TYPES = ("inline", "stored", "batch", "append", "version")
#: The type of a message, by its number; a key has one version in each round of `KEYS` rounds of these.
MIX = (*("inline", "batch", "stored", "append") * 4, "inline", "batch", "stored", "version")
#: Handlers of each type; the other consumer of inline messages only writes them down.
CONSUMERS = {name: (name, "copy") if name == "inline" else (name,) for name in TYPES}
CONSUMERS["odd"] = ("odd",)
#: Consumers that the operator pauses.
PAUSED = ("inline", "stored", "list")
#: Consumers that append to lists.
LISTS = ("list", "version")
#: What staged a message for the second App.
CHAINED = ("inline", "stored", "batch")
Does = Literal[
    "ok", "slow", "poison", "late", "malformed", "oversize", "full", "commit", "rollback", "swallow"
]
_SELDOM: tuple[tuple[Does, float], ...] = (
    ("poison", 0.01), ("late", 0.005), ("malformed", 0.003), ("slow", 0.002), ("oversize", 0.001), ("full", 0.001),
    ("commit", 0.001), ("rollback", 0.001), ("swallow", 0.001),
)  # fmt: skip
BREAKS = ("commit", "rollback", "swallow")


@dataclass(frozen=True)
class Plan:
    """All that a process of a run needs to know.

    Args:
        role: `bank`, `relay`, `maintain`, `books`, `producer` or `operator`.
        process: its name in the journal.
        clock_s: how much its clock is ahead of everybody's.
        rate: messages a second that the producer does not exceed.
        waiting: messages in the broker above which the producer waits.
        port: where it serves its webhook, if it has one.
        is_next: it is a process of the release that follows, see `release`.
    """

    role: str
    process: str
    folder: Path
    seed: int
    database_url: str
    payments: Broker
    entries: Broker
    batch: int = 50
    concurrency: int = 1
    connections: int | None = None
    clock_s: float = 0.0
    rate: float = 600.0
    waiting: int = 1500
    port: int | None = None
    is_next: bool = False
    options: dict[str, Any] = field(default_factory=dict)


# -- messages -----------------------------------------------------------------------------------------


def message_of(seed: int, number: int, topic: str = "") -> Message[Any]:
    """The message of this number: the same in every process and in every run with this seed."""
    rng = random.Random(seed * 1_000_003 + number)  # repeatable, no secret
    kind = type_of(number)
    body: dict[str, Any] = {
        "from": rng.randrange(ACCOUNTS), "to": rng.randrange(ACCOUNTS), "amount": rng.randrange(1, 99),
    }  # fmt: skip
    does, key = _does(rng, kind), str(rng.randrange(KEYS))
    if kind == "version":
        # its producer numbers the versions of a key without gaps
        at = number // len(MIX)
        key, body["n"] = str(at % KEYS), at // KEYS + 1
    if does in BREAKS:
        kind = "odd"
    body["does"] = does
    payload = json.dumps(body).encode()
    headers: list[tuple[str, str]] = []
    match does:
        case "malformed":
            payload = payload[:-1]
        case "oversize":
            body["text"] = "x" * LIMITS.payload_bytes
            payload = json.dumps(body).encode()
        case "full":
            headers = [("note", "x" * (LIMITS.headers_bytes // 2))]
            body["text"] = ""
            body["text"] = "x" * (LIMITS.payload_bytes - len(json.dumps(body)))
            payload = json.dumps(body).encode()
        case _:
            pass
    return Message(
        id=f"{kind}-{does}-{number}", topic=topic, type=kind, key=key, payload=payload, headers=headers,
        content_type="application/json",
    )  # fmt: skip


def _does(rng: random.Random, kind: str) -> Does:
    draw = rng.random()
    for does, share in _SELDOM:
        if draw < share:
            # a version that never comes would hold its key for ever
            return "ok" if kind == "version" else does
        draw -= share
    return "ok"


def type_of(number: int) -> str:
    """The type as its producer numbers it: what breaks the contract has another one."""
    return MIX[number % len(MIX)]


def number_of(message_id: str) -> int:
    return int(message_id.rpartition("-")[2])


def other(message: Message[Any]) -> Message[Any]:
    """Another payload under the same id."""
    body = json.loads(message.payload or b"")
    return replace(message, payload=json.dumps({**body, "amount": body["amount"] + 100}).encode())


# -- the two services -----------------------------------------------------------------------------------


class _Counted:
    """A source, and what it opens: that writes down how many messages it delivers."""

    def __init__(self, source: Any, journal: Journal) -> None:
        self._source = source
        self._journal = journal

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def consumer(self, topics: Sequence[str], context: Context) -> Any:
        return _Counted(self._source.consumer(topics, context), self._journal)

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        deliveries: Sequence[Delivery] = self._source.receive(messages_max, wait_s)
        if deliveries:
            self._journal.write("received", len(deliveries))
        return deliveries


def _app(plan: Plan, journal: Journal) -> App:
    return App(
        plan.database_url,
        observers=[journal.observe],
        # a killed worker's rows come back soon, and are not taken for poison however often it is killed
        lease=Lease(duration=LEASE, max_starts=10_000),
        limits=replace(LIMITS, connections=plan.connections),
        # a slow server must not make batches of one
        batching=Batching(messages=plan.batch, duration=timedelta(milliseconds=500)),
        relaying=RelayPolicy(
            lease=LEASE, confirm_within=timedelta(seconds=1.5), poll=timedelta(milliseconds=500),
            retry=RetryPolicy(max_attempts=10_000, base=timedelta(milliseconds=50), cap=timedelta(seconds=1)),
        ),
    )  # fmt: skip


_RETRY = RetryPolicy(
    max_attempts=MAX_ATTEMPTS, base=timedelta(milliseconds=200), cap=timedelta(seconds=2)
)


def bank(plan: Plan, journal: Journal) -> App:
    """The first App: it books what arrives, and stages what the second one and its own lists need."""
    app = _app(plan, journal)
    topic, entries = plan.payments.topic, plan.entries.topic
    late = not plan.database_url.startswith("mysql")

    def book(tx: Any, message: Message[Any]) -> None:
        body, consumer = message.body, str(message.type)
        execute(
            tx, "INSERT INTO ledger (consumer, message_id, amount) VALUES (?, ?, ?)",
            consumer, str(message.id), body["amount"],
        )  # fmt: skip
        for name, amount in sorted(((body["from"], -body["amount"]), (body["to"], body["amount"]))):
            execute(tx, "UPDATE account SET balance = balance + ? WHERE name = ?", amount, name)
        if consumer in CHAINED:
            app.outbox.stage(
                tx, entries, {"cause": message.id}, type="entry", key=message.key, cause=message
            )
        match body["does"]:
            case "slow":
                time.sleep(0.5)
            case "late" if late:
                execute(tx, "INSERT INTO late (account) VALUES (?)", -1)
            case "poison" | "late":
                raise ValueError("poison")
            case _:
                pass

    @app.handler(
        topic, type="inline", consumer="inline", retry=_RETRY, concurrency=plan.concurrency,
        keep_payload=timedelta(seconds=20),
    )  # fmt: skip
    def inline(message: Message[dict[str, Any]], tx: Any) -> None:
        book(tx, message)

    @app.handler(topic, type="stored", consumer="stored", retry=_RETRY, mode="stored")
    def stored(message: Message[dict[str, Any]], tx: Any) -> None:
        book(tx, message)

    @app.handler(topic, type="batch", consumer="batch", retry=_RETRY, batch=True)
    def batch(messages: list[Message[dict[str, Any]]], tx: Any) -> None:
        for message in messages:
            book(tx, message)

    @app.handler(topic, type="inline", consumer="copy", retry=_RETRY)
    def copy(message: Message[dict[str, Any]], tx: Any) -> None:
        execute(
            tx, "INSERT INTO ledger (consumer, message_id, amount) VALUES ('copy', ?, ?)",
            str(message.id), message.body["amount"],
        )  # fmt: skip

    @app.handler(
        topic, type="append", consumer="append", retry=_RETRY, lock_key=lambda message: message.key
    )
    def append(message: Message[dict[str, Any]], tx: Any) -> None:
        """Stage the next number of a key: the row lock makes their order that of the commits."""
        execute(tx, "UPDATE counter SET n = n + 1 WHERE name = ?", message.key)
        number = _value(tx, "SELECT n FROM counter WHERE name = ?", message.key)
        app.outbox.stage(tx, "list", {"n": number}, type="list", key=message.key, ordered=True)
        book(tx, message)

    def append_to(tx: Any, consumer: str, message: Message[Any]) -> None:
        name, number = f"{consumer}-{message.key}", message.body["n"]
        journal.write("append", name, number, consumer, message.id)
        previous = _value(tx, "SELECT n FROM counter WHERE name = ?", name)
        execute(
            tx, "INSERT INTO appended (name, n, previous) VALUES (?, ?, ?)", name, number, previous
        )
        execute(tx, "UPDATE counter SET n = ? WHERE name = ?", number, name)

    @app.handler("list", type="list", consumer="list", retry=_RETRY, ordered=True)
    def listed(message: Message[dict[str, Any]], tx: Any) -> None:
        append_to(tx, "list", message)

    @app.handler(
        topic, type="version", consumer="version", retry=_RETRY, sequence="body.n",
        gaps=GapPolicy(wait=timedelta(hours=5)),
    )  # fmt: skip
    def version(message: Message[dict[str, Any]], tx: Any) -> None:
        append_to(tx, "version", message)
        book(tx, message)

    @app.handler(topic, type="odd", consumer="odd", retry=_RETRY)
    def odd(message: Message[dict[str, Any]], tx: Any) -> None:
        """Break the contract: commit or roll back, or swallow what the database says."""
        execute(
            tx, "INSERT INTO ledger (consumer, message_id, amount) VALUES ('odd', ?, 0)", str(message.id)
        )  # fmt: skip
        match message.body["does"]:
            case "commit":
                tx.commit()
            case "rollback":
                tx.rollback()
            case _:
                with suppress(Exception):
                    execute(tx, "SELECT * FROM no_such_table")

    # a name: some reach the broker through the proxy, and its address is the route otherwise
    app.publish(_destination(plan.entries), [entries], name="entries")
    return app


def _destination(feed: Broker) -> Destination:
    if isinstance(feed, WebhookFeed):
        return feed.destination()
    destination: Any = feed.source(0)
    return cast("Destination", destination)


def _value(tx: Any, sql: str, *params: object) -> Any:
    cursor = tx.cursor()
    try:
        sql = sql if type(tx).__module__.startswith("sqlite3") else sql.replace("?", "%s")
        cursor.execute(sql, params)
        return cursor.fetchone()[0]
    finally:
        cursor.close()


def books(plan: Plan, journal: Journal) -> App:
    """The second App: an entry for each booking of the first."""
    app = _app(plan, journal)

    @app.handler(plan.entries.topic, type="entry", consumer="books", retry=_RETRY)
    def entry(message: Message[dict[str, Any]], tx: Any) -> None:
        execute(
            tx, "INSERT INTO books (cause, message_id) VALUES (?, ?)",
            message.body["cause"], str(message.id),
        )  # fmt: skip

    return app


# -- processes ------------------------------------------------------------------------------------------

#: What `txbox` loads.
app: App


def run(plan: Plan) -> None:
    """The whole life of one process, as `txbox` runs it."""
    log = os.open(plan.folder / f"{plan.process}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    journal = Journal(plan.folder, plan.process, timed=LISTS)
    journal.write("began", plan.role, os.getpid(), tables.VERSION)
    # the harness asks those that are stuck where they are
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if plan.clock_s:
        _skew(plan.clock_s)
    match plan.role:
        case "producer":
            Producer(plan, journal).run()
        case "operator":
            operate(plan, journal)
        case role:
            sys.exit(_command(plan, journal, role))


def _command(plan: Plan, journal: Journal, role: str) -> int:
    global app  # noqa: PLW0603  # the command line loads it by name
    app = books(plan, journal) if role == "books" else bank(plan, journal)
    words = {"bank": ["run", "--no-relay", "--no-maintenance"], "books": ["run"]}.get(role, [role])
    feed = plan.entries if role == "books" else plan.payments
    if plan.port is not None and isinstance(feed, WebhookFeed):
        app.consume(feed.hook(lambda: journal.write("received", 1)))
        words += ["--http-port", str(plan.port)]
    elif words[0] == "run":
        source: Any = _Counted(feed.source(plan.options.get("member", 0)), journal)
        app.consume(source, topics=[feed.topic])
    grace = [] if role == "maintain" else ["--grace", "8s"]
    return txbox_command([*words, "--app", f"{__name__}:app", *grace])


def _skew(by_s: float) -> None:
    real = time.time
    time.time = lambda: real() + by_s


class Producer:
    """Sends what is due, with copies, bursts and other payloads under known ids, as fast as it is consumed."""

    def __init__(self, plan: Plan, journal: Journal) -> None:
        self._plan = plan
        self._journal = journal
        self._rng = random.Random(f"{plan.seed} {plan.process}")
        self._next = os.open(plan.folder / "next", os.O_RDWR | os.O_CREAT)
        # numbers are given once: each producer goes on where the last one ended
        self._number = int(os.pread(self._next, 12, 0) or b"0")
        self._publisher = _destination(plan.payments).publisher()
        self._sent: list[int] = []
        # what must not be missing is sent until it is confirmed, also what a killed one was sending
        self._repeats = repeats(plan.payments)
        self._again: list[int] = _unconfirmed(plan)

    def run(self) -> None:
        began, looked_at, waiting = time.monotonic(), 0.0, False
        stop = self._plan.folder / "stop"
        count = 0
        while not stop.exists() or self._again:
            if time.monotonic() > looked_at + 0.5:
                waiting, looked_at = self._is_behind(), time.monotonic()
            if (
                waiting or count > (time.monotonic() - began) * self._plan.rate
            ) and not stop.exists():
                time.sleep(0.05)
                continue
            messages = self._due(last=stop.exists())
            count += len(messages)
            self._send(messages)

    def _is_behind(self) -> bool:
        try:
            return self._plan.payments.left() > self._plan.waiting
        except Exception:  # noqa: BLE001  # the broker is away
            return True

    def _due(self, *, last: bool) -> list[tuple[int, bool]]:
        """Numbers, and whether each has another payload."""
        batch = [(number, False) for number in self._again]
        self._again = []
        # what is repeated must not become ever more, while nobody answers
        if last or len(batch) > _REPEATED_MAX:
            return batch
        fresh = range(self._number, self._number + 50)
        self._number = fresh.stop
        batch += [(number, False) for number in fresh]
        for _ in range(10 if self._sent else 0):
            batch.append((self._rng.choice(self._sent), False))
        if self._sent and self._rng.random() < 0.25:
            batch.append((self._rng.choice(self._sent), True))
        if self._sent and self._rng.random() < 0.005:
            batch += [(self._rng.choice(self._sent), False)] * 100
        return batch

    def _send(self, batch: Sequence[tuple[int, bool]]) -> None:
        plan, messages = self._plan, list[Message[Any]]()
        for number, is_other in batch:
            message = message_of(plan.seed, number, plan.payments.topic)
            good = str(message.id).split("-")[1] == "ok"
            messages.append(other(message) if is_other and good else message)
        self._journal.write("sending", *(_told(one) for one in batch))
        # behind the journal: what nobody had begun to send when this was killed must not be missing
        os.pwrite(self._next, b"%012d" % self._number, 0)
        answers = _published(self._publisher, messages)
        confirmed = [one for one, error in zip(batch, answers, strict=True) if error is None]
        self._journal.write("sent", *(_told(one) for one in confirmed))
        for (number, is_other), error in zip(batch, answers, strict=True):
            if error is None and not is_other:
                self._sent.append(number)
            elif error is not None and self._repeats(number) and not is_other:
                self._again.append(number)
        del self._sent[:-2000]
        if any(answers):
            time.sleep(0.2)


def repeats(feed: Broker) -> Callable[[int], bool]:
    """Which messages a producer sends until they are confirmed: with webhooks all, otherwise only the versions."""
    everything = isinstance(feed, WebhookFeed)
    return lambda number: everything or type_of(number) == "version"


def _unconfirmed(plan: Plan) -> list[int]:
    """What the last producer of this name was sending, and has to repeat, when it ended."""
    numbers: set[int] = set()
    lines = (plan.folder / f"{plan.process}.journal").read_text().splitlines()[-40:]
    for line in lines:
        _, kind, *words = line.split("\t")
        told = {int(word) for word in words if word.isdigit()}
        numbers = (
            numbers | told if kind == "sending" else numbers - told if kind == "sent" else numbers
        )
    return sorted(filter(repeats(plan.payments), numbers))


def _published(
    publisher: Publisher, messages: Sequence[Message[Any]]
) -> Sequence[BrokerError | None]:
    """What became of each message; a broker that is away has confirmed none."""
    try:
        return publisher.publish(messages, 3.0)
    except BrokerUnavailable as error:
        time.sleep(0.1)
        return [error] * len(messages)


def _told(one: tuple[int, bool]) -> str:
    return f"{one[0]}{'!' if one[1] else ''}"


def send_again(plan: Plan, numbers: Sequence[int]) -> None:
    """Send messages once more, all of them: after what was in a queue is gone with it."""
    publisher = _destination(plan.payments).publisher()
    try:
        for at in range(0, len(numbers), 200):
            messages = [
                message_of(plan.seed, number, plan.payments.topic)
                for number in numbers[at : at + 200]
            ]
            while messages:
                answers = _published(publisher, messages)
                messages = [
                    message
                    for message, error in zip(messages, answers, strict=True)
                    if error is not None
                ]
    finally:
        publisher.close()


# -- the operator ---------------------------------------------------------------------------------------


def operate(plan: Plan, journal: Journal) -> None:
    """Interfere a few times a second until the run is over."""
    rng = random.Random(f"{plan.seed} {plan.process}")
    admin = Admin(bank(plan, journal))
    changes: Sequence[Callable[[], object]] = [
        lambda: admin.retry(InboxFilter(consumer=rng.choice(TYPES), error_type="ValueError"), most=3),
        lambda: admin.retry(OutboxFilter(), most=10),
        lambda: admin.pause(rng.choice(PAUSED)),
        lambda: admin.replay(InboxFilter(consumer="inline", status="processed"), as_consumer="copy", most=5),
        lambda: _edit(admin, rng.choice(CHAINED), journal),
        lambda: _accept(admin, rng.choice(CHAINED), journal),
        admin.status,
        admin.overview,
    ]  # fmt: skip
    stop = plan.folder / "stop"
    while not stop.exists():
        try:
            rng.choice(changes)()
            time.sleep(rng.uniform(0.1, 0.6))
            for consumer in PAUSED:
                admin.resume(consumer)
        except TxboxError as error:
            journal.write("refused", type(error).__name__, error)
            time.sleep(0.2)
    admin.close()


def _edit(admin: Admin, consumer: str, journal: Journal) -> None:
    for row in admin.list(InboxFilter(consumer=consumer, status="dead", error_type="ValueError"), limit=1):  # fmt: skip
        message_id = str(row.message_id)
        body = json.loads(message_of_row(admin, consumer, message_id))
        journal.write("edited", consumer, message_id)
        admin.edit(consumer, message_id, payload=json.dumps({**body, "does": "ok"}).encode())


def message_of_row(admin: Admin, consumer: str, message_id: str) -> bytes:
    (message,) = admin.messages(InboxFilter(consumer=consumer, message_id=message_id), reveal=True)
    return bytes(message.payload or b"{}")


def _accept(admin: Admin, consumer: str, journal: Journal) -> None:
    for row in admin.list(QuarantineFilter(consumer=consumer), limit=3):
        if "-ok-" not in row.message_id:
            continue
        where = QuarantineFilter(consumer=consumer, message_id=row.message_id, hash=row.hash)
        accepted = f"accepted-{row.message_id}"
        journal.write("accepted", consumer, accepted)
        admin.accept(where, message_id=accepted)


def names_of_lists() -> Iterator[str]:
    for key in range(KEYS):
        yield str(key)
        yield f"list-{key}"
        yield f"version-{key}"
