"""One trace across two services and a real broker, including the retries of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from tests.support.brokers.rigs.kafka import KafkaRig
from tests.support.brokers.rigs.rabbitmq import RabbitMQRig
from tests.support.brokers.rigs.redis import RedisRig
from tests.support.recording import Recorder
from tests.support.waiting import eventually
from tests.support.workers import running, worker
from txbox import App, Message, RetryPolicy
from txbox.brokers.kafka import Kafka
from txbox.brokers.rabbitmq import RabbitMQ
from txbox.brokers.redis import RedisStreams
from txbox.errors import BrokerError
from txbox.observers.tracing import Tracing
from txbox.policy import RelayPolicy
from txbox.testing.brokers import Rig

pytestmark = pytest.mark.brokers

SECRET = "4111-1111"
AT_ONCE = RetryPolicy(max_attempts=3, base=timedelta(0), cap=timedelta(0))
BROKERS: dict[str, tuple[type[Rig], Callable[[str, str], Any], str]] = {
    "kafka": (KafkaRig, lambda url, topic: Kafka(url, group=topic), "kafka"),
    "rabbitmq": (RabbitMQRig, lambda url, topic: RabbitMQ(url), "rabbitmq"),
    "redis": (RedisRig, lambda url, topic: RedisStreams(url, group=topic), "redis"),
}  # fmt: skip


class Remembered:
    """Spans of one service."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing = Tracing(self.provider)

    @property
    def spans(self) -> list[ReadableSpan]:
        return sorted(self.exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]


def context_of(span: ReadableSpan) -> trace.SpanContext:
    context: trace.SpanContext | None = span.context
    assert context is not None
    return context


@pytest.fixture(params=BROKERS)
def between(request: pytest.FixtureRequest) -> Iterator[tuple[Rig, Any, str]]:
    kind, client, system = BROKERS[request.param]
    name = "kafka_bootstrap" if request.param == "kafka" else f"{request.param}_url"
    with kind(request.getfixturevalue(name)) as rig:
        yield rig, client(rig.address, rig.topic), system


@contextmanager
def service(url: str, seen: Remembered, **options: Any) -> Iterator[App]:
    policy = RelayPolicy(retry=AT_ONCE, keep_sent=timedelta(hours=1))
    with App(url, tracing=seen.tracing, relaying=policy, **options) as app:
        yield app


def test_one_trace_spans_two_services_a_broker_and_their_retries(
    sqlite_url: str, postgresql_url: str, between: tuple[Rig, Any, str]
) -> None:
    rig, broker, system = between
    shop, billing = Remembered(), Remembered()
    answers: list[BrokerError | None] = [BrokerError(f"not now, {SECRET}"), None]
    mails = Recorder(lambda message: answers.pop(0))
    with service(sqlite_url, shop) as first, service(postgresql_url, billing) as second:

        @first.handler("orders", consumer="shop")
        def order(message: Message[dict[str, Any]], tx: Any) -> None:
            first.outbox.stage(tx, rig.topic, message.body, headers={"x-card": SECRET})

        @second.handler(rig.topic, consumer="billing", retry=AT_ONCE)
        def bill(message: Message[dict[str, Any]], tx: Any) -> None:
            if message.attempt == 1:
                raise LookupError(f"declined {SECRET}")
            second.outbox.stage(tx, "mails", message.body)

        first.publish(broker, topics=[rig.topic])
        second.consume(broker, topics=[rig.topic])
        second.publish(mails, topics=["mails"])
        with shop.provider.get_tracer("the program").start_as_current_span("POST /orders") as root:
            first.process(
                Message(id="o1", topic="orders", payload=f'{{"card": "{SECRET}"}}'.encode())
            )
        with running(worker(first)), running(worker(second)):
            eventually(lambda: len(billing.named("send mails")) == 2, "both tries to send the mail")
    trace_id = root.get_span_context().trace_id
    spans = [*shop.spans, *billing.spans]
    assert {context_of(span).trace_id for span in spans} == {trace_id}

    (ordered,), (created,), (sent,) = map(
        shop.named, ("process orders", f"create {rig.topic}", f"send {rig.topic}")
    )
    failed, billed = billing.named(f"process {rig.topic}")
    (mail,) = billing.named("create mails")
    refused, posted = billing.named("send mails")
    # which message caused which
    for span, parent in (
        (ordered, root.get_span_context()), (created, context_of(ordered)), (sent, context_of(created)),
        (failed, context_of(created)), (billed, context_of(created)), (mail, context_of(billed)),
        (refused, context_of(mail)), (posted, context_of(mail)),
    ):  # fmt: skip
        assert span.parent is not None
        assert (span.name, span.parent.span_id) == (span.name, parent.span_id)
    for span in (sent, failed, billed):
        assert [link.context.span_id for link in span.links] == [context_of(created).span_id]
    assert [span.kind for span in (created, sent, billed)] == [
        SpanKind.PRODUCER, SpanKind.CLIENT, SpanKind.CONSUMER,
    ]  # fmt: skip

    def said(span: ReadableSpan, *names: str) -> tuple[Any, ...]:
        return tuple((span.attributes or {}).get(name) for name in names)

    outcome = ("txbox.attempt", "txbox.outcome", "error.type")
    assert said(failed, *outcome) == (1, None, "LookupError")
    assert said(billed, *outcome) == (2, "processed", None)
    assert [span.status.is_ok for span in (failed, billed, refused, posted)] == [
        False, True, False, True,
    ]  # fmt: skip
    assert said(refused, "error.type") == ("BrokerError",)
    named = ("messaging.operation.name", "messaging.operation.type", "messaging.destination.name")
    assert said(sent, *named) == ("send", "send", rig.topic)
    assert said(billed, *named) == ("process", "process", rig.topic)
    assert said(sent, "messaging.system") == (system,)
    assert said(billed, "messaging.consumer.group.name") == ("billing",)
    ids = {said(span, "messaging.message.id") for span in (created, sent, failed, billed)}
    assert len(ids) == 1
    assert SECRET not in "".join(span.to_json() for span in spans)
