"""What a message carries beside its payload is checked where it enters, in one way by every verb, on every database."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import pytest

from tests.support.shop import CONSUMER, TOPIC, Shop, opened
from txbox import (
    App,
    ConfigurationError,
    Inbox,
    Message,
    Outbox,
    Outcome,
    Retry,
    RetryPolicy,
    UnusableMessage,
)
from txbox.admin import Admin, QuarantineFilter
from txbox.brokers.local import Local
from txbox.handlers import HandlerOptions
from txbox.maintenance import Task
from txbox.policy import GapPolicy, Lease, Retention

Connect = Callable[[str], AbstractContextManager[Any]]

# what no database can store, or not every one, and what the error names
UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"key": 5}, "key is an int"),
    ({"key": 0}, "key is an int"),
    ({"key": b"k"}, "key is a bytes"),
    ({"key": "k" * 1025}, "key has more than 1024 bytes"),
    ({"key": "é" * 513}, "key has more than 1024 bytes"),
    ({"key": "a\0b"}, "key contains a NUL"),
    ({"key": "\ud800"}, "key contains lone surrogates"),
    ({"type": 5}, "type is an int"),
    ({"type": "t" * 2600}, "type has more than 1024 bytes"),
    ({"content_type": ["text/plain"]}, "content_type is a list"),
    ({"headers": {"n": 5}}, "header 'n' is an int"),
    ({"headers": [("n", ["a"])]}, "header 'n' is a list"),
    ({"headers": [("a", "fits"), ("n", True)]}, "header 'n' is a bool"),
]
UNFIT_OUTGOING: list[tuple[dict[str, Any], str]] = [
    *UNFIT,
    ({"headers": {"n": "\ud800"}}, "header 'n' contains lone surrogates"),
    ({"headers": {"\ud800": "v"}}, "name of a header contains lone surrogates"),
]
UNFIT_INCOMING: list[tuple[dict[str, Any], str]] = [
    *UNFIT,
    ({"sequence": "5"}, "sequence is a str"),
    ({"sequence": 1.5}, "sequence is a float"),
    ({"sequence": True}, "sequence is a bool"),
    ({"sequence": 2**63}, "sequence does not fit"),
    ({"time": "2026-11-26"}, "time is a str"),
]


def message(number: int, fields: dict[str, Any]) -> Message[Any]:
    return Message(**{"id": f"m{number}", "topic": TOPIC, "payload": b"{}", **fields})


@pytest.mark.every_database
@pytest.mark.parametrize("mode", ["inline", "stored"])
def test_a_message_with_unfit_fields_is_quarantined_and_says_why(shop: Shop, mode: Any) -> None:
    shop.handler(lambda message, tx: fail(), mode=mode)
    for number, (fields, why) in enumerate(UNFIT_INCOMING):
        unfit = message(number, fields)
        # another type that is no text matches this handler as well
        outcome = shop.deliver(unfit) if mode == "inline" else shop.app.send(unfit)[CONSUMER]
        assert outcome is Outcome.QUARANTINED
        with Admin(shop.app) as admin:
            (kept,) = admin.show(QuarantineFilter(message_id=f"m{number}"), reveal=True)
        assert why in kept.reason
    assert shop.calls == []


def fail() -> None:
    raise ValueError("no")


def test_accept_refuses_unfit_fields(shop: Shop, plain_connection: Connect) -> None:
    with plain_connection(shop.url) as tx:
        for number, (fields, why) in enumerate(UNFIT_INCOMING):
            unfit = message(number, fields)
            with pytest.raises(UnusableMessage, match=why) as refused:
                Inbox(CONSUMER).accept(tx, unfit)
            assert refused.value.message_id == f"m{number}"
            Inbox(CONSUMER).quarantine(tx, unfit)
        tx.commit()
    assert shop.raw.value("SELECT count(*) FROM txbox_quarantine") == len(UNFIT_INCOMING)
    assert shop.raw.value("SELECT count(*) FROM txbox_inbox") == 0


def test_what_no_consumer_could_store_is_not_staged(shop: Shop, plain_connection: Connect) -> None:
    app = shop.app

    @app.effect("mail")
    def mail(message: Message[Any]) -> None:
        del message

    with plain_connection(shop.url) as tx:
        for fields, why in UNFIT_OUTGOING:
            with pytest.raises(UnusableMessage, match=why):
                Outbox().stage(tx, TOPIC, {}, **fields)
            effect = {name: fields[name] for name in fields if name in ("key", "headers")}
            if effect and (fields, why) in UNFIT:
                with pytest.raises(UnusableMessage, match=why):
                    app.effects.stage(tx, "mail", {}, **effect)
        wrong: Any = 5
        with pytest.raises(UnusableMessage, match="topic is an int"):
            Outbox().stage(tx, wrong, {})
        # what just fits does
        Outbox().stage(
            tx, "t" * 1024, {}, key="k" * 1024, headers={"n": None, "é": "é", "b": b"\xff"}
        )
        tx.commit()
    assert shop.raw.value("SELECT count(*) FROM txbox_outbox") == 1


@pytest.mark.parametrize("name", ["a\0b", "t" * 1025, "é" * 513, "\ud800"])
def test_a_name_that_no_message_can_have_is_refused_at_registration(name: str) -> None:
    app = App("sqlite:///never-opened.db")
    options: dict[str, Any]
    for options in (
        {"type": name},
        {"types": ["t", name]},
        {"dead_letter_topic": name},
        {"reply_to": name},
    ):
        with pytest.raises(ConfigurationError, match=next(iter(options))[:4]):
            app.handler(TOPIC, consumer=CONSUMER, **options)(lambda message, tx: None)
    with pytest.raises(ConfigurationError, match="topic is"):
        app.handler(name, consumer=CONSUMER)(lambda message, tx: None)
    with pytest.raises(ConfigurationError, match="topic is"):
        app.publish(Local(), topics=[name])


ELEVEN_YEARS = timedelta(days=11 * 366)


@pytest.mark.parametrize(
    "made",
    [
        lambda: Retry(after=ELEVEN_YEARS),
        lambda: Retry(after=timedelta(seconds=1.76e12)),
        lambda: Retry(after=-ELEVEN_YEARS),
        lambda: RetryPolicy(base=ELEVEN_YEARS),
        lambda: RetryPolicy(cap=ELEVEN_YEARS),
        lambda: RetryPolicy(max_age=ELEVEN_YEARS),
        lambda: Lease(duration=ELEVEN_YEARS),
        lambda: Retention(processed=ELEVEN_YEARS),
        lambda: GapPolicy(wait=ELEVEN_YEARS),
        lambda: HandlerOptions(timeout=ELEVEN_YEARS),
        lambda: HandlerOptions(keep_payload=ELEVEN_YEARS),
        lambda: Task(older_than=ELEVEN_YEARS),
        lambda: QuarantineFilter(older_than=ELEVEN_YEARS).params(),
    ],
)
def test_a_duration_is_at_most_ten_years(made: Callable[[], object]) -> None:
    with pytest.raises(ConfigurationError, match="at most ten years"):
        made()


def test_a_policy_whose_numbers_no_database_holds_is_refused() -> None:
    wrong: dict[str, Any]
    for wrong in ({"factor": 1e6}, {"factor": float("inf")}, {"max_attempts": 2**31}):
        with pytest.raises(ConfigurationError):
            RetryPolicy(**wrong)
    policy = RetryPolicy(base=timedelta(days=3653), factor=1_000, cap=timedelta(days=3653))
    assert 0 <= policy.delay_s(2**31 - 1) <= timedelta(days=3653).total_seconds()


def test_a_stage_or_accept_that_waits_longer_than_ten_years_is_refused(
    sqlite_url: str, plain_connection: Connect
) -> None:
    wrong: Any = 5
    with plain_connection(sqlite_url) as tx:
        with pytest.raises(ConfigurationError, match="ten years"):
            Outbox().stage(tx, TOPIC, {}, delay=ELEVEN_YEARS)
        with pytest.raises(ConfigurationError, match="ten years"):
            Inbox(CONSUMER).accept(tx, "m", timeout=ELEVEN_YEARS)
        with pytest.raises(ConfigurationError, match="give a timedelta"):
            Inbox(CONSUMER).accept(tx, "m", timeout=wrong)


@pytest.mark.every_database
@pytest.mark.parametrize("after", ["too long", "set later", "never set"])
def test_a_retry_that_waits_too_long_costs_an_attempt(database_url: str, after: str) -> None:
    class Silent(Retry):
        def __init__(self) -> None:
            Exception.__init__(self, "silent")

    def retries(message: Message[Any], tx: Any) -> None:
        if after == "too long":
            raise Retry(after=timedelta(seconds=1.76e12))
        if after == "never set":
            raise Silent
        error = Retry()
        error.after = timedelta(seconds=1.76e12)
        raise error

    with opened(database_url) as shop:
        shop.handler(retries)
        assert shop.deliver(Message(id="m", topic=TOPIC)) is Outcome.FAILED
        assert shop.work() == [Outcome.FAILED]
        assert (shop.row("m").status, shop.row("m").attempts) == ("failed", 2)
