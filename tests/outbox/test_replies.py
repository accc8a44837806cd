"""What a handler returns: kept for duplicates, and sent as a reply."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.databases import Raw
from tests.support.shop import AT_ONCE, CONSUMER, TOPIC, Shop, opened, paid
from txbox import App, ConfigurationError, Message, Outcome
from txbox.admin import Admin, InboxFilter
from txbox.brokers.webhook import Webhook
from txbox.testing import drain

Body = Callable[[Message[Any]], Any]
REPLIES = "replies"


class Reversed:
    """A codec with two keys: what one wrote the other's name must not be put on."""

    def __init__(self, key_id: str) -> None:
        self.key_id = key_id

    def encode(self, data: bytes) -> bytes:
        return self.key_id.encode() + data[::-1]

    def decode(self, data: bytes, key_id: str) -> bytes:
        assert data.startswith(key_id.encode()), "decoded with another key than it was encoded with"
        return data[len(key_id) :][::-1]


def register(app: App, body: Body, **options: Any) -> list[Any]:
    """Register a handler that returns what `body` makes of the message; returns its calls."""
    calls: list[Any] = []

    def handle(message: Message[Any], tx: Any) -> Any:
        calls.append(message.id)
        return body(message)

    given: dict[str, Any] = {"keep_result": True, "retry": AT_ONCE} | options
    register: Any = app.handler(TOPIC, consumer=CONSUMER, **given)
    register(handle)
    return calls


def staged(raw: Raw) -> list[tuple[str, str, str | None, Any, dict[str, Any]]]:
    """(id, topic, key, body, headers) of the outbox, in their order."""
    key = "`key`" if raw.product == "mysql" else "key"
    rows = raw.rows(f"SELECT id, topic, {key}, payload, headers FROM txbox_outbox ORDER BY number")
    return [
        (
            _text(value),
            _text(topic),
            None if name is None else _text(name),
            json.loads(bytes(payload)),
            dict(json.loads(headers)),
        )
        for value, topic, name, payload, headers in rows
    ]


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


# -- kept -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [{"total": 100, "of": ["a", "ä"]}, [], "text", 7, 1.5, True, None], ids=repr
)
def test_a_duplicate_gets_what_the_first_delivery_got(shop: Shop, value: object) -> None:
    calls = register(shop.app, lambda _message: value)
    first, second = shop.app.answer(paid("one")), shop.app.answer(paid("one"))
    assert (first.outcome, first.result) == (Outcome.PROCESSED, value)
    assert (second.outcome, second.result) == (Outcome.DUPLICATE, value)
    assert first.json == second.json is not None
    assert calls == ["one"]


def test_without_keep_result_nothing_is_kept(shop: Shop) -> None:
    register(shop.app, lambda _message: {"total": 1}, keep_result=False)
    assert shop.app.answer(paid("one")).result is None
    assert shop.raw.value("SELECT result FROM txbox_inbox") is None


@pytest.mark.parametrize("value", [object(), float("nan"), b"x"], ids=["object", "nan", "bytes"])
def test_what_json_cannot_hold_is_a_failure(shop: Shop, value: object) -> None:
    register(shop.app, lambda _message: value)
    assert shop.app.answer(paid("one")).outcome is Outcome.FAILED
    assert shop.row("one").error_type in ("TypeError", "ValueError")


def test_a_retried_row_keeps_its_result(shop: Shop) -> None:
    def body(message: Message[Any]) -> int:
        if message.attempt == 1:
            raise ValueError("once")
        return message.attempt

    register(shop.app, body)
    assert shop.app.answer(paid("one")).outcome is Outcome.FAILED
    assert drain(shop.app) == [Outcome.PROCESSED]
    assert shop.app.answer(paid("one")).result == 2


def test_a_result_of_work_outside_a_transaction(shop: Shop) -> None:
    @shop.app.handler(TOPIC, consumer=CONSUMER, transactional=False, keep_result=True)
    def handle(message: Message[Any]) -> dict[str, Any]:
        return {"id": message.id}

    assert shop.app.answer(paid("one")).result == {"id": "one"}
    assert shop.app.answer(paid("one")).result == {"id": "one"}


def test_a_replay_keeps_the_newer_result(shop: Shop) -> None:
    values = iter([1, 2])
    register(shop.app, lambda _message: next(values), keep_payload="always")
    shop.deliver(paid("one"))
    with Admin(shop.app) as admin:
        admin.replay(InboxFilter(consumer=CONSUMER, message_id="one"), actor="me")
    assert shop.app.answer(paid("one")).result == 2


