"""The built-in source: messages that `app.send` and `txbox send` write directly into the inbox."""

from __future__ import annotations

import time
from collections.abc import Sequence

from txbox.brokers.base import Consumer, Context, Delivery, Source


class Local(Source):
    """A source for apps whose work comes from the table alone, without a broker.

    Its messages are pending rows of the inbox: `app.send(message)` and `txbox send` insert one row for
    each consumer of the topic. Every worker takes rows of its consumers from the table anyway, along
    with the retries. So this source receives nothing itself and is exhausted at once;
    `app.consume(Local())` makes an app without any other source runnable.

    Guarantee: once `app.send` returns, the message is on disk for every consumer of its topic.
    """

    name = "local"

    def keeps_order(self, topic: str) -> bool:
        """The table keeps the order."""
        return True

    def consumer(self, topics: Sequence[str], context: Context) -> Consumer:
        return _Nothing(self)


class _Nothing(Consumer):
    """Exhausted from the start."""

    @property
    def exhausted(self) -> bool:
        return True

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        time.sleep(wait_s)
        return ()

    def settle(self, deliveries: Sequence[Delivery]) -> None:
        pass

    def close(self) -> None:
        pass
