"""Errors inside of a handler that look like the infrastructure's, and the other way round (promises 2.6, 2.8)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from tests.support.databases import NewDatabase, names
from tests.support.meddling import Verb, drive_meddled
from tests.support.proxy import Proxy
from tests.support.shop import Shop, execute, opened, paid
from txbox import Limits, Message, Outbox, Outcome, StoreError
from txbox.errors import Fault
from txbox.events import ConsumptionPaused, TransactionRetried
from txbox.handlers import Handler
from txbox.outcome import Answer
from txbox.processing import waiting
from txbox.session import Session, Statements, drive

pytestmark = pytest.mark.every_database


def raises(tx: Any, code: str) -> None:
    execute(tx, f"DO $$ BEGIN RAISE 'no' USING ERRCODE = '{code}'; END $$")


def take(shop: Shop, handler: Handler, *ids: str) -> list[Outcome]:
    settled = drive(shop.app._any_sync(), shop.app.intake.take, handler, [*map(paid, ids)])
    return [answer.outcome for answer in settled]


def test_a_message_alone_that_waits_too_long_for_a_lock_has_failed(
    new_database: NewDatabase,
) -> None:
    """A wait that txbox has not shortened is the handler's own: only a batch runs again for it."""
    with opened(new_database("postgresql")) as shop:
        handler = shop.handler(lambda message, tx: raises(tx, "55P03"))
        assert take(shop, handler, "a") == [Outcome.FAILED]
        assert (shop.calls, shop.row("a").attempts) == (["a"], 1)
        assert not shop.emitted(TransactionRetried)


def test_in_a_batch_the_one_that_waits_too_long_is_alone_before_it_has_failed(
    new_database: NewDatabase,
) -> None:
    def waits(message: Message[Any], tx: Any) -> None:
        if message.id == "b":
            raises(tx, "55P03")

    with opened(new_database("postgresql")) as shop:
        handler = shop.handler(waits)
        failed, processed = Outcome.FAILED, Outcome.PROCESSED
        assert take(shop, handler, "a", "b", "c") == [processed, failed, processed]
        assert (shop.calls.count("b"), shop.row("b").attempts) == (2, 1)
        assert [shop.effects(each) for each in "abc"] == [1, 0, 1]


# refuses the first row that is staged, and that a transaction was rolled back does not make it forget it
_ONE_DEADLOCK = {
    "postgresql": (
        "CREATE SEQUENCE staged",
        (
            "CREATE FUNCTION once() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "IF nextval('staged') = 1 THEN RAISE 'no' USING ERRCODE = '40P01'; END IF; RETURN NEW; END $$"
        ),
        "CREATE TRIGGER once BEFORE INSERT ON txbox_outbox FOR EACH ROW EXECUTE FUNCTION once()",
    ),
    "mysql": (
        "CREATE TABLE staged (n INT) ENGINE=MyISAM",
        "INSERT INTO staged VALUES (0)",
        (
            "CREATE TRIGGER once BEFORE INSERT ON txbox_outbox FOR EACH ROW BEGIN "
            "UPDATE staged SET n = n + 1; IF (SELECT n FROM staged) = 1 THEN "
            "SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213; END IF; END"
        ),
    ),
}
_KILL: dict[str, Callable[[Any], str]] = {
    "postgresql": lambda tx: f"SELECT pg_terminate_backend({tx.info.backend_pid})",
    "mysql": lambda tx: f"KILL {tx.thread_id()}",
}


@pytest.mark.parametrize("trouble", ["lost", "deadlock"])
@pytest.mark.parametrize("ids", [["a"], ["a", "b", "c"]], ids=["alone", "together"])
@pytest.mark.parametrize("name", names("postgresql", "mysql"))
def test_trouble_in_what_a_handler_stages_is_no_attempt(
    new_database: NewDatabase, name: str, ids: list[str], trouble: str
) -> None:
    """A handler that writes through txbox meets the same database as one that writes by itself."""
    with opened(new_database(name)) as shop:
        for statement in _ONE_DEADLOCK[shop.raw.product] if trouble == "deadlock" else ():
            shop.raw.execute(statement)

        def stages(message: Message[Any], tx: Any) -> None:
            if trouble == "lost" and len(shop.calls) == 1:
                shop.raw.execute(_KILL[shop.raw.product](tx))
            Outbox().stage(tx, "out", b"{}")

        handler = shop.handler(stages)
        settled = drive(
            shop.app._any_sync(),
            shop.app.intake.take_with_retries,
            handler,
            [*map(paid, ids)],
            for_s=10,
        )
        assert [answer.outcome for answer in settled] == [Outcome.PROCESSED] * len(ids)
        assert [shop.effects(message_id) for message_id in ids] == [1] * len(ids)
        assert shop.raw.value("SELECT count(*) FROM txbox_outbox") == len(ids)
        assert shop.raw.value("SELECT count(*) FROM txbox_attempt") == 0


