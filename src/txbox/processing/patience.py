"""Waiting for a database that is away: nothing is counted, refused or acknowledged meanwhile."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from txbox.errors import Fault, StoreError, StoreUnavailable
from txbox.events import ConsumptionPaused, ConsumptionResumed, Events
from txbox.steps import Discard, Steps, Wait

T = TypeVar("T")

#: What a wait can cure.
CURABLE = (Fault.UNAVAILABLE, Fault.CONFLICT, Fault.LOCK_TIMEOUT, Fault.PREPARED, Fault.TIMEOUT)

_PAUSE_S = (0.05, 5.0)
# a server that refuses just this user may only be full
_MISCONFIGURED_S = 1.0
# a drain is noticed this soon
_LOOK_S = 0.5


def persistently(
    operation: Callable[[], Steps[T]],
    events: Events,
    *,
    consumer: str | None = None,
    for_s: float | None = None,
    stop: Callable[[], bool] | None = None,
) -> Steps[T]:
    """Repeat an operation until the database answers.

    Args:
        consumer: whose operation it is, for the events.
        for_s: give up after this many seconds without an answer; None never does.
        stop: True gives up; asked at least twice a second.

    Raises:
        StoreError: it gave up, or the error is none that waiting can cure.
    """
    paused_at: float | None = None
    pause_s = _PAUSE_S[0]
    while True:
        try:
            answer = yield from operation()
        except StoreError as error:
            yield Discard()
            if error.fault not in CURABLE:
                raise
            now = time.monotonic()
            paused_at = paused_at or now
            if for_s is not None:
                misconfigured = isinstance(error, StoreUnavailable) and error.misconfigured
                if now - paused_at >= (min(for_s, _MISCONFIGURED_S) if misconfigured else for_s):
                    raise
            wait_s = pause_s * random.uniform(0.5, 1.5)
            events.emit(ConsumptionPaused(consumer=consumer, reason=str(error), retry_in_s=wait_s))
            until = now + wait_s
            while (left_s := until - time.monotonic()) > 0:
                if stop is not None and stop():
                    raise
                yield Wait(min(left_s, _LOOK_S))
            pause_s = min(pause_s * 2, _PAUSE_S[1])
        else:
            if paused_at is not None:
                paused_s = time.monotonic() - paused_at
                events.emit(ConsumptionResumed(consumer=consumer, paused_s=paused_s))
            return answer
