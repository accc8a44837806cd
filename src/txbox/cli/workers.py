"""workers, pause, resume and top: workers, and paused consumers."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

from txbox.admin import Admin, views
from txbox.admin.activity import Snapshot
from txbox.cli import add_command
from txbox.cli.options import add_audit, add_options, admin_of
from txbox.cli.output import clipped, print_json, print_line, print_section, print_table, shown
from txbox.errors import ConfigurationError, StoreUnavailable
from txbox.store.activity import Pause
from txbox.text import UNMATCHED, age, counted

_HOME, _REST_OF_LINE, _REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
# another screen, and no cursor; and back
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    add_command(commands, "workers", _workers, common)
    for name, run in (("pause", _pause), ("resume", _resume)):
        command = add_command(commands, name, run, common)
        add_options(command, {"consumer CONSUMER": "the consumer, as `txbox workers` lists it"})
        add_options(command, {"--dry-run": "say what would happen, and change nothing"})
        add_audit(command)
    top = add_command(commands, "top", _top, common)
    often = "how often to look (default 2s)"
    add_options(top, {"--interval TIME": often, "--once": "look once, then end"})
    top.set_defaults(interval=timedelta(seconds=2))


def _workers(args: argparse.Namespace) -> int:
    """Lists the processes of `txbox run`, `txbox relay` and `txbox maintain` on this database: where they run, what
    they consume, how busy they are, and when they were last seen, which is every few seconds. One that was not seen
    for half a minute is silent: killed, hanging, or cut off from the database. After an hour it is forgotten. Below:
    brokers that they cannot reach, and paused consumers.
    """
    with admin_of(args) as admin:
        workers, paused = admin.workers(), admin.pauses()
    if args.json:
        print_json({"workers": workers, "paused": paused})
        return 0
    if workers:
        print_table(*views.workers(workers))
    else:
        print_line(
            "No process of `txbox run`, `txbox relay` or `txbox maintain` is at work on this database."
        )
    print_section("Brokers", *views.troubles(workers))
    print_section("Paused", *views.pauses(paused))
    return 0


def _pause(args: argparse.Namespace) -> int:
    """Stops all workers from running CONSUMER within a few seconds, also those that start later, until `txbox
    resume`. Handlers that run may finish; no attempt is lost, and retries wait in the table. A source that only
    this consumer reads is not read meanwhile. What comes by a shared source, `process` or a webhook is stored as
    pending and acknowledged.
    """
    return _change(args, "pause")


def _resume(args: argparse.Namespace) -> int:
    """Lets workers run CONSUMER again, within a few seconds, starting with what has waited longest."""
    return _change(args, "resume")


def _change(args: argparse.Namespace, action: Literal["pause", "resume"]) -> int:
    with admin_of(args) as admin:
        before = next((each for each in admin.pauses() if each.consumer == args.consumer), None)
        change = admin.pause if action == "pause" else admin.resume
        changed = change(args.consumer, actor=args.actor, reason=args.reason, dry_run=args.dry_run)
        running = sum(args.consumer in worker.consumers for worker in admin.workers())
        handlers = admin.app.handlers.consumers()
        unknown = not running and args.consumer not in {*handlers, *admin.consumers()}
    if args.json:
        print_json(
            {
                "action": action, "consumer": args.consumer, "dry_run": args.dry_run,
                "changed": changed,
            }
        )  # fmt: skip
        return 0
    name, workers = shown(args.consumer), counted(running, "worker")
    typo = (
        " No consumer of that name is known: `txbox status` names those with messages."
        if unknown
        else ""
    )
    since = "until now" if before is None else _since(before)
    if action == "resume" and not changed:
        print_line(f"{name} is not paused.")
    elif action == "resume":
        would = "would be" if args.dry_run else "is"
        print_line(f"{name} {would} resumed; it was paused {since}.")
    elif not changed:
        print_line(f"{name} is paused already, {since}.")
    elif args.dry_run:
        print_line(f"{name} would be paused; {workers} would stop running it.{typo}")
    elif running:
        print_line(
            f"{name} is paused: {workers} {'stops' if running == 1 else 'stop'} running it within a few seconds. "
            f"`txbox resume {name}` ends that."
        )
    else:
        print_line(f"{name} is paused. No worker runs it, and new ones will not.{typo}")
    return 0


def _since(pause: Pause) -> str:
    why = f": {shown(pause.reason)}" if pause.reason else ""
    return f"since {shown(pause.paused_at)} by {shown(pause.actor)}{why}"


# -- top ------------------------------------------------------------------------------------------


def _top(args: argparse.Namespace) -> int:
    """Shows what each consumer and each route of the outbox did in the last minute or two, again and again: rates,
    failures, latencies from receipt to commit, how long the oldest due message waits, and the workers. It reads
    counts that workers write, never the inbox. Ctrl-C ends it.
    """
    if args.json and not args.once:
        raise ConfigurationError("top --json looks once: add --once.")
    with admin_of(args) as admin:
        # a wrong URL is reported on the ordinary screen
        snapshot = admin.snapshot()
        if args.json:
            print_json(snapshot)
        elif args.once:
            print_line("\n".join(_screen(snapshot)))
        else:
            _watch(admin, _screen(snapshot), args.interval.total_seconds())
    return 0


def _watch(admin: Admin, lines: list[str], interval_s: float) -> None:
    """Show one snapshot after the other, until interrupted."""
    terminal = sys.stdout.isatty()
    # as Ctrl-C: whoever ends this wants the cursor back
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    if terminal:
        print(_ENTER, end="")
    try:
        while True:
            _show(lines, terminal)
            time.sleep(interval_s)
            try:
                lines = _screen(admin.snapshot())
            except StoreUnavailable as error:
                lines = [f"The database does not answer: {shown(str(error))}", *lines[1:]]
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
        if terminal:
            print(_LEAVE, end="", flush=True)


def _show(lines: list[str], terminal: bool) -> None:
    if not terminal:
        print("\n".join(lines), end="\n\n", flush=True)
        return
    width, height = shutil.get_terminal_size()
    fitting = [clipped(line, width) for line in lines[: height - 1]]
    text = "".join(f"{line}{_REST_OF_LINE}\n" for line in fitting)
    print(f"{_HOME}{text}{_REST_OF_SCREEN}", end="", flush=True)


# the columns of a terminal, and what is above them; those of numbers are negative
_CONSUMER = (
    (19, -7, -7, -6, -5, -5, -5, -6, -6, -6, -6),
    ("CONSUMER", "IN/S", "OUT/S", "DUP/S", "FAIL", "DEAD", "QUAR", "P50", "P95", "P99", "AGE"),
)
_ROUTE = (52, -8, -6, -6, -6), ("ROUTE", "SENT/S", "FAIL", "DEAD", "AGE")
_WORKER = (
    (28, -8, -9, -7, -7, -7, -6, -8),
    ("WORKER", "COMMAND", "STATE", "BUSY", "LEASES", "FLIGHT", "UP", "VERSION"),
)


def _screen(snapshot: Snapshot) -> list[str]:
    """The lines of one screen, of 80 columns; nothing in them steers a terminal."""
    silent = sum(worker.state == "silent" for worker in snapshot.workers)
    workers = counted(len(snapshot.workers), "worker") + (f", {silent} silent" if silent else "")
    consumers = [
        (
            f"{rates.name or UNMATCHED}{' (paused)' if rates.paused else ''}",
            *map(_number, (rates.received_per_s, rates.processed_per_s, rates.duplicate_per_s)),
            *map(_count, (rates.failed, rates.dead, rates.quarantined)),
            *map(_time, (rates.p50_s, rates.p95_s, rates.p99_s, rates.oldest_s)),
        )
        for rates in snapshot.consumers
    ]
    routes = [
        (rates.name, _number(rates.processed_per_s), _count(rates.failed), _count(rates.dead), _time(rates.oldest_s))
        for rates in snapshot.routes
    ]  # fmt: skip
    at_work = [
        (
            f"{worker.host}:{worker.pid}", worker.kind, worker.state, f"{worker.busy}/{worker.lanes}",
            _count(worker.leases), _count(worker.in_flight),
            _time(max(0.0, (snapshot.at - worker.started_at).total_seconds())), worker.version,
        )
        for worker in snapshot.workers
    ]  # fmt: skip
    return [
        f"txbox top  {shown(snapshot.at)} UTC  rates of the last {snapshot.over_s:.0f} s  {workers}",
        *_table(_CONSUMER, consumers),
        *(_table(_ROUTE, routes) if routes else ()),
        *_table(_WORKER, at_work),
        *(
            clipped(
                shown(f"{trouble.kind} {trouble.name or 'any'} away for {ago}: {trouble.error}"), 80
            )
            for worker in snapshot.workers
            for trouble in worker.troubles
            for ago in (_time(max(0.0, snapshot.at.timestamp() - trouble.since_s)),)
        ),
    ]


def _table(
    columns: tuple[tuple[int, ...], tuple[str, ...]], rows: Sequence[tuple[str, ...]]
) -> list[str]:
    widths, heads = columns
    return ["", *(_line(widths, *row) for row in (heads, *rows))]


def _line(widths: tuple[int, ...], *cells: str) -> str:
    placed = (
        # one column stays free before the next cell
        clipped(shown(cell), abs(width) - 1, right=width < 0)
        for cell, width in zip(cells, widths, strict=True)
    )
    return " ".join(placed).rstrip()


def _number(value: float) -> str:
    if value >= 100_000:
        return f"{value / 1000:.0f}k"
    if 0 < value < 0.05:
        return "<0.1"
    return f"{value:.0f}" if value >= 100 or not value else f"{value:.1f}"


def _count(value: int) -> str:
    return str(value) if value < 10_000 else f"{value // 1000}k"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 100:
        return f"{seconds:.1f}s"
    return age(seconds).partition(" ")[0]
