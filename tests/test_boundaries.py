"""No content ends a worker (promise 2.13): one row for each boundary, where it raises what nobody expects."""

from __future__ import annotations

import ast
import http.client
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest

from tests.docs.pages import ROOT
from tests.support.databases import NewDatabase
from tests.support.recording import Recorder
from tests.support.shop import CONSUMER, TOPIC, Shop, add_effect, opened, paid, quarantined
from tests.support.sources import Memory
from tests.support.waiting import eventually
from tests.support.workers import running, worker
from txbox import App, Lease, Message, Outgoing, RelayPolicy, RetryPolicy, maintenance
from txbox.admin import Admin, InboxFilter, OutboxFilter, QuarantineFilter, tables
from txbox.boundaries import Boundary
from txbox.brokers.base import Delivery
from txbox.brokers.envelope import KAFKA
from txbox.brokers.local import Local
from txbox.errors import BrokerError
from txbox.events import ErrorContained
from txbox.handlers import Handler
from txbox.maintenance import Job, Report
from txbox.observers.counters import Counters
from txbox.processing.intake import Intake
from txbox.processing.transaction import HandlerTransaction
from txbox.session import Session, drive
from txbox.store import activity, leases
from txbox.store.codec import Columns
from txbox.store.inbox import InboxStore
from txbox.store.outbox import OutboxStore
from txbox.worker import agenda, pulse
from txbox.worker.health import Health
from txbox.worker.relay import LocalDelivery
from txbox.worker.serving import PROBES, Server, probes
from txbox.worker.table import Table

Patch = pytest.MonkeyPatch
BAD, GOOD = "bad", [f"m{number}" for number in range(4)]


class Boom(Exception):
    """What nobody expects."""


def boom(*_args: Any, **_kwargs: Any) -> Any:
    raise Boom("of the test")


def exits(*_args: Any, **_kwargs: Any) -> Any:
    raise SystemExit(2)


def bad_only(raising: Callable[[], Any] = boom) -> Callable[[Message[Any]], Any]:
    """An extractor that raises for the culprit."""

    def extract(message: Message[Any]) -> Any:
        return raising() if BAD in str(message.id) else str(message.id)

    return extract


@dataclass
class Codec:
    """Raises for the culprit, going out or coming in; otherwise writes bytes backwards."""

    on: str
    raising: Callable[..., Any] = boom
    key_id: str = "k1"

    def encode(self, data: bytes) -> bytes:
        return self.raising() if self.on == "encode" and BAD.encode() in data else data[::-1]

    def decode(self, data: bytes, key_id: str) -> bytes:
        del key_id
        return self.raising() if self.on == "decode" and BAD.encode() in data[::-1] else data[::-1]


@dataclass
class Scene:
    """A shop whose worker gets the good messages and the culprit, and what is looked at afterwards."""

    shop: Shop
    patch: Patch
    undo: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    handler_options: dict[str, Any] = field(default_factory=dict)
    #: In place of the culprit, from the source.
    bad: Message[Any] | Delivery | None = None
    source: Memory | None = None

    def options(self, **more: Any) -> None:
        self.handler_options |= more

    def raise_for_bad(
        self, owner: Any, name: str, ids: Callable[..., Any], times: int | None = None
    ) -> None:
        """Have a method raise when the culprit is among its ids, at most so many times."""
        before, raised = getattr(owner, name), [0]

        def method(*args: Any, **kwargs: Any) -> Any:
            if BAD in str(ids(*args, **kwargs)) and (times is None or raised[0] < times):
                raised[0] += 1
                boom()
            return before(*args, **kwargs)

        self.patch.setattr(owner, name, method)

    def raise_first(self, owner: Any, name: str, times: int = 2) -> None:
        """Have a method raise on its first calls."""
        self.raise_for_bad(owner, name, lambda *_, **__: BAD, times)

    def contained(self, boundary: Boundary) -> list[ErrorContained]:
        return [each for each in self.shop.emitted(ErrorContained) if each.boundary == boundary]

    def account(self) -> set[str]:
        """Where the culprit is accounted for."""
        status = self.shop.raw.rows(
            "SELECT status, attempts FROM txbox_inbox WHERE status <> 'processed'"
        )
        return {str(row[0]) for row in status} | (
            {"quarantined"} if quarantined(self.shop.raw) else set()
        )


