"""The relay on every database: what is sent, in which order, and what happens to the rest."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import pytest

from tests.support.databases import Raw
from tests.support.recording import Recorder
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.workers import run_of
from txbox import App, Message, Outbox, Outcome, Outgoing, RelayPolicy, RetryPolicy
from txbox.brokers.local import Local
from txbox.errors import (
    BrokerError,
    BrokerUnavailable,
    DestinationRefused,
    MessageRefused,
    StoreUnavailable,
)
from txbox.events import (
    Event,
    OutgoingDead,
    OutgoingFailed,
    OutgoingSent,
    RelayPaused,
    RelayResumed,
)
from txbox.session import drive
from txbox.store import leases, outbox
from txbox.worker.relay import Relay

Connect = Callable[[str], AbstractContextManager[Any]]
Look = Callable[[str], Raw]
NOW = RelayPolicy(retry=RetryPolicy(base=timedelta(0), max_attempts=3))


def relay_of(app: App, stop: Callable[[], bool] = lambda: False) -> Relay:
    return Relay(run_of(app, stop), app.routes.all()[0])


def drained(relay: Relay, turns: int = 200) -> None:
    for _ in range(turns):
        if not relay.turn():
            return
    raise AssertionError("the relay never came to an end")


def staged(url: str, connect: Connect, messages: list[Outgoing]) -> list[str]:
    with connect(url) as tx:
        ids = Outbox().stage_many(tx, messages)
        tx.commit()
    return ids


def outgoing(count: int, keys: int = 0, topic: str = "t") -> list[Outgoing]:
    return [
        Outgoing(topic=topic, body=number, key=str(number % keys) if keys else None)
        for number in range(count)
    ]


def in_order_of_their_keys(broker: Recorder) -> bool:
    by_key: dict[str, list[int]] = defaultdict(list)
    for message in broker.sent:
        by_key[str(message.key)].append(message.json())
    return all(numbers == sorted(numbers) for numbers in by_key.values())


def left(raw: Raw) -> int:
    return int(raw.value("SELECT count(*) FROM txbox_outbox WHERE status = 'pending'"))


@pytest.mark.every_database
def test_rows_without_a_route_are_leased_once(database_url: str, plain_connection: Connect) -> None:
    """The rows of the route '' and those that were staged without one are the same."""
    ids = staged(database_url, plain_connection, outgoing(3))
    with App(database_url) as app:
        store = outbox.OutboxStore(app.store.dialect, app.store.columns)
        assert app.database.sync is not None
        look = drive(
            app.database.sync,
            store.lease,
            token="t",
            limit=10,
            payload_bytes=999,
            lease_s=60,
            scope=outbox.RelayScope(route=""),
        )
    assert [row.id for row in look.rows] == ids


def test_what_was_committed_leaves_once_under_its_id(
    database_url: str, plain_connection: Connect, raw: Look
) -> None:
    broker = Recorder()
    ids = staged(database_url, plain_connection, outgoing(1200))
    with plain_connection(database_url) as tx:
        Outbox().stage(tx, "t", "rolled back")
        tx.rollback()
    with App(database_url) as app:
        app.publish(broker, topics=["t"])
        drained(relay_of(app))
    assert [message.id for message in broker.sent] == ids
    assert broker.bodies == list(range(1200))
    assert raw(database_url).value("SELECT count(*) FROM txbox_outbox") == 0


def test_a_topic_that_goes_elsewhere_is_left_alone(
    database_url: str, plain_connection: Connect, raw: Look
) -> None:
    one, other = Recorder(), Recorder()
    staged(database_url, plain_connection, [*outgoing(3, topic="a"), *outgoing(2, topic="b")])
    with App(database_url) as app:
        app.publish(one, topics=["a"])
        app.publish(other)
        both = [Relay(run_of(app), route) for route in app.routes.all()]
        drained(both[0])
        assert len(one.sent) == 3
        assert not other.sent
        drained(both[1])
    assert len(other.sent) == 2
    assert left(raw(database_url)) == 0


def test_sent_rows_are_kept_when_the_policy_says_so(
    database_url: str, plain_connection: Connect, raw: Look
) -> None:
    staged(database_url, plain_connection, outgoing(3))
    with App(database_url, relaying=RelayPolicy(keep_sent=timedelta(days=1))) as app:
        app.publish(Recorder())
        drained(relay_of(app))
    assert raw(database_url).value("SELECT count(*) FROM txbox_outbox WHERE status = 'sent'") == 3


def test_a_row_that_commits_late_is_not_skipped(
    database_url: str, plain_connection: Connect
) -> None:
    if database_url.startswith("sqlite"):
        pytest.skip("SQLite has one writer: nobody can commit in between")
    broker = Recorder()
    with App(database_url) as app, plain_connection(database_url) as early:
        app.publish(broker)
        relay = relay_of(app)
        Outbox().stage(early, "t", "early")
        for number in range(5):
            staged(database_url, plain_connection, [Outgoing(topic="t", body=number)])
            drained(relay)
        assert broker.bodies == [0, 1, 2, 3, 4]
        early.commit()
        drained(relay)
    assert broker.bodies == [0, 1, 2, 3, 4, "early"]


def test_a_delayed_message_waits_and_holds_up_nobody(
    database_url: str, plain_connection: Connect, raw: Look
) -> None:
    broker = Recorder()
    later = Outgoing(topic="t", body="later", key="k", delay=timedelta(hours=1))
    staged(database_url, plain_connection, [later, *outgoing(3, keys=1)])
    with App(database_url) as app:
        app.publish(broker)
        drained(relay_of(app))
    assert broker.bodies == [0, 1, 2]
    assert left(raw(database_url)) == 1


@pytest.mark.parametrize("runs", [False, True], ids=["one of a key", "runs of a key"])
def test_a_failed_message_holds_up_its_own_key_only(
    database_url: str, plain_connection: Connect, raw: Look, runs: bool
) -> None:
    refusing = threading.Event()
    refusing.set()

    def answer(message: Message[Any]) -> BrokerError | None:
        if refusing.is_set() and message.json() == 3:
            return BrokerError("not now")
        return None

    broker, events = Recorder(answer, keeps_runs=runs), list[Event]()
    staged(database_url, plain_connection, outgoing(40, keys=10))
    policy = RelayPolicy(retry=RetryPolicy(base=timedelta(hours=1)))
    with App(database_url, relaying=policy, observers=[events.append]) as app:
        app.publish(broker)
        relay = relay_of(app)
        drained(relay)
        assert sorted(set(range(40)) - set(broker.bodies)) == [3, 13, 23, 33]
        # of its run only the first one has failed
        assert len([event for event in events if isinstance(event, OutgoingFailed)]) == 1
        refusing.clear()
        raw(database_url).execute("UPDATE txbox_outbox SET available_at = staged_at")
        drained(relay)
    assert broker.bodies[-4:] == [3, 13, 23, 33]
    assert left(raw(database_url)) == 0


def test_a_publisher_that_keeps_runs_gets_those_of_a_key_in_one_call(
    sqlite_url: str, plain_connection: Connect, raw: Look
) -> None:
    """Also when it raises: the run is divided, and nothing overtakes what raised."""
    angry = threading.Event()
    angry.set()

    def answer(message: Message[Any]) -> BrokerError | None:
        if angry.is_set() and message.json() == 21:
            raise ValueError("not this one")
        return None

    broker = Recorder(answer, keeps_runs=True)
    ids = staged(sqlite_url, plain_connection, outgoing(40, keys=2))
    with App(sqlite_url, relaying=NOW) as app:
        app.publish(broker)
        relay = relay_of(app)
        relay.turn()
        assert broker.calls[0] == ids
        assert broker.bodies.count(39) == 0
        angry.clear()
        drained(relay)
    first = list(dict.fromkeys(broker.bodies))
    assert sorted(first) == list(range(40))
    for key in (0, 1):
        assert [body for body in first if body % 2 == key] == list(range(key, 40, 2))
    assert left(raw(sqlite_url)) == 0


def test_a_message_that_nobody_takes_is_dead_and_its_key_goes_on(
    database_url: str, plain_connection: Connect, raw: Look
) -> None:
    def answer(message: Message[Any]) -> BrokerError | None:
        if message.json() == 0:
            return MessageRefused("too large")
        return BrokerError("no queue") if message.json() == 1 else None

    broker, events = Recorder(answer), list[Event]()
    staged(database_url, plain_connection, outgoing(4, keys=2))
    with App(database_url, relaying=NOW, observers=[events.append]) as app:
        app.publish(broker)
        drained(relay_of(app))
    assert sorted(broker.bodies) == [2, 3]
    dead = [event for event in events if isinstance(event, OutgoingDead)]
    assert sorted(event.attempt for event in dead) == [1, 3]
    rows = raw(database_url).rows(
        "SELECT status, attempts, error FROM txbox_outbox ORDER BY number"
    )
    assert [(row[0], row[1]) for row in rows] == [("dead", 1), ("dead", 3)]
    assert "too large" in str(rows[0][2])


def test_a_broker_that_is_away_counts_nothing(
    database_url: str, plain_connection: Connect, raw: Look
) -> None:
    away = threading.Event()
    away.set()

    class Away(Recorder):
        def publish(self, messages: Any, within_s: float) -> Any:
            if away.is_set():
                raise BrokerUnavailable("no connection")
            return super().publish(messages, within_s)

    broker, events = Away(), list[Event]()
    staged(database_url, plain_connection, outgoing(30, keys=5))
    with App(database_url, observers=[events.append]) as app:
        app.publish(broker)
        relay = relay_of(app)
        assert not relay.turn()
        assert not relay.turn()
        assert raw(database_url).value("SELECT max(attempts) FROM txbox_outbox") == 0
        assert left(raw(database_url)) == 30
        away.clear()
        drained(relay)
    assert sorted(broker.bodies) == list(range(30))
    assert in_order_of_their_keys(broker)
    kinds = [type(event) for event in events]
    assert kinds.count(RelayPaused) == 2
    assert kinds.count(RelayResumed) == 1


def test_a_large_batch_is_not_confirmed_in_the_time_of_a_small_one(
    database_url: str, plain_connection: Connect, raw: Look
) -> None:
    """A slow broker that confirms everything: no message becomes dead because many others were sent with it."""

    class Slow(Recorder):
        def publish(self, messages: Any, within_s: float) -> Any:
            in_time = super().publish(messages[:500], within_s)
            return [*in_time, *(BrokerError("not confirmed in time") for _ in messages[500:])]

    broker = Slow()
    staged(database_url, plain_connection, outgoing(1200))
    policy = RelayPolicy(batch=1200, retry=RetryPolicy(max_attempts=1))
    with App(database_url, relaying=policy) as app:
        app.publish(broker)
        assert relay_of(app).turn()
    assert raw(database_url).rows("SELECT status, attempts FROM txbox_outbox") == []
    assert sorted(broker.bodies) == list(range(1200))


@pytest.mark.parametrize("answer", [None, MessageRefused("no")], ids=["sent", "dead"])
def test_a_lease_that_ran_out_is_taken_over_and_the_first_holder_marks_nothing(
    answer: BrokerError | None, database_url: str, plain_connection: Connect, raw: Look
) -> None:
    ids = staged(database_url, plain_connection, outgoing(3))
    second, events = Recorder(), list[Event]()
    with App(database_url, observers=[events.append]) as app, App(database_url) as other:
        other.publish(second)

        class Slow(Recorder):
            def publish(self, messages: Any, within_s: float) -> Any:
                # as if the lease had expired: the rows are due again
                raw(database_url).execute("UPDATE txbox_outbox SET available_at = staged_at")
                drained(relay_of(other))
                return super().publish(messages, within_s)

        first = Slow(lambda _: answer)
        app.publish(first)
        drained(relay_of(app))
    assert [message.id for message in first.sent] == ([] if answer else ids)
    assert [message.id for message in second.sent] == ids
    assert raw(database_url).value("SELECT count(*) FROM txbox_outbox") == 0
    assert [event for event in events if isinstance(event, OutgoingSent | OutgoingDead)] == []


@pytest.mark.parametrize("answer", [None, MessageRefused("no")], ids=["sent", "dead"])
def test_what_the_outbox_could_not_record_is_not_reported(
    answer: BrokerError | None,
    database_url: str,
    plain_connection: Connect,
    raw: Look,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The database is away from the moment of publishing until the relay gives up."""
    staged(database_url, plain_connection, outgoing(3))
    events = list[Event]()
    with App(database_url, observers=[events.append]) as app:
        app.publish(Recorder(lambda _: answer))
        relay = relay_of(app, stop=lambda: "relay:published" in passed)
        passed: list[str] = []

        def at(point: str) -> None:
            passed.append(point)
            if point == "before:begin" and "relay:published" in passed:
                raise StoreUnavailable("away")

        monkeypatch.setattr("txbox.session.at", at)
        relay.turn()
    reported = [event for event in events if isinstance(event, OutgoingSent | OutgoingDead)]
    assert reported == []
    assert left(raw(database_url)) == 3


