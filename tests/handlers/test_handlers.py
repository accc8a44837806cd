"""Wrong types are refused at registration or at the call, by a sentence that says what to write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from txbox import (
    App,
    Batching,
    ConfigurationError,
    GapPolicy,
    Lease,
    Limits,
    Message,
    Outcome,
    Retention,
    Retry,
    RetryPolicy,
)
from txbox.admin import Admin, InboxFilter
from txbox.brokers.webhook import GitHub, Webhook
from txbox.policy import RelayPolicy


@pytest.fixture
def app(sqlite_url: str) -> Iterator[App]:
    with App(sqlite_url) as app:
        yield app


def handle(message: Message[Any], tx: Any) -> None: ...


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"retry": 3}, "retry is 3: give a RetryPolicy, such as RetryPolicy(max_attempts=3)"),
        ({"timeout": 3}, "timeout is 3: give a timedelta, such as timedelta(seconds=3)"),
        ({"concurrency": "2"}, "concurrency is '2': give a whole number"),
        ({"concurrency": True}, "concurrency is True: give a whole number"),
        ({"batch": 100}, "batch is 100: give True or False"),
        ({"pipeline": "yes"}, "pipeline is 'yes': give True or False"),
        ({"ordered": 1}, "ordered is 1: give True or False"),
        ({"gaps": timedelta(1)}, "gaps is datetime.timedelta(days=1): give a GapPolicy"),
        ({"reject_on": ["ValueError"]}, "reject_on is ['ValueError']: give exception classes"),
        ({"message_id": 7}, "message_id is 7: give a callable or a path"),
        ({"lock_key": 7}, "lock_key is 7: give a callable or a path"),
        ({"sequence": True}, "sequence is True: give a callable or a path"),
        ({"decode": "json"}, "decode is 'json': give a callable"),
        ({"dead_letter_topic": ["dead"]}, "dead_letter_topic is ['dead']: give the name of a topic"),
        ({"dead_letter_topic": ""}, "dead_letter_topic is '': give the name of a topic"),
        ({"keep_payload": 5}, "keep_payload is 5: use 'unfinished', 'always' or a timedelta"),
        ({"consumer": None}, "consumer"),
        ({"consumer": ["billing"]}, "consumer"),
        ({"type": ["paid"]}, "type is ['paid']: name one type, or give several as types="),
        ({"types": "paid"}, "types is 'paid': give several types, or name one as type="),
        ({"types": [1]}, "types is [1]: give several types"),
        ({"types": []}, "types is []: give several types"),
    ],
)  # fmt: skip
def test_option_of_a_wrong_type_is_refused(app: App, options: dict[str, Any], says: str) -> None:
    register: Any = app.handler
    with pytest.raises(ConfigurationError) as refused:
        register("orders", **{"consumer": "billing", **options})(handle)
    assert says in str(refused.value)
    assert len(app.handlers) == 0


@pytest.mark.parametrize(
    ("topic", "says"),
    [
        (["orders"], "topic is ['orders']: name one topic"),
        (None, "topic is None: name one topic"),
        ("", "topic is '': name one topic"),
        ("orders.*", "topic is 'orders.*': patterns are not supported"),
        ("*.paid", "patterns are not supported"),
        ("orders.>", "patterns are not supported"),
    ],
)
def test_topic_that_no_message_has_is_refused(app: App, topic: Any, says: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        app.handler(topic, consumer="billing")(handle)
    assert says in str(refused.value)


class Connection: ...


def swapped_names(tx: Any, message: Any) -> None: ...
def swapped_message(connection: Connection, message: Message[Any]) -> None: ...
def swapped_annotation(first: Connection, second: Message[dict[str, Any]]) -> None: ...
async def swapped_async(tx: Any, message: Any) -> None: ...
def swapped_batch(tx: Any, messages: list[Message[Any]]) -> None: ...
def not_a_list(messages: Message[Any], tx: Any) -> None: ...
def a_list(message: list[Message[Any]], tx: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "batch", "says"),
    [
        (swapped_names, False, "swapped_names takes (tx, message): the message comes first"),
        (swapped_message, False, "the message comes first"),
        (swapped_annotation, False, "the message comes first"),
        (swapped_batch, True, "the messages come first"),
        (swapped_async, False, "the message comes first"),
        (not_a_list, True, "batch=True gives a list: annotate it as list[Message[…]]"),
        (a_list, False, "is called with one message: annotate it as Message[…], or set batch=True"),
    ],
)
def test_swapped_or_misread_arguments_are_refused(
    app: App, function: Any, batch: bool, says: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        app.handler("orders", consumer="billing", batch=batch)(function)
    assert says in str(refused.value)


def test_names_of_ones_own_are_accepted(app: App) -> None:
    def first(m: Message[Any], c: Connection) -> None: ...
    def second(event: Any, database: Any) -> None: ...
    def third(msgs: list[Message[Any]], tx: Any) -> None: ...
    def fourth(messages: Any, *rest: Any) -> None: ...

    app.handler("a", consumer="a")(first)
    app.handler("b", consumer="b")(second)
    app.handler("c", consumer="c", batch=True)(third)
    app.handler("d", consumer="d", batch=True)(fourth)


@pytest.mark.parametrize(
    ("policy", "options", "says"),
    [
        (RetryPolicy, {"base": 10}, "RetryPolicy.base is 10: it must be a timedelta"),
        (RetryPolicy, {"cap": 10}, "RetryPolicy.cap is 10: it must be a timedelta"),
        (RetryPolicy, {"max_age": 10}, "RetryPolicy.max_age is 10: it must be a timedelta"),
        (RetryPolicy, {"max_attempts": "3"}, "RetryPolicy.max_attempts is '3': it must be"),
        (RetryPolicy, {"max_attempts": 2.5}, "RetryPolicy.max_attempts is 2.5: it must be"),
        (RetryPolicy, {"factor": "2"}, "RetryPolicy.factor is '2': it must be"),
        (RetryPolicy, {"factor": float("nan")}, "RetryPolicy.factor is nan: it must be"),
        (Lease, {"duration": 60}, "Lease.duration is 60: it must be a timedelta"),
        (Lease, {"batch": "20"}, "Lease.batch is '20': it must be"),
        (Retention, {"processed": 30}, "Retention.processed is 30: it must be a timedelta"),
        (Retention, {"partition": 24}, "Retention.partition is 24: it must be a timedelta"),
        (GapPolicy, {"wait": 5}, "GapPolicy.wait is 5: it must be a timedelta"),
        (GapPolicy, {"first": "1"}, "GapPolicy.first is '1': it must be"),
        (RelayPolicy, {"confirm_within": 5}, "RelayPolicy.confirm_within is 5: it must be"),
        (RelayPolicy, {"keep_sent": 5}, "RelayPolicy.keep_sent is 5: it must be a timedelta"),
        (RelayPolicy, {"retry": 5}, "RelayPolicy.retry is 5: it must be a RetryPolicy"),
        (Batching, {"messages": None}, "Batching.messages is None: it must be"),
        (Limits, {"lock_timeout": 5}, "Limits.lock_timeout is 5: it must be a timedelta"),
        (Limits, {"payload_bytes": "1M"}, "Limits.payload_bytes is '1M': it must be"),
    ],
)
def test_policy_of_a_wrong_type_is_refused(policy: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        policy(**options)
    assert says in str(refused.value)


@pytest.mark.parametrize("name", ["limits", "lease", "retention", "batching", "relaying"])
def test_app_takes_policies_only(sqlite_url: str, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} is 30: give a "):
        App(sqlite_url, **cast("Any", {name: 30}))


def test_retry_after_takes_a_timedelta() -> None:
    with pytest.raises(ConfigurationError, match="after is 5: give a timedelta"):
        Retry(after=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("verb", ["process", "answer", "send"])
@pytest.mark.parametrize("given", [{}, b"{}", None, "id"])
def test_what_is_no_message_is_refused(app: App, verb: str, given: Any) -> None:
    app.handler("orders", consumer="billing")(handle)
    with pytest.raises(ConfigurationError) as refused:
        getattr(app, verb)(given)
    assert f"is a {type(given).__name__}, not a Message" in str(refused.value)
    assert "Message(topic=…, id=…, payload=…)" in str(refused.value)


@pytest.mark.parametrize("verb", ["process_async", "answer_async", "send_async"])
def test_what_is_no_message_is_refused_async(app: App, verb: str) -> None:
    with pytest.raises(ConfigurationError, match="not a Message"):
        asyncio.run(getattr(app, verb)({}))


def test_a_consumer_does_not_get_a_topic_that_it_does_not_take(app: App) -> None:
    """A type may be nobody's; another topic means that the caller passes messages to the wrong consumer."""
    app.init()
    app.handler("orders", type="order.paid", consumer="billing")(handle)
    refund: Message[Any] = Message(id="m1", topic="refunds", payload=b"{}")
    with pytest.raises(ConfigurationError, match="'billing' takes 'orders', not topic 'refunds'"):
        app.process(refund, consumer="billing")
    assert app.process(refund) is Outcome.UNMATCHED
    sent = replace(refund, topic="orders", type="order.sent")
    assert app.process(sent, consumer="billing") is Outcome.UNMATCHED


