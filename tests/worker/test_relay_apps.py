"""Several Apps on one database: each relays what it staged, and leaves the rows of the others alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from tests.support.databases import Raw
from tests.support.meddling import Verb, drive_meddled
from tests.support.recording import Recorder
from tests.support.sources import Memory
from tests.support.workers import run_of
from txbox import App, Message, Outbox, RelayPolicy
from txbox.admin import Admin, OutboxFilter
from txbox.brokers.local import Local
from txbox.session import Statement, Statements
from txbox.worker.relay import Relay

Connect = Callable[[str], AbstractContextManager[Any]]
Look = Callable[[str], Raw]

TOPIC = "created"
ROWS = "SELECT number, topic, status, attempts, token FROM txbox_outbox ORDER BY number"


class Broker(Recorder):
    """A destination with an address."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address

    @property
    def name(self) -> str:
        return self._address


class Arriving(Memory):
    """A source that could deliver the topic, as a broker that others publish it to."""


def handle(message: Message[Any], tx: Any) -> None: ...


def neither(app: App) -> None:
    app.handler("something else", consumer="neither")(handle)


def nothing_at_all(app: App) -> None:
    """An App that neither publishes nor consumes."""


def publishes_elsewhere(app: App) -> None:
    app.publish(Broker("redis:other/0"))


def publishes_there_too(app: App) -> None:
    app.publish(Broker("redis:broker/0"), topics=["mails"])


def publishes_it_in_another_shape(app: App) -> None:
    app.publish(Broker("redis:broker/0"), cloudevents="binary", source="/mails")


def publishes_it_by_another_name(app: App) -> None:
    app.publish(Broker("redis:broker/0"), name="of mails")


def consumes_it_from_a_broker(app: App) -> None:
    app.handler(TOPIC, consumer="billing", ordered=True)(handle)
    app.consume(Arriving([]), topics=[TOPIC])


def consumes_all_from_a_broker(app: App) -> None:
    app.handler("*", consumer="audit")(handle)
    app.consume(Arriving([]))


def consumes_it_locally(app: App) -> None:
    app.handler(TOPIC, consumer="accounting")(handle)


def publishes_all_to_its_consumers(app: App) -> None:
    app.handler("*", consumer="everything")(handle)
    app.publish(Local())


Other = Callable[[App], None]
OTHERS: tuple[Other, ...] = (
    neither, nothing_at_all, publishes_elsewhere, publishes_there_too, publishes_it_in_another_shape,
    publishes_it_by_another_name, consumes_it_from_a_broker, consumes_all_from_a_broker,
    consumes_it_locally, publishes_all_to_its_consumers,
)  # fmt: skip


def relays(app: App) -> list[Relay]:
    return [Relay(run_of(app), route) for route in app.routes.all()]


def drain(app: App) -> None:
    for relay in relays(app):
        for _ in range(100):
            if not relay.turn():
                break
        else:
            raise AssertionError("the relay never came to an end")
        assert not relay.has_rows(), "what is not its own keeps no relay from its end"


@contextmanager
def apps(url: str, *others: Other) -> Iterator[list[App]]:
    made = [App(url) for _ in others]
    for app, other in zip(made, others, strict=True):
        other(app)
    try:
        yield made
    finally:
        for app in made:
            app.close()


def consumers(raw: Raw) -> list[tuple[str, int]]:
    rows = raw.rows(
        "SELECT consumer, count(*) FROM txbox_inbox GROUP BY consumer ORDER BY consumer"
    )
    return [(_text(consumer), count) for consumer, count in rows]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def stage(app: App, connect: Connect, url: str, *, ordered: bool = False, count: int = 3) -> None:
    with connect(url) as tx:
        for number in range(count):
            app.outbox.stage(
                tx, TOPIC, number, key="k" if ordered else None, ordered=ordered, type="t"
            )
        tx.commit()


@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
@pytest.mark.parametrize("local", [False, True], ids=["broker", "local"])
def test_an_app_leaves_the_rows_of_another_alone(
    database_url: str, plain_connection: Connect, raw: Look, local: bool, ordered: bool
) -> None:
    look = raw(database_url)
    cases: list[Sequence[Other]] = [*((other,) for other in OTHERS), OTHERS]
    for number, others in enumerate(cases):
        names, broker = [other.__name__ for other in others], Broker("redis:broker/0")
        known = [("stock", 3 * number)] if local and number else []
        with App(database_url) as orders, apps(database_url, *others) as made:
            if local:
                orders.handler(TOPIC, consumer="stock")(handle)
            else:
                orders.publish(broker, topics=[TOPIC])
            stage(orders, plain_connection, database_url, ordered=ordered)
            before = look.rows(ROWS)
            assert len(before) == 3, names
            for app in made:
                drain(app)
            assert look.rows(ROWS) == before, names
            assert consumers(look) == known, names
            drain(orders)
            assert look.rows(ROWS) == [], names
            assert consumers(look) == ([("stock", 3 * (number + 1))] if local else []), names
            assert broker.bodies == ([] if local else [0, 1, 2]), names


