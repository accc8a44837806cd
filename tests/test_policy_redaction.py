"""What the rules of App(redact=…) hide, where, and what they leave as it is."""

from __future__ import annotations

import json
import logging
import re
import time
from datetime import timedelta
from typing import Any

import pytest

from tests.admin.test_admin_outbox import relayed
from tests.store.test_codec import Xor, everything
from tests.support.recording import Recorder
from tests.support.shop import opened, paid
from txbox import (
    App,
    ConfigurationError,
    Message,
    Outcome,
    Redaction,
    Reject,
    RelayPolicy,
    RetryPolicy,
)
from txbox.admin import Admin, InboxFilter, OutboxFilter, QuarantineFilter, views
from txbox.errors import BrokerError
from txbox.events import MessageDead, MessageFailed, OutgoingFailed
from txbox.message import HeaderValue

CARD = "4111-1111-1111-1111"
ORDER = {
    "order": 7,
    "card": {"number": CARD, "brand": "v"},
    "items": [{"sku": "a", "note": CARD}, [{"note": CARD}], "note"],
}
RULES = Redaction(
    headers=("X-Customer",),
    fields=("body.card.number", "body.items.note", "result.card"),
    errors=(r"\d{4}(-\d{4}){3}",),
)
LATER = RetryPolicy(base=timedelta(hours=1))
HEADERS: list[tuple[str, HeaderValue]] = [
    ("x-customer", "Ada"),
    ("x-one", "1"),
    ("X-CUSTOMER", b"Bob"),
]


def explode(text: str) -> str:
    raise RuntimeError("a rule that is broken")


def shown(admin: Admin, message_id: str = "a") -> Any:
    (found,) = admin.show(InboxFilter(consumer="billing", message_id=message_id), reveal=True)
    return found


@pytest.mark.parametrize("codec", [None, Xor()], ids=["plain", "codec"])
def test_handlers_and_hashes_get_everything_and_operators_do_not(
    database_url: str, codec: Any
) -> None:
    seen: list[Any] = []

    def body(message: Message[dict[str, Any]], tx: Any) -> None:
        seen.append((message.body, tuple(message.headers)))
        raise LookupError(f"declined: {CARD}")

    payload = json.dumps(ORDER).encode()
    with opened(database_url, codec=codec, redact=RULES) as shop:
        shop.handler(body, retry=RetryPolicy(max_attempts=2, base=timedelta(0)))
        assert shop.deliver(paid("a", payload, headers=HEADERS)) is Outcome.FAILED
        # the same payload is a copy, another one is not
        assert shop.deliver(paid("a", payload, headers=HEADERS)) is Outcome.DEFERRED
        other = payload.replace(CARD.encode(), b"4000-0000-0000-0000", 1)
        assert shop.deliver(paid("a", other, headers=HEADERS)) is Outcome.QUARANTINED
        with Admin(shop.app) as admin:
            found = shown(admin)
            (aside,) = admin.show(QuarantineFilter(message_id="a"), reveal=True)
        assert shop.work() == [Outcome.DEAD]
        assert [event.error for event in shop.emitted(MessageFailed)] == (
            ["declined: ***"] if codec is None else ["(encoded: see `txbox show`)"]
        )
        assert len(shop.emitted(MessageDead)) == 1
        errors = repr(shop.raw.rows("SELECT error FROM txbox_attempt"))
        assert CARD not in errors
        assert ("declined: ***" in errors) is (codec is None)
    assert [body for body, _ in seen] == [ORDER, ORDER]
    assert [headers for _, headers in seen] == [
        tuple(HEADERS),
        (("x-customer", "Ada"), ("x-one", "1"), ("X-CUSTOMER", b"Bob")),
    ]
    assert json.loads(found.payload) == {
        "order": 7,
        "card": {"number": "***", "brand": "v"},
        "items": [{"sku": "a", "note": "***"}, [{"note": "***"}], "note"],
    }
    assert found.redacted
    assert found.payload_bytes == len(payload)
    assert found.headers == (("x-customer", "***"), ("x-one", "1"), ("X-CUSTOMER", "***"))
    assert "Ada" not in repr(views.record(found))
    assert CARD not in found.error
    assert found.error.startswith("declined: ***")
    assert "in body" in found.error
    assert CARD not in repr(views.attempts(found.history))
    assert b"4000" not in (aside.payload or b"")
    assert aside.redacted


