"""The txbox consumer: the same payments, with a handler. `txbox run txbox.demo.service:app`."""

from __future__ import annotations

import os
import sqlite3
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

from txbox import App, Lease, Message, RelayPolicy, RetryPolicy, steps
from txbox.brokers.local import Local
from txbox.demo.business import charge
from txbox.demo.killing import COMMITTED, SENDING, WRITTEN, passing

#: Where the databases of the demo are; set by its supervisor.
DIRECTORY = "TXBOX_DEMO_DIRECTORY"
TOPIC, CONSUMER = "payments", "billing"
RECEIPTS, MAILROOM = "receipts", "mailroom"


def build(directory: Path) -> App:
    """The service, on a SQLite file in `directory`."""
    app = App(
        f"sqlite:///{directory / 'txbox.db'}",
        # short, so that what a killed worker held is not waited for; and the demo kills far more
        # often than a message that crashes its process would be forgiven
        lease=Lease(duration=timedelta(seconds=1.5), max_starts=25, batch=5),
        relaying=RelayPolicy(
            lease=timedelta(seconds=1.5), confirm_within=timedelta(seconds=0.5), batch=20
        ),
    )

    @app.handler(
        TOPIC,
        consumer=CONSUMER,
        retry=RetryPolicy(max_attempts=4, base=timedelta(seconds=0.3), cap=timedelta(seconds=1)),
    )
    def take_payment(message: Message[dict[str, Any]], tx: sqlite3.Connection) -> None:
        charge(tx, message.body, message.attempt)
        receipt = {"payment": message.body["payment"], "amount": message.body["amount"]}
        app.outbox.stage(tx, RECEIPTS, receipt, key=str(message.body["customer"]))

    # nobody publishes this topic: the relay hands it to this consumer
    @app.handler(RECEIPTS, consumer=MAILROOM)
    def send_receipt(message: Message[dict[str, Any]], tx: sqlite3.Connection) -> None:
        tx.execute("INSERT INTO receipt (payment) VALUES (?)", (message.body["payment"],))

    app.consume(Local())
    return app


def _die_when_asked(side: Path) -> None:
    moments = {"after:handler": WRITTEN, "after:commit": COMMITTED}
    lane = threading.local()

    def hook(point: str) -> None:
        if point == "before:handler":
            lane.handling = True
        # "after:commit" also follows transactions without a payment in them; those do not count
        if point == "relay:leased":
            passing(side, SENDING)
        if point in moments and getattr(lane, "handling", False):
            lane.handling = point != "after:commit"
            passing(side, moments[point])

    steps.crash_point = hook


def __getattr__(name: str) -> App:
    # built when asked for: importing this module must not need the demo's directory
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    directory = Path(os.environ[DIRECTORY])
    _die_when_asked(directory / "txbox")
    return build(directory)
