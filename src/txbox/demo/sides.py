"""The two consumers as processes: started, watched, killed and started again."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import IO

from txbox import App, Message
from txbox.demo import killing
from txbox.demo.business import Delivery, create_tables
from txbox.demo.service import DIRECTORY, TOPIC, build
from txbox.demo.verdict import connect, rows
from txbox.errors import TxboxError


class SideEnded(TxboxError):
    """A consumer process ended without having been killed."""


class Side(ABC):
    """One consumer: its database, its process, and how far it has come."""

    name: str
    module: Sequence[str]

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / self.name
        self.database = directory / f"{self.name}.db"
        self.sent: int = 0
        self.done: int = 0
        self.kills: int = 0
        self.retries: int = 0
        self.duplicates: int | None = None
        self.receipts: Sequence[str] = ()
        self._process: subprocess.Popen[bytes] | None = None
        self._asked_until_s: float | None = None
        self._log: IO[bytes] | None = None
        with closing(sqlite3.connect(self.database)) as connection:
            create_tables(connection)

    @abstractmethod
    def send(self, delivery: Delivery) -> None:
        """Hand a delivery over; it is on disk when this returns."""

    @abstractmethod
    def look(self) -> bool:
        """Refresh the figures; returns whether everything sent so far is finished."""

    # -- the process --------------------------------------------------------------------------

    def start(self) -> None:
        if self._log is None:
            self._log = self.path.with_suffix(".log").open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", *self.module],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, DIRECTORY: str(self.directory)},
        )

    @property
    def dying(self) -> bool:
        """True while a kill that was asked for has not happened."""
        return self._asked_until_s is not None

    def kill(self) -> None:
        """kill -9, at whatever it is doing."""
        assert self._process is not None
        self._process.kill()
        self._buried()

    def kill_at(self, moment: str, *, within_s: float) -> None:
        """kill -9 when it next passes a moment; wherever it is when that takes too long."""
        killing.request(self.path, moment)
        self._asked_until_s = time.monotonic() + within_s

    def watch(self) -> None:
        """Start the process again when it has died as it should.

        Raises:
            SideEnded: it ended by itself.
        """
        assert self._process is not None
        if self._asked_until_s is not None and time.monotonic() > self._asked_until_s:
            self._process.kill()
            self._process.wait()
        if self._process.poll() is not None:
            self._buried()

    def _buried(self) -> None:
        assert self._process is not None
        status = self._process.wait()
        if status != -signal.SIGKILL:
            raise SideEnded(
                f"The {self.name} process ended by itself with status {status}: "
                f"see {self.path.with_suffix('.log')}."
            )
        self._asked_until_s = None
        killing.withdraw(self.path)
        self.kills += 1
        self.start()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None


class NaiveSide(Side):
    """The loop of most tutorials; see naive.py."""

    name = "naive"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.module = ("txbox.demo.naive", str(directory))
        self._queue = (directory / "naive.queue").open("ab")
        self._bytes = 0

    def send(self, delivery: Delivery) -> None:
        self._bytes += self._queue.write(delivery.payload + b"\n")
        self._queue.flush()
        os.fsync(self._queue.fileno())
        self.sent += 1

    def look(self) -> bool:
        with closing(connect(self.database)) as connection:
            ((self.done,),) = connection.execute("SELECT count(*) FROM payment")
        sent = self.path.with_suffix(".receipts")
        self.receipts = sent.read_text().split() if sent.exists() else ()
        log = self.path.with_suffix(".log")
        self.retries = log.read_bytes().count(b"retry ") if log.exists() else 0
        cursor = self.directory / "naive.offset"
        return cursor.exists() and int(cursor.read_text()) == self._bytes

    @property
    def dropped(self) -> int:
        """Messages that it gave up; its log is the only place that knows."""
        return self.path.with_suffix(".log").read_bytes().count(b"dropped ")

    def close(self) -> None:
        super().close()
        self._queue.close()


class TxboxSide(Side):
    """The same payments through an inbox; see service.py."""

    name = "txbox"
    module = ("txbox", "run", "txbox.demo.service:app")

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._app: App = build(directory)
        self._app.init()
        self.unfinished = self.behind = 0
        self.dead: list[str] = []

    def send(self, delivery: Delivery) -> None:
        self._app.send(Message(id=delivery.id, topic=TOPIC, payload=delivery.payload))
        self.sent += 1

    def look(self) -> bool:
        state = rows(self.database)
        self.done, self.unfinished = state["processed"], state["unfinished"]
        self.retries, self.dead = state["attempts"], state["dead"]
        self.duplicates = self.sent - self.done - self.unfinished - len(self.dead)
        with closing(connect(self.database)) as connection:
            self.receipts = [own for (own,) in connection.execute("SELECT payment FROM receipt")]
        self.behind = state["behind"]
        return self.unfinished + self.behind == 0

    def close(self) -> None:
        super().close()
        self._app.close()
