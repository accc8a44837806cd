"""Wake-up by NOTIFY: at once across processes, and by polling where nobody listens."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psycopg
import pytest

from tests.support.databases import Raw
from tests.support.recording import Recorder
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.warm import Warm
from txbox import App, Message, Outbox, RelayPolicy
from txbox.connections import psycopg as psycopg_adapter
from txbox.worker import relay
from txbox.worker.agenda import Run
from txbox.worker.relay import Relays

Look = Callable[[str], Raw]
ROOT = Path(__file__).parents[2]
OFTEN = RelayPolicy(poll=timedelta(seconds=1))
# so seldom that a test that waits to be woken never meets a poll
SELDOM_S = 2 * DEADLINE_S
ARRIVED = "SELECT 1 FROM txbox_inbox WHERE message_id = ?"
LISTENERS = (
    "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'"
)

#: Another process: stages a message for each line it reads, and answers when it has committed.
STAGER = """
import sys, psycopg
from txbox import Outbox
outbox = Outbox(notify=True)
with psycopg.connect(sys.argv[1]) as tx:
    for line in sys.stdin:
        outbox.stage(tx, "t", line.strip())
        tx.commit()
        print("committed", flush=True)
"""


class Running:
    """Relays in this process, and a process that stages."""

    def __init__(self, url: str) -> None:
        self._arrived: SimpleQueue[str] = SimpleQueue()
        self._stager = subprocess.Popen(
            [sys.executable, "-c", STAGER, url],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def sent(self, message: Message[Any]) -> None:
        self._arrived.put(message.json())

    def delivers(self, body: str) -> None:
        """Have the other process commit this message, and wait until it is published here."""
        assert self._stager.stdin is not None
        assert self._stager.stdout is not None
        self._stager.stdin.write(f"{body}\n")
        self._stager.stdin.flush()
        assert self._stager.stdout.readline() == "committed\n"
        assert self._arrived.get(timeout=DEADLINE_S) == body

    def end(self) -> None:
        self._stager.communicate(timeout=DEADLINE_S)


@contextmanager
def running(url: str, app: App) -> Iterator[Running]:
    run = Running(url)
    ends: list[BaseException | None] = []
    app.publish(Recorder(run.sent))
    relaying = Run(app, ends.append)
    relays = Relays(relaying)
    relays.start()
    try:
        yield run
    finally:
        relaying.stopping.set()
        assert not relays.join(DEADLINE_S)
        run.end()
    assert ends == [None]


@pytest.fixture
def seldom(monkeypatch: pytest.MonkeyPatch) -> RelayPolicy:
    """Relays that do not poll, not even after work: whatever is sent, they were woken for it."""
    monkeypatch.setattr(relay, "_BUSY_S", SELDOM_S)
    return RelayPolicy(poll=timedelta(seconds=SELDOM_S))


def test_a_commit_in_another_process_is_published_at_once(
    postgresql_url: str, raw: Look, seldom: RelayPolicy
) -> None:
    look = raw(postgresql_url)
    with (
        App(postgresql_url, relaying=seldom, notify=True) as app,
        running(postgresql_url, app) as run,
    ):
        eventually(lambda: look.rows(LISTENERS))
        for number in range(6):
            run.delivers(f"m{number}")
        # the server, or a network, ends the listener's connection: it comes back by itself
        (before,) = look.rows(LISTENERS)
        look.rows("SELECT pg_terminate_backend(?)", before)
        eventually(lambda: (now := look.rows(LISTENERS)) and now != [before])
        run.delivers("again")
    assert not look.rows(LISTENERS)


SHOP = """
import os
from datetime import timedelta
from txbox import App, Message, RelayPolicy
from txbox.worker import relay

relay._BUSY_S = 120.0
app = App(os.environ["SHOP_URL"], notify=True, relaying=RelayPolicy(poll=timedelta(seconds=120)))