def test_a_result_has_the_key_it_was_encoded_with(database_url: str) -> None:
    """The payload may have been stored under an older key than the result."""
    with opened(database_url, codec=Reversed("old")) as old:
        register(old.app, lambda _message: 1, mode="stored", keep_payload="always")
        assert old.deliver(paid("one")) is Outcome.DEFERRED
        with App(database_url, codec=Reversed("new")) as new:
            register(new, lambda message: message.json(), keep_payload="always")
            assert drain(new) == [Outcome.PROCESSED]
            assert new.answer(paid("one")).result == {"cents": 100}
            with Admin(new) as admin:
                replayed = admin.replay(
                    InboxFilter(consumer=CONSUMER, message_id="one"), actor="me"
                )
            assert replayed.processed == 1, "its payload is still readable"
        kept = bytes(old.raw.value("SELECT result FROM txbox_inbox"))
        assert b"cents" not in kept


def test_answer_async_with_a_sync_handler(shop: Shop) -> None:
    register(shop.app, lambda _message: 5)
    assert asyncio.run(shop.app.answer_async(paid("one"))).result == 5
    assert asyncio.run(shop.app.answer_async(paid("one"))).result == 5


def test_answer_async_with_an_async_handler(postgresql_url: str) -> None:
    async def both() -> list[Any]:
        async with App(postgresql_url) as app:

            @app.handler(TOPIC, consumer=CONSUMER, keep_result=True)
            async def handle(message: Message[Any], tx: Any) -> dict[str, Any]:
                return {"id": message.id}

            return [(await app.answer_async(paid("one"))).result for _ in range(2)]

    assert asyncio.run(both()) == [{"id": "one"}] * 2


def test_batches_keep_no_result(shop: Shop) -> None:
    with pytest.raises(ConfigurationError, match="batch"):
        register(shop.app, lambda _message: 1, batch=True)


# -- the answer of a webhook ------------------------------------------------------------------


