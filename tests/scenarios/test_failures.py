"""Handlers that fail: parked, retried, given up; never at the cost of a neighbour."""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any

from tests.support.shop import Shop, as_id, execute, paid, quarantined, statuses
from txbox import Message, Outcome, Reject, Retry, RetryPolicy
from txbox.events import MessageDead, MessageFailed
from txbox.store.dialect import as_time

PAYLOAD = b'{"cents": 100}'


def attempts(shop: Shop, message_id: str) -> list[tuple[int, str, str]]:
    return [
        (int(attempt), str(status), str(error_type))
        for attempt, status, error_type in shop.raw.rows(
            "SELECT attempt, status, error_type FROM txbox_attempt WHERE message_id = ? ORDER BY number",
            (as_id(shop.raw, message_id),),
        )
    ]


def fails_times(count: int) -> Any:
    def fails(message: Message[Any], tx: Any) -> None:
        if message.attempt <= count:
            raise ValueError(f"no account, attempt {message.attempt}")

    return fails


def test_business_logic_failure(shop: Shop) -> None:
    shop.handler(fails_times(2), retry=RetryPolicy(base=timedelta(hours=1), cap=timedelta(hours=2)))
    assert shop.deliver(paid("a", PAYLOAD)) is Outcome.FAILED
    row = shop.row("a")
    assert (row.status, row.attempts, row.has_payload, row.error_type) == (
        "failed",
        1,
        True,
        "ValueError",
    )
    assert row.error is not None
    assert row.error.startswith("no account, attempt 1\n")
    assert "fails_times" not in shop.raw.value("SELECT fingerprint FROM txbox_inbox")
    assert (
        shop.raw.value("SELECT fingerprint FROM txbox_inbox")
        == "ValueError at test_failures.py:fails"
    )
    assert shop.effects() == 0
    assert shop.work() == []  # not due for an hour
    assert shop.deliver(paid("a", PAYLOAD)) is Outcome.DEFERRED  # the table owns it

    shop.make_due()
    assert shop.work() == [Outcome.FAILED]
    assert shop.row("a").attempts == 2
    assert attempts(shop, "a") == [(1, "failed", "ValueError"), (2, "failed", "ValueError")]
    assert [event.attempt for event in shop.emitted(MessageFailed)] == [1, 2]

    shop.make_due()
    assert shop.work() == [Outcome.PROCESSED]
    row = shop.row("a")
    assert (row.status, row.attempts, row.starts, row.has_payload) == ("processed", 2, 0, False)
    assert shop.effects("a") == 1


def test_retry_cap_and_dead_lettering(shop: Shop) -> None:
    shop.handler(fails_times(99), retry=RetryPolicy(max_attempts=3, base=timedelta(0)))
    assert shop.deliver(paid("a", PAYLOAD)) is Outcome.FAILED
    assert shop.work() == [Outcome.FAILED]
    assert shop.work() == [Outcome.DEAD]
    row = shop.row("a")
    assert (row.status, row.attempts, row.has_payload) == ("dead", 3, True)
    (dead,) = shop.emitted(MessageDead)
    assert (dead.message_id, dead.attempt, dead.error_type) == ("a", 3, "ValueError")
    assert dead.error == "no account, attempt 3"

    shop.make_due()
    assert shop.work() == []
    assert shop.rescue() == []
    assert shop.deliver(paid("a", PAYLOAD)) is Outcome.DUPLICATE
    assert len(shop.calls) == 3
    assert [status for _, status, _ in attempts(shop, "a")] == ["failed", "failed", "dead"]
    assert shop.raw.value("SELECT count(*) FROM txbox_dead_letters") == 1
    assert shop.effects() == 0


def test_poison_message(shop: Shop) -> None:
    def chokes(message: Message[Any], tx: Any) -> None:
        if message.payload == b"poison":
            raise RuntimeError("cannot digest this")

    shop.handler(chokes, retry=RetryPolicy(max_attempts=2, base=timedelta(0)))
    good = [f"good-{number}" for number in range(6)]
    for message_id in good[:3]:
        assert shop.deliver(paid(message_id)) is Outcome.PROCESSED
    assert shop.deliver(paid("bad", b"poison")) is Outcome.FAILED
    for message_id in good[3:]:
        assert shop.deliver(paid(message_id)) is Outcome.PROCESSED
    assert shop.work() == [Outcome.DEAD]
    assert statuses(shop.raw) == {"processed": 6, "dead": 1}
    (hashed, error, payload) = shop.raw.rows(
        "SELECT payload_hash, error, payload FROM txbox_inbox WHERE status = 'dead'"
    )[0]
    assert bytes(hashed) == hashlib.sha256(b"poison").digest()
    assert bytes(payload) == b"poison"
    assert str(error).startswith("cannot digest this\n")
    assert [shop.effects(message_id) for message_id in good] == [1] * 6
    assert shop.effects("bad") == 0


