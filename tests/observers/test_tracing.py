"""Spans: which exist, what ends them, and that batches, threads and COMMITs do not mix them up."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
from opentelemetry import baggage, trace

from tests.admin.test_admin_outbox import relayed
from tests.observers.test_tracing_services import Remembered, context_of
from tests.support.recording import Recorder
from tests.support.shop import AT_ONCE, TOPIC, opened, paid
from tests.support.sources import Memory
from tests.support.waiting import DEADLINE_S
from tests.support.workers import worker
from txbox import App, Message, Outbox, Outcome, Reject
from txbox.events import MessageProcessed
from txbox.observers.logging import LoggingObserver
from txbox.session import drive

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{SPAN}-01", "baggage": "tenant=7"}


def hexadecimal(span: Any) -> tuple[str, str]:
    context = context_of(span)
    return f"{context.trace_id:032x}", f"{context.span_id:016x}"


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_handler_runs_in_the_span_and_the_baggage_of_its_message(
    sqlite_url: str, colour: str
) -> None:
    seen = Remembered()
    met: list[Any] = []

    def note(message: Message[Any]) -> None:
        current = trace.get_current_span().get_span_context()
        met.append((f"{current.trace_id:032x}", baggage.get_baggage("tenant")))

    with App(sqlite_url, tracing=seen.tracing) as app:
        if colour == "sync":

            @app.handler(TOPIC, consumer="billing")
            def handle(message: Message[Any], tx: Any) -> None:
                note(message)
        else:

            @app.handler(TOPIC, consumer="billing")
            async def handle_async(message: Message[Any], tx: Any) -> None:
                note(message)

        source = Memory([paid("a", headers=PARENT)])
        app.consume(source)
        assert worker(app, once=True).run() == 0
    (span,) = seen.spans
    assert met == [(TRACE, "7")]
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == SPAN
    assert not trace.get_current_span().get_span_context().is_valid


def test_handlers_that_share_a_transaction_have_a_span_each(database_url: str) -> None:
    seen = Remembered()

    def body(message: Message[Any], tx: Any) -> None:
        if message.id == "m1":
            raise Reject("declined")

    with opened(database_url, tracing=seen.tracing) as shop:
        shop.handler(body)
        traces = {f"m{number}": f"{number + 1:032x}" for number in range(4)}
        source = Memory(
            [
                paid(name, headers={"traceparent": f"00-{of}-{SPAN}-01"})
                for name, of in traces.items()
            ]
        )
        shop.app.consume(source)
        assert worker(shop.app, once=True).run() == 0
        assert len(shop.emitted(MessageProcessed)) == 3
    outcomes: dict[Any, set[Any]] = {}
    for span in seen.named(f"process {TOPIC}"):
        said = span.attributes or {}
        assert hexadecimal(span)[0] == traces[str(said["messaging.message.id"])]
        outcome = said.get("txbox.outcome", said.get("error.type"))
        outcomes.setdefault(said["messaging.message.id"], set()).add(outcome)
    # a run that was rolled back with its batch has neither; another followed it
    assert outcomes.pop("m1") == {"Reject"}
    assert all("processed" in told for told in outcomes.values())
    assert set(outcomes) == {"m0", "m2", "m3"}


def test_a_batch_has_one_span_and_what_it_stages_stays_in_the_trace_of_its_cause(
    sqlite_url: str,
) -> None:
    seen, broker = Remembered(), Recorder()
    traces = [f"{number + 1:032x}" for number in range(2)]
    with opened(sqlite_url, tracing=seen.tracing) as shop:

        @shop.app.handler(TOPIC, consumer="billing", batch=True)
        def handle(messages: list[Message[Any]], tx: Any) -> None:
            for message in messages:
                shop.app.outbox.stage(tx, "out", {}, cause=message)

        shop.app.publish(broker, topics=["out"])
        (handler,) = shop.app.handlers
        messages = [
            paid(number, headers={"traceparent": f"00-{of}-{SPAN}-01"})
            for number, of in enumerate(traces)
        ]
        assert shop.app.database.sync is not None
        drive(shop.app.database.sync, shop.app.intake.take_with_retries, handler, messages)
        relayed(shop.app)
    (span,) = seen.named(f"process {TOPIC}")
    assert (span.attributes or {})["messaging.batch.message_count"] == 2
    assert (span.attributes or {})["txbox.outcome"] == "processed"
    assert [f"{link.context.trace_id:032x}" for link in span.links] == traces
    created = seen.named("create out")
    assert [hexadecimal(one)[0] for one in created] == traces
    assert all(
        link.context.span_id == context_of(span).span_id for one in created for link in one.links
    )
    assert sorted(str(sent.headers.text("traceparent"))[3:35] for sent in broker.sent) == traces


def test_a_commit_that_is_refused_is_an_error_of_the_run(postgresql_url: str) -> None:
    seen = Remembered()
    with opened(postgresql_url, tracing=seen.tracing) as shop:
        shop.raw.execute("CREATE TABLE parent (id integer PRIMARY KEY)")
        shop.raw.execute(
            "CREATE TABLE child (id integer REFERENCES parent DEFERRABLE INITIALLY DEFERRED)"
        )
        shop.handler(lambda message, tx: tx.execute("INSERT INTO child VALUES (1)"), retry=AT_ONCE)
        assert shop.deliver(paid("a", headers=PARENT)) is Outcome.FAILED
    (span,) = seen.spans
    said = span.attributes or {}
    assert said["txbox.outcome"] == "failed"
    assert said["error.type"] == "StoreError"
    assert not span.status.is_ok


def test_an_ambient_span_is_the_parent_and_the_message_a_link(sqlite_url: str) -> None:
    seen = Remembered()
    with opened(sqlite_url, tracing=seen.tracing) as shop:
        shop.handler()
        with seen.provider.get_tracer("http").start_as_current_span("POST") as request:
            shop.deliver(paid("a", headers=PARENT))
    (span,) = seen.named(f"process {TOPIC}")
    assert span.parent is not None
    assert span.parent.span_id == request.get_span_context().span_id
    assert [f"{link.context.span_id:016x}" for link in span.links] == [SPAN]


def test_a_context_that_the_program_gives_is_left_alone(sqlite_url: str) -> None:
    seen, broker = Remembered(), Recorder()
    with opened(sqlite_url, tracing=seen.tracing) as shop:
        shop.app.publish(broker, topics=["out"])
        shop.handler(lambda message, tx: shop.app.outbox.stage(tx, "out", {}, headers=PARENT))
        shop.deliver(paid("a"))
        relayed(shop.app)
    (sent,) = broker.sent
    assert sent.headers.text("traceparent") == PARENT["traceparent"]
    assert not seen.named("create out")
    (span,) = seen.named("send out")
    assert hexadecimal(span)[0] == TRACE


def test_the_outbox_alone_traces_what_it_stages(sqlite_url: str) -> None:
    import sqlite3

    seen = Remembered()
    connection = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
    connection.execute("BEGIN")
    Outbox(tracing=seen.tracing).stage(connection, "out", {})
    connection.execute("COMMIT")
    (headers,) = connection.execute("SELECT headers FROM txbox_outbox").fetchone()
    connection.close()
    (span,) = seen.named("create out")
    assert "-".join(hexadecimal(span)) in headers


def test_lines_of_the_log_have_the_ids_of_their_message(
    sqlite_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    seen = Remembered()

    def fails(message: Message[Any], tx: Any) -> None:
        raise LookupError("declined")

    with (
        opened(sqlite_url, tracing=seen.tracing, observers=[LoggingObserver(as_json=True)]) as shop,
        caplog.at_level(logging.DEBUG, "txbox"),
    ):
        shop.handler(fails)
        shop.deliver(paid("a", headers=PARENT))
    (line,) = [json.loads(record.message) for record in caplog.records]
    (span,) = seen.spans
    assert (line["event"], line["error"]) == ("MessageFailed", "declined")
    assert (line["trace_id"], line["span_id"]) == hexadecimal(span)
    assert line["trace_id"] == TRACE


SERVICE = """
import logging
from opentelemetry.sdk.trace import TracerProvider
from txbox import App, Message
from txbox.observers.tracing import Tracing
from txbox.brokers.local import Local

