"""The scanners: what they publish, late and twice, as scanners do."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

from delivery_platform import settings
from delivery_platform.settings import BROKER, SCANS
from txbox import Message

STATUSES = ("registered", "picked up", "at the depot", "out for delivery", "delivered")


def scans(packages: int, seed: int = 1) -> list[Message[Any]]:
    """Every status of every package; a fifth of them twice, and in some disorder."""
    draw = random.Random(seed)
    placed: list[tuple[float, Message[Any]]] = []
    for number in range(packages * len(STATUSES)):
        package, version = f"parcel-{number % packages:04d}", 1 + number // packages
        scan = {
            "scanner_id": f"scanner-{number % 7}",
            "scan_id": number,
            "package": package,
            "version": version,
            "status": STATUSES[version - 1],
            "at": f"2026-01-{version:02d}T08:00:00Z",
        }
        payload = json.dumps(scan).encode()
        for copy in range(1 + (draw.random() < 0.2)):
            # scanners do not know that they send a thing again: the id is of the upload, not of the scan
            upload = f"upload-{number}-{copy}"
            message = Message[Any](id=upload, topic=SCANS, key=package, payload=payload)
            placed.append((number + draw.uniform(0, 1.5 * packages), message))
    placed.sort(key=lambda entry: entry[0])
    return [message for _, message in placed]


def publish(messages: Sequence[Message[Any]]) -> None:
    """To the broker, as scanners would; without one, straight into the inbox."""
    if not BROKER:
        from delivery_platform.monolith import app

        for some in _parts(messages):
            app.send_many(some)
        return
    # any client will do; this one waits for the broker's confirmations
    publisher = settings.broker("scanners").publisher()
    try:
        for some in _parts(messages):
            failed = [answer for answer in publisher.publish(some, 30.0) if answer is not None]
            if failed:
                raise failed[0]
    finally:
        publisher.close()


def _parts(messages: Sequence[Message[Any]]) -> Iterator[Sequence[Message[Any]]]:
    for start in range(0, len(messages), 100):
        yield messages[start : start + 100]
