"""An alert is staged with what it is about, once for each fingerprint and window, and costs no message anything."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest

from tests.brokers.test_http import Scripted, url
from tests.processing.test_attempt_batches import Batch
from tests.support.alerting_process import app_of
from tests.support.databases import Raw
from tests.support.recording import Recorder
from tests.support.servers import ROOT
from tests.support.shop import Shop, opened, paid, statuses
from tests.support.waiting import DEADLINE_S
from tests.support.warm import run
from tests.support.webhook.senders import serving
from tests.support.workers import worker
from txbox import App, ConfigurationError, Message, Outcome, Reject, RetryPolicy
from txbox.alerts import Alerts
from txbox.errors import MessageRefused
from txbox.events import OutgoingDead
from txbox.maintenance import Task, run_once
from txbox.session import drive
from txbox.testing import Crashed, crash_at, crash_points

OPEN = "SELECT state FROM txbox_job WHERE name LIKE 'alert:%' ORDER BY name"


def staged(raw: Raw) -> list[dict[str, Any]]:
    """The alerts in the outbox, in order."""
    rows = raw.rows("SELECT payload FROM txbox_outbox WHERE topic = 'txbox.alerts' ORDER BY number")
    return [json.loads(bytes(row[0])) for row in rows]


def summaries(raw: Raw) -> list[tuple[str, str]]:
    return [(alert["state"], alert["summary"]) for alert in staged(raw)]


def refuses(message: Message[Any], _tx: Any) -> None:
    if str(message.id).startswith("k"):
        raise KeyError("with a row's value in it")
    raise Reject("with a row's value in it")


@contextmanager
def alerting(database_url: str, **options: Any) -> Iterator[tuple[Shop, Recorder]]:
    recorder = Recorder()
    with opened(database_url, alerts=Alerts(recorder, **options)) as shop:
        yield shop, recorder


@pytest.mark.every_database
def test_a_dead_message_is_told_once_for_its_fingerprint_without_its_content(
    database_url: str,
) -> None:
    with alerting(database_url, dashboard="https://ops.example/txbox") as (shop, recorder):
        shop.handler(refuses, retry=RetryPolicy(max_attempts=1))
        for message_id in ("m1", "m2", "k1", "m3", "k2"):
            assert shop.deliver(paid(message_id)) is Outcome.DEAD
        first, second = staged(shop.raw)
        assert first["summary"] == "billing: 1 dead message: Reject at test_alerts.py:refuses"
        assert second["summary"] == "billing: 1 dead message: KeyError at test_alerts.py:refuses"
        assert first["key"] != second["key"]
        assert first["url"] == "https://ops.example/txbox/messages?consumer=billing&status=dead"
        assert "value" not in json.dumps(first)
        assert worker(shop.app, once=True).run() == 0
        assert [alert["summary"] for alert in recorder.bodies] == [
            first["summary"],
            second["summary"],
        ]
        assert staged(shop.raw) == []
        assert shop.deliver(paid("m4")) is Outcome.DEAD
        assert staged(shop.raw) == [], "its window lasts"


@pytest.mark.every_database
def test_failures_at_the_same_time_stage_one_alert_and_wait_for_nothing_else(
    database_url: str,
) -> None:
    together = threading.Barrier(8)

    begun: set[object] = set()

    def fail(message: Message[Any], tx: Any) -> None:
        if message.id not in begun:
            # a conflict would run it again, alone
            begun.add(message.id)
            together.wait(DEADLINE_S)
        refuses(message, tx)

    with alerting(database_url) as (shop, _):
        shop.handler(fail, retry=RetryPolicy(max_attempts=1))
        if shop.raw.product == "sqlite":
            # it lets one handler at a time begin
            together = threading.Barrier(1)
        outcomes: list[Outcome] = []
        threads = [
            threading.Thread(target=lambda n=number: outcomes.append(shop.deliver(paid(f"m{n}"))))
            for number in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert outcomes == [Outcome.DEAD] * 8
        assert len(staged(shop.raw)) == 1


@pytest.mark.every_database
def test_the_dead_of_a_batch_are_told_by_its_transaction(database_url: str) -> None:
    with alerting(database_url) as (shop, _):
        batch = Batch(shop, "savepoints")

        def some(message: Message[Any], tx: Any) -> None:
            if message.id in ("m1", "m3", "k1"):
                refuses(message, tx)

        handler = shop.handler(some, retry=RetryPolicy(max_attempts=1))
        ids = ["m0", "m1", "m2", "m3", "m4", "k1", "m5"]
        outcomes = batch.take(handler, *map(paid, ids))
        assert outcomes.count(Outcome.DEAD) == 3
        assert statuses(shop.raw) == {"dead": 3, "processed": 4}
        assert len(staged(shop.raw)) == 2


def test_a_quarantined_message_is_told(database_url: str) -> None:
    with alerting(database_url) as (shop, _):
        shop.handler()
        for payload in (b"1", b"2", b"3"):
            shop.deliver(Message(topic="orders", id="m1", payload=payload))
        ((state, summary),) = summaries(shop.raw)
        assert (state, summary) == ("open", "billing: a message was quarantined.")


def test_a_pause_and_its_alert_are_one_commit(database_url: str) -> None:
    with alerting(database_url) as (shop, _):
        shop.handler(refuses, pause_after=1)
        pauses = shop.app.pauses
        pauses.wake = lambda: None
        shop.deliver(paid("m1"))
        shop.raw.execute("DELETE FROM txbox_job")
        shop.raw.execute("DELETE FROM txbox_outbox")
        connections = shop.app._any_sync()
        with suppress(Crashed), crash_at("before:audit"):
            drive(connections, pauses.write, shop.app.store.dialect)
        assert not shop.raw.rows("SELECT consumer FROM txbox_pause")
        assert not staged(shop.raw)
        drive(connections, pauses.write, shop.app.store.dialect)
        assert summaries(shop.raw) == [
            ("open", "billing is paused: 1 failures in a row, the last one Reject.")
        ]


def test_async_handlers_are_told_of_alike(postgresql_url: str, raw: Callable[[str], Raw]) -> None:
    async def run() -> None:
        url = postgresql_url.replace("postgresql:", "postgresql+asyncpg:")
        async with App(url, alerts=Recorder()) as app:

            @app.handler("orders", consumer="billing")
            async def handle(message: Message[Any], tx: Any) -> None:
                raise Reject("never")

            assert await app.process_async(paid("m1")) is Outcome.DEAD

    asyncio.run(run())
    assert len(staged(raw(postgresql_url))) == 1


def test_no_message_is_dead_without_its_alert_wherever_a_process_dies(database_url: str) -> None:
    with alerting(database_url) as (shop, _):
        shop.handler(refuses)
        points = crash_points(shop.app, paid("undisturbed"))
        assert len(staged(shop.raw)) == 1
        is_dead = 0
        for number, point in enumerate(points):
            for table in ("inbox", "attempt", "outbox", "job"):
                shop.raw.execute(f"DELETE FROM txbox_{table}")
            with suppress(Crashed), crash_at(point, points[: number + 1].count(point)):
                shop.deliver(paid(f"m{number}"))
            is_dead = statuses(shop.raw).get("dead", 0)
            assert (len(staged(shop.raw)), len(shop.raw.rows(OPEN))) == (is_dead, is_dead), point
        assert is_dead, "the last point is behind the commit"


def test_a_kill_behind_the_commit_that_made_a_message_dead_loses_no_alert(
    database_url: str, raw: Callable[[str], Raw]
) -> None:
    sink = Scripted()
    with serving(sink) as endpoint:
        to = url(endpoint)
        with app_of(database_url, to) as app:
            points = crash_points(app, paid("undisturbed"))
        look = raw(database_url)
        for table in ("inbox", "attempt", "outbox", "job"):
            look.execute(f"DELETE FROM txbox_{table}")
        nth = points.count("after:commit")
        killed = run(
            ["tests.support.alerting_process", database_url, to, "after:commit", str(nth)], cwd=ROOT
        )
        assert killed.returncode == -signal.SIGKILL
        assert (statuses(look), sink.requests) == ({"dead": 1}, [])
        with app_of(database_url, to) as app:
            # the broker delivers it again, as it was not acknowledged
            assert app.process(Message(topic="orders", id="m1", payload=b"{}")) is Outcome.DUPLICATE
            assert worker(app, once=True).run() == 0
    ((_, headers, body),) = sink.requests
    assert (
        json.loads(body)["summary"]
        == "billing: 1 dead message: Reject at alerting_process.py:handle"
    )
    assert headers["content-type"] == "application/json"


def test_an_alert_that_is_refused_is_dead_and_there_is_no_alert_about_it(database_url: str) -> None:
    recorder = Recorder(lambda _message: MessageRefused("no such channel"))
    with opened(database_url, alerts=recorder) as shop:
        shop.handler(refuses)
        assert shop.deliver(paid("m1")) is Outcome.DEAD
        assert worker(shop.app, once=True).run() == 0
        assert len(shop.emitted(OutgoingDead)) == 1
        for _ in range(2):
            shop.raw.execute(
                "UPDATE txbox_job SET lease_until = updated_at WHERE name LIKE 'alert:%'"
            )
            assert run_once(shop.app, "alerts", Task(at_any_time=True)).rows == 0
        assert len(staged(shop.raw)) == 1


class RefusesAlerts:
    """A codec that takes the payloads of messages, and no alert."""

    key_id = "k1"

    def encode(self, data: bytes) -> bytes:
        if b'"severity"' in data:
            raise KeyError("secret")
        return data[::-1]

    def decode(self, data: bytes, key_id: str) -> bytes:
        del key_id
        return data[::-1]


@pytest.mark.every_database
def test_an_alert_that_the_codec_refuses_is_logged_and_its_message_is_dead_all_the_same(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(database_url, alerts=Recorder(), codec=RefusesAlerts()) as shop:
        shop.handler(refuses)
        assert shop.deliver(paid("m1")) is Outcome.DEAD
        assert shop.row("m1").status == "dead"
        assert shop.raw.value("SELECT count(*) FROM txbox_outbox") == 0
    (record,) = (one for one in caplog.records if "cannot be staged" in one.getMessage())
    assert record.levelname == "ERROR"
    assert "billing: 1 dead message" in record.getMessage()
    assert "secret" not in record.getMessage()


def test_what_cannot_be_a_channel_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="needs a channel"):
        Alerts()
    with pytest.raises(ConfigurationError, match="window"):
        Alerts(Recorder(), window=timedelta(seconds=-1))


def test_a_message_that_killed_its_process_is_told_by_its_rescue(database_url: str) -> None:
    with alerting(database_url, window=timedelta(hours=1)) as (shop, _):
        shop.handler(mode="stored")
        for number in range(2):
            shop.deliver(paid(f"m{number}"))
        shop.lease()
        shop.raw.execute("UPDATE txbox_inbox SET starts = 3, lease_until = received_at")
        assert run_once(shop.app, "rescue", Task()).dead == 2
        assert summaries(shop.raw) == [("open", "billing: 1 dead message: KilledItsProcess")]
