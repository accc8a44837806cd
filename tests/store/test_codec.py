"""What is stored and forwarded of headers: no credentials, and nothing that a codec should have hidden."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.admin.test_admin_outbox import relayed
from tests.support.recording import Recorder
from tests.support.shop import opened, paid
from txbox import Message, Outcome, Reject, RetryPolicy
from txbox.admin import Admin, InboxFilter, QuarantineFilter
from txbox.events import MessageDead, MessageFailed
from txbox.observers.logging import LoggingObserver
from txbox.store.codec import HIDDEN_ERROR

SECRET = "open-sesame"
CREDENTIALS = (
    "Authorization",
    "cookie",
    "X-Gitlab-Token",
    "x-hub-signature-256",
    "Stripe-Signature",
    "X-API-Key",
)
HEADERS = [
    *((name, SECRET) for name in CREDENTIALS),
    ("x-one", "plain-value"),
    ("page-token", "p7"),
]
LEFT = (("x-one", "plain-value"), ("page-token", "p7"))


class Xor:
    """A codec that one can see through, but not by searching for text."""

    key_id = "k1"

    def encode(self, data: bytes) -> bytes:
        return bytes(byte ^ 0x55 for byte in data)

    def decode(self, data: bytes, key_id: str) -> bytes:
        assert key_id == "k1"
        return self.encode(data)


def everything(raw: Any) -> str:
    """All that the tables hold, as text."""
    found = [
        raw.rows(f"SELECT * FROM {table}")
        for table in ("txbox_inbox", "txbox_quarantine", "txbox_outbox", "txbox_attempt")
    ]
    return repr(found)


@pytest.mark.parametrize("codec", [None, Xor()], ids=["plain", "codec"])
def test_no_row_and_no_letter_holds_a_credential(database_url: str, codec: Any) -> None:
    seen: list[Any] = []
    broker = Recorder()

    def body(message: Message[Any], tx: Any) -> None:
        seen.append(tuple(message.headers))
        if message.attempt == 1:
            raise ValueError("hidden-cause")
        raise Reject("hidden-cause")

    with opened(database_url, codec=codec) as shop:
        shop.app.publish(broker, topics=["letters"])
        shop.handler(
            body, retry=RetryPolicy(base=0 * RetryPolicy().base), dead_letter_topic="letters"
        )
        assert shop.deliver(paid("a", headers=HEADERS)) is Outcome.FAILED
        assert shop.deliver(paid("a", b"other", headers=HEADERS)) is Outcome.QUARANTINED
        assert shop.work() == [Outcome.DEAD]
        assert seen[1] == LEFT
        held = everything(shop.raw)
        assert SECRET not in held
        assert ("plain-value" in held) is (codec is None)
        assert ("hidden-cause" in held) is (codec is None)
        with Admin(shop.app) as admin:
            named = InboxFilter(consumer="billing", message_id="a")
            (found,) = admin.show(named, reveal=True)
            assert found.headers == LEFT
            done = admin.accept(QuarantineFilter(message_id="a"), message_id="b")
            assert done.count == 1
        told = [event.error for event in (*shop.emitted(MessageFailed), *shop.emitted(MessageDead))]
        assert len(told) == 2
        assert all(("hidden-cause" in text) is (codec is None) for text in told)
        assert codec is None or set(told) == {HIDDEN_ERROR}
        relayed(shop.app)
    (letter,) = broker.sent
    assert set(LEFT) <= set(letter.headers)
    assert SECRET not in repr(letter)


def test_rows_of_an_earlier_release_are_read_without_their_credentials(database_url: str) -> None:
    """Headers that were written before there was a codec are plain, whatever key their payload has."""
    old = '[["authorization","open-sesame"],["x-one","plain-value"]]'
    seen: list[Any] = []
    with opened(database_url, codec=Xor(), plain="accept") as shop:
        shop.handler(lambda message, tx: seen.append(tuple(message.headers)), mode="stored")
        assert shop.deliver(paid("a", headers=HEADERS)) is Outcome.DEFERRED
        shop.raw.execute("UPDATE txbox_inbox SET headers = ?", (old,))
        assert shop.work() == [Outcome.PROCESSED]
    assert seen == [(("x-one", "plain-value"),)]


def test_headers_that_cannot_be_decoded_are_not_shown(database_url: str) -> None:
    with opened(database_url, codec=Xor()) as shop:
        shop.handler(mode="stored")
        shop.deliver(paid("a", headers=HEADERS))
    with Admin(database_url) as admin:
        (found,) = admin.show(InboxFilter(consumer="billing", message_id="a"))
        assert found.headers == (("(encoded)", None),)


def test_no_log_line_has_an_error_that_the_codec_hides(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(message: Message[Any], tx: Any) -> None:
        raise ValueError("hidden-cause")

    with opened(database_url, codec=Xor()) as shop, caplog.at_level(logging.DEBUG, "txbox"):
        shop.app.events.observers.append(LoggingObserver())
        shop.handler(fails)
        assert shop.deliver(paid("a")) is Outcome.FAILED
    assert "MessageFailed" in caplog.text
    assert "hidden-cause" not in caplog.text
