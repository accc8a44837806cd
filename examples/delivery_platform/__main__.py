"""`python -m delivery_platform`: all of it at once. `… declare`, `… scan N`: its parts, for services that run.

Without PLATFORM_BROKER no server is needed: one SQLite file, made in a new directory.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any


def main() -> int:
    match sys.argv[1:]:
        case ["declare"]:
            from delivery_platform.declare import declare

            declare()
        case ["scan", number]:
            from delivery_platform.scanners import publish, scans

            publish(scans(int(number)))
        case []:
            return show(packages=8)
        case _:
            sys.stderr.write(f"{__doc__}\n")
            return 2
    return 0


def show(packages: int) -> int:
    """Run the monolith on what the scanners send, and show what it left."""
    from delivery_platform.mailbox import Mailbox

    if os.environ.get("PLATFORM_BROKER"):
        sys.stderr.write("PLATFORM_BROKER is set: see README.md, `With a broker`.\n")
        return 2
    with tempfile.TemporaryDirectory() as directory, Mailbox(_told) as mailbox:
        os.environ["SCANS_DATABASE_URL"] = f"sqlite:///{Path(directory) / 'platform.db'}"
        os.environ["SMTP_ADDRESS"] = mailbox.address
        from delivery_platform.declare import declare
        from delivery_platform.scanners import publish, scans

        declare()
        sent = scans(packages)
        publish(sent)
        txbox = [sys.executable, "-m", "txbox", "run", "delivery_platform.monolith:app", "--once"]
        subprocess.run(txbox, check=True)
        _tell(directory, len(sent), len(mailbox.mails))
    return 0


def _told(mail: Any) -> None:
    print(f"mail to {mail['To']}: {mail['Subject']}")


def _tell(directory: str, scans: int, mails: int) -> None:
    import sqlite3

    with closing(sqlite3.connect(Path(directory) / "platform.db")) as database:
        packages = database.execute("SELECT name, version, status FROM package ORDER BY 1")
        print("\npackage        version  status")
        for name, version, status in packages:
            print(f"{name:<13}  {version:>7}  {status}")
        query = "SELECT consumer, count(*) FROM txbox_inbox WHERE status = 'processed' GROUP BY 1"
        done = dict(database.execute(query))
    print(
        f"\n{scans} scans arrived, {done['packages']} of them for the first time; "
        f"{done['notifications']} statuses, {mails} mails."
    )


if __name__ == "__main__":
    sys.exit(main())
