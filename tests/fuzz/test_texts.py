"""Whatever text comes from outside, only errors of ours come of it, and soon; `make fuzz` takes much more of it.

`CORPUS` has what has failed, or nearly; it is tried first, always.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import hmac
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.brokers.test_file import Kept, read
from tests.fuzz import several
from tests.ui.conftest import Browser, filled_sqlite, serve
from txbox import App, Message
from txbox.admin import InboxFilter, OutboxFilter, QuarantineFilter
from txbox.admin.tables import mark_of, number_of
from txbox.brokers import envelope
from txbox.brokers.file import File
from txbox.brokers.http import Http, _retry_after_s
from txbox.brokers.kafka import Kafka
from txbox.brokers.nats import Nats
from txbox.brokers.rabbitmq import RabbitMQ
from txbox.brokers.redis import RedisStreams
from txbox.brokers.webhook import GitHub, StandardWebhooks, Stripe, Verified, Verify
from txbox.cli.change import _message
from txbox.errors import BrokerError, ConfigurationError, TxboxError
from txbox.identity import canonical_id, check_fields, check_headers, payload_hash
from txbox.message import Headers
from txbox.testing.proof import read_messages
from txbox.text import duration_of, visible
from txbox.ui.pages import Refused, _filter, _picked, is_ours
from txbox.ui.render import differences, readable

__all__ = ["filled_sqlite", "serve"]  # fixtures

#: Far above what any of these takes, also on a busy machine, and far below what quadratic time takes for _LONG.
_LIMIT_S = 2.0
_LONG = 20_000

CORPUS = [
    "", " ", "\0", "\ud800", "\u202e", "1" * _LONG, "a" * _LONG, "=" * _LONG, "[" * _LONG, '"' * _LONG, "%" * _LONG,
    "1e999", "-1", "٣s", "9" * 400 + "d", "Wed, 21 Oct 99999999999999999999 07:28:00 GMT", "NaN", "Infinity", "0x7f.1",
    "https://hooks..example.com", "https://⑫⑦.0.0.1", "https://[::1", "http://[", "https://a:99999/", "..", "//x",
    "//:A",
    '{"id": "1", "source": "s"}', '{"data": ' + "[" * 5_000, '{"id": 1e400}', '{"a": 1, "a": 2}', "\ufeff{}",
]  # fmt: skip

texts = st.one_of(
    st.sampled_from(CORPUS),
    st.text(max_size=60),
    st.text(st.characters(codec=None), max_size=20),
    st.builds(lambda part, times: part * times, st.text(min_size=1, max_size=4), st.integers(1, _LONG // 4)),
    st.lists(st.sampled_from([*"0123456789smhd:/?#[]@%.,;=\"'{}\\ \n\t", "Wed, ", " GMT", "é", "\0"])).map("".join),
)  # fmt: skip
payloads = st.one_of(
    st.binary(max_size=200), texts.map(lambda text: text.encode("utf-8", "surrogatepass"))
)
times = st.one_of(st.none(), st.datetimes(), st.datetimes(timezones=st.just(UTC)))
anything = st.one_of(
    texts,
    payloads,
    st.integers(),
    st.floats(),
    st.none(),
    st.booleans(),
    st.lists(texts, max_size=2),
)
pairs = st.lists(st.tuples(texts, st.one_of(texts, payloads)), max_size=4)


def fields(values: Any, at: Any, headers: Any) -> None:
    topic, key, kind, identity, sequence = values
    check_fields(
        Message(
            id=identity, topic=topic, payload=b"", key=key, type=kind, sequence=sequence, time=at
        )
    )
    check_headers(headers)


def delivered(
    transport: Any, topic: str, payload: bytes | None, headers: Any, media: str | None
) -> None:
    """Read what a broker delivers, and write what was read as every transport writes it."""
    delivery = transport.delivery(
        topic, payload, headers, origin={}, tag=1, content_type=media, stored_at=datetime.now(UTC)
    )
    message = delivery.message
    if message is None:
        assert delivery.problem
        return
    payload_hash(message)
    for each in (envelope.KAFKA, envelope.HTTP, envelope.NATS):
        list(each.headers(message))
    envelope.as_binary(message, "source", "ce-")
    envelope.as_structured(message, "source")


_SECRET = b"s" * 32
_OF_WEBHOOKS = (
    "stripe-signature", "x-hub-signature-256", "x-github-delivery", "x-github-event", "webhook-id", "webhook-timestamp",
    "webhook-signature", "svix-id", "svix-timestamp", "svix-signature",
)  # fmt: skip


def webhook(headers: Any, identity: str, body: bytes) -> None:
    """A request of anybody's is not genuine; one that is signed is read."""
    schemes: tuple[Verify, ...] = (Stripe(_SECRET), GitHub(_SECRET), StandardWebhooks(_SECRET))
    unsigned = [*headers, ("webhook-id", identity), ("webhook-timestamp", str(int(time.time())))]
    for scheme in schemes:
        assert scheme(Headers(unsigned), body) is False
    moment = str(int(time.time()))

    def mac(content: bytes) -> bytes:
        return hmac.new(_SECRET, content, hashlib.sha256).digest()

    stripe = f"{identity},t={moment},v1={mac(moment.encode() + b'.' + body).hex()}"
    content = f"{identity}.{moment}.".encode("utf-8", "surrogatepass") + body
    standard = base64.b64encode(mac(content)).decode()
    genuine = (
        [("stripe-signature", stripe)],
        [("x-hub-signature-256", f"sha256={mac(body).hex()}"), ("x-github-delivery", identity)],
        [("webhook-id", identity), ("webhook-timestamp", moment), ("webhook-signature", f"v1,{standard}")],
    )  # fmt: skip
    for scheme, pairs in zip(schemes, genuine, strict=True):
        with suppress(TxboxError):
            assert isinstance(scheme(Headers(pairs), body), Verified | bool)


