"""The options that commands share, and how their values are read."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from txbox.admin.tables import Filter
from txbox.admin.views import duration_of
from txbox.errors import ConfigurationError


def duration(text: str) -> timedelta:
    """Read 30s, 5m, 2h, 7d, or a sum like 1h30m."""
    try:
        return duration_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def header_of(pair: str) -> tuple[str, str]:
    """Read NAME=VALUE.

    Raises:
        ConfigurationError: it is not of that form.
    """
    name, separator, value = pair.partition("=")
    if not separator or not name:
        raise ConfigurationError(f"--header takes NAME=VALUE, not {pair!r}.")
    return name, value


def count(text: str) -> int:
    """Read a number of 1 or more."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 1 or more")
    return int(text)


def port(text: str) -> int:
    """Read a TCP port; 0 lets the system pick one."""
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)


def add_audit(parser: argparse.ArgumentParser) -> None:
    """Add who changes something, and why."""
    group = parser.add_argument_group("audit (each change is recorded in txbox_audit)")
    group.add_argument("--actor", metavar="NAME", help="who changes this (default: user@host)")
    group.add_argument("--reason", metavar="TEXT", help="why")


#: Filter options, in the order in which help lists them; a command has those of its table's filter.
_FILTERS = {
    "consumer": "messages of this consumer",
    "status": "messages in this status",
    "topic": "messages of this topic",
    "route": "messages that go this way, as `txbox status` shows it",
    "type": "messages of this type",
    "key": "messages with this ordering key",
    "error_type": "whose last error has this type",
    "fingerprint": "whose last error has this fingerprint",
    "hash": "whose payload has this hash; the first digits of it are enough",
    "older_than": "received, or staged, longer ago than this (90s, 5m, 2h, 7d)",
}


def add_filter(
    parser: argparse.ArgumentParser,
    kind: type[Filter[Any, Any]],
    names: Sequence[str] | None = None,
    *,
    statuses: Sequence[str] | None = None,
) -> None:
    """Add the filter options that a table knows.

    Args:
        names: only these of them.
        statuses: only these of the table's.
    """
    group = parser.add_argument_group("filter (all that are given must match)")
    known = {field.name for field in dataclasses.fields(kind)} if names is None else names
    choices = [str(status) for status in statuses or kind.table.statuses]
    given: dict[str, dict[str, Any]] = {
        "status": {"choices": choices},
        "route": {"metavar": "TEXT", "type": route},
        "hash": {"metavar": "HEX"},
        "older_than": {"metavar": "AGE", "type": duration},
    }
    for name, text in _FILTERS.items():
        # what has one status only needs no filter
        if name in known and (name != "status" or len(choices) > 1):
            option = f"--{name.replace('_', '-')}"
            group.add_argument(option, help=text, **given.get(name, {"metavar": "TEXT"}))


def route(text: str) -> str:
    """Read a route as people write it: `any` is the empty one."""
    return "" if text == "any" else text


def filter_of(args: argparse.Namespace) -> Filter[Any, Any]:
    """The filter that was given; options the command does not have match everything."""
    given = {
        field.name: getattr(args, field.name, None)
        for field in dataclasses.fields(args.kind)
        if field.name in _FILTERS
    }
    if given["status"] == "all":
        given["status"] = None
    found: Filter[Any, Any] = args.kind(**given)
    return found
