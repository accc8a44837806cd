"""Which lane a delivery goes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

from txbox.app import App
from txbox.brokers.base import Delivery
from txbox.message import Message
from txbox.worker.lane import Lane
from txbox.worker.work import HandlerModes, Parts, Settling, Work

_COURSES_MAX = 4096
# who takes a message, and in which lanes
_Taken = tuple[HandlerModes, tuple[Lane, ...]]


class Dispatch:
    """Hands deliveries to lanes: one lock key or key, one lane; without either, in turns."""

    def __init__(self, app: App, lanes: Mapping[tuple[str, bool], Sequence[Lane]]) -> None:
        self._app = app
        self._lanes = lanes
        self._modes: dict[tuple[str, str | None], list[_Taken]] = {}
        self._turn = 0

    def has_idle_lane(self) -> bool:
        """Say whether some lane has nothing to do."""
        return any(not lane.busy for lanes in self._lanes.values() for lane in lanes)

    def hand_out(self, owner: Settling, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Hand a list out, to each lane at once and in its order; returns what no handler consumes."""
        handed: dict[Lane, list[Work]] = {}
        left: list[Delivery] = []
        for delivery in deliveries:
            message = delivery.message
            if message is None:
                left.append(delivery)
                continue
            found = self._modes.get((message.topic, message.type))
            if found is None:
                found = self._found(message)
            if not found:
                left.append(delivery)
                continue
            parts = Parts(len(found)) if len(found) > 1 else None
            self._turn += 1
            for modes, lanes in found:
                work = Work(owner, delivery, modes, parts)
                if modes.in_order:
                    work.key = message.key
                elif modes.lock_key:
                    work.lock_key = modes.handler.lock_key(message)
                lane = lanes[0] if len(lanes) == 1 else self._lane(work, lanes, message)
                group = handed.get(lane)
                if group is None:
                    handed[lane] = [work]
                else:
                    group.append(work)
        for lane, works in handed.items():
            lane.put(works)
        return left

    def _lane(self, work: Work, lanes: Sequence[Lane], message: Message[Any]) -> Lane:
        key = work.lock_key if work.lock_key is not None else message.key
        if key is None:
            return lanes[self._turn % len(lanes)]
        return lanes[crc32(str(key).encode("utf-8", "surrogatepass")) % len(lanes)]

    def _found(self, message: Message[Any]) -> list[_Taken]:
        handlers = self._app.handlers.matching(message.topic, message.type)
        if len(self._modes) > _COURSES_MAX:
            # types come from strangers: the cache must not grow with them
            self._modes.clear()
        found = [
            (
                HandlerModes(handler),
                tuple(
                    self._lanes[handler.consumer, handler.is_async][: handler.options.concurrency]
                ),
            )
            for handler in handlers
        ]
        self._modes[message.topic, message.type] = found
        return found