@app.handler("inside", consumer="inside")
def inside(message: Message, tx): ...
"""


def test_the_command_is_woken_and_ends_when_it_is_told_to(
    postgresql_url: str, raw: Look, tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    look, outbox = raw(postgresql_url), Outbox(notify=True)
    environment = {**os.environ, "SHOP_URL": postgresql_url}
    process = Warm(["txbox", "relay", "shop:app"], cwd=tmp_path, env=environment)
    try:
        eventually(lambda: look.rows(LISTENERS))
        with psycopg.connect(postgresql_url) as tx:
            for _ in range(3):
                staged = outbox.stage(tx, "inside", {})
                tx.commit()
                eventually(partial(look.rows, ARRIVED, (staged,)))
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    assert not look.rows(LISTENERS)


def test_without_its_connection_polling_delivers(
    postgresql_url: str, raw: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psycopg_adapter, "_PAUSE_S", (600.0, 600.0))
    look = raw(postgresql_url)
    with (
        App(postgresql_url, relaying=OFTEN, notify=True) as app,
        running(postgresql_url, app) as run,
    ):
        (before,) = eventually(lambda: look.rows(LISTENERS))
        look.rows("SELECT pg_terminate_backend(?)", before)
        eventually(lambda: not look.rows(LISTENERS))
        run.delivers("polled")


def test_through_a_transaction_pooler_polling_delivers(
    pgbouncer_url: str,
) -> None:
    with App(pgbouncer_url, relaying=OFTEN, notify=True) as app, running(pgbouncer_url, app) as run:
        run.delivers("polled")


def test_a_notification_comes_with_the_commit_and_not_without(postgresql_url: str) -> None:
    outbox = Outbox(notify=True)
    with (
        psycopg.connect(postgresql_url, autocommit=True) as ear,
        psycopg.connect(postgresql_url) as tx,
    ):
        ear.execute("LISTEN txbox_outbox")
        outbox.stage(tx, "t", "rolled back")
        tx.rollback()
        outbox.stage(tx, "t", 1)
        outbox.stage(tx, "t", 2)
        assert not list(ear.notifies(timeout=0.3))
        tx.commit()
        assert len(list(ear.notifies(timeout=DEADLINE_S, stop_after=1))) == 1
        assert not list(ear.notifies(timeout=0.3))
        Outbox().stage(tx, "t", "quiet")
        tx.commit()
        assert not list(ear.notifies(timeout=0.3))


def test_other_drivers_of_postgresql_notify_too(postgresql_url: str, raw: Look) -> None:
    import asyncpg
    import sqlalchemy

    outbox = Outbox(notify=True)

    async def staged() -> None:
        tx = await asyncpg.connect(postgresql_url)
        async with tx.transaction():
            await outbox.stage_async(tx, "t", "asyncpg")
        await tx.close()

    with psycopg.connect(postgresql_url, autocommit=True) as ear:
        ear.execute("LISTEN txbox_outbox")
        asyncio.run(staged())
        assert len(list(ear.notifies(timeout=DEADLINE_S, stop_after=1))) == 1
        engine = sqlalchemy.create_engine(
            postgresql_url.replace("postgresql:", "postgresql+psycopg:")
        )
        with engine.begin() as tx:
            outbox.stage(tx, "t", "sqlalchemy")
        engine.dispose()
        assert len(list(ear.notifies(timeout=DEADLINE_S, stop_after=1))) == 1
    assert raw(postgresql_url).value("SELECT count(*) FROM txbox_outbox") == 2


def test_databases_without_notifications_ignore_the_option(
    database_url: str, plain_connection: Callable[[str], Any], raw: Look
) -> None:
    with App(database_url, notify=True) as app:
        app.publish(Recorder())
        with plain_connection(database_url) as tx:
            app.outbox.stage(tx, "t", 1)
            tx.commit()
    assert raw(database_url).value("SELECT count(*) FROM txbox_outbox") == 1
