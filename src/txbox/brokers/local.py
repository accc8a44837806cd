"""The built-in source: messages that `app.send` and `txbox send` write directly into the inbox."""

from __future__ import annotations

import time
from collections.abc import Sequence

from txbox.brokers.base import Delivery, InFlight, Progress, Source


class Local(Source):
    """A source for apps whose work comes from the table alone, without a broker.

    Its messages are pending rows of the inbox: `app.send(message)` and `txbox send` insert one row for
    each consumer of the topic. Every worker takes rows of its consumers from the table anyway, along
    with the retries. So this source receives nothing itself and is exhausted at once;
    `app.consume(Local())` makes an app without any other source runnable.

    Guarantee: once `app.send` returns, the message is on disk for every consumer of its topic.
    """

    @property
    def name(self) -> str:
        return "local"

    @property
    def exhausted(self) -> bool:
        return True

    def keeps_order(self, topic: str) -> bool:
        """The table keeps the order."""
        return True

    def open(
        self, topics: Sequence[str], progress: Progress, in_flight: InFlight | None = None
    ) -> None:
        pass

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        time.sleep(wait_s)
        return ()

    def settle(self, deliveries: Sequence[Delivery]) -> None:
        pass

    def close(self) -> None:
        pass
