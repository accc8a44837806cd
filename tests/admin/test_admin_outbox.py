"""The operator and outgoing messages, on every database: what is seen, and what may be done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tests.support.databases import NewDatabase, Raw, names
from tests.support.recording import Recorder
from tests.support.waiting import DEADLINE_S
from tests.support.workers import run_of
from txbox import App, ConfigurationError, Message, Outbox, Outgoing, RelayPolicy, RetryPolicy
from txbox.admin import Admin, OutboxFilter, changes
from txbox.errors import BrokerError, MessageRefused
from txbox.events import Event, RelayPaused, RelayResumed, RowsChanged
from txbox.maintenance import Task, run_once
from txbox.observers.counters import Counters
from txbox.policy import Retention
from txbox.session import drive
from txbox.store.order import Waits
from txbox.store.outbox import OutboxStore, RelayScope
from txbox.testing import meanwhile
from txbox.worker.relay import Relay

Connect = Callable[[str], AbstractContextManager[Any]]
Look = Callable[[str], Raw]
ROOT = Path(__file__).parents[2]
LATER = RelayPolicy(retry=RetryPolicy(base=timedelta(hours=9), factor=1, cap=timedelta(hours=9)))


def relay_of(app: App) -> Relay:
    return Relay(run_of(app), app.routes.all()[0])


def relayed(app: App) -> None:
    relay = relay_of(app)
    for _ in range(200):
        if not relay.turn():
            return
    raise AssertionError("the relay never came to an end")


def refuses(*bodies: Any) -> Callable[[Message[Any]], BrokerError | None]:
    return lambda message: MessageRefused("too large") if message.json() in bodies else None


def fails(*bodies: Any) -> Callable[[Message[Any]], BrokerError | None]:
    return lambda message: BrokerError("not now") if message.json() in bodies else None


def stage(url: str, connect: Connect, *messages: Outgoing) -> list[str]:
    with connect(url) as tx:
        ids = Outbox().stage_many(tx, list(messages))
        tx.commit()
    return ids


def statuses(admin: Admin) -> dict[str, str]:
    return {row.message_id: row.status for row in admin.list(OutboxFilter())}


def test_status_and_list_say_what_each_row_is_doing(
    database_url: str, plain_connection: Connect
) -> None:
    dead, failed, leased, delayed, due, sent = stage(
        database_url,
        plain_connection,
        Outgoing(topic="a", body="dead"),
        Outgoing(topic="a", body="failed", key="k"),
        Outgoing(topic="b", body="leased"),
        Outgoing(topic="c", body="delayed", delay=timedelta(hours=1)),
        Outgoing(topic="c", body="due", key="k", type="t"),
        Outgoing(topic="d", body="sent"),
    )
    policy = RelayPolicy(retry=LATER.retry, keep_sent=timedelta(days=1))
    with App(database_url, relaying=policy) as app, Admin(app) as admin:

        def answer(message: Message[Any]) -> BrokerError | None:
            return refuses("dead")(message) or fails("failed")(message)

        app.publish(Recorder(answer), topics=["a", "d"])
        relayed(app)
        assert app.database.sync is not None
        drive(
            app.database.sync,
            OutboxStore(app.store.dialect, app.store.columns).lease,
            token="x",
            limit=9,
            payload_bytes=999,
            lease_s=600,
            scope=RelayScope(route="x", topics=["b"], others=False),
        )
        assert statuses(admin) == {
            dead: "dead", failed: "failed", leased: "leased", delayed: "delayed", due: "due", sent: "sent",
        }  # fmt: skip
        by_topic = {each.topic: each for each in admin.topics()}
        assert by_topic["a"].counts == {"dead": 1, "failed": 1}
        assert by_topic["c"].counts == {"delayed": 1, "due": 1}
        for topic in "abc":
            age_s = by_topic[topic].oldest_waiting_s
            assert age_s is not None
            assert 0 <= age_s < 60
        assert by_topic["d"].oldest_waiting_s is None
        for status, each in (
            ("dead", dead),
            ("failed", failed),
            ("leased", leased),
            ("due", due),
            ("sent", sent),
        ):
            (found,) = admin.list(OutboxFilter(status=status))
            assert found.message_id == each
        rows = {row.message_id: row for row in admin.list(OutboxFilter())}
        assert (rows[dead].error_type, rows[dead].error) == ("MessageRefused", "too large")
        assert rows[failed].next_attempt_at is not None
        assert rows[leased].lease_until is not None
        assert rows[sent].sent_at is not None
        assert [row.message_id for row in admin.list(OutboxFilter(topic="c", key="k"))] == [due]
        assert [row.message_id for row in admin.list(OutboxFilter(type="t"))] == [due]
        assert not admin.list(OutboxFilter(older_than=timedelta(minutes=5)))


def test_pages_go_on_where_the_last_one_ended(database_url: str, plain_connection: Connect) -> None:
    ids = stage(database_url, plain_connection, *(Outgoing(topic="t", body=n) for n in range(5)))
    seen: list[str] = []
    before: int | None = None
    with Admin(database_url) as admin:
        while page := admin.list(OutboxFilter(), limit=2, before=before):
            seen += [row.message_id for row in page]
            before = page[-1].number
    assert seen == ids[::-1]


def test_show_names_the_head_of_the_key_and_hides_the_content(
    database_url: str, plain_connection: Connect
) -> None:
    first, second, other, without = stage(
        database_url,
        plain_connection,
        Outgoing(topic="t", body=1, key="k"),
        Outgoing(topic="t", body={"secret": 2}, key="k", headers=[("auth", "secret")]),
        Outgoing(topic="u", body=3, key="k"),
        Outgoing(topic="t", body=4),
    )
    with App(database_url, relaying=LATER) as app, Admin(app) as admin:
        app.publish(Recorder(fails(1)))
        relayed(app)
        waiting = {row.message_id: row.waits_for for row in admin.list(OutboxFilter())}
        assert waiting == {first: None, second: Waits(message_id=first)}  # the other two have left
        assert {other, without}.isdisjoint(waiting)
        (found,) = admin.show(OutboxFilter(message_id=second))
        assert found.waits_for is not None
        assert (found.waits_for.message_id, found.waits_for.status) == (first, "failed")
        assert found.waits_for.next_attempt_at is not None
        assert found.payload is None
        assert found.payload_bytes == len(b'{"secret":2}')
        assert ("auth", None) in found.headers
        (revealed,) = admin.show(OutboxFilter(message_id=second), reveal=True)
        assert json.loads(revealed.payload or b"") == {"secret": 2}
        assert ("auth", "secret") in revealed.headers
        assert admin.show(OutboxFilter(message_id="nothing")) == []


def test_a_dead_message_that_is_retried_leaves_before_the_later_ones_of_its_key(
    database_url: str, plain_connection: Connect, raw: Look
) -> None:
    dead, *_ = stage(
        database_url, plain_connection, *(Outgoing(topic="t", body=n, key="k") for n in range(3))
    )
    events: list[Event] = []
    broken = [0]
    broker = Recorder(
        lambda message: refuses(*broken)(message) or fails(1)(message) if broken else None
    )
    with App(database_url, relaying=LATER, observers=[events.append]) as app, Admin(app) as admin:
        app.publish(broker)
        relayed(app)
        assert not broker.sent  # 0 is dead, and 1 holds the key up
        broken.clear()
        dry = admin.retry(OutboxFilter(), dry_run=True)
        assert (dry.count, dry.sample) == (1, ({"message_id": dead},))
        assert statuses(admin)[dead] == "dead"
        done = admin.retry(OutboxFilter(topic="t"), actor="eve", reason="fixed")
        assert done.count == 1
        assert admin.retry(OutboxFilter(status="failed")).count == 1
        (rows,) = admin.list(OutboxFilter(message_id=dead))
        assert (rows.status, rows.attempts) == ("due", 0)
        relayed(app)
    assert broker.bodies == [0, 1, 2]
    assert broker.sent[0].id == dead
    with raw(database_url) as look:
        first, second = look.rows(
            "SELECT actor, action, filter, affected, reason FROM txbox_audit ORDER BY number"
        )
    assert first == ("eve", "retry outgoing", '{"topic": "t"}', 1, "fixed")
    assert second[1:4] == ("retry outgoing", '{"status": "failed"}', 1)
    changed = [event for event in events if isinstance(event, RowsChanged)]
    assert [(each.action, each.rows) for each in changed] == [("retry outgoing", 1)] * 2


def test_what_is_discarded_is_not_sent_and_its_key_goes_on(
    database_url: str, plain_connection: Connect
) -> None:
    first, second, third = stage(
        database_url, plain_connection, *(Outgoing(topic="t", body=n, key="k") for n in range(3))
    )
    broker = Recorder(fails(0))
    with App(database_url, relaying=LATER) as app, Admin(app) as admin:
        app.publish(broker)
        relayed(app)
        assert admin.discard(OutboxFilter()).count == 0  # a filter means dead ones
        assert admin.discard(OutboxFilter(message_id=first)).count == 1
        assert admin.discard(OutboxFilter(message_id=first)).count == 0
        assert admin.discard(OutboxFilter(message_id=third)).count == 1
        relayed(app)
        assert [message.id for message in broker.sent] == [second]
        assert statuses(admin) == {first: "discarded", third: "discarded"}
        with pytest.raises(
            ConfigurationError, match="discard does not apply to the status 'leased'"
        ):
            admin.discard(OutboxFilter(status="leased"))
        assert admin.retry(OutboxFilter(message_id=first)).count == 0


def test_a_message_that_is_being_published_is_left_to_its_relay(
    database_url: str, plain_connection: Connect
) -> None:
    (staged,) = stage(database_url, plain_connection, Outgoing(topic="t", body=1))
    publishing, go_on = threading.Event(), threading.Event()

    def answer(message: Message[Any]) -> None:
        publishing.set()
        assert go_on.wait(DEADLINE_S)

    broker = Recorder(answer)
    with App(database_url) as app, Admin(database_url) as admin:
        app.publish(broker)
        thread = threading.Thread(target=relayed, args=(app,))
        thread.start()
        assert publishing.wait(DEADLINE_S)
        assert admin.discard(OutboxFilter(message_id=staged)).count == 0
        assert admin.retry(OutboxFilter(message_id=staged)).count == 0
        go_on.set()
        thread.join(DEADLINE_S)
        assert not admin.list(OutboxFilter())
    assert len(broker.sent) == 1


def test_changes_in_bulk_are_batches_with_an_audit_row_each(
    database_url: str, plain_connection: Connect, raw: Look
) -> None:
    stage(database_url, plain_connection, *(Outgoing(topic="t", body=n) for n in range(1203)))
    with raw(database_url) as look:
        look.execute("UPDATE txbox_outbox SET status = 'dead'")
        with Admin(database_url) as admin:
            seen = [so_far.count for so_far in admin.batches("retry", OutboxFilter())]
        assert seen == [500, 1000, 1203]
        rows = look.rows("SELECT affected FROM txbox_audit ORDER BY number")
        assert [row[0] for row in rows] == [500, 500, 203]
        assert look.value("SELECT count(*) FROM txbox_outbox WHERE status = 'pending'") == 1203


def test_a_reroute_meets_no_row_twice(
    database_url: str, plain_connection: Connect, raw: Look
) -> None:
    hour = timedelta(hours=1)
    due, delayed, failed, dead = stage(
        database_url,
        plain_connection,
        Outgoing(topic="t", body="due"),
        Outgoing(topic="t", body="delayed", delay=hour),
        Outgoing(topic="t", body="failed", delay=hour),
        Outgoing(topic="t", body="dead"),
    )
    with raw(database_url) as look, Admin(database_url) as admin:
        look.execute("UPDATE txbox_outbox SET attempts = 1 WHERE id = ?", (failed,))
        look.execute("UPDATE txbox_outbox SET status = 'dead' WHERE id = ?", (dead,))
        where = OutboxFilter(topic="t")
        assert admin.reroute(where, "elsewhere", dry_run=True).count == 3
        assert admin.reroute(where, "elsewhere").count == 3
        assert statuses(admin) == {due: "due", delayed: "delayed", failed: "due", dead: "dead"}
        affected = look.rows("SELECT affected FROM txbox_audit ORDER BY number")
        assert sum(row[0] for row in affected) == 3
        assert "No relay is known to have the route 'elsewhere'" in str(admin.unserved("elsewhere"))
        assert admin.unserved("") is None
        # a process that vanished serves nothing, however short ago
        look.execute(
            "INSERT INTO txbox_worker (worker, kind, host, pid, version, app, consumers, sources, routes, lanes, "
            "state, busy, leases, in_flight, seen_at) VALUES ('w', 'relay', 'h', 1, '1', 'a', '[]', '{}', "
            "'[\"elsewhere\"]', 1, 'running', 0, 0, 0, '2026-01-01 00:00:00')"
        )
        assert admin.unserved("elsewhere") is not None
        assert admin.reroute(OutboxFilter(message_id=dead), "elsewhere").count == 1
        assert {row.route for row in admin.list(where)} == {"elsewhere"}


def test_a_reroute_meets_rows_whatever_becomes_of_them_between_two_batches(
    database_url: str, plain_connection: Connect, raw: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delayed row that is due after those that were due before is in neither of two passes."""
    hour = timedelta(hours=1)
    due, delayed = stage(
        database_url,
        plain_connection,
        Outgoing(topic="t", body="due"),
        Outgoing(topic="t", body="delayed", delay=hour),
    )
    with raw(database_url) as look, Admin(database_url) as admin:
        monkeypatch.setattr(changes, "_BATCH", 1)
        done = 0
        for so_far in admin.batches("reroute", OutboxFilter(topic="t"), to="elsewhere"):
            look.execute("UPDATE txbox_outbox SET available_at = staged_at")
            done = so_far.count
        assert done == 2
        assert {row.message_id for row in admin.list(OutboxFilter(route="elsewhere"))} == {
            due, delayed,
        }  # fmt: skip