def test_the_log_and_its_traceback_have_no_secret(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    def body(message: Message[Any], tx: Any) -> None:
        raise ValueError(f"declined: {CARD}") from LookupError(f"no card {CARD}")

    with opened(database_url, redact=RULES) as shop, caplog.at_level(logging.DEBUG, "txbox"):
        shop.handler(body, retry=LATER)
        shop.deliver(paid("a"))
    told = "\n".join(map(logging.Formatter().format, caplog.records))
    assert "ValueError: declined: ***" in told
    assert "LookupError: no card ***" in told
    assert CARD not in told


def test_a_logged_traceback_has_no_secret_of_a_source_line(
    sqlite_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    def innocent(message: Message[Any], tx: Any) -> None:
        raise ValueError("declined")

    def secretive(message: Message[Any], tx: Any) -> None:
        raise ValueError("declined"[: len("4111-1111-1111-1111")])

    told: list[str] = []
    with opened(sqlite_url, redact=RULES) as shop, caplog.at_level(logging.DEBUG, "txbox"):

        def raised(message: Message[Any], tx: Any) -> None:
            body(message, tx)

        shop.handler(raised, retry=LATER)
        for body in (innocent, secretive):
            shop.deliver(paid(body.__name__))
            told.append("\n".join(map(logging.Formatter().format, caplog.records)))
            caplog.clear()
    assert 'raise ValueError("declined")' in told[0]
    assert 'raise ValueError("declined"[: len("***")])' in told[1]
    assert CARD[:6] not in told[1]


def test_a_rehearsal_shows_what_the_rules_leave(sqlite_url: str) -> None:
    rules = Redaction(fields=["result.token"], errors=RULES.errors)
    with App(sqlite_url, redact=rules) as app:
        app.init()

        @app.handler("orders", consumer="billing", keep_payload="always", keep_result=True)
        def body(message: Message[Any], tx: Any) -> dict[str, Any]:
            tx.execute(f"SELECT '{CARD}'")
            return {"token": CARD, "order": 7}

        app.process(Message(id="a", topic="orders", payload=b"{}"))
        with Admin(app) as admin:
            done = admin.rehearse("billing", "a")
    assert json.loads(done.result or b"") == {"token": "***", "order": 7}
    assert done.statements
    assert CARD not in repr(done)


@pytest.mark.parametrize(
    "errors", [explode, lambda text: None, lambda text: text.index("\0")], ids=["raises", "none", "int"]
)  # fmt: skip
def test_a_rule_that_fails_withholds_the_text_and_the_failure_is_recorded(
    database_url: str, errors: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def body(message: Message[Any], tx: Any) -> None:
        raise LookupError(f"declined: {CARD}")

    with (
        opened(database_url, redact=Redaction(errors=errors)) as shop,
        caplog.at_level(logging.DEBUG, "txbox"),
    ):
        shop.handler(body, retry=LATER)
        assert shop.deliver(paid("a")) is Outcome.FAILED
        row = shop.row("a")
        assert (row.status, row.error_type) == ("failed", "LookupError")
        assert row.error == "(withheld: a rule of App(redact=…) failed on this text)"
        assert CARD not in everything(shop.raw)
    assert "withheld" in caplog.text
    assert CARD not in caplog.text


def test_what_is_cut_was_looked_at_before(database_url: str) -> None:
    """Half a secret, at the end of what is kept, would match no rule."""
    size = 256

    def body(message: Message[Any], tx: Any) -> None:
        raise Reject("x" * (size - 10) + CARD)

    from txbox import Limits

    with opened(database_url, limits=Limits(error_bytes=size), redact=RULES) as shop:
        shop.handler(body)
        shop.deliver(paid("a"))
        assert CARD[:6] not in everything(shop.raw)
        assert "***" in (shop.row("a").error or "")


@pytest.mark.parametrize("before", range(60))
def test_a_long_text_is_cut_before_its_rules_and_shows_no_half_of_a_secret(before: int) -> None:
    rules = Redaction(errors=["4111-[0-9-]+(?= )", re.compile("x+")])
    # secrets shorten the text, and one is cut at every place
    text = "-" * before + f"{CARD} {'x' * 100}" * 2_000
    shown = rules.error(text, 2_000)
    assert len(shown) <= 4_002
    assert "4111" not in shown
    assert rules.error(text[:4_000] + " ", 2_001) == rules.error(text[:4_000] + " ", 9_999)


def test_a_pattern_of_quadratic_time_meets_a_bounded_text() -> None:
    rules, started = Redaction(errors=[r"[\w.]+@[\w.]+"]), time.process_time()
    assert rules.error("a" * 10_000_000).startswith("aaa")
    assert time.process_time() - started < 5


def test_rows_from_before_the_rules_are_shown_by_them(database_url: str) -> None:
    def body(message: Message[Any], tx: Any) -> None:
        raise LookupError(f"declined: {CARD}")

    with opened(database_url) as shop:
        shop.handler(body, retry=LATER)
        shop.deliver(paid("a", json.dumps(ORDER).encode()))
        assert CARD in (shop.row("a").error or "")
    with App(database_url, redact=RULES) as app, Admin(app) as admin:
        assert CARD not in repr(shown(admin))
        (listed,) = admin.list(InboxFilter())
        assert CARD not in repr(views.page(InboxFilter.table, [listed]))


@pytest.mark.parametrize(
    "payload",
    [b"card=" + CARD.encode(), b"\xff\xfe\x00", b"[" * 50_000, b'{"n": ' + b"9" * 5_000 + b"}"],
    ids=["form", "bytes", "deep", "digits"],
)
def test_of_a_payload_that_cannot_be_looked_into_nothing_is_shown(
    sqlite_url: str, payload: bytes
) -> None:
    with opened(sqlite_url, redact=RULES) as shop:
        shop.handler(mode="stored")
        shop.deliver(paid("a", payload))
        with Admin(shop.app) as admin:
            found = shown(admin)
    assert found.redacted
    assert found.payload.startswith(b'"(withheld: ')
    assert found.payload_bytes == len(payload)


def test_of_a_name_that_stands_there_twice_only_the_value_that_counts_is_shown() -> None:
    data = json.dumps(CARD).encode()
    twice = b'{"card": {"number": ' + data + b'}, "card": {"number": 1}}'
    again = b'{"card": {"number": ' + data + b'}, "card": {}}'
    assert RULES.json("body", twice) == (b'{"card": {"number": "***"}}', True)
    assert RULES.json("body", again) == (b'{"card": {}}', False)


def test_paths() -> None:
    data = b'{"a": [{"b": 1}, {"b": [2]}], "c": {"d": {"b": 3}}, "b": null}'
    for fields, wanted in {
        ("body.a",): '{"a": "***", "c": {"d": {"b": 3}}, "b": null}',
        ("body.a.b",): '{"a": [{"b": "***"}, {"b": "***"}], "c": {"d": {"b": 3}}, "b": null}',
        ("body.*.*.b",): '{"a": [{"b": 1}, {"b": [2]}], "c": {"d": {"b": "***"}}, "b": null}',
        ("body.b", "body.c.d"): '{"a": [{"b": 1}, {"b": [2]}], "c": {"d": "***"}, "b": "***"}',
        ("body",): '"***"',
    }.items():
        assert Redaction(fields=fields).json("body", data) == (wanted.encode(), True), fields
    assert Redaction(fields=("body.x.y",)).json("body", b"[1]") == (b"[1]", False)
    # without a rule for payloads the bytes are as they are
    assert Redaction(fields=("result.a",)).json("body", b"no JSON") == (b"no JSON", False)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"headers": "x-customer"}, "headers is 'x-customer'"),
        ({"fields": ("card.number",)}, "paths such as 'body.card.number'"),
        ({"fields": ("body..number",)}, "paths such as"),
        ({"errors": "[0-9]+"}, "a callable or a sequence"),
        ({"errors": ("(",)}, "invalid regular expression"),
    ],
)
def test_a_rule_that_means_nothing_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        Redaction(**given)


