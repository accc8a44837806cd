"""A process that stands still, between any two statements: its locks end, and another one does its work."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from tests.support.databases import Raw
from tests.support.effect import AT_ONCE, add_effect
from tests.support.leasing import Leasing
from tests.support.shop import TOPIC, create_effects, paid, statuses
from tests.support.sources import Memory
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.workers import running, worker
from txbox import App, Lease, Message, session
from txbox.errors import StoreError
from txbox.processing.intake import Mode
from txbox.session import drive
from txbox.store import leases
from txbox.store.codec import Leased
from txbox.store.dialect import dialect

_LEASE = Lease(duration=timedelta(seconds=1), max_starts=20)
Place = tuple[str, int]


class Freezer:
    """Notes the crash points that threads pass, and stops each thread at the place it has asked for.

    To the database and to other processes, such a thread is a process under SIGSTOP.
    """

    def __init__(self) -> None:
        self._stops: dict[int, Place] = {}
        self._passed: dict[int, Counter[str]] = {}
        self.thawed = threading.Event()
        self.frozen = threading.Semaphore(0)
        self.places: list[Place] = []

    def stop_at(self, place: Place) -> None:
        """Stop the calling thread there."""
        self._stops[threading.get_ident()] = place

    def __call__(self, point: str) -> None:
        me = threading.get_ident()
        passed = self._passed.setdefault(me, Counter())
        passed[point] += 1
        place = point, passed[point]
        if not self._stops:
            self.places.append(place)
        elif self._stops.get(me) == place:
            self.frozen.release()
            assert self.thawed.wait(DEADLINE_S)


def live(app: App, consumer: str, message: Message[Any]) -> None:
    """All that a worker does with a message: it stores and leases it, fails once, leases it again and runs it."""
    fails = [True]

    @app.handler(TOPIC, consumer=consumer, retry=AT_ONCE)
    def handle(message: Message[Any], tx: Any) -> None:
        add_effect(tx, message.id, consumer)
        if fails:
            raise ValueError(fails.pop())

    db, store, (handler,) = app._any_sync(), app.store, app.handlers

    def lease(token: str) -> list[Leased]:
        options: Any = {"limit": 1, "lease": app.lease, "suspect": False}
        return drive(db, leases.lease, store, consumer, token=token, **options)

    ids = [str(message.id)]
    first = Leasing(drive(db, app.intake.take_with_retries, handler, [message], Mode.LEASED))
    drive(db, leases.heartbeat, store, consumer, ids, token=first.token, lease=app.lease)
    # none, where another has done it meanwhile
    for row in first.rows:
        drive(db, app.protocol.run_leased, handler, row, first.token)
    lease("released")
    drive(db, leases.release, store, consumer, ids, token="released", delay_s=0.0)
    for row in lease("run"):
        drive(db, app.protocol.run_leased, handler, row, "run")
    drive(db, leases.rescue, store, consumer=consumer, max_starts=20, limit=20)


def test_what_a_frozen_process_holds_is_done_by_another(
    postgresql_url: str, raw: Callable[[str], Raw], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise 4.2, for every transaction of txbox. It holds rows otherwise that nobody else gets, for ever."""
    database = raw(postgresql_url)
    create_effects(database)
    freezer = Freezer()
    monkeypatch.setattr(session, "crash_point", freezer)
    queries: Any = dialect("postgresql").queries
    limit = queries["limit_idle"]
    monkeypatch.setitem(queries, "limit_idle", limit.replace("30s", "1s"))
    assert queries["limit_idle"] != limit
    with closing(App(postgresql_url, lease=_LEASE)) as app:
        live(app, "nobody freezes", paid("m1"))
    # each name once, and the end of each transaction
    places = [place for place in freezer.places if place[1] == 1 or place[0] == "before:commit"]
    assert {"after:store", "after:heartbeat", "after:lease", "after:claim_leased"} <= {
        point for point, _ in places
    }

    def freeze(consumer: str, place: Place) -> None:
        freezer.stop_at(place)
        # its connection is gone when it goes on
        with suppress(StoreError), closing(App(postgresql_url, lease=_LEASE)) as app:
            live(app, consumer, paid("m1"))

    frozen = {f"frozen at {point} {number}": (point, number) for point, number in places}
    threads = [threading.Thread(target=freeze, args=case, daemon=True) for case in frozen.items()]
    app = App(postgresql_url, lease=_LEASE)
    for consumer in frozen:
        note = partial(_noted, consumer)
        app.handler(TOPIC, consumer=consumer, retry=AT_ONCE)(note)
    app.consume(Memory([paid("m1")], endless=True))

    def done() -> set[str]:
        return {consumer for (consumer,) in database.rows("SELECT note FROM effect")}

    for thread in threads:
        thread.start()
    for _ in threads:
        assert freezer.frozen.acquire(timeout=DEADLINE_S)
    with running(worker(app, maintenance=True)):
        eventually(lambda: done() >= frozen.keys(), "an effect of every message")
        freezer.thawed.set()
        for thread in threads:
            thread.join(DEADLINE_S)
    app.close()
    assert database.value("SELECT count(*) FROM effect") == len(frozen) + 1
    assert statuses(database) == {"processed": len(frozen) + 1}


def _noted(consumer: str, message: Message[Any], tx: Any) -> None:
    add_effect(tx, message.id, consumer)