@pytest.mark.parametrize("product", names("postgresql", "mysql"))
def test_a_relay_takes_no_row_that_was_rerouted_since_it_looked(
    new_database: NewDatabase, plain_connection: Connect, product: str
) -> None:
    url, broker = new_database(product), Recorder()
    with App(url) as app, Admin(url) as admin:
        app.publish(broker, topics=["a"], name="old")
        with plain_connection(url) as tx:
            message_id = app.outbox.stage(tx, "a", "moves")
            tx.commit()

        def reroute() -> None:
            assert admin.reroute(OutboxFilter(message_id=message_id), "new").count == 1

        with meanwhile("before:relay_lease", reroute):
            relayed(app)
        assert broker.sent == []
        (row,) = admin.list(OutboxFilter())
        assert (row.route, row.status, row.attempts) == ("new", "due", 0)


def test_what_leaves_is_counted_by_publisher_and_outcome(
    database_url: str, plain_connection: Connect
) -> None:
    counters = Counters()
    stage(database_url, plain_connection, *(Outgoing(topic="t", body=n) for n in range(5)))

    def answer(message: Message[Any]) -> BrokerError | None:
        return refuses(0)(message) or fails(1)(message)

    with App(database_url, relaying=LATER, observers=[counters]) as app:
        app.publish(Recorder(answer))
        relayed(app)
    counters(RelayPaused(publisher="p", reason="gone", retry_in_s=1.0))
    counters(RelayResumed(publisher="p", paused_s=2.5))
    registry = CollectorRegistry()
    registry.register(counters)
    value = registry.get_sample_value
    got = {
        outcome: value("txbox_outgoing_total", {"publisher": "recorder", "outcome": outcome})
        for outcome in ("sent", "failed", "dead")
    }
    assert got == {"sent": 3, "failed": 1, "dead": 1}
    assert (value("txbox_publish_seconds_total", {"publisher": "recorder"}) or 0) > 0
    assert value("txbox_relay_pauses_total", {"publisher": "p"}) == 1
    assert value("txbox_relay_paused_seconds_total", {"publisher": "p"}) == 2.5
    assert not [
        each for each in counters.collect() if each.name == "txbox_messages" and each.samples
    ]