def test_what_is_published_is_whole_and_its_error_is_not(database_url: str) -> None:
    broker = Recorder(lambda message: None if tried else BrokerError(f"refused {CARD}"))
    tried: list[bool] = []

    def body(message: Message[Any], tx: Any) -> None:
        shop.app.outbox.stage(tx, "cards", ORDER, headers=HEADERS)

    # with full jitter a short delay may be none
    later = RelayPolicy(retry=RetryPolicy(base=timedelta(days=1), cap=timedelta(days=1)))
    with opened(database_url, redact=RULES, relaying=later) as shop:
        shop.app.publish(broker, topics=["cards"])
        shop.handler(body)
        assert shop.deliver(paid("a")) is Outcome.PROCESSED
        relayed(shop.app)
        (failed,) = shop.emitted(OutgoingFailed)
        assert failed.error == "refused ***"
        assert CARD not in repr(shop.raw.rows("SELECT error FROM txbox_outbox"))
        with Admin(shop.app) as admin:
            (row,) = admin.list(OutboxFilter())
            (found,) = admin.show(OutboxFilter(message_id=row.message_id), reveal=True)
            assert CARD not in repr(found)
            assert ("x-customer", "***") in found.headers
            tried.append(True)
            admin.retry(OutboxFilter(message_id=row.message_id))
        relayed(shop.app)
    (sent,) = broker.sent
    assert sent.json() == ORDER
    assert sent.headers.get_all("x-customer") == ["Ada", b"Bob"]


