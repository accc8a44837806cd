"""What makes two deliveries the same message: distinct stays distinct, equal stays equal, nothing crashes."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import unicodedata
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg_pool import AsyncConnectionPool

from tests.support.blocked import acquired, released
from tests.support.shop import CONSUMER, TOPIC, Shop, as_id, opened, paid, quarantined
from txbox import App, ConfigurationError, Headers, Inbox, Message, Outcome, UnusableMessage
from txbox.events import MessageQuarantined
from txbox.identity import DIGEST_PREFIX, canonical_id, message_id, scoped_id

CAFE = "caf\u00e9"
LOOKALIKES = [
    *("a", "A", "a ", " a", "a\t", "a\n", "a\u00a0", "a\u200b"),
    *("e", "\u00e9", "e\u0301", "\u00c9"),
    *(CAFE, unicodedata.normalize("NFD", CAFE)),
    *("\U0001f600", "\U0001f601", "\U0001f600\ufe0f", "\U0001f468\u200d\U0001f469"),
    *("ss", "\u00df", "\u1e9e", "\u0130", "i", "\u0131", "\uff41"),
    *("1", "01", "1.0", "+1", "\u0661"),
    *(
        "%",
        "%25",
        "a%20b",
        "a b",
        "\\",
        "\\\\",
        "'",
        '"',
        "{a,b}",
        "NULL",
        "null",
        ":name",
        "?",
        "%s",
        "$1",
    ),
    *("x" * 254, "x" * 255, "x" * 256, "x" * 257, "x" * 10_000, "x" * 10_001),
    *("\u00e9" * 127, "\u00e9" * 128),
    *("sha256:", "sha256:" + "0" * 64, "SHA256:" + "0" * 64),
]


def test_lookalike_ids_are_distinct_messages(shop: Shop) -> None:
    shop.handler()
    assert len(set(LOOKALIKES)) == len(LOOKALIKES)
    assert [shop.deliver(paid(each)) for each in LOOKALIKES] == [Outcome.PROCESSED] * len(
        LOOKALIKES
    )
    assert [shop.deliver(paid(each)) for each in LOOKALIKES] == [Outcome.DUPLICATE] * len(
        LOOKALIKES
    )
    assert shop.effects() == len(LOOKALIKES)
    for each in LOOKALIKES:
        assert shop.effects(canonical_id(each)) == 1
    assert quarantined(shop.raw) == []


def test_lookalike_consumers_are_distinct(shop: Shop) -> None:
    consumers = ("billing", "Billing", "b\u00edlling", "billing-")
    for consumer in consumers:
        shop.handler(consumer=consumer)
    for consumer in consumers:
        assert shop.deliver(paid("a"), consumer) is Outcome.PROCESSED
    assert shop.effects() == len(consumers)


def test_lookalikes_in_one_batch_and_in_accept_many(shop: Shop) -> None:
    messages = [paid(each) for each in LOOKALIKES]
    shop.handler(mode="stored")
    stored = shop.app.send_many(messages)
    assert [row[CONSUMER] for row in stored] == [Outcome.DEFERRED] * len(messages)
    assert shop.raw.value("SELECT count(*) FROM txbox_inbox") == len(messages)
    inbox = Inbox("other")
    tx = acquired(shop.app._any_sync())
    tx.begin(())
    assert all(inbox.accept_many(tx.native, messages))
    assert [each.duplicate for each in inbox.accept_many(tx.native, messages)] == [True] * len(
        messages
    )
    tx.commit(())
    tx.discard()


def test_send_many_async_sends_as_its_twin_does(shop: Shop, postgresql_url: str) -> None:
    messages = [paid("a"), paid("b"), paid("a")]
    shop.handler(mode="stored")
    (first, second, again) = asyncio.run(shop.app.send_many_async(messages))
    assert (first, second) == ({CONSUMER: Outcome.DEFERRED},) * 2
    assert again == {CONSUMER: Outcome.DEFERRED}, "a copy beside its original is the same message"

    async def by_an_async_driver() -> list[dict[str, Outcome]]:
        async with AsyncConnectionPool(postgresql_url, open=False) as pool, App(pool) as app:
            app.handler(TOPIC, consumer="other")(_nothing)
            return [*await app.send_many_async(messages[:2]), await app.send_async(messages[0])]

    assert asyncio.run(by_an_async_driver()) == [{"other": Outcome.DEFERRED}] * 3


async def _nothing(message: Message[Any], tx: Any) -> None:
    """Its messages are only stored."""


def test_equal_ids_of_two_types_are_one_message(shop: Shop) -> None:
    pairs: list[tuple[Any, str]] = [
        (7, "7"),
        (-7, "-7"),
        (2**200, str(2**200)),
        (b"seven", "seven"),
        (CAFE.encode(), CAFE),
        (uuid.UUID(int=7), str(uuid.UUID(int=7))),
    ]
    shop.handler()
    for number, (one, same) in enumerate(pairs, 1):
        assert shop.deliver(paid(one)) is Outcome.PROCESSED, one
        assert shop.deliver(paid(same)) is Outcome.DUPLICATE, one
        assert shop.effects() == number, one


UNUSABLE: dict[str, Any] = {
    "empty": "",
    "NUL": "a\0b",
    "surrogate": "\ud800",
    "last surrogate": "a\udfff",
    "no UTF-8": b"\xff",
    "none": None,
    "float": 1.5,
    "bool": True,
    "tuple": ("a", "b"),
    "huge": 10**5000,
}


@pytest.mark.parametrize("scope", [None, "topic"])
def test_unusable_id_is_quarantined(shop: Shop, scope: str | None) -> None:
    shop.handler(id_scope=scope)
    for name, value in UNUSABLE.items():
        message = Message[Any](id=value, topic=TOPIC, payload=b"{}")
        assert shop.deliver(message) is Outcome.QUARANTINED, name
        ((reason, seen),) = quarantined(shop.raw)
        assert reason.startswith("The message"), name
        assert (seen, shop.calls) == (1, []), name
        assert [event.reason for event in shop.emitted(MessageQuarantined)] == [reason], name
        assert shop.deliver(message) is Outcome.QUARANTINED, name
        assert quarantined(shop.raw) == [(reason, 2)], name
        assert shop.raw.value("SELECT count(*) FROM txbox_inbox") == 0, name
        with pytest.raises(UnusableMessage):
            message_id(message)
        shop.next_case()


def test_text_that_no_database_keeps_is_quarantined(shop: Shop) -> None:
    shop.app.handler("*", consumer=CONSUMER)(lambda message, tx: None)
    fields = ("key", "type", "content_type", "topic")
    for field, bad in itertools.product(fields, ("a\0b", "a\ud800b")):
        content: dict[str, Any] = {"id": "a", "topic": TOPIC, "payload": b"{}", field: bad}
        message = Message[Any](**content)
        assert shop.deliver(message) is Outcome.QUARANTINED, (field, bad)
        ((reason, _),) = quarantined(shop.raw)
        assert field in reason, (field, bad)
        shop.next_case()


def test_headers_of_any_content_are_kept(shop: Shop) -> None:
    """A header is no key: it is stored as ASCII, escaped, and comes back as it was."""
    seen: list[Any] = []
    shop.handler(lambda message, tx: seen.append(message.headers), mode="stored")
    values: list[Any] = ["a\0b", "a\ud800b", b"\xff\0", "\U0001f600", None, ""]
    for number, value in enumerate(values):
        pairs = [("x-one", value), ("x-one", "again"), ("na\0me", "v")]
        assert shop.deliver(paid(f"m{number}", headers=pairs)) is Outcome.DEFERRED, value
        assert shop.work() == [Outcome.PROCESSED], value
        assert [tuple(entry) for entry in seen] == [tuple(pairs)], value
        seen.clear()


def test_extractor_that_raises_quarantines(shop: Shop) -> None:
    shop.handler(message_id=lambda message: message.json()["order"]["id"])
    assert shop.deliver(Message(topic=TOPIC, payload=b'{"order": {"id": 7}}')) is Outcome.PROCESSED
    for payload in (b"{}", b"not json", b"[]", b""):
        assert shop.deliver(Message(topic=TOPIC, payload=payload)) is Outcome.QUARANTINED
    assert len(quarantined(shop.raw)) == 4
    assert all("message_id= raised" in reason for reason, _ in quarantined(shop.raw))
    assert shop.calls == ["7"]


def test_extractor_by_path(shop: Shop) -> None:
    shop.handler(message_id="body.items.1.id")
    payload = b'{"items": [{"id": "x"}, {"id": "y"}]}'
    assert shop.deliver(Message(topic=TOPIC, payload=payload)) is Outcome.PROCESSED
    assert shop.calls == ["y"]
    assert shop.deliver(Message(topic=TOPIC, payload=b'{"items": []}')) is Outcome.QUARANTINED


@pytest.mark.parametrize(
    "path", ["boody.id", "", "body.", "body..id", "headers", "headers.", "json", "consumer"]
)
def test_a_path_that_no_message_has_is_refused_at_once(path: str, tmp_path: Path) -> None:
    with App(f"sqlite:///{tmp_path}/own.db") as app:
        for option in ("message_id", "sequence", "lock_key"):
            options: dict[str, Any] = {option: path}
            with pytest.raises(ConfigurationError, match=f"^{option} is .* use a callable"):
                app.handler(TOPIC, consumer=CONSUMER, **options)


def test_id_scope_keeps_topics_apart(shop: Shop) -> None:
    shop.app.handler("*", consumer=CONSUMER, id_scope="topic")(lambda message, tx: None)
    for topic in ("t1", "t2"):
        assert shop.deliver(Message(id=1, topic=topic)) is Outcome.PROCESSED
        assert shop.deliver(Message(id=1, topic=topic)) is Outcome.DUPLICATE
    # no topic and id give the text of another pair
    assert shop.deliver(Message(id="b c", topic="a")) is Outcome.PROCESSED
    assert shop.deliver(Message(id="c", topic="a b")) is Outcome.PROCESSED
    assert shop.deliver(Message(id="c", topic="a%20b")) is Outcome.PROCESSED


def test_accept_takes_what_every_database_keeps_and_no_more(shop: Shop) -> None:
    inbox = Inbox(CONSUMER)
    tx = acquired(shop.app._any_sync())
    tx.begin(())
    for name in ("topic", "type", "key"):
        too_long: dict[str, Any] = {name: "x" * 1025}
        with pytest.raises(UnusableMessage, match=f"The {name} has more than 1024 bytes"):
            inbox.accept(tx.native, "a", **too_long)
    # and the transaction is as it was
    assert inbox.accept(tx.native, "a", topic="t" * 1024, type="u" * 1024, key="k" * 1024)
    tx.commit(())
    tx.discard()
    assert shop.raw.value("SELECT count(*) FROM txbox_inbox") == 1


def test_id_of_headers_and_cloudevents(shop: Shop) -> None:
    shop.handler()

    def of(**headers: str) -> Message[Any]:
        pairs = Headers((name.replace("_", "-"), header) for name, header in headers.items())
        return Message(topic=TOPIC, headers=pairs)

    assert shop.deliver(of(message_id="m", ce_id="1", ce_source="s")) is Outcome.PROCESSED
    assert shop.calls == ["m"]
    assert shop.deliver(of(Message_ID="m")) is Outcome.DUPLICATE
    assert shop.deliver(of(ce_id="1", ce_source="/a b")) is Outcome.PROCESSED
    assert shop.deliver(of(ce_id="b 1", ce_source="/a")) is Outcome.PROCESSED
    assert shop.deliver(of(ce_id="1", ce_source="/a%20b")) is Outcome.PROCESSED
    assert shop.deliver(of(ce_id="1")) is Outcome.QUARANTINED
    assert shop.effects() == 4


def test_every_binding_of_cloudevents_gives_the_same_id(shop: Shop) -> None:
    shop.handler()

    def of(prefix: str) -> Message[Any]:
        headers = Headers([(f"{prefix}id", b"1"), (f"{prefix}source", b"/shop")])
        return Message(topic=TOPIC, headers=headers)

    assert shop.deliver(of("ce_")) is Outcome.PROCESSED
    for prefix in ("ce-", "cloudEvents:", "cloudEvents_"):
        assert shop.deliver(of(prefix)) is Outcome.DUPLICATE


def test_reserved_prefix_cannot_be_forged(shop: Shop) -> None:
    """A plain id that looks like the digest of a long one is another message."""
    long = "x" * 300
    digest = DIGEST_PREFIX + hashlib.sha256(long.encode()).hexdigest()
    shop.handler()
    assert shop.deliver(paid(long)) is Outcome.PROCESSED
    assert shop.calls == [digest]
    assert shop.deliver(paid(digest)) is Outcome.PROCESSED
    assert shop.effects() == 2


@given(st.text(max_size=8), st.text(max_size=8), st.text(max_size=8), st.text(max_size=8))
def test_scoped_ids_are_unambiguous(scope: str, name: str, scope2: str, own2: str) -> None:
    assert (scoped_id(scope, name) == scoped_id(scope2, own2)) == ((scope, name) == (scope2, own2))


# -- the property, on every database -------------------------------------------------------------

usable = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=300
)
alike = st.text(
    st.sampled_from("aA \u00e9e\u0301\u00df\U0001f600\U0001f601%\t"), min_size=1, max_size=6
)
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Shop]]:
    """One database a product for all examples of a property."""
    from contextlib import ExitStack

    from tests.support import databases
    from tests.support.databases import require

    with ExitStack() as stack:
        shops = {}
        for kind in databases.selected():
            require(kind.missing())
            url = kind.create(tmp_path_factory.mktemp(kind.name), schema=True)
            stack.callback(kind.drop, url)
            shops[kind.name] = stack.enter_context(opened(url))
        yield shops


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(usable | alike, min_size=1, max_size=20))
def test_distinct_ids_stay_distinct_and_equal_stay_equal(
    kept: dict[str, Shop], ids: list[str]
) -> None:
    wanted = {canonical_id(each) for each in ids}
    consumer = f"property-{next(_numbers)}"
    for shop in kept.values():
        tx = acquired(shop.app._any_sync())
        tx.begin(())
        accepted = Inbox(consumer).accept_many(tx.native, [paid(each) for each in ids])
        tx.commit(())
        released(shop.app._any_sync(), tx)
        assert sum(map(bool, accepted)) == len(wanted)
        rows = shop.raw.rows(
            "SELECT message_id FROM txbox_inbox WHERE consumer = ?", (as_id(shop.raw, consumer),)
        )
        found = [value.decode() if isinstance(value, bytes) else value for (value,) in rows]
        assert sorted(found) == sorted(wanted)


@given(st.integers(), st.integers())
def test_integers_are_their_decimal_text(one: int, two: int) -> None:
    assert canonical_id(one) == str(one)
    assert (canonical_id(one) == canonical_id(two)) == (one == two)


@given(usable)
def test_canonical_ids_are_short_and_stable(name: str) -> None:
    canonical = canonical_id(name)
    assert len(canonical.encode()) <= 255
    assert canonical == name or canonical.startswith(DIGEST_PREFIX)
    assert canonical_id(name) == canonical
