"""The consumer with txbox: the same payments, with a handler. `txbox run txbox.demo.payments:app`."""

from __future__ import annotations

import os
import sqlite3
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

from txbox import App, Lease, Message, RelayPolicy, RetryPolicy, session
from txbox.brokers.local import Local
from txbox.demo.naive import COMMITTED, DIRECTORY, SENDING, WRITTEN, charge, die_if_asked

TOPIC, CONSUMER = "payments", "billing"


def build(directory: Path) -> App:
    """The service, on a SQLite file in `directory`."""
    short = timedelta(seconds=1.5)  # so that the rows of a killed worker are soon free again
    app = App(
        f"sqlite:///{directory / 'txbox.db'}",
        # the demo kills far more often than a message that crashes its process would be forgiven
        lease=Lease(duration=short, max_starts=25, batch=5),
        relaying=RelayPolicy(lease=short, confirm_within=timedelta(seconds=0.5), batch=20),
    )
    retry = RetryPolicy(max_attempts=4, base=timedelta(seconds=0.3), cap=timedelta(seconds=1))

    @app.handler(TOPIC, consumer=CONSUMER, retry=retry)
    def take_payment(message: Message[dict[str, Any]], tx: sqlite3.Connection) -> None:
        charge(tx, message.body, message.attempt)
        receipt = {"payment": message.body["payment"], "amount": message.body["amount"]}
        app.outbox.stage(tx, "receipts", receipt, key=str(message.body["customer"]))

    # without a destination: the relay hands it to this consumer
    @app.handler("receipts", consumer="mailroom")
    def send_receipt(message: Message[dict[str, Any]], tx: sqlite3.Connection) -> None:
        tx.execute("INSERT INTO receipt (payment) VALUES (?)", (message.body["payment"],))

    app.consume(Local())
    return app


def _die_when_asked(side: Path) -> None:
    lane = threading.local()

    def pass_point(point: str) -> None:
        if point == "relay:leased":
            die_if_asked(side, SENDING)
        elif point == "after:handler":
            lane.handled = True
            die_if_asked(side, WRITTEN)
        elif point == "after:commit" and getattr(lane, "handled", False):  # of a message
            lane.handled = False
            die_if_asked(side, COMMITTED)

    session.crash_point = pass_point


def __getattr__(name: str) -> App:
    # built lazily: importing this module must not need the demo's directory
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    directory = Path(os.environ[DIRECTORY])
    _die_when_asked(directory / "txbox")
    return build(directory)
