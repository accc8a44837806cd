"""ui: serve the dashboard on a port of its own."""

from __future__ import annotations

import argparse
import getpass
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from txbox.cli.application import opened
from txbox.cli.listening import listening
from txbox.cli.logs import log_libraries, start_logging
from txbox.cli.options import port
from txbox.cli.output import interactive, print_line
from txbox.errors import ConfigurationError
from txbox.worker.signals import Stop, draining_on_signals

if TYPE_CHECKING:
    from txbox.ui import Authenticator

_log = logging.getLogger("txbox")

# in the environment: arguments are public
_SHARED = "TXBOX_UI_TOKEN"
_SIGNING = "TXBOX_UI_SECRET"
_GRACE_S = 10.0
_LOOK_S = 3600.0


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    ui = commands.add_parser(
        "ui", parents=[common],
        description="Serves the dashboard: what is stuck, why, since when, and what to do about it. It begins only "
        f"when it knows who may look. Either {_SHARED} is a secret of 24 bytes or more that all share, and --grant "
        "says what they may do beside reading; or --users names a file with a line for each, NAME:HASH or "
        "NAME:HASH:change,payload, where --hash-password prints the HASH. Who has logged in is the actor in "
        "txbox_audit.",
    )  # fmt: skip
    ui.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS",
        help="the address to listen on (default 127.0.0.1); put a server that speaks TLS before any other",
    )  # fmt: skip
    ui.add_argument("--port", type=port, default=8484, metavar="PORT", help="default 8484")
    ui.add_argument("--users", metavar="FILE", help="who may log in, a line each")
    ui.add_argument(
        "--grant", action="append", choices=("change", "payload"), default=[],
        help=f"what holders of {_SHARED} may do: change messages, see payloads and headers; may be repeated",
    )  # fmt: skip
    ui.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME",
        help="a host name under which it is reached, beside localhost; may be repeated",
    )  # fmt: skip
    ui.add_argument(
        "--hash-password", action="store_true", help="read a password, print its hash for --users, and end"
    )  # fmt: skip
    ui.add_argument("--log-json", action="store_true", help="log lines as JSON")
    ui.add_argument("--verbose", action="store_true", help="log more")
    ui.set_defaults(run=_ui)


def _ui(args: argparse.Namespace) -> int:
    try:
        from txbox.ui import Dashboard, hashed
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"The dashboard needs {error.name}: run pip install 'txbox[ui]'."
        ) from error
    if args.hash_password:
        print_line(hashed(_password()))
        return 0
    authenticator = _authenticator(args)
    start_logging(args)
    with opened(args) as app:
        log_libraries()
        dashboard = Dashboard(
            app, authenticator, hosts=args.allow_host, secret=os.environ.get(_SIGNING)
        )
        # wrong tables are reported now, not by the first page
        dashboard.admin.schema()
        listener = listening(args.host, args.port, "--port", "the dashboard")
        from txbox.worker.serving import DASHBOARD, Server

        server, stop = Server(dashboard, listener, DASHBOARD), Stop()
        with draining_on_signals(stop.set, _GRACE_S):
            server.start()
            while not stop.wait(_LOOK_S):
                pass
            server.close()
    return 0


def _authenticator(args: argparse.Namespace) -> Authenticator:
    """The authenticator that the options name.

    Raises:
        ConfigurationError: none, or two.
    """
    from txbox.ui import Token, Users

    token = os.environ.get(_SHARED)
    if args.users and (token or args.grant):
        raise ConfigurationError(
            f"--users or {_SHARED} with --grant, not both: the file says what each user may do."
        )
    if args.users:
        try:
            return Users.read(Path(args.users).read_text())
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigurationError(
                f"The users in {args.users!r} cannot be read: {why}."
            ) from None
    if token:
        return Token(token, grants=args.grant)
    raise ConfigurationError(f"Nobody may log in: set {_SHARED}, or give --users FILE.")


def _password() -> str:
    password = getpass.getpass() if interactive() else sys.stdin.readline().rstrip("\n")
    if not password:
        raise ConfigurationError("The password is empty.")
    return password
