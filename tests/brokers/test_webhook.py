"""Webhooks on a real server: the response, and what the database has by then."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from tests.scenarios.test_real_input import EVENTS, FILE
from tests.support.proxy import closed_port
from tests.support.shop import CONSUMER, TOPIC, Shop, opened, quarantined, statuses
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.webhook.senders import (
    SECRET,
    STANDARD_SECRET,
    Endpoint,
    github,
    serving,
    standard,
    stripe,
)
from txbox import App, ConfigurationError, Limits, Message, Outcome, Reject, StoreError
from txbox.brokers.webhook import GitHub, StandardWebhooks, Stripe, Verified, Verify, Webhook
from txbox.message import Headers

BODY = b'{"id": "evt_1", "type": "invoice.paid"}'


def hook(shop: Shop, verify: Verify | None = None, **options: Any) -> Webhook:
    return Webhook(shop.app.process_async, topic=TOPIC, verify=verify or GitHub(SECRET), **options)


@pytest.fixture
def lite(sqlite_url: str) -> Iterator[Shop]:
    with opened(sqlite_url) as shop:
        yield shop


def stored(shop: Shop) -> int:
    return int(shop.raw.value("SELECT count(*) FROM txbox_inbox")) + len(quarantined(shop.raw))


def test_processed_then_a_duplicate(shop: Shop) -> None:
    seen: list[Message[Any]] = []
    shop.handler(lambda message, _: seen.append(message))
    with serving(hook(shop)) as endpoint:
        headers = github("delivery-1", BODY) | {"Authorization": "Bearer x", "Cookie": "c"}
        first = endpoint.post(headers, BODY)
        assert (first.status, first.text) == (200, "processed")
        # 2xx is sent after the commit: another connection sees the effect
        assert shop.effects("delivery-1") == 1
        again = endpoint.post(headers, BODY)
        assert (again.status, again.text) == (200, "duplicate")
    assert shop.effects() == 1
    (message,) = seen
    assert (message.type, message.payload) == ("push", BODY)
    assert message.content_type == "application/json"
    assert not {"authorization", "cookie"} & set(message.headers.names())


def test_refused_requests_store_nothing(lite: Shop) -> None:
    lite.handler()
    with serving(hook(lite, body_bytes=1000)) as endpoint:
        for headers in (
            {}, github("d", BODY, secret="wrong"), github("d", b"another body"),
            {"X-Hub-Signature-256": "sha256=" + "é" * 3},
        ):  # fmt: skip
            answer = endpoint.post({name: value.encode() for name, value in headers.items()}, BODY)
            assert answer.status == 401
        long = b"x" * 1001
        assert endpoint.post(github("d", long), long).status == 413
        assert endpoint.post(github("d", long[1:]), long[1:]).status == 200
        assert endpoint.post(github("d", b""), b"", method="GET").status == 405
        assert endpoint.post(github("d", b""), b"", method="PUT").headers["allow"] == "POST"
    assert stored(lite) == 1


def test_a_chunked_body_without_a_length_is_bounded(lite: Shop) -> None:
    lite.handler()
    with serving(hook(lite, body_bytes=1000)) as endpoint:
        answer = _raw(
            endpoint,
            b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
             b"1f4\r\n" + b"x" * 500 + b"\r\n"
            + b"1f5\r\n" + b"x" * 501 + b"\r\n",
        )  # fmt: skip
        assert answer.startswith(b"HTTP/1.1 413")
    assert stored(lite) == 0


def test_a_body_that_does_not_come_is_not_waited_for(lite: Shop) -> None:
    lite.handler()
    with serving(hook(lite, answer_within=timedelta(seconds=0.2))) as endpoint:
        answer = _raw(endpoint, b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")
        assert answer.startswith(b"HTTP/1.1 408")
    assert stored(lite) == 0


@pytest.mark.parametrize("sent", [0, 900 * 1024])
def test_bodies_that_do_not_come_keep_no_sender_out(lite: Shop, sent: int) -> None:
    lite.handler()
    head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n"
    with serving(hook(lite)) as endpoint, contextlib.ExitStack() as connections:
        for _ in range(300):
            connection = connections.enter_context(_connected(endpoint))
            connection.sendall(head + b"x" * sent)
        for number in range(10):
            assert endpoint.post(github(f"d{number}", BODY), BODY).text == "processed"
    assert lite.effects() == 10


def test_the_oldest_unread_body_makes_room(lite: Shop) -> None:
    lite.handler()
    head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n"
    with serving(hook(lite)) as endpoint, contextlib.ExitStack() as connections:
        oldest = connections.enter_context(_connected(endpoint))
        oldest.sendall(head)
        for _ in range(256):
            connections.enter_context(_connected(endpoint)).sendall(head)
        # well before `answer_within`, which would give the same answer
        oldest.settimeout(4)
        assert oldest.recv(4096).startswith(b"HTTP/1.1 408")


def test_unverified_requests_are_not_counted_as_in_flight(lite: Shop) -> None:
    lite.handler()
    head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n"
    with (
        serving(hook(lite, in_flight_max=1)) as endpoint,
        _connected(endpoint) as silent,
    ):
        silent.sendall(head)
        assert endpoint.post(github("d1", BODY), BODY).text == "processed"


def _connected(endpoint: Endpoint) -> socket.socket:
    return socket.create_connection(("127.0.0.1", endpoint.port), timeout=DEADLINE_S)


def _raw(endpoint: Endpoint, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=DEADLINE_S) as connection:
        connection.sendall(request)
        return connection.recv(4096)


def _schemes() -> dict[str, tuple[Verify, Callable[[], dict[str, str]]]]:
    return {
        "github": (GitHub(SECRET), lambda: github("", BODY)),
        "stripe": (Stripe(SECRET), lambda: stripe(BODY)),
        "standard": (StandardWebhooks(STANDARD_SECRET), lambda: standard("evt_1", BODY)),
        "function": (lambda *_: Verified(id="evt_1"), dict),
    }


@pytest.mark.parametrize("scheme", ["github", "stripe", "standard", "function"])
def test_unsigned_headers_give_no_id_type_or_reply_address(lite: Shop, scheme: str) -> None:
    seen: list[Message[Any]] = []
    lite.handler(lambda message, _: seen.append(message))
    verify, sign = _schemes()[scheme]
    unsigned = {
        "message-id": "forged", "ce-id": "forged", "ce_source": "forged", "ce-type": "forged",
        "cloudEvents_id": "forged", "reply-to": "forged", "x-request-id": "kept",
    }  # fmt: skip
    with serving(hook(lite, verify)) as endpoint:
        answer = endpoint.post(sign() | unsigned, BODY)
    # GitHub's request came without its delivery id, so it has none
    assert answer.text == ("quarantined" if scheme == "github" else "processed")
    for message in seen:
        assert (message.id, message.type) in {("evt_1", "invoice.paid"), ("evt_1", None)}
        assert "forged" not in [value for _, value in message.headers]
        assert message.headers.text("x-request-id") == "kept"
    assert len(seen) == (scheme != "github")


def test_replayed_github_body_under_a_new_id_is_a_duplicate(lite: Shop) -> None:
    lite.handler()
    with serving(hook(lite, GitHub(SECRET, id_from="body"))) as endpoint:
        texts = [endpoint.post(github(f"d{n}", BODY, f"type{n}"), BODY).text for n in range(3)]
        assert texts == ["processed", "duplicate", "duplicate"]
        assert endpoint.post(github("d0", b"{}"), b"{}").text == "processed"
    assert lite.effects() == 2
    with pytest.raises(ConfigurationError, match="'delivery' or 'body'"):
        GitHub(SECRET, id_from="header")  # type: ignore[arg-type]


def test_mismatch_can_be_an_error_for_the_sender(lite: Shop) -> None:
    lite.handler()
    with serving(hook(lite, quarantined_status=409)) as endpoint:
        assert endpoint.post(github("d1", BODY), BODY).status == 200
        refused = endpoint.post(github("d1", b"{}"), b"{}")
        assert (refused.status, refused.text) == (409, "quarantined")
        assert endpoint.post(github("", BODY), BODY).status == 409
        assert endpoint.post(github("d1", BODY), BODY).text == "duplicate"
    assert len(quarantined(lite.raw)) == 2


@pytest.mark.parametrize("signed", [True, False])
def test_kept_result_goes_to_no_replayer(lite: Shop, signed: bool) -> None:
    lite.app.handler(TOPIC, consumer=CONSUMER, keep_result=True)(lambda message, tx: {"receipt": 7})
    # a signed request can be captured and sent again; a token is what the sender knows
    verify: Verify = GitHub(SECRET) if signed else lambda *_: True
    application = Webhook(lite.app.answer_async, topic=TOPIC, verify=verify)
    with serving(application) as endpoint:
        headers = github("d1", BODY) | ({} if signed else {"message-id": "d1"})
        first, again = (endpoint.post(headers, BODY) for _ in range(2))
    assert json.loads(first.text) == {"receipt": 7}
    assert again.text == ("duplicate" if signed else first.text)


@pytest.mark.parametrize("case", ["stripe", "standard"])
def test_stripe_and_standard_webhooks(lite: Shop, case: str) -> None:
    lite.handler()
    verify: Verify = Stripe(SECRET) if case == "stripe" else StandardWebhooks(STANDARD_SECRET)

    def signed(age_s: int = 0) -> dict[str, str]:
        return (
            stripe(BODY, age_s=age_s) if case == "stripe" else standard("evt_1", BODY, age_s=age_s)
        )

    with serving(hook(lite, verify)) as endpoint:
        assert endpoint.post(signed(age_s=400), BODY).status == 401
        assert stored(lite) == 0
        # a redelivery is signed anew
        answers = [endpoint.post(signed(age_s), BODY).text for age_s in (0, 3)]
    assert answers == ["processed", "duplicate"]
    assert lite.effects("evt_1") == 1


def test_outcomes_that_the_table_owns_are_answered_200(lite: Shop) -> None:
    def fail(message: Message[Any], _: Any) -> None:
        if message.type == "reject":
            raise Reject("no")
        raise ValueError("boom")

    lite.handler(fail)
    with serving(hook(lite)) as endpoint:
        told = [
            endpoint.post(github("d1", BODY), BODY),
            endpoint.post(github("d1", BODY), BODY),
            endpoint.post(github("d2", BODY, event="reject"), BODY),
            endpoint.post(github("d2", b"{}"), b"{}"),
            endpoint.post(github("", BODY), BODY),
        ]
    assert [answer.status for answer in told] == [200] * 5
    assert [answer.text for answer in told] == [
        "failed", "deferred", "dead", "quarantined", "quarantined",
    ]  # fmt: skip
    assert lite.effects() == 0
    assert len(quarantined(lite.raw)) == 2


def test_stored_mode_answers_once_the_row_is_there(shop: Shop) -> None:
    shop.handler(mode="stored")
    with serving(hook(shop)) as endpoint:
        assert endpoint.post(github("d1", BODY), BODY).text == "deferred"
        assert (shop.effects(), statuses(shop.raw)) == (0, {"pending": 1})
        assert endpoint.post(github("d1", BODY), BODY).status == 200
    assert shop.work() == [Outcome.PROCESSED]
    assert shop.effects("d1") == 1


def test_send_async_stores_for_every_consumer(lite: Shop) -> None:
    lite.handler()
    lite.handler(consumer="shipping")
    application = Webhook(lite.app.send_async, topic=TOPIC, verify=GitHub(SECRET))
    with serving(application) as endpoint:
        assert endpoint.post(github("d1", BODY), BODY).text == "deferred"
    assert statuses(lite.raw) == {"pending": 2}


def test_in_progress_elsewhere_is_503(postgresql_url: str) -> None:
    entered, go = threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        entered.set()
        assert go.wait(DEADLINE_S)

    with opened(postgresql_url, limits=Limits(lock_timeout=timedelta(seconds=0.2))) as shop:
        shop.handler(hold)
        with serving(hook(shop, retry_after=timedelta(seconds=7))) as endpoint:
            texts: list[str] = []
            first = threading.Thread(
                target=lambda: texts.append(endpoint.post(github("d1", BODY), BODY).text)
            )
            first.start()
            assert entered.wait(DEADLINE_S)
            second = endpoint.post(github("d1", BODY), BODY)
            assert (second.status, second.headers["retry-after"]) == (503, "7")
            go.set()
            first.join(DEADLINE_S)
            assert texts == ["processed"]
            assert endpoint.post(github("d1", BODY), BODY).text == "duplicate"
        assert shop.effects() == 1


def test_what_takes_too_long_goes_on_and_is_a_duplicate_then(lite: Shop) -> None:
    go = threading.Event()
    lite.handler(lambda *_: go.wait(DEADLINE_S))
    with serving(hook(lite, answer_within=timedelta(seconds=0.3))) as endpoint:
        assert endpoint.post(github("d1", BODY), BODY).status == 503
        go.set()
        eventually(lambda: statuses(lite.raw) == {"processed": 1})
        assert endpoint.post(github("d1", BODY), BODY).text == "duplicate"
    assert lite.effects() == 1


def test_an_unreachable_database_is_503() -> None:
    limits = Limits(unavailable_for=timedelta(seconds=0.1))
    with (
        closed_port() as port,
        App(f"postgresql://nobody@127.0.0.1:{port}/nothing", limits=limits) as app,
    ):
        app.handler(TOPIC, consumer=CONSUMER)(lambda message, tx: None)
        application = Webhook(app.process_async, topic=TOPIC, verify=GitHub(SECRET))
        with serving(application) as endpoint:
            answer = endpoint.post(github("d1", BODY), BODY)
    assert (answer.status, answer.headers["retry-after"]) == (503, "5")


def test_a_wrong_program_is_500(lite: Shop) -> None:
    lite.handler()
    lite.handler(consumer="shipping")
    with serving(hook(lite)) as endpoint:
        assert endpoint.post(github("d1", BODY), BODY).status == 500
    assert stored(lite) == 0


def test_a_verify_of_ones_own(lite: Shop) -> None:
    def verify(headers: Headers, body: bytes) -> Verified | bool:
        if headers.text("x-key") == "truthy":
            return 1  # type: ignore[return-value]
        if headers.text("x-key") == "good":
            return Verified(id="own-1", type="t", key="k")
        return headers.text("x-key") == "plain"

    seen: list[Message[Any]] = []
    lite.handler(lambda message, _: seen.append(message))
    with serving(hook(lite, verify)) as endpoint:
        assert endpoint.post({"X-Key": "truthy"}, BODY).status == 401
        assert endpoint.post({"X-Key": "bad"}, BODY).status == 401
        assert endpoint.post({"X-Key": "good"}, BODY).text == "processed"
        event = {"X-Key": "plain", "ce-id": "7", "ce-source": "/shop", "ce-type": "paid"}
        assert endpoint.post(event | {"X-Odd": b"\xe9\xff"}, BODY).text == "processed"
    assert [(entry.id, entry.type, entry.key) for entry in seen] == [
        ("own-1", "t", "k"), ("/shop 7", "paid", None),
    ]  # fmt: skip
    assert seen[1].headers.get("x-odd") == b"\xe9\xff"


def test_a_sender_that_hangs_up_does_not_stop_the_transaction(lite: Shop) -> None:
    entered, go = threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        entered.set()
        assert go.wait(DEADLINE_S)

    lite.handler(hold)
    with serving(hook(lite)) as endpoint:
        headers = "".join(f"{name}: {value}\r\n" for name, value in github("d1", BODY).items())
        request = f"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {len(BODY)}\r\n{headers}\r\n"
        with socket.create_connection(("127.0.0.1", endpoint.port)) as connection:
            connection.sendall(request.encode() + BODY)
            assert entered.wait(DEADLINE_S)
        go.set()
        eventually(lambda: statuses(lite.raw) == {"processed": 1})


def test_the_servers_end_waits_for_what_is_running() -> None:
    """Without a server: the lifespan protocol itself."""
    ended: list[str] = []

    async def scenario() -> None:
        started, go = asyncio.Event(), asyncio.Event()

        async def process(message: Message[Any]) -> Outcome:
            started.set()
            await go.wait()
            ended.append(str(message.id))
            return Outcome.PROCESSED

        application = Webhook(
            process, topic="t", verify=lambda *_: Verified(id="m"),
            answer_within=timedelta(seconds=0.01),
        )  # fmt: skip
        sent: list[Any] = []

        async def send(event: Any) -> None:
            sent.append(event)

        async def request() -> Any:
            return {"type": "http.request", "body": b"{}"}

        scope = {"type": "http", "method": "POST", "headers": [], "path": "/"}
        await application(scope, request, send)
        assert sent[0]["status"] == 503
        assert started.is_set()

        async def shutdown() -> Any:
            asyncio.get_running_loop().call_later(0.01, go.set)
            return {"type": "lifespan.shutdown"}

        await application({"type": "lifespan"}, shutdown, send)
        assert sent[-1] == {"type": "lifespan.shutdown.complete"}

    asyncio.run(scenario())
    assert ended == ["m"]


def test_a_fault_of_the_store_that_no_wait_cures_is_not_hidden() -> None:
    async def process(message: Message[Any]) -> Outcome:
        raise StoreError("refused")

    application = Webhook(process, topic="t", verify=lambda *_: True)
    with serving(application) as endpoint:
        assert endpoint.post({}, BODY).status == 500


def test_github_events_each_delivered_twice(lite: Shop) -> None:
    lite.handler(mode="stored", payload_hash="raw")
    bodies = events()
    with serving(hook(lite)) as endpoint:
        for _ in range(2):
            for own_id, event, body in bodies:
                assert endpoint.post(github(own_id, body, event), body).status == 200
    assert statuses(lite.raw) == {"pending": len(bodies)}
    while lite.work(limit=100):
        pass
    assert lite.effects() == len(bodies) == EVENTS
    counts = lite.raw.rows("SELECT message_id, count(*) FROM effect GROUP BY message_id")
    assert {count for _, count in counts} == {1}
    assert {own_id for own_id, _ in counts} == {own_id for own_id, _, _ in bodies}


def events() -> list[tuple[str, str, bytes]]:
    if not FILE.exists():
        return [
            (f"made-up-{number}", "push", json.dumps({"number": number}).encode())
            for number in range(EVENTS)
        ]
    return [
        (each["id"], each["type"].split(".")[2], json.dumps(each["data"]).encode())
        for each in map(json.loads, FILE.read_text().splitlines())
    ]


def test_what_is_consumed_goes_to_every_consumer_and_may_be_mounted(lite: Shop) -> None:
    lite.handler()
    lite.handler(lambda *_: _fail(), consumer="shipping")
    webhook = Webhook(topic=TOPIC, verify=GitHub(SECRET))
    with serving(webhook) as endpoint:
        # nobody takes its messages yet
        assert endpoint.post(github("d1", BODY), BODY).status == 500
    lite.app.consume(webhook)
    assert (lite.app.webhooks, webhook.path, webhook.in_flight) == (
        [webhook],
        f"/webhooks/{TOPIC}",
        0,
    )
    with serving(webhook) as endpoint:
        assert endpoint.post(github("d1", BODY), BODY).text == "processed, failed"
        assert endpoint.post(github("d1", BODY), BODY).text == "duplicate, deferred"
    assert lite.effects() == 1
    assert webhook.answers == {200: 2}


def _fail() -> None:
    raise ValueError("no")


def test_consume_keeps_the_process_that_was_given(lite: Shop) -> None:
    lite.handler()
    webhook = Webhook(lite.app.send_async, topic=TOPIC, verify=GitHub(SECRET))
    lite.app.consume(webhook)
    with serving(webhook) as endpoint:
        assert endpoint.post(github("d1", BODY), BODY).text == "deferred"
    assert lite.effects() == 0


@pytest.mark.parametrize(
    "options",
    [
        {"path": "hook"},
        {"path": "/hook?x=1"},
        {"in_flight_max": 0},
        {"body_bytes": 0},
        {"quarantined_status": 204},
        {"quarantined_status": 302},
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigurationError, match=r"path is|must be 1 or more|quarantined_status is"
    ):
        Webhook(topic=TOPIC, verify=GitHub(SECRET), **options)


def test_a_webhook_is_consumed_without_topics(lite: Shop) -> None:
    with pytest.raises(ConfigurationError, match="has one topic"):
        lite.app.consume(Webhook(topic=TOPIC, verify=GitHub(SECRET)), ["another"])
