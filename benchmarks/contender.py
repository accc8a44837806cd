"""txbox itself: the worker that `txbox run` runs, fed from memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from benchmarks.place import Gauges, Place
from benchmarks.result import Round
from benchmarks.source import Memory, Stopwatch
from benchmarks.workload import CONSUMER, TOPIC, Tx, Work, verify
from txbox.app import App, Consumption
from txbox.events import Event, MessageProcessed
from txbox.policy import RetryPolicy
from txbox.worker import Worker

WAIT_S = 60.0

# what fails is not tried again within a round, whatever the jitter draws
_NOT_IN_THIS_ROUND = RetryPolicy(base=timedelta(days=3_650), cap=timedelta(days=3_650))


class Txbox:
    """One handler in an App of its own, run by a worker from memory.

    Args:
        handler: the function.
        rate: deliveries that become due in a second; None has all of them wait from the start.
        until_processed: time until the handlers are done, where the source's part is done before.
        to_commit: time each message to its commit, too, which an observer hears of.
        types: of the messages, in turn.
        wait_s: a round that is not done by then is stopped, and shows how far it came.
        options: of the handler.
    """

    def __init__(
        self,
        name: str,
        place: Place,
        gauges: Gauges,
        handler: Callable[..., Any],
        *,
        rate: float | None = None,
        until_processed: bool = False,
        to_commit: bool = False,
        types: Sequence[str | None] = (None,),
        wait_s: float = WAIT_S,
        **options: Any,
    ) -> None:
        self.name = name
        self.place = place
        self.gauges = gauges
        self._rate = rate
        self._until_processed = until_processed
        self._types = types
        self._wait_s = wait_s
        self._processed: Callable[[str], None] | None = None
        listening = until_processed or to_commit
        self.app = App(place.url, observers=[self._observe] if listening else [])
        register: Callable[[Any], Any] = self.app.handler(
            TOPIC, consumer=CONSUMER, retry=_NOT_IN_THIS_ROUND, **options
        )
        register(handler)

    def _observe(self, event: Event) -> None:
        if isinstance(event, MessageProcessed) and self._processed is not None:
            self._processed(str(event.message_id))

    def prepare(self) -> None:
        self.app.init()
        self.place.prepare()

    def round(self, work: Work) -> Round:
        self.prepare()
        watch = Stopwatch(self.gauges)
        source = Memory(work, watch, rate=self._rate, types=self._types)
        source.ends_elsewhere = self._until_processed
        if self.app.events.observers:
            self._processed = Processed(work, watch, source)
        failure = self._consume(source, watch)
        with self.place.connect() as admin:
            verified = verify(admin, work, self.off_by(admin, work))
        if watch.running:
            watch.stop()
            failure = failure or "ended before everything was done"
        return watch.round(
            self.name, verified, dead_tuples=self.place.dead_tuples(), failure=failure
        )

    def _consume(self, source: Memory, watch: Stopwatch) -> str | None:
        """Run a worker until it ends by itself; returns why it did not."""
        worker = Worker(
            self.app,
            once=True,
            install_signals=False,
            maintenance=False,
            relay=False,
            consumptions=[Consumption(source, None)],
        )
        ended: list[int] = []
        thread = threading.Thread(target=lambda: ended.append(worker.run()), name="bench-worker")
        thread.start()
        deadline = time.monotonic() + self._wait_s
        while thread.is_alive() and time.monotonic() < deadline:
            watch.done.wait(0.1)
            thread.join(0.1)
        failure = None
        if thread.is_alive():
            failure = f"not done after {self._wait_s:.0f} s"
            watch.stop()
            source.given_up = True
            worker.stop()
            thread.join(self._wait_s)
        if thread.is_alive():
            raise RuntimeError(f"The worker of {self.name} does not stop.")
        if ended != [0]:
            failure = f"the worker ended with status {ended}: {worker.failure}"
        return failure

    def off_by(self, connection: Tx, work: Work) -> int:
        """Rows of txbox's own that are not as they should be."""
        return inbox_off_by(connection, work)

    def close(self) -> None:
        self.app.close()


class Processed:
    """Notes when each message was committed and, where that is the end, stops the watch after the last.

    Args:
        source: knows when each was received; it fills as they come.
    """

    def __init__(self, work: Work, watch: Stopwatch, source: Memory) -> None:
        self._left = work.distinct - len(work.failing)
        self._watch = watch
        self._received: dict[str, float] = {}
        source.received = self._received
        self._ends = source.ends_elsewhere
        self._lock = threading.Lock()
        if self._ends:
            watch.deliveries = len(work.deliveries)

    def __call__(self, message_id: str) -> None:
        took_s = time.perf_counter() - self._received[message_id]
        with self._lock:
            (self._watch.took_s if self._ends else self._watch.committed_s).append(took_s)
            self._left -= 1
            last = self._left == 0
        if last and self._ends:
            self._watch.stop()


def inbox_off_by(connection: Tx, work: Work) -> int:
    """Rows that are not as they should be: processed, or failed once with the attempt recorded."""
    rows = connection.execute(
        "SELECT status, attempts, count(*), count(*) FILTER (WHERE message_id = ANY(%s)) "
        "FROM txbox_inbox GROUP BY status, attempts",
        (list(work.failing),),
    ).fetchall()
    processed = failed = others = 0
    for status, attempts, count, failing in rows:
        if status == "processed" and not failing:
            processed += count
        elif status == "failed" and attempts == 1 and count == failing:
            failed += count
        else:
            others += count
    return (
        abs(work.distinct - len(work.failing) - processed)
        + abs(len(work.failing) - failed)
        + others
    )
