"""run, relay and maintain: the processes that stay."""

from __future__ import annotations

import argparse
import logging
import socket
import threading
import time
from collections import Counter
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from txbox.app import App
from txbox.cli.application import opened, perform
from txbox.cli.listening import inherited, listening
from txbox.cli.logs import add_grace, log_libraries, start_logging
from txbox.cli.options import count, port
from txbox.cli.output import print_json, print_line, print_table
from txbox.cli.parser import add_command, add_flags
from txbox.errors import ConfigurationError, StoreUnavailable
from txbox.events import ConsumptionPaused, ConsumptionResumed, Event, MessageEvent, OutgoingSent
from txbox.maintenance import JOBS, Report, Task, run_once
from txbox.worker.signals import GRACE, Stop, draining_on_signals, last_s, leave, leave_by

if TYPE_CHECKING:
    from txbox.worker.serving import Server

_log = logging.getLogger("txbox")

_LOOK_S = 0.2
_GIVEN_UP = "Dead and quarantined messages wait for you: exit status 1."


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    run = add_command(commands, "run", _run, common)
    relay = add_command(commands, "relay", _relay, common)
    jobs = "; ".join(f"{job.name} ({job.summary})" for job in JOBS)
    maintain = add_command(
        commands, "maintain", _maintain, common,
        description=f"Does maintenance without consuming: {jobs}. Runs until SIGTERM or Ctrl-C; several may run, a job "
        "is done by one at a time.",
    )  # fmt: skip
    for command in (run, relay):
        command.add_argument("path", nargs="?", metavar="MODULE:APP", help="instead of --app")
        add_grace(command)
    logs = {"--log-json": "log lines as JSON", "--verbose": "log everything, not only trouble"}
    read = (
        "end when all sources are read to their end and nothing in the table is due: a broker and a followed file "
        "have no end, so with them it never ends; exit status 1 when a message died or was quarantined"
    )
    add_flags(run, {"--once": read, **logs})
    add_flags(relay, {"--once": "end when nothing is due", **logs})
    add_flags(maintain, {"--once": "each job once, then end", **logs})
    run.add_argument(
        "--processes", type=count, default=1, metavar="N", help="worker processes (default 1)"
    )
    add_flags(
        run,
        {
            "--no-maintenance": "leave rescue and prune to `txbox maintain`",
            "--no-relay": "leave staged messages to `txbox relay`",
            # one of several processes: its parent says how it ended
            "--child": argparse.SUPPRESS,
        },
    )
    for name, what, default in (
        ("health", "health (/livez, /readyz, /metrics; needs txbox[http])", ""),
        ("http", "webhooks (what the App consumes as Webhook; needs txbox[http])", " (default 8000)"),
    ):  # fmt: skip
        group = run.add_argument_group(what)
        group.add_argument(
            f"--{name}-port", type=port, metavar="PORT",
            help=f"serve them here{default}; 0 picks a port",
        )  # fmt: skip
        group.add_argument(
            f"--{name}-host", default="127.0.0.1", metavar="ADDRESS",
            help="on this address (default 127.0.0.1; 0.0.0.0 or :: for all)",
        )  # fmt: skip
    commands.add_parser("demo", add_help=False).set_defaults(run=None)


class _Tally:
    """Counts events of messages by kind, for the line at the end."""

    def __init__(self, prefix: str, **counts: int) -> None:
        self.counts: Counter[str] = Counter(counts)
        self._prefix = prefix
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        name = type(event).__name__
        if isinstance(event, MessageEvent | OutgoingSent) and name.startswith(self._prefix):
            with self._lock:
                self.counts[name.removeprefix(self._prefix).lower()] += getattr(event, "count", 1)

    def sentence(self) -> str:
        return ", ".join(f"{number} {kind}" for kind, number in self.counts.items()) + "."


# -- run ------------------------------------------------------------------------------------------