app = App({url!r}, tracing=Tracing(TracerProvider()))

@app.handler("orders", consumer="billing")
def bill(message: Message[dict], tx):
    logging.getLogger("shop").warning("from the handler")

app.consume(Local())
"""


def test_a_handlers_lines_have_them_too_with_log_json(sqlite_url: str, tmp_path: Any) -> None:
    (tmp_path / "shop.py").write_text(SERVICE.format(url=sqlite_url))
    header = f"traceparent={PARENT['traceparent']}"

    def txbox(*words: str) -> bytes:
        return subprocess.run(
            [sys.executable, "-m", "txbox", *words, "--app", "shop:app"],
            cwd=tmp_path, capture_output=True, timeout=DEADLINE_S, check=True,
        ).stderr  # fmt: skip

    txbox("send", "orders", "--id", "a", "--data", "{}", "--header", header)
    said_at_all = txbox("run", "--once", "--log-json", "--verbose")
    lines = [json.loads(line) for line in said_at_all.splitlines()]
    (said,) = [line for line in lines if line.get("message") == "from the handler"]
    (told,) = [line for line in lines if line.get("event") == "MessageProcessed"]
    assert said["trace_id"] == told["trace_id"] == TRACE
    assert said["span_id"] == told["span_id"] != SPAN


def test_what_is_left_open_is_bounded_and_ends(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from txbox.observers import tracing

    monkeypatch.setattr(tracing, "_OPEN_MAX", 2)
    seen = Remembered()
    wrapped: Any = seen.tracing.traced(lambda message: None, "billing", is_async=False)
    for number in range(5):
        wrapped(paid(number))
    assert len(seen.spans) == 3
    wrapped(paid(4))
    # a run of the same message ends the one before it
    assert len(seen.spans) == 4


def test_without_tracing_opentelemetry_is_not_even_imported(sqlite_url: str) -> None:
    program = f"""
import sys, txbox
app = txbox.App({sqlite_url!r})
app.handler("orders", consumer="billing")(lambda message, tx: app.outbox.stage(tx, "orders", {{}}))
app.process(txbox.Message(id="a", topic="orders", payload=b"1"), consumer="billing")
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=DEADLINE_S)


def test_a_process_that_lacks_the_extra_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    program = """
import sys
sys.modules["opentelemetry"] = None
from txbox import ConfigurationError
try:
    import txbox.observers.tracing
except ConfigurationError as error:
    assert "txbox[otel]" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=DEADLINE_S)


def test_time_outs_and_nontransactional_handlers_have_spans(sqlite_url: str) -> None:
    seen = Remembered()
    with opened(sqlite_url, tracing=seen.tracing) as shop:

        @shop.app.handler(TOPIC, consumer="mail", transactional=False, timeout=timedelta(seconds=9))
        def mail(message: Message[Any]) -> None: ...

        assert shop.deliver(paid("a", headers=PARENT)) is Outcome.PROCESSED
    (span,) = seen.spans
    assert (span.attributes or {})["txbox.outcome"] == "processed"
    assert hexadecimal(span)[0] == TRACE
