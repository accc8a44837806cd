"""The operator's verbs, all of them audited where they change anything: `Admin` has those of look.py, changes.py,
canary.py and replay.py."""

from __future__ import annotations

from txbox.admin.canary import Canary
from txbox.admin.changes import Changed, Edited, How, MessageChanged
from txbox.admin.look import Look
from txbox.admin.replay import Replays
from txbox.admin.tables import InboxFilter, OutboxFilter, QuarantineFilter

__all__ = [
    "Admin", "Changed", "Edited", "How", "InboxFilter", "MessageChanged", "OutboxFilter", "QuarantineFilter",
]  # fmt: skip


class Admin(Look, Replays, Canary):
    """The operator's view of one inbox and outbox. A filter says which table a verb is about.

    Args:
        target: an App; or a database URL, pool or engine, which is enough for everything but `replay`,
            `rehearse`, and what messages of an order wait for.
        schema: with a database: the PostgreSQL schema of the tables.

    Nothing connects before the first verb. A verb may be called from any thread, but not inside a
    running event loop: use `asyncio.to_thread` there.
    """
