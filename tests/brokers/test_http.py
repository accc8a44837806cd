"""Outgoing HTTP: the requests an endpoint gets, and what each of its answers does to the message."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import hmac
import re
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from email.utils import formatdate
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.proxy import closed_port
from tests.support.waiting import DEADLINE_S, room
from tests.support.webhook.senders import STANDARD_SECRET, Endpoint, serving
from tests.support.workers import run_of
from txbox import App, Message, Outgoing, RelayPolicy, RetryPolicy
from txbox.brokers.envelope import HTTP, as_binary
from txbox.brokers.http import Http, _retry_after_s, is_public
from txbox.brokers.webhook import StandardWebhooks, Webhook
from txbox.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigurationError,
    MessageRefused,
    NotTried,
)
from txbox.events import Event, OutgoingDead, OutgoingFailed, RelayPaused
from txbox.identity import message_id, scoped_id
from txbox.outcome import Outcome
from txbox.worker.relay import Relay

WITHIN_S = 10.0
Reply = tuple[int, dict[str, str], bytes]


class Scripted:
    """An ASGI endpoint that answers as the body of the request says, and records the requests."""

    def __init__(self, answers: dict[bytes, list[Reply]] | None = None) -> None:
        self.answers = answers or {}
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.together = self.most = 0
        self.meet: Callable[[], Any] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            event = await receive()
            body += event.get("body", b"")
            if not event.get("more_body"):
                break
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.requests.append((scope["raw_path"].decode(), headers, body))
        if self.meet is not None:
            await self.meet()
        replies = self.answers.get(body, [(204, {}, b"")])
        status, given, text = replies.pop(0) if len(replies) > 1 else replies[0]
        pairs = [(name.encode(), value.encode()) for name, value in given.items()]
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        await send({"type": "http.response.body", "body": text})


def message(name: str = "m1", **more: Any) -> Message[Any]:
    return Message(**{"topic": "orders", "id": name, "payload": b"{}", **more})


def url(endpoint: Endpoint, path: str = "/hook") -> str:
    return f"http://127.0.0.1:{endpoint.port}{path}"


def answers(http: Http, *messages: Message[Any], within_s: float = WITHIN_S) -> list[Any]:
    with closing(http.publisher()) as publisher:
        return list(publisher.publish(messages, within_s))


def test_request_is_signed_and_carries_the_message() -> None:
    endpoint_app = Scripted()
    old = base64.b64encode(b"x" * 24).decode()
    with serving(endpoint_app) as endpoint:
        http = Http(
            url(endpoint, "/{topic}?to={topic}"), STANDARD_SECRET, old, private=True,
            headers={"authorization": "Bearer t"},
        )  # fmt: skip
        given = message(
            "e:1", topic="a/b", type="order.paid", key="k1", payload=b"\xff{}", content_type="text/x",
            headers=(("traceparent", "00-1"), ("host", "evil"), ("webhook-signature", "v1,x"), ("x-note", "é")),
        )  # fmt: skip
        assert answers(http, given) == [None]
    ((path, headers, body),) = endpoint_app.requests
    assert path == "/a%2Fb"
    assert body == b"\xff{}"
    assert headers["webhook-id"] == headers["idempotency-key"] == "e:1"
    assert headers["ce-type"] == "order.paid"
    assert headers["ce-subject"] == "k1"
    assert headers["content-type"] == "text/x"
    assert headers["traceparent"] == "00-1"
    assert headers["x-note"] == "é"
    assert headers["authorization"] == "Bearer t"
    assert headers["host"] == f"127.0.0.1:{endpoint.port}"
    content = b"e:1." + headers["webhook-timestamp"].encode() + b"." + body
    keys = [base64.b64decode(STANDARD_SECRET.removeprefix("whsec_")), b"x" * 24]
    expected = [
        "v1," + base64.b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode()
        for key in keys
    ]
    assert headers["webhook-signature"].split() == expected


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (200, None), (204, None), (299, None),
        (408, BrokerError), (425, BrokerError), (429, BrokerError), (500, BrokerError), (503, BrokerError),
        (301, MessageRefused), (400, MessageRefused), (401, MessageRefused), (403, MessageRefused),
        (404, MessageRefused), (410, MessageRefused),
    ],
)  # fmt: skip
def test_answer_decides_what_becomes_of_a_message(status: int, kind: type | None) -> None:
    elsewhere = {"location": "/elsewhere"}
    endpoint_app = Scripted({b"{}": [(status, elsewhere, b"" if status == 204 else b"why\nmore")]})
    with serving(endpoint_app) as endpoint:
        (answer,) = answers(Http(url(endpoint), private=True), message())
    assert len(endpoint_app.requests) == 1
    assert answer is None if kind is None else type(answer) is kind
    if kind is not None:
        assert str(answer) == f"The endpoint answered {status}: why"


@pytest.mark.parametrize(
    ("said", "least_s", "most_s"),
    [
        ("120", 120, 120), ("0", 0, 0), ("-5", 0, 0), ("1e9", 3600, 3600), ("nan", None, None),
        ("soon", None, None), (3000, 2400, 3000), (-60, 0, 0),
    ],
)  # fmt: skip
def test_retry_after_is_read_as_seconds_or_date(
    said: str | int, least_s: float | None, most_s: float | None
) -> None:
    """A number stands for a date that many seconds from now."""
    value = said if isinstance(said, str) else formatdate(time.time() + said, usegmt=True)
    endpoint_app = Scripted({b"{}": [(503, {"retry-after": value}, b"")]})
    with serving(endpoint_app) as endpoint:
        (answer,) = answers(Http(url(endpoint), private=True), message())
    if least_s is None or most_s is None:
        assert answer.retry_after_s is None
    else:
        assert least_s <= answer.retry_after_s <= most_s


@pytest.mark.parametrize("length", [b"content-length: 9", b"transfer-encoding: chunked"])
@pytest.mark.parametrize("ends", ["hangs", "breaks off"])
@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"200 OK", None), (b"503 Busy\r\nretry-after: 600", BrokerError), (b"410 Gone", MessageRefused),
    ],
)  # fmt: skip
def test_the_head_stands_whatever_becomes_of_the_body(
    head: bytes, kind: type | None, ends: str, length: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txbox.brokers.http._BODY_S", 0.2)
    over = threading.Event()

    def answer_head(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 " + head + b"\r\n" + length + b"\r\n\r\n")
        if ends == "hangs":
            over.wait(DEADLINE_S)

    with raw(answer_head) as (address, connections):
        started = time.monotonic()
        (answer,) = answers(Http(address, private=True), message())
        took_s = time.monotonic() - started
        over.set()
    assert answer is None if kind is None else type(answer) is kind
    assert len(connections) == 1
    if kind is BrokerError:
        assert answer.retry_after_s == 600
    assert took_s < room(4)


def test_the_text_of_an_error_is_never_compressed() -> None:
    compressed = gzip.compress(b"no such order")
    endpoint_app = Scripted(
        {
            b"{}": [(400, {}, b"no such order")],
            b"1": [(400, {"content-encoding": "gzip"}, compressed)],
        }
    )
    with serving(endpoint_app) as endpoint:
        first, second = answers(
            Http(url(endpoint), private=True, concurrency=1), message(), message("m2", payload=b"1")
        )
    assert str(first) == "The endpoint answered 400: no such order"
    # it was not asked for
    assert [headers["accept-encoding"] for _, headers, _ in endpoint_app.requests] == [
        "identity"
    ] * 2
    assert str(second) == "The endpoint answered 400"


def test_one_bad_message_costs_its_neighbours_nothing() -> None:
    endpoint_app = Scripted({b"bad": [(400, {}, b"")], b"busy": [(503, {}, b"")]})
    with serving(endpoint_app) as endpoint:
        payloads = [b"1", b"bad", b"2", b"busy", b"3"]
        found = answers(
            Http(url(endpoint), private=True), *(message(repr(p), payload=p) for p in payloads)
        )
    assert [type(answer) for answer in found] == [
        type(None), MessageRefused, type(None), BrokerError, type(None)
    ]  # fmt: skip


def test_requests_go_side_by_side_up_to_the_bound() -> None:
    endpoint_app = Scripted()

    three = asyncio.Event()

    async def meet() -> None:
        endpoint_app.together += 1
        endpoint_app.most = max(endpoint_app.most, endpoint_app.together)
        if endpoint_app.together == 3:
            three.set()
        # nobody gets an answer until three requests are here
        await three.wait()
        endpoint_app.together -= 1

    endpoint_app.meet = meet
    with serving(endpoint_app) as endpoint:
        http = Http(url(endpoint), private=True, concurrency=3)
        assert answers(http, *(message(str(n)) for n in range(12))) == [None] * 12
    assert endpoint_app.most == 3


def test_a_short_confirm_within_leaves_time_for_the_request() -> None:
    with (
        serving(Scripted()) as endpoint,
        closing(Http(url(endpoint), private=True).publisher()) as publisher,
    ):
        assert list(publisher.publish([message()], WITHIN_S)) == [None]
        (answer,) = publisher.publish([message("m2")], 0.5)
        assert not isinstance(answer, NotTried)


@contextmanager
def raw(behave: Callable[[socket.socket], None]) -> Iterator[tuple[str, list[int]]]:
    """A server that accepts and then does what it is told; the list holds a number for each connection."""
    connections: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                connections.append(1)
                with connection:
                    behave(connection)

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/", connections
        listener.shutdown(socket.SHUT_RDWR)


def hangs_up(connection: socket.socket) -> None:
    connection.recv(65536)


def garbage(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(b"SSH-2.0-OpenSSH\r\n\r\n")


def silent(connection: socket.socket) -> None:
    while connection.recv(65536):
        pass


@pytest.mark.parametrize(("behave", "tries"), [(hangs_up, 2), (garbage, 1), (silent, 1)])
def test_no_answer_costs_an_attempt(behave: Callable[[socket.socket], None], tries: int) -> None:
    with raw(behave) as (address, connections):
        http = Http(address, private=True, timeout=timedelta(seconds=1))
        (answer,) = answers(http, message())
    assert type(answer) is BrokerError
    assert len(connections) == tries


def test_a_request_that_makes_the_endpoint_fail_late_costs_an_attempt() -> None:
    """Else the relay would take it for an endpoint that is away, and send the same message for ever."""

    def fails_late(connection: socket.socket) -> None:
        connection.recv(65536)
        time.sleep(1.0)

    with raw(fails_late) as (address, connections):
        (answer,) = answers(Http(address, private=True), message(), within_s=2.0)
    assert type(answer) is BrokerError
    assert len(connections) == 2


def test_a_request_that_ends_the_endpoint_costs_an_attempt() -> None:
    """An endpoint that dies of a message refuses connections while it starts again, as one that is away does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def dies() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                # before the request is broken off
                listener.close()

        threading.Thread(target=dies, daemon=True).start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        first, second = answers(
            Http(address, private=True, concurrency=1), message("1"), message("2")
        )
    assert type(first) is BrokerError
    assert type(second) is NotTried


