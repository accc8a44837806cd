"""asyncapi: describe what the App receives and sends."""

from __future__ import annotations

import argparse
from typing import Any

from txbox.asyncapi import document
from txbox.cli.application import opened
from txbox.cli.logs import take_path
from txbox.cli.output import print_json


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    asyncapi = commands.add_parser(
        "asyncapi", parents=[common],
        description="Prints an AsyncAPI 3.0 document, as JSON: a channel for each topic, the handlers that receive "
        "from it with the schema of their bodies, and what the App publishes. It connects to nothing.",
    )  # fmt: skip
    asyncapi.add_argument("path", nargs="?", metavar="MODULE:APP", help="the App, instead of --app")
    asyncapi.add_argument("--title", help="of the service (default: MODULE:APP)")
    asyncapi.add_argument(
        "--service-version", default="0", metavar="VERSION", help="of the service (default 0)"
    )
    asyncapi.set_defaults(run=_asyncapi)


def _asyncapi(args: argparse.Namespace) -> int:
    take_path(args)
    app = opened(args, handlers="describes handlers")
    with app:
        title = args.title or args.app or "txbox"
        print_json(document(app, title=title, version=args.service_version))
    return 0
