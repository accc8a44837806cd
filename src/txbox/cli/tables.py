"""outbox and quarantine: what list, show, retry and the rest do for the inbox, for the other tables."""

from __future__ import annotations

import argparse
from typing import Any

from txbox.admin import OutboxFilter, QuarantineFilter
from txbox.cli import change, look

_DESCRIBED = {
    "outbox": "What list, show, retry and discard do for the inbox, for messages that are to be sent: due, delayed "
    "(staged for later), leased (by a relay), failed (waits for its next attempt), dead, sent (where "
    "RelayPolicy.keep_sent keeps them), discarded. `txbox status` counts them.",
    "quarantine": "Messages that were set aside: without a usable id, too large, or a known id with another payload. "
    "Nobody processes them until they are accepted.",
}  # fmt: skip


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    for kind in (OutboxFilter, QuarantineFilter):
        name = kind.table.name
        table = commands.add_parser(name, description=_DESCRIBED[name])
        verbs = "|".join(("list", "show", *kind.table.changes))
        below = table.add_subparsers(dest="verb", required=True, metavar=verbs)
        look.add_table(below, common, kind)
        change.add_table(below, common, kind)
