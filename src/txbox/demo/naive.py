"""The naive consumer: the loop of most tutorials. One transaction a message, acknowledged after its commit.

`python -m txbox.demo.naive DIRECTORY`. Its queue is a file, its acknowledgement the number of lines
done. It has no inbox: nothing remembers what was processed before. It has no outbox: receipts leave
from the memory of its process.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import time
from pathlib import Path

from txbox.demo.business import CardNetworkUnavailable, UnknownCurrency, charge
from txbox.demo.killing import COMMITTED, SENDING, WRITTEN, passing

LINGER_S = 0.1  # of the producer; without it a crash would double more receipts, and lose fewer
ATTEMPTS = 3  # then it is logged and dropped, as brokers without a dead-letter queue do


class Queue:
    """A file of messages with a cursor; what is not acknowledged is delivered again after a crash."""

    def __init__(self, directory: Path) -> None:
        self.side = directory / "naive"
        self._lines = (directory / "naive.queue").open("rb")
        self._cursor = directory / "naive.offset"
        self._offset = int(self._cursor.read_text()) if self._cursor.exists() else 0
        self._lines.seek(self._offset)

    def receive(self) -> bytes | None:
        """The next message, or None when there is none yet."""
        self._lines.seek(self._offset)
        line = self._lines.readline()
        return line if line.endswith(b"\n") else None

    def acknowledge(self, line: bytes) -> None:
        """Move the cursor on, atomically and durably."""
        self._offset += len(line)
        partial = self._cursor.with_suffix(".new")
        with partial.open("w") as cursor:
            cursor.write(str(self._offset))
            cursor.flush()
            os.fsync(cursor.fileno())
        partial.rename(self._cursor)


class Producer:
    """Sends receipts as the clients of brokers do: what is produced is collected, and leaves in batches."""

    def __init__(self, side: Path) -> None:
        self._side = side
        self._sent = side.with_suffix(".receipts").open("ab", buffering=0)
        self._waiting: list[str] = []
        self._since_s = 0.0

    def produce(self, payment: str) -> None:
        """Take a receipt; it leaves soon."""
        self._waiting.append(payment)
        if len(self._waiting) == 1:
            self._since_s = time.monotonic()

    def poll(self) -> None:
        """Send what has waited long enough."""
        if self._waiting and time.monotonic() > self._since_s + LINGER_S:
            passing(self._side, SENDING)
            self._sent.write("".join(f"{payment}\n" for payment in self._waiting).encode())
            self._waiting = []


def consume(queue: Queue, producer: Producer, database: sqlite3.Connection, line: bytes) -> None:
    """Process one message, produce its receipt, and acknowledge it."""
    body = json.loads(line)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with database:  # commits, or rolls back on an exception
                charge(database, body, attempt)
                passing(queue.side, WRITTEN)
        except (CardNetworkUnavailable, UnknownCurrency) as error:
            last = "dropped" if attempt == ATTEMPTS else "retry"
            sys.stderr.write(f"{last} {body['payment']}: {error}\n")
        else:
            passing(queue.side, COMMITTED)
            producer.produce(body["payment"])
            break
    queue.acknowledge(line)


def main(directory: Path) -> None:
    """Consume until killed."""
    side = directory / "naive"
    queue, producer = Queue(directory), Producer(side)
    database = sqlite3.connect(f"{side}.db")
    while True:
        producer.poll()
        line = queue.receive()
        if line is None:
            time.sleep(0.01)
        else:
            consume(queue, producer, database, line)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
