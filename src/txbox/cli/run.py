"""run and maintain: the processes that stay; demo."""

from __future__ import annotations

import argparse
import os
import socket
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from txbox.app import App
from txbox.cli.application import opened, perform
from txbox.cli.listening import inherited, listening
from txbox.cli.logs import add_grace, log_libraries, start_logging, take_path
from txbox.cli.options import count, port
from txbox.cli.output import print_json, print_line, print_table
from txbox.errors import ConfigurationError, StoreUnavailable
from txbox.events import ConsumptionPaused, ConsumptionResumed, Event, MessageEvent
from txbox.maintenance import JOBS, Report, Task, run_once
from txbox.worker.signals import GRACE, Stop, draining_on_signals, last_s, leave, leave_by

if TYPE_CHECKING:
    from txbox.worker.serving import Server


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    run = commands.add_parser(
        "run", parents=[common],
        description="Runs the service: takes messages from the sources of the App, retries from its table, sends what "
        "is staged, and does maintenance in the background. SIGTERM or Ctrl-C drains: what runs is finished, the rest "
        "is left for redelivery; what has not ended within --grace is cut off; a second one ends at once. Exit status "
        "0 drained or idle, 1 cut off, something unexpected, or with --once a message that died or was quarantined, "
        "2 wrong configuration, schema or an unreachable database at the start.",
    )  # fmt: skip
    run.add_argument("path", nargs="?", metavar="MODULE:APP", help="the App, instead of --app")
    run.add_argument(
        "--once",
        action="store_true",
        help="end when all sources are read to their end and nothing in the table is due: a broker and a "
        "followed file have none, so with them this never ends; exit status 1 when a message died or was quarantined",
    )
    run.add_argument(
        "--processes", type=count, default=1, metavar="N", help="worker processes (default 1)"
    )
    add_grace(run)
    run.add_argument(
        "--no-maintenance", action="store_true", help="leave rescue and prune to `txbox maintain`"
    )
    health = run.add_argument_group("health (/livez, /readyz, /metrics; needs txbox[http])")
    health.add_argument(
        "--health-port", type=port, metavar="PORT", help="serve them here; 0 picks a port"
    )
    health.add_argument(
        "--health-host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="on this address (default 127.0.0.1; 0.0.0.0 or :: for an orchestrator)",
    )
    http = run.add_argument_group("webhooks (what the App consumes as Webhook; needs txbox[http])")
    http.add_argument(
        "--http-port",
        type=port,
        metavar="PORT",
        help="serve them here (default 8000); 0 picks a port",
    )
    http.add_argument(
        "--http-host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="on this address (default 127.0.0.1; 0.0.0.0 or :: for all)",
    )
    run.add_argument(
        "--no-relay", action="store_true", help="leave staged messages to `txbox relay`"
    )
    # one of several processes: its parent says how it ended
    run.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    run.set_defaults(run=_run)
    maintain = commands.add_parser(
        "maintain", parents=[common],
        description="Does maintenance without consuming: "
        + "; ".join(f"{job.name} ({job.summary})" for job in JOBS)
        + ". Runs until SIGTERM or Ctrl-C; several may run, a job is done by one at a time.",
    )  # fmt: skip
    maintain.add_argument("--once", action="store_true", help="each job once, then end")
    maintain.set_defaults(run=_maintain)
    for command in (run, maintain):
        command.add_argument("--log-json", action="store_true", help="log lines as JSON")
        command.add_argument(
            "--verbose", action="store_true", help="log every message, not only trouble"
        )
    demo = commands.add_parser("demo", add_help=False)
    demo.set_defaults(run=None)


_GIVEN_UP = "What is dead or quarantined waits for you: exit status 1."


def _run(args: argparse.Namespace) -> int:
    from txbox.worker import supervise
    from txbox.worker.supervisor import GAVE_UP

    take_path(args)
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
    tally = _Tally()
    log_libraries()
    app.events.observers.append(tally)
    with app:
        code, cut_off = _work(app, args, health, webhooks)
        given_up = args.once and code == 0 and tally.given_up
        if args.json and not args.child:
            print_json({"exit": 1 if given_up else code, "events": tally.counts})
        elif args.once and code == 0 and not args.child:
            print_line(tally.sentence())
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
    """Run a worker; returns its exit status, and whether something of it may hang still."""
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
        name=args.app or os.environ.get("TXBOX_APP", ""),
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
    return listening(
        args.health_host,
        args.health_port,
        "--health-port",
        "/livez, /readyz, /metrics",
        "txbox.worker.routes",
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
    child = [*args.program, "run", "--child"]
    if args.app is not None:
        child += ["--app", args.app]
    for name in ("once", "no_maintenance", "no_relay", "log_json", "verbose"):
        if getattr(args, name):
            child.append(f"--{name.replace('_', '-')}")
    # a child ends by itself before its parent has to kill it
    grace_s = args.grace.total_seconds()
    child += ["--grace", f"{grace_s - last_s(grace_s):g}s"]
    return child


class _Tally:
    """Counts events by kind, for the line at the end."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        if isinstance(event, MessageEvent):
            with self._lock:
                self.counts[type(event).__name__.removeprefix("Message").lower()] += 1

    @property
    def given_up(self) -> bool:
        """Whether a message waits for an operator now."""
        return bool(self.counts["dead"] or self.counts["quarantined"])

    def sentence(self) -> str:
        if not self.counts:
            return "Nothing to do."
        told = ", ".join(f"{number} {kind}" for kind, number in self.counts.most_common() if number)
        return f"{told}. {_GIVEN_UP}" if self.given_up else f"{told}."


def _maintain(args: argparse.Namespace) -> int:
    start_logging(args)
    with opened(args) as app:
        log_libraries()
        perform(app, app.check_schema)
        if args.once:
            reports = [run_once(app, job.name, Task()) for job in JOBS]
            _print_reports(args, reports)
            return 0
        return _maintain_on(app)


def _print_reports(args: argparse.Namespace, reports: list[Report]) -> None:
    if args.json:
        print_json({"jobs": reports})
        return
    print_table(
        ["job", "rows", "dead", "note"],
        [[report.job, report.rows, report.dead, _note(report)] for report in reports],
    )


def _note(report: Report) -> str:
    if report.skipped:
        return "another process is at it"
    return "outside of its window" if report.closed else ""


def _maintain_on(app: App) -> int:
    stopped = Stop()
    # the first round is not forgiven: a wrong URL or a missing schema ends here with its sentence
    due: dict[str, float] = {}
    paused_at: float | None = None
    with draining_on_signals(stopped.set, GRACE.total_seconds()):
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
    return 0
