"""One app a kind of connection, and one message after the other through a handler that breaks its contract."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import secrets
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self

import pytest

from tests.support.connections import KINDS, Kind
from tests.support.contract.breaking import Hand, Misbehaviour
from tests.support.databases import Raw
from tests.support.leasing import Leasing
from tests.support.shop import AT_ONCE, Row, effects, the_row
from txbox import App, Message, Outcome
from txbox.handlers import Handler
from txbox.processing.intake import Mode
from txbox.session import drive, drive_async
from txbox.store import leases

_numbers = itertools.count(1)

# Ways to hand over a connection that is already met: these reach the same transaction by the same calls.
_AGAIN = frozenset({
    "psycopg-pool", "psycopg-async-pool", "psycopg-async-pool-autocommit", "asyncpg-pool",
    "engine-postgresql", "async-engine-psycopg", "async-sessionmaker-asyncpg",
    "engine-autocommit-mariadb", "async-engine-asyncmy",
    "engine-autocommit-sqlite", "async-sessionmaker-aiosqlite",
})  # fmt: skip
# SQLAlchemy and Django stand on the same drivers for MariaDB and MySQL: the drivers alone meet both.
by_kind = pytest.mark.parametrize(
    "bench",
    [
        pytest.param(kind, id=kind.name, marks=[pytest.mark.slow] if kind.name in _AGAIN else [])
        for kind in KINDS
        if kind.product != "mysql" or kind.family in ("pymysql", "asyncmy")
    ],
    indirect=True,
)


class Bench:
    """An app that was given its database in one way, in blocking calls."""

    def __init__(self, kind: Kind, url: str) -> None:
        self.kind = kind
        self.raw = Raw(url)
        self._source: Any = kind.source(url)
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        target = self._wait(
            self._source.__aenter__() if self.kind.is_async else self._source.__enter__()
        )
        self.app = App(django=target) if self.kind.family == "django" else App(target)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.kind.is_async:
            self._wait(self.app.close_async())
            self._wait(self._source.__aexit__(None, None, None))
        else:
            self.app.close()
            self._source.__exit__(None, None, None)
        self.raw.close()
        self._runner.close()

    def _wait(self, value: Any) -> Any:
        if not inspect.isawaitable(value):
            return value

        async def waited() -> Any:
            return await value

        return self._runner.run(waited())

    def drive(self, operation: Any, *args: Any, **kwargs: Any) -> Any:
        if self.kind.is_async:
            assert self.app.database.asynchronous is not None
            return self._wait(
                drive_async(self.app.database.asynchronous, operation, *args, **kwargs)
            )
        assert self.app.database.sync is not None
        return drive(self.app.database.sync, operation, *args, **kwargs)

    def process(self, message: Message[Any]) -> Outcome:
        verb = self.app.process_async if self.kind.is_async else self.app.process
        outcome: Outcome = self._wait(verb(message))
        return outcome

    def handler(
        self, function: Callable[[Message[Any], Any], Coroutine[Any, Any, None]], **options: Any
    ) -> Handler:
        """Register an async function, for sync kinds as the sync function that runs it."""
        consumer = f"consumer-{next(_numbers)}"

        def sync(message: Message[Any], tx: Any) -> None:
            try:
                function(message, tx).send(None)
            except StopIteration:
                return
            raise AssertionError("a sync driver waits for nothing")

        made = function if self.kind.is_async else sync
        register: Any = self.app.handler(consumer, consumer=consumer, retry=AT_ONCE, **options)
        register(made)
        return self.app.handlers.matching(consumer, None)[0]


class Trial:
    """One message, whose handler misbehaves once and behaves ever after."""

    def __init__(self, bench: Bench, misbehaviour: Misbehaviour, mode: str) -> None:
        self.bench = bench
        self.message_id = f"m{next(_numbers)}"
        self.neighbours = [f"{self.message_id}-{name}" for name in ("a", "b", "d", "e")]
        self._script = ["fail", "break"] if mode == "retried" else ["break"]
        self.in_batch = mode in ("batched", "grouped", "leased", "pipelined")
        self.runs = 0

        async def handle(message: Message[Any], tx: Any) -> None:
            hand = Hand(bench.kind, tx, str(message.id), puts_off=mode == "pipelined")
            if message.id != self.message_id:
                await hand.write()
                return
            self.runs += 1
            act = "behave"
            if self._script:
                # in a batch it may be run again before it is settled
                act = self._script[0] if self.in_batch else self._script.pop(0)
            if act == "fail":
                raise ValueError("an ordinary failure first")
            await (misbehaviour.run(hand) if act == "break" else hand.write())

        options: dict[str, Any] = {"mode": "stored"} if mode == "stored" else {}
        if mode == "pipelined":
            options["pipeline"] = True
        self.handler = bench.handler(handle, **options)
        self.message = self._message(self.message_id)
        if mode in ("grouped", "pipelined"):
            # failures have been frequent: messages run under savepoints from the first try on
            pace = bench.app.protocol.batch_sizes.of(self.handler)
            for _ in range(50):
                pace.failed(4)

    def _message(self, message_id: str) -> Message[Any]:
        return Message(id=message_id, topic=self.handler.topic, payload=b"{}")

    @property
    def batch(self) -> list[Message[Any]]:
        """The message in the middle of its neighbours."""
        first, second, *rest = [self._message(neighbour) for neighbour in self.neighbours]
        return [first, second, self.message, *rest]

    def deliver_batch(self) -> list[Outcome]:
        settled = self.bench.drive(self.bench.app.intake.take, self.handler, self.batch)
        return [answer.outcome for answer in settled]

    def work_batch(self) -> list[Outcome]:
        """Store the batch, lease it, and run it in one transaction."""
        bench = self.bench
        leasing = Leasing(bench.drive(bench.app.intake.take, self.handler, self.batch, Mode.LEASED))
        assert len(leasing.rows) == 5
        many = bench.app.protocol.run_leased_many
        return [
            answer.outcome
            for answer in bench.drive(many, self.handler, leasing.rows, leasing.token)
        ]

    def behave(self) -> None:
        """From now on the handler keeps its contract."""
        self._script.clear()

    def neighbour(self, message_id: str) -> tuple[str, int]:
        """The status of a neighbour, and how often its effect is there."""
        raw = self.bench.raw
        return the_row(raw, message_id, self.handler.consumer).status, effects(raw, message_id)

    def deliver(self) -> Outcome:
        return self.bench.process(self.message)

    def work(self) -> list[Outcome]:
        """Lease what is due of this consumer, and run it."""
        bench, token = self.bench, secrets.token_hex(16)
        outcomes = []
        for suspect in (False, True):
            leased = bench.drive(
                leases.lease,
                bench.app.store,
                self.handler.consumer,
                token=token,
                limit=10,
                lease=bench.app.lease,
                suspect=suspect,
            )
            outcomes += [
                bench.drive(bench.app.protocol.run_leased, self.handler, row, token).outcome
                for row in leased
            ]
        return outcomes

    def rescue(self) -> None:
        self.bench.drive(
            leases.rescue,
            self.bench.app.store,
            consumer=self.handler.consumer,
            max_starts=3,
            limit=10,
        )

    @property
    def effects(self) -> int:
        return effects(self.bench.raw, self.message_id)

    @property
    def row(self) -> Row:
        return the_row(self.bench.raw, self.message_id, self.handler.consumer)