def test_relays_side_by_side_never_send_one_row_twice_and_keep_each_keys_order(
    database_url: str, plain_connection: Connect, raw: Look
) -> None:
    # one message of a hundred is refused twice and then taken
    refused: dict[int, int] = defaultdict(int)
    lock = threading.Lock()

    def answer(message: Message[Any]) -> BrokerError | None:
        number = message.json()
        with lock:
            if number % 100 == 7 and refused[number] < 2:
                refused[number] += 1
                return BrokerError("not yet")
        return None

    broker = Recorder(answer)
    count, keys = 3000, 60
    staged(database_url, plain_connection, outgoing(count, keys=keys))
    policy = RelayPolicy(batch=100, retry=RetryPolicy(base=timedelta(milliseconds=20)))
    apps = [App(database_url, relaying=policy) for _ in range(4)]
    done = threading.Event()
    threads: list[threading.Thread] = []
    for app in apps:
        app.publish(broker)
        relay = relay_of(app, done.is_set)
        threads.append(threading.Thread(target=relay.run))
    for thread in threads:
        thread.start()
    look = raw(database_url)
    eventually(lambda: left(look) == 0, "no row left", pause_s=0.1)
    done.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    for app in apps:
        app.close()
    assert sorted(broker.bodies) == list(range(count))
    assert in_order_of_their_keys(broker)


