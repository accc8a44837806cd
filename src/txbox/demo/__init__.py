"""`txbox demo`: a payment service that sends receipts is killed again and again, once with txbox and once without.

Both consume the same stream of payments and are killed equally often; then their books are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from txbox import Message
from txbox.demo.naive import COMMITTED, CUSTOMERS, DIRECTORY, SENDING, WRITTEN, create_tables
from txbox.demo.payments import TOPIC, build
from txbox.errors import ConfigurationError, TxboxError

_KILL_WITHIN_S, _SETTLE_S, _SHOW_EVERY_S = 1.5, 60.0, 2.0
_RETRIES_AND_UNFINISHED = """
SELECT (SELECT count(*) FROM txbox_attempt WHERE status = 'failed'),
    (SELECT count(*) FROM txbox_outbox)
    + (SELECT count(*) FROM txbox_inbox WHERE status NOT IN ('processed', 'dead'))
"""
_HEAD = "   time      sent    naive: booked  receipts  kills    txbox: booked  receipts  kills"
#: The report: a line of its own, or a label and the name of a figure.
_REPORT: tuple[tuple[str, str], ...] = (
    ("killed with kill -9", "kills"),
    ("1. payments are booked", ""),
    ("   customers charged too much", "customers_charged_too_much"),
    ("       EUR too much", "amount_too_much"),
    ("   payments booked more than once", "payments_doubled"),
    ("       because of a crash", "payments_doubled_by_crashes"),
    ("   customers charged too little", "customers_charged_too_little"),
    ("   payments lost", "payments_lost"),
    ("   duplicates recognised", "duplicates"),
    ("   retries", "retries"),
    ("   the poison message", "poison"),
    ("2. receipts go to the next consumer", ""),
    ("   payments without a receipt", "receipts_lost"),
    ("   receipts sent more than once", "receipts_doubled"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns 0 when txbox's books are right, 1 when they are not.

    Raises:
        ConfigurationError: the directory cannot be made, or is not empty.
        TxboxError: one of the processes ended by itself.
    """
    parser = make_parser()
    options = parser.parse_args(argv)
    if not (options.seconds > 0 and 0 <= options.duplicates <= 1 and options.kills >= 0):
        parser.error(
            "--seconds must be more than 0, --duplicates from 0 to 1, and --kills 0 or more"
        )
    directory = Path(options.dir or tempfile.mkdtemp(prefix="txbox-demo-"))
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{directory} cannot be made: {error.strerror}.") from None
    if any(directory.iterdir()):
        raise ConfigurationError(f"{directory} is not empty: give --dir a new or empty directory.")

    def show(line: str) -> None:
        print(line, file=sys.stderr if options.json else sys.stdout, flush=True)

    seed = random.randrange(10**6) if options.seed is None else options.seed
    stream = build_stream(max(10, options.payments), duplicates=options.duplicates, seed=seed)
    result = _race(directory, stream, kills=options.kills, seconds=options.seconds, show=show)
    if options.json:
        report = {**result, "seed": seed, "directory": str(directory)}
        sys.stdout.write(f"{json.dumps(report, indent=2)}\n")
    else:
        _report(result, directory, show)
    return 0 if result["txbox"]["right"] else 1


def make_parser() -> argparse.ArgumentParser:
    """The options of the demo."""
    parser = argparse.ArgumentParser(
        prog="txbox demo",
        description="Two payment services read the same stream, which has duplicates, while their processes are killed "
        "with kill -9: one with txbox, which sends a receipt for each payment to a second consumer, and a naive one. "
        "At the end their books are compared. It needs no server.",
        epilog="Exit status: 0 the books of txbox are right, 1 they are wrong. Example: txbox demo --seconds 30",
    )
    add = parser.add_argument
    for name, kind, default, metavar, help_text in (
        ("payments", int, 400, "N", "distinct payments"),
        ("duplicates", float, 0.1, "SHARE", "how many come twice"),
        ("kills", int, 12, "N", "of each process"),
        ("seconds", float, 16, "N", "how long the stream lasts"),
    ):
        text = f"{help_text} (default {default})"
        add(f"--{name}", type=kind, default=default, metavar=metavar, help=text)
    add("--seed", type=int, metavar="N", help="for the same stream again")
    where = "where the databases go (default: a temporary directory, which is kept)"
    add("--dir", metavar="PATH", help=where)
    add("--json", action="store_true", help="print the result as JSON")
    return parser


