"""An App may be forked whatever its threads do: the child takes nothing of theirs (promise 2.5)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.blocked import acquired, released
from tests.support.databases import NewDatabase, names
from tests.support.shop import Shop, opened, paid
from tests.support.waiting import DEADLINE_S
from txbox import Outcome

pytestmark = pytest.mark.every_database


def in_child(work: Callable[[], bool]) -> int:
    """Fork, and run it there; returns the process id, whose exit status is 0 when it returned True."""
    child = os.fork()
    if child == 0:
        status = 2
        try:
            status = 0 if work() else 1
        finally:
            os._exit(status)
    return child


def status_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("product", names("postgresql", "mysql"))
def test_what_threads_of_the_parent_run_is_not_in_flight_in_a_child(
    new_database: NewDatabase, product: str
) -> None:
    """SQLite itself does not allow a fork while one of its databases is open."""
    with opened(new_database(product)) as shop:
        _processed_by_the_parent(shop)


def _processed_by_the_parent(shop: Shop) -> None:
    inside, go = threading.Event(), threading.Event()

    def waits(message: object, tx: object) -> None:
        inside.set()
        assert go.wait(DEADLINE_S)

    shop.handler(waits)
    ours, theirs = os.pipe()
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(shop.deliver(paid("a"))))
    thread.start()
    assert inside.wait(DEADLINE_S)

    def delivers_again() -> bool:
        os.close(theirs)
        os.read(ours, 1)  # until the parent has let its handler end
        return shop.deliver(paid("a")) is Outcome.DUPLICATE

    child = in_child(delivers_again)
    os.close(ours)
    go.set()
    thread.join(DEADLINE_S)
    os.close(theirs)
    assert outcomes == [Outcome.PROCESSED]
    assert status_of(child) == 0
    assert shop.effects() == 1


@pytest.mark.parametrize("lock", ["in flight", "idle", "pace"])
def test_a_lock_that_a_thread_holds_at_the_fork_is_free_in_a_child(shop: Shop, lock: str) -> None:
    handler = shop.handler()
    connections: Any = shop.app.database.sync
    held = {
        "in flight": shop.app.protocol.in_flight,
        "idle": connections,
        "pace": shop.app.protocol.batch_sizes.of(handler),
    }[lock]._lock

    def delivers() -> bool:
        done: list[Outcome] = []
        thread = threading.Thread(target=lambda: done.append(shop.deliver(paid("a"))), daemon=True)
        thread.start()
        thread.join(DEADLINE_S)
        return done == [Outcome.PROCESSED]

    with held:
        child = in_child(delivers)
    assert status_of(child) == 0


def test_a_child_that_closes_leaves_the_parent_its_connections(shop: Shop) -> None:
    shop.handler()
    assert shop.deliver(paid("a")) is Outcome.PROCESSED
    assert shop.app.database.sync is not None
    before = acquired(shop.app.database.sync)
    released(shop.app.database.sync, before)

    def closes() -> bool:
        shop.app.close()
        return True

    assert status_of(in_child(closes)) == 0
    assert shop.deliver(paid("b")) is Outcome.PROCESSED
    after = acquired(shop.app.database.sync)
    assert after.connection is before.connection
    released(shop.app.database.sync, after)