def posted(hook: Webhook, body: bytes) -> tuple[int, bytes, bytes]:
    """Status, content type and body of what the hook answers."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(event: Any) -> None:
        sent.append(event)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"ce-id", b"one")]}
    asyncio.run(hook(scope, receive, send))
    return sent[0]["status"], dict(sent[0]["headers"])[b"content-type"], sent[1]["body"]


@pytest.mark.parametrize("mounted", [True, False])
def test_a_webhook_answers_with_the_kept_result(shop: Shop, mounted: bool) -> None:
    calls = register(shop.app, lambda message: {"got": message.json()["id"]}, message_id="body.id")
    hook = Webhook(
        shop.app.answer_async if mounted else None, topic=TOPIC, verify=lambda headers, body: True
    )
    if not mounted:
        shop.app.consume(hook)
    wanted = (200, b"application/json", b'{"got":"a"}')
    assert posted(hook, b'{"id": "a"}') == wanted
    assert posted(hook, b'{"id": "a"}') == wanted
    assert calls == ["a"]


def test_a_webhook_of_a_failed_handler_says_so(shop: Shop) -> None:
    register(shop.app, lambda message: message.json()["no"], message_id="body.id")
    hook = Webhook(topic=TOPIC, verify=lambda headers, body: True)
    shop.app.consume(hook)
    assert posted(hook, b'{"id": "a"}') == (200, b"text/plain; charset=utf-8", b"failed\n")


# -- replies ----------------------------------------------------------------------------------


def replies(shop: Shop, body: Body, **options: Any) -> list[Any]:
    shop.app.handler(REPLIES, consumer="requester")(lambda message, tx: None)
    return register(shop.app, body, **{"keep_result": False, "reply_to": REPLIES} | options)


def test_a_reply_is_staged_with_key_and_correlation(shop: Shop) -> None:
    replies(shop, lambda _message: {"total": 100})
    shop.deliver(paid("one", key="k", headers=[("correlation-id", "c1")]))
    shop.deliver(paid("two"))
    (_, topic, key, body, headers), (_, _, no_key, _, rows) = staged(shop.raw)
    assert (topic, key, body) == (REPLIES, "k", {"total": 100})
    assert (headers["correlation-id"], headers["causation-id"]) == ("c1", "one")
    assert (no_key, rows["correlation-id"]) == (None, "two")


def test_a_reply_goes_where_the_message_says(shop: Shop) -> None:
    replies(shop, lambda _message: 1, reply_to=True)
    shop.deliver(paid("one", headers=[("Reply-To", REPLIES)]))
    assert shop.deliver(paid("two")) is Outcome.PROCESSED, "nobody waits for a reply"
    assert [topic for _, topic, *_ in staged(shop.raw)] == [REPLIES]
    assert shop.deliver(paid("three", headers=[("reply-to", "nowhere")])) is Outcome.FAILED


def test_none_is_no_reply(shop: Shop) -> None:
    replies(shop, lambda _message: None)
    shop.deliver(paid("one"))
    assert staged(shop.raw) == []


def test_a_reply_of_a_failed_run_leaves_with_it(shop: Shop) -> None:
    def body(message: Message[Any]) -> Any:
        return object() if message.attempt == 1 else "done"

    replies(shop, body, keep_result=True)
    assert shop.deliver(paid("one")) is Outcome.FAILED
    assert staged(shop.raw) == []
    drain(shop.app)
    ((_, _, _, said, _),) = staged(shop.raw)
    assert said == "done"


def test_the_reply_has_its_id_whatever_else_was_staged(shop: Shop) -> None:
    """A replay that stages more, or less, replies under the same id."""
    extra = iter([0, 2])
    shop.app.handler(REPLIES, consumer="requester")(lambda message, tx: None)

    @shop.app.handler(TOPIC, consumer=CONSUMER, reply_to=REPLIES, keep_payload="always")
    def handle(message: Message[Any], tx: Any) -> str:
        for _ in range(next(extra)):
            shop.app.outbox.stage(tx, REPLIES, "more")
        return "done"

    shop.deliver(paid("one"))
    with Admin(shop.app) as admin:
        admin.replay(InboxFilter(consumer=CONSUMER, message_id="one"), actor="me")
    assert sorted(body for _, _, _, body, _ in staged(shop.raw)) == ["done", "more", "more"]


def replies_to_a_replay(shop: Shop, *answers: Any, **options: Any) -> list[tuple[str, Any]]:
    """(id, body) of what is staged when the message is processed, and then replayed."""
    values = iter(answers)
    replies(shop, lambda _message: next(values), keep_payload="always", **options)
    shop.deliver(paid("one", key="k"))
    sent = staged(shop.raw)
    shop.raw.execute("DELETE FROM txbox_outbox")  # as the relay does
    with Admin(shop.app) as admin:
        for _ in answers[1:]:
            replayed = admin.replay(InboxFilter(consumer=CONSUMER, message_id="one"), actor="me")
            assert replayed.processed == 1
            sent += staged(shop.raw)
            shop.raw.execute("DELETE FROM txbox_outbox")
    return [(message, body) for message, _, _, body, _ in sent]


def test_a_replay_with_another_answer_replies_under_an_id_of_its_own(shop: Shop) -> None:
    """The receiver would quarantine another payload under the first reply's id."""
    first, same, other = replies_to_a_replay(shop, {"n": 1}, {"n": 1}, {"n": 2})
    assert (first[1], same, other[1]) == ({"n": 1}, first, {"n": 2})
    assert other[0] != first[0]
    for each, body in (first, same, other):
        shop.app.process(Message(id=each, topic=REPLIES, payload=json.dumps(body).encode()))
    assert shop.raw.value("SELECT count(*) FROM txbox_quarantine") == 0


def test_with_kept_results_a_replay_replies_what_is_kept(shop: Shop) -> None:
    first, again, third = replies_to_a_replay(shop, {"n": "ä"}, {"n": 2}, None, keep_result=True)
    assert first[1] == {"n": "ä"}
    assert again == third == first
    assert shop.app.answer(paid("one", key="k")).result == {"n": "ä"}, "as it was replied"


def test_no_reply_that_is_kept_stays_none(shop: Shop) -> None:
    assert replies_to_a_replay(shop, None, {"n": 2}, keep_result=True) == []


@pytest.mark.parametrize(
    "options",
    [{"batch": True}, {"transactional": False}, {"reply_to": ""}],
    ids=str,
)  # fmt: skip
def test_what_a_reply_does_not_go_with(shop: Shop, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        replies(shop, lambda _message: 1, **options)


def test_an_async_handler_replies(postgresql_url: str, raw: Callable[[str], Raw]) -> None:
    async def deliver() -> None:
        async with App(postgresql_url) as app:
            app.handler(REPLIES, consumer="requester")(lambda message, tx: None)

            @app.handler(TOPIC, consumer=CONSUMER, reply_to=REPLIES)
            async def handle(message: Message[Any], tx: Any) -> str:
                return "done"

            await app.process_async(paid("one"))

    asyncio.run(deliver())
    ((_, _, _, body, _),) = staged(raw(postgresql_url))
    assert body == "done"
