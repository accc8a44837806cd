"""What the processes that stay have in common: which app, and where their log goes."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

from txbox.app import App
from txbox.errors import ConfigurationError

_log = logging.getLogger("txbox")


def observe(app: App) -> None:
    """Log events, unless the app has observers of its own."""
    if not app.events.observers:
        from txbox.observers.logging import LoggingObserver

        app.events.observers.append(LoggingObserver())


def take_path(args: argparse.Namespace) -> None:
    """Let MODULE:APP stand for --app MODULE:APP.

    Raises:
        ConfigurationError: both were given.
    """
    if args.path is not None:
        if args.app is not None or args.database is not None:
            raise ConfigurationError("Give the App once: as MODULE:APP or with --app.")
        args.app = args.path


def start_logging(args: argparse.Namespace) -> None:
    """Write txbox's log lines to stderr, as the options say."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _JsonLines()
        if args.log_json
        else logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    )
    _log.addHandler(handler)
    # what an endpoint raised
    uvicorn = logging.getLogger("uvicorn.error")
    uvicorn.addHandler(handler)
    uvicorn.setLevel(logging.ERROR)
    uvicorn.propagate = False
    _log.setLevel(logging.DEBUG if args.verbose else logging.INFO)
    _log.propagate = False


class _JsonLines(logging.Formatter):
    """One JSON object a line: the fields of an event, or a message."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = getattr(record, "txbox", None) or {"message": record.getMessage()}
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            **said,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
