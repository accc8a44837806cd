"""Where staged messages go, and in which shape."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from tests.support.recording import Recorder
from tests.worker.test_relay import drained, relay_of, staged
from txbox import App, ConfigurationError, Headers, Message, Outcome, Outgoing
from txbox.brokers.envelope import REDIS
from txbox.brokers.local import Local

Connect = Callable[[str], AbstractContextManager[Any]]


def test_each_topic_has_one_destination(sqlite_url: str) -> None:
    with App(sqlite_url) as app:
        app.publish(Recorder(), topics=["a", "b"])
        with pytest.raises(ConfigurationError, match="'b' has two destinations"):
            app.publish(Recorder(), topics=["b"])
        app.publish(Recorder())
        with pytest.raises(ConfigurationError, match="take every topic"):
            app.publish(Local(), topics=["*"])
        with pytest.raises(ConfigurationError, match="got no topics"):
            app.publish(Recorder(), topics=[])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"cloudevents": "xml", "source": "/shop"}, "use 'binary', 'structured'"),
        ({"cloudevents": "binary"}, "go together"),
        ({"source": "/shop"}, "go together"),
    ],
)
def test_options_out_of_range(sqlite_url: str, options: Any, sentence: str) -> None:
    with App(sqlite_url) as app, pytest.raises(ConfigurationError, match=sentence):
        app.publish(Recorder(), **options)


def test_a_topic_with_nowhere_to_go_is_refused_when_it_is_staged(
    sqlite_url: str, plain_connection: Connect
) -> None:
    with App(sqlite_url) as app, plain_connection(sqlite_url) as tx:

        @app.handler("inside", consumer="c")
        def handle(message: Message[Any], tx: Any) -> None: ...

        assert app.outbox.stage(tx, "inside", {})
        with pytest.raises(ConfigurationError, match="Nobody publishes topic 'outside'"):
            app.outbox.stage(tx, "outside", {})
        app.publish(Recorder(), topics=["outside"])
        assert app.outbox.stage(tx, "outside", {})


def test_a_handler_of_every_topic_takes_what_nobody_publishes_only_when_told_to(
    sqlite_url: str, plain_connection: Connect
) -> None:
    with App(sqlite_url) as app, plain_connection(sqlite_url) as tx:

        @app.handler("*", consumer="audit")
        def audit(message: Message[Any], tx: Any) -> None: ...

        app.handler("orders", consumer="billing")(audit)
        with pytest.raises(ConfigurationError, match="Nobody publishes topic 'ordres'"):
            app.outbox.stage(tx, "ordres", {})
        assert app.routes.adopts_after("local", "ordres", None, None) is None, (
            "it is for another App"
        )
        assert not any(route.others for route in app.routes.all())
        assert app.outbox.stage(tx, "orders", {})
        app.publish(Local())
        assert app.outbox.stage(tx, "ordres", {})
        assert app.routes.adopts_after("local", "ordres", None, None) == 0


def test_nothing_that_is_staged_runs_an_effect(sqlite_url: str, plain_connection: Connect) -> None:
    """A `reply-to` of a stranger's message may name any topic."""
    with App(sqlite_url) as app, plain_connection(sqlite_url) as tx:

        @app.effect("mail")
        def mail(message: Message[Any]) -> None: ...

        for published in (False, True):
            if published:
                app.publish(Local())
            with pytest.raises(ConfigurationError, match="'effect:mail'"):
                app.outbox.stage(tx, "effect:mail", {})
            assert app.routes.adopts_after("", "effect:mail", None, "effect:mail") is None
            assert not any("effect:mail" in route.topics for route in app.routes.all())


def test_topics_are_several_names(sqlite_url: str) -> None:
    with App(sqlite_url) as app:
        for wrong in ("orders", [], ["orders", ""], [None]):
            with pytest.raises(ConfigurationError, match="topics"):
                app.publish(Recorder(), topics=wrong)  # type: ignore[arg-type]
            with pytest.raises(ConfigurationError, match="topics"):
                app.consume(Local(), topics=wrong)  # type: ignore[arg-type]
        assert not app.consumptions


def test_what_is_published_does_not_come_back_by_itself(
    sqlite_url: str, plain_connection: Connect
) -> None:
    """A topic that is published and consumed comes back over its broker, once."""
    broker = Recorder()
    with App(sqlite_url) as app, plain_connection(sqlite_url) as tx:

        @app.handler("both", consumer="c")
        def handle(message: Message[Any], tx: Any) -> None: ...

        app.publish(broker, topics=["both"])
        app.outbox.stage(tx, "both", {})
        tx.commit()
        for route in app.routes.all():
            assert (route.destination is broker) is ("both" in route.topics and not route.others)
        drained(relay_of(app))
        assert len(broker.sent) == 1


EVENT = Outgoing(
    topic="orders",
    type="order.paid",
    key="o-1",
    body={"cents": 100},
    headers={"traceparent": "00-1"},
)


def sent_as(url: str, connect: Connect, message: Outgoing, **options: Any) -> Message[Any]:
    broker = Recorder()
    staged(url, connect, [message])
    with App(url) as app:
        app.publish(broker, **options)
        drained(relay_of(app))
    (sent,) = broker.sent
    return sent


def test_a_binary_cloudevent_has_its_attributes_in_headers(
    database_url: str, plain_connection: Connect
) -> None:
    message = sent_as(database_url, plain_connection, EVENT, cloudevents="binary", source="/shop")
    assert message.json() == {"cents": 100}
    assert message.content_type == "application/json"
    headers = Headers(message.headers)
    found = {
        name: headers.get(f"ce_{name}")
        for name in ("id", "source", "type", "subject", "specversion")
    }
    assert found == {
        "id": message.id, "source": "/shop", "type": "order.paid", "subject": "o-1", "specversion": "1.0",
    }  # fmt: skip
    assert message.time is not None
    assert headers.get("ce_time") == message.time.isoformat()
    assert headers.get("traceparent") == "00-1"


def test_a_structured_cloudevent_is_read_back_as_it_was(
    database_url: str, plain_connection: Connect
) -> None:
    message = sent_as(
        database_url, plain_connection, EVENT, cloudevents="structured", source="/shop"
    )
    assert message.content_type == "application/cloudevents+json"
    assert message.payload is not None
    back = REDIS.delivery(
        "orders", message.payload, [("content-type", message.content_type)], origin={}, tag=None
    ).message
    assert back is not None
    assert back.id == f"/shop {message.id}"
    assert (back.type, back.key, back.json()) == ("order.paid", "o-1", {"cents": 100})


def test_bytes_in_a_structured_cloudevent_travel_as_base64(
    sqlite_url: str, plain_connection: Connect
) -> None:
    raw = Outgoing(topic="t", body=b"\xff\x00", content_type="application/octet-stream")
    message = sent_as(sqlite_url, plain_connection, raw, cloudevents="structured", source="/shop")
    event = json.loads(message.payload or b"")
    assert base64.b64decode(event["data_base64"]) == b"\xff\x00"
    # required there, and free here
    assert event["type"] == "t"


def test_a_cloudevent_of_a_relay_is_one_message_however_often_it_is_sent(
    sqlite_url: str, plain_connection: Connect
) -> None:
    sent = sent_as(sqlite_url, plain_connection, EVENT, cloudevents="binary", source="/shop")
    with App(sqlite_url) as app:

        @app.handler("orders", consumer="c")
        def handle(message: Message[Any], tx: Any) -> None: ...

        assert app.process(sent) is Outcome.PROCESSED
        assert app.process(sent) is Outcome.DUPLICATE
