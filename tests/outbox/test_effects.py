"""Effects: external calls after commit, at least once, under one key (promise 6.6)."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest

from tests.support.shop import AT_ONCE, CONSUMER, TOPIC, Shop, paid, the_row
from tests.support.waiting import eventually
from tests.support.workers import running, worker
from txbox import App, ConfigurationError, Message, Outcome, Reject, RetryPolicy
from txbox.admin import Admin, InboxFilter
from txbox.testing import Crashed, crash_at, drain, drain_async

MAIL = "effect:mail"


def mails(app: App, fails: int = 0, **options: Any) -> list[tuple[Any, str]]:
    """Register the effect; returns what it was called with: body and idempotency key."""
    calls: list[tuple[Any, str]] = []

    given: dict[str, Any] = {"retry": AT_ONCE} | options

    @app.effect("mail", **given)
    def mail(message: Message[dict[str, Any]]) -> dict[str, Any]:
        calls.append((message.body, message.idempotency_key))
        if len(calls) <= fails:
            raise ConnectionError("the server is away")
        return {"sent": message.body["to"]}

    return calls


def shopping(shop: Shop, *names: str, fails_once: bool = False) -> None:
    """Register a handler that stages a mail for each name."""

    def handle(message: Message[Any], tx: Any) -> None:
        for name in names:
            shop.app.effects.stage(tx, "mail", {"to": name})
        if fails_once and message.attempt == 1:
            raise ValueError("after it was staged")

    shop.app.handler(TOPIC, consumer=CONSUMER, retry=AT_ONCE)(handle)


def effect_rows(shop: Shop) -> list[tuple[str, str]]:
    """(id, status) of the effect's rows."""
    with Admin(shop.app) as admin:
        return sorted(
            (row.message_id, row.status) for row in admin.list(InboxFilter(consumer=MAIL))
        )


def test_an_effect_is_carried_out_after_the_commit_by_a_worker(shop: Shop) -> None:
    calls = mails(shop.app)
    shopping(shop, "ann", "bob")
    assert shop.deliver(paid("one")) is Outcome.PROCESSED
    assert calls == []
    assert [status for _, status in effect_rows(shop)] == ["pending", "pending"]
    with running(worker(shop.app)):
        eventually(lambda: len(calls) == 2)
        eventually(lambda: {status for _, status in effect_rows(shop)} == {"processed"})
    assert sorted(body["to"] for body, _ in calls) == ["ann", "bob"]
    assert {key for _, key in calls} == {f"{MAIL}:{effect}" for effect, _ in effect_rows(shop)}


def test_what_a_failed_run_staged_is_not_there(shop: Shop) -> None:
    calls = mails(shop.app)
    shopping(shop, "ann", fails_once=True)
    assert shop.deliver(paid("one")) is Outcome.FAILED
    assert effect_rows(shop) == []
    drain(shop.app)
    assert [body for body, _ in calls] == [{"to": "ann"}]


def test_a_retried_effect_has_one_key_and_its_result_is_kept(shop: Shop) -> None:
    calls = mails(shop.app, fails=2)
    shopping(shop, "ann")
    shop.deliver(paid("one"))
    outcomes = drain(shop.app)
    assert outcomes == [Outcome.FAILED, Outcome.FAILED, Outcome.PROCESSED]
    assert len(calls) == 3
    assert len({key for _, key in calls}) == 1
    assert (
        bytes(shop.raw.value("SELECT result FROM txbox_inbox WHERE result IS NOT NULL"))
        == b'{"sent":"ann"}'
    )


def test_the_operator_sees_the_result(shop: Shop, database_url: str) -> None:
    mails(shop.app)
    shopping(shop, "ann")
    shop.deliver(paid("one"))
    drain(shop.app)
    ((own_id, _),) = effect_rows(shop)
    show = [sys.executable, "-m", "txbox", "show", MAIL, own_id, "--database", database_url]
    shown = subprocess.run(show, check=True, capture_output=True, text=True).stdout
    assert "14 bytes (--reveal prints it)" in shown
    revealed = subprocess.run(
        [*show, "--json", "--reveal"], check=True, capture_output=True, text=True
    ).stdout
    assert json.loads(revealed)["message"]["result"] == {"sent": "ann"}


def test_an_effect_may_die(shop: Shop) -> None:
    mails(shop.app, fails=9, retry=RetryPolicy(max_attempts=2, base=timedelta(0)))
    shopping(shop, "ann")
    shop.deliver(paid("one"))
    assert drain(shop.app) == [Outcome.FAILED, Outcome.DEAD]
    ((rows, status),) = effect_rows(shop)
    assert status == "dead"
    assert the_row(shop.raw, rows, MAIL).error_type == "ConnectionError"
    with Admin(shop.app) as admin:
        assert admin.retry(InboxFilter(consumer=MAIL), actor="me").count == 1


def test_an_effect_may_be_refused(shop: Shop) -> None:
    @shop.app.effect("mail")
    def mail(message: Message[Any]) -> None:
        raise Reject("no such address")

    shopping(shop, "ann")
    shop.deliver(paid("one"))
    assert drain(shop.app) == [Outcome.DEAD]


def test_ids_follow_from_the_cause(shop: Shop) -> None:
    """A handler that is run again, here by a replay, stages the same effects."""
    calls = mails(shop.app)

    @shop.app.handler(TOPIC, consumer=CONSUMER, keep_payload="always")
    def handle(message: Message[Any], tx: Any) -> None:
        shop.app.effects.stage(tx, "mail", {"to": "ann"}, headers=[("x", "y")])
        shop.app.effects.stage(tx, "mail", {"to": "bob"})

    shop.deliver(paid("one"))
    first = effect_rows(shop)
    drain(shop.app)
    with Admin(shop.app) as admin:
        admin.replay(InboxFilter(consumer=CONSUMER, message_id="one"), actor="me")
    assert drain(shop.app) == []
    assert [effect for effect, _ in effect_rows(shop)] == [answer for answer, _ in first]
    assert len(calls) == 2


