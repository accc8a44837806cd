"""The review of alerts: once a window what grew, what is resolved, and what no transaction could tell."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from tests.support.databases import Raw
from tests.support.recording import Recorder
from tests.support.shop import CONSUMER, Shop, opened, paid
from tests.support.waiting import eventually
from tests.support.workers import running, worker
from txbox import App, Message, Outcome, Reject
from txbox.admin import Admin, InboxFilter
from txbox.alerts import Alerts
from txbox.brokers.http import Http
from txbox.errors import MessageRefused
from txbox.maintenance import Task, alerting, run_once
from txbox.session import drive
from txbox.store import activity
from txbox.store.activity import Doing, Trouble
from txbox.worker.pulse import identify

OPEN = "SELECT name FROM txbox_job WHERE name LIKE 'alert:%'"


@pytest.fixture
def shop(database_url: str) -> Iterator[Shop]:
    with opened(database_url, alerts=Recorder()) as shop:
        yield shop


def rejects(message: Message[Any], _tx: Any) -> None:
    raise Reject("never")


def staged(raw: Raw) -> list[tuple[str, str]]:
    """State and text of the alerts in the outbox, in order; they are taken away."""
    rows = raw.rows("SELECT payload FROM txbox_outbox WHERE topic = 'txbox.alerts' ORDER BY number")
    raw.execute("DELETE FROM txbox_outbox WHERE topic = 'txbox.alerts'")
    alerts = [json.loads(bytes(row[0])) for row in rows]
    return [(alert["state"], alert["summary"]) for alert in alerts]


def review(shop: Shop, *, ended: bool = True) -> list[tuple[str, str]]:
    """What a review stages, at the end of all windows or before it."""
    if ended:
        shop.raw.execute("UPDATE txbox_job SET lease_until = updated_at WHERE name LIKE 'alert:%'")
    run_once(shop.app, "alerts", Task(at_any_time=True))
    return staged(shop.raw)


def copy_dead(raw: Raw, count: int) -> None:
    """Have so many more messages that are as dead as the only one."""
    digits = " UNION ALL ".join(f"SELECT {digit} AS n" for digit in range(10))
    names = [f"d{place}" for place in range(4)]
    number = " + ".join(f"{name}.n * {10**place}" for place, name in enumerate(names))
    text = "CAST({} AS TEXT)" if raw.product == "sqlite" else "CAST({} AS CHAR(4))"
    columns = "consumer, status, topic, attempts, error_type, error, fingerprint, has_payload"
    raw.execute(
        f"INSERT INTO txbox_inbox (message_id, {columns}) "
        f"SELECT {text.format(number)}, {columns} FROM txbox_inbox, "
        + ", ".join(f"({digits}) AS {name}" for name in names)
        + f" WHERE {number} < {count}"
    )


@pytest.mark.every_database
def test_ten_thousand_dead_messages_are_one_alert_a_window_with_their_count(shop: Shop) -> None:
    shop.handler(rejects)
    assert shop.deliver(paid("m1")) is Outcome.DEAD
    assert staged(shop.raw) == [
        ("open", f"{CONSUMER}: 1 dead message: Reject at test_alerting.py:rejects")
    ]
    copy_dead(shop.raw, 9_999)
    assert review(shop, ended=False) == [], "its window lasts"
    assert review(shop) == [
        ("still", f"{CONSUMER}: 10,000 dead messages: Reject at test_alerting.py:rejects")
    ]
    assert review(shop) == [], "nothing came since"
    assert shop.deliver(paid("m2")) is Outcome.DEAD
    assert staged(shop.raw) == []
    ((state, summary),) = review(shop)
    assert (state, "10,00" in summary) == ("still", True)
    shop.raw.execute("UPDATE txbox_inbox SET status = 'discarded'")
    assert review(shop, ended=False) == []
    ((state, _),) = review(shop)
    assert state == "resolved"
    assert shop.raw.rows(OPEN) == []
    assert shop.deliver(paid("m3")) is Outcome.DEAD
    assert [state for state, _ in staged(shop.raw)] == ["open"]


@pytest.mark.every_database
def test_what_no_transaction_told_is_told_by_the_review(shop: Shop) -> None:
    """A message that died as its alert was closed, an operator's pause, rows of an App without alerts."""
    shop.handler(rejects)
    with App(shop.url) as other:
        other.handler("orders", consumer=CONSUMER)(rejects)
        other.process(paid("m1"))
        with Admin(other) as admin:
            admin.pause(CONSUMER, reason="the bank is down")
    assert staged(shop.raw) == []
    first = review(shop)
    assert [state for state, _ in first] == ["open", "open"]
    assert {"1 dead message: Reject at test_alerting.py:rejects" in said for _, said in first} == {
        True,
        False,
    }
    assert any("the bank is down" in said for _, said in first)
    assert review(shop) == []
    with Admin(shop.url) as admin:
        admin.resume(CONSUMER)
        admin.discard(InboxFilter(consumer=CONSUMER, status="dead"))
    assert [state for state, _ in review(shop)] == ["resolved", "resolved"]


def troubled(shop: Shop, *troubles: Trouble) -> None:
    """Have a live process that reports these."""
    identity = identify("run", "", consumers=(), sources={}, routes=(), lanes=1)
    doing = Doing(troubles=troubles)
    drive(shop.app._any_sync(), activity.write, shop.app.store.dialect, identity, doing, {})


