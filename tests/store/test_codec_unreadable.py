"""A row that cannot be read, or a message that cannot be written, costs that message and nobody else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import pytest

from tests.admin.test_admin_outbox import relayed
from tests.support.command import Command
from tests.support.databases import NewDatabase, Raw
from tests.support.recording import Recorder
from tests.support.shop import AT_ONCE, CONSUMER, TOPIC, Shop, opened, paid
from txbox import (
    App,
    Outcome,
    RelayPolicy,
    RetryPolicy,
    StoreUnavailable,
    UnusableMessage,
)
from txbox.admin import Admin, InboxFilter, OutboxFilter, QuarantineFilter
from txbox.events import MessageDead, MessageFailed, OutgoingFailed
from txbox.session import Session, drive
from txbox.store.activity import outbox_ages
from txbox.store.codec import Row
from txbox.store.dialect import LAST

Connect = Callable[[str], AbstractContextManager[Any]]
POISON = b'{"poison": 1}'
POISONS = (b"poison", b"nosiop")


class Picky:
    """A codec that fails on some payloads."""

    key_id = "k1"

    def __init__(self, fails: str, error: Exception | None = None) -> None:
        self.fails = fails
        self.error = error or KeyError("secret")

    def encode(self, data: bytes) -> bytes:
        if self.fails == "encode" and b"poison" in data:
            raise self.error
        return data[::-1]

    def decode(self, data: bytes, key_id: str) -> bytes:
        if self.fails == "decode" and b"nosiop" in data:
            raise self.error
        return data[::-1]


@pytest.mark.every_database
@pytest.mark.parametrize("kind", ["one by one", "batch"])
def test_rows_that_the_codec_cannot_read_cost_attempts_and_the_others_run(
    database_url: str, kind: str
) -> None:
    with opened(database_url, codec=Picky("decode")) as shop:
        taken: list[bytes | None] = []

        def take(given: Any, tx: Any) -> None:
            taken.extend(each.payload for each in (given if isinstance(given, list) else [given]))

        register: Any = shop.app.handler(
            TOPIC, consumer=CONSUMER, mode="stored", batch=kind == "batch", dead_letter_topic="letters",
            retry=RetryPolicy(max_attempts=2, base=timedelta(0)),
        )  # fmt: skip
        shop.app.publish(Recorder(), topics=["letters"])
        register(take)
        for name, payload in (("a", b"1"), ("b", POISON), ("c", b"2")):
            assert shop.deliver(paid(name, payload)) is Outcome.DEFERRED
        content = (
            "SELECT content_type, headers, origin, payload, key_id, has_payload FROM txbox_inbox"
            " WHERE message_id = 'b'"
        )
        before = shop.raw.rows(content)
        assert sorted(shop.work()) == [Outcome.FAILED, Outcome.PROCESSED, Outcome.PROCESSED]
        assert taken == [b"1", b"2"]
        with Admin(shop.app) as admin:
            assert len(admin.list(InboxFilter())) == 3
            (shown,) = admin.show(InboxFilter(consumer=CONSUMER, message_id="b"), reveal=True)
            assert (shown.payload, shown.payload_bytes) == (None, len(POISON))
            assert "KeyError" in str(shown.unreadable)
            assert "secret" not in str(shown)
            assert shop.work() == [Outcome.DEAD]
            # its content is as it was: with a codec that reads it, it can be retried
            assert shop.raw.rows(content) == before
            assert shop.row("b").attempts == 2
            assert [len(shop.emitted(each)) for each in (MessageFailed, MessageDead)] == [1, 1]
            assert shop.raw.value("SELECT count(*) FROM txbox_outbox") == 1


@pytest.mark.every_database
def test_a_message_that_the_codec_cannot_keep_is_accounted_for_and_the_others_run(
    database_url: str,
) -> None:
    with opened(database_url, codec=Picky("encode")) as shop:
        shop.handler(lambda message, tx: _fail())
        shop.handler(consumer="kept", keep_payload="always")
        shop.handler(consumer="stored", mode="stored")
        # its failure is recorded without it, and nothing could run it again
        assert shop.deliver(paid("a", POISON), CONSUMER) is Outcome.DEAD
        row = shop.row("a")
        assert (row.has_payload, row.attempts, row.error_type) == (False, 1, "ValueError")
        assert shop.deliver(paid("a", POISON), CONSUMER) is Outcome.DUPLICATE
        assert shop.deliver(paid("a", POISON), "kept") is Outcome.QUARANTINED
        sent = shop.app.send_many([paid("b", b"1"), paid("c", POISON), paid("d", b"2")])
        assert [outcomes["stored"] for outcomes in sent] == [
            Outcome.DEFERRED,
            Outcome.QUARANTINED,
            Outcome.DEFERRED,
        ]
        assert sorted(shop.work("stored")) == [Outcome.PROCESSED] * 2
        with Admin(shop.app) as admin:
            found = admin.list(QuarantineFilter())
            assert {(each.consumer, each.message_id) for each in found} >= {
                ("kept", "a"),
                ("stored", "c"),
            }
            assert {each.kept_bytes for each in found} == {0}
            assert all("KeyError" in each.reason for each in found)
            assert all("secret" not in each.reason for each in found)


def _fail() -> None:
    raise ValueError("no")


@pytest.mark.parametrize("when", ["encode", "decode"])
def test_while_a_key_service_is_away_nothing_is_counted(sqlite_url: str, when: str) -> None:
    codec = Picky("", StoreUnavailable("the key service is away"))
    with opened(sqlite_url, codec=codec) as shop:
        shop.handler(mode="stored")
        if when == "encode":
            codec.fails = when
            with pytest.raises(StoreUnavailable):
                shop.app.store.columns.payload(POISON, Row("billing", "a"))
            return
        assert shop.deliver(paid("a", POISON)) is Outcome.DEFERRED
        codec.fails = when
        with pytest.raises(StoreUnavailable):
            shop.work()
        assert (shop.row("a").status, shop.row("a").attempts) == ("pending", 0)


def test_what_the_codec_cannot_keep_is_not_staged(shop: Shop, plain_connection: Connect) -> None:
    app = App(shop.url, codec=Picky("encode"))
    app.publish(Recorder(), topics=["out"])
    with plain_connection(shop.url) as tx:
        with pytest.raises(UnusableMessage, match="KeyError"):
            app.outbox.stage(tx, "out", POISON)
        with pytest.raises(UnusableMessage, match="KeyError"):
            app.outbox.stage(tx, "out", b"", headers={"n": "poison"})
        app.outbox.stage(tx, "out", b"fits")
        tx.commit()
    app.close()


def test_a_result_that_the_codec_cannot_keep_fails_its_message(sqlite_url: str) -> None:
    with opened(sqlite_url, codec=Picky("encode")) as shop:
        app: Any = shop.app
        app.handler(TOPIC, consumer=CONSUMER, keep_result=True, retry=AT_ONCE)(
            lambda message, tx: "poison"
        )
        assert shop.deliver(paid("a")) is Outcome.FAILED
        assert shop.row("a").error_type == "UnusableMessage"


@pytest.mark.every_database
@pytest.mark.parametrize("destination", ["broker", "local"])
def test_an_outgoing_row_that_cannot_be_read_fails_and_the_others_leave(
    database_url: str, plain_connection: Connect, destination: str
) -> None:
    policy = RelayPolicy(retry=RetryPolicy(max_attempts=2, base=timedelta(0)))
    broker = Recorder()
    with opened(database_url, codec=Picky("decode"), plain="accept", relaying=policy) as shop:
        if destination == "broker":
            shop.app.publish(broker, topics=[TOPIC])
        else:
            shop.handler()
        with plain_connection(shop.url) as tx:
            bad = shop.app.outbox.stage(tx, TOPIC, POISON, key="k")
            behind = shop.app.outbox.stage(tx, TOPIC, b"behind", key="k")
            tx.commit()
        relayed(shop.app)
        with Admin(shop.app) as admin:
            rows = {row.message_id: row for row in admin.list(OutboxFilter())}
            assert (rows[bad].status, rows[bad].error_type) == ("dead", "UnreadableMessage")
            (shown,) = admin.show(OutboxFilter(message_id=bad), reveal=True)
            assert "KeyError" in str(shown.unreadable)
            assert any(said for place in admin.explain(bad).places for said in place.sentences)
        assert set(rows) == {bad}
        assert len(shop.emitted(OutgoingFailed)) == 1
        if destination == "broker":
            assert [message.id for message in broker.sent] == [behind]
        else:
            assert list(shop.work()) == [Outcome.PROCESSED]


ODD_ROWS = {
    "headers": [
        '[["n",5]]',
        '[["n",{}]]',
        '[["n",{"b64":"!"}]]',
        "[[",
        "5",
        '{"a": 1}',
        "[" * 100_000,
    ],
    "origin": ["[[", "5", '{"_time": "never"}', '{"_time": 5}', '{"_time": []}'],
}


@pytest.mark.parametrize(
    ("column", "text"),
    [(column, text) for column, texts in ODD_ROWS.items() for text in texts],
)
def test_a_row_that_somebody_altered_is_shown_and_costs_at_most_itself(
    sqlite_url: str, column: str, text: str
) -> None:
    with opened(sqlite_url) as shop:
        shop.handler(mode="stored", retry=RetryPolicy(max_attempts=1))
        for name in ("a", "b"):
            shop.deliver(paid(name, headers={"n": "v"}))
        shop.raw.execute(f"UPDATE txbox_inbox SET {column} = ? WHERE message_id = 'a'", (text,))
        with Admin(shop.app) as admin:
            assert len(admin.list(InboxFilter())) == 2
            for reveal in (False, True):
                assert admin.show(InboxFilter(consumer=CONSUMER, message_id="a"), reveal=reveal)
            assert admin.explain("a").places
        assert set(shop.work()) <= {Outcome.PROCESSED, Outcome.DEAD}
        assert (shop.row("b").status, "b" in shop.calls) == ("processed", True)


FAR: dict[str, list[str | None]] = {
    "postgresql": ["infinity", "-infinity", "12026-01-01 00:00:00+00", "4000-01-01 00:00:00+00 BC"],
    "mysql": ["9999-12-31 23:59:59"],
    "sqlite": ["9999-12-31 23:59:59.999", "12026-01-01", "never", None],
}


def test_times_beyond_what_python_can_express_are_shown_and_hide_no_other_row(
    shop: Shop, plain_connection: Connect
) -> None:
    shop.handler(lambda message, tx: _fail())
    shop.app.publish(Recorder(), topics=["out"])
    for name in ("a", "b"):
        shop.deliver(paid(name))
    with plain_connection(shop.url) as tx:
        staged = [shop.app.outbox.stage(tx, "out", {}, delay=timedelta(days=1)) for _ in range(2)]
        tx.commit()
    for moment in FAR[shop.raw.product]:
        shop.raw.execute(
            "UPDATE txbox_inbox SET next_attempt_at = ? WHERE message_id = 'a'", (moment,)
        )
        if moment is not None:
            shop.raw.execute(
                "UPDATE txbox_outbox SET available_at = ? WHERE id = ?", (moment, staged[0])
            )
        with Admin(shop.app) as admin:
            assert {row.message_id for row in admin.list(InboxFilter())} == {"a", "b"}
            assert {row.message_id for row in admin.list(OutboxFilter())} == set(staged)
            (shown,) = admin.show(InboxFilter(consumer=CONSUMER, message_id="a"))
            assert shown.next_attempt_at is None or shown.next_attempt_at.year in (1, 9999)
            assert moment != "infinity" or shown.next_attempt_at == LAST
            assert admin.explain("a").places
            assert admin.explain(staged[0]).places
            admin.failures()
            admin.doctor()


def test_a_far_time_of_a_row_hides_nothing_from_the_pages(
    shop: Shop, plain_connection: Connect
) -> None:
    shop.handler(lambda message, tx: _fail())
    shop.app.publish(Recorder(), topics=["out"])
    for name in ("a", "b"):
        shop.deliver(paid(name))
    with plain_connection(shop.url) as tx:
        shop.app.outbox.stage(tx, "out", {})
        tx.commit()
    for moment in filter(None, FAR[shop.raw.product]):
        shop.raw.execute(
            "UPDATE txbox_inbox SET received_at = ?, updated_at = ? WHERE message_id = 'a'",
            (moment, moment),
        )
        shop.raw.execute("UPDATE txbox_inbox SET next_attempt_at = ?", (moment,))
        shop.raw.execute(
            "UPDATE txbox_outbox SET staged_at = ?, available_at = ?", (moment, moment)
        )
        assert shop.app.database.sync is not None
        drive(shop.app.database.sync, _due_looked_for, shop)
        with Admin(shop.app) as admin:
            assert sum(group.count for group in admin.failures()) == 2
            consumers, topics = admin.overview()
            assert [row.counts["failed"] for row in consumers] == [2]
            assert [sum(row.counts.values()) for row in topics] == [1]
            assert admin.open_of(CONSUMER).counts["failed"] == 2
            assert not admin.check().unchecked
            assert admin.explain("a").places
            admin.doctor()


async def _due_looked_for(db: Session, shop: Shop) -> None:
    """What workers ask every few seconds."""
    dialect = shop.app.store.dialect
    routes = [str(row[0]) for row in shop.raw.rows("SELECT route FROM txbox_outbox")]
    await outbox_ages(db, dialect, routes)
    params = {"local": routes[0], "ahead_s": 60.0}
    rows = {"consumer": [CONSUMER], "route": routes}
    await db.alone(dialect.statement("due", params, rows))


def test_a_row_that_is_never_due_is_a_finding(sqlite_url: str) -> None:
    with opened(sqlite_url) as shop, Admin(shop.app) as admin:
        shop.handler(lambda message, tx: _fail())
        shop.deliver(paid("a"))
        shop.raw.execute(
            "UPDATE txbox_inbox SET next_attempt_at = NULL, received_at = '2020-01-01 00:00:00.000',"
            " updated_at = '2020-01-01 00:00:00.000'"
        )
        assert admin.doctor().findings
        assert admin.retry(InboxFilter(consumer=CONSUMER, message_id="a")).count == 1
        assert shop.work() == [Outcome.FAILED]


def test_the_session_s_format_of_dates_does_not_matter(new_database: NewDatabase) -> None:
    url = new_database("postgresql")
    shown = f"{url}{'&' if '?' in url else '?'}options=-c%20DateStyle%3DGerman"
    broker = Recorder()
    with opened(shown) as shop:
        shop.handler(lambda message, tx: _fail())
        shop.app.publish(broker, topics=["out"])
        assert shop.deliver(paid("a")) is Outcome.FAILED
        assert shop.work() == [Outcome.FAILED]
        with shop.app.transaction() as tx:
            shop.app.outbox.stage(tx, "out", {})
        relayed(shop.app)
        assert len(broker.sent) == 1
        with Admin(shop.app) as admin:
            (row,) = admin.list(InboxFilter())
            assert row.updated_at.year > 2000
            assert admin.show(InboxFilter(consumer=CONSUMER, message_id="a"))[0].history
            for look in (admin.workers, admin.pauses, admin.audit, admin.failures):
                look()


SERVICE = """
from txbox import App

app = App({url!r})

@app.handler("orders", consumer="billing")
def bill(message, tx):
    raise ValueError("no")
"""


def test_commands_list_what_they_can(command: Command, new_database: NewDatabase) -> None:
    url = new_database("postgresql")
    command.file("shop.py", SERVICE.format(url=url))
    env = {"TXBOX_APP": "shop:app"}
    for name in ("a", "b"):
        command("send", "orders", "--id", name, "--data", "{}", env=env)
    command("run", "--once", env=env)
    with Raw(url) as raw:
        raw.execute(
            "UPDATE txbox_inbox SET next_attempt_at = 'infinity', headers = '[[' WHERE message_id = 'a'"
        )
    assert {row["message_id"] for row in command("list", "--json", env=env).json["messages"]} == {
        "a",
        "b",
    }
    assert "beyond the years 1 to 9998" in command("show", "billing", "a", env=env).out
    for words in (
        ("show", "billing", "a", "--reveal"),
        ("status",),
        ("list", "--json"),
    ):
        command(*words, env=env)
    assert "billing" in command("explain", "a", env=env, code=None).out