@pytest.mark.parametrize(
    "pair", list(itertools.permutations(("broker", "local", "other broker"), 2)), ids=str
)
def test_two_apps_with_one_topic_and_key_wait_for_each_other_in_nothing(
    sqlite_url: str, plain_connection: Connect, raw: Look, pair: tuple[str, str]
) -> None:
    """The order of a key applies within one route: rows that nobody takes hold up no others."""

    def of(way: str) -> Other:
        def made(app: App) -> None:
            if way == "local":
                app.handler(TOPIC, consumer=f"c{id(app)}")(handle)
            else:
                app.publish(Broker(way))

        return made

    with apps(sqlite_url, of(pair[0]), of(pair[1])) as (first, second):
        stage(first, plain_connection, sqlite_url, ordered=True)
        stage(second, plain_connection, sqlite_url, ordered=True)
        drain(second)
        left = {_text(row[0]) for row in raw(sqlite_url).rows("SELECT route FROM txbox_outbox")}
        assert left == {first.routes.of(TOPIC, "t")}


def test_an_outbox_without_an_app_is_relayed_by_whoever_has_the_way(
    database_url: str, plain_connection: Connect, raw: Look
) -> None:
    broker, look = Broker("redis:broker/0"), raw(database_url)
    with plain_connection(database_url) as tx:
        for number in range(3):
            Outbox().stage(tx, TOPIC, number, key="k")
        Outbox(route="by name").stage(tx, TOPIC, "named")
        tx.commit()
    with apps(database_url, neither, consumes_it_from_a_broker, publishes_there_too) as made:
        for app in made:
            drain(app)
        assert look.value("SELECT count(*) FROM txbox_outbox WHERE attempts = 0") == 4
    with App(database_url) as orders:
        orders.publish(broker, topics=[TOPIC])
        drain(orders)
    assert broker.bodies == [0, 1, 2]
    with App(database_url) as named:
        named.publish(broker, topics=[TOPIC], name="by name")
        drain(named)
    assert broker.bodies == [0, 1, 2, "named"]


def test_an_outbox_without_an_app_keeps_the_order_with_one_that_has(
    database_url: str, plain_connection: Connect
) -> None:
    broker = Broker("redis:broker/0")
    with App(database_url) as app, plain_connection(database_url) as tx:
        app.publish(broker, topics=[TOPIC])
        for number in range(0, 6, 2):
            Outbox().stage(tx, TOPIC, number, key="k")
            app.outbox.stage(tx, TOPIC, number + 1, key="k")
        tx.commit()
        drain(app)
    assert broker.bodies == list(range(6))


def test_a_release_with_more_consumers_takes_what_the_last_one_left(
    database_url: str, plain_connection: Connect, raw: Look
) -> None:
    look = raw(database_url)
    with App(database_url) as app:
        app.handler(TOPIC, consumer="stock")(handle)
        stage(app, plain_connection, database_url)
    with App(database_url) as app, apps(database_url, consumes_it_locally) as (other,):
        app.handler(TOPIC, consumer="alerts")(handle)
        app.handler(TOPIC, consumer="stock")(handle)
        drain(other)
        assert consumers(look) == []
        drain(app)
    assert consumers(look) == [("alerts", 3), ("stock", 3)]


def test_rows_for_a_consumer_that_this_release_lacks_are_left_to_the_next_one_for_a_minute(
    database_url: str, plain_connection: Connect, raw: Look
) -> None:
    """Deployed first where it stages, a release loses nothing for its new consumer, if its relays follow in time; and
    what a removed consumer shares with others reaches those.
    """
    look = raw(database_url)
    with App(database_url) as next_release, App(database_url) as this_one:
        for consumer in ("alerts", "stock"):
            next_release.handler(TOPIC, consumer=consumer)(handle)
        this_one.handler(TOPIC, consumer="stock")(handle)
        stage(next_release, plain_connection, database_url)
        drain(this_one)
        assert consumers(look) == [], "they are left to the next release"
        drain(next_release)
        assert consumers(look) == [("alerts", 3), ("stock", 3)]
        look.execute("DELETE FROM txbox_inbox")

        stage(next_release, plain_connection, database_url)
        with plain_connection(database_url) as tx:
            next_release.outbox.stage(tx, TOPIC, "later", delay=timedelta(hours=1), type="t")
            tx.commit()
        look.execute(
            "UPDATE txbox_outbox SET staged_at = '2020-01-01', available_at = '2020-01-01' "
            "WHERE available_at = staged_at"
        )
        drain(this_one)
    assert consumers(look) == [("stock", 3)], "nobody has come for them"
    ((route,),) = look.rows("SELECT route FROM txbox_outbox")
    assert _text(route) == "local:alerts,stock", "it is not due yet"


def test_what_a_handler_stages_without_an_app_goes_where_its_app_says(
    database_url: str, raw: Look
) -> None:
    look = raw(database_url)
    with App(database_url) as app, apps(database_url, consumes_it_from_a_broker, neither) as others:
        consumes_it_from_a_broker(app)
        app.handler("in", consumer="stager")(
            lambda message, tx: Outbox().stage(tx, TOPIC, message.id) and None
        )
        app.process(Message(topic="in", id="1", payload=b"{}"))
        assert [_text(route) for (route,) in look.rows("SELECT route FROM txbox_outbox")] == [""]
        look.execute("DELETE FROM txbox_inbox")
        for other in others:
            drain(other)
        assert consumers(look) == []
        drain(app)
        assert consumers(look) == [("billing", 1)]


