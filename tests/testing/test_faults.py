"""Each fault by itself, on every database: a handler meets the driver's exception, and txbox what follows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import proofs
from tests.support.databases import Raw
from txbox import App, BrokerUnavailable, Message, Outcome
from txbox.brokers.http import Http
from txbox.testing import (
    broker_away,
    database_away,
    deadlock,
    deliver,
    drain,
    lost_commit_answer,
    serialization_failure,
    statement_timeout,
)

_MESSAGE = proofs.MESSAGES[0]


@pytest.fixture
def app(database_url: str) -> Iterator[App]:
    proofs.make_tables(database_url)
    with App(database_url) as app:
        yield app


@pytest.mark.parametrize("fault", [deadlock, serialization_failure, database_away])
def test_the_second_run_succeeds(app: App, database_url: str, fault: Any) -> None:
    app.handler("payments", consumer="billing")(proofs.handler_of("plain", is_async=False))
    with fault(app, nth=2):
        assert deliver(app, _MESSAGE) is Outcome.PROCESSED
    with Raw(database_url) as raw:
        assert raw.value("SELECT balance FROM account") == 97


def test_a_timeout_is_an_attempt(app: App) -> None:
    app.handler("payments", consumer="billing")(proofs.handler_of("plain", is_async=False))
    with statement_timeout(app):
        assert deliver(app, _MESSAGE) is Outcome.FAILED
    assert drain(app, ignore_dates=True) == [Outcome.PROCESSED]


def test_a_lost_answer_is_found_out(app: App, database_url: str) -> None:
    app.handler("payments", consumer="billing")(proofs.handler_of("plain", is_async=False))
    with lost_commit_answer():
        assert deliver(app, _MESSAGE) is Outcome.DUPLICATE
    with Raw(database_url) as raw:
        assert raw.value("SELECT balance FROM account") == 97


def test_what_is_swallowed_or_never_comes_fails_the_test(app: App) -> None:
    app.handler("payments", consumer="billing")(proofs.handler_of("suppresses", is_async=False))
    with (
        pytest.raises(AssertionError, match=r"swallowed a deadlock of .*in suppresses"),
        deadlock(app),
    ):
        deliver(app, _MESSAGE)
    with pytest.raises(AssertionError, match="fewer than 5 statements"), deadlock(app, nth=5):
        drain(app, ignore_dates=True)
    with pytest.raises(AssertionError, match="no answer was lost"), lost_commit_answer():
        pass


def test_a_broker_that_is_away_keeps_its_messages() -> None:
    destination = Http("https://example.com/hooks")
    message: Message[Any] = Message(id="1", topic="orders", payload=b"{}")
    with broker_away(destination), pytest.raises(BrokerUnavailable, match="is away"):
        destination.publisher().publish([message], 1.0)