def _run(args: argparse.Namespace) -> int:
    """Runs the service: takes messages from the sources of the App, retries from its table, sends what is staged, and
    does maintenance in the background. SIGTERM or Ctrl-C drains: what runs is finished, the rest is left for
    redelivery; what has not ended within --grace is cut off; a second one ends at once. Exit status 0 drained or idle,
    1 cut off, something unexpected, or with --once a message that died or was quarantined, 2 wrong configuration,
    schema or an unreachable database at the start.
    """
    from txbox.worker import supervise
    from txbox.worker.supervisor import GAVE_UP

    start_logging(args)
    app = opened(args, handlers="runs handlers")
    health, http = _health_socket(args), _http_socket(args, app)
    webhooks: Server | None = None
    if http is not None:
        from txbox.worker.routes import webhooks_of
        from txbox.worker.serving import WEBHOOKS, Server

        webhooks = Server(webhooks_of(app), http, WEBHOOKS)
    if args.processes > 1:
        # checked here once, so that a wrong path is one sentence and not one of each process
        code = supervise(_child(args), args.processes, http=http, health=health, grace=args.grace)
        given_up = code == GAVE_UP
        if args.json:
            print_json({"exit": 1 if given_up else code})
        elif given_up:
            print_line(_GIVEN_UP)
        return 1 if given_up else code
    tally = _Tally("Message")
    log_libraries()
    app.events.observers.append(tally)
    with app:
        code, cut_off = _work(app, args, health, webhooks)
        dead = tally.counts["dead"] + tally.counts["quarantined"]
        given_up = bool(args.once and code == 0 and dead)
        if args.json and not args.child:
            print_json({"exit": 1 if given_up else code, "events": tally.counts})
        elif args.once and code == 0 and not args.child:
            done = tally.sentence() if tally.counts else "Nothing to do."
            print_line(f"{done} {_GIVEN_UP}" if given_up else done)
        if cut_off:
            leave(code)
    if not given_up:
        return code
    # its parent would start one again that ended with 1
    return GAVE_UP if args.child else 1


def _work(
    app: App,
    args: argparse.Namespace,
    listener: socket.socket | None,
    webhooks: Server | None,
) -> tuple[int, bool]:
    """Run a worker; returns its exit status, and whether something of it may still hang."""
    from txbox.worker import Worker
    from txbox.worker.health import Health

    health = Health()
    server: Server | None = None
    if listener is not None:
        from txbox.observers.counters import Counters
        from txbox.worker.routes import probes
        from txbox.worker.serving import PROBES, Server

        counters = Counters()
        app.events.observers += [health, counters]
        server = Server(probes(health, counters, app.webhooks), listener, PROBES)
        server.start()
    worker = Worker(
        app,
        once=args.once,
        maintenance=not args.no_maintenance,
        relay=not args.no_relay,
        grace=args.grace,
        health=health,
        webhooks=webhooks,
        name=args.app,
    )
    try:
        code = worker.run()
        return code, worker.cut_off
    finally:
        if worker.ends_at is not None:
            leave_by(worker.ends_at)
        if server is not None:
            server.close()


def _health_socket(args: argparse.Namespace) -> socket.socket | None:
    from txbox.worker.supervisor import HEALTH_FD

    if args.child:
        return inherited(HEALTH_FD)
    if args.health_port is None:
        return None
    what = "/livez, /readyz, /metrics"
    return listening(
        args.health_host, args.health_port, "--health-port", what, "txbox.worker.routes"
    )


def _http_socket(args: argparse.Namespace, app: App) -> socket.socket | None:
    from txbox.worker.supervisor import HTTP_FD

    if args.child:
        return inherited(HTTP_FD)
    if not app.webhooks or args.once:
        if args.http_port is not None:
            raise ConfigurationError(
                "--http-port serves webhooks, and --once waits for none: give one of them."
                if args.once
                else "--http-port serves webhooks, but the App has none: app.consume(Webhook(…))."
            )
        return None
    paths = ", ".join(webhook.path for webhook in app.webhooks)
    chosen = 8000 if args.http_port is None else args.http_port
    return listening(args.http_host, chosen, "--http-port", paths, "txbox.worker.routes")