def _aged(look: Raw, column: str, status: str, days: int) -> None:
    past = {
        "sqlite": f"strftime('%Y-%m-%d %H:%M:%f', 'now', '-{days} days')",
        "postgresql": f"now() - interval '{days} days'",
        "mysql": f"UTC_TIMESTAMP(6) - INTERVAL {days} DAY",
    }[look.product]
    look.execute(
        f"UPDATE txbox_outbox SET {column} = {past} WHERE status = '{status}' AND topic = 'old'"
    )


def test_sent_and_discarded_rows_are_pruned_by_their_own_times_and_nothing_else(
    database_url: str, plain_connection: Connect, raw: Look
) -> None:
    wanted = ("sent", "discarded", "dead", "pending")
    stage(
        database_url,
        plain_connection,
        *(Outgoing(topic=topic, body=status) for topic in ("old", "new") for status in wanted),
    )
    policy = RelayPolicy(keep_sent=timedelta(days=2))
    with raw(database_url) as look, App(database_url, relaying=policy) as app:
        ids = look.rows("SELECT number FROM txbox_outbox ORDER BY number")
        now = {
            "sqlite": "strftime('%Y-%m-%d %H:%M:%f', 'now')",
            "postgresql": "now()",
            "mysql": "UTC_TIMESTAMP(6)",
        }[look.product]
        for (number,), status in zip(ids, (*wanted, *wanted), strict=True):
            look.execute(
                f"UPDATE txbox_outbox SET status = '{status}', sent_at = {now} WHERE number = {number}"
            )
        _aged(look, "sent_at", "sent", 3)
        _aged(look, "available_at", "discarded", 3)
        for status in ("dead", "pending"):
            _aged(look, "available_at", status, 400)
        assert run_once(app, "prune-outbox", Task(dry_run=True)).rows == 1
        assert look.value("SELECT count(*) FROM txbox_outbox") == 8
        assert run_once(app, "prune-outbox").rows == 1  # discarded ones are kept for 30 days
        _aged(look, "available_at", "discarded", 31)
        assert run_once(app, "prune-outbox").rows == 1
        assert run_once(app, "prune-outbox").rows == 0
        left = look.rows("SELECT topic, status FROM txbox_outbox ORDER BY number")
    assert [(_str(topic), _str(status)) for topic, status in left] == [
        ("old", "dead"), ("old", "pending"), *(("new", status) for status in wanted),
    ]  # fmt: skip


