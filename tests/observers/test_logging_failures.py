"""A failure in the log without any set-up: one line with its traceback, and no data of others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from tests.store.test_codec import Xor
from tests.support.shop import CONSUMER, TOPIC, execute, opened, paid
from tests.support.sources import Memory
from tests.support.workers import worker
from txbox import App, Batching, Message, Outcome, Reject, RetryPolicy
from txbox.events import MessageFailed
from txbox.observers.logging import LoggingObserver

pytestmark = pytest.mark.every_database

LATER = RetryPolicy(base=timedelta(hours=1))


@pytest.fixture(autouse=True)
def as_it_is_imported() -> Iterator[None]:
    """The default level."""
    log = logging.getLogger("txbox")
    before = log.level
    log.setLevel(logging.NOTSET)
    yield
    log.setLevel(before)


def fails(message: Message[Any], tx: Any) -> None:
    raise LookupError(f"no price of {message.id}")


def the_failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return level, line and traceback of every log record."""
    for record in caplog.records:
        assert record.name == "txbox"
    formatter = logging.Formatter("%(levelname)s %(message)s")
    return [formatter.format(record) for record in caplog.records]


def assert_told(text: str, level: str, message_id: str) -> None:
    assert text.startswith(f"{level} Message"), text
    assert f"consumer={CONSUMER} message_id={message_id} " in text
    assert "Traceback (most recent call last):" in text
    assert text.endswith(f"LookupError: no price of {message_id}")
    assert __file__ in text
    assert "src/txbox" not in text, "the reader's code comes first"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["process", "process_async"])