Plant = Callable[[Scene], Any]
Case = tuple[Boundary | None, Plant, str, dict[str, Any]]
CASES: dict[str, Case] = {}


def case(boundary: Boundary | None, ends: str, **app: Any) -> Callable[[Plant], Plant]:
    """Add a row to the table.

    Args:
        boundary: the one it is about; None for those whose failure is the handler's.
        ends: what becomes of the culprit: dead, quarantined, or processed after all.
        app: options of the App.
    """

    def add(plant: Plant) -> Plant:
        CASES[plant.__name__] = (boundary, plant, ends, app)
        return plant

    return add


# -- user code: the message is to blame -------------------------------------------------------


@case(Boundary.IDENTITY, "quarantined")
def message_id(scene: Scene) -> None:
    scene.options(message_id=bad_only(exits))


@case(Boundary.IDENTITY, "quarantined")
def payload_hash(scene: Scene) -> None:
    scene.options(payload_hash=bad_only(exits))


@case(Boundary.IDENTITY, "quarantined")
def sequence(scene: Scene) -> None:
    def version(message: Message[Any]) -> int:
        return exits() if message.id == BAD else 1

    scene.options(sequence=version)


@case(Boundary.IDENTITY, "quarantined")
def identity(scene: Scene) -> None:
    scene.raise_for_bad(Handler, "_sequence", lambda _self, message: message.id)
    scene.options(sequence=lambda _message: 1)


@case(Boundary.DISPATCH, "processed")
def lock_key(scene: Scene) -> None:
    scene.options(lock_key=bad_only(exits), concurrency=2)


@case(None, "dead")
def decoder(scene: Scene) -> None:
    scene.options(decode=bad_only(exits))


def raise_system_exit(message: Message[Any]) -> None:
    if message.id == BAD:
        exits()


@case(None, "dead")
def handler(scene: Scene) -> None:
    scene.options(body=lambda message, _tx: raise_system_exit(message))


@case(None, "dead")
def stored_handler(scene: Scene) -> None:
    scene.options(body=lambda message, _tx: raise_system_exit(message), mode="stored")


class Unreadable(BaseException):
    def __str__(self) -> str:
        return str(exits())


@case(None, "dead")
def unreadable_error(scene: Scene) -> None:
    def raises(message: Message[Any], _tx: Any) -> None:
        if message.id == BAD:
            raise Unreadable

    scene.options(body=raises)


@contextmanager
def opens_for(message: Message[Any], _tx: Any) -> Iterator[dict[str, int]]:
    raise_system_exit(message)
    yield {"given": 1}


@case(None, "dead", resolver=lambda _annotations, **_options: opens_for)
def resolver(scene: Scene) -> None:
    def handle(message: Message[Any], tx: Any, *, given: int) -> None:
        assert given == 1
        add_effect(tx, message.id, CONSUMER)

    scene.options(function=handle)


@case(Boundary.OBSERVER, "processed")
def observer(scene: Scene) -> None:
    scene.shop.app.events.observers.insert(0, exits)


@case(Boundary.OBSERVER, "dead")
def redaction(scene: Scene) -> None:
    scene.shop.app.events.observers.append(boom)
    scene.options(body=lambda message, _tx: raise_system_exit(message))
    # a tracer's
    scene.patch.setattr(scene.shop.app.events, "_around", boom)


@case(Boundary.LOG, "dead")
def log_filter(scene: Scene) -> None:
    scene.options(body=lambda message, _tx: raise_system_exit(message))
    log, raising = (
        logging.getLogger("txbox"),
        type("Raising", (logging.Filter,), {"filter": exits})(),
    )
    log.addFilter(raising)
    scene.undo.append(lambda: log.removeFilter(raising))


@case(Boundary.CODEC, "quarantined", codec=Codec("encode", exits))
def codec_out(scene: Scene) -> None:
    scene.options(keep_payload="always")


@case(Boundary.CODEC, "quarantined", codec=Codec("encode"))
def codec_out_stored(scene: Scene) -> None:
    scene.options(mode="stored")