def _report(result: dict[str, Any], directory: Path, show: Callable[[str], None]) -> None:
    naive = {**result["naive"], "duplicates": 0, "poison": result["naive"]["dropped"] and "dropped"}
    txbox = {**result["txbox"], "poison": f"{len(result['txbox']['dead'])} dead letter, kept"}
    show(
        f"\n{result['payments']} payments of {result['customers']} customers, delivered {result['deliveries']} times, "
        f"{result['seconds']:.0f} s.\nBalances compared with the sum of the payments, receipts with the payments:\n\n"
        f"{'':36}{'naive':>10}{'txbox':>25}"
    )
    for label, name in _REPORT:
        figures = f"{naive[name] or 'none':>10}{txbox[name] or 'none':>25}" if name else ""
        show(f"{label:<36}{figures}".rstrip())
    right = "txbox: every customer was charged once, and got one receipt for each payment."
    wrong = "txbox's books are WRONG: please report this, with the directory below."
    # by the name under which this command line was reached, so that the lines can be pasted
    command = "txbox" if shutil.which("txbox") else f"{sys.executable} -m txbox"
    url = f"sqlite:///{directory / 'txbox.db'}"
    show(
        f"\n{right if txbox['right'] else wrong}\n\nLook further:\n  {command} status --database {url}\n"
        f"  {command} list --database {url} --status dead\n  rm -r {directory}"
    )


# -- the stream, and the verdict --------------------------------------------------------------------


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
    for index in draw.sample(range(payments), round(payments * duplicates)):
        placed.append((index + draw.uniform(0.5, 12.0), placed[index][1]))
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


# -- the race -------------------------------------------------------------------------------------


class _Side:
    """One consumer: its database, its process, the kills that are due, and how far it has come.

    Args:
        due: when the process is killed, in seconds of the race, and at which moment; "" is any.
        words: what its process runs, behind the interpreter.
    """

    name: str
    booked = kills = retries = 0
    receipts: Sequence[str] = ()

    def __init__(self, directory: Path, due: Sequence[tuple[float, str]], *words: str) -> None:
        self.path = directory / self.name
        self.database = self.path.with_suffix(".db")
        self._due = list(due)
        self._command = [sys.executable, *words]
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
        """Kill the process when that is due, and start it again; returns whether all kills are done.

        Raises:
            TxboxError: it ended by itself.
        """
        if self._due and self._kill_by_s is None and passed_s >= self._due[0][0]:
            _, moment = self._due.pop(0)
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
            raise TxboxError(
                f"The {self.name} process ended with status {status}: see {self._log.name}."
            )
        return not self._due and self._kill_by_s is None

    def figures(self, stream: Stream) -> dict[str, Any]:
        wrong = judge(self.database, stream, self.receipts)
        right = not any(wrong.values())
        return {**wrong, "right": right, "kills": self.kills, "retries": self.retries}

    def columns(self) -> str:
        return f"{self.booked:17}{len(self.receipts):10}{self.kills:7}"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


