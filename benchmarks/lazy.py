"""A workload that is made as it is handed out, so that a process that consumes it holds little of it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import overload

from benchmarks.workload import ACCOUNTS, Delivery, Work

AMOUNT = 7
_STARTED_MS = 1_750_000_000_000


class Lazy(Sequence[Delivery]):
    """Numbered deliveries, each made when it is asked for; every eleventh is a copy of the one before."""

    def __init__(self, count: int, payload_bytes: int = 200) -> None:
        self._count = count
        self._payload_bytes = payload_bytes

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> Delivery: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Delivery]: ...
    def __getitem__(self, at: int | slice) -> Delivery | Sequence[Delivery]:
        if isinstance(at, slice):
            return [self[one] for one in range(*at.indices(self._count))]
        if not 0 <= at < self._count:
            raise IndexError(at)
        number = number_of(at)
        body = {"order": number, "account": number * 7919 % ACCOUNTS, "amount": AMOUNT, "note": ""}
        body["note"] = "x" * max(0, self._payload_bytes - len(json.dumps(body)))
        at_ms, in_ms = divmod(number, 10)
        high = (_STARTED_MS + at_ms) << 16 | 7 << 12 | in_ms
        low = 2 << 62 | number * 0x9E3779B97F4A7C15 % (1 << 62)
        return Delivery(str(uuid.UUID(int=high << 64 | low)), json.dumps(body).encode())


def number_of(at: int) -> int:
    """The message of a delivery: 0 to 9, then 9 once more, and so on."""
    rounds, rest = divmod(at, 11)
    return rounds * 10 + min(rest, 9)


def lazy_work(count: int, payload_bytes: int = 200) -> Work:
    distinct = number_of(count - 1) + 1
    return Work(Lazy(count, payload_bytes), distinct, distinct * AMOUNT)