def test_what_there_was_no_time_for_was_not_tried() -> None:
    with raw(silent) as (address, _):
        http = Http(address, private=True, concurrency=1)
        first, second = answers(http, message("1"), message("2"), within_s=1.5)
    assert type(first) is BrokerError
    assert type(second) is NotTried


def test_what_hangs_past_its_bound_ends_no_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    # as on a machine that hangs: requests would outlast the call
    monkeypatch.setattr("txbox.brokers.base.LAST_WORD_S", -1.0)
    with raw(silent) as (address, _), pytest.raises(BrokerUnavailable):
        answers(Http(address, private=True), message(), within_s=2.0)


def test_who_cannot_be_connected_to_is_unavailable() -> None:
    with closed_port() as port:
        for address in (f"http://127.0.0.1:{port}/", "http://nowhere.invalid/"):
            with pytest.raises(BrokerUnavailable):
                answers(Http(address, private=True), message())


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.0.0.1", "172.16.5.4", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "::1", "fe80::1%eth0", "fc00::1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "ff02::1",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)
    host = f"[{address}]" if ":" in address else address
    with pytest.raises(ConfigurationError, match=r"public address|URL such as"):
        Http(f"https://{host}/hook")


@pytest.mark.parametrize(
    "host", ["127.1", "2130706433", "0177.0.0.1", "127.0.0.1.", "0x7f000001", "0x7f.1", "0x", "1.2.3.4.5"],
)  # fmt: skip
def test_numbers_that_only_those_who_connect_take_for_an_address_are_refused(host: str) -> None:
    with pytest.raises(ConfigurationError, match="not a public address"):
        Http(f"https://{host}/hook")


