"""What counting costs a worker: CPU of the process for each message, with and without its pulse, in turns.

python -m benchmarks.activity [--messages 20000] [--rounds 9] [--database URL]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

from benchmarks.servers import fresh_database
from txbox import App, Message
from txbox.brokers.base import Consumer, Context, Delivery, Source
from txbox.worker import Worker


class _Memory(Source, Consumer):
    """A source over a list."""

    name = "memory"

    def __init__(self, prefix: str, count: int) -> None:
        self._deliveries = [
            Delivery(Message(id=f"{prefix}{number}", topic="t", payload=b"{}"), "t")
            for number in range(count)
        ]
        self._received = 0

    @property
    def exhausted(self) -> bool:
        return self._received == len(self._deliveries)

    def keeps_order(self, topic: str) -> bool:
        del topic
        return True

    def consumer(self, topics: Sequence[str], context: Context) -> Consumer:
        del topics, context
        return self

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        del wait_s
        batch = self._deliveries[self._received : self._received + messages_max]
        self._received += len(batch)
        return batch

    def settle(self, deliveries: Sequence[Delivery]) -> None: ...
    def close(self) -> None: ...


class _Nothing:
    """No pulse."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def start(self) -> None: ...
    def end(self, timeout_s: float) -> None: ...


def cpu_us(url: str, prefix: str, count: int, *, counting: bool) -> float:
    """Microseconds of CPU for each message, of a worker that runs so many."""
    with App(url) as app:

        @app.handler("t", consumer="c")
        def handle(_message: Message[Any], _tx: Any) -> None: ...

        app.consume(_Memory(prefix, count))
        with nullcontext() if counting else patch("txbox.worker.worker.Pulse", _Nothing):
            worker = Worker(app, once=True, install_signals=False, maintenance=False, relay=False)
            began = time.process_time()
            status = worker.run()
            spent_s = time.process_time() - began
        if status:
            raise RuntimeError(f"the worker ended with {status}")
    return spent_s / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--database", help="an empty one, instead of one on a server of its own")
    args = parser.parse_args()
    database = fresh_database("activity") if args.database is None else nullcontext(args.database)
    with database as url:
        with App(url) as app:
            app.init()
        cpu_us(url, "warm", args.messages // 10, counting=True)
        pairs: list[tuple[float, float]] = []
        for number in range(args.rounds):
            order = (False, True) if number % 2 == 0 else (True, False)
            spent = {on: cpu_us(url, f"{number}{on}", args.messages, counting=on) for on in order}
            pairs.append((spent[False], spent[True]))
            print(f"{spent[False]:.1f} us a message without, {spent[True]:.1f} with")
        without, with_it = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
        ratio = statistics.median(on / off for off, on in pairs)
        print(f"median: {without:.1f} us without, {with_it:.1f} with; ratio of pairs {ratio:.4f}")
        # what others do on the machine only adds
        least = [min(pair[side] for pair in pairs) for side in (0, 1)]
        print(f"least: {least[0]:.1f} us without, {least[1]:.1f} with")


if __name__ == "__main__":
    main()
