"""What the processes that stay have in common: how long they drain, and where their log goes."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import threading
from datetime import UTC, datetime
from typing import Any

from txbox.cli.options import duration
from txbox.observers.logging import current_trace
from txbox.worker.signals import GRACE

_log = logging.getLogger("txbox")
#: Client libraries, which log each failed try at WARNING or ERROR, some with a traceback.
_CLIENTS = (
    "aio_pika", "aiormq", "nats", "redis", "botocore", "boto3", "urllib3", "psycopg", "asyncpg",
)  # fmt: skip


def add_grace(parser: argparse.ArgumentParser) -> None:
    """Add the bound on a drain."""
    parser.add_argument(
        "--grace",
        type=duration,
        default=GRACE,
        metavar="TIME",
        help=f"from the signal to the end; what has not drained then is cut off (default {GRACE.seconds}s)",
    )


def log_libraries() -> None:
    """Log what libraries say, unless the app has set that up."""
    root = logging.getLogger()
    if not root.handlers:
        for handler in _log.handlers:
            root.addHandler(handler)


def start_logging(args: argparse.Namespace) -> None:
    """Write txbox's log lines to stderr, as the options say, and everything else that would go there unformatted."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines() if args.log_json else _Lines())
    _log.addHandler(handler)
    _log.setLevel(logging.DEBUG if args.verbose else logging.INFO)
    _log.propagate = False
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


class _Lines(logging.Formatter):
    """Time, level, the logger where it is not txbox's, and the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self._others = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")

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