@pytest.mark.parametrize("host", ["localhost", "localhost."])
def test_other_spellings_of_this_machine_are_looked_up_and_not_connected_to(host: str) -> None:
    with raw(silent) as (address, connections):
        port = address.rstrip("/").rpartition(":")[2]
        with pytest.raises(BrokerUnavailable):
            answers(Http(f"https://{host}:{port}/"), message())
    assert connections == []


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1::1", "64:ff9b::5db8:d822"])
def test_addresses_that_are_public(address: str) -> None:
    assert is_public(address)


def test_a_name_that_leads_to_this_machine_is_not_connected_to() -> None:
    with raw(silent) as (address, connections):
        port = address.rstrip("/").rpartition(":")[2]
        with pytest.raises(BrokerUnavailable, match="not public"):
            answers(Http(f"https://localhost:{port}/"), message())
    assert connections == []


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ("example.com/hook", {}), ("ftp://example.com", {}), ("https://", {}), ("https://a:b@example.com", {}),
        ("https://{topic}.example.com/", {}), ("http://example.com/", {}), ("https://example.com:x/", {}),
        ("https://example.com/", {"timeout": timedelta(0)}), ("https://example.com/", {"concurrency": 0}),
        ("https://example.com/", {"headers": {"a b": "1"}}), ("https://example.com/", {"headers": {"a": "1\r\nb: 2"}}),
        *(
            (f"https://{host}/", {"private": private})
            for private in (False, True)
            for host in (
                "hooks..example.com", ".example.com", "..", f"{'x' * 64}.example.com", ".".join(["x" * 60] * 5),
                "127。0。0。1", "⑫⑦.0.0.1", "\uff11\uff12\uff17.0.0.1", "ﬁ.example.com", "bücher.example",
                "a\u200bb.example", "a b.example", "a%2eb.example", "-a.example", "a-.example", "\udc80.example",
            )
        ),
    ],
)  # fmt: skip
def test_wrong_options_are_refused(given: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Http(given, **options)


@pytest.mark.parametrize(
    "host", ["example.com", "example.com.", "xn--bcher-kva.example", "a_b.example", f"{'x' * 63}.example", "8.8.8.8",
             "[2001:4860:4860::8888]", "4you.example"],
)  # fmt: skip
def test_host_names_are_taken(host: str) -> None:
    assert Http(f"https://{host}:8443/hook").url


def test_a_message_whose_request_raises_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a library does not foresee: the others are sent."""
    post = aiohttp.ClientSession.post

    def raising(self: Any, url: str, **more: Any) -> Any:
        if ("webhook-id", "bad") in more["headers"]:
            raise UnicodeError("label empty or too long")
        return post(self, url, **more)

    monkeypatch.setattr(aiohttp.ClientSession, "post", raising)
    with serving(Scripted()) as endpoint:
        http = Http(url(endpoint), private=True)
        good, bad, last = answers(http, message("m1"), message("bad"), message("m2"))
    assert (good, last) == (None, None)
    assert type(bad) is BrokerError
    assert "UnicodeError" in str(bad)


def test_a_message_that_cannot_be_written_costs_only_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = HTTP.payload

    def raising(_transport: Any, given: Message[Any]) -> bytes:
        if given.id == "bad":
            raise KeyError("of the test")
        return before(given)

    monkeypatch.setattr(type(HTTP), "payload", raising)
    with serving(Scripted()) as endpoint:
        http = Http(url(endpoint), private=True)
        good, bad = answers(http, message("m1"), message("bad"))
    assert good is None
    assert type(bad) is BrokerError


@pytest.mark.parametrize(
    "given",
    [
        "Wed, 21 Oct 99999999999999999999 07:28:00 GMT", "Wed, 21 Oct 0000 07:28:00 GMT", "9" * 5000, "inf", "nan",
        "-1",
        "Wed, 99 Oct 2026 99:28:00 GMT", "Wed, 21 Oct 2026 07:28:00 +99999999999999", "Mon, 01 Jan 0001 00:00:00 +2359",
        "", ",", "() () ()", "1e400", "1_0", "٣", "Wed, 21 Oct 9999 23:59:59 -2359", "0x10", "\xff" * 100,
    ],
)  # fmt: skip
def test_a_retry_after_of_any_content_is_a_wait_or_nothing(given: str) -> None:
    wait_s = _retry_after_s(given)
    assert wait_s is None or 0 <= wait_s <= 3600


def test_short_secret_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="24 to 64"):
        Http("https://example.com/", b"short")


@pytest.mark.parametrize(
    "more",
    [
        {"headers": (("a b", "1"),)}, {"headers": (("a", "1\r\nx: 2"),)}, {"headers": (("a", b"\xff"),)},
        {"headers": (("a", "\udc80"),)}, {"payload": None}, {"type": "\udc80"},
    ],
)  # fmt: skip
def test_what_http_cannot_carry_is_refused_and_not_sent(more: dict[str, Any]) -> None:
    endpoint_app = Scripted()
    with serving(endpoint_app) as endpoint:
        bad, good = answers(Http(url(endpoint), private=True), message(**more), message("good"))
    assert type(bad) is MessageRefused
    assert good is None
    assert [headers["webhook-id"] for _, headers, _ in endpoint_app.requests] == ["good"]


@pytest.mark.parametrize("topic", [".", ".."])
def test_a_topic_of_dots_does_not_lead_out_of_the_path(topic: str) -> None:
    endpoint_app = Scripted()
    with serving(endpoint_app) as endpoint:
        where = url(endpoint, "/hooks/{topic}/in")
        bad, good = answers(Http(where, private=True), message(topic=topic), message(topic="a..b"))
        query = Http(url(endpoint, "/in?topic={topic}"), private=True)
        assert answers(query, message(topic=topic)) == [None]
    assert type(bad) is MessageRefused
    assert good is None
    assert [path for path, _, _ in endpoint_app.requests] == ["/hooks/a..b/in", "/in"]


def quoting(connection: socket.socket) -> None:
    """As many frameworks do: Cannot POST /services/…"""
    path = connection.recv(65536).split()[1]
    body = b"Cannot POST " + path
    connection.sendall(b"HTTP/1.1 404 N\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))


@pytest.mark.parametrize("behave", [quoting, garbage, hangs_up])
def test_path_and_query_of_a_url_are_in_no_name_and_no_error(
    behave: Callable[[socket.socket], None],
) -> None:
    with raw(behave) as (address, _):
        http = Http(f"{address}services/T0/B0/sEcReT?key=hIdDeN%2F1", private=True)
        (answer,) = answers(http, message())
        with closing(http.publisher()) as publisher:
            name = publisher.name
    host = address.removeprefix("http://").rstrip("/")
    assert re.fullmatch(rf"http:{host}/…[0-9a-f]{{6}}", name)
    text = f"{answer}"
    assert isinstance(answer, BrokerError)
    for secret in ("T0", "sEcReT", "hIdDeN"):
        assert secret not in text
    with closing(Http(address, private=True).publisher()) as publisher:
        assert publisher.name == f"http:{host}"


def test_an_unreachable_endpoint_is_named_without_its_path() -> None:
    with closed_port() as port:
        http = Http(f"http://127.0.0.1:{port}/services/sEcReT?key=hIdDeN", private=True)
        with closing(http.publisher()) as publisher, pytest.raises(BrokerUnavailable) as caught:
            publisher.publish([message()], WITHIN_S)
    assert "sEcReT" not in str(caught.value)
    assert "hIdDeN" not in str(caught.value)


def test_attributes_are_percent_encoded_and_read_back() -> None:
    """By the CloudEvents HTTP binding, section 3.1.3.2; other headers are sent as they are."""
    received: list[Message[Any]] = []

    async def process(message: Message[Any]) -> Outcome:
        received.append(message)
        return Outcome.PROCESSED

    hook, endpoint_app = Webhook(process, topic="t", verify=lambda *_: True), Scripted()
    texts = ["Euro € 😀", 'a "quoted" b', "100%", "%41", "two\nlines", "a b", "plain-1:/?&=~", "\\"]
    for name, application in (("raw", endpoint_app), ("read", hook)):
        with serving(application) as endpoint:
            for text in texts:
                headers = (("ce-note", text), ("x-note", "50%41"))
                sent = message(name, key=text, type=text, headers=headers)
                sent = as_binary(sent, f"/shop/{text}", HTTP.prefix)
                assert answers(Http(url(endpoint), private=True), sent) == [None]
    raw = [headers for _, headers, _ in endpoint_app.requests]
    for attribute in ("ce-subject", "ce-type", "ce-note"):
        assert [headers[attribute] for headers in raw] == [
            "Euro%20%E2%82%AC%20%F0%9F%98%80", "a%20%22quoted%22%20b", "100%25", "%2541", "two%0Alines", "a%20b",
            "plain-1:/?&=~", "\\",
        ]  # fmt: skip
    for text, found in zip(texts, received, strict=True):
        assert found.type == text
        assert [found.headers.text(f"ce-{name}") for name in ("subject", "note")] == [text, text]
        assert found.headers.text("ce-source") == f"/shop/{text}"
        assert {headers["x-note"] for headers in raw} == {"50%41"}
        assert found.headers.text("x-note") == "50%41"
        assert message_id(found) == scoped_id(f"/shop/{text}", "read")


# -- through the relay -------------------------------------------------------------------------------


@contextmanager
def relayed(path: Path, http: Http) -> Iterator[tuple[App, list[Event], Relay]]:
    """Yield an App that publishes to the endpoint, its events, and its relay; retries are due at once."""
    events: list[Event] = []
    at_once = RelayPolicy(retry=RetryPolicy(base=timedelta(0), max_attempts=3))
    with App(f"sqlite:///{path}", observers=[events.append], relaying=at_once) as app:
        app.init()
        app.publish(http, topics=["orders"])
        with closing(Relay(run_of(app), app.routes.all()[0])) as relay:
            yield app, events, relay


def stage(app: App, path: Path, *bodies: bytes, key: str | None = None) -> None:
    with closing(sqlite3.connect(path)) as tx:
        app.outbox.stage_many(tx, [Outgoing("orders", body, key=key) for body in bodies])
        tx.commit()


def due(path: Path) -> list[tuple[Any, ...]]:
    """(attempts, status, whether its time has come) of each row."""
    with closing(sqlite3.connect(path)) as tx:
        return tx.execute(
            "SELECT attempts, status, julianday(available_at) > julianday('now') + 1.0 / 24 / 60 FROM txbox_outbox"
        ).fetchall()


def test_from_one_service_to_the_webhook_of_another(tmp_path: Path) -> None:
    """A message is processed once, however often the answer gets lost."""
    path = tmp_path / "sender.db"
    handled: list[Message[Any]] = []
    with App(f"sqlite:///{tmp_path}/receiver.db") as receiver:
        receiver.init()

        @receiver.handler("orders", consumer="billing")
        def bill(message: Message[Any], tx: Any) -> None:
            del tx
            handled.append(message)

        verify = StandardWebhooks(STANDARD_SECRET)
        hook = Webhook(receiver.process_async, topic="orders", verify=verify)
        with (
            serving(hook) as endpoint,
            relayed(path, Http(url(endpoint), STANDARD_SECRET, private=True)) as (sender, _, relay),
        ):
            stage(sender, path, b'{"type": "order.paid"}')
            relay.turn()
            with closing(sqlite3.connect(path)) as tx:
                assert tx.execute("SELECT count(*) FROM txbox_outbox").fetchone() == (0,)
    (message_handled,) = handled
    assert message_handled.type == "order.paid"


def test_the_endpoint_decides_when_it_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "sender.db"
    endpoint_app = Scripted({b"busy": [(429, {"retry-after": "3000"}, b"")]})
    with (
        serving(endpoint_app) as endpoint,
        relayed(path, Http(url(endpoint), private=True)) as (app, events, relay),
    ):
        stage(app, path, b"busy")
        relay.turn()
        assert due(path) == [(1, "pending", 1)]
        assert [type(event) for event in events] == [OutgoingFailed]


def test_refused_messages_are_dead_with_what_was_answered(tmp_path: Path) -> None:
    path = tmp_path / "sender.db"
    endpoint_app = Scripted({b"bad": [(422, {}, b"amount is missing")]})
    with (
        serving(endpoint_app) as endpoint,
        relayed(path, Http(url(endpoint), private=True)) as (app, events, relay),
    ):
        stage(app, path, b"bad", b"good")
        relay.turn()
    assert [row[:2] for row in due(path)] == [(1, "dead")]
    (dead,) = (event for event in events if isinstance(event, OutgoingDead))
    assert dead.error == "The endpoint answered 422: amount is missing"


def test_an_endpoint_that_is_away_pauses_the_relay_and_costs_no_attempt(tmp_path: Path) -> None:
    path = tmp_path / "sender.db"
    with (
        closed_port() as port,
        relayed(path, Http(f"http://127.0.0.1:{port}/", private=True)) as (app, events, relay),
    ):
        stage(app, path, b"1", b"2")
        relay.turn()
        assert [row[:2] for row in due(path)] == [(0, "pending")] * 2
    assert [type(event) for event in events] == [RelayPaused]


def test_of_one_key_nothing_overtakes_what_was_not_tried(tmp_path: Path) -> None:
    path = tmp_path / "sender.db"
    endpoint_app = Scripted()
    with (
        serving(endpoint_app) as endpoint,
        relayed(path, Http(url(endpoint), private=True)) as (app, _, relay),
    ):
        stage(app, path, b"1", b"2", b"3", key="k")
        publisher = relay._publisher
        assert publisher is not None
        publish, calls = publisher.publish, []

        def not_tried_at_first(messages: Any, within_s: float) -> Any:
            calls.append([message.payload for message in messages])
            if len(calls) == 1:
                return [NotTried("no time left") for _ in messages]
            return publish(messages, within_s)

        publisher.publish = not_tried_at_first  # type: ignore[method-assign]
        while relay.turn():
            pass
    assert calls == [[b"1"], [b"1"], [b"2"], [b"3"]]
    assert [body for _, _, body in endpoint_app.requests] == [b"1", b"2", b"3"]