@case(Boundary.CODEC, "dead", codec=Codec("decode", exits))
def codec_in(scene: Scene) -> None:
    # the first run fails, so that every message is read from the table
    def once(message: Message[Any], _tx: Any) -> None:
        if message.attempt == 1:
            raise ValueError("once more, from the table")

    scene.options(body=once)


# -- from a source ----------------------------------------------------------------------------


@case(Boundary.ENVELOPE, "quarantined")
def envelope(scene: Scene) -> None:
    headers: Any = [("type", object())]
    scene.bad = KAFKA.delivery(TOPIC, b"{}", headers, tag=1, origin={}, message_id=BAD)
    assert "AttributeError" in str(scene.bad.problem)


@case(Boundary.DISPATCH, "quarantined")
def dispatch(scene: Scene) -> None:
    bad = paid(BAD)
    object.__setattr__(bad, "type", ["a list is in no table"])
    scene.bad = bad


@case(Boundary.SOURCE, "processed")
def source_receive(scene: Scene) -> None:
    class Raising(Memory):
        def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
            found = super().receive(messages_max, wait_s)
            if found or self.received:
                return found
            boom()
            return []

    scene.source = Raising([], endless=True)
    scene.raise_first(Raising, "receive")


@case(Boundary.SOURCE, "processed")
def source_settle(scene: Scene) -> None:
    scene.source = Memory([], endless=True)
    settle, calls = scene.source.settle, list[int]()

    def raising(deliveries: Sequence[Delivery]) -> None:
        settle(deliveries)
        calls.append(1)
        if len(calls) == 1:
            boom()

    scene.patch.setattr(scene.source, "settle", raising)


@case(Boundary.SOURCE, "processed")
def source_tend_and_close(scene: Scene) -> None:
    scene.source = Memory([], endless=True)
    scene.source.tend_every_s = 0.01
    scene.patch.setattr(scene.source, "tend", boom)
    scene.patch.setattr(scene.source, "close", boom)


@case(Boundary.RECORD, "quarantined")
def set_aside(scene: Scene) -> None:
    """What has no lane cannot be quarantined at first: it is tried again, and the others do not wait."""
    scene.patch.setattr("txbox.worker.pump._PAUSE_S", (0.01, 0.05))
    scene.bad = Delivery(None, TOPIC, problem=BAD)
    scene.raise_for_bad(InboxStore, "quarantine", lambda *_, **more: more["reason"], times=3)


# -- one message in its batch -----------------------------------------------------------------


@case(Boundary.TRANSACTION, "dead")
def claim(scene: Scene) -> None:
    scene.raise_for_bad(
        HandlerTransaction, "claiming", lambda _self, _handler, arrivals, *_: arrivals
    )


@case(Boundary.TRANSACTION, "dead")
def close(scene: Scene) -> None:
    scene.raise_for_bad(HandlerTransaction, "_close", lambda *args, **_: args[4])


@case(Boundary.RECORD, "quarantined")
def record(scene: Scene) -> None:
    scene.options(body=lambda message, _tx: raise_system_exit(message))
    scene.raise_for_bad(InboxStore, "record_failure", lambda *args, **_: args[3])
    scene.raise_for_bad(InboxStore, "record_failure_of_claimed", lambda *args, **_: args[3])


@case(Boundary.RECORD, "quarantined")
def record_and_quarantine(scene: Scene) -> None:
    """Nothing can be recorded at first: the delivery is kept, and claimed again."""
    record(scene)
    scene.raise_for_bad(InboxStore, "quarantine", lambda *_, **more: more["message_id"], times=4)


@case(Boundary.STORE, "processed")
def store(scene: Scene) -> None:
    """It costs an attempt; from then on it is in the table, and runs."""
    scene.options(mode="stored")
    scene.raise_for_bad(leases, "storing", lambda _store, _consumer, arrivals, **_: arrivals)
    scene.raise_for_bad(InboxStore, "storing", lambda _self, _consumer, arrivals, **_: arrivals)


@case(Boundary.LANE, "processed")
def lane(scene: Scene) -> None:
    scene.raise_for_bad(Intake, "take", lambda *_, **more: more["messages"], times=2)


