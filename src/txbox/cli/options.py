"""The options that commands share, and what they name: an App, a filter, a length of time."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from txbox.app import App
from txbox.errors import ConfigurationError, TxboxError
from txbox.policy import GRACE
from txbox.session import Operation, drive, drive_async
from txbox.text import duration_of

if TYPE_CHECKING:
    from txbox.admin import Admin
    from txbox.admin.tables import Filter


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


def add_grace(parser: argparse.ArgumentParser) -> None:
    """Add the bound on a drain."""
    parser.add_argument(
        "--grace",
        type=duration,
        default=GRACE,
        metavar="TIME",
        help=f"how long a drain may take before the rest is cut off (default {GRACE.seconds}s)",
    )


def add_audit(parser: argparse.ArgumentParser) -> None:
    """Add who changes something, and why."""
    group = parser.add_argument_group("audit, kept in txbox_audit")
    group.add_argument("--actor", metavar="NAME", help="who did it (default: user@host)")
    group.add_argument("--reason", metavar="TEXT", help="why")


#: Filter options, in the order in which help lists them; a command has those of its table's filter.
_FILTERS = {
    "consumer": "of this consumer",
    "status": "",
    "topic": "of this topic",
    "route": "with this route, as `txbox status` shows it",
    "type": "of this type",
    "key": "with this ordering key",
    "error_type": "whose last error has this type, such as TimeoutError",
    "fingerprint": "whose last error has this fingerprint, as `txbox show` prints it",
    "hash": "whose payload has this hash; its first digits are enough",
    "older_than": "received or staged longer ago than this: 90s, 5m, 2h, 7d",
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
    group = parser.add_argument_group("filter: only messages (all must match)")
    known = {field.name for field in dataclasses.fields(kind)} if names is None else names
    choices = [str(status) for status in statuses or kind.table.statuses]
    given: dict[str, dict[str, Any]] = {
        "status": {"choices": choices, "metavar": "STATUS", "help": any_of(choices)},
        "route": {"metavar": "TEXT", "type": route},
        "hash": {"metavar": "HEX"},
        "older_than": {"metavar": "AGE", "type": duration},
    }
    for name, text in _FILTERS.items():
        # what has one status only needs no filter
        if name in known and (name != "status" or len(choices) > 1):
            option = f"--{name.replace('_', '-')}"
            options: dict[str, Any] = {"help": text, "metavar": "TEXT", **given.get(name, {})}
            group.add_argument(option, **options)


def any_of(words: Sequence[str]) -> str:
    """List words: due, failed or dead."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


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


T = TypeVar("T")
P = ParamSpec("P")

# of `txbox schema`: apply is init by another name, and print connects to nothing
_MAKING = frozenset({"apply", "print"})


def opened(args: argparse.Namespace, *, handlers: str | None = None) -> App:
    """The App that the options or the environment name; `args.app` is then its path, or "".

    Args:
        handlers: what the command does that takes the App with its handlers; a URL is then not enough.

    Raises:
        ConfigurationError: neither is given, or what is given does not work.
    """
    path, url = getattr(args, "path", None) or args.app, args.database
    if args.app is not None and path != args.app:
        raise ConfigurationError("Give the App once: as MODULE:APP or with --app.")
    if path is not None and url is not None:
        raise ConfigurationError("Give --app or --database, not both: an App has a database.")
    if path is None and url is None:
        path = os.environ.get("TXBOX_APP") or None
        url = os.environ.get("TXBOX_DATABASE_URL") or None
    args.app = path or ""
    if path is not None:
        if args.schema is not None:
            raise ConfigurationError(
                "--schema goes with --database: an App has its own App(schema=…)."
            )
        return _with_file(load(path), args)
    if handlers is not None:
        raise ConfigurationError(
            f"`txbox {args.command}` {handlers}, which takes the App: give --app module:app or set TXBOX_APP."
        )
    if url is None:
        raise ConfigurationError(
            "Which database? Give --app module:app or --database URL, or set TXBOX_APP or TXBOX_DATABASE_URL."
        )
    return _with_file(App(url, schema=args.schema), args)


def _with_file(app: App, args: argparse.Namespace) -> App:
    """Only what makes tables may make an SQLite file: another command has a mistyped name.

    Raises:
        ConfigurationError: there is no such file.
    """
    from txbox.connections.sqlite import SqliteDatabase

    database = app.database
    makes = args.command == "init" or getattr(args, "action", None) in _MAKING
    if isinstance(database, SqliteDatabase) and not makes and not Path(database.path).exists():
        raise ConfigurationError(
            f"There is no SQLite file {str(Path(database.path).absolute())!r}: correct the name, "
            "or run `txbox init`, which makes it."
        )
    return app


def admin_of(args: argparse.Namespace, *, handlers: str | None = None) -> Admin:
    """The operator's view of what `opened` returns."""
    from txbox.admin import Admin

    return Admin(opened(args, handlers=handlers))


def load(path: str) -> App:
    """Import `module:app`; the working directory is importable.

    Raises:
        ConfigurationError: the module or attribute does not exist, is not an App, or the module raised.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or "/" in module_name or module_name.endswith(".py"):
        raise ConfigurationError(
            f"{path!r} is not the path of an App: write module:app, like shop:app or shop.events:app."
        )
    found: Any = _imported(module_name)
    for name in (attribute or "app").split("."):
        if not hasattr(found, name):
            raise ConfigurationError(_missing(module_name, name, found))
        found = getattr(found, name)
    if not isinstance(found, App):
        raise ConfigurationError(
            f"{module_name}:{attribute or 'app'} is a {type(found).__qualname__}, not a txbox.App: "
            "name the variable that App(…) was assigned to."
        )
    return found


def _imported(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except TxboxError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and (error.name == name or name.startswith(f"{error.name}.")):
            raise ConfigurationError(
                f"There is no module {error.name!r} in {here} or on the Python path: run txbox where it is "
                "importable, or give another --app module:app."
            ) from error
        raise ConfigurationError(
            f"{name} imports {error.name!r}, which is not installed here: install it in this environment."
        ) from error
    except Exception as error:
        # whatever the user's module raises is a wrong program: nothing has been consumed
        raise ConfigurationError(_failed_import(name, error)) from error


def _failed_import(name: str, error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
    if isinstance(error, SyntaxError):
        where = f" in {error.filename}, line {error.lineno}"
    said = str(error).partition("\n")[0]
    return (
        f"{name} cannot be imported: {type(error).__name__}: {said}{where}; "
        f'`python -c "import {name}"` shows the whole traceback.'
    )


def _missing(module: str, name: str, found: object) -> str:
    apps = [variable for variable, value in vars(found).items() if isinstance(value, App)]
    if apps:
        return f"{module} has no {name!r}, but it has {' and '.join(apps)}: give --app {module}:{apps[0]}."
    return (
        f"{module} has no {name!r}: name the variable that App(…) was assigned to, as module:app."
    )


def perform(app: App, operation: Operation[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Carry an operation out on whatever connections the App has."""
    if app.database.sync is not None:
        return drive(app.database.sync, operation, *args, **kwargs)
    assert app.database.asynchronous is not None
    return asyncio.run(drive_async(app.database.asynchronous, operation, *args, **kwargs))
