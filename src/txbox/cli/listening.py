"""The ports that a command listens on."""

from __future__ import annotations

import importlib
import logging
import os
import socket

from txbox.errors import ConfigurationError

_log = logging.getLogger("txbox")

_BACKLOG = 2048


def listening(host: str, port: int, option: str, what: str, *needs: str) -> socket.socket:
    """Bind and listen, and say where.

    Args:
        needs: modules that it is served with, beside the server.

    Raises:
        ConfigurationError: the port is taken, this machine has no such address, or what serves it is not
            installed.
    """
    try:
        # needed later: what is missing is said now, and once
        for module in ("txbox.worker.serving", *needs):
            importlib.import_module(module)
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
    # not for processes that a handler starts: the descriptor is not theirs
    fd = os.environ.pop(name, None)
    return None if fd is None else socket.socket(fileno=int(fd))
