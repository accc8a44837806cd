"""What the Python drivers share: the workload, the job of every contender, and the conversation with p16.py."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

URL = os.environ["DATABASE_URL"]
TAKE = "UPDATE account SET balance = balance + $1 WHERE id = $2"
ORDER = "INSERT INTO orders (number, account, amount) VALUES ($1, $2, $3)"
# the textbook's dedupe, for those whose own does not last
CLAIM = "INSERT INTO inbox (message_id) VALUES ($1) ON CONFLICT DO NOTHING RETURNING message_id"
INBOX = "CREATE TABLE inbox (message_id text PRIMARY KEY, received_at timestamptz NOT NULL DEFAULT now())"


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a broker's client hands over, its JSON parsed."""

    id: str
    body: dict[str, Any]


After = Callable[[], Awaitable[object]]
Ingest = Callable[[Sequence[Delivery]], Awaitable[object]]
Process = Callable[[Sequence[Delivery]], Awaitable[After | None]]


def distinct(deliveries: Sequence[Delivery]) -> list[Delivery]:
    """Every delivery once; what a peer needs whose bulk call refuses a key that occurs twice in it."""
    return list({delivery.id: delivery for delivery in deliveries}.values())


def batches(items: Sequence[Delivery], size: int) -> list[Sequence[Delivery]]:
    return [items[at : at + size] for at in range(0, len(items), size)]


class Clock:
    """Processing is timed from the first message that a handler gets: no worker's start is."""

    def __init__(self) -> None:
        self.first: float | None = None

    def start(self) -> None:
        """To be called by every handler."""
        if self.first is None:
            self.first = time.perf_counter()


clock = Clock()


async def drive(ingest: Ingest, process: Process, prepare: Ingest | None = None) -> None:
    """Each line on stdin names a file of deliveries: ingest it, process it, and answer with what that took.

    Args:
        ingest: stores the deliveries, as a broker's client hands them over.
        process: runs everything stored, and returns when the last effect and completion are committed;
            may return what stops its worker, which is not timed.
        prepare: what a broker's client would have done, for those fed from memory; not timed.
    """
    print("ready", flush=True)
    while path := (await asyncio.to_thread(sys.stdin.readline)).strip():
        with Path(path).open() as file:  # noqa: ASYNC230 - nothing else runs yet
            deliveries = [Delivery(**json.loads(line)) for line in file]
        if prepare is not None:
            await prepare(deliveries)
        cpu_began, began = time.process_time(), time.perf_counter()
        await ingest(deliveries)
        ingested = time.perf_counter()
        clock.first = None
        after = await process(deliveries)
        done, cpu_s = time.perf_counter(), time.process_time() - cpu_began
        if after is not None:
            await after()
        print(
            json.dumps(
                {
                    "ingest_s": ingested - began,
                    "process_s": done - (clock.first or ingested),
                    "cpu_s": cpu_s,
                }
            ),
            flush=True,
        )