def test_a_webhook_is_consumed_once_and_brings_no_effects(app: App, tmp_path: Path) -> None:
    hook = Webhook(topic="github", verify=GitHub("a secret long enough"))
    app.consume(hook)
    with App(f"sqlite:///{tmp_path}/other.db") as other:
        with pytest.raises(ConfigurationError, match="is consumed twice"):
            other.consume(hook)
        with pytest.raises(ConfigurationError, match="those of effects"):
            other.consume(Webhook(topic="effect:mail", verify=GitHub("a secret long enough")))


@pytest.mark.parametrize("kind", ["coroutine", "generator", "async_generator"])
def test_what_a_call_only_promises_is_no_success(app: App, kind: str) -> None:
    """A decorator or a lambda hides an `async def` or a `yield` from the check at registration."""

    async def promised(_message: Message[Any], _tx: Any) -> None: ...
    def yields(_message: Message[Any], _tx: Any) -> Iterator[None]:
        yield

    async def yields_async(_message: Message[Any], _tx: Any) -> AsyncIterator[None]:
        yield

    hidden = {"coroutine": promised, "generator": yields, "async_generator": yields_async}[kind]

    def handle(message: Message[Any], tx: Any) -> Any:
        return hidden(message, tx)

    app.handler("orders", consumer="billing")(handle)
    message = Message(id="1", topic="orders", payload=b"{}")
    assert app.process(message) is Outcome.FAILED
    with Admin(app) as admin:
        (shown,) = admin.show(InboxFilter(consumer="billing", message_id="1"))
    assert f"returned a {kind}, which never runs" in str(shown.error)


def test_what_an_async_call_only_promises_is_no_success(app: App) -> None:
    async def later() -> None: ...

    @app.handler("orders", consumer="billing")
    async def handle(_message: Message[Any], _tx: Any) -> Any:
        return later()

    message = Message(id="1", topic="orders", payload=b"{}")
    assert asyncio.run(app.process_async(message)) is Outcome.FAILED
