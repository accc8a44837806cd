"""What a failover of the database has lost of what was acknowledged is named, where its source cannot give it again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.databases import NewDatabase
from tests.support.recording import Recorder
from tests.support.shop import CONSUMER, Shop, opened, paid
from tests.support.sources import Memory
from tests.support.waiting import eventually
from tests.support.workers import running, worker
from txbox import Batching, StoreUnavailable
from txbox.alerts import Alerting, Alerts
from txbox.events import CommitsLost
from txbox.store import jobs
from txbox.worker import commits, pulse


class History:
    """Which run of the database a worker reads: the real one has one in a test."""

    run = 0

    def __init__(self) -> None:
        self.seen: list[int] = []

    async def read(self, *_: object) -> str:
        self.seen.append(self.run)
        return str(self.run)

    def is_seen(self) -> None:
        """Wait for a look that began after this call."""
        count = len(self.seen)
        eventually(lambda: len(self.seen) > count + 1, "a look at the history")

    def is_another(self) -> None:
        self.is_seen()
        self.run += 1
        self.is_seen()


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> History:
    history = History()
    monkeypatch.setattr(pulse, "_BEAT_S", 0.05)
    monkeypatch.setattr(jobs, "history", history.read)
    return history


def lose(shop: Shop, *ids: str) -> None:
    for message_id in ids:
        shop.raw.execute(f"DELETE FROM txbox_inbox WHERE message_id = '{message_id}'")
        shop.raw.execute(f"DELETE FROM effect WHERE message_id = '{message_id}'")


@contextmanager
def settled(shop: Shop, source: Memory, **options: Any) -> Iterator[None]:
    """A worker that has settled all of a source, and looks at the history now and then."""
    shop.handler(**options)
    shop.app.consume(source)
    expected = len(source.waiting)
    with running(worker(shop.app)):
        eventually(lambda: len(source.settled) == expected and shop.effects() == expected)
        yield


@pytest.fixture
def one_shop(new_database: NewDatabase) -> Iterator[Shop]:
    with opened(new_database("sqlite"), batching=Batching(messages=1)) as shop:
        yield shop


@pytest.mark.every_database
@pytest.mark.parametrize("mode", ["inline", "stored"])
def test_what_is_missing_after_a_failover_is_named_once(
    shop: Shop, history: History, mode: str
) -> None:
    with settled(shop, Memory([*map(paid, "abcd")], endless=True), mode=mode):
        lose(shop, "b", "d")
        history.is_another()
        history.is_another()
    (loss,) = shop.emitted(CommitsLost)
    assert (loss.consumer, loss.count, loss.complete) == (CONSUMER, 2, True)
    assert sorted(loss.message_ids) == ["b", "d"]
    assert loss.since <= loss.until


def test_a_restart_that_has_lost_nothing_is_none(one_shop: Shop, history: History) -> None:
    with settled(one_shop, Memory([paid("a")], endless=True)):
        history.is_another()
        # without another history, a row may be gone for any reason
        lose(one_shop, "a")
        history.is_seen()
    assert not one_shop.emitted(CommitsLost)


def test_a_source_that_reads_again_what_was_lost_needs_no_word(
    one_shop: Shop, history: History
) -> None:
    source = Memory([paid("a")], endless=True)
    source.rewinds = True
    with settled(one_shop, source):
        lose(one_shop, "a")
    assert not history.seen, "nothing is looked at"


def test_what_is_remembered_is_bounded(
    one_shop: Shop, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the oldest that it remembers missing, there may be more."""
    monkeypatch.setattr(commits, "_IDS_MAX", 3)
    ids = [f"m{number}" for number in range(8)]
    with settled(one_shop, Memory([*map(paid, ids)], endless=True)):
        lose(one_shop, *ids)
        history.is_seen()
        history.run += 1
        # nothing is remembered behind it, so there is no other look
        eventually(lambda: one_shop.emitted(CommitsLost), "what is missing")
    (loss,) = one_shop.emitted(CommitsLost)
    assert not loss.complete
    assert 0 < loss.count <= 3


def test_an_alert_tells_how_many_and_from_when_to_when(
    new_database: NewDatabase, history: History
) -> None:
    recorder = Recorder()
    with (
        opened(new_database("sqlite"), alerts=Alerts(recorder)) as shop,
        settled(shop, Memory([*map(paid, "abc")], endless=True)),
    ):
        lose(shop, "c")
        history.is_another()
        eventually(lambda: recorder.bodies, "the alert")
    (alert,) = recorder.bodies
    assert (alert["code"], alert["subject"], alert["count"]) == ("commits-lost", CONSUMER, 1)
    assert "has lost 1 message, settled from 20" in alert["summary"]


def test_what_could_not_be_compared_is_compared_at_the_next_beat(
    one_shop: Shop, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared, failures = commits.Commits._compared, [StoreUnavailable("not now")]

    async def fails_once(*args: Any) -> list[CommitsLost]:
        if failures:
            raise failures.pop()
        return await compared(*args)

    monkeypatch.setattr(commits.Commits, "_compared", fails_once)
    with settled(one_shop, Memory([paid("a"), paid("b")], endless=True)):
        lose(one_shop, "b")
        history.is_another()
        eventually(lambda: one_shop.emitted(CommitsLost), "what is missing")
    assert not failures


def test_an_alert_that_could_not_be_staged_is_staged_at_the_next_beat(
    new_database: NewDatabase, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens, failures = Alerting.opened, [StoreUnavailable("not now")]

    async def fails_once(*args: Any) -> int:
        if failures:
            raise failures.pop()
        return await opens(*args)

    monkeypatch.setattr(Alerting, "opened", fails_once)
    recorder = Recorder()
    with (
        opened(new_database("sqlite"), alerts=Alerts(recorder)) as shop,
        settled(shop, Memory([paid("a"), paid("b")], endless=True)),
    ):
        lose(shop, "b")
        history.is_another()
        eventually(lambda: recorder.bodies, "the alert")
    assert not failures
    assert len(shop.emitted(CommitsLost)) == 1