def test_a_failing_handler_is_one_warning_with_its_traceback(
    database_url: str, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(database_url) as shop:
        shop.handler(fails, retry=LATER)
        message = paid("a")
        outcome = (
            asyncio.run(shop.app.process_async(message))
            if asynchronous
            else shop.app.process(message)
        )
        assert outcome is Outcome.FAILED
    (told,) = the_failures(caplog)
    assert_told(told, "WARNING", "a")


def test_an_async_handler_too(postgresql_url: str, caplog: pytest.LogCaptureFixture) -> None:
    with opened(postgresql_url) as shop:

        @shop.app.handler(TOPIC, consumer=CONSUMER, retry=LATER)
        async def handle(message: Message[Any], tx: Any) -> None:
            fails(message, tx)

        async def process() -> Outcome:
            try:
                return await shop.app.process_async(paid("a"))
            finally:
                await shop.app.close_async()

        assert asyncio.run(process()) is Outcome.FAILED
    (told,) = the_failures(caplog)
    assert_told(told, "WARNING", "a")


def test_a_dead_letter_is_an_error(database_url: str, caplog: pytest.LogCaptureFixture) -> None:
    with opened(database_url) as shop:
        shop.handler(fails, retry=RetryPolicy(max_attempts=1))
        assert shop.deliver(paid("a")) is Outcome.DEAD
    (told,) = the_failures(caplog)
    assert_told(told, "ERROR", "a")


@pytest.mark.parametrize("size", [1, 10])
def test_a_worker_tells_of_each_failure_of_a_batch(
    database_url: str, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(database_url, batching=Batching(size)) as shop:

        def odd(message: Message[Any], tx: Any) -> None:
            if message.id in ("b", "d"):
                fails(message, tx)

        shop.handler(odd, retry=LATER)
        shop.app.consume(Memory([paid(each) for each in "abcde"]))
        worker(shop.app, once=True).run()
    told = [the_failure for the_failure in the_failures(caplog) if "MessageFailed" in the_failure]
    assert len(told) == 2
    for message_id, text in zip("bd", told, strict=True):
        assert_told(text, "WARNING", message_id)


def test_observers_add_to_the_log_and_one_that_raises_is_told_and_kept(
    sqlite_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[object] = []

    def alert(event: object) -> None:
        heard.append(event)
        raise OSError("the pager is away")

    with opened(sqlite_url, observers=[alert]) as shop:
        shop.handler(fails, retry=LATER)
        shop.deliver(paid("a"))
        shop.deliver(paid("b"))
    assert [type(each) for each in heard] == [MessageFailed, MessageFailed]
    first, observer, second, _ = the_failures(caplog)
    assert_told(first, "WARNING", "a")
    assert_told(second, "WARNING", "b")
    assert observer.startswith("ERROR An observer failed on MessageFailed; it stays registered.")
    assert "OSError: the pager is away" in observer


def test_the_log_is_quieted_by_its_level(sqlite_url: str, caplog: pytest.LogCaptureFixture) -> None:
    with opened(sqlite_url) as shop:
        shop.handler(fails, retry=LATER)
        logging.getLogger("txbox").setLevel(logging.ERROR)
        shop.deliver(paid("a"))
        assert not caplog.records
        logging.getLogger("txbox").setLevel(logging.WARNING)
        shop.deliver(paid("b"))
    assert len(caplog.records) == 1


def test_a_logging_observer_takes_the_place_of_the_log(
    sqlite_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(sqlite_url, observers=[LoggingObserver(as_json=True)]) as shop:
        shop.handler(fails, retry=LATER)
        shop.deliver(paid("a"))
    (record,) = caplog.records
    assert record.getMessage().startswith('{"event": "MessageFailed"')
    assert record.exc_info is not None
    assert "exception" not in vars(record)["txbox"]


def test_what_goes_well_makes_no_event_unless_somebody_hears_it(
    sqlite_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with App(sqlite_url) as app:
        app.handler(TOPIC, consumer=CONSUMER)(lambda message, tx: None)
        for level, told in ((logging.INFO, False), (logging.DEBUG, True)):
            logging.getLogger("txbox").setLevel(level)
            assert bool(app.events) is told
            app.process(paid(str(level)))
            app.process(paid(str(level)))
        assert [record.getMessage().partition(" ")[0] for record in caplog.records] == [
            "TransactionCommitted", "MessageProcessed", "MessageDuplicate",
        ]  # fmt: skip


def test_no_traceback_quotes_a_row(database_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Neither that of the database's error itself nor that of a handler's error raised from it."""
    with opened(database_url) as shop:
        shop.raw.execute("CREATE TABLE person (email varchar(64) PRIMARY KEY)")

        def twice(message: Message[Any], tx: Any) -> None:
            execute(tx, "INSERT INTO person VALUES ('her@example.org')")
            try:
                execute(tx, "INSERT INTO person VALUES ('her@example' || '.org')"
                        if shop.raw.product != "mysql" else
                        "INSERT INTO person VALUES (concat('her@example', '.org'))")  # fmt: skip
            except Exception as error:
                if message.id == "chained":
                    raise RuntimeError("known\rERROR forged") from error
                raise

        shop.handler(twice, retry=LATER)
        assert shop.deliver(paid("alone")) is Outcome.FAILED
        assert shop.deliver(paid("chained")) is Outcome.FAILED
    alone, chained = the_failures(caplog)
    assert "her@example.org" not in alone.replace("VALUES ('her@example.org')", "")
    assert "her@example.org" not in chained.replace("VALUES ('her@example.org')", "")
    assert "in twice" in alone
    assert "direct cause" in chained
    assert chained.endswith("RuntimeError: known\\rERROR forged")


@pytest.mark.parametrize("failure", [ValueError, Reject])
def test_a_codec_hides_errors_from_the_log(
    database_url: str, failure: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(message: Message[Any], tx: Any) -> None:
        raise failure("hidden-cause")

    with opened(database_url, codec=Xor()) as shop:
        shop.handler(fail, retry=LATER)
        shop.deliver(paid("a"))
    (told,) = the_failures(caplog)
    assert f"error_type={failure.__name__}" in told
    assert "hidden-cause" not in told
    assert "Traceback" not in told
