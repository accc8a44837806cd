"""The same payments for two consumers that are killed equally often; then their books are compared."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from txbox import Message
from txbox.demo.naive import COMMITTED, CUSTOMERS, SENDING, WRITTEN, create_tables
from txbox.demo.payments import CONSUMER, DIRECTORY, TOPIC, build
from txbox.errors import TxboxError

_KILL_WITHIN_S, _SETTLE_S, _SHOW_EVERY_S = 1.5, 60.0, 2.0
_RETRIES_AND_UNFINISHED = """
SELECT (SELECT count(*) FROM txbox_attempt WHERE status = 'failed'),
    (SELECT count(*) FROM txbox_outbox)
    + (SELECT count(*) FROM txbox_inbox WHERE status NOT IN ('processed', 'dead'))
"""
_HEAD = "   time      sent    naive: booked  receipts  kills    txbox: booked  receipts  kills"


class Delivery(NamedTuple):
    """One delivery of a payment; duplicates share an id."""

    id: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Stream:
    """What is sent to both consumers, in order, and what is right to book."""

    deliveries: Sequence[Delivery]
    payments: Mapping[str, tuple[int, int]]  # id → customer, amount; without the poison
    poison: str


def build_stream(payments: int, *, duplicates: float, seed: int) -> Stream:
    """Draw a stream of payments.

    Args:
        payments: distinct ones, the poison included; 10 or more.
        duplicates: share of payments that the producer sends twice, 0 to 1.
    """
    draw = random.Random(seed)
    poison = payments // 3
    placed: list[tuple[float, Delivery]] = []
    right: dict[str, tuple[int, int]] = {}
    for number in range(payments):
        payment = f"pay-{number:04d}"
        customer, amount = draw.randrange(CUSTOMERS), draw.randint(5, 90)
        body = {"payment": payment, "customer": customer, "amount": amount, "currency": "EUR"}
        if number == poison:
            body["currency"] = "???"
        else:
            right[payment] = (customer, amount)
        if number % 40 == 7:
            body["flaky"] = True
        placed.append((number, Delivery(payment, json.dumps(body).encode())))
    for place in draw.sample(range(payments), round(payments * duplicates)):
        placed.append((place + draw.uniform(0.5, 12.0), placed[place][1]))
    placed.sort(key=lambda entry: entry[0])
    return Stream([delivery for _, delivery in placed], right, f"pay-{poison:04d}")


def judge(database: Path, stream: Stream, receipts: Iterable[str]) -> dict[str, int]:
    """What is wrong with the books of a consumer, and with the receipts that arrived; zeros where all is right."""
    booked = dict(_rows(database, "SELECT id, count(*) FROM payment GROUP BY id"))
    off: Counter[int] = Counter(dict(_rows(database, "SELECT customer, charged FROM account")))
    for customer, amount in stream.payments.values():
        off[customer] -= amount
    sent, delivered = Counter(receipts), Counter(delivery.id for delivery in stream.deliveries)
    return {
        "customers_charged_too_much": sum(amount > 0 for amount in off.values()),
        "customers_charged_too_little": sum(amount < 0 for amount in off.values()),
        "amount_too_much": sum(max(amount, 0) for amount in off.values()),
        "amount_too_little": sum(max(-amount, 0) for amount in off.values()),
        "payments_doubled": sum(count > 1 for count in booked.values()),
        # booked more often than it was sent: only a crash can have done that
        "payments_doubled_by_crashes": sum(count > delivered[id_] for id_, count in booked.items()),
        "payments_lost": sum(payment not in booked for payment in stream.payments),
        "receipts_lost": sum(payment not in sent for payment in booked),
        "receipts_doubled": sum(count > 1 for count in sent.values()),
    }


def _rows(database: Path, query: str) -> list[Any]:
    uri = f"{database.resolve().as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True, timeout=10)) as connection:
        return connection.execute(query).fetchall()


class SideEnded(TxboxError):
    """A consumer process ended without having been killed."""


class Side:
    """One consumer: its database, its process, the kills that are due, and how far it has come.

    Args:
        due: when the process is killed, in seconds of the race, and at which moment; "" is any.
    """

    name: str
    booked = kills = retries = 0
    receipts: Sequence[str] = ()

    def __init__(self, directory: Path, due: Sequence[tuple[float, str]], *module: str) -> None:
        self.path = directory / self.name
        self.database = self.path.with_suffix(".db")
        self.due = list(due)
        self._command = [sys.executable, "-m", *module]
        self._environment = {**os.environ, DIRECTORY: str(directory)}
        self._request = self.path.with_suffix(".kill")
        self._kill_by_s: float | None = None
        with closing(sqlite3.connect(self.database)) as connection:
            create_tables(connection)
        self._log = self.path.with_suffix(".log").open("ab")
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
            env=self._environment,
        )  # fmt: skip

    def watch(self, passed_s: float) -> bool:
        """Kill the process when that is due, and start it again; returns whether no kill is left.

        Raises:
            SideEnded: it ended by itself.
        """
        if self.due and self._kill_by_s is None and passed_s >= self.due[0][0]:
            _, moment = self.due.pop(0)
            # it kills itself when it gets there, and is killed wherever it is when that takes too long
            self._request.write_text(moment)
            self._kill_by_s = passed_s + (_KILL_WITHIN_S if moment else 0)
        if self._kill_by_s is not None and passed_s >= self._kill_by_s:
            self._process.kill()
            self._process.wait()
        status = self._process.poll()
        if status == -signal.SIGKILL:
            self._kill_by_s = None
            self._request.unlink(missing_ok=True)
            self.kills += 1
            self._start()
        elif status is not None:
            log = self._log.name
            raise SideEnded(f"The {self.name} process ended with status {status}: see {log}.")
        return not self.due and self._kill_by_s is None

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


class NaiveSide(Side):
    """Payments go through a file; see naive.py."""

    name = "naive"
    dropped = 0

    def __init__(self, directory: Path, due: Sequence[tuple[float, str]]) -> None:
        self._queue = (directory / "naive.queue").open("ab", buffering=0)
        super().__init__(directory, due, "txbox.demo.naive", str(directory))

    def send(self, delivery: Delivery) -> None:
        self._queue.write(delivery.payload + b"\n")

    def look(self) -> bool:
        """Refresh the figures; returns whether everything sent so far is finished."""
        ((self.booked,),) = _rows(self.database, "SELECT count(*) FROM payment")
        receipts, offset = self.path.with_suffix(".receipts"), self.path.with_suffix(".offset")
        self.receipts = receipts.read_text().split() if receipts.exists() else ()
        # its log is the only place that knows
        log = self.path.with_suffix(".log").read_bytes()
        self.retries, self.dropped = log.count(b"retry "), log.count(b"dropped ")
        return offset.exists() and int(offset.read_text()) == self._queue.tell()

    def close(self) -> None:
        super().close()
        self._queue.close()


class TxboxSide(Side):
    """Payments go through an inbox; see payments.py."""

    name = "txbox"

    def __init__(self, directory: Path, due: Sequence[tuple[float, str]]) -> None:
        self._app = build(directory)
        self._app.init()
        self.sent = self.unfinished = 0
        self.dead: list[str] = []
        super().__init__(directory, due, "txbox", "run", "txbox.demo.payments:app")

    def send(self, delivery: Delivery) -> None:
        self._app.send(Message(id=delivery.id, topic=TOPIC, payload=delivery.payload))
        self.sent += 1

    def look(self) -> bool:
        """Refresh the figures; returns whether everything sent so far is finished."""
        # first: when this is nothing, the other figures are final
        ((self.retries, self.unfinished),) = _rows(self.database, _RETRIES_AND_UNFINISHED)
        rows = _rows(
            self.database, "SELECT consumer, status, count(*) FROM txbox_inbox GROUP BY 1, 2"
        )
        payments = Counter(
            {status: count for consumer, status, count in rows if consumer == CONSUMER}
        )
        receipts = _rows(self.database, "SELECT payment FROM receipt")
        dead = _rows(self.database, "SELECT message_id FROM txbox_dead_letters ORDER BY 1")
        self.dead = [message_id for (message_id,) in dead]
        self.receipts = [payment for (payment,) in receipts]
        self.booked = payments["processed"]
        self.duplicates = self.sent - payments.total()
        return self.unfinished == 0

    def close(self) -> None:
        super().close()
        self._app.close()


def race(
    directory: Path, stream: Stream, *, kills: int, seconds: float, show: Callable[[str], object]
) -> dict[str, Any]:
    """Send the stream to both sides, kill both as often, wait until both are done, and judge.

    Args:
        kills: of each process, spread over the time in which the stream is sent.
        seconds: the time in which the stream is sent.
        show: takes a line every other second.
    """
    total = len(stream.deliveries)
    moments = (COMMITTED, SENDING, "", WRITTEN)
    due = [(seconds * (kill + 0.7) / kills, moments[kill % 4]) for kill in range(kills)]
    began, shown_s, sent_at_s, finished = time.monotonic(), 0.0, None, False
    show(_HEAD)
    with closing(NaiveSide(directory, due)) as naive, closing(TxboxSide(directory, due)) as txbox:
        while not finished:
            time.sleep(0.05)
            passed_s = time.monotonic() - began
            for delivery in stream.deliveries[txbox.sent : round(total * passed_s / seconds)]:
                naive.send(delivery)
                txbox.send(delivery)
            calm = [naive.watch(passed_s), txbox.watch(passed_s)]
            done = [naive.look(), txbox.look()]
            if txbox.sent == total and all(calm):
                sent_at_s = sent_at_s or passed_s
                finished = all(done) or passed_s > sent_at_s + _SETTLE_S
            if finished or passed_s > shown_s + _SHOW_EVERY_S:
                shown_s = passed_s
                show(f"{passed_s:5.0f} s{txbox.sent:10}{_columns(naive)}{_columns(txbox)}")
    settled = txbox.unfinished == 0 and txbox.dead == [stream.poison]
    return {
        "payments": len(stream.payments) + 1,
        "deliveries": total,
        "customers": len({customer for customer, _ in stream.payments.values()}),
        "seconds": round(time.monotonic() - began, 1),
        "naive": {**_figures(naive, stream), "dropped": naive.dropped},
        "txbox": {
            **_figures(txbox, stream, settled=settled),
            "duplicates": txbox.duplicates,
            "dead": txbox.dead,
            "unfinished": txbox.unfinished,
        },
    }


def _figures(side: Side, stream: Stream, *, settled: bool = True) -> dict[str, int]:
    wrong = judge(side.database, stream, side.receipts)
    right = settled and not any(wrong.values())
    return {**wrong, "right": right, "kills": side.kills, "retries": side.retries}


def _columns(side: Side) -> str:
    return f"{side.booked:17}{len(side.receipts):10}{side.kills:7}"