def test_a_type_without_a_handler_waits_for_one_and_holds_nothing_up(
    database_url: str, plain_connection: Connect, raw: Look
) -> None:
    look = raw(database_url)
    with App(database_url) as app, plain_connection(database_url) as tx:
        app.handler(TOPIC, type="paid", consumer="stock")(handle)
        app.outbox.stage(tx, TOPIC, 1, key="k", type="void")
        app.outbox.stage(tx, TOPIC, 2, key="k", type="paid")
        Outbox().stage(tx, TOPIC, 3, key="k", type="void")
        Outbox().stage(tx, TOPIC, 4, key="k", type="paid")
        tx.commit()
        drain(app)
        assert consumers(look) == [("stock", 2)]
        assert [row[2:4] for row in look.rows(ROWS)] == [("pending", 0)] * 2
        look.execute(
            "UPDATE txbox_outbox SET staged_at = '2020-01-01', available_at = '2020-01-01'"
        )
        with Admin(app) as admin:
            found = [(one.code, one.query["route"]) for one in admin.check().findings]
        assert found == [("orphan-route", "any"), ("orphan-route", "local:stock (no handler)")]
    with App(database_url) as app:
        app.handler(TOPIC, consumer="stock")(handle)
        drain(app)
    assert consumers(look) == [("stock", 4)]


def test_rows_of_a_route_that_is_gone_are_seen_and_rerouted(
    database_url: str, plain_connection: Connect, raw: Look
) -> None:
    new = Broker("redis:new/0")
    with App(database_url) as app:
        app.publish(Broker("redis:old/0"))
        stage(app, plain_connection, database_url, ordered=True)
    with App(database_url) as app, Admin(app) as admin:
        app.publish(new)
        drain(app)
        assert new.sent == []
        (gone,) = admin.topics()
        assert (gone.route, gone.counts) == ("redis:old/0", {"due": 3})
        where = OutboxFilter(route="redis:old/0")
        assert admin.reroute(where, "redis:new/0", dry_run=True).count == 3
        assert admin.reroute(where, "redis:new/0", actor="me").count == 3
        drain(app)
    assert new.bodies == [0, 1, 2]
    (action,) = raw(database_url).rows("SELECT action FROM txbox_audit")
    assert _text(action[0]) == "reroute outgoing"


def test_what_waits_for_another_route_costs_this_one_nothing(
    postgresql_url: str, plain_connection: Connect, raw: Look
) -> None:
    """A look at the outbox reads the index in order, and no rows of other routes."""
    look = raw(postgresql_url)
    look.execute(
        "INSERT INTO txbox_outbox (id, topic, route, key) SELECT 'o' || n, 't', 'redis:gone/0', 'k' "
        "FROM generate_series(1, 20000) AS n"
    )
    look.execute(
        "INSERT INTO txbox_outbox (id, topic, route, key) SELECT 'm' || n, 't', 'redis:broker/0', 'k' || n "
        "FROM generate_series(1, 20000) AS n"
    )
    look.execute("ANALYZE txbox_outbox")
    broker = Broker("redis:broker/0")
    with (
        App(postgresql_url, relaying=RelayPolicy(batch=50)) as app,
        plain_connection(postgresql_url) as tx,
    ):
        app.publish(broker)
        (relay,) = relays(app)
        # the statement the relay sends
        seen: list[Statement] = []

        async def noted(verb: Verb, statements: Statements, carried_out: Any) -> Any:
            seen.extend(statements)
            return await carried_out()

        lease = partial(relay._next_lease(), token="token")
        drive_meddled(app._any_sync(), noted, lease)
        (statement,) = [one for one in seen if one.name == "relay_page"]
        sql, params = _with_literals(statement)
        plan = tx.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}", params).fetchone()[0][0]
        tx.execute("SELECT 1")
    nodes = list(_nodes(plan["Plan"]))
    assert {node.get("Index Name") for node in nodes} - {None} == {"txbox_outbox_due"}, plan
    assert not [node for node in nodes if node["Node Type"] == "Seq Scan"], plan
    assert max(node["Actual Rows"] for node in nodes) <= 50, plan
    assert sum(node.get("Rows Removed by Filter", 0) for node in nodes) == 0, plan


def _with_literals(statement: Any) -> tuple[str, dict[str, Any]]:
    import re

    names: dict[str, str] = {}

    def named(found: re.Match[str]) -> str:
        key = "p_" + found[1].replace(".", "_")
        names[key] = found[1]
        return f"%({key})s"

    sql = re.sub(r"(?<!:):([a-z_][a-z_.]*)", named, statement.sql)
    return sql, {key: statement.params[name] for key, name in names.items()}


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for each in plan.get("Plans", ()):
        yield from _nodes(each)