@case(Boundary.LANE, "processed")
def turn(scene: Scene) -> None:
    scene.patch.setattr("txbox.worker.lane._AGAIN_S", (0.01, 0.05))
    scene.raise_first(Table, "next")


# -- beside the messages ----------------------------------------------------------------------


def fail_once(scene: Scene) -> None:
    """Every message fails once, so that it comes from the table."""

    def once(message: Message[Any], _tx: Any) -> None:
        if message.attempt == 1:
            raise ValueError("once more, from the table")

    scene.options(body=once)


@case(Boundary.LEASE, "processed")
def lease(scene: Scene) -> None:
    fail_once(scene)
    scene.raise_first(leases, "lease")


@case(Boundary.POLL, "processed")
def poll(scene: Scene) -> None:
    fail_once(scene)
    scene.patch.setattr(agenda, "_IDLE_S", 0.05)
    scene.raise_first(leases, "due")


@case(Boundary.HEARTBEAT, "processed", lease=Lease(duration=timedelta(seconds=0.1)))
def heartbeat(scene: Scene) -> None:
    scene.raise_first(Table, "heartbeat")


@case(Boundary.PULSE, "processed")
def pulse_beat(scene: Scene) -> None:
    scene.patch.setattr(pulse, "_BEAT_S", 0.02)
    scene.raise_first(activity, "pauses", times=3)


@case(Boundary.JOB, "processed")
def job(scene: Scene) -> None:
    ran: list[str] = []

    async def raises(*_: Any) -> Report:
        ran.append("raises")
        boom()
        return Report("never", 0)

    async def runs(*_: Any) -> Report:
        ran.append("runs")
        return Report("runs", 0)

    def often(_app: App) -> timedelta:
        return timedelta(seconds=0.02)

    jobs = (Job("raises", "", often, raises), Job("runs", "", often, runs))
    scene.patch.setattr(maintenance, "JOBS", jobs)
    scene.options(until=lambda: ran.count("raises") > 1 and ran.count("runs") > 1)


# -- staged messages --------------------------------------------------------------------------


@pytest.fixture
def scene_of(monkeypatch: Patch) -> Callable[..., AbstractContextManager[Scene]]:
    @contextmanager
    def make(url: str, **options: Any) -> Iterator[Scene]:
        with opened(url, **options) as shop:
            scene = Scene(shop, monkeypatch)
            try:
                yield scene
            finally:
                for undo in scene.undo:
                    undo()

    return make


ON_ALL = {"claim", "close", "record", "store", "codec_in", "codec_out", "codec_out_stored"}


@pytest.mark.parametrize("name", sorted(set(CASES) - ON_ALL))
def test_a_boundary_that_raises_ends_no_worker(
    name: str, new_database: NewDatabase, scene_of: Callable[..., Any]
) -> None:
    lives(name, new_database("sqlite"), scene_of)


@pytest.mark.parametrize("name", sorted(ON_ALL))
def test_a_boundary_of_the_database_that_raises_ends_no_worker(
    name: str, database_url: str, scene_of: Callable[..., Any]
) -> None:
    lives(name, database_url, scene_of)


def lives(name: str, url: str, scene_of: Callable[..., Any]) -> None:
    """The worker lives, the neighbours are done, and the culprit is accounted for."""
    boundary, plant, ends, options = CASES[name]
    with scene_of(url, **options) as scene:
        shop: Shop = scene.shop
        plant(scene)
        until = scene.handler_options.pop("until", lambda: True)
        scene.handler_options.setdefault("retry", RetryPolicy(max_attempts=3, base=timedelta(0)))
        if function := scene.handler_options.pop("function", None):
            register: Any = shop.app.handler(TOPIC, consumer=CONSUMER, **scene.handler_options)
            register(function)
        else:
            shop.handler(scene.handler_options.pop("body", None), **scene.handler_options)
        source = scene.source or Memory([], endless=True)
        bad = scene.bad or paid(BAD, b'"bad"', key=BAD)
        given = [
            paid(GOOD[0], key="0"),
            paid(GOOD[1], key="1"),
            bad,
            *(paid(each, key=each) for each in GOOD[2:]),
        ]
        source.waiting += Memory(given).waiting
        shop.app.consume(source)
        with running(worker(shop.app, maintenance=name == "job")) as codes:
            good = len(GOOD) + (ends == "processed")
            eventually(lambda: codes or shop.effects() == good, f"{good} done: {shop.events[-5:]}")
            eventually(
                lambda: codes or (source.has_settled(5) and until()),
                f"all settled: {shop.events[-5:]}",
            )
            if ends != "processed":
                eventually(
                    lambda: codes or scene.account() == {ends},
                    f"{scene.account()} {shop.events}",
                )
            if boundary in (
                Boundary.HEARTBEAT,
                Boundary.POLL,
                Boundary.PULSE,
                Boundary.LEASE,
                Boundary.LANE,
            ):
                eventually(lambda: codes or scene.contained(boundary), "its event")
            assert codes == []
        assert codes == [0]