def test_an_effect_may_wait(shop: Shop) -> None:
    calls = mails(shop.app)

    @shop.app.handler(TOPIC, consumer=CONSUMER)
    def handle(message: Message[Any], tx: Any) -> None:
        shop.app.effects.stage(tx, "mail", {"to": "ann"}, delay=timedelta(hours=1))

    shop.deliver(paid("one"))
    assert drain(shop.app) == []
    drain(shop.app, ignore_dates=True)
    assert len(calls) == 1


def test_an_effect_passes_correlation_on(shop: Shop) -> None:
    seen: list[dict[str, str | None]] = []

    @shop.app.effect("mail")
    def mail(message: Message[Any]) -> None:
        seen.append(
            {name: message.headers.text(name) for name in ("correlation-id", "causation-id")}
        )

    shopping(shop, "ann")
    shop.deliver(paid("one", headers=[("correlation-id", "c1")]))
    drain(shop.app)
    assert seen == [{"correlation-id": "c1", "causation-id": "one"}]


def test_an_effect_of_a_program_that_consumes_nothing(sqlite_url: str) -> None:
    """Staged in a transaction of the caller's own, outside of any handler."""
    with App(sqlite_url) as app:
        calls = mails(app)
        connection = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))
        connection.execute("BEGIN IMMEDIATE")
        app.effects.stage(connection, "mail", {"to": "gone"})
        connection.rollback()
        connection.execute("BEGIN IMMEDIATE")
        app.effects.stage(connection, "mail", {"to": "ann"})
        connection.commit()
        connection.close()
        drain(app)
        assert [body for body, _ in calls] == [{"to": "ann"}]


def test_an_unknown_effect_names_the_remedy(shop: Shop) -> None:
    shopping(shop, "ann")
    assert shop.deliver(paid("one")) is Outcome.FAILED
    assert "@app.effect('mail')" in (shop.row("one").error or "")


def test_a_batch_says_which_message_is_the_cause(shop: Shop) -> None:
    calls = mails(shop.app)

    @shop.app.handler(TOPIC, consumer=CONSUMER, batch=True, retry=RetryPolicy(max_attempts=1))
    def handle(messages: list[Message[Any]], tx: Any) -> None:
        for message in messages:
            shop.app.effects.stage(tx, "mail", {"to": message.id}, cause=message)

    shop.deliver(paid("one"))
    drain(shop.app)
    assert [body for body, _ in calls] == [{"to": "one"}]


@pytest.mark.parametrize("point", ["before:commit", "after:commit"])
def test_a_crash_around_the_commit(shop: Shop, point: str) -> None:
    calls = mails(shop.app)
    shopping(shop, "ann")
    with pytest.raises(Crashed), crash_at(point):
        shop.deliver(paid("one"))
    shop.deliver(paid("one"))
    drain(shop.app)
    assert len(calls) == 1


def test_a_crash_after_the_call_repeats_it_under_its_key(shop: Shop) -> None:
    calls = mails(shop.app)
    shopping(shop, "ann")
    shop.deliver(paid("one"))
    with pytest.raises(Crashed), crash_at("before:close"):
        drain(shop.app)
    drain(shop.app, ignore_dates=True)
    assert len({key for _, key in calls}) == 1
    assert [status for _, status in effect_rows(shop)] == ["processed"]


def test_an_async_effect(postgresql_url: str) -> None:
    calls: list[Any] = []

    async def run() -> None:
        async with App(postgresql_url) as app:

            @app.effect("mail")
            async def mail(message: Message[Any]) -> str:
                calls.append(message.body)
                return "sent"

            @app.handler(TOPIC, consumer=CONSUMER)
            async def handle(message: Message[Any], tx: Any) -> None:
                await app.effects.stage_async(tx, "mail", {"to": "ann"})

            await app.process_async(paid("one"))
            await drain_async(app)

    asyncio.run(run())
    assert calls == [{"to": "ann"}]


def test_two_effects_of_one_name_are_refused(shop: Shop) -> None:
    mails(shop.app)
    with pytest.raises(ConfigurationError, match="overlap"):
        mails(shop.app)


def test_a_handler_of_every_topic_takes_no_effects(shop: Shop) -> None:
    seen: list[str] = []

    @shop.app.handler("*", consumer="audit", retry=AT_ONCE)
    def audit(message: Message[Any], tx: Any) -> None:
        seen.append(message.topic)

    calls = mails(shop.app)
    shopping(shop, "ann")
    assert shop.deliver(paid("one"), consumer=CONSUMER) is Outcome.PROCESSED
    assert drain(shop.app) == [Outcome.PROCESSED]
    assert [body for body, _ in calls] == [{"to": "ann"}]
    assert [status for _, status in effect_rows(shop)] == ["processed"]
    with shop.app.transaction() as tx, pytest.raises(ConfigurationError, match="no effect 'smoke'"):
        shop.app.effects.stage(tx, "smoke", {})
    assert seen == []


@pytest.mark.parametrize(
    ("topic", "consumer"), [(MAIL, "audit"), (TOPIC, MAIL), (MAIL, "effect:other")]
)
def test_names_of_effects_are_those_of_effects(shop: Shop, topic: str, consumer: str) -> None:
    with pytest.raises(ConfigurationError, match="are those of effects"):
        shop.app.handler(topic, consumer=consumer)(lambda message, tx: None)
