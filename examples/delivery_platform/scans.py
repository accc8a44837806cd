"""The scan service: each scan counts once, and in the order of the package's versions.

Scanners and networks deliver late and twice. So there are two guards:

- `message_id=`: a scan is known by (scanner_id, scan_id), however often and over whatever it comes.
- `sequence=`: version 3 waits in the table until version 2 is processed, and goes on by itself the
  moment it is. A handler that raised VersionConflict instead would be called, rolled back and put off
  again and again, and each time would cost one of its attempts. The UPDATE still compares versions:
  one that is missing is waited for ten minutes and no longer, and may come after its successor.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from delivery_platform import settings
from delivery_platform.settings import SCANS, STATUS
from txbox import GapPolicy, Message

TABLE = """
CREATE TABLE IF NOT EXISTS package (
    name VARCHAR(40) PRIMARY KEY, version INTEGER NOT NULL, status VARCHAR(40) NOT NULL, at VARCHAR(40) NOT NULL
)
"""

app = settings.service("scans")


@dataclass(frozen=True)
class Scan:
    """What a scanner publishes, as JSON, with the package as the message's key."""

    scanner_id: str
    scan_id: int
    package: str
    version: int
    status: str
    at: str


def scan_id(message: Message[Any]) -> str:
    """Who scanned, and which scan of theirs it was."""
    body = message.json()
    return f"{body['scanner_id']}/{body['scan_id']}"


@app.handler(
    SCANS,
    consumer="packages",
    message_id=scan_id,
    sequence="body.version",
    gaps=GapPolicy(wait=timedelta(minutes=10)),
)
def scanned(message: Message[Scan], tx: Any) -> None:
    """Move the package on and say so; both, with the inbox row, are one commit."""
    scan = message.body
    moved = tx.execute(
        settings.sql(
            "INSERT INTO package (name, version, status, at) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (name) DO UPDATE SET version = excluded.version, status = excluded.status, "
            "at = excluded.at WHERE package.version < excluded.version"
        ),
        (scan.package, scan.version, scan.status, scan.at),
    )
    if moved.rowcount:
        app.outbox.stage(
            tx,
            STATUS,
            {"package": scan.package, "version": scan.version, "status": scan.status},
            type="package.status.changed",
            key=scan.package,
        )