def test_pruning_goes_on_in_batches(
    database_url: str, plain_connection: Connect, raw: Look
) -> None:
    stage(database_url, plain_connection, *(Outgoing(topic="old", body=n) for n in range(50)))
    with raw(database_url) as look, App(database_url, retention=Retention(batch=7)) as app:
        look.execute("UPDATE txbox_outbox SET status = 'sent'")
        _aged(look, "sent_at", "sent", 31)
        done: list[int] = []
        assert run_once(app, "prune-outbox", Task(on_progress=done.append)).rows == 50
        assert len(done) > 5


def _str(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


SHOP = """
import os
from datetime import timedelta
from tests.support.recording import Recorder
from txbox import App, RelayPolicy
from txbox.errors import MessageRefused

app = App(os.environ["SHOP_URL"], relaying=RelayPolicy(keep_sent=timedelta(days=7)))
app.publish(Recorder(lambda message: MessageRefused("too large") if os.environ.get("REFUSES") else None))
"""


def test_the_commands_from_a_dead_message_to_its_redrive(
    sqlite_url: str, plain_connection: Connect, tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(SHOP)

    def txbox(*words: str, code: int = 0, **env: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "txbox", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "SHOP_URL": sqlite_url, "TXBOX_APP": "shop:app", **env},
            capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        )  # fmt: skip
        assert done.returncode == code, (done.stdout, done.stderr)
        return done.stdout + done.stderr

    first, second = stage(
        sqlite_url,
        plain_connection,
        Outgoing(topic="t", body=1, key="k"),
        Outgoing(topic="t", body=2),
    )
    assert "DUE" in txbox("status")
    assert "2 dead" in txbox("relay", "--once", REFUSES="1")
    assert json.loads(txbox("status", "--json"))["outbox"][0]["counts"] == {"dead": 2}
    assert "MessageRefused: too large" in txbox("outbox", "list", "--status", "dead")
    assert "too large" in txbox("outbox", "show", first)
    assert "2 outgoing messages would be retried" in txbox("outbox", "retry", "--all", "--dry-run")
    assert "add --yes" in txbox("outbox", "retry", "--all", code=2)
    assert "Which messages are to be retried?" in txbox("outbox", "retry", code=2)
    assert "1 outgoing message retried" in txbox("outbox", "retry", "--key", "k", "--yes")
    assert "1 sent" in txbox("relay", "--once")
    assert "is sent: retry does not apply" in txbox("outbox", "retry", first, code=1)
    typo = txbox("outbox", "reroute", second, "--to", "kafak", "--dry-run")
    assert "No relay is known to have the route 'kafak'" in typo
    assert "1 outgoing message discarded" in txbox("outbox", "discard", second)
    assert "has no message 'x'" in txbox("outbox", "show", "x", code=1)
    listed = json.loads(txbox("outbox", "list", "--json"))["messages"]
    assert [row["status"] for row in listed] == ["discarded", "sent"]
    assert "0 outgoing messages would be deleted" in txbox("prune", "--outbox", "--dry-run")
    assert "less than" in txbox("prune", "--outbox", "--older-than", "1ms", code=2)
    assert "have no consumer" in txbox("prune", "--outbox", "--consumer", "x", code=2)
    assert "prune-outbox" in txbox("maintain", "--once")
    maintained = txbox("maintain", "--once", "--json", "--database", sqlite_url, TXBOX_APP="")
    assert all(job["rows"] == 0 for job in json.loads(maintained)["jobs"])
    assert "2 outgoing messages deleted" in txbox(
        "prune", "--outbox", "--older-than", "1ms", "--yes"
    )
    assert "The outbox is empty" in txbox("outbox", "list")
