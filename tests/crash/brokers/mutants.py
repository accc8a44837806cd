"""Wrong consumers that a sound checker must catch, one row each. Nothing here is for use."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from tests.crash.brokers.service import Job, Watched
from txbox import App
from txbox.brokers.base import Context, Delivery
from txbox.message import Headers


class Wrong:
    """A source in wrong hands."""

    def __init__(self, source: Watched) -> None:
        self._source = source

    def consumer(self, topics: Sequence[str], context: Context) -> Any:
        self._source.consumer(topics, context)
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


class AckFirst(Wrong):
    """Acknowledges what it receives, then works."""

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        found = self._source.receive(messages_max, wait_s)
        if found:
            # Kafka commits now and then: here at once
            self._source._consumer._commit_at = 0.0
            self._source.settle(found)
        return found

    def settle(self, deliveries: Sequence[Delivery]) -> None:
        return


class NoIdentity(Wrong):
    """Gives every delivery an id of its own: nothing is ever a duplicate."""

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        found = self._source.receive(messages_max, wait_s)
        for delivery in found:
            assert delivery.message is not None
            new = (("message-id", secrets.token_hex(8)),)
            delivery.message = dataclasses.replace(delivery.message, id=None, headers=Headers(new))
        return found


#: name → what is wrong with it
WRONG = {
    "ack_first": "acknowledges before the commit",
    "no_identity": "takes a redelivery for a new message",
}
_WRAPS: dict[str, Callable[[Watched], Any]] = {"ack_first": AckFirst, "no_identity": NoIdentity}


def wrap_of(job: Job) -> Callable[[Watched, App], Any] | None:
    if job.wrong is None or job.broker == "webhook":
        return None
    wrap = _WRAPS[job.wrong]
    return lambda source, _: wrap(source)