def test_waiting_rows_of_one_key_hide_no_other_key(
    database_url: str, plain_connection: Connect
) -> None:
    broker = Recorder(lambda message: BrokerError("no") if message.topic == "t" else None)
    staged(database_url, plain_connection, [*outgoing(900, keys=1), *outgoing(5, topic="u")])
    policy = RelayPolicy(batch=20, retry=RetryPolicy(base=timedelta(hours=1)))
    with App(database_url, relaying=policy) as app:
        app.publish(broker)
        drained(relay_of(app))
    assert [message.topic for message in broker.sent] == ["u"] * 5


def test_a_relay_that_is_slow_comes_to_the_end_of_the_waiting_rows(
    database_url: str, plain_connection: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to go back to the first of them every second: on a busy machine it never saw the rows behind."""
    monkeypatch.setattr(outbox, "_BACK_S", 1e-4)
    test_waiting_rows_of_one_key_hide_no_other_key(database_url, plain_connection)


# -- to the app's own consumers -------------------------------------------------------------------


def test_local_messages_become_pending_rows_of_all_their_consumers(
    database_url: str, raw: Look
) -> None:
    with App(database_url) as app:

        @app.handler("orders", consumer="orders")
        def order(message: Message[Any], tx: Any) -> None:
            app.outbox.stage(tx, "invoices", {"of": message.id}, key="k", type="invoice.made")

        @app.handler("invoices", consumer="mail")
        def mail(message: Message[Any], tx: Any) -> None:
            del message, tx

        @app.handler("invoices", consumer="books", type="invoice.made")
        def book(message: Message[Any], tx: Any) -> None:
            del message, tx

        assert app.process(Message(topic="orders", id="1")) is Outcome.PROCESSED
        relay = relay_of(app)
        drained(relay)
        drained(relay)
    rows = raw(database_url).rows(
        "SELECT consumer, status, topic FROM txbox_inbox WHERE status <> 'processed' ORDER BY 1"
    )
    assert [tuple(map(_text, row)) for row in rows] == [
        ("books", "pending", "invoices"),
        ("mail", "pending", "invoices"),
    ]
    assert raw(database_url).value("SELECT count(*) FROM txbox_outbox") == 0


def test_a_local_message_that_is_set_aside_keeps_its_id(database_url: str, raw: Look) -> None:
    with App(database_url) as app:

        @app.handler("orders", consumer="orders")
        def order(message: Message[Any], tx: Any) -> None:
            ids.append(app.outbox.stage(tx, "invoices", {"no": "version"}, key="k"))

        @app.handler("invoices", consumer="mail", sequence="body.version")
        def mail(message: Message[Any], tx: Any) -> None:
            del message, tx

        ids: list[str] = []
        assert app.process(Message(topic="orders", id="1")) is Outcome.PROCESSED
        drained(relay_of(app))
    assert _text(raw(database_url).value("SELECT message_id FROM txbox_quarantine")) == ids[0]


def test_a_local_message_without_a_consumer_waits_for_one(
    database_url: str, plain_connection: Connect, raw: Look
) -> None:
    events: list[Event] = []
    with App(database_url, observers=[events.append]) as app, plain_connection(database_url) as tx:
        app.publish(Local(), topics=["nobody"])
        app.outbox.stage_many(tx, outgoing(2, topic="nobody"))
        tx.commit()
        assert app.routes.all() == []
    with App(database_url, observers=[events.append]) as app:
        app.handler("something else", consumer="other")(lambda message, tx: None)
        drained(relay_of(app))
        assert left(raw(database_url)) == 2
        app.handler("nobody", consumer="somebody")(lambda message, tx: None)
        drained(relay_of(app))
    assert left(raw(database_url)) == 0
    assert raw(database_url).value("SELECT count(*) FROM txbox_inbox") == 2
    assert not any(isinstance(event, OutgoingDead) for event in events)


def test_a_run_that_is_repeated_stages_the_same_ids(database_url: str, raw: Look) -> None:
    ids: list[list[str]] = []
    with App(database_url) as app:
        app.publish(Local(), topics=["out"])

        @app.handler("in", consumer="c", retry=RetryPolicy(base=timedelta(0)))
        def handle(message: Message[Any], tx: Any) -> None:
            ids.append([app.outbox.stage(tx, "out", number) for number in range(3)])
            if len(ids) == 1:
                raise ValueError("once")

        message: Message[Any] = Message(topic="in", id="m", headers={"traceparent": "00-1-2-01"})
        assert app.process(message) is Outcome.FAILED
        raw(database_url).execute("UPDATE txbox_inbox SET next_attempt_at = received_at")
        assert app.process(message) is Outcome.DEFERRED
        # a row without its payload would run here; the table owns this one, so run it from there
        assert app.database.sync is not None
        handler = next(iter(app.handlers))
        leased = drive(
            app.database.sync,
            leases.lease,
            app.store,
            "c",
            token="t",
            limit=1,
            lease=app.lease,
            suspect=False,
        )
        drive(app.database.sync, app.protocol.run_leased, handler, leased[0], "t")
    assert len(ids) == 2
    assert ids[0] == ids[1]
    rows = raw(database_url).rows(
        "SELECT cause_consumer, cause_id, headers FROM txbox_outbox ORDER BY number"
    )
    assert {(_text(row[0]), _text(row[1])) for row in rows} == {("c", "m")}
    assert all("00-1-2-01" in _text(row[2]) for row in rows)


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def test_a_topic_that_takes_nothing_pauses_alone(
    database_url: str, plain_connection: Connect, raw: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long: no attempt is counted, other topics go on, and the order of its keys is kept."""
    # longer than a turn on a busy machine: each pause that is over is a look at this topic alone
    monkeypatch.setattr("txbox.worker.relay._PAUSE_S", (0.02, 0.5))
    full = threading.Event()
    full.set()
    broker = Recorder(
        lambda message: (
            DestinationRefused("the queue is full")
            if message.topic == "full" and full.is_set()
            else None
        )
    )
    events = list[Event]()
    # more than a batch: those that wait must not hide the others
    staged(database_url, plain_connection, outgoing(60, keys=5, topic="full"))
    staged(database_url, plain_connection, outgoing(30, keys=5))
    with App(
        database_url, observers=[events.append], relaying=RelayPolicy(batch=20, retry=NOW.retry)
    ) as app:
        app.publish(broker)
        relay = relay_of(app)
        turned_until(relay, lambda: len(broker.sent) == 30, "the other topic sent")
        assert [message.topic for message in broker.sent] == ["t"] * 30
        # by then its attempts would be used up
        turned_until(relay, lambda: len(_pauses(events)) >= 5, "five refusals")
        assert raw(database_url).value("SELECT max(attempts) FROM txbox_outbox") == 0
        assert relay.has_rows()
        assert {(event.topic, event.reason) for event in _pauses(events)} == {
            ("full", "the queue is full")
        }
        full.clear()
        turned_until(relay, lambda: left(raw(database_url)) == 0, "all sent")
        (resumed,) = [event for event in events if isinstance(event, RelayResumed)]
        assert resumed.topic == "full"
    assert len(broker.sent) == 90
    broker.sent = [message for message in broker.sent if message.topic == "full"]
    assert in_order_of_their_keys(broker)


def turned_until(relay: Relay, done: Callable[[], bool], what: str) -> None:
    def turned() -> bool:
        relay.turn()
        return done()

    eventually(turned, what)


def _pauses(events: list[Event]) -> list[RelayPaused]:
    return [event for event in events if isinstance(event, RelayPaused)]


def test_so_many_topics_that_take_nothing_pause_the_route(
    database_url: str, plain_connection: Connect, raw: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txbox.worker.relay._PAUSED_TOPICS", 3)
    monkeypatch.setattr("txbox.worker.relay._PAUSE_S", (0.02, 0.05))
    denied = threading.Event()
    denied.set()
    broker = Recorder(lambda _: DestinationRefused("no right") if denied.is_set() else None)
    events = list[Event]()
    for number in range(6):
        staged(database_url, plain_connection, outgoing(2, topic=f"t{number}"))
    with App(database_url, observers=[events.append], relaying=NOW) as app:
        app.publish(broker)
        relay = relay_of(app)
        assert not relay.turn()
        turned_until(relay, lambda: len(_pauses(events)) >= 12, "refusals")
        assert raw(database_url).value("SELECT max(attempts) FROM txbox_outbox") == 0
        assert {event.topic for event in _pauses(events)} >= {"t0", "t1", "t2", None}
        denied.clear()
        turned_until(relay, lambda: left(raw(database_url)) == 0, "all sent")
    assert len(broker.sent) == 12
