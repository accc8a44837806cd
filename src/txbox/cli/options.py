"""The options that commands share, and what they name: an App, a filter, a length of time."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from txbox.app import App
from txbox.errors import ConfigurationError, TxboxError
from txbox.policy import GRACE
from txbox.text import duration_of, with_article

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
    """Read a number of 1 or more, that fits into a column of a database."""
    if not text.isascii() or not text.isdigit() or len(text) > 18 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 1 or more")
    return int(text)


def port(text: str) -> int:
    """Read a TCP port; 0 lets the system pick one."""
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)


def payload_of(path: str) -> bytes:
    """Read a payload from a file, or from standard input.

    Raises:
        ConfigurationError: it cannot be read.
    """
    if path == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from None


def route(text: str) -> str:
    """Read a route as people write it: `any` is the empty one."""
    return "" if text == "any" else text


#: What reads the values of an option, by its metavar; of others they are text.
_READERS: dict[str, Callable[[str], Any]] = {
    "AGE": duration, "TIME": duration, "N": count, "PORT": port, "NAME=VALUE": header_of, "ROUTE": route,
}  # fmt: skip


def add_options(parser: Any, options: Mapping[str, str], **settings: Any) -> None:
    """Add options, written as help shows them, each with its line of help.

    Args:
        options: `--older-than AGE`; `--header NAME=VALUE…` may be repeated; `--dry-run` has no value; `id ID` is no
            option but a positional argument.
        settings: what argparse takes besides; `type=str` for what need not be text, such as a path.
    """
    for option, text in options.items():
        name, _, metavar = option.partition(" ")
        defaults: dict[str, Any] = {"action": "store_true", "help": text}
        if metavar:
            shown = metavar.removesuffix("…")
            defaults = {"metavar": shown, "type": _READERS.get(shown), "help": text}
        if metavar.endswith("…"):
            defaults |= {"action": "append", "default": [], "help": f"{text}; may be repeated"}
        parser.add_argument(name, **{**defaults, **settings})


def add_grace(
    parser: argparse.ArgumentParser,
    text: str = "how long a drain may take before the rest is cut off",
) -> None:
    """Add the bound on a drain."""
    add_options(parser, {"--grace TIME": f"{text} (default {GRACE.seconds}s)"}, default=GRACE)


def add_audit(parser: argparse.ArgumentParser) -> None:
    """Add who changes something, and why."""
    group = parser.add_argument_group("audit, kept in txbox_audit")
    add_options(group, {"--actor NAME": "who did it (default: user@host)", "--reason TEXT": "why"})


def _filters(kind: type[Filter[Any, Any]]) -> dict[str, str]:
    """The options of a table's filter, in the order of help: for each criterion its metavar and text."""
    from txbox.admin.views import COLUMNS

    names = {field.name for field in dataclasses.fields(kind)}
    options = {
        column.field: column.option for column in COLUMNS if column.option and column.field in names
    }
    return {**options, "older_than": "AGE received or staged longer ago than this: 90s, 5m, 2h, 7d"}


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
    choices = [str(status) for status in statuses or kind.table.statuses]
    for name, words in _filters(kind).items():
        metavar, _, text = words.partition(" ")
        option = f"--{name.replace('_', '-')} {metavar}"
        if name == "status":
            # what has one status only needs no filter
            if len(choices) > 1:
                add_options(group, {option: any_of(choices)}, choices=choices)
        elif names is None or name in names:
            add_options(group, {option: text})


def any_of(words: Sequence[str]) -> str:
    """List words: due, failed or dead."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def filter_of(args: argparse.Namespace) -> Filter[Any, Any]:
    """The filter of the options; those that the command lacks match everything."""
    criteria = {name: getattr(args, name, None) for name in _filters(args.kind)}
    if criteria["status"] == "all":
        criteria["status"] = None
    chosen: Filter[Any, Any] = args.kind(**criteria)
    return chosen


# of `txbox schema`: apply is init by another name, and print connects to nothing
_MAKING = frozenset({"apply", "print"})


def opened(args: argparse.Namespace, *, handlers: str | None = None) -> App:
    """The App that the options or the environment name; `args.app` is then its path, or "".

    Args:
        handlers: what the command does that takes the App with its handlers; a URL is then not enough.

    Raises:
        ConfigurationError: neither is set, or the one that is does not work.
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
        return _with_file(load(path, getattr(args, "import_from", None)), args)
    if handlers is not None:
        raise ConfigurationError(
            f"`txbox {args.command}` {handlers}, which takes the App: give --app module:app or set TXBOX_APP."
        )
    if url is None:
        less = " Give --dialect where there is none yet." if hasattr(args, "dialect") else ""
        raise ConfigurationError(
            "Which database? Give --app module:app or --database URL, or set TXBOX_APP or TXBOX_DATABASE_URL."
            f"{less}"
        )
    return _with_file(App(url, schema=args.schema), args)


def _with_file(app: App, args: argparse.Namespace) -> App:
    """Only what makes tables may make an SQLite file: another command has a mistyped name.

    Raises:
        ConfigurationError: there is no such file.
    """
    from txbox.connections.sqlite import SqliteDatabase

    database = app.database
    # the other one connects to nothing
    makes = args.command in ("init", "asyncapi") or getattr(args, "action", None) in _MAKING
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


def load(path: str, directory: str | None = None) -> App:
    """Import `module:app`.

    Args:
        directory: where its modules are, before any others; by default the working directory.

    Raises:
        ConfigurationError: the module or attribute does not exist, is not an App, or the module raised.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or "/" in module_name or module_name.endswith(".py"):
        raise ConfigurationError(
            f"{path!r} is not the path of an App: write module:app, like shop:app or shop.events:app."
        )
    here = str(Path(directory or ".").absolute())
    loaded = _imported(here, module_name, (attribute or "app").split("."))
    if not isinstance(loaded, App):
        raise ConfigurationError(
            f"{module_name}:{attribute or 'app'} is {with_article(type(loaded).__qualname__)}, not a txbox.App: "
            "name the variable that App(…) was assigned to."
        )
    return loaded


def _imported(here: str, name: str, attributes: Sequence[str]) -> Any:
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return _attribute(importlib.import_module(name), name, attributes)
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


def _attribute(value: Any, module: str, names: Sequence[str]) -> Any:
    for name in names:
        # a module's __getattr__ may be the user's
        if not hasattr(value, name):
            raise ConfigurationError(_missing(module, name, value))
        value = getattr(value, name)
    return value


def _missing(module: str, name: str, where: object) -> str:
    apps = [variable for variable, value in vars(where).items() if isinstance(value, App)]
    if apps:
        return f"{module} has no {name!r}, but it has {' and '.join(apps)}: give --app {module}:{apps[0]}."
    return (
        f"{module} has no {name!r}: name the variable that App(…) was assigned to, as module:app."
    )
