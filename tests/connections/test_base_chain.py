"""What a handler stages and returns, on every kind of connection: outbox, effects, results, order, relay."""

from __future__ import annotations

from typing import Any

import pytest

from tests.connections.test_base_conformance import every
from tests.connections.test_base_processing import app_of
from tests.support.connections import Given
from tests.support.databases import Raw
from tests.support.workers import run_of
from txbox import App, Message, Outcome
from txbox.outcome import Answer
from txbox.session import drive, drive_async
from txbox.worker.relay import Relay

pytestmark = pytest.mark.every_database


class Chain:
    """An ordered handler that stages a message and an effect, and whose result is kept."""

    def __init__(self, given: Given, number: int) -> None:
        self.given = given
        self.app: App = app_of(given)
        self.number = number
        app, out, mail = self.app, f"out{number}", f"mail{number}"
        register = app.handler(
            f"in{number}", consumer=f"chain{number}", ordered=True, keep_result=True
        )
        if given.kind.is_async:

            @register
            async def handle_async(message: Message[Any], tx: Any) -> dict[str, str]:
                await app.effects.stage_async(tx, mail, {"to": "ann"})
                own_id = await app.outbox.stage_async(
                    tx, out, {"a": 1}, key=message.key, ordered=True
                )
                return {"staged": own_id}

            @app.handler(out, consumer=f"after{number}")
            async def after_async(message: Message[Any], tx: Any) -> None: ...

            @app.effect(mail)
            async def send_async(message: Message[Any]) -> None: ...

        else:

            @register
            def handle(message: Message[Any], tx: Any) -> dict[str, str]:
                app.effects.stage(tx, mail, {"to": "ann"})
                own_id = app.outbox.stage(tx, out, {"a": 1}, key=message.key, ordered=True)
                return {"staged": own_id}

            @app.handler(out, consumer=f"after{number}")
            def after(message: Message[Any], tx: Any) -> None: ...

            @app.effect(mail)
            def send(message: Message[Any]) -> None: ...

    def answer(self) -> Answer:
        message: Message[Any] = Message(id="1", topic=f"in{self.number}", key="k", payload=b"{}")
        if self.given.kind.is_async:
            answer: Answer = self.given.wait(self.app.answer_async(message))
            return answer
        return self.app.answer(message)

    def perform(self, operation: Any, *args: Any, **kwargs: Any) -> Any:
        if self.app.database.sync is not None:
            return drive(self.app.database.sync, operation, *args, **kwargs)
        assert self.app.database.asynchronous is not None
        return self.given.wait(
            drive_async(self.app.database.asynchronous, operation, *args, **kwargs)
        )

    def close(self) -> None:
        if self.given.kind.is_async:
            self.given.wait(self.app.close_async())
        else:
            self.app.close()


@every()
def test_a_chain(given: Given, db: Raw, number: int) -> None:
    chain = Chain(given, number)
    first, again = chain.answer(), chain.answer()
    staged = db.rows("SELECT id, cause_id FROM txbox_outbox WHERE topic = ?", (f"out{number}",))
    (route,) = chain.app.routes.all()
    run = run_of(chain.app)
    # the App's connections belong to the loop of the test
    run.driver.perform = chain.perform  # type: ignore[method-assign]
    relay = Relay(run, route)
    while relay.turn():
        pass
    chain.close()
    assert (first.outcome, again.outcome) == (Outcome.PROCESSED, Outcome.DUPLICATE)
    assert first.result == again.result
    assert [tuple(map(_text, row)) for row in staged] == [(first.result["staged"], "1")]
    rows = db.rows(
        "SELECT consumer, status, message_id FROM txbox_inbox WHERE consumer IN (?, ?, ?) ORDER BY consumer",
        (f"after{number}", f"chain{number}", f"effect:mail{number}"),
    )
    after, made, effect = (tuple(map(_text, row)) for row in rows)
    assert after == (f"after{number}", "pending", first.result["staged"])
    assert made == (f"chain{number}", "processed", "1")
    assert effect[:2] == (f"effect:mail{number}", "pending")


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
