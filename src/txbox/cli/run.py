"""run, relay, maintain and ui: the processes that stay, their log lines and their ports."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator
from concurrent.futures import wait
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from txbox.app import App
from txbox.boundaries import Boundary
from txbox.boundaries import log as _log
from txbox.cli import add_command
from txbox.cli.options import add_grace, add_options, opened
from txbox.cli.output import print_json, print_line, print_table
from txbox.errors import ConfigurationError, installed
from txbox.events import Event, MessageEvent, OutgoingSent
from txbox.maintenance import JOBS, Report, Task
from txbox.observers.logging import current_trace
from txbox.policy import GRACE
from txbox.worker.driving import Driver, check_tables
from txbox.worker.supervisor import (
    GAVE_UP,
    HEALTH_FD,
    HTTP_FD,
    Stop,
    draining_on_signals,
    last_s,
    leave,
    leave_by,
    supervise,
)

if TYPE_CHECKING:
    from txbox.ui import Authenticate, Tokens
    from txbox.worker.serving import Server


_UI_LOOK_S, _UI_GRACE_S, _UI_CLOSE_S = 3600.0, 10.0, 5.0
# in the environment: arguments are public
_TOKENS, _PROXY, _SIGNING = "TXBOX_UI_TOKEN", "TXBOX_UI_PROXY_SECRET", "TXBOX_UI_SECRET"
_LOGS = {
    "--log-json": "log JSON, an object a line",
    "--verbose": "log every event, not only trouble",
}
_BACKLOG = 2048
_LOOPBACK = "127.0.0.1"
_GIVEN_UP = "Dead and quarantined messages wait for you: exit status 1."


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    run = add_command(commands, "run", _run, common)
    relay = add_command(commands, "relay", _relay, common)
    jobs = "\n".join(f"  {job.name:<17} {job.summary}" for job in JOBS)
    maintain = add_command(
        commands, "maintain", _maintain, common,
        description="Does the maintenance of `txbox run`, and nothing else, until SIGTERM or Ctrl-C. Any number may "
        f"run: each job is done by one at a time.\n\njobs:\n{jobs}",
    )  # fmt: skip
    for command in (run, relay):
        add_options(command, {"path MODULE:APP": "instead of --app"}, nargs="?")
        add_grace(command)
    once = (
        "end once every source is read to its end and nothing in the table is due or leased; what becomes due later, "
        "such as a retry, is left; sources without an end (brokers, followed files) never finish"
    )
    add_options(
        run,
        {
            "--once": once,
            **_LOGS,
            "--processes N": "how many worker processes (default 1)",
            "--no-maintenance": "leave maintenance to `txbox maintain`",
            "--no-relay": "leave sending to `txbox relay`",
            # one of several processes: its parent says how it ended
            "--child": argparse.SUPPRESS,
        },
    )
    add_options(
        relay, {"--once": "end once nothing is due; what becomes due later is left", **_LOGS}
    )
    add_options(maintain, {"--once": "do each job once, then end", **_LOGS})
    probed = "health: /livez, /readyz, /metrics (needs txbox[http])"
    for command, name, what, default in (
        *((command, "health", probed, "") for command in (run, relay, maintain)),
        (run, "http", "webhooks of the App (needs txbox[http])", " (default 8000)"),
    ):
        add_options(
            command.add_argument_group(what),
            {
                f"--{name}-port PORT": f"the port to serve on{default}; 0 picks one",
                f"--{name}-host ADDRESS": "the address to serve on (default 127.0.0.1; 0.0.0.0 or :: for all)",
            },
        )
        command.set_defaults(**{f"{name}_host": _LOOPBACK})
    run.set_defaults(processes=1)
    # what only `run` omits, or gets from its parent
    relay.set_defaults(child=False, no_maintenance=False, no_relay=False)
    maintain.set_defaults(child=False, no_maintenance=False, no_relay=False, grace=GRACE)
    ui = add_command(commands, "ui", _ui, common)
    add_options(
        ui,
        {
            "--host ADDRESS": "the address to listen on (default 127.0.0.1); any other needs a TLS proxy in front",
            "--port PORT": "the port to listen on (default 8484)",
            "--tokens FILE": "who may log in: a line NAME:TOKEN or NAME:TOKEN:change,payload for each",
            "--trust-header NAME": f"the header with the user's name from a proxy on loopback, or with {_PROXY}",
        },
    )
    granted = "what a token without a name, or a user of the proxy, may do besides reading: change messages, or see "
    granted += "payloads and headers"
    add_options(ui, {"--grant GRANT…": granted}, metavar=None, choices=("change", "payload"))
    add_options(
        ui,
        {
            "--allow-host NAME…": "a host name that browsers use for it, besides localhost",
            "--proxy ADDRESS…": "a proxy, or network of proxies, whose X-Forwarded-For and -Proto are believed",
            **_LOGS,
        },
    )
    ui.set_defaults(host=_LOOPBACK, port=8484)


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


@contextmanager
def _started(args: argparse.Namespace) -> Generator[tuple[App, Driver]]:
    """Begin to log, open the App, and check its tables now, not when they are first used."""
    start_logging(args)
    with opened(args) as app:
        log_libraries()
        driver = Driver(app)
        # the dashboard has nothing to wait with
        patient = not getattr(args, "once", True)
        check_tables(app, driver, time.sleep, patient=patient)
        yield app, driver


# -- run ------------------------------------------------------------------------------------------


def _run(args: argparse.Namespace) -> int:
    """Runs the service: receives from the sources of the App, retries failed messages, sends staged ones, and does
    maintenance.

    SIGTERM or Ctrl-C drains: handlers that run may finish, and the rest is left for redelivery. What has not
    finished within --grace is cut off. A second signal ends it at once.

    Exit status: 0 drained or idle; 1 cut off, an unexpected error, or with --once a message that died or was
    quarantined; 2 wrong configuration or schema, or no database at the start.
    """
    start_logging(args)
    app = opened(args, handlers="runs handlers")
    health, http = _health_socket(args), _http_socket(args, app)
    webhooks: Server | None = None
    if http is not None:
        from txbox.brokers.webhook import by_path
        from txbox.worker.serving import WEBHOOKS, Routes, Server

        webhooks = Server(Routes(by_path(app.webhooks, app.handlers.topics())), http, WEBHOOKS)
    if args.processes > 1:
        for consumption in app.consumptions:
            source = consumption.source
            if source.one_process is not None:
                raise ConfigurationError(
                    f"{source.name} cannot be read by {args.processes} processes: {source.one_process}. Leave it out, "
                    "or start single processes, each with a name of its own."
                )
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
    webhooks: Server | None = None,
) -> tuple[int, bool]:
    """Run a worker of the command's kind; returns its exit status, and whether something of it may still hang."""
    from txbox.worker import Worker
    from txbox.worker.health import Health

    health = Health()
    server: Server | None = None
    if listener is not None:
        from txbox.observers.counters import Counters
        from txbox.worker.serving import PROBES, Server, probes

        counters = Counters()
        app.events.observers += [health, counters]
        server = Server(probes(health, counters, app.webhooks), listener, PROBES)
        server.start()
    worker = Worker(
        app,
        kind=args.command,
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
    if args.child:
        return inherited(HEALTH_FD)
    if args.health_port is None:
        return None
    what = "/livez, /readyz, /metrics"
    return listening(args.health_host, args.health_port, "--health-port", what)


def _http_socket(args: argparse.Namespace, app: App) -> socket.socket | None:
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
    return listening(args.http_host, chosen, "--http-port", paths)


def _child(args: argparse.Namespace) -> list[str]:
    flags = ("once", "no_maintenance", "no_relay", "log_json", "verbose")
    options = [f"--{name.replace('_', '-')}" for name in flags if getattr(args, name)]
    # a child ends by itself before its parent has to kill it
    grace_s = args.grace.total_seconds()
    grace = f"{grace_s - last_s(grace_s):.3f}s"
    return [*args.program, "run", "--child", "--app", args.app, *options, "--grace", grace]


# -- relay ----------------------------------------------------------------------------------------


def _relay(args: argparse.Namespace) -> int:
    """Sends the messages that app.outbox.stage has written to where app.publish says. `txbox run` does the same
    beside its handlers. Any number may run, on many machines.

    SIGTERM or Ctrl-C drains: what is confirmed is marked as sent, the rest is left. What has not finished within
    --grace is cut off, and sent again later.

    Exit status: 0 stopped or idle; 1 cut off, or an unexpected error; 2 wrong configuration or schema, or no
    database at the start.
    """
    start_logging(args)
    app = opened(args, handlers="sends where app.publish says")
    health, tally = _health_socket(args), _Tally("Outgoing", sent=0, failed=0, dead=0)
    log_libraries()
    app.events.observers.append(tally)
    with app:
        code, cut_off = _work(app, args, health)
        if code and not cut_off:
            return code
        if args.json:
            print_json(tally.counts)
        else:
            print_line(tally.sentence())
        if cut_off:
            leave(code)
    return code


# -- maintain -------------------------------------------------------------------------------------


def _maintain(args: argparse.Namespace) -> int:
    if args.once:
        return _maintain_once(args)
    start_logging(args)
    app = opened(args)
    health = _health_socket(args)
    log_libraries()
    with app:
        code, cut_off = _work(app, args, health)
        if cut_off:
            leave(code)
    return code


def _maintain_once(args: argparse.Namespace) -> int:
    if args.health_port is not None:
        raise ConfigurationError(
            "maintain --once ends soon, and serves no probes: leave out --health-port."
        )
    with _started(args) as (app, driver):
        reports: list[Report] = []
        for job in JOBS:
            try:
                reports.append(driver.perform(job.run, app, Task()))
            except Exception as error:  # noqa: BLE001  # see contain
                app.protocol.contain(Boundary.JOB, error)
        if args.json:
            print_json({"jobs": reports})
        else:
            print_table(
                ["job", "rows", "dead", "note"],
                [[report.job, report.rows, report.dead, _note(report)] for report in reports],
            )
    return 0 if len(reports) == len(JOBS) else 1


def _note(report: Report) -> str:
    if report.skipped:
        return "another process is at it"
    return "outside of its window" if report.closed else ""


# -- ui -------------------------------------------------------------------------------------------


def _ui(args: argparse.Namespace) -> int:
    """Serves the dashboard: what is stuck, why, since when, and what to do about it.

    It does not start without a login. Set TXBOX_UI_TOKEN to a secret of 24 bytes or more, and say with --grant what its
    holders may do besides reading. Or give each person a token of their own: lines NAME:TOKEN or
    NAME:TOKEN:change,payload in TXBOX_UI_TOKEN or in the file of --tokens. Or let a proxy log them in, which passes the
    name in the header of --trust-header. Changes are kept in txbox_audit with the name.
    """
    with installed("ui", "The dashboard"):
        from txbox.ui import Dashboard
    authenticator = _authenticator(args)
    with _started(args) as (app, driver):
        dashboard = Dashboard(
            app,
            authenticator,
            hosts=args.allow_host,
            proxies=args.proxy,
            secret=os.environ.get(_SIGNING),
        )
        listener = listening(args.host, args.port, "--port", "the dashboard")
        from txbox.worker.serving import DASHBOARD, Server

        server, stop = Server(dashboard, listener, DASHBOARD), Stop()
        with draining_on_signals(stop.set, _UI_GRACE_S):
            # on the loop of the check: a pool of async connections belongs to one
            serving = driver.task(server.serve())
            serving.add_done_callback(lambda _: stop.set())
            while not stop.wait(_UI_LOOK_S):
                pass
            server.stop()
            if wait([serving], _UI_CLOSE_S).done:
                serving.result()
    return 0


def _authenticator(args: argparse.Namespace) -> Tokens | Authenticate:
    """The authenticator that options and environment name.

    Raises:
        ConfigurationError: none, or two.
    """
    from txbox.ui import Tokens, TrustedHeader

    lines = os.environ.get(_TOKENS)
    sources = {_TOKENS: lines, "--tokens": args.tokens, "--trust-header": args.trust_header}
    chosen = [name for name, value in sources.items() if value]
    if not chosen:
        raise ConfigurationError(
            f"Nobody may log in: set {_TOKENS}, or give --tokens FILE or --trust-header NAME."
        )
    if len(chosen) > 1:
        raise ConfigurationError(f"{' and '.join(chosen)} both say who may log in: use one.")
    if args.trust_header:
        return TrustedHeader(args.trust_header, grants=args.grant, secret=os.environ.get(_PROXY))
    if args.tokens:
        try:
            lines = Path(args.tokens).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigurationError(
                f"The tokens in {args.tokens!r} cannot be read: {why}."
            ) from None
    return Tokens.read(lines or "", grants=args.grant)


# -- logs -----------------------------------------------------------------------------------------


#: Client libraries, which log each failed try at WARNING or ERROR, some with a traceback.
_CLIENTS = (
    "aio_pika", "aiormq", "nats", "redis", "botocore", "boto3", "urllib3", "psycopg", "asyncpg",
)  # fmt: skip


def log_libraries() -> None:
    """Log what libraries say, unless the app has set that up."""
    root = logging.getLogger()
    if not root.handlers:
        for handler in _log.logger.handlers:
            root.addHandler(handler)


def start_logging(args: argparse.Namespace) -> None:
    """Write txbox's log lines to stderr, as the options say, and everything else that would go there unformatted."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines() if args.log_json else _Lines())
    _log.logger.addHandler(handler)
    _log.setLevel(logging.DEBUG if args.verbose else logging.INFO)
    _log.logger.propagate = False
    if not args.verbose:
        for name in _CLIENTS:
            # what they report is in txbox's own lines, once and not at every try
            client = logging.getLogger(name)
            if client.level == logging.NOTSET:
                client.setLevel(logging.CRITICAL)
    # what an endpoint raised
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    # until `log_libraries`: what is said while the App is imported, which may set logging up
    logging.lastResort = handler
    logging.captureWarnings(capture=True)
    warned = logging.getLogger("py.warnings")
    warned.addHandler(handler)
    warned.propagate = False
    threading.excepthook = _thread_failed
    sys.unraisablehook = _unraisable


def _thread_failed(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_type is not SystemExit:
        name = failed.thread.name if failed.thread is not None else "?"
        raised = failed.exc_value or failed.exc_type()
        _log.error("The thread %s failed.", name, exc_info=raised)


def _unraisable(failed: sys.UnraisableHookArgs) -> None:
    if failed.exc_value is not None:
        said = failed.err_msg or "Exception ignored in"
        _log.error("%s %r", said, failed.object, exc_info=failed.exc_value)


class _InUtc(logging.Formatter):
    default_msec_format = "%s.%03dZ"
    converter = staticmethod(time.gmtime)


class _Lines(_InUtc):
    """Time, level, the logger where it is not txbox's, and the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self._others = _InUtc("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record) if record.name == "txbox" else self._others.format(record)


class _JsonLines(logging.Formatter):
    """One JSON object a line: the fields of an event, or a message."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = getattr(record, "txbox", None) or {"message": record.getMessage()}
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            **({} if record.name == "txbox" else {"logger": record.name}),
            **said,
            **current_trace(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


# -- ports ----------------------------------------------------------------------------------------


def listening(host: str, port: int, option: str, what: str) -> socket.socket:
    """Bind and listen, and say where.

    Raises:
        ConfigurationError: the port is taken, this machine has no such address, or what serves it is not
            installed.
    """
    try:
        # needed later: what is missing is said now, and once
        importlib.import_module("txbox.worker.serving")
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{what} cannot be served without {error.name}: run pip install 'txbox[http]'."
        ) from error
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        # a name that does not resolve has a number of its own kind
        number = error.errno or 0
        why = os.strerror(number) if number > 0 else error.strerror
        raise ConfigurationError(
            f"Port {port} of {host} cannot be listened on ({why}): "
            f"free it, or give another {option}."
        ) from error
    shown = f"[{host}]" if ":" in host else host
    _log.info("Listening on http://%s:%d for %s", shown, listener.getsockname()[1], what)
    return listener


def inherited(name: str) -> socket.socket | None:
    """The listening socket that the parent process has bound, if it has."""
    # removed so that a handler's subprocesses do not inherit it
    fd = os.environ.pop(name, None)
    return None if fd is None else socket.socket(fileno=int(fd))
