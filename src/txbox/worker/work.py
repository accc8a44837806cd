"""One consumer's part of a delivery, and what its handler's options make of it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, Protocol

from txbox.brokers.base import Delivery
from txbox.handlers import Handler
from txbox.message import Message


class Mode(Enum):
    """How a delivery is taken in (SEMANTICS 4.4 to 4.6)."""

    INLINE = "inline"
    LEASED = (
        "leased"  # stored and leased, so that its run is counted, or one worker's, before it begins
    )
    STORED = "stored"


class HandlerModes:
    """Which way the deliveries for one handler go: the same for all of them.

    A redelivery may have killed the worker that had it: its run must be counted before it begins.
    Rows of the table are counted anyway; where a key's messages have an order, the table keeps that.
    """

    __slots__ = ("handler", "in_order", "lock_key", "once", "redelivered")

    def __init__(self, handler: Handler) -> None:
        options = handler.options
        self.handler = handler
        self.in_order = options.in_order
        # an order goes by the key of the messages, and no other lane or place in a batch will do
        self.lock_key = options.lock_key is not None and not options.in_order
        stored = options.mode == "stored"
        self.once = Mode.STORED if stored else Mode.INLINE if options.transactional else Mode.LEASED
        self.redelivered = Mode.STORED if stored or options.in_order else Mode.LEASED


class Parts:
    """How many consumers have yet to settle their part of a delivery."""

    __slots__ = ("_left", "_lock")

    def __init__(self, parts: int) -> None:
        self._left = parts
        self._lock = threading.Lock()

    def settled(self) -> bool:
        """Settle one part; returns whether it was the last."""
        with self._lock:
            self._left -= 1
            return self._left == 0


class Settling(Protocol):
    """Who acknowledges deliveries when every consumer has settled its part."""

    def deliveries_settled(self, deliveries: Sequence[Delivery]) -> None:
        """Called from the lanes' threads."""
        ...


class Work:
    """One consumer's part of a delivery.

    Attributes:
        key: that it has a place in, where its handler keeps an order.
        lock_key: what its handler locks, where it says so.
        parts: shared with the other consumers of this delivery; None when there is no other.
        tries: how often it was claimed while another transaction held it.
    """

    __slots__ = ("delivery", "key", "lock_key", "mode", "modes", "owner", "parts", "tries")

    def __init__(
        self, owner: Settling, delivery: Delivery, modes: HandlerModes, parts: Parts | None
    ) -> None:
        self.owner = owner
        self.delivery = delivery
        self.modes = modes
        self.parts = parts
        self.mode = modes.redelivered if delivery.redelivered else modes.once
        self.key: str | None = None
        self.lock_key: str | None = None
        self.tries = 0

    @property
    def message(self) -> Message[Any]:
        message = self.delivery.message
        assert message is not None, "what is no message reaches no lane"
        return message


def settle(works: Iterable[Work]) -> None:
    """Settle these parts; a delivery goes to whoever acknowledges it with its last part."""
    settled: dict[Settling, list[Delivery]] = {}
    for work in works:
        if work.parts is None or work.parts.settled():
            group = settled.get(work.owner)
            if group is None:
                settled[work.owner] = [work.delivery]
            else:
                group.append(work.delivery)
    for owner, deliveries in settled.items():
        owner.deliveries_settled(deliveries)
