"""Whatever text comes from outside, only errors of ours come of it, and soon; `make fuzz` takes much more of it.

`CORPUS` has what has failed, or nearly; it is tried first, always.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import several
from tests.ui.conftest import Browser, filled_sqlite, serve
from txbox import App, Message
from txbox.admin import InboxFilter, OutboxFilter, QuarantineFilter
from txbox.brokers import envelope
from txbox.brokers.http import Http, _retry_after_s
from txbox.errors import TxboxError
from txbox.identity import canonical_id, check_fields, check_headers, payload_hash
from txbox.message import Headers
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
    "URL": (Http, (texts,), (TxboxError,)),
    "filter": (_filter, (FILTERS, QUERY), (Refused, TxboxError)),
    "key of a form": (_picked, (FILTERS, texts), (Refused, TxboxError)),
    "place to go to": (is_ours, (texts,), ()),
    "text on a terminal": (visible, (anything,), ()),
    "difference": (differences, (st.one_of(st.none(), payloads), st.one_of(st.none(), payloads)), ()),
    "payload on a page": (readable, (payloads,), ()),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_text_from_outside_raises_nothing_but_errors_of_ours(name: str) -> None:
    read, arguments, errors = READERS[name]

    @several(120)
    @given(st.tuples(*arguments))
    def reads(values: tuple[Any, ...]) -> None:
        began = time.thread_time()
        with suppress(*errors):
            read(*values)
        assert time.thread_time() - began < _LIMIT_S

    reads()
    for text in CORPUS:
        # in each place that takes text alone
        if all(strategy in (texts, anything) for strategy in arguments):
            with suppress(*errors):
                read(*[text] * len(arguments))


PATHS = (
    "/", "/messages", "/message", "/outbox", "/outgoing", "/quarantine", "/quarantined", "/failures", "/workers",
    "/database", "/audit", "/operations", "/operation",
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