class _Terminating(Proxy):
    """The first savepoint that a driver sends by itself is answered, and the session is ended behind the answer."""

    _ENDED = b"SFATAL\0VFATAL\0C57P01\0Mterminating connection due to administrator command\0\0"
    terminated = False

    def answer(self, data: bytes) -> bytes:
        if self.terminated or not data.startswith(b"C") or b"SAVEPOINT\0Z" not in data:
            return data
        self.terminated = True
        said = b"E" + (len(self._ENDED) + 4).to_bytes(4, "big") + self._ENDED
        return data[: data.rindex(b"Z")] + said


@pytest.mark.parametrize("ids", [["a"], ["a", "b", "c"]], ids=["alone", "together"])
def test_an_error_without_a_number_on_a_connection_that_is_gone_is_no_attempt(
    new_database: NewDatabase, ids: list[str]
) -> None:
    """psycopg finds two answers to one of its own statements, and says that it is an internal error."""
    raised: list[BaseException] = []

    def nests(message: Message[Any], tx: Any) -> None:
        try:
            with tx.transaction():
                execute(tx, "SELECT 1")
        except Exception as error:
            raised.append(error)
            raise

    with _Terminating(new_database("postgresql")) as proxy, opened(proxy.url) as shop:
        handler = shop.handler(nests)
        settled = drive(
            shop.app._any_sync(), shop.app.intake.take_with_retries, handler, [*map(paid, ids)], for_s=10
        )  # fmt: skip
        assert [answer.outcome for answer in settled] == [Outcome.PROCESSED] * len(ids)
        assert [type(error) for error in raised] == [psycopg.InternalError]
        assert [shop.effects(message_id) for message_id in ids] == [1] * len(ids)
        assert shop.raw.value("SELECT count(*) FROM txbox_attempt") == 0


def test_another_connection_of_the_handlers_that_is_lost_is_its_failure(
    new_database: NewDatabase,
) -> None:
    def elsewhere(message: Message[Any], tx: Any) -> None:
        raise psycopg.OperationalError("connection to server at another.example failed")

    with opened(new_database("postgresql")) as shop:
        handler = shop.handler(elsewhere)
        assert take(shop, handler, "a") == [Outcome.FAILED]
        assert (shop.calls, shop.row("a").attempts) == (["a"], 1)
        assert not shop.emitted(ConsumptionPaused)


_NO_ROOM = {
    "postgresql": "DO $$ BEGIN RAISE 'no' USING ERRCODE = '53100'; END $$",
    "mysql": "SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1114",
}


