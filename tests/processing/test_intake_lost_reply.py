"""The answer to a COMMIT is lost: what mode="stored" has stored waits for no lease to run out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from txbox import App, Message, Outcome
from txbox.connections.psycopg import PsycopgConnection
from txbox.errors import Fault, StoreUnavailable
from txbox.processing.intake import Mode
from txbox.session import Result, Statement, drive
from txbox.store import leases

pytestmark = pytest.mark.every_database


def test_rows_stored_by_a_commit_in_doubt_are_given_back(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, lost = PsycopgConnection.commit_then, [True]

    async def committed(self: Any, statements: Sequence[Statement], then: Any) -> list[Result]:
        results = await commit(self, statements, then)
        if lost and lost.pop():
            raise StoreUnavailable("lost", fault=Fault.UNAVAILABLE, definite=False)
        return results

    with App(postgresql_url) as app:

        @app.handler("orders", consumer="billing", mode="stored")
        def handle(message: Message[Any], tx: Any) -> None:
            del message, tx

        connections, handler = app.database.sync, next(iter(app.handlers))
        assert connections is not None
        drive(connections, app.protocol.check_schema)
        monkeypatch.setattr(PsycopgConnection, "commit_then", committed)
        messages: list[Message[Any]] = [Message(id=str(n), topic="orders") for n in range(3)]
        answers = drive(connections, app.intake.take_with_retries, handler, messages, Mode.LEASED)
        assert [answer.outcome for answer in answers] == [Outcome.DEFERRED] * 3
        due = drive(
            connections,
            leases.lease,
            app.store,
            "billing",
            token="t",
            limit=10,
            lease=app.lease,
            suspect=False,
        )
    assert not lost
    assert sorted(row.arrival.message_id for row in due) == ["0", "1", "2"]