# -- staged messages --------------------------------------------------------------------------

STAGED: dict[str, tuple[Boundary, Callable[[Scene, Recorder], Any], str]] = {}


def staged_case(boundary: Boundary, ends: str) -> Callable[..., Any]:
    """Add a row: one staged message among others that go out."""

    def add(plant: Callable[[Scene, Recorder], Any]) -> Any:
        STAGED[plant.__name__] = (boundary, plant, ends)
        return plant

    return add


def is_bad(message: Message[Any]) -> bool:
    return BAD in str(message.payload)


@staged_case(Boundary.CODEC, "dead")
def staged_row(scene: Scene, _broker: Recorder) -> None:
    """Headers that are none, as another program may write them."""
    bad = scene.shop.raw.rows("SELECT id, payload FROM txbox_outbox")
    (row_id,) = [row[0] for row in bad if BAD.encode() in bytes(row[1])]
    scene.shop.raw.execute("""UPDATE txbox_outbox SET headers = 'none' WHERE id = ?""", (row_id,))


@staged_case(Boundary.PUBLISH, "dead")
def publish(_scene: Scene, broker: Recorder) -> None:
    def answer(message: Message[Any]) -> BrokerError | None:
        return boom() if is_bad(message) else None

    broker._answer = answer


@staged_case(Boundary.PUBLISH, "sent")
def publish_everything(scene: Scene, broker: Recorder) -> None:
    """The publisher raises whatever it gets: the route pauses, and goes on."""
    scene.patch.setattr("txbox.worker.relay._PAUSE_S", (0.01, 0.02))
    calls: list[int] = []

    def answer(_message: Message[Any]) -> BrokerError | None:
        calls.append(1)
        return boom() if len(calls) < 12 else None

    broker._answer = answer


@staged_case(Boundary.PUBLISH, "sent")
def confirm(scene: Scene, broker: Recorder) -> None:
    """One answer too few: nobody knows for whom, so each is sent alone."""
    before = broker.publish

    def short(messages: Sequence[Message[Any]], within_s: float) -> Sequence[BrokerError | None]:
        return before(messages, within_s)[: None if len(messages) == 1 else -1]

    scene.patch.setattr(broker, "publish", short)


@staged_case(Boundary.RELAY, "sent")
def relay_lease(scene: Scene, _broker: Recorder) -> None:
    scene.patch.setattr("txbox.worker.relay._PAUSE_S", (0.01, 0.02))
    scene.raise_first(OutboxStore, "lease")


@staged_case(Boundary.RELAY, "dead")
def mark(scene: Scene, broker: Recorder) -> None:
    """What became of the culprit cannot be written with the rest: the others are marked."""
    publish(scene, broker)
    scene.raise_for_bad(
        Session,
        "together",
        lambda _self, statements: BAD * any(each.name == "relay_failed" for each in statements),
        times=2,
    )