@pytest.mark.every_database
def test_a_source_or_route_in_trouble_is_told_once_that_has_lasted(shop: Shop) -> None:
    now_s, _ = drive(shop.app._any_sync(), activity.pauses, shop.app.store.dialect)
    assert shop.app.alerting is not None
    (route,) = shop.app.alerting.routes
    troubled(
        shop,
        Trouble(kind="source", name="kafka:old", since_s=int(now_s) - 130, error="login refused"),
        Trouble(kind="source", name="kafka:new", since_s=int(now_s) - 60, error="login refused"),
        Trouble(kind="route", name="rabbitmq:x", since_s=int(now_s) - 130, error="away"),
        # it could only tell of itself, once it is over
        Trouble(kind="route", name=route, since_s=int(now_s) - 130, error="away"),
    )
    said = review(shop)
    assert sorted(text.partition(" for ")[0] for _, text in said) == [
        "Nothing has been received from kafka:old",
        "Nothing has left by the route rabbitmq:x",
    ]
    shop.raw.execute("DELETE FROM txbox_worker")
    assert [state for state, _ in review(shop)] == ["resolved", "resolved"]


def test_nothing_is_resolved_that_cannot_be_looked_at(postgresql_url: str) -> None:
    with opened(postgresql_url, alerts=Recorder()) as shop:
        shop.handler(rejects)
        shop.deliver(paid("m1"))
        staged(shop.raw)
        shop.raw.execute("ALTER TABLE txbox_inbox RENAME COLUMN fingerprint TO hidden")
        shop.raw.execute("UPDATE txbox_job SET lease_until = updated_at WHERE name LIKE 'alert:%'")
        with pytest.raises(Exception, match="fingerprint"):
            run_once(shop.app, "alerts", Task(at_any_time=True))
        assert staged(shop.raw) == []
        assert len(shop.raw.rows(OPEN)) == 1


def test_a_channel_that_is_away_gets_the_newest_count_once(shop: Shop) -> None:
    shop.handler(rejects)
    shop.deliver(paid("m1"))
    for number in range(3):
        shop.deliver(paid(f"again{number}"))
        shop.raw.execute("UPDATE txbox_job SET lease_until = updated_at WHERE name LIKE 'alert:%'")
        run_once(shop.app, "alerts", Task(at_any_time=True))
    assert [state for state, _ in staged(shop.raw)] == ["open"], "more of the same only piled up"
    ((state, summary),) = review(shop)
    assert (state, "4 dead messages" in summary) == ("still", True)


def test_one_worker_reviews_for_all_and_none_without_alerts(shop: Shop) -> None:
    shop.handler(rejects)
    assert not run_once(shop.app, "alerts").skipped
    assert run_once(shop.app, "alerts").skipped
    with App(shop.url) as other:
        assert run_once(other, "alerts").rows == 0


def test_windows_of_other_channels_are_apart_and_forgotten_in_the_end(shop: Shop) -> None:
    shop.handler(rejects)
    shop.deliver(paid("m1"))
    with App(
        shop.url, alerts=Alerts(Http("https://other.example/in"), window=timedelta(hours=1))
    ) as other:
        other.handler("orders", consumer=CONSUMER)(rejects)
        other.process(paid("m2"))
    assert len(staged(shop.raw)) == 2
    names = {row[0] for row in shop.raw.rows(OPEN)}
    assert len(names) == 2
    long_ago = "'2020-01-01 00:00:00'"
    shop.raw.execute(f"UPDATE txbox_job SET lease_until = {long_ago} WHERE name LIKE 'alert:%'")
    review(shop, ended=False)
    assert len(shop.raw.rows(OPEN)) == 1


def test_a_worker_reviews_by_itself(database_url: str) -> None:
    recorder = Recorder()
    with opened(database_url, alerts=recorder) as shop:
        shop.handler(rejects)
        with App(database_url) as other:
            other.handler("orders", consumer=CONSUMER)(rejects)
            other.process(paid("m1"))
        with running(worker(shop.app, maintenance=True)):
            eventually(lambda: recorder.bodies)
        (alert,) = recorder.bodies
        assert alert["code"] == "dead-messages"


def test_an_outgoing_message_that_dies_is_told_in_the_next_round_of_a_worker(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay may not stage anything: its dead are told by the job, which comes round every 15 s."""
    assert timedelta(seconds=15) == alerting.EVERY
    monkeypatch.setattr(alerting, "EVERY", timedelta(seconds=0.2))
    recorder = Recorder()
    broker = Recorder(lambda _: MessageRefused("too large"))
    with opened(database_url, alerts=recorder) as shop:
        shop.app.publish(broker, topics=["out"])
        with running(worker(shop.app, maintenance=True)):
            eventually(
                lambda: shop.raw.rows("SELECT name FROM txbox_job WHERE name LIKE 'alerts:%'")
            )
            with shop.app.transaction() as tx:
                shop.app.outbox.stage(tx, "out", {})
            eventually(lambda: recorder.bodies)
        (alert,) = recorder.bodies
        assert (alert["code"], alert["count"], alert["state"]) == ("dead-outgoing", 1, "open")


def test_apps_with_the_same_channels_resolve_nothing_of_one_another(shop: Shop) -> None:
    shop.handler(rejects)
    shop.deliver(paid("m1"))
    staged(shop.raw)
    with App(shop.url, alerts=Recorder()) as other:
        other.handler("orders", consumer="ledger")(rejects)
        other.process(paid("m1"))
        assert [state for state, _ in staged(shop.raw)] == ["open"]
        assert not run_once(shop.app, "alerts").skipped
        assert not run_once(other, "alerts").skipped, "nobody else reviews its consumers"
        shop.raw.execute("UPDATE txbox_job SET lease_until = updated_at WHERE name LIKE 'alert:%'")
        run_once(other, "alerts", Task(at_any_time=True))
        assert staged(shop.raw) == []
    assert len(shop.raw.rows(OPEN)) == 2
