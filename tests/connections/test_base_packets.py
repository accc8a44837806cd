"""A message that is larger than max_allowed_packet once it is escaped: the server may close the connection at that."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from tests.connections.test_base_processing import app_of
from tests.support.connections import KINDS, Given, do
from tests.support.databases import Raw
from tests.support.sources import Memory
from tests.support.waiting import eventually
from tests.support.workers import running, worker
from txbox import Limits, Message, RetryPolicy

MYSQL = [
    # MySQL takes four times as much
    pytest.param(kind, marks=[pytest.mark.slow] if kind.product == "mysql" else [])
    for kind in KINDS
    if kind.dialect == "mysql" and "sessionmaker" not in kind.name and "autocommit" not in kind.name
]
LARGE = "large"


@pytest.mark.parametrize("mode", ["inline", "kept", "stored"])
@pytest.mark.parametrize("given", MYSQL, ids=str, indirect=True)
def test_a_message_that_the_server_refuses_for_its_size_is_accounted_for_and_the_others_are_done(
    given: Given, db: Raw, number: int, mode: str
) -> None:
    limit = int(db.value("SELECT @@max_allowed_packet"))
    app = app_of(given, limits=Limits(payload_bytes=limit * 2))
    consumer, good = f"c{number}", [number + each for each in range(4)]

    def sql(message: Message[Any]) -> str:
        if message.key == LARGE:
            raise ValueError("told to fail")
        return f"INSERT INTO account (id, balance) VALUES ({message.id}, 1)"

    options: dict[str, Any] = {
        "consumer": consumer,
        "mode": "stored" if mode == "stored" else "inline",
        "keep_payload": "always" if mode == "kept" else "unfinished",
        "retry": RetryPolicy(max_attempts=2, base=timedelta(0)),
    }
    if given.kind.is_async:

        async def handle_async(message: Message[Any], tx: Any) -> None:
            await do(given.kind.family, tx, sql(message))

        register: Any = app.handler("t", **options)
        register(handle_async)
    else:

        def handle(message: Message[Any], tx: Any) -> None:
            do(given.kind.family, tx, sql(message))

        register = app.handler("t", **options)
        register(handle)
    # each is escaped to two bytes
    quotes = b"'" * (limit // 2 if given.kind.product == "mysql" else limit)
    large: Message[Any] = Message(
        id=str(number + 9), topic="t", key=LARGE, payload=b'"%b"' % quotes
    )
    messages = [Message[Any](id=str(each), topic="t", payload=b"1") for each in good]
    source = Memory([*messages[:2], large, *messages[2:]], endless=True)
    app.consume(source)

    def done() -> int:
        return int(
            db.value("SELECT count(*) FROM account WHERE id BETWEEN ? AND ?", (number, number + 9))
        )

    def account() -> list[Any]:
        left = "SELECT status FROM txbox_inbox WHERE consumer = ? AND status <> 'processed'"
        aside = "SELECT 'quarantined' FROM txbox_quarantine WHERE consumer = ?"
        return [row[0] for row in (*db.rows(left, (consumer,)), *db.rows(aside, (consumer,)))]

    with running(worker(app)) as codes:
        eventually(lambda: codes or done() == len(good), "the others are done")
        eventually(lambda: codes or account() in (["dead"], ["quarantined"]), f"{account()}")
        eventually(lambda: codes or source.has_settled(5), "all are settled")
        assert codes == []
    assert codes == [0]
    (given.wait(app.close_async()) if given.kind.is_async else app.close())