def test_a_quarantined_message_is_accepted_whole(database_url: str) -> None:
    seen: list[Any] = []
    payload = json.dumps(ORDER).encode()
    with opened(database_url, redact=RULES) as shop:
        shop.handler(lambda message, tx: seen.append(message.payload))
        shop.deliver(paid("a"))
        shop.deliver(paid("a", payload, headers=HEADERS))
        with Admin(shop.app) as admin:
            assert admin.accept(QuarantineFilter(message_id="a"), message_id="b").count == 1
        assert shop.work() == [Outcome.PROCESSED]
    assert seen[-1] == payload


def test_what_was_copied_from_what_is_shown_is_no_correction(sqlite_url: str) -> None:
    """The hidden value would be lost."""

    def body(message: Message[Any], tx: Any) -> None:
        raise Reject("declined")

    with opened(sqlite_url, redact=RULES) as shop, Admin(shop.app) as admin:
        shop.handler(body)
        shop.deliver(paid("a", json.dumps(ORDER).encode(), headers=HEADERS))
        copied = shown(admin).payload
        with pytest.raises(ConfigurationError, match="give the real value"):
            admin.edit("billing", "a", payload=copied)
        with pytest.raises(ConfigurationError, match="give the real value"):
            admin.edit("billing", "a", headers={"X-Customer": "***"})
        admin.edit(
            "billing", "a", payload=copied.replace(b"***", b"4000"), headers={"x-one": "***"}
        )
        assert shop.row("a").status == "failed"
    for data in (b'"***"', b"***", b'{"note": "***"}', b'{"items": ["***"]}'):
        assert RULES.was_shown(data) is (data == b'"***"')
    assert RULES.was_shown(RULES.json("body", b"\xff")[0])
    assert not Redaction().was_shown(b'"***"')
    # parsed since Python 3.12, and deeper than Python code may go
    assert not RULES.was_shown(b"[" * 5000 + b"]" * 5000)
