"""The options that commands share, and how their values are read."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Sequence
from datetime import timedelta
from typing import NoReturn

from txbox.cli.output import print_error
from txbox.errors import redacted
from txbox.outcome import Status
from txbox.store.filters import RowFilter
from txbox.worker.signals import GRACE

_UNITS_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors quote no password."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        print_error(f"{redacted(message)}. See `{self.prog} --help`.")
        raise SystemExit(2)


class HelpFormatter(argparse.HelpFormatter):
    """Fills each paragraph of a description by itself; examples stay as they are written."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            textwrap.fill(
                " ".join(paragraph.split()), width, initial_indent=indent, subsequent_indent=indent
            )
            if not paragraph.startswith("examples:")
            else paragraph
            for paragraph in text.split("\n\n")
        )


def duration(text: str) -> timedelta:
    """Read 30s, 5m, 2h, 7d, or a sum like 1h30m."""
    parts = _DURATION.findall(text)
    if not parts or "".join(f"{number}{unit}" for number, unit in parts) != text:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no duration: write a number with its unit, like 30s, 5m, 2h or 7d"
        )
    return timedelta(seconds=sum(float(number) * _UNITS_S[unit] for number, unit in parts))


def count(text: str) -> int:
    """Read a number of 1 or more."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)


def port(text: str) -> int:
    """Read a TCP port; 0 lets the system pick one."""
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port from 0 to 65535")
    return int(text)


def add_grace(parser: argparse.ArgumentParser) -> None:
    """Add the bound on a drain."""
    parser.add_argument(
        "--grace",
        type=duration,
        default=GRACE,
        metavar="TIME",
        help=f"from the signal to the end; what has not drained then is cut off (default {GRACE.seconds}s)",
    )


def common() -> argparse.ArgumentParser:
    """The options of every command."""
    parent = Parser(add_help=False)
    group = parent.add_argument_group("which inbox (--app or --database)")
    group.add_argument(
        "--app", metavar="MODULE:APP", help="the App, importable from here (or TXBOX_APP)"
    )
    group.add_argument(
        "--database",
        metavar="URL",
        help="its database, where no App is needed; if it has a password, use TXBOX_DATABASE_URL: arguments are public",
    )
    group.add_argument(
        "--schema", metavar="NAME", help="with --database: the PostgreSQL schema of the tables"
    )
    parent.add_argument("--json", action="store_true", help="print JSON instead of text and tables")
    return parent


def add_filter(
    parser: argparse.ArgumentParser,
    *names: str,
    statuses: Sequence[str] = tuple(Status),
    since: str = "received",
) -> None:
    """Add the filter options that the command's query knows."""
    group = parser.add_argument_group("filter (all that are given must match)")
    helps = {
        "consumer": "messages of this consumer",
        "topic": "messages of this topic",
        "type": "messages of this type",
        "route": "messages that go this way, as `txbox status` shows it",
        "key": "messages with this ordering key",
        "error_type": "whose last error has this type",
        "fingerprint": "whose last error has this fingerprint",
    }
    for name in names:
        option = f"--{name.replace('_', '-')}"
        if name == "status":
            group.add_argument(
                option, choices=[str(status) for status in statuses], help="messages in this status"
            )
        elif name == "older_than":
            group.add_argument(
                option,
                type=duration,
                metavar="AGE",
                help=f"{since} longer ago than this (90s, 5m, 2h, 7d)",
            )
        else:
            group.add_argument(option, metavar="TEXT", help=helps[name])


def filter_of(args: argparse.Namespace) -> RowFilter:
    """The filter that was given; options the command does not have are open."""
    return RowFilter(
        consumer=getattr(args, "consumer", None),
        status=getattr(args, "status", None),
        topic=getattr(args, "topic", None),
        type=getattr(args, "type", None),
        key=getattr(args, "key", None),
        error_type=getattr(args, "error_type", None),
        fingerprint=getattr(args, "fingerprint", None),
        older_than=getattr(args, "older_than", None),
    )


def add_audit(parser: argparse.ArgumentParser) -> None:
    """Add who and why."""
    group = parser.add_argument_group("audit (each change is recorded in txbox_audit)")
    group.add_argument("--actor", metavar="NAME", help="who changes this (default: user@host)")
    group.add_argument("--reason", metavar="TEXT", help="why")
