"""One message's life on every kind of connection, through App: the store's statements meet every driver."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from tests.connections.test_base_conformance import balance, every
from tests.support.connections import Given, do
from tests.support.databases import Raw
from txbox import App, Headers, Message, Outcome, Reject, RetryPolicy


def app_of(given: Given, **options: Any) -> App:
    if given.kind.family == "django":
        return App(django=given.target, **options)
    return App(given.target, **options)


class Service:
    """An app with one handler that writes to `account` and then does what it is told."""

    def __init__(self, given: Given, number: int, **options: Any) -> None:
        self.given = given
        self.app = app_of(given)
        self.consumer = f"p{number}"
        self.raises: Exception | None = None
        self.runs = 0
        if given.kind.is_async:

            async def handle_async(message: Message[Any], tx: Any) -> None:
                await do(given.kind.family, tx, self._insert(message))
                self._end()

            register: Any = self.app.handler("t", consumer=self.consumer, **options)
            register(handle_async)
        else:

            def handle(message: Message[Any], tx: Any) -> None:
                do(given.kind.family, tx, self._insert(message))
                self._end()

            register = self.app.handler("t", consumer=self.consumer, **options)
            register(handle)

    def _insert(self, message: Message[Any]) -> str:
        return f"INSERT INTO account (id, balance) VALUES ({message.id}, 1)"

    def _end(self) -> None:
        self.runs += 1
        if self.raises is not None:
            raise self.raises

    def process(self, number: int, payload: bytes = b'{"a": 1}') -> Outcome:
        message: Message[Any] = Message(
            id=str(number), topic="t", payload=payload, type="a.b", key="k",
            headers=Headers([("h", "v"), ("b", b"\xff")]), content_type="application/json",
        )  # fmt: skip
        if self.given.kind.is_async:
            outcome: Outcome = self.given.wait(self.app.process_async(message))
            return outcome
        return self.app.process(message)

    def close(self) -> None:
        if self.given.kind.is_async:
            self.given.wait(self.app.close_async())
        else:
            self.app.close()


def row(db: Raw, consumer: str, columns: str) -> tuple[Any, ...]:
    (found,) = db.rows(f"SELECT {columns} FROM txbox_inbox WHERE consumer = ?", (consumer,))
    return tuple(value.decode() if isinstance(value, bytes) else value for value in found)


@every()
def test_a_message_is_processed_once(given: Given, db: Raw, number: int) -> None:
    service = Service(given, number)
    assert service.process(number) is Outcome.PROCESSED
    assert service.process(number) is Outcome.DUPLICATE
    assert service.process(number, b'{"a": 2}') is Outcome.QUARANTINED
    service.close()
    assert service.runs == 1
    assert balance(db, number) == 1
    assert row(db, service.consumer, "status, has_payload") == ("processed", 0)


@every()
def test_a_failure_is_parked_and_retried(given: Given, db: Raw, number: int) -> None:
    service = Service(given, number, retry=RetryPolicy(base=timedelta(hours=1), max_attempts=3))
    service.raises = ValueError("no")
    assert service.process(number) is Outcome.FAILED
    service.close()
    assert balance(db, number) is None
    assert row(db, service.consumer, "status, attempts, has_payload, error_type") == (
        "failed",
        1,
        1,
        "ValueError",
    )


@every()
def test_a_rejected_message_is_dead(given: Given, db: Raw, number: int) -> None:
    service = Service(given, number, keep_payload="always")
    service.raises = Reject("never")
    assert service.process(number) is Outcome.DEAD
    service.close()
    assert balance(db, number) is None
    assert row(db, service.consumer, "status, attempts") == ("dead", 1)


@every()
def test_a_kept_payload_stays(given: Given, db: Raw, number: int) -> None:
    service = Service(given, number, keep_payload="always")
    assert service.process(number) is Outcome.PROCESSED
    service.close()
    assert row(db, service.consumer, "status, has_payload, payload") == ("processed", 1, '{"a": 1}')