def b64url(text: bytes) -> str:
    return base64.urlsafe_b64encode(text).decode()


def to_send(payload: bytes) -> None:
    """What `txbox send --data` makes of it."""
    unsaid = dict.fromkeys(["file", "content_type", "message_id", "type", "key"])
    _message(argparse.Namespace(topic="t", data=payload, header=[], **unsaid))


DATABASES = st.sampled_from(
    ["", "sqlite:///", "sqlite+aiosqlite:///", "postgresql://", "postgresql+asyncpg://", "mysql://", "mysql+asyncmy://"]
)  # fmt: skip
BROKERS: st.SearchStrategy[tuple[Callable[[str], Any], str]] = st.sampled_from(
    [
        (RedisStreams, "redis://"), (RedisStreams, "unix://"), (RabbitMQ, "amqp://"), (RabbitMQ, "amqps://"),
        (Nats, "nats://"), (Nats, "tls://"), (Kafka, ""), (Http, "https://"),
    ]
)  # fmt: skip


TRANSPORTS = st.sampled_from(
    [envelope.KAFKA, envelope.RABBITMQ, envelope.SQS, envelope.NATS, envelope.REDIS, envelope.HTTP, envelope.FILE]
)  # fmt: skip
MEDIA = st.one_of(
    st.none(), texts,
    st.sampled_from([envelope.EVENT, "application/cloudevents-batch+json", "application/json; charset=x"]),
)  # fmt: skip
FILTERS = st.sampled_from([InboxFilter, OutboxFilter, QuarantineFilter])
QUERY = st.dictionaries(
    st.sampled_from(["consumer", "message_id", "status", "older_than", "topic", "type", "key", "hash", "route"]), texts
)  # fmt: skip

#: What reads text from outside: its arguments, and the errors that it may answer with.
READERS: dict[str, tuple[Callable[..., object], tuple[st.SearchStrategy[Any], ...], tuple[type[Exception], ...]]] = {
    "id": (canonical_id, (anything,), (TxboxError,)),
    "fields": (fields, (st.tuples(*[anything] * 5), times, pairs.map(Headers)), (TxboxError,)),
    "envelope": (delivered, (TRANSPORTS, texts, st.one_of(st.none(), payloads), pairs, MEDIA), (TxboxError,)),
    "duration": (duration_of, (texts,), (ValueError,)),
    "Retry-After": (_retry_after_s, (texts,), ()),
    "URL of an endpoint": (Http, (texts,), (TxboxError,)),
    "URL of a database": (lambda kind, text: App(kind + text), (DATABASES, texts), (TxboxError,)),
    "URL of a broker": (lambda kind, text: kind[0](kind[1] + text).publisher(), (BROKERS, texts), (TxboxError,)),
    "webhook": (webhook, (st.lists(st.tuples(st.sampled_from(_OF_WEBHOOKS), texts), max_size=4), texts, payloads), ()),
    "place on a page": (mark_of, (texts,), (TxboxError,)),
    "place on a page, in base64": (lambda place: mark_of(b64url(place)), (payloads,), (TxboxError,)),
    "number of a row": (number_of, (st.one_of(texts, st.integers()),), (TxboxError,)),
    "payload to send": (to_send, (payloads,), (TxboxError,)),
    "filter": (_filter, (FILTERS, QUERY), (Refused, TxboxError)),
    "key of a form": (_picked, (FILTERS, texts), (Refused, TxboxError)),
    "place to go to": (is_ours, (texts,), ()),
    "text on a terminal": (visible, (anything,), ()),
    "difference": (differences, (st.one_of(st.none(), payloads), st.one_of(st.none(), payloads)), ()),
    "payload on a page": (readable, (payloads,), ()),
}  # fmt: skip


