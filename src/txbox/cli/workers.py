"""workers, pause, resume and top: who is at work, and what is held back."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from datetime import timedelta
from typing import Any

from txbox.admin import Admin, views
from txbox.admin.activity import Snapshot
from txbox.admin.views import age, counted
from txbox.cli.application import admin_of
from txbox.cli.options import add_audit, duration
from txbox.cli.output import (
    clipped,
    print_json,
    print_line,
    print_table,
    shown,
)
from txbox.errors import ConfigurationError, StoreUnavailable
from txbox.store.pauses import Pause

_HOME, _REST_OF_LINE, _REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
# another screen, and no cursor; and back
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    workers = commands.add_parser(
        "workers", parents=[common],
        description="Lists the processes of `txbox run` and `txbox relay` on this database: where each runs, what it "
        "consumes, how many lanes are busy, and when it was heard of last; each says so every few seconds. One that "
        "has not for half a minute is silent: killed, hanging, or cut off from the database; after an hour it is "
        "forgotten. Below, the consumers that are paused.",
    )  # fmt: skip
    workers.set_defaults(run=_workers)
    pause = commands.add_parser(
        "pause", parents=[common],
        description="Every worker stops running CONSUMER within a few seconds, and none starts to; a restart does not "
        "end that. What runs is finished, retries wait in the table, and no attempt is lost. A source with no other "
        "consumer is not received from; what it shares with another one, and what comes by `process` or a webhook, is "
        "stored as pending and acknowledged.",
    )  # fmt: skip
    pause.set_defaults(run=_pause)
    resume = commands.add_parser(
        "resume", parents=[common],
        description="Workers run CONSUMER again within a few seconds, beginning with what has waited longest.",
    )  # fmt: skip
    resume.set_defaults(run=_resume)
    for command in (pause, resume):
        command.add_argument("consumer", metavar="CONSUMER", help="as `txbox workers` names it")
        command.add_argument(
            "--dry-run", action="store_true", help="say what would be, and change nothing"
        )
        add_audit(command)
    top = commands.add_parser(
        "top", parents=[common],
        description="Shows, again and again, what each consumer and each route of the outbox did in the last minute or "
        "two: rates, failures, times from receipt to commit, and how long the first message that is due has waited; "
        "and who is at work. It reads what workers have counted, and never the inbox. Ctrl-C ends it.",
    )  # fmt: skip
    top.add_argument(
        "--interval", type=duration, default=timedelta(seconds=2), metavar="TIME",
        help="between two looks (default 2s)",
    )  # fmt: skip
    top.add_argument("--once", action="store_true", help="look once, and end")
    top.set_defaults(run=_top)


def _workers(args: argparse.Namespace) -> int:
    with admin_of(args) as admin:
        workers, paused = admin.workers(), admin.pauses()
    if args.json:
        print_json({"workers": workers, "paused": paused})
        return 0
    if workers:
        print_table(*views.workers(workers))
    else:
        print_line("No process of `txbox run` or `txbox relay` is at work on this database.")
    if paused:
        print_line("\nPaused:")
        print_table(*views.pauses(paused))
    return 0


def _pause(args: argparse.Namespace) -> int:
    with admin_of(args) as admin:
        known = _known(admin, args.consumer)
        done = admin.pause(args.consumer, **_how(args))
        at_work = [each for each in admin.workers() if args.consumer in each.consumers]
    name = shown(args.consumer)
    if args.json:
        return _told(args, "pause", done)
    if not done and known is not None:
        print_line(f"{name} is paused already, {_since(known)}.")
    elif args.dry_run:
        print_line(
            f"{name} would be paused; {counted(len(at_work), 'worker')} would stop running it."
        )
    elif at_work:
        print_line(
            f"{name} is paused: {counted(len(at_work), 'worker')} that had it stop running it within a few seconds. "
            f"`txbox resume {name}` ends that."
        )
    else:
        print_line(f"{name} is paused. Nobody runs it now; workers that start will not either.")
    return 0


def _resume(args: argparse.Namespace) -> int:
    with admin_of(args) as admin:
        known = _known(admin, args.consumer)
        done = admin.resume(args.consumer, **_how(args))
    name = shown(args.consumer)
    if args.json:
        return _told(args, "resume", done)
    if not done:
        print_line(f"{name} is not paused.")
    else:
        would = "would be" if args.dry_run else "is"
        print_line(
            f"{name} {would} resumed; it was paused {_since(known) if known else 'until now'}."
        )
    return 0


def _told(args: argparse.Namespace, action: str, done: bool) -> int:
    print_json(
        {"action": action, "consumer": args.consumer, "dry_run": args.dry_run, "changed": done}
    )
    return 0


def _how(args: argparse.Namespace) -> Any:
    return {"actor": args.actor, "reason": args.reason, "dry_run": args.dry_run}


def _known(admin: Admin, consumer: str) -> Pause | None:
    return next((pause for pause in admin.pauses() if pause.consumer == consumer), None)


def _since(pause: Pause) -> str:
    why = f": {shown(pause.reason)}" if pause.reason else ""
    return f"since {shown(pause.paused_at)} by {shown(pause.actor)}{why}"


# -- top ------------------------------------------------------------------------------------------


def _top(args: argparse.Namespace) -> int:
    if args.json and not args.once:
        raise ConfigurationError("top --json looks once: add --once.")
    with admin_of(args) as admin:
        if args.once:
            found = admin.snapshot()
            if args.json:
                print_json(found)
            else:
                for line in _screen(found):
                    print_line(line)
            return 0
        return _watch(admin, args.interval.total_seconds())


def _watch(admin: Admin, interval_s: float) -> int:
    """Show one snapshot after the other, until interrupted."""
    terminal = sys.stdout.isatty()
    # a wrong URL is told on the ordinary screen
    lines = _screen(admin.snapshot())
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
        return 0
    finally:
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


def _screen(found: Snapshot) -> list[str]:
    """The lines of one look, of 80 columns; nothing in them steers a terminal."""
    silent = sum(worker.state == "silent" for worker in found.workers)
    workers = counted(len(found.workers), "worker") + (f", {silent} silent" if silent else "")
    lines = [
        f"txbox top  {shown(found.at)} UTC  rates of the last {found.over_s:.0f} s  {workers}",
        "",
        _line(_CONSUMER, "CONSUMER", "IN/S", "OUT/S", "DUP/S", "FAIL", "DEAD", "QUAR", "P50", "P95", "P99", "AGE"),
    ]  # fmt: skip
    for rates in found.consumers:
        name = views.UNMATCHED if not rates.name else rates.name
        lines.append(
            _line(
                _CONSUMER,
                f"{name} (paused)" if rates.paused else name,
                *map(_number, (rates.received_per_s, rates.processed_per_s, rates.duplicate_per_s)),
                *map(_count, (rates.failed, rates.dead, rates.quarantined)),
                *map(_time, (rates.p50_s, rates.p95_s, rates.p99_s, rates.oldest_s)),
            )
        )
    if found.routes:
        lines += ["", _line(_ROUTE, "ROUTE", "SENT/S", "FAIL", "DEAD", "AGE")]
    for rates in found.routes:
        lines.append(
            _line(
                _ROUTE, rates.name, _number(rates.processed_per_s), _count(rates.failed), _count(rates.dead),
                _time(rates.oldest_s),
            )
        )  # fmt: skip
    lines += [
        "",
        _line(_WORKER, "WORKER", "COMMAND", "STATE", "BUSY", "LEASES", "FLIGHT", "UP", "VERSION"),
    ]
    for worker in found.workers:
        up_s = (found.at - worker.started_at).total_seconds()
        lines.append(
            _line(
                _WORKER, f"{worker.host}:{worker.pid}", worker.kind, worker.state, f"{worker.busy}/{worker.lanes}",
                _count(worker.leases), _count(worker.in_flight), _time(max(0.0, up_s)), worker.version,
            )
        )  # fmt: skip
    return lines


# columns of a terminal; those of numbers are negative
_CONSUMER = (19, -7, -7, -6, -5, -5, -5, -6, -6, -6, -6)
_ROUTE = (52, -8, -6, -6, -6)
_WORKER = (28, -8, -9, -7, -7, -7, -6, -8)


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