@pytest.mark.parametrize(("times", "attempts"), [(8, 0), (13, 1)])
@pytest.mark.parametrize("name", names("postgresql", "mysql"))
def test_a_handler_whose_table_has_no_room_waits_for_some_before_that_is_an_attempt(
    new_database: NewDatabase, name: str, times: int, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inbox may still have some: then nothing of txbox's notices that the disk is full."""
    monkeypatch.setattr(waiting, "_ROOM_TRIES", 10)
    monkeypatch.setattr(waiting, "_ROOM_PAUSE_S", 0.01)
    with opened(new_database(name), limits=Limits(conflict_retries=2)) as shop:

        def writes(message: Message[Any], tx: Any) -> None:
            if len(shop.calls) <= times:
                execute(tx, _NO_ROOM[shop.raw.product])

        handler = shop.handler(writes)
        outcome = Outcome.FAILED if attempts else Outcome.PROCESSED
        assert take(shop, handler, "a") == [outcome]
        assert (len(shop.calls), shop.row("a").attempts) == (
            times if attempts else times + 1,
            attempts,
        )


def test_a_prepared_statement_that_is_gone_is_no_attempt(new_database: NewDatabase) -> None:
    """A pooler gave this transaction to another server connection; the next one prepares again."""

    def forgets(message: Message[Any], tx: Any) -> None:
        if len(shop.calls) == 1:
            raises(tx, "26000")

    with opened(new_database("postgresql")) as shop:
        handler = shop.handler(forgets)
        assert take(shop, handler, "a") == [Outcome.PROCESSED]
        assert (shop.calls, shop.effects("a"), shop.row("a").attempts) == (["a", "a"], 1, 0)
        assert shop.raw.value("SELECT count(*) FROM txbox_attempt") == 0


@pytest.mark.parametrize("retries", [0, 5])
@pytest.mark.parametrize("ids", [["a"], ["a", "b", "c"]], ids=["alone", "together"])
def test_an_answer_to_a_commit_that_nobody_knows_leaves_it_in_doubt(
    new_database: NewDatabase, ids: list[str], retries: int
) -> None:
    """A pooler says what it likes after a transaction that has been committed: only a claim decides."""
    with opened(new_database("postgresql"), limits=Limits(conflict_retries=retries)) as shop:
        handler = shop.handler()
        doubts: list[StoreError] = []

        async def doubtful(verb: Verb, statements: Statements, carried_out: Any) -> Any:
            answer = await carried_out()
            if verb == "commit" and statements and not doubts:
                doubts.append(StoreError("odd", fault=Fault.OTHER, code="08P01", definite=False))
                raise doubts[0]
            return answer

        async def delivered(db: Session) -> dict[str, Answer]:
            arrivals = [handler.arrival(paid(message_id), Limits()) for message_id in ids]
            return await shop.app.protocol.deliver(db, handler, arrivals)

        settled = drive_meddled(
            shop.app._any_sync(), doubtful, shop.app.protocol.with_retries, delivered
        )
        assert {message_id: settled[message_id].outcome for message_id in ids} == dict.fromkeys(
            ids, Outcome.DUPLICATE
        )
        assert shop.calls == ids
        assert [shop.effects(message_id) for message_id in ids] == [1] * len(ids)
        assert shop.raw.value("SELECT count(*) FROM txbox_attempt") == 0
        assert len(doubts) == 1


@pytest.mark.parametrize("fault", [Fault.PREPARED, Fault.UNAVAILABLE, Fault.CONFLICT])
@pytest.mark.parametrize("ids", [["a"], ["a", "b", "c"]], ids=["alone", "together"])
def test_a_close_that_certainly_failed_is_no_attempt(
    new_database: NewDatabase, ids: list[str], fault: Fault
) -> None:
    """The error is of txbox's own statement, and nothing was committed: the handler has not failed."""
    with opened(new_database("postgresql")) as shop:
        handler = shop.handler()
        refused: list[StoreError] = []

        async def refusing(verb: Verb, statements: Statements, carried_out: Any) -> Any:
            if verb == "commit" and statements and not refused:
                refused.append(StoreError("not now", fault=fault))
                raise refused[0]
            return await carried_out()

        arrivals = [handler.arrival(paid(message_id), Limits()) for message_id in ids]
        settled = drive_meddled(
            shop.app._any_sync(), refusing, shop.app.protocol.deliver, handler, arrivals
        )
        assert {message_id: settled[message_id].outcome for message_id in ids} == dict.fromkeys(
            ids, Outcome.PROCESSED
        )
        assert sorted(shop.calls) == sorted(ids * 2)
        assert [shop.effects(message_id) for message_id in ids] == [1] * len(ids)
        assert shop.raw.value("SELECT count(*) FROM txbox_attempt") == 0
        assert not shop.emitted(ConsumptionPaused)


@pytest.mark.parametrize("fault", [Fault.PREPARED, Fault.DUPLICATE, Fault.CONFLICT])
@pytest.mark.parametrize("ids", [["a"], ["a", "b", "c"]], ids=["alone", "together"])
def test_a_claim_that_was_refused_is_claimed_again(
    new_database: NewDatabase, ids: list[str], fault: Fault
) -> None:
    """DUPLICATE comes while the key's index is rebuilt, and is no row that somebody has written."""
    with opened(new_database("postgresql")) as shop:
        handler = shop.handler()
        refused: list[StoreError] = []

        async def refusing(verb: Verb, statements: Statements, carried_out: Any) -> Any:
            answer = await carried_out()
            if verb == "begin" and not refused:
                refused.append(StoreError("not now", fault=fault))
                raise refused[0]
            return answer

        arrivals = [handler.arrival(paid(message_id), Limits()) for message_id in ids]
        settled = drive_meddled(
            shop.app._any_sync(), refusing, shop.app.protocol.deliver, handler, arrivals
        )
        assert {message_id: settled[message_id].outcome for message_id in ids} == dict.fromkeys(
            ids, Outcome.PROCESSED
        )
        assert shop.calls == ids
        assert shop.raw.value("SELECT count(*) FROM txbox_attempt") == 0