@pytest.mark.parametrize("name", sorted(STAGED))
def test_a_boundary_of_the_relay_that_raises_ends_no_worker(
    name: str, database_url: str, scene_of: Callable[..., Any], plain_connection: Any
) -> None:
    boundary, plant, ends = STAGED[name]
    policy = RelayPolicy(
        lease=timedelta(seconds=2),
        confirm_within=timedelta(seconds=0.5),
        retry=RetryPolicy(base=timedelta(0), max_attempts=3 if ends == "dead" else 100),
    )
    with scene_of(database_url, relaying=policy) as scene:
        shop, broker = scene.shop, Recorder()
        shop.app.publish(broker)
        with plain_connection(database_url) as tx:
            shop.app.outbox.stage_many(
                tx, [Outgoing("t", body, key=body) for body in (*GOOD[:2], BAD, *GOOD[2:])]
            )
            tx.commit()
        plant(scene, broker)
        good = {*GOOD, *([BAD] if ends == "sent" else [])}
        with running(worker(shop.app)) as codes:
            eventually(
                lambda: codes or set(broker.bodies) == good,
                f"{broker.bodies} {shop.events}",
            )
            eventually(
                lambda: codes or outgoing(shop) == ({"dead": 1} if ends == "dead" else {}),
                f"{outgoing(shop)} {shop.events}",
            )
            assert codes == []
            if name not in ("confirm", "staged_row"):
                assert scene.contained(boundary), shop.events
        assert codes == [0]


def outgoing(shop: Shop) -> dict[str, int]:
    found = shop.raw.rows("SELECT status, count(*) FROM txbox_outbox GROUP BY status")
    return {str(status): int(count) for status, count in found}


def test_a_local_delivery_that_raises_ends_no_worker(
    database_url: str, scene_of: Callable[..., Any], plain_connection: Any
) -> None:
    """And its row is dead, and what is behind it in its key goes on after it."""
    policy = RelayPolicy(retry=RetryPolicy(base=timedelta(0), max_attempts=2))
    with scene_of(database_url, relaying=policy) as scene:
        shop: Shop = scene.shop
        shop.app.publish(Local())
        shop.handler()
        with plain_connection(database_url) as tx:
            for body in (*GOOD[:2], BAD, *GOOD[2:]):
                shop.app.outbox.stage(tx, TOPIC, body, key="one")
            tx.commit()

        def ids(_self: Any, rows: Sequence[Any]) -> list[Any]:
            return [row.message.payload for row in rows]

        scene.raise_for_bad(LocalDelivery, "_sorted", ids)
        scene.raise_first(OutboxStore, "adopt", times=1)
        with running(worker(shop.app)) as codes:
            eventually(lambda: codes or shop.effects() == len(GOOD), f"{shop.events}")
            eventually(lambda: codes or outgoing(shop) == {"dead": 1}, f"{shop.events}")
            assert scene.contained(Boundary.LOCAL)
            assert scene.contained(Boundary.RELAY)
            assert codes == []
        assert codes == [0]


def test_an_effect_that_raises_system_exit_ends_no_worker(
    database_url: str, scene_of: Callable[..., Any], plain_connection: Any
) -> None:
    with scene_of(database_url) as scene:
        shop, done = scene.shop, list[Any]()

        effect: Any = shop.app.effect("mail", retry=RetryPolicy(base=timedelta(0), max_attempts=2))

        def mail(message: Message[Any]) -> None:
            if message.body == BAD:
                exits()
            done.append(message.body)

        effect(mail)
        with plain_connection(database_url) as tx:
            for body in (*GOOD[:2], BAD, *GOOD[2:]):
                shop.app.effects.stage(tx, "mail", body)
            tx.commit()
        with running(worker(shop.app)) as codes:
            eventually(lambda: codes or sorted(done) == GOOD, f"{shop.events}")
            eventually(lambda: codes or scene.account() == {"dead"}, f"{shop.events}")
            assert codes == []
        assert codes == [0]


# -- pages and lists --------------------------------------------------------------------------


def test_a_page_that_raises_is_a_500_and_ends_no_worker(
    sqlite_url: str, scene_of: Callable[..., Any]
) -> None:
    health = Health()
    with scene_of(sqlite_url) as scene, socket.create_server(("127.0.0.1", 0)) as listener:
        shop: Shop = scene.shop
        shop.handler()
        source = Memory([], endless=True)
        shop.app.consume(source)
        server = Server(probes(health, Counters()), listener, PROBES)
        server.start()
        try:
            with running(worker(shop.app, health=health)) as codes:
                for raising in (boom, exits):
                    scene.patch.setattr(health, "unready", raising)
                    assert status_of(listener, "/readyz") == 500
                scene.patch.undo()
                source.waiting += Memory([paid(GOOD[0])]).waiting
                eventually(lambda: codes or source.has_settled(1))
                assert status_of(listener, "/readyz") == 200
            assert codes == [0]
        finally:
            server.close()


