"""The payload is compared on every path on which a copy can arrive; one that differs is set aside."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.blocked import acquired
from tests.support.shop import CONSUMER, TOPIC, Shop, lasting, paid, quarantined
from txbox import Inbox, Message, Outcome, PayloadMismatch
from txbox.events import MessageQuarantined
from txbox.identity import TOMBSTONE_HASH, payload_hash

FIRST = b'{"cents": 100, "order": 7}'
#: By each method: a copy that is the same, and one that is not.
METHODS: dict[str, tuple[Any, bytes, bytes]] = {
    "raw": ("raw", FIRST, b'{"order": 7, "cents": 100}'),
    "json": ("json", b'{ "order": 7,\n"cents": 100 }', b'{"cents": 101, "order": 7}'),
    "callable": (
        lambda message: str(message.json()["order"]),
        b'{"cents": 999, "order": 7}',
        b'{"cents": 100, "order": 8}',
    ),
}
by_method = pytest.mark.parametrize("method", METHODS)


def fails(message: Message[Any], tx: Any) -> None:
    raise ValueError("not today")


def inline_processed(shop: Shop, **options: Any) -> Outcome:
    shop.handler(**options)
    assert shop.deliver(paid("a", FIRST)) is Outcome.PROCESSED
    return Outcome.DUPLICATE


def inline_failed(shop: Shop, **options: Any) -> Outcome:
    shop.handler(fails, **options)
    assert shop.deliver(paid("a", FIRST)) is Outcome.FAILED
    return Outcome.DEFERRED


def inline_dead(shop: Shop, **options: Any) -> Outcome:
    shop.handler(fails, reject_on=(ValueError,), **options)
    assert shop.deliver(paid("a", FIRST)) is Outcome.DEAD
    return Outcome.DUPLICATE


def stored_pending(shop: Shop, **options: Any) -> Outcome:
    shop.handler(mode="stored", **options)
    assert shop.deliver(paid("a", FIRST)) is Outcome.DEFERRED
    return Outcome.DEFERRED


def stored_leased(shop: Shop, **options: Any) -> Outcome:
    stored_pending(shop, **options)
    assert len(shop.lease()) == 1
    return Outcome.DEFERRED


def inline_leased(shop: Shop, **options: Any) -> Outcome:
    inline_failed(shop, **options)
    assert len(shop.lease()) == 1
    return Outcome.DEFERRED


def stored_processed(shop: Shop, **options: Any) -> Outcome:
    stored_pending(shop, **options)
    assert shop.work() == [Outcome.PROCESSED]
    return Outcome.DUPLICATE


PATHS: tuple[Callable[..., Outcome], ...] = (
    inline_processed,
    inline_failed,
    inline_dead,
    inline_leased,
    stored_pending,
    stored_leased,
    stored_processed,
)


@by_method
@pytest.mark.parametrize("path", PATHS, ids=lambda each: each.__name__)
def test_payload_is_compared_with_the_row(
    shop: Shop, path: Callable[..., Outcome], method: str
) -> None:
    how, same, other = METHODS[method]
    known = path(shop, payload_hash=how)
    before = lasting(shop.raw)
    assert shop.deliver(paid("a", same)) is known
    assert quarantined(shop.raw) == []
    assert shop.deliver(paid("a", other)) is Outcome.QUARANTINED
    assert lasting(shop.raw) == before
    assert len(quarantined(shop.raw)) == 1
    assert len(shop.emitted(MessageQuarantined)) == 1


@by_method
@pytest.mark.parametrize("mode", ["inline", "stored"])
def test_payload_is_compared_when_copies_of_a_batch_are_folded(
    shop: Shop, method: str, mode: str
) -> None:
    how, same, other = METHODS[method]
    handler = shop.handler(payload_hash=how, mode=mode)
    messages = [paid("a", FIRST), paid("b", FIRST), paid("a", other), paid("a", same)]
    first, copy = (
        (Outcome.PROCESSED, Outcome.DUPLICATE) if mode == "inline" else (Outcome.DEFERRED,) * 2
    )
    settled = drive_taken(shop, handler, messages)
    assert settled == [first, first, Outcome.QUARANTINED, copy]
    assert len(quarantined(shop.raw)) == 1
    shop.work()
    assert (shop.effects("a"), shop.effects("b")) == (1, 1)


def drive_taken(shop: Shop, handler: Any, messages: list[Message[Any]]) -> list[Outcome]:
    from txbox.session import drive

    return [
        answer.outcome
        for answer in drive(
            shop.app._any_sync(), shop.app.intake.take_with_retries, handler, messages
        )
    ]


@contextmanager
def transaction(shop: Shop) -> Iterator[Any]:
    """A transaction of the caller's own; rolled back by an error."""
    connection = acquired(shop.app._any_sync())
    connection.begin(())
    try:
        yield connection.native
        connection.commit(())
    finally:
        connection.discard()