def _child(args: argparse.Namespace) -> list[str]:
    flags = ("once", "no_maintenance", "no_relay", "log_json", "verbose")
    given = [f"--{name.replace('_', '-')}" for name in flags if getattr(args, name)]
    # a child ends by itself before its parent has to kill it
    grace_s = args.grace.total_seconds()
    grace = f"{grace_s - last_s(grace_s):g}s"
    return [*args.program, "run", "--child", "--app", args.app, *given, "--grace", grace]


# -- relay ----------------------------------------------------------------------------------------


def _relay(args: argparse.Namespace) -> int:
    """Sends what app.outbox.stage has written, by the routes of the App (app.publish); `txbox run` does the same beside
    its handlers. Several may run, on many machines. SIGTERM or Ctrl-C drains: what was sent is marked, the rest is
    left; --grace bounds it. Exit status 0 stopped or idle, 1 cut off or something unexpected, 2 wrong set-up or schema.
    """
    from txbox.relay import Relays
    from txbox.store.activity import Doing
    from txbox.worker.driving import Driver
    from txbox.worker.pulse import Pulse

    start_logging(args)
    with opened(args, handlers="sends where app.publish says") as app:
        tally = _Tally("Outgoing", sent=0, failed=0, dead=0)
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
            name=args.app,
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
                unsent = relays.join(grace_s - last_s(grace_s))
                pulse.end(max(0.0, ends_at - time.monotonic()))
        leave_by(ends_at)
        while not ends.empty():
            if (error := ends.get()) is not None:
                raise error
        if args.json:
            print_json(tally.counts)
        else:
            print_line(tally.sentence())
        if unsent:
            _log.error(
                "The relay to %s was cut off after its grace of %g s: what was not confirmed is sent again.",
                ", ".join(unsent), grace_s,
            )  # fmt: skip
            leave(1)
    return 0


# -- maintain -------------------------------------------------------------------------------------


def _maintain(args: argparse.Namespace) -> int:
    start_logging(args)
    with opened(args) as app:
        log_libraries()
        perform(app, app.check_schema)
        if not args.once:
            _maintain_until_stopped(app)
            return 0
        reports = [run_once(app, job.name, Task()) for job in JOBS]
        if args.json:
            print_json({"jobs": reports})
        else:
            print_table(
                ["job", "rows", "dead", "note"],
                [[report.job, report.rows, report.dead, _note(report)] for report in reports],
            )
    return 0


def _note(report: Report) -> str:
    if report.skipped:
        return "another process is at it"
    return "outside of its window" if report.closed else ""


def _maintain_until_stopped(app: App) -> None:
    stopped = Stop()
    paused_at: float | None = None
    with draining_on_signals(stopped.set, GRACE.total_seconds()):
        # the first round forgives nothing: a wrong URL or a missing schema ends here with its sentence
        due: dict[str, float] = {}
        for job in JOBS:
            run_once(app, job.name, Task(stop=stopped.is_set))
            due[job.name] = time.monotonic() + job.every(app).total_seconds()
        while not stopped.is_set():
            job = min(JOBS, key=lambda candidate: due[candidate.name])
            if stopped.wait(max(0.0, due[job.name] - time.monotonic())):
                break
            wait_s = job.every(app).total_seconds()
            try:
                run_once(app, job.name, Task(stop=stopped.is_set))
            except StoreUnavailable as error:
                paused_at = paused_at or time.monotonic()
                app.events.emit(ConsumptionPaused(reason=str(error), retry_in_s=wait_s))
            else:
                if paused_at is not None:
                    app.events.emit(ConsumptionResumed(paused_s=time.monotonic() - paused_at))
                    paused_at = None
            due[job.name] = time.monotonic() + wait_s
