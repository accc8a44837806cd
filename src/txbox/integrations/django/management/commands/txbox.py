"""`manage.py txbox …`: every command of `txbox`, on TXBOX_APP."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from txbox.cli import main


class Command(BaseCommand):
    help = "The commands of txbox, on settings.TXBOX_APP: run, status, list, retry … `txbox --help` lists all."
    requires_system_checks = ()

    def run_from_argv(self, argv: list[str]) -> None:
        # options are those of txbox, --help included
        sys.exit(_main(argv[2:]))

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("words", nargs=argparse.REMAINDER)

    def handle(self, *_: Any, **options: Any) -> None:
        if code := _main(options["words"]):
            raise CommandError(f"txbox ended with {code}.", returncode=code)


def _main(words: Sequence[str]) -> int:
    path = getattr(settings, "TXBOX_APP", None)
    if path is not None:
        os.environ["TXBOX_APP"] = str(path)
    # `python -m django` or manage.py: either sets Django up in the processes of `run --processes`, too
    script = Path(sys.argv[0])
    start = ("-m", "django") if script.name == "__main__.py" else (str(script.absolute()),)
    return main(words, program=(sys.executable, *start, "txbox"))