def test_poison_message_in_a_batch_of_the_table(shop: Shop) -> None:
    """Stored neighbours are leased together with the poison; it costs only itself."""

    def chokes(message: Message[Any], tx: Any) -> None:
        if message.payload == b"poison":
            raise RuntimeError("cannot digest this")

    shop.handler(chokes, mode="stored", retry=RetryPolicy(max_attempts=1))
    for number in range(5):
        payload = b"poison" if number == 2 else PAYLOAD
        assert shop.deliver(paid(f"m{number}", payload)) is Outcome.DEFERRED
    assert sorted(shop.work()) == [Outcome.DEAD] + [Outcome.PROCESSED] * 4
    assert statuses(shop.raw) == {"processed": 4, "dead": 1}
    assert shop.effects() == 4


def test_reject_is_dead_at_once(shop: Shop) -> None:
    def rejects(message: Message[Any], tx: Any) -> None:
        raise Reject("no such customer")

    shop.handler(rejects)
    assert shop.deliver(paid("a")) is Outcome.DEAD
    row = shop.row("a")
    assert (row.status, row.attempts, row.error_type, row.has_payload) == (
        "dead",
        1,
        "Reject",
        True,
    )
    assert (shop.effects(), quarantined(shop.raw)) == (0, [])


def test_reject_on_is_dead_at_once(shop: Shop) -> None:
    shop.handler(fails_times(9), reject_on=(ValueError,))
    assert shop.deliver(paid("a")) is Outcome.DEAD
    assert shop.row("a").attempts == 1


def test_retry_after_sets_the_delay(shop: Shop) -> None:
    def later(message: Message[Any], tx: Any) -> None:
        raise Retry("the bank is closed", after=timedelta(hours=5))

    shop.handler(later)
    assert shop.deliver(paid("a")) is Outcome.FAILED
    ((due, updated),) = shop.raw.rows("SELECT next_attempt_at, updated_at FROM txbox_inbox")
    due, updated = as_time(due), as_time(updated)
    assert due is not None
    assert updated is not None
    assert timedelta(seconds=-1) < (due - updated) - timedelta(hours=5) < timedelta(seconds=1)
    (failed,) = shop.emitted(MessageFailed)
    assert failed.retry_in_s == 5 * 3600


def test_body_that_cannot_be_decoded_is_dead(shop: Shop) -> None:
    calls = []

    @shop.app.handler("numbers", consumer="decoding")
    def handle(message: Message[dict[str, int]], tx: Any) -> None:
        calls.append(message)

    assert shop.deliver(Message(id="a", topic="numbers", payload=b"\xff not json")) is Outcome.DEAD
    assert shop.row("a", "decoding").error_type == "Reject"
    assert calls == []


def test_max_age_makes_the_next_failure_the_last(shop: Shop) -> None:
    shop.handler(fails_times(9), retry=RetryPolicy(base=timedelta(0), max_age=timedelta(hours=1)))
    assert shop.deliver(paid("a")) is Outcome.FAILED
    assert shop.work() == [Outcome.FAILED]
    back = {
        "sqlite": "strftime('%Y-%m-%d %H:%M:%f', 'now', '-2 hours')",
        "mysql": "UTC_TIMESTAMP(6) - INTERVAL 2 HOUR",
        "postgresql": "now() - interval '2 hours'",
    }[shop.raw.product]
    shop.raw.execute(f"UPDATE txbox_inbox SET received_at = {back}")
    assert shop.work() == [Outcome.DEAD]
    assert shop.row("a").attempts == 3


def test_failure_of_a_statement_is_the_handlers_own(shop: Shop) -> None:
    def breaks(message: Message[Any], tx: Any) -> None:
        execute(tx, "INSERT INTO no_such_table VALUES (1)")

    shop.handler(breaks)
    assert shop.deliver(paid("a")) is Outcome.FAILED
    assert (shop.row("a").attempts, shop.effects()) == (1, 0)