class _Naive(_Side):
    """Payments go through a file; see naive.py."""

    name = "naive"

    def __init__(self, directory: Path, due: Sequence[tuple[float, str]]) -> None:
        self._queue = (directory / "naive.queue").open("ab", buffering=0)
        # by its path: with `-m` it would import txbox, and start as slowly
        super().__init__(directory, due, str(Path(__file__).with_name("naive.py")), str(directory))

    def send(self, delivery: Delivery) -> None:
        self._queue.write(delivery.payload + b"\n")

    def poll(self) -> bool:
        """Refresh the figures; returns whether everything sent so far is finished."""
        ((self.booked,),) = _rows(self.database, "SELECT count(*) FROM payment")
        receipts, offset = self.path.with_suffix(".receipts"), self.path.with_suffix(".offset")
        self.receipts = receipts.read_text().split() if receipts.exists() else ()
        return offset.exists() and int(offset.read_text()) == self._queue.tell()

    def figures(self, stream: Stream) -> dict[str, Any]:
        # only its log knows
        log = self.path.with_suffix(".log").read_bytes()
        self.retries = log.count(b"retry ")
        return {**super().figures(stream), "dropped": log.count(b"dropped ")}

    def close(self) -> None:
        super().close()
        self._queue.close()


class _Txbox(_Side):
    """Payments go through an inbox; see payments.py."""

    name = "txbox"

    def __init__(self, directory: Path, due: Sequence[tuple[float, str]]) -> None:
        self._app = build(directory)
        self._app.init()
        self.sent = self.unfinished = self.duplicates = 0
        super().__init__(directory, due, "-m", "txbox", "run", "txbox.demo.payments:app")

    def send(self, delivery: Delivery) -> None:
        self._app.send(Message(id=delivery.id, topic=TOPIC, payload=delivery.payload))
        self.sent += 1

    def poll(self) -> bool:
        """Refresh the figures; returns whether everything sent so far is finished."""
        # first: when this is nothing, the other figures are final
        ((self.retries, self.unfinished),) = _rows(self.database, _RETRIES_AND_UNFINISHED)
        counts = "SELECT status, count(*) FROM txbox_inbox WHERE consumer = 'billing' GROUP BY 1"
        payments = Counter(dict(_rows(self.database, counts)))
        self.receipts = [
            payment for (payment,) in _rows(self.database, "SELECT payment FROM receipt")
        ]
        self.booked = payments["processed"]
        self.duplicates = self.sent - payments.total()
        return self.unfinished == 0

    def figures(self, stream: Stream) -> dict[str, Any]:
        query = "SELECT message_id FROM txbox_dead_letters ORDER BY 1"
        dead = [message_id for (message_id,) in _rows(self.database, query)]
        figures = super().figures(stream)
        right = figures["right"] and self.unfinished == 0 and dead == [stream.poison]
        more = {"duplicates": self.duplicates, "dead": dead, "unfinished": self.unfinished}
        return {**figures, **more, "right": right}

    def close(self) -> None:
        super().close()
        self._app.close()


def _race(
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
    with closing(_Naive(directory, due)) as naive, closing(_Txbox(directory, due)) as txbox:
        while not finished:
            time.sleep(0.05)
            passed_s = time.monotonic() - began
            for delivery in stream.deliveries[txbox.sent : round(total * passed_s / seconds)]:
                naive.send(delivery)
                txbox.send(delivery)
            calm = [naive.watch(passed_s), txbox.watch(passed_s)]
            done = [naive.poll(), txbox.poll()]
            if txbox.sent == total and all(calm):
                sent_at_s = sent_at_s or passed_s
                finished = all(done) or passed_s > sent_at_s + _SETTLE_S
            if finished or passed_s > shown_s + _SHOW_EVERY_S:
                shown_s = passed_s
                show(f"{passed_s:5.0f} s{txbox.sent:10}{naive.columns()}{txbox.columns()}")
    return {
        "payments": len(stream.payments) + 1,
        "deliveries": total,
        "customers": len({customer for customer, _ in stream.payments.values()}),
        "seconds": round(time.monotonic() - began, 1),
        "naive": naive.figures(stream),
        "txbox": txbox.figures(stream),
    }