@by_method
@pytest.mark.parametrize("many", [False, True], ids=["accept", "accept_many"])
def test_payload_is_compared_by_accept(shop: Shop, method: str, many: bool) -> None:
    how, same, other = METHODS[method]
    inbox = Inbox(CONSUMER, payload_hash=how)

    def accept(tx: Any, payload: bytes) -> bool:
        message = paid("a", payload)
        return bool(inbox.accept_many(tx, [message])[0] if many else inbox.accept(tx, message))

    with transaction(shop) as tx:
        assert accept(tx, FIRST)
    with transaction(shop) as tx:
        assert not accept(tx, same)
    with pytest.raises(PayloadMismatch), transaction(shop) as tx:
        accept(tx, other)
    with transaction(shop) as tx:
        inbox.quarantine(tx, paid("a", other))
    assert len(quarantined(shop.raw)) == 1
    assert shop.raw.value("SELECT count(*) FROM txbox_inbox") == 1


@by_method
def test_payload_is_compared_within_accept_many(shop: Shop, method: str) -> None:
    how, same, other = METHODS[method]
    inbox = Inbox(CONSUMER, payload_hash=how)
    with transaction(shop) as tx:
        accepted = inbox.accept_many(tx, [paid("a", FIRST), paid("b", FIRST), paid("a", same)])
        assert [bool(each) for each in accepted] == [True, True, False]
    with pytest.raises(PayloadMismatch), transaction(shop) as tx:
        inbox.accept_many(tx, [paid("c", FIRST), paid("c", other)])
    assert shop.raw.value("SELECT count(*) FROM txbox_inbox") == 2


def test_row_without_a_hash_is_not_compared(shop: Shop) -> None:
    inbox = Inbox(CONSUMER)
    with transaction(shop) as tx:
        assert inbox.accept(tx, "a")
        assert not inbox.accept(tx, "a", payload={"cents": 1})
        assert not inbox.accept(tx, "a")
    shop.handler()
    assert shop.deliver(paid("a", FIRST)) is Outcome.DUPLICATE
    assert quarantined(shop.raw) == []


def test_payloads_of_accept_by_keyword_are_those_of_messages(shop: Shop) -> None:
    inbox = Inbox(CONSUMER)
    with transaction(shop) as tx:
        assert inbox.accept(tx, "a", payload="text", topic=TOPIC)
        assert not inbox.accept(tx, Message(id="a", topic=TOPIC, payload=b"text"))
        assert not inbox.accept(tx, "a", payload=b"text")
    with pytest.raises(PayloadMismatch), transaction(shop) as tx:
        inbox.accept(tx, "a", payload={"text": 1})


@pytest.mark.parametrize("method", ["json", "callable"])
def test_payload_that_the_method_cannot_read_is_quarantined(shop: Shop, method: str) -> None:
    shop.handler(payload_hash=METHODS[method][0])
    assert shop.deliver(paid("a", b"\xff not JSON")) is Outcome.QUARANTINED
    assert shop.calls == []
    ((reason, _),) = quarantined(shop.raw)
    assert "payload" in reason


def test_tombstone_differs_from_the_empty_payload(shop: Shop) -> None:
    assert payload_hash(Message(topic="t", payload=None)) == TOMBSTONE_HASH
    assert payload_hash(Message(topic="t", payload=b"")) == hashlib.sha256(b"").digest()
    shop.handler()
    assert shop.deliver(Message(id="a", topic=TOPIC, payload=None)) is Outcome.PROCESSED
    assert shop.deliver(Message(id="a", topic=TOPIC, payload=None)) is Outcome.DUPLICATE
    assert shop.deliver(Message(id="a", topic=TOPIC, payload=b"")) is Outcome.QUARANTINED


def test_quarantine_keeps_the_first_copy_and_counts_the_rest(shop: Shop) -> None:
    shop.handler()
    shop.deliver(paid("a", FIRST))
    for _ in range(3):
        assert shop.deliver(paid("a", b"x")) is Outcome.QUARANTINED
    assert shop.deliver(paid("a", b"y")) is Outcome.QUARANTINED
    assert sorted(seen for _, seen in quarantined(shop.raw)) == [1, 3]


@pytest.mark.parametrize("mode", ["inline", "stored"])
def test_quarantine_keeps_an_id_that_could_be_read(shop: Shop, mode: str) -> None:
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "headers": ({"headers": [("h", "x" * 70_000)]}, {}),
        "payload": ({"payload": b"x" * (1024 * 1024 + 1)}, {}),
        "key": ({"key": "a\0b"}, {}),
        "type": ({"type": "a\ud800b"}, {}),
        "hash": ({"payload": b"\xff"}, {"payload_hash": "json"}),
        "sequence": ({"payload": b"{}"}, {"sequence": "body.version"}),
    }
    for name, (bad, options) in cases.items():
        shop.handler(consumer=name, mode=mode, **options)
        content: dict[str, Any] = {"id": "order-1", "topic": TOPIC, "payload": b"{}"} | bad
        assert shop.deliver(Message(**content), name) is Outcome.QUARANTINED, name
        stored = shop.raw.value("SELECT message_id FROM txbox_quarantine")
        assert (stored.decode() if isinstance(stored, bytes) else stored) == "order-1", name
        assert [event.message_id for event in shop.emitted(MessageQuarantined)] == ["order-1"], name
        shop.next_case()
