"""relay: send what is staged in the outbox, without consuming."""

from __future__ import annotations

import argparse
import logging
import os
import threading
import time
from collections import Counter
from queue import SimpleQueue
from typing import Any

from txbox.cli.application import opened, perform
from txbox.cli.logs import add_grace, log_libraries, start_logging, take_path
from txbox.cli.output import print_json, print_line
from txbox.events import Event, OutgoingDead, OutgoingFailed, OutgoingSent
from txbox.relay import Relays
from txbox.store.activity import Doing
from txbox.worker.driving import Driver
from txbox.worker.pulse import Pulse
from txbox.worker.signals import Stop, draining_on_signals, last_s, leave, leave_by

_log = logging.getLogger("txbox")

_LOOK_S = 0.2


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    relay = commands.add_parser(
        "relay", parents=[common],
        description="Sends what app.outbox.stage has written, by the routes of the App (app.publish); `txbox run` does "
        "the same beside its handlers. Several may run, on many machines. SIGTERM or Ctrl-C drains: what was "
        "sent is marked, the rest is left; --grace bounds it. Exit status 0 stopped or idle, 1 cut off or something "
        "unexpected, 2 wrong set-up or schema.",
    )  # fmt: skip
    relay.add_argument("path", nargs="?", metavar="MODULE:APP", help="the App, instead of --app")
    relay.add_argument("--once", action="store_true", help="end when nothing is due")
    add_grace(relay)
    relay.add_argument("--log-json", action="store_true", help="log lines as JSON")
    relay.add_argument("--verbose", action="store_true", help="log every batch, not only trouble")
    relay.set_defaults(run=_relay)


class _Tally:
    """Counts what became of staged messages, for the line at the end."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(sent=0, failed=0, dead=0)
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        with self._lock:
            if isinstance(event, OutgoingSent):
                self.counts["sent"] += event.count
            elif isinstance(event, OutgoingFailed):
                self.counts["failed"] += 1
            elif isinstance(event, OutgoingDead):
                self.counts["dead"] += 1


def _relay(args: argparse.Namespace) -> int:
    take_path(args)
    start_logging(args)
    with opened(args, handlers="sends where app.publish says") as app:
        tally = _Tally()
        log_libraries()
        app.events.observers.append(tally)
        perform(app, app.check_schema)
        stopped = Stop()
        ends: SimpleQueue[BaseException | None] = SimpleQueue()
        driver, grace_s = Driver(app), args.grace.total_seconds()

        def ended(error: BaseException | None) -> None:
            ends.put(error)
            stopped.set()

        relays = Relays(app, driver.perform, stop=stopped.is_set, ended=ended)
        pulse = Pulse(
            app, driver,
            kind="relay",
            name=args.app or os.environ.get("TXBOX_APP", ""),
            routes=[route.name for route in app.routes.all()],
            doing=lambda: Doing(state="draining" if stopped.is_set() else "running"),
        )  # fmt: skip
        with draining_on_signals(stopped.set, grace_s):
            try:
                pulse.start(ended)
                relays.start()
                while not stopped.wait(_LOOK_S):
                    if args.once and not relays.left():
                        break
            finally:
                stopped.set()
                ends_at = time.monotonic() + grace_s
                left = relays.join(grace_s - last_s(grace_s))
                pulse.end(max(0.0, ends_at - time.monotonic()))
        leave_by(ends_at)
        while not ends.empty():
            if (error := ends.get()) is not None:
                raise error
        if args.json:
            print_json(dict(tally.counts))
        else:
            print_line(", ".join(f"{count} {what}" for what, count in tally.counts.items()) + ".")
        if left:
            _log.error(
                "The relay to %s was cut off after its grace of %g s: what was not confirmed is sent again.",
                ", ".join(left), grace_s,
            )  # fmt: skip
            leave(1)
    return 0
