"""The built-in source: messages that `app.send` and `txbox send` put into the inbox itself."""

from __future__ import annotations

import time
from collections.abc import Sequence

from txbox.brokers.base import Delivery, InFlight, Progress


class Local:
    """Says that work comes from the table, and needs no broker.

    Its messages are the pending rows of the inbox: `app.send(message)` and `txbox send` insert one row
    for each consumer of the topic, and every worker of such a consumer takes rows from the table
    anyway, along with the retries. So this source itself receives nothing and is exhausted at once;
    `app.consume(Local())` makes an app runnable that has no other source.

    Guarantee: a message that `app.send` has returned from is on disk for every consumer of its topic.
    """

    name = "local"
    topics: Sequence[str] | None = None
    exhausted = True
    tend_every_s: float | None = None
    redelivery_s: float | None = None

    def keeps_order(self, topic: str) -> bool:  # noqa: ARG002  # every one
        """The table keeps it."""
        return True

    def open(
        self, topics: Sequence[str], progress: Progress, in_flight: InFlight | None = None
    ) -> None:
        pass

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:  # noqa: ARG002  # never any
        time.sleep(wait_s)
        return ()

    def tend(self, deliveries: Sequence[Delivery]) -> None:
        pass

    def settle(self, deliveries: Sequence[Delivery]) -> None:
        pass

    def close(self) -> None:
        pass
