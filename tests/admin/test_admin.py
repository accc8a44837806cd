"""The operator's Python API, on every database."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import fields
from typing import Any

import pytest

from tests.support.backlog import fill
from tests.support.databases import FreshDatabase, Raw
from tests.support.waiting import DEADLINE_S
from txbox import App, ConfigurationError, Headers, Message, Outcome, Reject
from txbox.admin import Admin, InboxFilter, OutboxFilter, QuarantineFilter, views
from txbox.admin.tables import INBOX, QUARANTINE
from txbox.events import Event, RowsChanged
from txbox.testing import drain

RawOf = Callable[[str], Raw]


class Shop:
    """An app whose handler fails as told, with a table that shows its effects."""

    def __init__(self, database: FreshDatabase) -> None:
        self.failing = True
        self.events: list[Event] = []
        self.app = App(database.url, observers=[self.events.append])
        self.mark = "?" if database.name == "sqlite" else "%s"

        @self.app.handler("orders", consumer="billing", keep_payload="always")
        def bill(message: Message[Any], tx: Any) -> None:
            self.effect(tx, "billing", message)
            if self.failing:
                raise Reject("told to fail")

        @self.app.handler("orders", consumer="ledger")
        def book(message: Message[Any], tx: Any) -> None:
            self.effect(tx, "ledger", message)

    def effect(self, tx: Any, consumer: str, message: Message[Any]) -> None:
        cursor = tx.cursor()
        cursor.execute(
            f"INSERT INTO effect (consumer, id) VALUES ({self.mark}, {self.mark})",
            (consumer, str(message.id)),
        )
        cursor.close()

    def deliver(self, *ids: str, consumer: str = "billing", topic: str = "orders") -> list[Outcome]:
        return [
            self.app.process(
                Message(
                    id=message_id, topic=topic, payload=json.dumps({"id": message_id}).encode()
                ),
                consumer=consumer,
            )
            for message_id in ids
        ]


@pytest.fixture
def shop(database: FreshDatabase, raw: RawOf) -> Iterator[Shop]:
    raw(database.url).execute("CREATE TABLE effect (consumer varchar(40), id varchar(40))")
    made = Shop(database)
    yield made
    made.app.close()


def effects(view: Raw, consumer: str = "billing") -> list[str]:
    return [
        row[0]
        for row in view.rows("SELECT id FROM effect WHERE consumer = ? ORDER BY id", (consumer,))
    ]


def statuses(view: Raw, consumer: str = "billing") -> dict[str, str]:
    sql = "SELECT message_id, status FROM txbox_inbox WHERE consumer = ?"
    return {_str(value): _str(status) for value, status in view.rows(sql, (consumer,))}


def _str(value: Any) -> str:
    # MySQL's ids are bytes, by which they compare
    return value.decode() if isinstance(value, bytes) else str(value)


def audits(view: Raw) -> list[tuple[Any, ...]]:
    return view.rows("SELECT actor, action, affected, reason FROM txbox_audit ORDER BY number")


def test_retry_gives_dead_messages_a_new_budget_and_is_audited(
    shop: Shop, database: FreshDatabase, raw: RawOf
) -> None:
    assert shop.deliver("a", "b", "c") == [Outcome.DEAD] * 3
    view, admin = raw(database.url), Admin(shop.app)

    dry = admin.retry(InboxFilter(consumer="billing"), dry_run=True)
    assert (dry.count, dry.dry_run) == (3, True)
    assert set(statuses(view).values()) == {"dead"}
    assert audits(view) == []

    (done,) = admin.batches("retry", InboxFilter(consumer="billing"), actor="ann", reason="fixed")
    assert done.count == 3
    assert view.rows("SELECT status, attempts, starts FROM txbox_inbox") == [("failed", 0, 0)] * 3
    assert audits(view) == [("ann", "retry", 3, "fixed")]
    assert json.loads(view.value("SELECT filter FROM txbox_audit")) == {"consumer": "billing"}
    assert RowsChanged(action="retry", rows=3, actor="ann") in shop.events


def test_retry_of_one_message_touches_no_other(
    shop: Shop, database: FreshDatabase, raw: RawOf
) -> None:
    shop.deliver("a", "b")
    assert Admin(shop.app).retry(InboxFilter(consumer="billing", message_id="a")).count == 1
    assert statuses(raw(database.url)) == {"a": "failed", "b": "dead"}


def test_retry_leaves_broken_transactions_alone_unless_named(
    shop: Shop, database: FreshDatabase, raw: RawOf
) -> None:
    shop.deliver("a", "b")
    view, admin = raw(database.url), Admin(shop.app)
    view.execute(
        "UPDATE txbox_inbox SET error_type = 'TransactionBroken' WHERE message_id = ?", ("a",)
    )
    done = admin.retry(InboxFilter(consumer="billing"))
    assert (done.count, done.spared) == (1, 1)
    assert statuses(view) == {"a": "dead", "b": "failed"}
    assert admin.retry(InboxFilter(consumer="billing", message_id="a")).count == 1


def test_a_message_without_payload_is_not_retried_but_can_be_discarded(
    shop: Shop, database: FreshDatabase, raw: RawOf
) -> None:
    shop.deliver("a")
    view, admin = raw(database.url), Admin(shop.app)
    false = "0" if database.name == "sqlite" else "false"
    view.execute(f"UPDATE txbox_inbox SET payload = NULL, has_payload = {false}")
    assert admin.retry(InboxFilter(consumer="billing", message_id="a")).count == 0
    assert admin.discard(InboxFilter(consumer="billing", message_id="a")).count == 1


def test_discard_means_dead_messages_unless_told_and_a_copy_is_then_a_duplicate(
    shop: Shop, database: FreshDatabase, raw: RawOf
) -> None:
    shop.deliver("dead")
    shop.app.send(Message(id="waits", topic="orders", payload=b"{}"))
    view, admin = raw(database.url), Admin(shop.app)
    assert admin.discard(InboxFilter(consumer="billing")).count == 1
    assert statuses(view) == {"dead": "discarded", "waits": "pending"}
    assert admin.discard(InboxFilter(consumer="billing", status="pending")).count == 1
    assert admin.discard(InboxFilter(consumer="ledger", message_id="waits")).count == 1
    assert statuses(view) == {"dead": "discarded", "waits": "discarded"}
    shop.failing = False
    assert shop.deliver("dead") == [Outcome.DUPLICATE]
    assert effects(view) == []


def test_a_status_that_cannot_be_changed_is_refused(shop: Shop) -> None:
    with pytest.raises(
        ConfigurationError, match="discard does not apply to the status 'processed'"
    ):
        Admin(shop.app).discard(InboxFilter(consumer="billing", status="processed"))


def test_a_dry_run_of_many_rows_counts_what_the_run_then_changes(
    shop: Shop, database: FreshDatabase, raw: RawOf
) -> None:
    view = raw(database.url)
    fill(view, 1201, status="dead")
    fill(view, 700, status="dead", consumer="ledger")
    view.execute(
        "UPDATE txbox_inbox SET error_type = 'TransactionBroken' WHERE message_id IN ('m3', 'm600', 'm1200')"
    )
    admin = Admin(shop.app)
    meant = admin.retry(InboxFilter(), dry_run=True)
    assert (meant.count, meant.spared, len(meant.sample)) == (1201 + 700 - 5, 5, 10)
    assert set(statuses(view, "billing").values()) == {"dead"}
    assert audits(view) == []
    done = admin.retry(InboxFilter())
    assert (done.count, done.spared, done.sample) == (meant.count, meant.spared, meant.sample)
    assert sum(row[2] for row in audits(view)) == done.count
    # each batch says what the operator asked for
    assert {value for (value,) in view.rows("SELECT filter FROM txbox_audit")} == {"{}"}
    assert admin.retry(InboxFilter(), dry_run=True).count == 0


def test_a_limit_holds_and_a_dry_run_counts_up_to_it(
    shop: Shop, database: FreshDatabase, raw: RawOf
) -> None:
    shop.deliver("a", "b", "c")
    admin = Admin(shop.app)
    meant = admin.retry(InboxFilter(consumer="billing"), most=2, dry_run=True)
    assert (meant.count, [key["message_id"] for key in meant.sample]) == (2, ["a", "b"])
    assert admin.retry(InboxFilter(consumer="billing"), most=2).sample == meant.sample
    assert statuses(raw(database.url)) == {"a": "failed", "b": "failed", "c": "dead"}


def test_a_long_id_is_named_as_its_producer_wrote_it(shop: Shop) -> None:
    long = "x" * 300
    shop.deliver(long)
    where, admin = InboxFilter(consumer="billing", message_id=long), Admin(shop.app)
    (row,) = admin.list(where)
    assert row.message_id.startswith("sha256:")
    for message_id in (long, row.message_id):
        (shown,) = admin.show(InboxFilter(consumer="billing", message_id=message_id))
        assert shown.history
        assert admin.edit("billing", message_id, payload=b"{}", dry_run=True).dry_run
        assert admin.retry(InboxFilter(consumer="billing", message_id=message_id)).count == 1
    assert admin.explain(long, consumer="billing").known


def test_many_rows_are_changed_in_batches(shop: Shop, database: FreshDatabase, raw: RawOf) -> None:
    messages: list[Message[Any]] = [
        Message(id=str(number), topic="orders", payload=b"{}") for number in range(1201)
    ]
    shop.app.send_many(messages)
    where = InboxFilter(consumer="billing", status="pending")
    seen = [so_far.count for so_far in Admin(shop.app).batches("discard", where)]
    assert seen == [500, 1000, 1201]
    assert [row[2] for row in audits(raw(database.url))] == [500, 500, 201]
    assert set(statuses(raw(database.url), "ledger").values()) == {"pending"}


def test_what_was_done_before_a_change_was_cut_short_is_told(
    shop: Shop, database: FreshDatabase, raw: RawOf
) -> None:
    shop.failing = False
    shop.deliver("kept")
    fill(raw(database.url), 600, status="dead")
    where, admin = InboxFilter(consumer="billing"), Admin(shop.app)
    for batches in (admin.batches("retry", where, actor="ann"), admin.replay_batches(where)):
        next(batches)
        with pytest.raises(KeyboardInterrupt):
            batches.throw(KeyboardInterrupt)
    told = [event for event in shop.events if isinstance(event, RowsChanged)]
    assert [(event.action, event.rows) for event in told] == [("retry", 500), ("replay", 1)]


def test_what_a_live_transaction_holds_is_left_to_it(
    shop: Shop, database: FreshDatabase, raw: RawOf
) -> None:
    if not database.kind.concurrent_writers:
        pytest.skip("one writer at a time: nothing is held while another changes rows")
    shop.deliver("held", "free")
    holder = raw(database.url)
    holder.execute("BEGIN")
    holder.rows(
        "SELECT 1 FROM txbox_inbox WHERE consumer = 'billing' AND message_id = 'held' FOR UPDATE"
    )
    assert Admin(shop.app).retry(InboxFilter(consumer="billing")).count == 1
    holder.execute("ROLLBACK")
    assert statuses(raw(database.url)) == {"held": "dead", "free": "failed"}


def test_replay_runs_kept_messages_again_in_order(
    shop: Shop, database: FreshDatabase, raw: RawOf
) -> None:
    shop.failing = False
    shop.deliver("a", "b")
    shop.deliver("c", consumer="ledger")
    view, admin = raw(database.url), Admin(shop.app)
    assert admin.replay(InboxFilter(consumer="billing"), dry_run=True).count == 2
    assert effects(view) == ["a", "b"]
    done = admin.replay(InboxFilter(consumer="billing"), actor="ann", reason="lost a table")
    assert (done.count, done.processed, done.failed, done.skipped) == (2, 2, 0, 0)
    assert effects(view) == ["a", "a", "b", "b"]
    assert set(statuses(view).values()) == {"processed"}
    assert audits(view) == [("ann", "replay", 2, "lost a table")]
    # its payload stays, so that it can be replayed once more
    assert admin.replay(InboxFilter(consumer="billing", message_id="a")).processed == 1
    # a live copy is still a duplicate
    assert shop.deliver("a") == [Outcome.DUPLICATE]
    assert effects(view) == ["a", "a", "a", "b", "b"]


def test_a_replay_that_fails_leaves_its_row_processed_and_is_reported(
    shop: Shop, database: FreshDatabase, raw: RawOf
) -> None:
    shop.failing = False
    shop.deliver("a")
    shop.failing = True
    view = raw(database.url)
    before = view.rows("SELECT status, attempts, has_payload FROM txbox_inbox")
    done = Admin(shop.app).replay(InboxFilter(consumer="billing"))
    assert (done.processed, done.failed) == (0, 1)
    assert [(row.message_id, row.error_type, row.error) for row in done.failures] == [
        ("a", "Reject", "told to fail")
    ]
    assert view.rows("SELECT status, attempts, has_payload FROM txbox_inbox") == before
    assert effects(view) == ["a"]
    assert _str(view.value("SELECT status FROM txbox_attempt")) == "replay failed"


def test_replay_does_not_chase_what_arrives_meanwhile(
    shop: Shop, database: FreshDatabase, raw: RawOf
) -> None:
    shop.failing = False
    shop.deliver(*(str(number) for number in range(60)))
    late, done = iter(["late-1", "late-2"]), 0
    for so_far in Admin(shop.app).replay_batches(InboxFilter(consumer="billing")):
        shop.deliver(next(late))
        done = so_far.processed
    assert done == 60
    assert effects(raw(database.url)).count("late-1") == 1


def test_a_replay_ends_at_its_limit_and_with_the_loop_around_it(
    shop: Shop, database: FreshDatabase, raw: RawOf
) -> None:
    shop.failing = False
    shop.deliver(*(f"{number:02}" for number in range(60)))
    where, view, admin = InboxFilter(consumer="billing"), raw(database.url), Admin(shop.app)
    assert admin.replay(where, most=2, dry_run=True).count == 2
    done = admin.replay(where, most=2)
    assert (done.count, done.processed) == (2, 2)
    assert sorted(effects(view))[:5] == ["00", "00", "01", "01", "02"]
    assert admin.replay(where, as_consumer="ledger", most=1).stored == 1
    with closing(admin.replay_batches(where)) as batches:
        assert next(batches).count == 50
    assert audits(view)[-1][2] == 50


def test_a_replayed_message_that_is_gone_meanwhile_is_reported_all_the_same(
    shop: Shop, database: FreshDatabase, raw: RawOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.failing = False
    shop.deliver("a")
    shop.failing = True
    replay = shop.app.protocol.replay

    async def then_pruned(db: Any, handler: Any, arrival: Any) -> Any:
        answer = await replay(db, handler, arrival)
        raw(database.url).execute("DELETE FROM txbox_inbox")
        return answer

    monkeypatch.setattr(shop.app.protocol, "replay", then_pruned)
    done = Admin(shop.app).replay(InboxFilter(consumer="billing"))
    assert done.failed == 1
    assert [failure.message_id for failure in done.failures] == ["a"]


def test_replay_as_a_consumer_in_order_of_versions_gives_each_message_its_version(
    database: FreshDatabase, raw: RawOf
) -> None:
    with App(database.url) as app:
        app.handler("orders", consumer="billing", keep_payload="always")(lambda message, tx: None)
        versions = app.handler("orders", consumer="versions", sequence="body.version")
        versions(lambda message, tx: None)
        for payload in (b'{"version": 1}', b'{"version": 2}', b"{}"):
            message = Message(id=payload.decode(), topic="orders", key="k", payload=payload)
            app.process(message, consumer="billing")
        done = Admin(app).replay(InboxFilter(consumer="billing"), as_consumer="versions")
        assert (done.stored, done.skipped) == (2, 1)
        view = raw(database.url)
        sql = "SELECT sequence FROM txbox_inbox WHERE consumer = 'versions' ORDER BY arrival"
        assert view.rows(sql) == [(1,), (2,)]
        drain(app)
        assert set(statuses(view, "versions").values()) == {"processed"}


def test_replay_as_another_consumer_feeds_it_in_arrival_order_and_once(
    shop: Shop, database: FreshDatabase, raw: RawOf
) -> None:
    shop.failing = False
    order = ["c", "a", "d", "b"]
    shop.deliver(*order)
    shop.deliver("d", consumer="ledger")
    view, admin = raw(database.url), Admin(shop.app)
    dry = admin.replay(InboxFilter(consumer="billing"), as_consumer="ledger", dry_run=True)
    assert dry.count == 4
    done = admin.replay(InboxFilter(consumer="billing"), as_consumer="ledger", actor="ann")
    assert (done.count, done.stored, done.duplicates) == (4, 3, 1)
    rows = view.rows(
        "SELECT message_id FROM txbox_inbox WHERE consumer = 'ledger' AND status = 'pending' ORDER BY arrival"
    )
    assert [_str(row[0]) for row in rows] == ["c", "a", "b"]
    assert audits(view) == [("ann", "replay as ledger", 3, None)]
    # the same bytes delivered live are no mismatch
    assert shop.deliver("c", consumer="ledger") == [Outcome.DEFERRED]


def test_replay_refuses_what_it_cannot_do(shop: Shop, database: FreshDatabase) -> None:
    admin = Admin(shop.app)
    for where, as_consumer, sentence in (
        (InboxFilter(), None, "for one consumer"),
        (InboxFilter(consumer="billing", error_type="X"), None, "filtered by error_type"),
        (InboxFilter(consumer="billing", status="dead"), None, "use retry"),
        (InboxFilter(consumer="billing"), "billing", "already"),
        (InboxFilter(consumer="nobody"), None, "No handler is registered for consumer 'nobody'"),
        (InboxFilter(consumer="billing"), "typo", "No handler is registered for consumer 'typo'"),
    ):
        with pytest.raises(ConfigurationError, match=sentence):
            admin.replay(where, as_consumer=as_consumer)
    with (
        Admin(database.url) as bare,
        pytest.raises(ConfigurationError, match="a replay needs the App"),
    ):
        bare.replay(InboxFilter(consumer="billing"))
    shop.failing = False
    shop.deliver("a")
    for consumer in ("", "x" * 256):
        with Admin(database.url) as bare, pytest.raises(ConfigurationError, match="consumer name"):
            bare.replay(InboxFilter(consumer="billing"), as_consumer=consumer)


def test_replay_runs_async_handlers_too(database: FreshDatabase, raw: RawOf) -> None:
    app = App(database.url)
    ran: list[Any] = []

    @app.handler("orders", consumer="billing", keep_payload="always")
    async def bill(message: Message[Any], tx: Any) -> None:
        await asyncio.sleep(0)
        ran.append(message.id)

    async def first() -> None:
        async with app:
            await app.process_async(Message(id="a", topic="orders", payload=b"{}"))

    asyncio.run(first())
    with Admin(app) as admin:
        assert admin.replay(InboxFilter(consumer="billing")).processed == 1
        assert admin.replay(InboxFilter(consumer="billing")).processed == 1
    assert ran == ["a"] * 3
    app.close()


def test_a_replay_beside_a_live_copy_makes_its_effect_once(
    shop: Shop, database: FreshDatabase, raw: RawOf
) -> None:
    shop.failing = False
    shop.deliver("a")
    entered, proceed = threading.Event(), threading.Event()
    plain = shop.effect

    def slow(tx: Any, consumer: str, message: Message[Any]) -> None:
        plain(tx, consumer, message)
        entered.set()
        assert proceed.wait(DEADLINE_S)

    shop.effect = slow  # type: ignore[method-assign]
    answers: list[Any] = []
    replay = threading.Thread(
        target=lambda: answers.append(Admin(shop.app).replay(InboxFilter(consumer="billing")))
    )
    replay.start()
    assert entered.wait(DEADLINE_S)
    copy = threading.Thread(target=lambda: answers.append(shop.deliver("a")))
    copy.start()
    proceed.set()
    replay.join(DEADLINE_S)
    copy.join(DEADLINE_S)
    outcomes = [answer for answer in answers if isinstance(answer, list)]
    assert outcomes == [[Outcome.DUPLICATE]]
    assert effects(raw(database.url)) == ["a", "a"]


def test_retry_beside_live_copies_makes_each_effect_once(
    shop: Shop, database: FreshDatabase, raw: RawOf
) -> None:
    ids = [str(number) for number in range(30)]
    shop.deliver(*ids)
    shop.failing = False
    started, outcomes = threading.Barrier(4), list[Outcome]()

    def copies() -> None:
        started.wait(DEADLINE_S)
        outcomes.extend(shop.deliver(*ids))

    threads = [threading.Thread(target=copies) for _ in range(3)]
    for thread in threads:
        thread.start()
    started.wait(DEADLINE_S)
    retried = Admin(shop.app).retry(InboxFilter(consumer="billing")).count
    for thread in threads:
        thread.join(DEADLINE_S)
    # a copy never runs a handler here: dead is final, and a retried row is the table's
    assert set(outcomes) <= {Outcome.DUPLICATE, Outcome.DEFERRED}
    retried += Admin(shop.app).retry(InboxFilter(consumer="billing")).count
    assert retried == 30
    drain(shop.app)
    assert effects(raw(database.url)) == sorted(ids)
    assert set(statuses(raw(database.url)).values()) == {"processed"}


def test_looking(shop: Shop, database: FreshDatabase) -> None:
    shop.deliver("a", "b", "c")
    shop.app.process(Message(id="a", topic="orders", payload=b"other"), consumer="billing")
    shop.app.send(
        Message(id="z", topic="orders", payload=b"{}", headers=Headers({"auth": "secret"}))
    )
    with Admin(database.url) as admin:
        billing, ledger = admin.status()
        assert (billing.consumer, billing.counts, billing.quarantined) == (
            "billing", {"dead": 3, "pending": 1}, 1,
        )  # fmt: skip
        assert ledger.oldest_unfinished_s is not None
        assert 0 <= ledger.oldest_unfinished_s < 60

        first = admin.list(InboxFilter(consumer="billing", status="dead"), limit=2)
        rest = admin.list(InboxFilter(consumer="billing", status="dead"), before=first[-1].arrival)
        assert [row.message_id for row in (*first, *rest)] == ["c", "b", "a"]
        assert first[0].received_at.tzinfo is not None
        (rows,) = admin.list(InboxFilter(consumer="billing", message_id="b"))
        assert rows.message_id == "b"

        one = InboxFilter(consumer="billing", message_id="a")
        same = QuarantineFilter(consumer="billing", message_id="a")
        (shown,), aside = admin.show(one), admin.show(same)
        assert shown.payload is None
        assert shown.payload_bytes == len(b'{"id": "a"}')
        assert [each.error_type for each in shown.history] == ["Reject"]
        assert [entry.payload_bytes for entry in aside] == [5]
        (shown,), aside = admin.show(one, reveal=True), admin.show(same, reveal=True)
        assert shown.payload == b'{"id": "a"}'
        assert [message.payload for message in aside] == [b"other"]
        waiting = QuarantineFilter(consumer="billing", status="quarantined")
        assert [row.message_id for row in admin.list(waiting)] == ["a"]

        page = views.page(INBOX, admin.list(InboxFilter(status="dead")))
        assert [dict(zip(page.columns, row, strict=True))["id"] for row in page.rows] == list("cba")
        record = dict(views.record(shown))
        assert (record["status"], record["payload"]) == ("dead", "11 bytes")
        assert record["received"] == shown.received_at
        assert dict(views.record(aside[0]))["hash"] == aside[0].hash
        (waits,) = views.page(QUARANTINE, admin.list(waiting)).rows
        assert (waits[1], waits[2]) == ("a", aside[0].hash[:12])

        (hidden,) = admin.show(InboxFilter(consumer="ledger", message_id="z"))
        assert hidden.headers == (("auth", None),)
        assert admin.show(InboxFilter(consumer="billing", message_id="nothing")) == []


def test_each_column_describes_a_field_and_every_criterion_has_a_label() -> None:
    fields_of = {
        kind: {field.name for field in fields(kind)}
        for kind in (InboxFilter, OutboxFilter, QuarantineFilter)
    }
    messages = {field.name for kind in fields_of for field in fields(kind.table.message)}
    for column in views.COLUMNS:
        assert column.field in messages
        for table in column.lists:
            assert column.field in {field.name for field in fields(table.row)}
        if column.option is not None:
            assert any(column.field in names for names in fields_of.values())
    assert len({column.field for column in views.COLUMNS}) == len(views.COLUMNS)
    assert views.label("error_type") == "error type"
    assert views.label("id_prefix") == "ids that begin with"


def test_a_mistyped_filter_is_hinted_at(shop: Shop) -> None:
    shop.deliver("a")
    with Admin(shop.app) as admin:
        hint = admin.hint(InboxFilter(consumer="biling"))
        assert hint == "There is no consumer 'biling'; did you mean 'billing'?"
        assert "did you mean 'orders'" in admin.hint(InboxFilter(topic="order"))
        assert "did you mean 'orders'" in admin.hint(OutboxFilter(topic="ordres"))
        assert admin.hint(InboxFilter(consumer="billing", topic="orders")) == ""
        assert admin.hint(InboxFilter(consumer="quite another")) == ""
        assert admin.hint(InboxFilter(consumer="billing" * 1000)) == ""
