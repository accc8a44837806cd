"""A connection that reported trouble is not used again, nor are the idle ones beside it (promise 2.14)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.connections.test_base_conformance import BACKEND, SERVERS, every, kill
from tests.support.connections import Given, Held, do, statement
from tests.support.databases import Raw
from txbox import App, Message, Outcome
from txbox.admin import Admin
from txbox.events import ConsumptionPaused, Event

pytestmark = pytest.mark.every_database

IDLE = 3
PINNED = {
    "postgresql": "SET default_transaction_read_only = on",
    "mysql": "SET SESSION TRANSACTION READ ONLY",
}


class Service:
    """An app whose pool has several idle connections."""

    def __init__(self, given: Given, number: int) -> None:
        self.given = given
        self.events: list[Event] = []
        target = given.target
        observers = [self.events.append]
        self.app = (
            App(django=target, observers=observers)
            if given.kind.family == "django"
            else App(target, observers=observers)
        )
        self.topic = f"t{number}"
        self._numbers = iter(range(number, number + 100))
        given.database = self.app.database

        async def handle_async(message: Message[Any], tx: Any) -> None: ...

        def handle(message: Message[Any], tx: Any) -> None: ...

        handler = handle_async if given.kind.is_async else handle
        self.app.handler(self.topic, consumer=f"c{number}")(handler)
        # pauses and the schema are looked at once
        assert self.process() is Outcome.PROCESSED

    def idle(self, *statements: str) -> list[int]:
        """Have idle connections, on which these statements were run; returns their processes."""
        count = 1 if self.given.kind.family == "django" else IDLE
        held = [self.given.acquire() for _ in range(count)]
        processes = [self._ran(each, statements) for each in held]
        for each in held:
            each.release()
        return processes

    def _ran(self, held: Held, statements: tuple[str, ...]) -> int:
        held.begin()
        process = int(held.execute(statement(BACKEND[self.given.kind.dialect])).rows[0][0])
        for sql in statements:
            held.execute(statement(sql))
        held.commit()
        return process

    def message(self) -> Message[Any]:
        return Message(topic=self.topic, id=str(next(self._numbers)), payload=b"{}")

    def process(self) -> Outcome:
        message, app = self.message(), self.app
        outcome: Outcome = self.given.wait(
            app.process_async(message) if self.given.kind.is_async else done(app.process, message)
        )
        return outcome

    def send(self) -> dict[str, Outcome]:
        message, app = self.message(), self.app
        sent: dict[str, Outcome] = self.given.wait(
            app.send_async(message) if self.given.kind.is_async else done(app.send, message)
        )
        return sent

    def transact(self, sql: str) -> None:
        app, family = self.app, self.given.kind.family
        if not self.given.kind.is_async:
            with app.transaction() as tx:
                do(family, tx, sql)
            return

        async def transact() -> None:
            async with app.transaction_async() as tx:
                await do(family, tx, sql)

        self.given.wait(transact())

    def status(self) -> None:
        if not self.given.kind.is_async:
            # otherwise it has a loop of its own, and connections of that
            Admin(self.app).status()


async def done(call: Callable[..., Any], *args: Any) -> Any:
    return call(*args)


@pytest.fixture
def service(given: Given, number: int) -> Service:
    return Service(given, number)


@every(dialects=SERVERS)
def test_dead_idle_connections_cost_no_call(service: Service, db: Raw) -> None:
    if service.given.kind.pooler:
        pytest.skip("the pooler's connections are not ours to kill")
    calls = (
        lambda: service.transact("SELECT 1"),
        service.send,
        service.process,
        service.status,
    )
    for call in calls:
        for process in service.idle():
            kill(db, service.given, process)
        call()
    paused = [event for event in service.events if isinstance(event, ConsumptionPaused)]
    assert paused == []


@every(dialects=SERVERS)
def test_idle_connections_that_are_read_only_cost_no_call(service: Service) -> None:
    if service.given.kind.pooler:
        pytest.skip("the pooler's connections are not ours to change")
    pinned = PINNED[service.given.kind.dialect]
    for call in (service.process, service.send, service.process):
        service.idle(pinned)
        call()
    paused = [event for event in service.events if isinstance(event, ConsumptionPaused)]
    assert paused == []


@every(dialects=SERVERS)
def test_a_write_on_a_read_only_connection_fails_once(service: Service, db: Raw) -> None:
    if service.given.kind.pooler:
        pytest.skip("the pooler's connections are not ours to change")
    service.idle(PINNED[service.given.kind.dialect])
    failures = 0
    for _ in range(2):
        try:
            service.transact("UPDATE account SET balance = 1 WHERE id = -1")
        except Exception:  # noqa: BLE001  # of each driver
            failures += 1
    # asyncpg's pool resets what it takes back, and some pools have another connection to begin with
    assert failures <= 1