@contextmanager
def quickly() -> Iterator[None]:
    began = time.thread_time()
    yield
    assert time.thread_time() - began < _LIMIT_S


@pytest.mark.parametrize("name", READERS)
def test_text_from_outside_raises_nothing_but_errors_of_ours(name: str) -> None:
    reader, arguments, errors = READERS[name]

    @several(120)
    @given(st.tuples(*arguments))
    def reads(values: tuple[Any, ...]) -> None:
        with quickly(), suppress(*errors):
            reader(*values)

    reads()
    for text in CORPUS:
        # in each place that takes texts or payloads alone
        with suppress(*errors):
            if all(strategy is payloads for strategy in arguments):
                reader(*[text.encode("utf-8", "surrogatepass")] * len(arguments))
            elif all(strategy in (texts, anything) for strategy in arguments):
                reader(*[text] * len(arguments))


def test_each_line_of_a_file_is_delivered_once_whatever_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    @several(80)
    @given(st.lists(payloads, max_size=6), st.sampled_from([1, 3, 100, _LONG]))
    def reads(lines: list[bytes], longest: int) -> None:
        content = b"\n".join(lines)
        path.write_bytes(content)
        progress = Kept()
        with quickly():
            deliveries = read(File(path, line_bytes=longest), progress)
        *ended, last = content.split(b"\n")
        whole = [*(line + b"\n" for line in ended), last]
        assert len(deliveries) == sum(len(line) > longest or bool(line.strip()) for line in whole)
        assert all((each.message is None) is (each.problem is not None) for each in deliveries)
        assert read(File(path, line_bytes=longest), progress) == []

    reads()


def test_a_file_of_messages_is_read_or_its_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "messages.jsonl"

    @several(40)
    @given(texts)
    def reads(text: str) -> None:
        path.write_text(text, "utf-8", errors="surrogatepass")
        with quickly(), suppress(ConfigurationError):
            read_messages(path)

    reads()


HEADS = st.lists(
    st.tuples(
        st.sampled_from(["Retry-After", "Content-Length", "Transfer-Encoding", "Content-Encoding", "Location", "X"]),
        st.one_of(texts.map(lambda text: text[:4_000]), st.sampled_from(["chunked", "gzip", "3", "-1"])),
    ),
    max_size=3,
)  # fmt: skip


@contextmanager
def endpoint(answer: list[bytes]) -> Iterator[str]:
    """A server that sends what is in `answer` to whoever asks, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, suppress(OSError):
                    connection.recv(65_536)
                    connection.sendall(answer[0])
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65_536):
                        pass

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        listener.shutdown(socket.SHUT_RDWR)


def test_whatever_an_endpoint_answers_is_an_answer() -> None:
    """Only a whole head with a status of 2xx is a confirmation."""
    answer = [b""]
    with endpoint(answer) as url, closing(Http(url, private=True).publisher()) as publisher:

        @several(40)
        @given(
            st.one_of(st.sampled_from(["200", "204", "429", "503", "404", "302", "101"]), texts),
            HEADS, st.binary(max_size=200), st.integers(0, 400),
        )  # fmt: skip
        def answers(status: str, heads: list[tuple[str, str]], body: bytes, cut: int) -> None:
            lines = [f"HTTP/1.1 {status} X", *(f"{name}: {value}" for name, value in heads)]
            whole = "\r\n".join(lines).encode("utf-8", "surrogatepass") + b"\r\n\r\n" + body
            answer[0] = whole[: len(whole) - cut]
            message = Message(id="m", topic="t", payload=b"{}")
            with quickly():
                (said,) = publisher.publish([message], 20.0)
            assert said is None or isinstance(said, BrokerError)
            if said is None:
                assert b" 20" in answer[0]

        answers()


PATHS = (
    "/", "/messages", "/message", "/outbox", "/outgoing", "/quarantine", "/quarantined", "/failures", "/workers",
    "/database", "/audit",
)  # fmt: skip
PARAMETERS = (
    "consumer", "message_id", "status", "older_than", "topic", "hash", "before", "after", "page", "name", "next"
)  # fmt: skip


def test_no_parameter_of_a_page_is_an_error_of_the_server(
    filled_sqlite: App, serve: Callable[..., Browser]
) -> None:
    browser = serve(filled_sqlite)

    @several(60)
    @given(
        st.sampled_from(PATHS),
        st.dictionaries(
            st.sampled_from(PARAMETERS), texts.filter(lambda text: len(text) < 4_000), max_size=3
        ),
    )
    def asks(path: str, query: dict[str, str]) -> None:
        answer = browser.get(f"{path}?{urlencode(query, errors='surrogatepass')}")
        assert answer.status < 500, (path, query, answer.text[-400:])

    asks()