def status_of(listener: socket.socket, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", listener.getsockname()[1], timeout=10)
    with closing(connection):
        connection.request("GET", path)
        return connection.getresponse().status


def test_a_row_that_cannot_be_read_is_listed_with_the_others(
    database_url: str, scene_of: Callable[..., Any]
) -> None:
    codec = Codec("none")
    with scene_of(database_url, codec=codec) as scene:
        shop: Shop = scene.shop
        shop.handler(lambda _message, _tx: boom(), retry=RetryPolicy(max_attempts=1))
        for message_id in (*GOOD, BAD):
            shop.deliver(paid(message_id, f'"{message_id}"'.encode()))
        codec.on = "decode"
        with Admin(shop.app) as admin:
            assert {row.message_id for row in admin.list(InboxFilter())} == {*GOOD, BAD}
            (shown,) = admin.show(InboxFilter(consumer=CONSUMER, message_id=BAD), reveal=True)
            assert shown.message_id == BAD


#: What another program may write, or a release that nobody knows: a column of a table, and a value.
ALTERED = [
    ("txbox_inbox", "origin", '{"_time": []}'),
    ("txbox_inbox", "origin", '{"_time": 1e300}'),
    ("txbox_inbox", "headers", "[["),
    ("txbox_inbox", "error", "codec:!"),
    ("txbox_attempt", "error", "codec:!"),
    ("txbox_outbox", "headers", "5"),
    ("txbox_quarantine", "headers", '[["n", []]]'),
    ("txbox_quarantine", "origin", '{"_time": {}}'),
    ("txbox_audit", "filter", "none"),
    ("txbox_audit", "filter", "[5]"),
    ("txbox_worker", "sources", "none"),
    ("txbox_worker", "routes", '{"r": {"away": [1]}}'),
]
RAISING = [(tables, "as_time"), (tables, "decode_origin"), (Columns, "error_back")]


@pytest.fixture
def listed(database_url: str, plain_connection: Any) -> Iterator[Shop]:
    """A shop with two rows in each list."""
    with opened(database_url) as shop:
        shop.handler(lambda _message, _tx: boom(), retry=RetryPolicy(max_attempts=1))
        shop.app.publish(Recorder(), topics=["t"])
        for name in ("a", "b"):
            shop.deliver(paid(name))
            shop.deliver(paid("", name.encode()))
        with plain_connection(database_url) as tx:
            shop.app.outbox.stage_many(tx, [Outgoing("t", "a"), Outgoing("t", "b")])
            tx.commit()
        with Admin(shop.app) as admin:
            for name in ("a", "b"):
                admin.retry(InboxFilter(consumer=CONSUMER, message_id=name))
        for number in range(2):
            identity = activity.Identity(
                worker=f"w{number}", kind="run", host="h", pid=1, version="1", app="a",
                consumers=(CONSUMER,), sources={}, routes=(), lanes=1,
            )  # fmt: skip
            doing = activity.Doing(state="working", busy=0, leases=0, in_flight=0, troubles=())
            drive(shop.app._any_sync(), activity.write, shop.app.store.dialect, identity, doing, {})
        yield shop


def lists(shop: Shop) -> list[int]:
    """Read every list, every message and its explanation; how many rows each list has."""
    with Admin(shop.app) as admin:
        inbox, outbox = admin.list(InboxFilter()), admin.list(OutboxFilter())
        quarantine = admin.list(QuarantineFilter())
        for row in inbox:
            where = InboxFilter(consumer=CONSUMER, message_id=row.message_id)
            assert admin.show(where, reveal=True)
            assert admin.explain(row.message_id).places
        for leaving in outbox:
            assert admin.show(OutboxFilter(message_id=leaving.message_id), reveal=True)
        for aside in quarantine:
            assert admin.show(QuarantineFilter(hash=aside.hash), reveal=True)
        assert admin.failures() or not shop.row("a").error
        pages: list[Sequence[Any]] = [inbox, outbox, quarantine, admin.audit(), admin.workers()]
        return [len(page) for page in pages]


@pytest.mark.parametrize(("table_name", "column", "value"), ALTERED)
def test_a_row_that_cannot_be_shown_is_shown_as_such_and_the_others_are_listed(
    listed: Shop, table_name: str, column: str, value: str
) -> None:
    before = lists(listed)
    assert min(before) == 2
    assert listed.force(f"UPDATE {table_name} SET {column} = ?", (value,))
    assert lists(listed) == before


@pytest.mark.parametrize(("owner", "name"), RAISING, ids=lambda value: str(value)[:30])
def test_a_list_outlives_what_raises_for_its_rows(
    listed: Shop, monkeypatch: Patch, owner: Any, name: str
) -> None:
    before = lists(listed)
    monkeypatch.setattr(owner, name, boom)
    assert lists(listed) == before


# -- the table is complete --------------------------------------------------------------------

ELSEWHERE: dict[Boundary, str] = {
    Boundary.LOCAL: "test_a_local_delivery_that_raises_ends_no_worker",
    Boundary.ROW: "test_a_row_that_cannot_be_shown_is_shown_as_such_and_the_others_are_listed",
    Boundary.PAGE: "test_a_page_that_raises_is_a_500_and_ends_no_worker",
}


def test_every_boundary_has_a_row() -> None:
    rows = {boundary for boundary, *_ in (*CASES.values(), *STAGED.values())}
    assert rows - {None} | set(ELSEWHERE) == set(Boundary)
    assert all(name in globals() for name in ELSEWHERE.values())


#: Broad, and no boundary: (file, function) and why.
NO_BOUNDARY = {
    ("worker/driving.py", "report"): "reports the end of a thread",
    ("worker/lanes.py", "turn"): "reports the end of a turn",
    ("worker/lanes.py", "acquire"): "raises again",
    ("worker/pump.py", "_open"): "reports the end of a pump",
    ("worker/pump.py", "_run"): "reports the end of a pump",
    ("worker/pump.py", "_end"): "reports the end of a pump",
    ("worker/table.py", "give_back"): "raises again",
    ("processing/attempt.py", "deliver_one"): "raised again, in the loop",
    ("processing/calls.py", "_call"): "the handler's own failure",
    ("processing/calls.py", "_call_async"): "the handler's own failure",
    ("processing/calls.py", "decode_ahead"): "left to the handler's call",
    ("maintenance/pruning.py", "leased"): "raises again",
}
#: A boundary, by itself or in the function that is called; or a question whether the error is content's.
SAYS = (
    "Boundary.", "boundary", "blamed(", "is_contents(", "ends_worker(", "_observer_failed(", "_contain(",
    "_unsettled(", "_retry_later(", "_not_leased(", "_raise_if_final(",
)  # fmt: skip
PARTS = (
    "worker", "processing", "maintenance", "admin", "ui", "events.py", "outbox",
)  # fmt: skip


def test_every_broad_except_of_a_worker_names_its_boundary() -> None:
    """So that a new one is in the table above, or says here why it needs no row."""
    source, unnamed = ROOT / "src/txbox", set[tuple[str, str]]()
    for path in source.rglob("*.py"):
        name = path.relative_to(source)
        if name.parts[0] not in PARTS:
            continue
        tree = ast.parse(path.read_text())
        functions = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        for clause in ast.walk(tree):
            if isinstance(clause, ast.ExceptHandler) and _is_broad(clause.type):
                # the innermost begins last
                within = [
                    one for one in functions if one.lineno <= clause.lineno <= (one.end_lineno or 0)
                ]
                function = max(within, key=lambda one: one.lineno)
                if not any(word in ast.unparse(clause) for word in SAYS):
                    unnamed.add((str(name), function.name))
    assert unnamed == set(NO_BOUNDARY)


def _is_broad(kind: ast.expr | None) -> bool:
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(
        each is None or ast.unparse(each) in ("Exception", "BaseException") for each in kinds
    )
